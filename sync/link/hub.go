package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
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
	"petiole/sync/replay"
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
	largeTimeout    = 60 * time.Second
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
	lastLog map[string]time.Time // refusals logged, by what they were
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
		edges: map[string]*edgeConn{}, lastLog: map[string]time.Time{},
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

// refuse notes a refusal. Each kind is logged once an hour per edge.
func (h *Hub) refuse(key, what string, args ...any) {
	h.refused.Add(1)
	now := time.Now()
	level := slog.LevelWarn
	h.mu.Lock()
	h.err, h.errTime = sentence(what, args), now
	if last, ok := h.lastLog[key]; ok && now.Sub(last) < repeatLog {
		level = slog.LevelDebug
	} else {
		if len(h.lastLog) > 4096 {
			clear(h.lastLog)
		}
		h.lastLog[key] = now
	}
	h.mu.Unlock()
	h.log.Log(context.Background(), level, what, args...)
}

// sentence puts what a log line says into one string.
func sentence(what string, args []any) string {
	b := []byte(what)
	for i := 0; i+1 < len(args); i += 2 {
		b = fmt.Appendf(b, " %v=%v", args[i], args[i+1])
	}
	return string(b)
}

// edgeConn is a hub's use of one connection.
type edgeConn struct {
	h     *Hub
	conn  *quic.Conn
	id    *Identity
	hello frame.Hello
	since time.Time
	out   *outbox
	large chan struct{}

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
	done   chan struct{} // closed when nothing of it is under way any more

	mu     sync.Mutex
	offers map[uint32]*intake
	lastID uint32
}

func (h *Hub) serve(conn *quic.Conn) {
	known := false
	leave := func() {
		if !known {
			known = true
			h.strangers.Add(-1)
		}
	}
	defer leave()
	c := &edgeConn{
		h: h, conn: conn, since: time.Now(), done: make(chan struct{}),
		offers: map[uint32]*intake{}, large: make(chan struct{}, largePerEdge),
	}
	c.ctx, c.cancel = context.WithCancelCause(h.ctx)
	defer c.cancel(nil)
	stop := context.AfterFunc(conn.Context(), func() { c.cancel(context.Cause(conn.Context())) })
	defer stop()

	ctl, r, welcome, refusal := c.admit()
	if refusal != nil {
		if ctl != nil {
			ctl.SetWriteDeadline(time.Now().Add(time.Second))
			_, _ = ctl.Write(refusal.Append(nil))
		}
		closeWith(conn, refusal)
		return
	}
	leave()
	c.out = newOutbox(ctl, c.cancel)
	c.out.add(welcome.Append)
	ctl.SetPriority(0, true)

	older := h.register(c)
	defer h.unregister(c)
	if older != nil {
		older.cancel(&frame.Error{Code: frame.CodeSuperseded, Text: "another connection with the same device key has taken over"})
		select {
		case <-older.done:
		case <-time.After(drainTimeout):
		}
	}
	h.log.Info("edge connected", "edge", c.id.EdgeID, "name", c.id.Name, "user", c.id.User, "addr", c.id.Addr, "version", c.hello.Software)
	c.goDo(func() error { return c.out.run(c.ctx.Done()) })
	c.goDo(func() error { return c.read(r) })
	c.goDo(c.acceptStreams)
	<-c.ctx.Done()

	cause := context.Cause(c.ctx)
	bye := asError(cause, frame.CodeInternal)
	switch {
	case h.ctx.Err() != nil:
		bye = &frame.Error{Code: frame.CodeShutdown, Text: "the hub is shutting down"}
	case remote(cause) != nil || conn.Context().Err() != nil:
		bye = &frame.Error{}
	}
	closeWith(conn, bye)
	c.wg.Wait()
	c.mu.Lock()
	offers := c.offers
	c.offers = map[uint32]*intake{}
	c.mu.Unlock()
	for _, in := range offers {
		in.end()
	}
	close(c.done)
	reason := explain(cause, c.id.Addr, h.conf.Timing.Idle).Error()
	if bye.Code == frame.CodeShutdown {
		reason = bye.Text // not that of the context
	}
	if bye.Code == frame.CodeProtocol || bye.Code == frame.CodeTooLarge {
		h.refuse("bad "+c.id.EdgeID, "edge broke the protocol", "edge", c.id.EdgeID, "name", c.id.Name, "addr", c.id.Addr, "error", bye.Text)
	}
	h.log.Info("edge disconnected", "edge", c.id.EdgeID, "name", c.id.Name, "addr", c.id.Addr, "reason", reason)
}

