package broker

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nkeys"

	"petiole/internal/wire"
)

// ErrServerClosed says that the server has been shut down or not started.
var ErrServerClosed = errors.New("server closed")

// Server is a NATS server. Create it with [New], then [Server.Start] it.
type Server struct {
	set   atomic.Pointer[settings]
	id    string
	acc   *Account
	log   *slog.Logger
	start time.Time

	// The constants of these names, but for tests and small limits.
	stallFrom            int64
	stallMax, stuckAfter time.Duration

	name string // fixed by New

	mu      sync.Mutex
	ln      net.Listener
	addr    net.Addr // of ln; stays when it is closed
	closed  bool
	lame    bool // no more clients are taken
	clients map[uint64]*client
	serving sync.WaitGroup // accept loop and clients

	lastID atomic.Uint64

	reload sync.RWMutex // held for reading from looking credentials up to noting them

	total, inMsgs, inBytes, outMsgs, outBytes atomic.Uint64
	handshakes                                rate

	slow, stalls, stale, authErrors, protoErrors atomic.Uint64
}

// New checks the options and makes a server that does not listen yet.
// Handlers may be registered before Start.
func New(opts Options) (*Server, error) {
	set, err := newSettings(opts)
	if err != nil {
		return nil, err
	}
	kp, err := nkeys.CreateServer()
	if err != nil {
		return nil, fmt.Errorf("make server id: %w", err)
	}
	id, err := kp.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("make server id: %w", err)
	}
	kp.Wipe() // only the name is used
	s := &Server{
		id: id, name: cmp.Or(set.ServerName, id), log: set.Log, clients: make(map[uint64]*client), start: time.Now(),
		stallFrom: min(stallFrom, set.MaxPending/4), stallMax: stallMax, stuckAfter: stuckAfter,
	}
	s.set.Store(set)
	s.acc = newAccount(s, "$G")
	return s, nil
}

// maxMaxPayload is the largest max_payload, as in nats-server.
const maxMaxPayload = 64 << 20

// Start listens and serves clients in the background until [Server.Shutdown].
func (s *Server) Start() error {
	if s.set.Load().NoListen {
		return nil
	}
	addr := net.JoinHostPort(s.set.Load().Host, strconv.Itoa(max(s.set.Load().Port, 0)))
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return listenError(addr, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = ln.Close()
		return ErrServerClosed
	}
	s.ln, s.addr = ln, ln.Addr()
	s.serving.Add(1)
	go s.acceptLoop(ln)
	return nil
}

// listenError says what can be done about err.
func listenError(addr string, err error) error {
	var dns *net.DNSError
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("listen for clients on %s: address already in use; stop the process that uses it (\"ss -ltnp\" names it) or set another port: %w", addr, err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("listen for clients on %s: not permitted; ports below 1024 need privileges, set a higher port: %w", addr, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("listen for clients on %s: this machine does not have that address; set host to one that it has, or to 0.0.0.0: %w", addr, err)
	case errors.As(err, &dns):
		return fmt.Errorf("listen for clients on %s: host name can not be resolved; set host to an address of this machine: %w", addr, err)
	}
	return fmt.Errorf("listen for clients on %s: %w", addr, err)
}

func (s *Server) acceptLoop(ln net.Listener) {
	defer s.serving.Done()
	const most = time.Second
	pause := 5 * time.Millisecond
	for {
		conn, err := ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of file descriptors, mostly: clients that leave free some.
			s.log.Error("clients can not be accepted for the moment", "err", err, "retry_in", pause)
			time.Sleep(pause)
			pause = min(2*pause, most)
			continue
		}
		pause = 5 * time.Millisecond
		s.accept(conn, ConnStandard)
	}
}

