package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"net"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/time/rate"

	"petiole/sync/frame"
)

// HubOptions are what a Hub is made of.
type HubOptions struct {
	Config   HubConfig
	Sink     Sink
	Software string // version for display
	Log      *slog.Logger
}

// Limits of a hub.
const (
	defaultMaxEdges = 10000
	maxStrangers    = 256 // connections that have not proven who they are
	maxOffers       = 256 // exports of one edge at a time
	largeSlots      = 64  // messages beyond a frame being received, all edges
	largePerEdge    = 2   // the same, one edge
	drainTimeout    = 5 * time.Second

	// Receive windows. What a stranger can make the hub hold is bounded by
	// the initial ones: they grow only as data is read.
	hubInitialWindow = 512 << 10
	hubStreamWindow  = 8 << 20
	hubConnWindow    = 16 << 20
)

// Hub is the listening side of links.
type Hub struct {
	conf     HubConfig
	sink     Sink
	software string
	log      *slog.Logger
	verifier *verifier
	tls      *tls.Config
	print    string

	sock *net.UDPConn
	tr   *quic.Transport
	ln   *quic.Listener

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	large  chan struct{}

	strangers atomic.Int64
	refused   atomic.Uint64

	mu      sync.Mutex
	edges   map[string]*edgeConn
	err     string
	errTime time.Time
	logged  map[string]*refusals // by whose they were
}

// NewHub checks the configuration, loads (or generates) the certificate and
// returns a hub that does not listen yet.
func NewHub(o HubOptions) (*Hub, error) {
	c := o.Config
	c.Timing.defaults()
	if c.MaxMessage <= 0 {
		c.MaxMessage = DefaultMaxMsg
	}
	if c.MaxEdges <= 0 {
		c.MaxEdges = defaultMaxEdges
	}
	h := &Hub{
		conf: c, sink: o.Sink, software: o.Software, log: o.Log,
		edges: map[string]*edgeConn{}, logged: map[string]*refusals{},
		large: make(chan struct{}, largeSlots),
	}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if h.verifier, err = newVerifier(&c); err != nil {
		return nil, err
	}
	if h.tls, h.print, err = serverTLS(&c.TLS); err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h, nil
}

// Start listens. It returns once edges can connect.
func (h *Hub) Start() error {
	addr, err := net.ResolveUDPAddr("udp", h.conf.Listen)
	if err != nil {
		return fmt.Errorf("link: listen on %s: %w", h.conf.Listen, err)
	}
	if h.sock, err = net.ListenUDP("udp", addr); err != nil {
		return fmt.Errorf("link: %w", err)
	}
	reset, err := secret(h.tls, "stateless reset")
	if err != nil {
		h.sock.Close()
		return err
	}
	token, err := secret(h.tls, "address token")
	if err != nil {
		h.sock.Close()
		return err
	}
	// Many new addresses at once smell of forged ones: those then have to
	// prove theirs, at the price of a round trip.
	limit := rate.NewLimiter(200, 400)
	h.tr = &quic.Transport{
		Conn:                h.sock,
		ConnectionIDLength:  8,
		StatelessResetKey:   (*quic.StatelessResetKey)(&reset),
		TokenGeneratorKey:   (*quic.TokenGeneratorKey)(&token),
		VerifySourceAddress: func(net.Addr) bool { return !limit.Allow() },
	}
	qc := quicConfig(&h.conf.Timing)
	qc.HandshakeIdleTimeout = helloTimeout
	qc.KeepAlivePeriod = 0 // the edges' pings are enough
	qc.InitialStreamReceiveWindow = hubInitialWindow
	qc.MaxStreamReceiveWindow = hubStreamWindow
	qc.InitialConnectionReceiveWindow = hubInitialWindow
	qc.MaxConnectionReceiveWindow = hubConnWindow
	qc.MaxIncomingStreams = 1
	qc.MaxIncomingUniStreams = maxOffers
	if h.ln, err = h.tr.Listen(h.tls, qc); err != nil {
		h.tr.Close()
		h.sock.Close()
		return fmt.Errorf("link: %w", err)
	}
	h.log.Info("waiting for edges", "addr", h.Addr().String(), "certificate", h.print)
	if len(h.conf.Users) == 0 && len(h.conf.NKeys) == 0 {
		h.log.Warn("no edge may connect: neither users nor nkeys are configured for the link")
	}
	h.wg.Add(1)
	go h.accept()
	return nil
}

// Addr returns the UDP address listened on.
func (h *Hub) Addr() net.Addr {
	addr := h.sock.LocalAddr()
	// A socket for all addresses is one of IPv6 that takes IPv4 too. Who wrote
	// 0.0.0.0 is to find that again.
	if a, ok := addr.(*net.UDPAddr); ok && a.IP.IsUnspecified() && strings.HasPrefix(h.conf.Listen, "0.0.0.0:") {
		return &net.UDPAddr{IP: net.IPv4zero, Port: a.Port}
	}
	return addr
}

