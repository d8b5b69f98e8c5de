package broker

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"io"
	"math/big"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// authority signs certificates for a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(tb testing.TB) *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(tb, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	check(tb, err)
	cert, err := x509.ParseCertificate(der)
	check(tb, err)
	a := &authority{cert: cert, key: key, pool: x509.NewCertPool()}
	a.pool.AddCert(cert)
	return a
}

// issue signs a certificate for what tmpl says beside keys and dates.
func (a *authority) issue(tb testing.TB, tmpl x509.Certificate) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(tb, err)
	tmpl.SerialNumber, tmpl.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(time.Hour)
	tmpl.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, &tmpl, a.cert, key.Public(), a.key)
	check(tb, err)
	leaf, err := x509.ParseCertificate(der)
	check(tb, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func (a *authority) server(tb testing.TB) *tls.Config {
	cert := a.issue(tb, x509.Certificate{Subject: pkix.Name{CommonName: "server"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}})
	return &tls.Config{Certificates: []tls.Certificate{cert}, ClientCAs: a.pool}
}

func TestTLSOptional(t *testing.T) {
	ca := newAuthority(t)
	s := run(t, Options{TLS: ca.server(t), TLSOptions: TLSOptions{Optional: true, Timeout: patience}})
	r := rawDial(t, s)
	if strings.Contains(r.info, "tls_required") || !strings.Contains(r.info, `"tls_available":true`) {
		t.Errorf("INFO %s", r.info)
	}
	r.send(quiet + "SUB a 1\r\nPING\r\n")
	r.expect("PONG\r\n")
	nc := dial(t, s, nats.Secure(&tls.Config{RootCAs: ca.pool}))
	check(t, nc.Publish("a", []byte("x")))
	r.expect("MSG a 1 1\r\nx\r\n")
	if c := s.Conns(); len(c) != 2 || c[0].TLS || !c[1].TLS {
		t.Errorf("%+v", c)
	}
	// One octet at a time is a client as well.
	slow := rawDial(t, s)
	for _, b := range "PING\r\n" {
		slow.send(string(b))
	}
	slow.expect("PONG\r\n")
}

func TestTLSFirst(t *testing.T) {
	ca := newAuthority(t)
	secure := nats.Secure(&tls.Config{RootCAs: ca.pool})
	s := run(t, Options{TLS: ca.server(t), TLSOptions: TLSOptions{First: true}})
	check(t, dial(t, s, secure, nats.TLSHandshakeFirst()).Flush())
	conn, err := net.Dial("tcp", s.Addr().String())
	check(t, err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, err = io.WriteString(conn, "PING\r\n")
	check(t, err)
	if got, _ := io.ReadAll(conn); strings.Contains(string(got), "INFO") || strings.Contains(string(got), "PONG") {
		t.Errorf("in clear: %q", got)
	}

	// With a fallback both kinds of clients are served.
	opts := Options{TLS: ca.server(t), TLSOptions: TLSOptions{First: true, Fallback: patience}}
	s = run(t, opts)
	check(t, dial(t, s, secure, nats.TLSHandshakeFirst()).Flush())
	opts.TLSOptions.Fallback = 20 * time.Millisecond
	check(t, s.Reload(opts))
	check(t, dial(t, s, secure).Flush())
	r := rawDial(t, s)
	if !strings.Contains(r.info, `"tls_required":true`) {
		t.Errorf("INFO %s", r.info)
	}
}

func TestTLSPinned(t *testing.T) {
	ca := newAuthority(t)
	known, other := ca.issue(t, x509.Certificate{}), ca.issue(t, x509.Certificate{})
	sum := sha256.Sum256(known.Leaf.RawSubjectPublicKeyInfo)
	cfg := ca.server(t)
	cfg.ClientAuth = tls.RequireAndVerifyClientCert
	s := run(t, Options{TLS: cfg, TLSOptions: TLSOptions{Pinned: map[string]bool{hex.EncodeToString(sum[:]): true}}})
	check(t, dial(t, s, nats.Secure(&tls.Config{RootCAs: ca.pool, Certificates: []tls.Certificate{known}})).Flush())
	for name, c := range map[string]*tls.Config{
		"other": {RootCAs: ca.pool, Certificates: []tls.Certificate{other}},
		"none":  {RootCAs: ca.pool},
	} {
		if nc, err := nats.Connect(s.ClientURL(), nats.Secure(c)); err == nil {
			nc.Close()
			t.Errorf("%s certificate is accepted", name)
		}
	}
}

func TestTLSHandshakeTimeoutAndRate(t *testing.T) {
	ca := newAuthority(t)
	s := run(t, Options{TLS: ca.server(t), TLSOptions: TLSOptions{Timeout: 30 * time.Millisecond, RateLimit: 2}})
	for range 2 {
		r := rawDial(t, s)
		if rest, err := io.ReadAll(r.r); err != nil || len(rest) > 0 {
			t.Errorf("silent client: %q, %v", rest, err)
		}
	}
	s = run(t, Options{TLS: ca.server(t), TLSOptions: TLSOptions{RateLimit: 2}})
	end := time.Now().Add(patience)
	for { // three within one second, sooner or later
		rs := []*raw{rawDial(t, s), rawDial(t, s), rawDial(t, s), rawDial(t, s)}
		_ = rs[3].conn.SetReadDeadline(time.Now().Add(time.Second))
		line, _ := rs[3].r.ReadString('\n')
		if line == "-ERR 'Connection throttling is active. Please try again later.'\r\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("got %q", line)
		}
	}
}

func TestTLSMapUsers(t *testing.T) {
	ca := newAuthority(t)
	cfg := ca.server(t)
	cfg.ClientAuth = tls.RequireAndVerifyClientCert
	only := func(subject string) *Permissions {
		return &Permissions{Publish: SubjectPermission{Allow: []string{subject}}}
	}
	s := run(t, Options{
		TLS: cfg, TLSOptions: TLSOptions{MapUsers: true},
		Users: []User{
			{Name: "ada@plant.example", Permissions: only("mail")},
			{Name: "press-7.plant.example"},
			{Name: "spiffe://plant/oven"},
			{Name: "CN=till, O=Shop, C=DE"},
			{Name: "C=DE,OU=b,O=Bank,CN=any order"},
			{Name: "secret", Password: "pw"},
		},
	})
	uri, err := url.Parse("spiffe://plant/oven")
	check(t, err)
	for want, tmpl := range map[string]x509.Certificate{
		"ada@plant.example":             {EmailAddresses: []string{"x@y.example", "ada@plant.example"}, DNSNames: []string{"press-7.plant.example"}},
		"press-7.plant.example":         {DNSNames: []string{"press-7.plant.example"}},
		"spiffe://plant/oven":           {URIs: []*url.URL{uri}},
		"CN=till, O=Shop, C=DE":         {Subject: pkix.Name{CommonName: "till", Organization: []string{"Shop"}, Country: []string{"DE"}}},
		"C=DE,OU=b,O=Bank,CN=any order": {Subject: pkix.Name{CommonName: "any order", Organization: []string{"Bank"}, OrganizationalUnit: []string{"b"}, Country: []string{"DE"}}},
	} {
		nc := dial(t, s, nats.Secure(&tls.Config{RootCAs: ca.pool, Certificates: []tls.Certificate{ca.issue(t, tmpl)}}))
		check(t, nc.Flush())
		if !slices.ContainsFunc(s.Conns(), func(c ConnInfo) bool { return c.User == want }) {
			t.Errorf("no client is %q", want)
		}
		nc.Close()
	}
	for name, tmpl := range map[string]x509.Certificate{
		"unknown":          {Subject: pkix.Name{CommonName: "till"}},
		"password missing": {DNSNames: []string{"secret"}},
		"nothing":          {},
	} {
		nc, err := nats.Connect(s.ClientURL(), nats.Secure(&tls.Config{RootCAs: ca.pool, Certificates: []tls.Certificate{ca.issue(t, tmpl)}}))
		if err == nil {
			nc.Close()
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestDistinguishedNames(t *testing.T) {
	for s, want := range map[string][]string{
		"CN=a,O=b":            {"cn=a", "o=b"},
		" cn = a b , O = b ":  {"cn=a b", "o=b"},
		`CN=a\,b\20,O=\23x`:   {"cn=a,b ", "o=#x"},
		"CN=a+UID=7,DC=x":     {"cn=a+uid=7", "dc=x"},
		"UID=7+CN=a;DC=x":     {"cn=a+uid=7", "dc=x"},
		"CN=a=b":              {"cn=a=b"},
		"CN=":                 {"cn="},
		"ada":                 nil,
		"a,b=c":               nil,
		"=x":                  nil,
		`CN=a\`:               nil,
		"CN=a,":               nil,
		"":                    nil,
		"ada@plant.example":   nil,
		"spiffe://plant/oven": nil,
	} {
		got, ok := parseDN(s)
		if ok != (want != nil) || !slices.Equal(got, dn(want)) {
			t.Errorf("%q: %q, %t; want %q", s, got, ok, want)
		}
	}
	raw, err := asn1.Marshal(pkix.RDNSequence{
		{{Type: asn1.ObjectIdentifier{0, 9, 2342, 19200300, 100, 1, 25}, Value: "example"}},
		{{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "x"}, {Type: asn1.ObjectIdentifier{1, 2, 3}, Value: "y"}},
	})
	check(t, err)
	if got, ok := dnOf(raw); !ok || !slices.Equal(got, dn{"1.2.3=y+cn=x", "dc=example"}) {
		t.Errorf("%q, %t", got, ok)
	}
	if _, ok := dnOf([]byte("x")); ok {
		t.Error("no sequence is accepted")
	}
}

func FuzzDN(f *testing.F) {
	f.Add(`CN=a\,b+UID=\41,O=x`)
	f.Add("=,+;\\")
	f.Fuzz(func(t *testing.T, s string) {
		name, ok := parseDN(s)
		if ok != (len(name) > 0) {
			t.Errorf("%q: %q, %t", s, name, ok)
		}
	})
}

func TestInProcess(t *testing.T) {
	ca := newAuthority(t)
	s := run(t, Options{
		TLS:   ca.server(t),
		Users: []User{{Name: "net", Password: "n", ConnTypes: []string{ConnStandard}}, {Name: "in", Password: "i", ConnTypes: []string{ConnInProcess}}},
	})
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.UserInfo("in", "i"), nats.Timeout(patience))
	check(t, err)
	defer nc.Close()
	sub := subscribe(t, nc, "a")
	for range 100 {
		check(t, nc.Publish("a", make([]byte, 10000)))
	}
	for range 100 {
		if m := next(t, sub); len(m.Data) != 10000 {
			t.Fatalf("%d octets", len(m.Data))
		}
	}
	if _, err := nats.Connect("", nats.InProcessServer(s), nats.UserInfo("net", "n"), nats.Timeout(patience)); err == nil || !strings.Contains(err.Error(), "Authorization Violation") {
		t.Errorf("user of the network in process: %v", err)
	}
	if _, err := nats.Connect(s.ClientURL(), nats.Secure(&tls.Config{RootCAs: ca.pool}), nats.UserInfo("in", "i"), nats.Timeout(patience)); err == nil || !strings.Contains(err.Error(), "Authorization Violation") {
		t.Errorf("user in process from the network: %v", err)
	}
	conn, err := s.InProcessConn()
	check(t, err)
	defer conn.Close()
	line, err := bufio.NewReader(conn).ReadString('\n')
	check(t, err)
	if strings.Contains(line, "tls_") || !strings.Contains(line, `"auth_required":true`) {
		t.Errorf("INFO %s", line)
	}
}
