package link

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"

	"github.com/nats-io/nkeys"
	"golang.org/x/crypto/bcrypt"

	"petiole/sync/frame"
)

func loopback() []net.IP { return []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback} }

// credentials are an edge's, ready to sign.
type credentials struct {
	device   nkeys.KeyPair
	deviceID string
	auth     Auth
	nkey     nkeys.KeyPair // nil without NKeyFile
	nkeyID   string
}

func loadCredentials(device nkeys.KeyPair, a Auth) (*credentials, error) {
	id, err := device.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("device key: %w", err)
	}
	c := &credentials{device: device, deviceID: id, auth: a}
	if a.NKeyFile == "" {
		return c, nil
	}
	if a.User != "" {
		return nil, errors.New("auth: both a user and an nkey file are set; keep one")
	}
	b, err := os.ReadFile(a.NKeyFile)
	if err != nil {
		return nil, fmt.Errorf("auth: read nkey file: %w", err)
	}
	defer clear(b)
	if c.nkey, err = nkeys.ParseDecoratedUserNKey(b); err == nil {
		c.nkeyID, err = c.nkey.PublicKey()
	}
	if err != nil {
		return nil, fmt.Errorf("auth: %s holds no user nkey seed (SU…): %w", a.NKeyFile, err)
	}
	return c, nil
}

// hello signs a hello for the connection with that exported secret.
func (c *credentials) hello(h frame.Hello, exporter []byte) (frame.Hello, error) {
	h.EdgeID = c.deviceID
	switch {
	case c.nkey != nil:
		h.Auth, h.NKey = frame.AuthNKey, c.nkeyID
	case c.auth.User != "":
		h.Auth, h.User, h.Password = frame.AuthPassword, c.auth.User, c.auth.Password
	}
	in := frame.SigningInput(exporter, h.AppendSigned(nil))
	var err error
	if h.DeviceSig, err = c.device.Sign(in); err != nil {
		return h, fmt.Errorf("sign with the device key: %w", err)
	}
	if c.nkey != nil {
		if h.NKeySig, err = c.nkey.Sign(in); err != nil {
			return h, fmt.Errorf("sign with the nkey: %w", err)
		}
	}
	return h, nil
}

// verifier checks hellos against a hub's users and nkeys.
type verifier struct {
	users map[string]User
	nkeys map[string]NKey

	// bcrypt takes a tenth of a second by design. What it has accepted is
	// remembered, under a key that never leaves the process, so that edges
	// that reconnect all at once are not delayed by it.
	key [32]byte
	mu  sync.Mutex
	ok  map[[32]byte]struct{}
}

func newVerifier(c *HubConfig) (*verifier, error) {
	v := &verifier{users: map[string]User{}, nkeys: map[string]NKey{}, ok: map[[32]byte]struct{}{}}
	rand.Read(v.key[:])
	for _, u := range c.Users {
		if u.Name == "" || u.Password == "" {
			return nil, fmt.Errorf("link user %q: name and password must not be empty", u.Name)
		}
		if _, dup := v.users[u.Name]; dup {
			return nil, fmt.Errorf("link user %q is listed twice", u.Name)
		}
		v.users[u.Name] = u
	}
	for _, k := range c.NKeys {
		if !nkeys.IsValidPublicUserKey(k.Public) {
			return nil, fmt.Errorf("link nkey %q is not a public user nkey (U…)", k.Public)
		}
		v.nkeys[k.Public] = k
	}
	return v, nil
}

// Texts of refusals. They do not tell a stranger which part was wrong; the
// hub's log does.
const (
	refusedPassword = "the hub does not accept this user and password: check user and password of the link, and the users of the hub"
	refusedNKey     = "the hub does not accept this nkey: add its public key to the hub's nkeys"
)

// verify returns who the edge is. The second result is for the hub's log.
func (v *verifier) verify(h *frame.Hello, exporter []byte) (*Identity, *frame.Error, string) {
	refuse := func(text, why string) (*Identity, *frame.Error, string) {
		return nil, &frame.Error{Code: frame.CodeAuth, Text: text}, why
	}
	in := frame.SigningInput(exporter, h.Signed)
	if !nkeys.IsValidPublicUserKey(h.EdgeID) || !signed(h.EdgeID, in, h.DeviceSig) {
		return refuse("the device key's proof does not hold", "device key proof does not hold")
	}
	id := &Identity{EdgeID: h.EdgeID, Name: h.Name}
	switch h.Auth {
	case frame.AuthPassword:
		u, ok := v.users[h.User]
		if !v.password(u.Password, h.User, h.Password) || !ok {
			if !ok {
				return refuse(refusedPassword, fmt.Sprintf("unknown user %q", h.User))
			}
			return refuse(refusedPassword, fmt.Sprintf("wrong password of user %q", h.User))
		}
		id.User, id.Streams = u.Name, u.Streams
	case frame.AuthNKey:
		k, ok := v.nkeys[h.NKey]
		if !ok || !signed(h.NKey, in, h.NKeySig) {
			return refuse(refusedNKey+": "+h.NKey, fmt.Sprintf("unknown or unproven nkey %q", h.NKey))
		}
		id.User, id.Streams = k.Public, k.Streams
	case frame.AuthDevice:
		k, ok := v.nkeys[h.EdgeID]
		if !ok {
			return refuse("the hub asks for credentials: set user and password of the link, or add the edge's device key to the hub's nkeys: "+h.EdgeID,
				"no credentials, and device key not listed")
		}
		id.User, id.Streams = k.Public, k.Streams
	default:
		return refuse("this hub does not know this kind of credentials", fmt.Sprintf("auth kind %d", h.Auth))
	}
	return id, nil, ""
}

func signed(public string, in, sig []byte) bool {
	kp, err := nkeys.FromPublicKey(public)
	return err == nil && kp.Verify(in, sig) == nil
}

// absent is compared with when the user is unknown, so that both cases take
// alike.
const absent = "\x00no such user"

func (v *verifier) password(want, user, got string) bool {
	if want == "" {
		want = absent
	}
	if !isBcrypt(want) {
		a, b := sha256.Sum256([]byte(want)), sha256.Sum256([]byte(got))
		return subtle.ConstantTimeCompare(a[:], b[:]) == 1
	}
	mac := hmac.New(sha256.New, v.key[:])
	fmt.Fprintf(mac, "%d %s %d %s %s", len(user), user, len(got), got, want)
	key := [32]byte(mac.Sum(nil))
	v.mu.Lock()
	_, ok := v.ok[key]
	v.mu.Unlock()
	if ok {
		return true
	}
	if bcrypt.CompareHashAndPassword([]byte(want), []byte(got)) != nil {
		return false
	}
	v.mu.Lock()
	v.ok[key] = struct{}{}
	v.mu.Unlock()
	return true
}

func isBcrypt(s string) bool {
	return len(s) == 60 && (strings.HasPrefix(s, "$2a$") || strings.HasPrefix(s, "$2b$") || strings.HasPrefix(s, "$2y$"))
}
