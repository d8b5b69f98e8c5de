package broker

import (
	"crypto/subtle"
	"encoding/base64"
	"fmt"
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
}

func newAuth(o *Options) (*auth, error) {
	a := &auth{users: make(map[string]*User), nkeys: make(map[string]*User), token: o.AuthToken}
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
	}
	if o.NoAuthUser != "" {
		if a.noAuth = a.users[o.NoAuthUser]; a.noAuth == nil {
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

// check returns the user that the credentials of CONNECT are valid for; nil
// if anyone is permitted or the token was right.
func (a *auth) check(arg *connectArg, nonce string) (*User, bool) {
	switch {
	case !a.on():
		return nil, true
	case arg.NKey != "":
		u := a.nkeys[arg.NKey]
		if u == nil {
			return nil, false
		}
		sig, err := base64.RawURLEncoding.DecodeString(arg.Sig)
		if err != nil {
			if sig, err = base64.StdEncoding.DecodeString(arg.Sig); err != nil {
				return nil, false
			}
		}
		pub, err := nkeys.FromPublicKey(arg.NKey)
		if err != nil || pub.Verify([]byte(nonce), sig) != nil {
			return nil, false
		}
		return u, true
	case arg.User != "":
		u := a.users[arg.User]
		return u, u != nil && secretIs(u.Password, arg.Pass)
	case arg.Token != "" && a.token != "":
		return nil, secretIs(a.token, arg.Token)
	case a.noAuth != nil && arg.Token == "" && arg.JWT == "":
		return a.noAuth, true
	}
	return nil, false
}

// secretIs compares got with a configured secret, plain or bcrypt.
func secretIs(want, got string) bool {
	if len(want) == 60 && strings.HasPrefix(want, "$2") {
		return bcrypt.CompareHashAndPassword([]byte(want), []byte(got)) == nil
	}
	return subtle.ConstantTimeCompare([]byte(want), []byte(got)) == 1
}
