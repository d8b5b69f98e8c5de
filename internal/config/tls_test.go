package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// pems makes a certificate and its key.
func pems(t *testing.T) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	signed, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	return write(t, "cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}))),
		write(t, "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})))
}

func TestTLS(t *testing.T) {
	cert, key := pems(t)
	files := "cert_file: \"" + cert + "\", key_file: \"" + key + "\", ca_file: \"" + cert + "\"\n"
	pin := strings.Repeat("aB", 32)
	for name, tt := range map[string]struct {
		text string
		want TLS
	}{
		"files":                {files, TLS{Timeout: 2 * time.Second}},
		"timeout":              {files + "timeout: 0.5", TLS{Timeout: 500 * time.Millisecond}},
		"timeout, very short":  {files + "timeout: 0.0001", TLS{Timeout: 100 * time.Microsecond}},
		"verify":               {files + "verify: true", TLS{Timeout: 2 * time.Second, Verify: true}},
		"map":                  {files + "verify_and_map: true, pinned_certs: [ \"" + pin + "\" ]", TLS{Timeout: 2 * time.Second, Verify: true, Map: true, Pinned: map[string]bool{strings.ToLower(pin): true}}},
		"first":                {files + "handshake_first: true", TLS{Timeout: 2 * time.Second, First: true}},
		"first, word":          {files + "first: \"on\"", TLS{Timeout: 2 * time.Second, First: true}},
		"first, not":           {files + "immediate: \"off\"", TLS{Timeout: 2 * time.Second}},
		"first, auto":          {files + "handshake_first: auto", TLS{Timeout: 2 * time.Second, First: true, Fallback: 50 * time.Millisecond}},
		"first, after a while": {files + "handshake_first: \"300ms\"", TLS{Timeout: 2 * time.Second, First: true, Fallback: 300 * time.Millisecond}},
		"version":              {files + "min_version: \"1.3\"", TLS{Timeout: 2 * time.Second, MinVersion: tls.VersionTLS13}},
		"suites and curves": {
			files + "cipher_suites: [ TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256 ], curve_preferences: [ X25519, CurveP256 ], connection_rate_limit: 9",
			TLS{Timeout: 2 * time.Second, Ciphers: []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256}, Curves: []tls.CurveID{tls.X25519, tls.CurveP256}, RateLimit: 9},
		},
		"insecure suite": {
			files + "cipher_suites: [ TLS_RSA_WITH_RC4_128_SHA ], allow_insecure_cipher_suites: true",
			TLS{Timeout: 2 * time.Second, Ciphers: []uint16{tls.TLS_RSA_WITH_RC4_128_SHA}, Insecure: true},
		},
	} {
		c, err := Load(write(t, "x.conf", "tls {\n"+tt.text+"\n}\nallow_non_tls: true\n"), Edge)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := *c.TLS
		if got.Config == nil || len(got.Config.Certificates) != 1 || got.Config.MinVersion < tls.VersionTLS12 ||
			(got.Config.ClientAuth == tls.RequireAndVerifyClientCert) != tt.want.Verify || got.Digest == [32]byte{} || !c.AllowNonTLS ||
			!reflect.DeepEqual(got.Config.CipherSuites, tt.want.Ciphers) || !reflect.DeepEqual(got.Config.CurvePreferences, tt.want.Curves) {
			t.Errorf("%s: %+v", name, got.Config)
		}
		got.CertFile, got.KeyFile, got.CAFile, got.Config, got.Digest = "", "", "", nil, [32]byte{}
		if !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
	c, err := Load(write(t, "x.conf", "tls { certs: [ { cert_file: \""+cert+"\", key_file: \""+key+"\" } ] }"), Edge)
	if err != nil || len(c.TLS.Config.Certificates) != 1 {
		t.Errorf("certs: %v", err)
	}

	for text, want := range map[string]string{
		"tls { cert_file: x }": "x.conf:1: tls: cert_file and key_file are both needed; accepted: two PEM files; add the missing one",
		"tls { cert_file: \"" + cert + "\", key_file: \"/none\" }":                     "x.conf:1: tls.key_file: cannot read /none: no such file or directory; check the name and who may read it",
		"tls { cert_file: \"" + cert + "\", key_file: \"" + cert + "\" }":              " are no certificate with its key: ",
		"tls { cert_file: \"" + cert + "\", key_file: \"" + key + "\", verify: true }": "x.conf:1: tls: verify needs ca_file; name the authority that signs the clients' certificates",
		"tls { " + files + "pinned_certs: [ abc ] }":                                   "x.conf:2: tls.pinned_certs: bad value \"abc\"; accepted: SHA-256 fingerprints of public keys, 64 hex digits each",
		"tls { " + files + "pinned_certs: [ " + pin + " ] }":                           "x.conf:1: tls: pinned_certs needs verify; add `verify: true` and ca_file",
		"tls { " + files + "min_version: \"1.1\" }":                                    "x.conf:2: tls.min_version: bad value \"1.1\"; accepted: \"1.2\" or \"1.3\"",
		"tls { " + files + "cipher_suites: [ X ] }":                                    "x.conf:2: tls.cipher_suites: bad value \"X\"; accepted: names such as TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
		"tls { " + files + "cipher_suites: [ TLS_RSA_WITH_RC4_128_SHA ] }":             "x.conf:1: tls: cipher suite TLS_RSA_WITH_RC4_128_SHA is not secure; choose another one, or set allow_insecure_cipher_suites",
		"tls { " + files + "handshake_first: maybe }":                                  "x.conf:2: tls.handshake_first: bad value \"maybe\"; accepted: true, false, auto, or how long to wait before INFO is sent in clear, such as \"300ms\"",
		"tls { " + files + "certs: [ { cert_file: x, key_file: y } ] }":                "x.conf:1: tls: certs excludes cert_file and key_file; keep one of them",
		"allow_non_tls: true":        "x.conf:1: allow_non_tls: there is no TLS to choose; add a `tls` block, or remove it",
		"lame_duck_duration: \"3s\"": "x.conf:1: lame_duck_duration: bad value \"3s\"; accepted: a duration of at least \"30s\"",
		"lame_duck_duration: \"40s\"\nlame_duck_grace_period: \"50s\"": "x.conf:2: lame_duck_grace_period: 50s is not less than lame_duck_duration (40s); shorten it",
		"client_advertise: here":                   "x.conf:1: client_advertise: bad value \"here\"; accepted: \"host:port\"",
		"authorization { users: [ { user: a } ] }": "x.conf:1: authorization.users: user \"a\" has no password, so nobody can log in as that user; give the user one, use nkey, or let certificates name users with `tls { verify_and_map }`",
		"authorization { user: a }":                "x.conf:1: authorization: user without password; add password",
		"authorization { users: [ { user: a, password: b, connection_types: [ FOO ] } ] }": "x.conf:1: authorization.users[0].connection_types: bad value \"FOO\"; accepted: STANDARD, IN_PROCESS, WEBSOCKET, MQTT, MQTT_WS, LEAFNODE or LEAFNODE_WS, or a list of them",
		"max_connections: -2": "x.conf:1: max_connections: bad value -2; accepted: a number of clients; 0 or -1 for none",
		"log_size_limit: -1":  "x.conf:1: log_size_limit: bad value -1; accepted: octets, such as 100MB; 0 for no bound",
	} {
		_, err := Load(write(t, "x.conf", text), Edge)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\ngot  %v\nwant %s", text, err, want)
		}
	}
}

func TestMaxConnections(t *testing.T) {
	for text, want := range map[string]int{"max_connections: 0": -1, "max_conn: -1": -1, "max_connections: 5": 5, "": DefaultMaxConnections} {
		if c, err := Load(write(t, "x.conf", text), Edge); err != nil || c.MaxConnections != want {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestDigestOfTheUplink: a reload notices other contents of the same files.
func TestDigestOfTheUplink(t *testing.T) {
	seed := write(t, "seed", "one")
	conf := write(t, "x.conf", "hub { url: \"quic://h\", nkey_seed_file: \""+filepath.ToSlash(seed)+"\" }")
	load := func() [32]byte {
		c, err := Load(conf, Edge)
		if err != nil {
			t.Fatal(err)
		}
		return c.Uplink.Digest
	}
	before := load()
	if again := load(); again != before {
		t.Error("the same file has another digest")
	}
	if err := os.WriteFile(seed, []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	if load() == before {
		t.Error("another seed is not noticed")
	}
}