func (h *Hub) register(c *edgeConn) (older *edgeConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	older = h.edges[c.id.EdgeID]
	h.edges[c.id.EdgeID] = c
	return older
}

func (h *Hub) unregister(c *edgeConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.edges[c.id.EdgeID] == c {
		delete(h.edges, c.id.EdgeID)
	}
}

// admit reads and checks the hello.
func (c *edgeConn) admit() (*quic.Stream, *frame.Reader, *frame.Welcome, *frame.Error) {
	h := c.h
	addr := c.conn.RemoteAddr().String()
	host, _, _ := net.SplitHostPort(addr)
	ctx, cancel := context.WithTimeout(c.ctx, helloTimeout)
	defer cancel()
	ctl, err := c.conn.AcceptStream(ctx)
	if err != nil {
		return nil, nil, nil, &frame.Error{Code: frame.CodeTimeout, Text: "no hello came"}
	}
	ctl.SetReadDeadline(time.Now().Add(helloTimeout))
	r := frame.NewReader(ctl, helloLimit)
	t, content, err := r.Next(nil)
	if err == nil && t != frame.TypeHello {
		err = fmt.Errorf("%v instead of a hello: %w", t, frame.ErrMalformed)
	}
	if err == nil {
		c.hello, err = frame.DecodeHello(content)
	}
	if err != nil {
		h.refuse("hello "+host, "connection without a valid hello refused", "addr", addr, "error", err.Error())
		return ctl, nil, nil, asError(err, frame.CodeProtocol)
	}
	ctl.SetReadDeadline(time.Time{})
	hello := &c.hello
	if hello.MaxVersion < frame.MinVersion || hello.MinVersion > frame.Version {
		text := fmt.Sprintf("the edge speaks protocol versions %d to %d, this hub %d to %d: update the older of the two",
			hello.MinVersion, hello.MaxVersion, frame.MinVersion, frame.Version)
		h.refuse("version "+host, "edge refused", "addr", addr, "name", printable(hello.Name), "reason", text)
		return ctl, nil, nil, &frame.Error{Code: frame.CodeVersion, Text: text}
	}
	secret, err := tlsSecret(c.conn)
	if err != nil {
		return ctl, nil, nil, &frame.Error{Code: frame.CodeInternal, Text: err.Error()}
	}
	id, refusal, why := h.verifier.verify(hello, secret)
	if refusal != nil {
		h.refuse("auth "+host+why, "edge refused", "addr", addr, "edge", printable(hello.EdgeID), "name", printable(hello.Name), "reason", why)
		return ctl, nil, nil, refusal
	}
	hello.Password = ""
	id.Addr = addr
	id.Name = printable(id.Name)
	hello.Software = printable(hello.Software)
	c.id = id
	h.mu.Lock()
	full := len(h.edges) >= h.conf.MaxEdges && h.edges[id.EdgeID] == nil
	h.mu.Unlock()
	if full {
		h.refuse("full", "edge refused, too many are connected", "edge", id.EdgeID, "addr", addr, "max_edges", h.conf.MaxEdges)
		return ctl, nil, nil, &frame.Error{Code: frame.CodeBusy, Text: fmt.Sprintf("the hub has its %d edges: raise max_edges", h.conf.MaxEdges)}
	}
	return ctl, r, &frame.Welcome{
		Version: min(hello.MaxVersion, frame.Version), Features: hello.Features & frame.FeatureS2,
		HubID: h.conf.ID, Name: h.conf.Name, Software: h.software, MaxMessage: uint64(h.conf.MaxMessage),
	}, nil
}

// printable bounds and cleans what a peer calls itself, for logs and displays.
func printable(s string) string {
	if len(s) > 128 {
		s = s[:128]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return '?'
		}
		return r
	}, s)
}

