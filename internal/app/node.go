package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"petiole/internal/admin"
	"petiole/internal/broker"
	"petiole/internal/config"
	"petiole/internal/jetstream"
	"petiole/internal/storagetool"
	"petiole/sync/link"
)

// Link is a program's end of the connection between edges and hub.
type Link interface {
	// Describe adds what the link knows to a status.
	Describe(*admin.Status)
	// Close ends the link; what was under way is sent again next time.
	Close(ctx context.Context) error
}

// Node is a running program: broker, JetStream engine if it is on, the link
// if one is configured, and the admin socket.
type Node struct {
	Log    *slog.Logger
	Broker *broker.Server
	Engine *jetstream.Engine // nil if JetStream is off

	program Program
	conf    atomic.Pointer[config.Config] // replaced by Reload
	log     *logger                       // nil if the log is not the program's own
	start   time.Time
	ready   atomic.Int64 // time.Duration; 0 while starting
	linkMu  sync.Mutex
	link    Link // nil: none is configured; guarded by linkMu, for Reload replaces it
	admin   *admin.Server
	failed  chan error // the storage's failure

	reloading sync.Mutex
	refused   atomic.Pointer[admin.Refused] // the last reload, if it failed
}

// Shutdown steps take at most this long each.
const (
	drainTimeout = 5 * time.Second
	linkTimeout  = 2 * time.Second
	// relinkTimeout is how long a reload waits for the link to end.
	relinkTimeout = 10 * time.Second
)

// Start brings everything up in the order in which it is needed: the store
// recovers before clients can connect, and clients are served before the link
// has found its hub. The error has an exit code.
func Start(p Program, cfg *config.Config, log *slog.Logger) (n *Node, err error) {
	n = &Node{Log: log, program: p, start: time.Now(), failed: make(chan error, 1)}
	n.conf.Store(cfg)
	defer func() {
		if err != nil {
			n.abandon()
			n = nil
		}
	}()
	opts := brokerOptions(cfg)
	opts.Log = log
	opts.AfterRead = func() {
		if n.Engine != nil {
			n.Engine.AfterRead()
		}
	}
	if n.Broker, err = broker.New(opts); err != nil {
		return n, Exit(ExitConfig, err)
	}
	if err := n.Broker.AnswerSystem(); err != nil {
		return n, Exit(ExitFailure, err)
	}
	if opts.MaxConn < min(cfg.MaxConnections, fewClients) {
		log.Warn("the system lets this process open so few files that only so many clients can connect; raise the limit (ulimit -n, LimitNOFILE of systemd)",
			"clients", opts.MaxConn, "open_files", openFiles(), "max_connections", cfg.MaxConnections)
	}
	if cfg.JetStream.Enabled {
		if err := n.openStore(); err != nil {
			return n, err
		}
	}
	if err := n.Broker.Start(); err != nil {
		addr := cfg.Host // the port is the system's choice
		if cfg.Port > 0 {
			addr = net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port))
		}
		return n, listenError(addr, "-p", err)
	}
	if p.Link != nil {
		link, err := p.Link(n)
		if err != nil {
			return n, err
		}
		n.setLink(link)
	}
	if n.Engine != nil {
		n.admin, err = admin.Serve(SocketPath(cfg), n.Status, log)
		if err != nil {
			return n, Exit(ExitCannotStore, err)
		}
	}
	if err := writePID(cfg.PIDFile); err != nil {
		return n, err
	}
	if err := n.writePorts(cfg.PortsDir); err != nil {
		return n, err
	}
	n.ready.Store(int64(sinceProcessStart(n.start)))
	return n, nil
}

