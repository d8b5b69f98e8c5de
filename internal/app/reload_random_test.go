//go:build !windows

package app

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"
)

var (
	reloads    = flag.Int("reloads", 15, "random reloads of TestReloadIsARestart")
	reloadSeed = flag.Uint64("reloadseed", 1, "of the random reloads")
)

// choices are the values that a random configuration has of each setting that a
// reload applies and that clients can notice; an empty one leaves it out.
var choices = [][]string{
	{"", "", "max_payload: 100", "max_payload: 150"},
	{"", "", "max_control_line: 256"},
	{"", "", "", "", "", "", "", "", "", "max_connections: 0"},
	{"", "max_subscriptions: 6", "max_subscriptions: 1000"},
	{"", "max_sub_tokens: 3", "max_sub_tokens: 4"},
	{"", "", "no_header_support: true"},
	{"", "no_fast_producer_stall: true"},
	{"", "", "proxy_protocol: true"},
	{"", "max_pending: 2M"},
	{"", "client_advertise: \"h:7\"", "client_advertise: \"i:8\""},
	{
		"", "mappings { a: b }", "mappings { a: c, b: c }", "mappings { \"m.*\": \"a.$1\", b: [ { destination: b, weight: 0 } ] }",
		"mappings { a: [ { destination: c, weight: 100 } ] }", "mappings { \"*\": \"m.{{wildcard(1)}}\" }",
	},
	{
		"", "", "authorization { token: tok }", "authorization { user: ada, password: a }", "authorization { user: ada, password: other }",
		"authorization { users: [ { user: ada, password: a, ADA }, { user: bob, password: b, BOB } ] }\nGUEST",
		"authorization { users: [ { user: ada, password: a, ADA }, { nkey: NKEY, BOB }, { user: bob, password: b } ] }\nGUEST",
		"authorization { default_permissions { PERMS }, users: [ { user: bob, password: b }, { user: ada, password: \"" + adasHash + "\" } ] }\nGUEST",
		"authorization { users: [ { user: ada, password: a, allowed_connection_types: [ websocket ] }, { user: bob, password: b } ] }",
	},
	{
		"", "", "", "", "tls { CERT }", "tls { CERT, min_version: \"1.3\" }", "tls { CERT }\nallow_non_tls: true", "tls { CERT, handshake_first: true }",
		"tls { CERT, handshake_first: 30s }", "tls { CERT, ca_file: CA, verify: true }", "tls { CERT, ca_file: CA, verify_and_map: true }",
		"tls { CERT, ca_file: CA, verify: true, pinned_certs: [ \"" + strings.Repeat("0", 64) + "\" ] }",
	},
}

// adasHash is a bcrypt hash of "a".
const adasHash = "$2a$04$PVDzvW/2kuqhNm3wfHLxMuAiIkMjWhGQ0kg0bR1QZcoA5vCoGBrKO"

var permissionChoices = []string{
	"", "", "permissions { PERMS }", "permissions: { publish: a }", "permissions: { subscribe: \"a.>\" }", "permissions { publish { deny: b }, subscribe { deny: [\"a.b\", c] } }",
	"permissions { subscribe: [ a, \"q.x one\" ], allow_responses: true }",
}

// certificates are what random configurations choose from.
type certificates struct {
	pairs []string // as settings
	ca    string
	roots *x509.CertPool
	own   tls.Certificate // a client's
}

func newCertificates(t *testing.T) *certificates {
	c := &certificates{roots: x509.NewCertPool()}
	for i := range 2 {
		cert, key, pool := keyPair(t)
		c.pairs = append(c.pairs, fmt.Sprintf("cert_file: %q, key_file: %q", cert, key))
		if i == 0 {
			pair, err := tls.LoadX509KeyPair(cert, key)
			if err != nil {
				t.Fatal(err)
			}
			c.ca, c.own, c.roots = fmt.Sprintf("%q", cert), pair, pool
		}
	}
	return c
}