// accept takes a client that connected in the given way, and serves it in the
// background. It reports whether the server takes clients at all.
func (s *Server) accept(conn net.Conn, kind string) bool {
	set := s.set.Load()
	c := &client{
		srv: s, acc: s.acc, sock: conn, conn: conn, kind: kind, log: s.log, start: time.Now(), echo: true, verbose: true, pedantic: true,
		subs: make(map[string]*subscription),
	}
	c.awaiting.Store(set.auth.on())
	info := &ClientInfo{ID: s.lastID.Add(1), c: c}
	if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		info.IP, info.Port = a.IP.String(), a.Port
	}
	c.info.Store(info)
	c.activity.Store(c.start.UnixNano())
	c.out.low = s.stallFrom / 2
	c.pub = newPublisher(s.acc, c)
	if len(set.auth.nkeys) > 0 {
		var b [11]byte
		_, _ = rand.Read(b[:]) // never fails
		c.nonce = base64.RawURLEncoding.EncodeToString(b[:])
	}
	s.mu.Lock()
	if s.closed || s.lame {
		s.mu.Unlock()
		_ = conn.Close()
		return false
	}
	full := len(s.clients) >= set.MaxConn
	s.clients[info.ID] = c
	s.serving.Add(1)
	s.mu.Unlock()
	s.total.Add(1)
	go s.serve(c, set, full)
	return true
}

// serve is the life of a client.
func (s *Server) serve(c *client, set *settings, full bool) {
	defer s.serving.Done()
	id := c.info.Load().ID
	pre, err := c.open(set, full)
	if err == nil {
		c.ready.Store(true)
		c.mu.Lock()
		c.pinger = time.AfterFunc(set.PingInterval, c.pingTick)
		if c.awaiting.Load() {
			c.authDue = time.AfterFunc(set.AuthTimeout, func() {
				s.authErrors.Add(1)
				c.fail(wire.ErrAuthTimeout)
			})
		}
		c.mu.Unlock()
		if full {
			c.fail(wire.ErrMaxConn)
		}
		err = c.readLoop(pre)
	}
	c.disconnect(err)

	c.mu.Lock()
	if c.pinger != nil {
		c.pinger.Stop()
	}
	if c.authDue != nil {
		c.authDue.Stop()
	}
	why := c.why
	c.mu.Unlock()
	c.unsubscribeAll()
	s.mu.Lock()
	delete(s.clients, id)
	s.mu.Unlock()

	info := c.info.Load()
	l := s.log.With("cid", id, "name", info.Name, "user", info.User, "addr", c.addr())
	var we *wire.Error
	var ce *clientError
	switch {
	case errors.As(why, &ce):
		l.Warn("client left", "reason", why)
	case why == nil || errors.Is(why, errShutdown) || errors.Is(why, errUserGone) || errors.Is(why, io.EOF):
		l.Debug("client left")
	case errors.Is(why, errSlowDeadline) || errors.Is(why, errSlowPending):
		s.slow.Add(1)
		l.Warn("client disconnected: it does not keep up", "reason", why)
	case errors.Is(why, errProxy):
		s.protoErrors.Add(1)
		l.Warn("client disconnected: what came first is not what proxy_protocol permits", "reason", why)
	case errors.Is(why, errHandshake):
		s.protoErrors.Add(1)
		l.Warn("client disconnected: TLS failed", "reason", why)
	case errors.As(why, &we):
		if we != wire.ErrAuthorization && we != wire.ErrAuthTimeout && we != wire.ErrStale && we != wire.ErrMaxConn {
			s.protoErrors.Add(1)
		}
		l.Warn("client disconnected", "reason", why)
	default:
		l.Debug("client connection lost", "err", why)
	}
}

