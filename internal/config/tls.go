package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
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

// load reads the files that t names and builds the server's configuration.
func (t *TLS) load(d *decoder, v value) {
	if t.CertFile == "" || t.KeyFile == "" {
		d.fail(v, "cert_file and key_file are both needed", "two PEM files", "add the missing one")
		return
	}
	cert, key := d.readable(v, "cert_file", t.CertFile), d.readable(v, "key_file", t.KeyFile)
	if cert == nil || key == nil {
		return
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		d.fail(v, fmt.Sprintf("%s and %s are no certificate with its key: %v", t.CertFile, t.KeyFile, err), "two PEM files", "check that they belong together")
		return
	}
	c := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
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
	}
	if t.Verify {
		if t.CAFile == "" {
			d.fail(v, "verify needs ca_file", "", "name the authority that signs the clients' certificates")
			return
		}
		c.ClientAuth = tls.RequireAndVerifyClientCert
	}
	t.Config = c
}