// configuration returns a random one, and whether it has TLS.
func (c *certificates) configuration(r *rand.Rand) (text string, withTLS bool) {
	one := func(list []string) string { return list[r.IntN(len(list))] }
	for _, list := range choices {
		text += one(list) + "\n"
	}
	for _, who := range []string{"ADA", "BOB"} {
		text = strings.ReplaceAll(text, who, one(permissionChoices))
	}
	text = strings.ReplaceAll(text, "PERMS", one([]string{"publish: [a, \"m.>\"]", "subscribe { allow: [\">\"], deny: b }", "publish: \"*\", subscribe: [a, b, c]"}))
	text = strings.ReplaceAll(text, "GUEST", one([]string{"", "", "no_auth_user: bob"}))
	text = strings.ReplaceAll(text, "CERT", one(c.pairs))
	text = strings.ReplaceAll(text, "CA", c.ca)
	_, public := wireKey()
	return strings.ReplaceAll(text, "NKEY", public), strings.Contains(text, "tls {")
}

// logins are the clients that try each configuration.
var logins = []string{
	`{"verbose":true,"headers":true}`,
	`{"verbose":false,"pedantic":true,"user":"ada","pass":"a","protocol":1}`,
	`{"verbose":false,"pedantic":false,"headers":true,"no_responders":true,"user":"bob","pass":"b"}`,
	`{"verbose":false,"auth_token":"tok"}`,
	`{"verbose":false,"nkey":"NKEY","sig":"SIGNATURE"}`,
	"", // none
}

// before is what a client does while the first configuration is in force, and
// the scripts are what it does afterwards.
const before = "SUB a 1\r\nSUB b 2\r\nSUB m.> 3\r\nSUB q.x one 4\r\nSUB q.x two 5\r\n"

var scripts = []struct{ name, text string }{
	{"publishing", "PUB a 1\r\nx\r\nPUB b 1\r\nx\r\nPUB c 1\r\nx\r\nPUB m.x 1\r\nx\r\nPUB a.b 0\r\n\r\nPUB none r 0\r\n\r\n"},
	{"subscribing", "SUB a 6\r\nSUB c 7\r\nSUB a.> 8\r\nSUB a.b.c.d 9\r\nSUB m.1.2 10\r\nSUB q.x one 11\r\nSUB q.x 12\r\nPUB c 0\r\n\r\nPUB a 0\r\n\r\nUNSUB 6\r\n"},
	{"publishing much", "PUB a 120\r\n" + strings.Repeat("x", 120) + "\r\n"},
	{"a long line", "SUB " + strings.Repeat("x", 400) + " 20\r\n"},
	{"headers", "HPUB a 12 13\r\nNATS/1.0\r\n\r\nx\r\n"},
}

// guest is a client of a random configuration.
type guest struct {
	conn net.Conn
	r    *bufio.Reader
	gone bool
	seen string // what it was shown up to CONNECT
}

// enter connects as login to addr; secure says to use TLS, first to begin with it.
func enter(t *testing.T, addr, login string, certs *certificates, first, secure bool) *guest {
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	g := &guest{conn: nc, r: bufio.NewReader(nc)}
	start := func() {
		tc := tls.Client(nc, &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{certs.own}, MaxVersion: tls.VersionTLS12 + uint16(len(login)%2)})
		if err := tc.Handshake(); err != nil {
			g.seen += "no TLS\n"
			g.gone = true
			return
		}
		g.seen += fmt.Sprintf("TLS with %x\n", tc.ConnectionState().PeerCertificates[0].PublicKey)
		g.conn, g.r = tc, bufio.NewReader(tc)
	}
	if first {
		start()
	}
	if g.gone {
		return g
	}
	line, err := g.r.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "INFO ") {
		g.seen, g.gone = g.seen+line+"closed\n", true
		return g
	}
	var info struct {
		Nonce string `json:"nonce"`
	}
	if err := json.Unmarshal([]byte(line[5:]), &info); err != nil {
		t.Fatal(err)
	}
	g.seen += steady(t, line) + "\n"
	if !first && secure {
		start()
	}
	if login != "" && !g.gone {
		kp, public := wireKey()
		sig, err := kp.Sign([]byte(info.Nonce))
		if err != nil {
			t.Fatal(err)
		}
		login = strings.ReplaceAll(strings.ReplaceAll(login, "NKEY", public), "SIGNATURE", base64.RawURLEncoding.EncodeToString(sig))
		_, _ = io.WriteString(g.conn, "CONNECT "+login+"\r\n")
	}
	return g
}

