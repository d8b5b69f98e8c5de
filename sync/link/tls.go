package link

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"time"

	"petiole/sync/frame"
)

// Names of the generated certificate and its key.
const (
	HubCertFile = "hub.crt"
	HubKeyFile  = "hub.key"
)

// Fingerprint returns "sha256:" and the hex SHA-256 of a certificate's DER
// form, the form in which certificates are pinned.
func Fingerprint(der []byte) string {
	sum := sha256.Sum256(der)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// CertError says that the hub's certificate is not one that the edge trusts.
type CertError struct {
	URL      string
	Expected string // what the edge would have trusted
	Actual   string // fingerprint of the certificate received
	Cause    error  // why verification failed; nil if pinned
	Remedy   string
}

func (e *CertError) Error() string {
	s := fmt.Sprintf("certificate of %s is not trusted: got %s, expected %s", e.URL, e.Actual, e.Expected)
	if e.Cause != nil {
		s += " (" + e.Cause.Error() + ")"
	}
	return s + ": " + e.Remedy
}

func (e *CertError) Unwrap() error { return e.Cause }

// parsePin returns the 32 bytes of "sha256:HEX".
func parsePin(pin string) ([sha256.Size]byte, error) {
	hexa, ok := strings.CutPrefix(strings.ToLower(strings.TrimSpace(pin)), "sha256:")
	b, err := hex.DecodeString(strings.ReplaceAll(hexa, ":", ""))
	if !ok || err != nil || len(b) != sha256.Size {
		return [sha256.Size]byte{}, fmt.Errorf("pinned %q is not of the form sha256:HEX with 64 hex digits", pin)
	}
	return [sha256.Size]byte(b), nil
}

// helloCurves keeps the edge's first flight within one datagram. A hybrid key
// share (X25519MLKEM768) makes it two, and when the first of them is lost, or
// arrives just before the hub listens, the hub answers half a hello and the
// handshake waits for a retransmission, several round trips long. The price is
// that recorded traffic is not safe from a future quantum computer.
var helloCurves = []tls.CurveID{tls.X25519, tls.CurveP256}

// clientTLS returns the TLS configuration for one URL. What it refuses is a
// *CertError.
func clientTLS(c *ClientTLS, url, host string) (*tls.Config, error) {
	name := host
	if c.ServerName != "" {
		name = c.ServerName
	}
	conf := &tls.Config{
		MinVersion:       tls.VersionTLS13,
		NextProtos:       []string{frame.ALPN},
		ServerName:       name,
		CurvePreferences: helloCurves,
		// Verification is done below, in all cases, so that a failure can
		// name what came and what was expected.
		InsecureSkipVerify: true,
	}
	if c.CAFile != "" && c.Pinned != "" {
		return nil, errors.New("tls: both ca_file and pinned are set; keep one")
	}
	if c.Pinned != "" {
		want, err := parsePin(c.Pinned)
		if err != nil {
			return nil, fmt.Errorf("tls: %w", err)
		}
		conf.VerifyConnection = func(cs tls.ConnectionState) error {
			leaf := cs.PeerCertificates[0]
			if sha256.Sum256(leaf.Raw) == want {
				return nil
			}
			return &CertError{
				URL: url, Expected: "sha256:" + hex.EncodeToString(want[:]), Actual: Fingerprint(leaf.Raw),
				Remedy: "if the hub's certificate was renewed on purpose, put its fingerprint (the hub logs it at start) into pinned; if not, somebody else answers at this address",
			}
		}
		return conf, nil
	}
	var roots *x509.CertPool
	expected, remedy := "one that the system's roots vouch for", "set ca_file, or pinned to the fingerprint that the hub logs at start"
	if c.CAFile != "" {
		b, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("tls: read ca_file: %w", err)
		}
		var prints []string
		roots = x509.NewCertPool()
		for rest := b; ; {
			var block *pem.Block
			if block, rest = pem.Decode(rest); block == nil {
				break
			}
			if block.Type != "CERTIFICATE" {
				continue
			}
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, fmt.Errorf("tls: ca_file %s: %w", c.CAFile, err)
			}
			roots.AddCert(cert)
			prints = append(prints, Fingerprint(cert.Raw))
		}
		if len(prints) == 0 {
			return nil, fmt.Errorf("tls: ca_file %s holds no PEM certificate", c.CAFile)
		}
		if len(prints) > 4 {
			prints = append(prints[:4], "…")
		}
		expected = fmt.Sprintf("one issued by %s for %q", strings.Join(prints, " or "), name)
		remedy = "check that ca_file " + c.CAFile + " is the authority of this hub and that the certificate names the host in the URL"
	}
	conf.VerifyConnection = func(cs tls.ConnectionState) error {
		leaf := cs.PeerCertificates[0]
		inter := x509.NewCertPool()
		for _, cert := range cs.PeerCertificates[1:] {
			inter.AddCert(cert)
		}
		_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name, Intermediates: inter})
		if err == nil {
			return nil
		}
		return &CertError{URL: url, Expected: expected, Actual: Fingerprint(leaf.Raw), Cause: err, Remedy: remedy}
	}
	return conf, nil
}

// serverTLS loads, or generates, the hub's certificate.
func serverTLS(c *ServerTLS) (*tls.Config, string, error) {
	certFile, keyFile := c.CertFile, c.KeyFile
	switch {
	case certFile == "" && keyFile == "":
		if c.Dir == "" {
			return nil, "", errors.New("tls: no certificate configured and no directory to keep a generated one in")
		}
		certFile, keyFile = filepath.Join(c.Dir, HubCertFile), filepath.Join(c.Dir, HubKeyFile)
		_, err := os.Stat(certFile)
		if errors.Is(err, fs.ErrNotExist) {
			err = generate(certFile, keyFile)
		}
		if err != nil {
			return nil, "", fmt.Errorf("tls: self-signed certificate: %w", err)
		}
	case certFile == "" || keyFile == "":
		return nil, "", errors.New("tls: cert_file and key_file have to be set together")
	}
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, "", fmt.Errorf("tls: load %s and %s: %w", certFile, keyFile, err)
	}
	conf := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		NextProtos:             []string{frame.ALPN},
		Certificates:           []tls.Certificate{cert},
		SessionTicketsDisabled: true, // every edge proves itself anew
	}
	return conf, Fingerprint(cert.Certificate[0]), nil
}

// generate writes a self-signed certificate for this host and its key. The key
// comes first: a certificate without one would look complete.
func generate(certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "localhost"
	}
	names := []string{host}
	if host != "localhost" {
		names = append(names, "localhost")
	}
	tmpl := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: "petiole hub " + host},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().AddDate(20, 0, 0), // trusted by its fingerprint, not by its age
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true, // so that it can serve as its own ca_file
		DNSNames:              names,
		IPAddresses:           loopback(),
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	defer clear(pkcs8)
	if err := writeFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})); err != nil {
		return err
	}
	return writeFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// secret derives a stable secret for a purpose from the hub's private key, so
// that a hub that was restarted can tell edges that their connection is gone.
func secret(conf *tls.Config, purpose string) (out [32]byte, err error) {
	der, err := x509.MarshalPKCS8PrivateKey(conf.Certificates[0].PrivateKey)
	if err != nil {
		return out, fmt.Errorf("tls: derive %s: %w", purpose, err)
	}
	defer clear(der)
	mac := hmac.New(sha256.New, der)
	mac.Write([]byte("petiole " + purpose))
	mac.Sum(out[:0])
	return out, nil
}
