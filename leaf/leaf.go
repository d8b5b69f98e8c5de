// Package leaf runs an edge inside another Go program: a NATS server with
// durable JetStream and, if it is told one, a hub to send exported streams to.
// Clients in the same process need no network:
//
//	l, err := leaf.New(leaf.Config{StoreDir: "/var/lib/till"})
//	...
//	go l.Run(ctx)
//	<-l.Ready()
//	nc, err := nats.Connect("", nats.InProcessServer(l))
//
// The package's example is a whole program of this kind. The module is had from
// a copy of its repository:
//
//	go mod edit -require petiole@v0.0.0 -replace petiole=/path/to/petiole && go mod tidy
//
// It is the same server as the edge program; what [Config] does not have can
// be said in a configuration file.
package leaf

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"petiole/internal/app"
	"petiole/internal/config"
)

// Config says how a [Leaf] is to run. The zero value is a server in memory for
// clients in the process only.
type Config struct {
	// File, if not empty, is a configuration file of the edge program. The other
	// fields, where they are not zero, count more than the file.
	File string
	// Listen is "host:port" for clients from outside the process; port -1 lets
	// the system choose. Empty is what File says, and without File no network.
	Listen string
	Name   string // server name; empty is an id of its own
	// StoreDir is the directory of JetStream's store; empty is what File says,
	// and without File there is no JetStream.
	StoreDir string
	// SyncInterval is zero for fsync before each acknowledgement; above it, what
	// was acknowledged may be lost to a power cut for so long.
	SyncInterval time.Duration
	MaxPayload   int // octets of one message; 0 is 1 MiB

	Hub     *Hub     // nil: what File says, or no hub
	Exports []Export // streams that go to the hub

	Log *slog.Logger // nil discards
}

// Hub is the way to a hub.
type Hub struct {
	URLs           []string // "quic://host:port"
	User, Password string
	NkeySeedFile   string // instead of user and password
	CAFile         string // authority of the hub's certificate
	ServerName     string // name in it, if not the URL's host
	Pinned         string // or its fingerprint, "sha256:..."
}

// Export names a stream and what it is called at the hub; an empty To is the
// same name.
type Export struct{ Stream, To string }

// Errors of a [Leaf].
var (
	// ErrNotRunning says that the leaf is not ready, or has stopped.
	ErrNotRunning = errors.New("the leaf is not running")
	// ErrStarted says that Run was called before.
	ErrStarted = errors.New("the leaf was started already")
	// ErrStorage says that the store failed. Nothing was acknowledged after it;
	// a new Leaf recovers from disk.
	ErrStorage = errors.New("storage failed")
)

// Leaf is an edge in this process. It implements nats.InProcessConnProvider.
type Leaf struct {
	cfg   *config.Config
	log   *slog.Logger
	ready chan struct{}

	mu      sync.Mutex
	started bool
	node    *app.Node // nil unless running
}

// New checks cfg, reading the files it names. Nothing is opened or started.
func New(cfg Config) (*Leaf, error) {
	c := config.Default()
	c.NoListen = true
	if cfg.File != "" {
		var err error
		if c, err = config.Load(cfg.File, config.Edge); err != nil {
			return nil, err
		}
	}
	if cfg.Listen != "" {
		host, port, err := config.HostPort(cfg.Listen)
		if err != nil {
			return nil, fmt.Errorf("leaf: Listen %q: %w", cfg.Listen, err)
		}
		c.NoListen = false
		c.Port = port
		if host != "" {
			c.Host = host
		}
	}
	if cfg.Name != "" {
		c.ServerName = cfg.Name
	}
	if cfg.StoreDir != "" {
		c.JetStream.Enabled, c.JetStream.StoreDir = true, cfg.StoreDir
	}
	if cfg.SyncInterval != 0 {
		c.JetStream.SyncInterval = cfg.SyncInterval
	}
	if cfg.MaxPayload != 0 {
		c.MaxPayload = cfg.MaxPayload
	}
	if h := cfg.Hub; h != nil {
		c.Uplink = &config.Uplink{
			URLs: h.URLs, User: h.User, Password: h.Password, NkeySeedFile: h.NkeySeedFile,
			CAFile: h.CAFile, ServerName: h.ServerName, Pinned: h.Pinned,
		}
	}
	for _, e := range cfg.Exports {
		if e.To == "" {
			e.To = e.Stream
		}
		if !config.ValidStreamName(e.Stream) || !config.ValidStreamName(e.To) {
			return nil, fmt.Errorf("leaf: export %q to %q: not the name of a stream", e.Stream, e.To)
		}
		c.Exports = append(c.Exports, config.Export(e))
	}
	switch {
	case cfg.SyncInterval < 0:
		return nil, fmt.Errorf("leaf: SyncInterval %v is negative", cfg.SyncInterval)
	case len(c.Exports) > 0 && !c.JetStream.Enabled:
		return nil, errors.New("leaf: streams can only be exported with JetStream: set StoreDir")
	}
	l := &Leaf{cfg: c, log: cfg.Log, ready: make(chan struct{})}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	return l, nil
}

// Run starts the leaf and serves until ctx ends; then it stops in order, with
// what is queued for clients sent and a last checkpoint, and returns nil. An
// error says why it could not start, that the store failed ([ErrStorage]), or
// what went wrong when it stopped. It can be called once.
func (l *Leaf) Run(ctx context.Context) error {
	l.mu.Lock()
	if l.started {
		l.mu.Unlock()
		return ErrStarted
	}
	l.started = true
	l.mu.Unlock()
	node, err := app.Start(app.Program{Program: config.Edge, Link: app.Uplink}, l.cfg, l.log)
	if err != nil {
		return fmt.Errorf("leaf: %w", err)
	}
	l.mu.Lock()
	l.node = node
	l.mu.Unlock()
	close(l.ready)
	var failure error
	select {
	case <-ctx.Done():
	case err := <-node.Failed():
		failure = fmt.Errorf("leaf: %w: %w", ErrStorage, err)
	}
	l.mu.Lock()
	l.node = nil
	l.mu.Unlock()
	if err := node.Stop(); err != nil && failure == nil {
		return fmt.Errorf("leaf: stop: %w", err)
	}
	return failure
}

// Ready returns a channel that is closed when clients can connect: the store
// has recovered. It stays open if Run fails before.
func (l *Leaf) Ready() <-chan struct{} { return l.ready }

func (l *Leaf) running() *app.Node {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.node
}

// ClientURL returns the URL for clients outside the process; empty if there is
// no network for them, or the leaf is not running.
func (l *Leaf) ClientURL() string {
	if n := l.running(); n != nil {
		return n.Broker.ClientURL()
	}
	return ""
}

// InProcessConn returns a connection for a client in this process, which
// nats.InProcessServer asks for. The error is [ErrNotRunning] before
// [Leaf.Ready] and after the leaf has stopped.
func (l *Leaf) InProcessConn() (net.Conn, error) {
	n := l.running()
	if n == nil {
		return nil, ErrNotRunning
	}
	conn, err := n.Broker.InProcessConn()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotRunning, err)
	}
	return conn, nil
}