// say sends text and returns what comes up to the PONG for a PING behind it.
func (g *guest) say(t *testing.T, text string) string {
	var out strings.Builder
	if !g.gone {
		_, _ = io.WriteString(g.conn, text+"PING\r\n")
	}
	for !g.gone {
		line, err := g.r.ReadString('\n')
		g.gone = err != nil
		if strings.HasPrefix(line, "INFO ") && !g.gone {
			line = "INFO " + steady(t, line) + "\n"
		}
		out.WriteString(line)
		if line == "PONG\r\n" {
			return out.String()
		}
	}
	return out.String() + "closed\n"
}

// TestReloadIsARestart: after a reload clients that come see what they see of a
// server that was started with the configuration, and those that were there
// before may do the same, and no more, as if they came now.
func TestReloadIsARestart(t *testing.T) {
	certs := newCertificates(t)
	for i := range *reloads {
		r := rand.New(rand.NewPCG(*reloadSeed, uint64(i)))
		was, wasTLS := certs.configuration(r)
		is, isTLS := certs.configuration(r)
		if ok := t.Run(fmt.Sprint(i), func(t *testing.T) {
			reloadAs(t, certs, was, is, wasTLS, isTLS)
		}); !ok {
			t.Fatalf("with -reloadseed %d; from\n%s\nto\n%s", *reloadSeed, was, is)
		}
	}
}

func reloadAs(t *testing.T, certs *certificates, was, is string, wasTLS, isTLS bool) {
	was, is = head+"server_name: s\n"+was, head+"server_name: s\n"+is
	n, load, _ := startNode(t, was)
	next, err := load(is)
	if err != nil {
		t.Fatal(err)
	}
	first := func(conf string) bool { return strings.Contains(conf, "handshake_first") }
	var there []*guest
	for _, login := range logins {
		for range scripts {
			g := enter(t, n.Broker.Addr().String(), login, certs, first(was), wasTLS)
			g.say(t, before)
			there = append(there, g)
		}
	}
	if _, err := n.Reload(next); err != nil {
		t.Fatal(err)
	}
	fresh := startBroker(t, is)
	has := func(conf, key string) bool { return strings.Contains(conf, key) }
	// What counts for new clients only, and certificates that nobody asked for.
	stays := has(was, "no_header_support") == has(is, "no_header_support") && (!has(is, "verify_and_map") || has(was, "verify")) && !has(is, "pinned_certs")
	for i, login := range logins {
		for j, script := range scripts {
			want, got := enter(t, fresh, login, certs, first(is), isTLS), enter(t, n.Broker.Addr().String(), login, certs, first(is), isTLS)
			if got.seen != want.seen {
				t.Errorf("%s is shown\n%s\nat a new server\n%s", login, got.seen, want.seen)
			}
			secured := !want.gone
			if g, w := got.say(t, before), want.say(t, before); g != w {
				t.Errorf("%s begins with\n%s\nat a new server\n%s", login, g, w)
			}
			got.say(t, "")
			want.say(t, "")
			wanted := want.say(t, script.text)
			if g := got.say(t, script.text); g != wanted {
				t.Errorf("%s, %s:\n%s\nat a new server\n%s", login, script.name, g, wanted)
			}
			old := there[i*len(scripts)+j]
			was := !old.gone
			old.say(t, before) // what it was not permitted before, and what it has been sent
			if g := old.say(t, script.text); g != wanted && was && secured && stays {
				t.Errorf("%s, %s, connected before:\n%s\nat a new server (%s)\n%s", login, script.name, g, want.seen, wanted)
			}
			for _, g := range []*guest{want, got, old} {
				_ = g.conn.Close()
			}
		}
	}
}