// openStore opens the engine.
func (n *Node) openStore() error {
	cfg := n.Config()
	if cfg.JetStream.StoreDir == "" {
		dir, err := defaultStoreDir(n.program.Program)
		if err != nil {
			return Exit(ExitConfig, err)
		}
		cfg.JetStream.StoreDir = dir
	}
	if n.program.Program == config.Hub {
		if key := filepath.Join(cfg.JetStream.StoreDir, link.DeviceFile); fileExists(key) {
			n.Log.Warn("the store directory is that of an edge: what it holds is served as the hub's own, and no edge has exported it; if that is not meant, stop the hub and name its own store directory with -c or -sd", "store_dir", cfg.JetStream.StoreDir, "device_key", key)
		}
	}
	_, stores := divideFiles(openFiles())
	for _, l := range storagetool.Leftovers(cfg.JetStream.StoreDir) {
		// If it was killed just before its end, this is a start without the store.
		n.Log.Warn("a restore of the store was killed before its end; restore the backup again if the store is not the one wanted, and remove what is left, unless the restore still runs", "left", l.Path)
	}
	if err := storagetool.CheckEntries(cfg.JetStream.StoreDir); err != nil {
		return Exit(ExitCannotStore, err)
	}
	engine, err := jetstream.Open(jetstream.Options{
		Account:       n.Broker.Account(),
		Dir:           cfg.JetStream.StoreDir,
		SyncInterval:  cfg.JetStream.SyncInterval,
		MaxMemory:     cfg.JetStream.MaxMemory,
		MaxStore:      cfg.JetStream.MaxStore,
		MaxPayload:    cfg.MaxPayload,
		MaxOpenStores: stores,
		ServerName:    n.Broker.Name(),
		ServerID:      n.Broker.ID(),
		Version:       Version,
		Log:           n.Log,
		OnFail: func(err error) {
			select {
			case n.failed <- err:
			default: // one failure is enough to end the process
			}
		},
	})
	if err != nil {
		return storeError(cfg.JetStream.StoreDir, err)
	}
	n.Engine = engine
	return nil
}

func fileExists(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}

// Config returns the configuration that the node runs with.
func (n *Node) Config() *config.Config { return n.conf.Load() }

// Failed delivers the storage's failure. Nothing is acknowledged after it.
func (n *Node) Failed() <-chan error { return n.failed }

// Ready returns how long the program took until clients could connect.
func (n *Node) Ready() time.Duration { return time.Duration(n.ready.Load()) }

// Status describes the node as it is now.
func (n *Node) Status() admin.Status {
	st := admin.Status{
		Program:    n.program.Program.String(),
		Version:    Version,
		ServerName: n.Broker.Name(),
		ServerID:   n.Broker.ID(),
		PID:        os.Getpid(),
		Start:      n.start,
		Ready:      n.Ready(),
		ClientURL:  n.Broker.ClientURL(),
		ConfigFile: fullPath(n.Config().Path),
		Refused:    n.refused.Load(),
		Broker:     admin.FromBroker(n.Broker.Stats()),
	}
	if n.Engine != nil {
		js := &admin.JetStream{StoreDir: n.storeDir(), SyncInterval: n.Config().JetStream.SyncInterval, Streams: []admin.Stream{}}
		for _, s := range n.Engine.Streams() {
			state := s.DurableState()
			st := admin.Stream{
				Name: s.Name(), Msgs: state.Msgs, Bytes: state.Bytes, First: state.First, Last: state.Last,
				CompactionPostponed: s.CompactionPostponed(),
			}
			for _, l := range s.Lost(0) {
				st.LostMsgs += l.Len()
			}
			js.Streams = append(js.Streams, st)
		}
		for _, d := range n.Engine.DownStreams() {
			st := admin.Stream{Name: d.Name, State: "repairing", Reason: d.Reason}
			switch {
			case d.Quarantined:
				st.State = "quarantined"
			case d.Waiting:
				st.State = "waiting"
			}
			js.Streams = append(js.Streams, st)
		}
		es := n.Engine.Stats()
		js.OpenStores = es.OpenStores
		js.Log = admin.WAL{
			Bytes: es.WALBytes, Budget: es.WALBudget, Records: es.WAL.Records, Batches: es.WAL.Batches,
			Written: es.WAL.Bytes, Syncs: es.WAL.Syncs, LastSync: es.WAL.LastSync,
		}
		wr := n.Engine.Written()
		js.Written = admin.Written{
			Since: wr.Since, Messages: wr.Messages, Log: wr.Log, Files: wr.Files, Amplification: wr.Amplification(),
		}
		js.Space = admin.Space(n.Engine.Space())
		js.Damage = admin.Damage(n.Engine.Damage())
		st.JetStream = js
	}
	if link := n.currentLink(); link != nil {
		link.Describe(&st)
	}
	return st
}

func (n *Node) currentLink() Link {
	n.linkMu.Lock()
	defer n.linkMu.Unlock()
	return n.link
}

// setLink makes link the node's and returns the one before it.
func (n *Node) setLink(link Link) (old Link) {
	n.linkMu.Lock()
	defer n.linkMu.Unlock()
	old, n.link = n.link, link
	return old
}

// storeDir names the store directory in full.
func (n *Node) storeDir() string { return fullPath(n.Config().JetStream.StoreDir) }