// Fingerprint returns the certificate's fingerprint, for an edge to pin.
func (h *Hub) Fingerprint() string { return h.print }

// Close tells the edges that the hub goes away, waits for batches under way
// and stops listening.
func (h *Hub) Close() error {
	h.cancel()
	if h.ln == nil {
		return nil
	}
	h.ln.Close()
	h.wg.Wait()
	err := h.tr.Close()
	if cerr := h.sock.Close(); err == nil && !errors.Is(cerr, net.ErrClosed) {
		err = cerr
	}
	return err
}

func (h *Hub) accept() {
	defer h.wg.Done()
	for {
		conn, err := h.ln.Accept(h.ctx)
		if err != nil {
			return // closed
		}
		if h.strangers.Add(1) > maxStrangers {
			h.strangers.Add(-1)
			h.refused.Add(1)
			closeWith(conn, &frame.Error{Code: frame.CodeBusy, Text: "too many connections at once, try again later"})
			continue
		}
		h.wg.Add(1)
		go func() {
			defer h.wg.Done()
			h.serve(conn)
		}()
	}
}

// refusals are those of one peer that have been logged in the last hour.
type refusals struct {
	since time.Time
	kinds map[uint64]struct{} // hashes: they may hold what the peer has said
}

// Whoever is refused chooses much of what there is to say of it. So what is logged
// of one peer, and what is remembered of that, is limited in number and length.
const (
	maxRefusers  = 4096 // peers that are told apart
	maxKinds     = 32   // lines logged of one peer in an hour
	maxRefusedOf = 512  // octets of a text in such a line
)

// refuse notes a refusal of a peer: an address, or an edge that has proved to be
// it. Each kind is logged once an hour per peer.
func (h *Hub) refuse(peer, kind, what string, args ...any) {
	h.refused.Add(1)
	for i, a := range args {
		if text, ok := a.(string); ok && len(text) > maxRefusedOf {
			args[i] = strings.ToValidUTF8(text[:maxRefusedOf], "") + "…"
		}
	}
	level := slog.LevelDebug
	if h.mayLog(peer, kind, sentence(what, args), time.Now()) {
		level = slog.LevelWarn
	}
	h.log.Log(context.Background(), level, what, args...)
}

// mayLog notes a refusal for the status, and says whether it is to be logged.
func (h *Hub) mayLog(peer, kind, text string, now time.Time) bool {
	sum := fnv.New64a()
	_, _ = io.WriteString(sum, kind) // never fails
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err, h.errTime = text, now
	r := h.logged[peer]
	if r == nil || now.Sub(r.since) >= repeatLog {
		if r == nil && len(h.logged) >= maxRefusers {
			clear(h.logged)
		}
		r = &refusals{since: now, kinds: map[uint64]struct{}{}}
		h.logged[peer] = r
	}
	if _, again := r.kinds[sum.Sum64()]; again || len(r.kinds) >= maxKinds {
		return false
	}
	r.kinds[sum.Sum64()] = struct{}{}
	return true
}

// sentence puts what a log line says into one string.
func sentence(what string, args []any) string {
	b := []byte(what)
	for i := 0; i+1 < len(args); i += 2 {
		b = fmt.Appendf(b, " %v=%v", args[i], args[i+1])
	}
	return string(b)
}

// Status returns a snapshot.
func (h *Hub) Status() HubStatus {
	now := time.Now()
	h.mu.Lock()
	st := HubStatus{Fingerprint: h.print, Refused: h.refused.Load(), LastError: h.err, ErrorTime: h.errTime}
	conns := make([]*edgeConn, 0, len(h.edges))
	for _, c := range h.edges {
		conns = append(conns, c)
	}
	h.mu.Unlock()
	if h.sock != nil {
		st.Addr = h.Addr().String()
	}
	sort.Slice(conns, func(i, j int) bool { return conns[i].id.EdgeID < conns[j].id.EdgeID })
	st.Edges = make([]EdgeConn, 0, len(conns))
	for _, c := range conns {
		e := EdgeConn{
			EdgeID: c.id.EdgeID, Name: c.id.Name, User: c.id.User, Version: c.hello.Software,
			Addr: c.id.Addr, Since: c.since, RTT: c.conn.ConnectionStats().SmoothedRTT, Exports: []EdgeExport{},
		}
		c.mu.Lock()
		for _, in := range c.offers {
			e.Exports = append(e.Exports, in.status(now))
		}
		c.mu.Unlock()
		sort.Slice(e.Exports, func(i, j int) bool {
			a, b := &e.Exports[i], &e.Exports[j]
			return a.To < b.To || a.To == b.To && a.Stream < b.Stream
		})
		st.Edges = append(st.Edges, e)
	}
	return st
}