// info is the document of INFO.
type info struct {
	ID          string   `json:"server_id"`
	Name        string   `json:"server_name"`
	Version     string   `json:"version"`
	Proto       int      `json:"proto"`
	GitCommit   string   `json:"git_commit,omitempty"`
	Go          string   `json:"go"`
	Host        string   `json:"host"`
	Port        int      `json:"port"`
	Headers     bool     `json:"headers"`
	Auth        bool     `json:"auth_required,omitempty"`
	TLS         bool     `json:"tls_required,omitempty"`
	TLSOptional bool     `json:"tls_available,omitempty"`
	TLSVerify   bool     `json:"tls_verify,omitempty"`
	MaxPayload  int      `json:"max_payload"`
	JetStream   bool     `json:"jetstream,omitempty"`
	ClientID    uint64   `json:"client_id"`
	ClientIP    string   `json:"client_ip,omitempty"`
	Nonce       string   `json:"nonce,omitempty"`
	ConnectURLs []string `json:"connect_urls,omitempty"`
	APILevel    int      `json:"api_lvl,omitempty"`
	LameDuck    bool     `json:"ldm,omitempty"`
	Connected   bool     `json:"connect_info,omitempty"` // follows the PONG for the first PING after CONNECT
	Account     string   `json:"remote_account,omitempty"`
}

// occasion is why a client gets INFO.
type occasion int

const (
	arrives  occasion = iota // it has just connected
	connects                 // it has sent CONNECT
	lameDuck                 // the server is about to leave
)

// infoLine returns the INFO for a client. It says that TLS is required if first,
// for which TLS has to be configured, or if the client has no choice.
func (s *Server) infoLine(c *client, set *settings, first bool, why occasion) []byte {
	ci := c.info.Load()
	port := set.Port
	if a, ok := s.Addr().(*net.TCPAddr); ok {
		port = a.Port
	}
	host, urls := set.Host, set.ConnectURLs
	if set.Advertise != "" {
		// Not among the addresses to reconnect to: a client whose check of the
		// certificate fails for the address it was given would go on to that one.
		host, port = set.advertHost, set.advertPort
	}
	account, nonce, auth := "", c.nonce, set.auth.required()
	if why != arrives { // as nats-server, which says then what its configuration says
		nonce, auth = "", set.auth.on()
	}
	switch why {
	case lameDuck: // not to come back
		urls = nil
	case connects:
		account = c.acc.name
	}
	ip := ci.IP
	if set.ProxyProtocol && !c.ready.Load() && !first {
		ip = "" // the proxy's, as nothing has been read yet
	}
	offered := set.TLS != nil && c.kind == ConnStandard
	doc, _ := json.Marshal(info{ // can not fail: plain fields
		ID: s.id, Name: s.Name(), Version: set.Version, Proto: 1, GitCommit: set.GitCommit,
		Go: runtime.Version(), Host: host, Port: port, Headers: !set.NoHeaders, Auth: auth,
		TLS: offered && (first || !set.TLSOptions.Optional), TLSOptional: offered && set.TLSOptions.Optional,
		TLSVerify:  offered && set.TLS.ClientAuth >= tls.RequireAnyClientCert,
		MaxPayload: set.MaxPayload, JetStream: set.JetStream, ClientID: ci.ID, ClientIP: ip,
		Nonce: nonce, ConnectURLs: urls, APILevel: set.APILevel, LameDuck: why == lameDuck, Connected: why == connects, Account: account,
	})
	return slices.Concat([]byte("INFO "), doc, lineEnd)
}

// Addr returns the address listened on; nil before Start.
func (s *Server) Addr() net.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// ClientURL returns a URL under which clients on this machine reach the
// server, such as "nats://127.0.0.1:4222"; empty before Start.
func (s *Server) ClientURL() string {
	a, ok := s.Addr().(*net.TCPAddr)
	if !ok {
		return ""
	}
	host := a.IP.String()
	if a.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	scheme := "nats://"
	if s.set.Load().TLS != nil {
		scheme = "tls://"
	}
	return scheme + net.JoinHostPort(host, strconv.Itoa(a.Port))
}

// ID returns the server id, a public server nkey ("N...").
func (s *Server) ID() string { return s.id }

// Name returns the server name, by default the id.
func (s *Server) Name() string { return s.name }

// Account returns the default account, "$G".
func (s *Server) Account() *Account { return s.acc }

// handlerGrace is how long Shutdown waits for handlers after its context.
const handlerGrace = time.Second