// Stop ends everything in the opposite order: no new admin questions, no
// replay, those who wait for messages hear of it, clients get what is queued for them, and a last checkpoint.
func (n *Node) Stop() error {
	var errs []error
	if n.admin != nil {
		errs = append(errs, n.admin.Close())
	}
	if link := n.setLink(nil); link != nil {
		ctx, cancel := context.WithTimeout(context.Background(), linkTimeout)
		err := link.Close(ctx)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			// A slow disk or peer is no failure of the stop.
			n.Log.Warn("the link is left in the middle of its work; what was not acknowledged is sent again", "error", err)
			err = nil
		}
		errs = append(errs, err)
	}
	if n.Engine != nil {
		n.Engine.Leave()
	}
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	if err := n.Broker.Shutdown(ctx); err != nil {
		n.Log.Warn("clients did not take all that was queued for them", "error", err)
	}
	if n.Engine != nil {
		if err := n.Engine.Close(); err != nil {
			errs = append(errs, Exit(ExitStorage, fmt.Errorf("close store directory %s: %w", n.Config().JetStream.StoreDir, err)))
		}
	}
	removePID(n.Config().PIDFile)
	n.removePorts(n.Config().PortsDir)
	return errors.Join(errs...)
}

// abandon releases what a failed Start has opened.
func (n *Node) abandon() {
	if link := n.setLink(nil); link != nil {
		ctx, cancel := context.WithTimeout(context.Background(), linkTimeout)
		defer cancel()
		_ = link.Close(ctx) // the failure of Start is what is reported
	}
	if n.Broker != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = n.Broker.Shutdown(ctx)
	}
	if n.Engine != nil {
		_ = n.Engine.Close()
	}
}

// brokerOptions translates the configuration.
func brokerOptions(c *config.Config) broker.Options {
	clients, _ := divideFiles(openFiles())
	o := broker.Options{
		Host:           c.Host,
		Port:           c.Port,
		NoListen:       c.NoListen,
		ServerName:     c.ServerName,
		GitCommit:      Commit(),
		MaxPayload:     c.MaxPayload,
		MaxControlLine: c.MaxControlLine,
		MaxPending:     c.MaxPending,
		MaxConn:        min(c.MaxConnections, clients),
		MaxSubs:        c.MaxSubs,
		MaxSubTokens:   c.MaxSubTokens,
		NoHeaders:      c.NoHeaders,
		NoStall:        c.NoStall,
		ProxyProtocol:  c.ProxyProtocol,
		PingInterval:   c.PingInterval,
		MaxPingsOut:    c.PingMax,
		WriteDeadline:  c.WriteDeadline,
		AuthTimeout:    c.Auth.Timeout,
		AuthToken:      c.Auth.Token,
		NoAuthUser:     c.Auth.NoAuthUser,
		JetStream:      c.JetStream.Enabled,
		APILevel:       jetstream.APILevel,
		Mappings:       c.Mappings,
		Advertise:      c.ClientAdvertise,
		Trace:          c.Log.Trace,
	}
	if c.Auth.User != "" {
		o.Users = append(o.Users, broker.User{Name: c.Auth.User, Password: c.Auth.Password})
	}
	for _, u := range c.Auth.Users {
		bu := broker.User{Name: u.Name, Password: u.Password, NKey: u.Nkey, ConnTypes: u.ConnTypes}
		if p := u.Permissions; p != nil {
			bu.Permissions = &broker.Permissions{
				Publish:   broker.SubjectPermission(p.Publish),
				Subscribe: broker.SubjectPermission(p.Subscribe),
			}
			if r := p.Responses; r != nil {
				bu.Permissions.Responses = &broker.ResponsePermission{Max: r.Max, Expires: r.Expires}
			}
		}
		o.Users = append(o.Users, bu)
	}
	if c.TLS != nil {
		o.TLS = c.TLS.Config
		o.TLSOptions = broker.TLSOptions{
			Timeout: c.TLS.Timeout, Optional: c.AllowNonTLS, First: c.TLS.First, Fallback: c.TLS.Fallback,
			// Of a single login there is nothing for a certificate to name: its
			// password decides, as with nats-server.
			MapUsers: c.TLS.Map && c.Auth.User == "", Pinned: c.TLS.Pinned, RateLimit: c.TLS.RateLimit,
		}
	}
	return o
}

// SocketPath returns where the admin socket of a configuration is.
func SocketPath(c *config.Config) string {
	return filepath.Join(c.JetStream.StoreDir, admin.SocketName)
}

// defaultStoreDir returns the store directory of a program that was not told
// one: in the user's state directory, where it outlives a reboot.
func defaultStoreDir(p config.Program) (string, error) {
	state := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(state) {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", errors.New("no store directory is configured and there is no home directory to choose one in; name one with -sd or jetstream { store_dir }")
		}
		state = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(state, "petiole", p.String()), nil
}
