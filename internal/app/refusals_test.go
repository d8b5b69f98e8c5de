//go:build !windows

package app

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// beginnings are how TLS may begin: what is in the block tls, and after it.
var beginnings = []struct{ name, tls, more string }{
	{"after INFO", "", ""},
	{"if they like", "", "allow_non_tls: true"},
	{"first", "handshake_first: true", ""},
	{"first, or after a while", "handshake_first: DELAY", ""},
	{"first, or if they like", "handshake_first: DELAY", "allow_non_tls: true"},
}

// troubles are why a connection does not come to anything, beside what the client does.
var troubles = []struct{ name, conf string }{
	{"", ""},
	{"too many", "max_connections: 0"},
	{"wrong login", "authorization { user: eve, password: e, timeout: 10 }"},
	{"no login", "authorization { user: ada, password: a, timeout: 0.2 }"},
}

// newcomers are what clients do, step by step: read a line (INFO), write in clear,
// start TLS, say CONNECT and PING, say nothing any more.
var newcomers = []struct {
	name, steps string
	soon        bool // it does not wait for INFO
}{
	{"TLS after INFO", "read tls connect", false},
	{"TLS first", "tls read connect", true},
	{"in clear", "read connect", false},
	{"in clear and at once", "connect", true},
	{"something else after INFO", "read junk", false},
	{"something else", "junk", true},
	{"half a handshake", "half", true},
	{"TLS and then silence", "read tls", false},
	{"TLS first and then silence", "tls read", true},
	{"another version of the protocol", "read tls protocol", false},
	{"another version of the protocol, TLS first", "tls read protocol", true},
}

// TestRefusals compares what clients see of servers with TLS, in all orders of
// TLS and INFO, with what nats-server v2.15.2 shows them.
func TestRefusals(t *testing.T) {
	const file = "testdata/refusals.txt"
	certFile, keyFile, roots := keyPair(t)
	start := startBroker
	if *oracle != "" {
		start = startOracle
	}
	var all strings.Builder
	for _, b := range beginnings {
		for _, trouble := range troubles {
			addrs := make(map[string]string) // by configuration
			for _, n := range newcomers {
				if trouble.name == "no login" != strings.Contains(n.name, "silence") {
					continue
				}
				delay := "20ms"
				if n.soon {
					delay = "30s"
				}
				timeout := "30" // but where nothing else ends it
				if n.steps == "half" || b.name == "first" && strings.HasPrefix(n.steps, "read") {
					timeout = "0.2"
				}
				conf := fmt.Sprintf("tls { cert_file: %q, key_file: %q, timeout: %s, %s }\n%s\n%s", certFile, keyFile, timeout, b.tls, b.more, trouble.conf)
				conf = strings.ReplaceAll(conf, "DELAY", delay)
				if addrs[conf] == "" {
					addrs[conf] = start(t, dialogue{conf: conf}.expand())
				}
				addr := addrs[conf]
				fmt.Fprintf(&all, "TLS %s; %s; %s: %s\n", b.name, trouble.name, n.name, arrive(t, addr, n.steps, roots))
			}
		}
	}
	if *oracle != "" {
		if err := os.WriteFile(file, []byte(all.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	gotLines, wantLines := strings.Split(all.String(), "\n"), strings.Split(string(want), "\n")
	if len(gotLines) != len(wantLines) {
		t.Fatalf("%d cases, %d recorded", len(gotLines), len(wantLines))
	}
	for i, got := range gotLines {
		if got != wantLines[i] {
			t.Errorf("got\n%s\nwant\n%s", got, wantLines[i])
		}
	}
}

// arrive goes through the steps of a newcomer and returns what it has seen.
func arrive(t *testing.T, addr, steps string, roots *x509.CertPool) string {
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	var out strings.Builder
	conn, r := nc, bufio.NewReader(nc)
	read := func() (line string, err error) {
		line, err = r.ReadString('\n')
		switch {
		case strings.HasPrefix(line, "INFO "):
			fmt.Fprintf(&out, "INFO required=%v available=%v ", strings.Contains(line, `"tls_required":true`), strings.Contains(line, `"tls_available":true`))
		case line != "":
			fmt.Fprintf(&out, "%q ", line)
		}
		return line, err
	}
	for step := range strings.FieldsSeq(steps) {
		switch step {
		case "read":
			if _, err := read(); err != nil {
				return out.String() + "closed"
			}
		case "tls":
			tc := tls.Client(nc, &tls.Config{RootCAs: roots, ServerName: "127.0.0.1"})
			if err := tc.Handshake(); err != nil {
				return out.String() + "no TLS"
			}
			fmt.Fprint(&out, "TLS ")
			conn, r = tc, bufio.NewReader(tc)
		case "connect":
			_, _ = io.WriteString(conn, `CONNECT {"verbose":false,"user":"ada","pass":"a"}`+"\r\nPING\r\n")
		case "protocol":
			_, _ = io.WriteString(conn, `CONNECT {"verbose":false,"user":"ada","pass":"a","protocol":7}`+"\r\nPING\r\n")
		case "junk":
			_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		case "half":
			_, _ = io.WriteString(conn, "\x16\x03\x01\x01\x00")
		}
	}
	for {
		line, err := read()
		switch {
		case err != nil:
			return out.String() + "closed"
		case line == "PONG\r\n":
			return out.String() + "open"
		}
	}
}

// keyPair makes a certificate for 127.0.0.1 and bob.
func keyPair(t *testing.T) (certFile, keyFile string, roots *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"bob"}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	roots.AddCert(cert)
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for name, b := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile, roots
}
