package config

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"
	"time"
)

// readable reports a file that cannot be read as a problem of the key below v.
func (d *decoder) readable(v value, name, path string) []byte {
	if path == "" {
		return nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		v.key += "." + name
		d.fail(v, fmt.Sprintf("cannot read %s: %v", path, cause(err)), "", "check the name and who may read it")
		return nil
	}
	return data
}

// cause strips the operation and path that a PathError repeats.
func cause(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// tlsKeys are those of every listener.
func tlsKeys(t *TLS) []key {
	return append([]key{
		{names: []string{"cert_file"}, accepts: "a PEM file", set: nonEmpty(&t.CertFile)},
		{names: []string{"key_file"}, accepts: "a PEM file", set: nonEmpty(&t.KeyFile)},
		{names: []string{"ca_file"}, accepts: "a PEM file", set: nonEmpty(&t.CAFile)},
		{names: []string{"verify"}, accepts: "true or false", set: boolKey(&t.Verify)},
		{names: []string{"timeout"}, accepts: "seconds, or a duration such as \"2s\"", set: durationKey(&t.Timeout, 1)},
	}, unsupported(map[string]string{
		"ca_certs_match":                   "use ca_file",
		"cert_match":                       "use cert_file and key_file",
		"cert_match_by":                    "use cert_file and key_file",
		"cert_match_skip_invalid":          "use cert_file and key_file",
		"cert_store":                       "use cert_file and key_file",
		"insecure":                         "use ca_file",
		"ocsp_peer":                        "remove it: nothing asks an OCSP responder; use certificates that expire soon, or `pinned_certs`",
		"verify_cert_and_check_known_urls": "use verify",
	})...)
}

// clientTLSKeys are those of the listener for clients.
func clientTLSKeys(t *TLS) []key {
	return append(tlsKeys(t), []key{
		{names: []string{"certs", "certificates"}, accepts: "a list of { cert_file, key_file }", set: func(d *decoder, v value, _ string) {
			d.list(v, func(item value) {
				var p KeyPair
				if d.block(item, []key{
					{names: []string{"cert_file"}, accepts: "a PEM file", set: nonEmpty(&p.CertFile)},
					{names: []string{"key_file"}, accepts: "a PEM file", set: nonEmpty(&p.KeyFile)},
				}) {
					t.Certs = append(t.Certs, p)
				}
			})
		}},
		{names: []string{"verify_and_map"}, accepts: "true or false", set: boolKey(&t.Map)},
		{names: []string{"handshake_first", "first", "immediate"}, accepts: `true, false, auto, or how long to wait before INFO is sent in clear, such as "300ms"`, set: t.handshakeFirst},
		{names: []string{"pinned_certs"}, accepts: "SHA-256 fingerprints of public keys, 64 hex digits each", set: func(d *decoder, v value, accepts string) {
			d.list(v, func(item value) {
				s, ok := item.raw.(string)
				if !ok || !hexPin.MatchString(s) {
					d.wrong(item, accepts)
					return
				}
				if t.Pinned == nil {
					t.Pinned = make(map[string]bool)
				}
				t.Pinned[strings.ToLower(s)] = true
			})
		}},
		{names: []string{"connection_rate_limit"}, accepts: "a number of handshakes per second; 0 for no bound", set: intKey(&t.RateLimit, 0, math.MaxInt32)},
		{names: []string{"min_version"}, accepts: `"1.2" or "1.3"`, set: func(d *decoder, v value, accepts string) {
			switch fmt.Sprint(v.raw) {
			case "1.2":
				t.MinVersion = tls.VersionTLS12
			case "1.3":
				t.MinVersion = tls.VersionTLS13
			default:
				d.wrong(v, accepts)
			}
		}},
		{names: []string{"cipher_suites"}, accepts: "names such as TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", set: func(d *decoder, v value, accepts string) {
			d.list(v, func(item value) {
				s, _ := item.raw.(string)
				for _, c := range slices.Concat(tls.CipherSuites(), tls.InsecureCipherSuites()) {
					if c.Name == s {
						t.Ciphers = append(t.Ciphers, c.ID)
						return
					}
				}
				d.wrong(item, accepts)
			})
		}},
		{names: []string{"allow_insecure_cipher_suites"}, accepts: "true or false", set: boolKey(&t.Insecure)},
		{names: []string{"curve_preferences"}, accepts: "X25519MLKEM768, SecP256r1MLKEM768, SecP384r1MLKEM1024, X25519, CurveP256, CurveP384, CurveP521", set: func(d *decoder, v value, accepts string) {
			d.list(v, func(item value) {
				s, _ := item.raw.(string)
				for _, id := range []tls.CurveID{
					tls.X25519MLKEM768, tls.SecP256r1MLKEM768, tls.SecP384r1MLKEM1024, tls.X25519, tls.CurveP256, tls.CurveP384, tls.CurveP521,
				} {
					if id.String() == s {
						t.Curves = append(t.Curves, id)
						return
					}
				}
				d.wrong(item, accepts)
			})
		}},
	}...)
}

func (t *TLS) handshakeFirst(d *decoder, v value, accepts string) {
	t.First, t.Fallback = true, 0
	switch raw := v.raw.(type) {
	case bool:
		t.First = raw
		return
	case string:
		switch strings.ToLower(raw) {
		case "true", "on":
			return
		case "false", "off":
			t.First = false
			return
		case "auto", "auto_fallback":
			t.Fallback = DefaultTLSFallback
			return
		}
		if wait, err := time.ParseDuration(raw); err == nil && wait >= 0 {
			t.Fallback = wait
			return
		}
	}
	d.wrong(v, accepts)
}

func serverTLSKey(to **TLS, keys func(*TLS) []key) func(*decoder, value, string) {
	return func(d *decoder, v value, _ string) {
		t := &TLS{Timeout: DefaultTLSTimeout}
		before := len(d.problems)
		if !d.block(v, keys(t)) || len(d.problems) > before {
			return
		}
		t.load(d, v)
		*to = t
	}
}

// LoadTLS makes a TLS configuration of files that are not named in a
// configuration file, but by flags.
func LoadTLS(t *TLS) error {
	d := &decoder{}
	if t.load(d, value{}); len(d.problems) > 0 {
		return &Error{Problems: d.problems}
	}
	return nil
}

// load reads the files that t names and builds the server's configuration.
func (t *TLS) load(d *decoder, v value) {
	if len(t.Certs) > 0 && (t.CertFile != "" || t.KeyFile != "") {
		d.fail(v, "certs excludes cert_file and key_file", "", "keep one of them")
		return
	}
	pairs := t.Certs
	if len(pairs) == 0 {
		pairs = []KeyPair{{t.CertFile, t.KeyFile}}
	}
	c := &tls.Config{MinVersion: max(t.MinVersion, tls.VersionTLS12), CipherSuites: t.Ciphers, CurvePreferences: t.Curves}
	sum := sha256.New()
	for _, p := range pairs {
		if p.CertFile == "" || p.KeyFile == "" {
			d.fail(v, "cert_file and key_file are both needed", "two PEM files", "add the missing one")
			return
		}
		cert, key := d.readable(v, "cert_file", p.CertFile), d.readable(v, "key_file", p.KeyFile)
		if cert == nil || key == nil {
			return
		}
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			d.fail(v, fmt.Sprintf("%s and %s are no certificate with its key: %v", p.CertFile, p.KeyFile, err), "two PEM files", "check that they belong together")
			return
		}
		c.Certificates = append(c.Certificates, pair)
		sum.Write(cert)
		sum.Write(key)
	}
	if t.CAFile != "" {
		pem := d.readable(v, "ca_file", t.CAFile)
		if pem == nil {
			return
		}
		c.ClientCAs = x509.NewCertPool()
		if !c.ClientCAs.AppendCertsFromPEM(pem) {
			v.key += ".ca_file"
			d.fail(v, t.CAFile+" holds no certificate", "a PEM file", "")
			return
		}
		sum.Write(pem)
	}
	sum.Sum(t.Digest[:0])
	t.Verify = t.Verify || t.Map
	if t.Verify {
		if t.CAFile == "" {
			d.fail(v, "verify needs ca_file", "", "name the authority that signs the clients' certificates")
			return
		}
		c.ClientAuth = tls.RequireAndVerifyClientCert
	}
	if len(t.Pinned) > 0 && !t.Verify {
		d.fail(v, "pinned_certs needs verify", "", "add `verify: true` and ca_file")
		return
	}
	if !t.Insecure {
		for _, s := range tls.InsecureCipherSuites() {
			if slices.Contains(t.Ciphers, s.ID) {
				d.fail(v, "cipher suite "+s.Name+" is not secure", "", "choose another one, or set allow_insecure_cipher_suites")
				return
			}
		}
	}
	t.Config = c
}