func (c *edgeConn) goDo(fn func() error) {
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		if err := fn(); err != nil {
			c.cancel(err)
		}
	}()
}

// read takes the edge's control frames.
func (c *edgeConn) read(r *frame.Reader) error {
	r.SetLimit(controlLimit)
	var buf []byte
	for {
		t, content, err := r.Next(buf)
		if err != nil {
			return fmt.Errorf("read control stream: %w", err)
		}
		buf = content
		switch t {
		case frame.TypeOffer:
			o, err := frame.DecodeOffer(content)
			if err != nil {
				return err
			}
			if err := c.offer(&o); err != nil {
				return err
			}
		case frame.TypePing:
			c.out.add(func(b []byte) []byte { return frame.AppendPong(b, content) })
		case frame.TypePong:
		case frame.TypeError:
			fe, err := frame.DecodeError(content)
			if err != nil {
				return err
			}
			if fe.Offer == 0 {
				return fe
			}
			if in := c.find(fe.Offer); in != nil {
				in.fail(fe)
			}
		default:
			return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("%v on the control stream", t)}
		}
	}
}

func (c *edgeConn) find(id uint32) *intake {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.offers[id]
}

// offer takes up an export.
func (c *edgeConn) offer(o *frame.Offer) error {
	in := &intake{c: c, o: *o, ready: make(chan struct{})}
	in.ctx, in.cancel = context.WithCancelCause(c.ctx)
	c.mu.Lock()
	var older []*intake
	for _, x := range c.offers {
		if x.o.To == o.To && x.o.UID == o.UID {
			older = append(older, x)
		}
	}
	bad, full := o.ID <= c.lastID, len(c.offers) >= maxOffers
	if !bad && !full {
		c.lastID = o.ID
		c.offers[o.ID] = in
	}
	c.mu.Unlock()
	if bad {
		return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("offer %d comes after offer %d", o.ID, c.lastID)}
	}
	if full {
		return &frame.Error{Code: frame.CodeBusy, Text: fmt.Sprintf("an edge may export at most %d streams", maxOffers)}
	}
	c.goDo(func() error {
		// The position answered must not be overtaken by what an earlier
		// run of the same export has under way.
		for _, x := range older {
			x.fail(&frame.Error{Code: frame.CodeNone, Offer: x.o.ID, Text: "offered anew"})
			x.end()
			c.forget(x)
		}
		a := frame.Accept{Offer: o.ID}
		target, err := c.h.sink.Open(in.ctx, c.id, &in.o)
		if err != nil {
			fe := *asError(err, frame.CodeInternal)
			fe.Offer = o.ID
			a.Error = fe
			c.forget(in)
			c.h.refuse("open "+c.id.EdgeID+o.To+fe.Text, "export refused", "edge", c.id.EdgeID, "name", c.id.Name,
				"stream", printable(o.Stream), "to", printable(o.To), "error", fe.Text)
		} else {
			a.Position, a.Known = target.Position()
			in.mu.Lock()
			in.target, in.pos = target, a.Position
			in.mu.Unlock()
		}
		close(in.ready)
		c.out.add(a.Append)
		return nil
	})
	return nil
}

func (c *edgeConn) forget(in *intake) {
	c.mu.Lock()
	delete(c.offers, in.o.ID)
	c.mu.Unlock()
}

func (c *edgeConn) acceptStreams() error {
	for {
		rs, err := c.conn.AcceptUniStream(c.ctx)
		if err != nil {
			return fmt.Errorf("accept export stream: %w", err)
		}
		c.goDo(func() error { return c.receive(rs) })
	}
}

// intake is one offer at the hub: from the offer to the end of its stream.
type intake struct {
	c      *edgeConn
	o      frame.Offer
	ready  chan struct{} // closed when the sink has answered
	ctx    context.Context
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	target  Target // nil before ready, if refused, or after end
	open    bool   // its stream has come
	pending int    // batches under way
	idle    chan struct{}
	pos     frame.Position
	failed  *frame.Error
	meter   replay.Meter
	lost    [frame.GapDamaged + 1]uint64 // sequences in gaps not logged yet, by reason
	lostLog time.Time
}

