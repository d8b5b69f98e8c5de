package tester

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/synadia-io/orbit.go/ntf-client/api"
)

// certificates are what an instance's servers and clients prove themselves with.
type certificates struct {
	options               api.TLSOptions
	material              api.TLSMaterial
	caFile, cert, keyFile string
}

// newCertificates makes an authority and what it signs, and writes the server's
// side to dir.
func newCertificates(dir string, o api.TLSOptions) (*certificates, error) {
	if len(o.SANs) == 0 {
		o.SANs = []string{"localhost", "127.0.0.1", "::1"}
	}
	if o.Mode == "" {
		o.Mode = api.TLSModeMutual
	}
	c := &certificates{
		options: o,
		caFile:  filepath.Join(dir, "ca.pem"), cert: filepath.Join(dir, "server.pem"), keyFile: filepath.Join(dir, "server.key"),
	}
	ca, err := sign(nil, x509.Certificate{
		Subject: pkix.Name{CommonName: "conformance CA"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
	if err != nil {
		return nil, err
	}
	leaf := x509.Certificate{
		Subject: pkix.Name{CommonName: "conformance server"}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, name := range o.SANs {
		if ip := net.ParseIP(name); ip != nil {
			leaf.IPAddresses = append(leaf.IPAddresses, ip)
		} else {
			leaf.DNSNames = append(leaf.DNSNames, name)
		}
	}
	srv, err := sign(ca, leaf)
	if err != nil {
		return nil, err
	}
	c.material.CAPEM = ca.certPEM
	if o.Mode == api.TLSModeMutual {
		cl, err := sign(ca, x509.Certificate{
			Subject: pkix.Name{CommonName: "conformance client"}, KeyUsage: x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		})
		if err != nil {
			return nil, err
		}
		c.material.ClientCertPEM, c.material.ClientKeyPEM = cl.certPEM, cl.keyPEM
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	for path, text := range map[string]string{c.caFile: ca.certPEM, c.cert: srv.certPEM, c.keyFile: srv.keyPEM} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// block is the tls block of a configuration file.
func (c *certificates) block() string {
	timeout := c.options.Timeout
	if timeout <= 0 {
		timeout = 2
	}
	first := ""
	if c.options.HandshakeFirst {
		first = "  handshake_first: true\n"
	}
	return fmt.Sprintf("tls {\n  cert_file: %q\n  key_file: %q\n  ca_file: %q\n  verify: %t\n  timeout: %s\n%s}\n",
		c.cert, c.keyFile, c.caFile, c.options.Mode == api.TLSModeMutual, strconv.FormatFloat(timeout, 'f', -1, 64), first)
}

type signed struct {
	cert            *x509.Certificate
	key             *ecdsa.PrivateKey
	certPEM, keyPEM string
}

// sign makes a key and a certificate for it, signed by the authority or, if
// that is nil, by itself.
func sign(by *signed, what x509.Certificate) (*signed, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	what.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	what.NotBefore, what.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(48*time.Hour)
	parent, signer := &what, key
	if by != nil {
		parent, signer = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, &what, parent, &key.PublicKey, signer)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate: %w", err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return &signed{
		cert: cert, key: key,
		certPEM: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		keyPEM:  string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})),
	}, nil
}
