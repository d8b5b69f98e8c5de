//go:build linux

package rig

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Export is a stream that the edge sends to the hub.
type Export struct{ Stream, To string }

// The logins for edges that a site's hub knows: the one that the site's edge
// uses, and one that may fill the stream LimitedStream only.
const (
	EdgeUser        = "rig"
	EdgePassword    = "rig-password"
	LimitedUser     = "limited"
	LimitedPassword = "limited-password"
	LimitedStream   = "LIMITED"
)

// Site is one edge and, if it has one, its hub, with their configuration files,
// ports and stores. Both keep their ports over restarts.
type Site struct {
	Dir      string
	Programs Programs
	Exports  []Export // none: the edge works alone
	// EdgeStore and HubStore are the store directories; default Dir/edge-store
	// and Dir/hub-store.
	EdgeStore, HubStore string
	// Uplink is the UDP address that the edge is given for its hub; default
	// the hub's own. A relay puts itself in between here.
	Uplink string

	EdgeAddr, HubAddr string // client ports
	LinkAddr          string // the hub's UDP port for edges
	Pin               string // fingerprint of the hub's certificate

	Edge, Hub *Process
}

// StartTimeout is how long a program may take until it serves, including the
// recovery of its store.
const StartTimeout = 30 * time.Second

// StopTimeout bounds how long a program takes to stop, however busy the machine is.
const StopTimeout = time.Minute

// Prepare chooses ports, makes the hub's certificate and writes the
// configuration files. It starts nothing.
func (s *Site) Prepare() error {
	if s.EdgeStore == "" {
		s.EdgeStore = filepath.Join(s.Dir, "edge-store")
	}
	if s.HubStore == "" {
		s.HubStore = filepath.Join(s.Dir, "hub-store")
	}
	edgePort, err1 := FreePort()
	hubPort, err2 := FreePort()
	linkPort, err3 := FreeUDPPort()
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	s.EdgeAddr, s.HubAddr, s.LinkAddr = Addr(edgePort), Addr(hubPort), Addr(linkPort)
	if s.Uplink == "" {
		s.Uplink = s.LinkAddr
	}
	cert, key, pin, err := Certificate(s.Dir, "hub")
	if err != nil {
		return err
	}
	s.Pin = pin
	if err := s.WriteEdgeConfig(""); err != nil {
		return err
	}
	_, err = WriteFile(s.Dir, "hub.conf", fmt.Sprintf(`listen: %q
server_name: rig-hub
jetstream { store_dir: %q, sync_interval: always }
edges {
  listen: %q
  tls { cert_file: %q, key_file: %q }
  users: [
    { user: %s, password: %q, streams: "*" }
    { user: %s, password: %q, streams: %s }
  ]
}
`, s.HubAddr, s.HubStore, s.LinkAddr, cert, key, EdgeUser, EdgePassword, LimitedUser, LimitedPassword, LimitedStream))
	return err
}

// WriteEdgeConfig writes the edge's configuration file with further text at its
// end.
func (s *Site) WriteEdgeConfig(more string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "listen: %q\nserver_name: rig-edge\njetstream { store_dir: %q, sync_interval: always }\n", s.EdgeAddr, s.EdgeStore)
	if len(s.Exports) > 0 {
		fmt.Fprintf(&b, "hub {\n  urls: [\"quic://%s\"]\n  user: %s, password: %q\n  tls { pinned: %q }\n}\nexports: [\n", s.Uplink, EdgeUser, EdgePassword, s.Pin)
		for _, e := range s.Exports {
			fmt.Fprintf(&b, "  { stream: %s, to: %s }\n", e.Stream, e.To)
		}
		b.WriteString("]\n")
	}
	b.WriteString(more)
	_, err := WriteFile(s.Dir, "edge.conf", b.String())
	return err
}

// StartEdge starts the edge and waits until it serves clients.
func (s *Site) StartEdge() (err error) {
	s.Edge, err = s.start("edge", s.Programs.Edge, s.EdgeAddr)
	return err
}

// StartHub starts the hub and waits until it serves clients.
func (s *Site) StartHub() (err error) {
	s.Hub, err = s.start("hub", s.Programs.Hub, s.HubAddr)
	return err
}

func (s *Site) start(name, path, addr string) (*Process, error) {
	p, err := Start(name, filepath.Join(s.Dir, name+".log"), path, "-c", filepath.Join(s.Dir, name+".conf"))
	if err != nil {
		return nil, err
	}
	if err := WaitReady(p, addr, StartTimeout); err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// Close kills what still runs.
func (s *Site) Close() {
	for _, p := range []*Process{s.Edge, s.Hub} {
		if p != nil {
			p.Kill()
		}
	}
}

// EdgeURL and HubURL are where clients connect.
func (s *Site) EdgeURL() string { return "nats://" + s.EdgeAddr }

// HubURL is where the hub's clients connect.
func (s *Site) HubURL() string { return "nats://" + s.HubAddr }

// CreateStream makes a file stream at the edge.
func (s *Site) CreateStream(ctx context.Context, name string, subjects ...string) error {
	return s.onEdge(func(nc *nats.Conn) error {
		js, err := jetstream.New(nc)
		if err != nil {
			return err
		}
		_, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: subjects, Storage: jetstream.FileStorage})
		if err != nil {
			return fmt.Errorf("create stream %s: %w", name, err)
		}
		return nil
	})
}

// ReadEdge reads a stream of the edge from a sequence on.
func (s *Site) ReadEdge(ctx context.Context, stream string, from uint64) (held []Held, err error) {
	err = s.onEdge(func(nc *nats.Conn) error {
		held, err = ReadStream(ctx, nc, stream, from)
		return err
	})
	return held, err
}

// ReadHub is ReadEdge for the hub.
func (s *Site) ReadHub(ctx context.Context, stream string, from uint64) (held []Held, err error) {
	err = on(s.HubURL(), func(nc *nats.Conn) error {
		held, err = ReadStream(ctx, nc, stream, from)
		return err
	})
	return held, err
}

// WaitHub returns once the hub's stream holds at least msgs messages. The error
// says how many it held when ctx ended.
func (s *Site) WaitHub(ctx context.Context, stream string, msgs uint64) error {
	return on(s.HubURL(), func(nc *nats.Conn) error {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			n, _, err := StreamLast(ctx, nc, stream)
			if err == nil && n >= msgs {
				return nil
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return fmt.Errorf("the hub's stream %s holds %d of %d messages: %w", stream, n, msgs, errors.Join(ctx.Err(), err))
			}
		}
	})
}

func (s *Site) onEdge(fn func(*nats.Conn) error) error { return on(s.EdgeURL(), fn) }

func on(url string, fn func(*nats.Conn) error) error {
	nc, err := nats.Connect(url, nats.Timeout(StartTimeout), nats.MaxReconnects(0))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", url, err)
	}
	defer nc.Close()
	return fn(nc)
}

// Certificate makes a self-signed certificate for 127.0.0.1 and returns its
// files and its fingerprint.
func Certificate(dir, name string) (certFile, keyFile, pin string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", "", err
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "rig " + name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return "", "", "", err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", "", "", err
	}
	certFile, keyFile = filepath.Join(dir, name+"-cert.pem"), filepath.Join(dir, name+"-key.pem")
	err = errors.Join(
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644),
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600))
	sum := sha256.Sum256(der)
	return certFile, keyFile, "sha256:" + hex.EncodeToString(sum[:]), err
}
