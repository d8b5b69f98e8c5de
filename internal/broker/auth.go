package broker

import (
	"crypto/subtle"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nkeys"
	"golang.org/x/crypto/bcrypt"

	"petiole/internal/subject"
)

// auth knows who may connect.
type auth struct {
	users  map[string]*User // by name
	nkeys  map[string]*User // by public key
	token  string
	noAuth *User
	// mapUsers: users are found by what their certificates say.
	mapUsers bool
	dns      map[*User]dn // user names that are distinguished names
}

func newAuth(o *Options) (*auth, error) {
	a := &auth{users: make(map[string]*User), nkeys: make(map[string]*User), dns: make(map[*User]dn), token: o.AuthToken}
	for i := range o.Users {
		u := &o.Users[i]
		if err := u.Permissions.check(); err != nil {
			return nil, fmt.Errorf("user %q: %w", u.Name+u.NKey, err)
		}
		by, key := a.users, u.Name
		if u.NKey != "" {
			if !nkeys.IsValidPublicUserKey(u.NKey) {
				return nil, fmt.Errorf("user with nkey %q: not a public user nkey; it starts with U and is shown by \"nk -pubout\"", u.NKey)
			}
			by, key = a.nkeys, u.NKey
		}
		if key == "" {
			return nil, fmt.Errorf("user number %d has neither a name nor an nkey", i+1)
		}
		if by[key] != nil {
			return nil, fmt.Errorf("user %q is defined twice", key)
		}
		by[key] = u
		if name, ok := parseDN(u.Name); ok {
			a.dns[u] = name
		}
	}
	a.mapUsers = o.TLS != nil && o.TLSOptions.MapUsers
	if o.NoAuthUser != "" {
		a.noAuth = a.users[o.NoAuthUser]
		if a.noAuth == nil {
			a.noAuth = a.nkeys[o.NoAuthUser]
		}
		if a.noAuth == nil {
			return nil, fmt.Errorf("no_auth_user %q is not one of the users", o.NoAuthUser)
		}
	}
	return a, nil
}

func (p *Permissions) check() error {
	if p == nil {
		return nil
	}
	for _, l := range [][]string{p.Publish.Allow, p.Publish.Deny} {
		for _, s := range l {
			if !subject.Valid(s) {
				return fmt.Errorf("permission to publish to %q: %w", s, subject.ErrInvalid)
			}
		}
	}
	for _, l := range [][]string{p.Subscribe.Allow, p.Subscribe.Deny} {
		for _, s := range l {
			subj, _, _ := strings.Cut(s, " ")
			if !subject.Valid(subj) {
				return fmt.Errorf("permission to subscribe to %q: %w", s, subject.ErrInvalid)
			}
		}
	}
	return nil
}

// required reports whether clients have to present credentials. With a user
// for those that have none, they still have to send CONNECT before all else.
func (a *auth) required() bool {
	return a.token != "" || len(a.users)+len(a.nkeys) > 0 && a.noAuth == nil
}

// on reports whether credentials are looked at at all.
func (a *auth) on() bool { return a.token != "" || len(a.users)+len(a.nkeys) > 0 }

// identity is what a client is known by.
type identity struct {
	arg    *connectArg // of CONNECT
	nonce  string      // of INFO
	cert   *x509.Certificate
	kind   string // ConnStandard or ConnInProcess
	proved proof
}

// proof is a configured secret and what a client had that was found to be the
// same.
type proof struct{ secret, got string }

// knows reports whether got is the configured secret. What has been found out
// is not found out again: hashes are made to cost time, and a reload asks for
// all clients.
func (id *identity) knows(secret, got string) bool {
	now := proof{secret, got}
	if secret != "" && id.proved == now {
		return true
	}
	if !secretIs(secret, got) {
		return false
	}
	id.proved = now
	return true
}

// has reports whether the client's user is still there.
func (a *auth) has(id *identity) bool {
	switch {
	case id.arg.NKey != "":
		return a.nkeys[id.arg.NKey] != nil
	case id.arg.User != "":
		return a.users[id.arg.User] != nil
	}
	return true
}

// check returns the user that the credentials are valid for; nil if anyone is
// permitted or the token was right.
func (a *auth) check(id *identity) (*User, bool) {
	arg := id.arg
	var u *User
	bare := arg.User == "" && arg.Pass == "" && arg.Token == "" && arg.NKey == ""
	switch {
	case !a.on():
		return nil, true
	case arg.NKey != "" && len(a.nkeys) > 0:
		u = a.nkeys[arg.NKey]
		return u, u != nil && u.permits(id.kind) && (u == a.noAuth || signed(arg, id.nonce))
	case bare && a.noAuth != nil && a.noAuth.NKey != "":
		return a.noAuth, a.noAuth.permits(id.kind)
	case a.mapUsers && len(a.users) > 0:
		u = a.byCert(id)
		return u, u != nil && (u.Password == "" && arg.Pass == "" || id.knows(u.Password, arg.Pass))
	case bare && a.noAuth != nil:
		return a.noAuth, a.noAuth.permits(id.kind)
	case arg.User != "":
		u = a.users[arg.User]
		if u == nil || !u.permits(id.kind) || u.Password == "" && u != a.noAuth {
			return u, false
		}
		return u, id.knows(u.Password, arg.Pass)
	case a.token != "":
		return nil, id.knows(a.token, arg.Token)
	}
	return nil, false
}

// permits reports whether the user may connect that way.
func (u *User) permits(kind string) bool {
	return len(u.ConnTypes) == 0 || slices.Contains(u.ConnTypes, kind)
}

// signed reports whether CONNECT has the nonce signed by the nkey that it
// names.
func signed(arg *connectArg, nonce string) bool {
	sig, err := base64.RawURLEncoding.DecodeString(arg.Sig)
	if err != nil {
		if sig, err = base64.StdEncoding.DecodeString(arg.Sig); err != nil {
			return false
		}
	}
	pub, err := nkeys.FromPublicKey(arg.NKey)
	return err == nil && pub.Verify([]byte(nonce), sig) == nil
}

// byCert finds the user that the client's certificate names: by e-mail
// addresses, DNS names, URIs and the subject, in this order, as nats-server.
func (a *auth) byCert(id *identity) *User {
	if id.cert == nil {
		return nil
	}
	named := func(name string) *User {
		if u := a.users[name]; name != "" && u != nil && u.permits(id.kind) {
			return u
		}
		return nil
	}
	names := slices.Concat(id.cert.EmailAddresses, id.cert.DNSNames)
	for _, u := range id.cert.URIs {
		names = append(names, u.String())
	}
	for _, name := range names {
		if u := named(name); u != nil {
			return u
		}
	}
	if subj, ok := dnOf(id.cert.RawSubject); ok {
		for _, same := range []func(dn, dn) bool{dn.equal, dn.sameParts} {
			for u, name := range a.dns {
				if u.permits(id.kind) && same(name, subj) {
					return u
				}
			}
		}
	}
	return named(id.cert.Subject.ToRDNSequence().String())
}

// compareHash is [bcrypt.CompareHashAndPassword], but for a test that counts.
var compareHash = bcrypt.CompareHashAndPassword

// secretIs compares got with a configured secret, plain or bcrypt.
func secretIs(want, got string) bool {
	if len(want) == 60 && strings.HasPrefix(want, "$2") {
		return compareHash([]byte(want), []byte(got)) == nil
	}
	return subtle.ConstantTimeCompare([]byte(want), []byte(got)) == 1
}