// Shutdown stops listening, sends what is queued and disconnects all clients.
// When ctx ends first, the remaining clients are cut off and its error is
// returned. Internal handlers are not called by clients once it has returned,
// unless one of them is at work for more than a second after ctx has ended.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	ln := s.ln
	clients := make([]*client, 0, len(s.clients))
	for _, c := range s.clients {
		clients = append(clients, c)
	}
	s.mu.Unlock()
	if ln != nil {
		_ = ln.Close()
	}
	for _, c := range clients {
		c.finish(errShutdown, "")
	}
	done := make(chan struct{})
	go func() {
		s.serving.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	for _, c := range clients {
		c.disconnect(errShutdown)
	}
	select {
	case <-done:
	case <-time.After(handlerGrace):
		s.log.Error("shut down while a handler is still at work")
	}
	return fmt.Errorf("shut down: clients were cut off: %w", ctx.Err())
}

// Stats is a snapshot of the server's counters.
type Stats struct {
	Start         time.Time
	Connections   int    // now
	TotalConns    uint64 // since Start
	Subscriptions int    // now, internal ones included
	Internal      int    // of these, handlers of the program itself
	InMsgs        uint64 // from clients
	InBytes       uint64 // header and data
	OutMsgs       uint64 // to clients
	OutBytes      uint64
	SlowConsumers uint64 // clients disconnected because they did not keep up
	Stalls        uint64 // times a publisher was held back for a slow consumer
	StaleConns    uint64 // clients disconnected because they did not answer
	AuthErrors    uint64
	ProtoErrors   uint64 // clients disconnected because of what they sent
}

// Stats returns the server's counters.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	conns := len(s.clients)
	s.mu.Unlock()
	return Stats{
		Start: s.start, Connections: conns, TotalConns: s.total.Load(), Subscriptions: s.acc.index.Len(), Internal: int(s.acc.own.Load()),
		InMsgs: s.inMsgs.Load(), InBytes: s.inBytes.Load(), OutMsgs: s.outMsgs.Load(), OutBytes: s.outBytes.Load(),
		SlowConsumers: s.slow.Load(), Stalls: s.stalls.Load(), StaleConns: s.stale.Load(),
		AuthErrors: s.authErrors.Load(), ProtoErrors: s.protoErrors.Load(),
	}
}

// ConnInfo describes a client connection for monitoring.
type ConnInfo struct {
	ClientInfo
	Start         time.Time
	LastActivity  time.Time
	RTT           time.Duration // of the last PING; 0 before the first PONG
	Pending       int64         // octets queued for the client
	Subscriptions int
	InMsgs        uint64
	InBytes       uint64
	OutMsgs       uint64
	OutBytes      uint64
	TLS           bool
	TLSVersion    string // such as "1.3"; empty without TLS
	TLSCipher     string
}

// Conns returns the clients connected now, by ID.
func (s *Server) Conns() []ConnInfo {
	s.mu.Lock()
	clients := make([]*client, 0, len(s.clients))
	for _, c := range s.clients {
		clients = append(clients, c)
	}
	s.mu.Unlock()
	list := make([]ConnInfo, 0, len(clients))
	for _, c := range clients {
		ci := ConnInfo{
			ClientInfo: *c.info.Load(), Start: c.start, LastActivity: time.Unix(0, c.activity.Load()),
			RTT: time.Duration(c.rtt.Load()), InMsgs: c.inMsgs.Load(), InBytes: c.inBytes.Load(), TLS: c.tls.Load(),
		}
		c.mu.Lock()
		ci.Subscriptions = len(c.subs)
		c.mu.Unlock()
		if st := c.tlsState.Load(); st != nil {
			ci.TLSVersion, ci.TLSCipher = strings.TrimPrefix(tls.VersionName(st.version), "TLS "), tls.CipherSuiteName(st.cipher)
		}
		c.out.mu.Lock()
		ci.Pending, ci.OutMsgs, ci.OutBytes = c.out.pending, c.out.msgs, c.out.octets
		c.out.mu.Unlock()
		list = append(list, ci)
	}
	slices.SortFunc(list, func(a, b ConnInfo) int { return cmp.Compare(a.ID, b.ID) })
	return list
}