// lostEvery bounds how often messages lost at an edge are logged, per export.
const lostEvery = 10 * time.Second

// tellLost logs messages that the edge lost before it could send them. What was
// deleted one by one was meant to be.
func (in *intake) tellLost(now time.Time) {
	in.mu.Lock()
	removed, damaged := in.lost[frame.GapRemoved], in.lost[frame.GapDamaged]
	tell := removed+damaged > 0 && now.Sub(in.lostLog) >= lostEvery
	if tell {
		clear(in.lost[:])
		in.lostLog = now
	}
	through := in.pos.Through
	in.mu.Unlock()
	if tell {
		in.c.h.log.Warn("messages were lost at an edge before they were sent", "edge", in.c.id.EdgeID, "name", in.c.id.Name,
			"stream", printable(in.o.Stream), "to", printable(in.o.To), "removed_by_limits", removed, "damaged", damaged, "through", through)
	}
}

// fail ends the intake, and tells the edge why unless the edge wanted it.
func (in *intake) fail(fe *frame.Error) {
	in.mu.Lock()
	first := in.failed == nil
	if first {
		in.failed = fe
	}
	in.mu.Unlock()
	if !first {
		return
	}
	fe.Offer = in.o.ID
	if fe.Code != frame.CodeNone && in.c.out != nil {
		in.c.out.add(fe.Append)
	}
	in.cancel(fe)
}

// end waits for batches under way and lets go of the target.
func (in *intake) end() {
	in.cancel(nil)
	in.mu.Lock()
	target := in.target
	in.target = nil
	var idle chan struct{}
	if in.pending > 0 {
		if in.idle == nil {
			in.idle = make(chan struct{})
		}
		idle = in.idle
	}
	in.mu.Unlock()
	if idle != nil {
		select {
		case <-idle:
		case <-time.After(drainTimeout):
		}
	}
	if target != nil {
		target.Close()
		in.mu.Lock()
		in.lostLog = time.Time{}
		in.mu.Unlock()
		in.tellLost(time.Now())
	}
}

// parcel is a batch with the buffer that it aliases.
type parcel struct {
	buf   []byte
	batch frame.Batch
}

var parcels = sync.Pool{New: func() any { return new(parcel) }}

// maxParcel bounds the buffers that are kept for reuse.
const maxParcel = 128 << 10

func (p *parcel) release() {
	if cap(p.buf) > maxParcel {
		p.buf = nil
	}
	clear(p.batch.Msgs)
	parcels.Put(p)
}

// receive reads an export stream and hands its batches to the target. Only a
// breach of the protocol is returned: it ends the connection.
func (c *edgeConn) receive(rs *quic.ReceiveStream) error {
	code := quic.StreamErrorCode(frame.CodeNone)
	defer func() { rs.CancelRead(code) }()
	r := frame.NewReader(rs, frame.MaxPayload)
	rs.SetReadDeadline(time.Now().Add(helloTimeout))
	t, content, err := r.Next(nil)
	if err != nil {
		return c.streamError(err)
	}
	if t != frame.TypeOpen {
		return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("%v at the start of an export stream", t)}
	}
	id, err := frame.DecodeOpen(content)
	if err != nil {
		return err
	}
	in := c.find(id)
	if in == nil {
		return nil // ended in the meantime; the edge knows, or will
	}
	<-in.ready
	in.mu.Lock()
	target, opened := in.target, in.open
	in.open = true
	in.mu.Unlock()
	if target == nil {
		return nil
	}
	if opened {
		return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("offer %d was opened twice", id)}
	}
	defer c.forget(in)
	defer in.end()
	stop := context.AfterFunc(in.ctx, func() { rs.CancelRead(code) })
	defer stop()
	rs.SetReadDeadline(time.Time{})

	// A message beyond a frame needs memory out of proportion to what has
	// arrived: few may be received at a time, and not forever.
	slot := false
	release := func() {
		if slot {
			slot = false
			<-c.large
			<-c.h.large
		}
	}
	defer release()
	r.More = func() error {
		for _, ch := range []chan struct{}{c.large, c.h.large} {
			select {
			case ch <- struct{}{}:
			case <-in.ctx.Done():
				if ch == c.h.large {
					<-c.large
				}
				return context.Cause(in.ctx)
			}
		}
		slot = true
		return rs.SetReadDeadline(time.Now().Add(largeTimeout))
	}
	// What a batch adds to its messages is less than two frames.
	r.SetLimit(c.h.conf.MaxMessage + 2*frame.MaxFrame)
	var dec frame.Decoder
	for {
		p := parcels.Get().(*parcel)
		var t frame.Type
		t, p.buf, err = r.Next(p.buf)
		if err != nil {
			p.release()
			return c.streamError(err)
		}
		if t != frame.TypeBatch {
			return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("%v on an export stream", t)}
		}
		if err := dec.Batch(p.buf, &p.batch); err != nil {
			return err
		}
		if p.batch.Offer != id {
			return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("a batch of offer %d on the stream of %d", p.batch.Offer, id)}
		}
		in.mu.Lock()
		in.pending++
		in.mu.Unlock()
		err = target.Ingest(in.ctx, &p.batch, func(pos frame.Position, err error) { in.settled(p, pos, err) })
		if err != nil {
			in.settled(p, frame.Position{}, err)
			return nil
		}
		if slot {
			release()
			rs.SetReadDeadline(time.Time{})
		}
	}
}

// settled takes the outcome of a batch.
func (in *intake) settled(p *parcel, pos frame.Position, err error) {
	in.mu.Lock()
	failed := in.failed != nil
	if err == nil && !failed {
		var bytes int
		for i := range p.batch.Msgs {
			m := &p.batch.Msgs[i]
			bytes += len(m.Subject) + len(m.Header) + len(m.Data)
		}
		in.pos = pos
		for _, g := range p.batch.Gaps {
			if int(g.Reason) < len(in.lost) {
				in.lost[g.Reason] += g.Last - g.First + 1
			}
		}
		in.meter.Add(time.Now(), uint64(len(p.batch.Msgs)), uint64(bytes))
	}
	in.mu.Unlock()
	p.release()
	switch {
	case failed:
	case err != nil:
		if in.ctx.Err() == nil {
			fe := *asError(err, frame.CodeInternal)
			in.c.h.refuse("ingest "+in.c.id.EdgeID+in.o.To+fe.Text, "export stopped", "edge", in.c.id.EdgeID, "name", in.c.id.Name,
				"stream", printable(in.o.Stream), "to", printable(in.o.To), "error", fe.Text)
			in.fail(&fe)
		}
	default:
		in.c.out.position(in.o.ID, pos)
		in.tellLost(time.Now())
	}
	in.mu.Lock()
	in.pending--
	if in.pending == 0 && in.idle != nil {
		close(in.idle)
		in.idle = nil
	}
	in.mu.Unlock()
}

// streamError sorts out what a failed read of an export stream means: nil if
// only the stream has ended.
func (c *edgeConn) streamError(err error) error {
	var se *quic.StreamError
	switch {
	case errors.Is(err, io.EOF), errors.As(err, &se), c.ctx.Err() != nil:
		return nil
	case errors.Is(err, io.ErrUnexpectedEOF):
		return &frame.Error{Code: frame.CodeProtocol, Text: "an export stream ended inside a frame"}
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return &frame.Error{Code: frame.CodeTimeout, Text: "a message did not arrive in time"}
	}
	return fmt.Errorf("read export stream: %w", err)
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

func (in *intake) status(now time.Time) EdgeExport {
	in.mu.Lock()
	defer in.mu.Unlock()
	x := EdgeExport{
		Stream: printable(in.o.Stream), To: printable(in.o.To), UID: in.o.UID.String(),
		Incarnation: in.pos.Incarnation, Through: in.pos.Through, Msgs: in.pos.Msgs, GapMsgs: in.pos.Gaps,
	}
	x.MsgRate, x.ByteRate = in.meter.Rate(now)
	if in.failed != nil && in.failed.Code != frame.CodeNone {
		x.Error = in.failed.Error()
	}
	return x
}
