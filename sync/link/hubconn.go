package link

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"petiole/sync/frame"
)

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
	var older *edgeConn
	if refusal == nil {
		if older, refusal = h.register(c); refusal == nil {
			defer h.unregister(c)
		}
	}
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
		h.refuse(c.id.EdgeID, "protocol", "edge broke the protocol", "edge", c.id.EdgeID, "name", c.id.Name, "addr", c.id.Addr, "error", bye.Text)
	}
	h.log.Info("edge disconnected", "edge", c.id.EdgeID, "name", c.id.Name, "addr", c.id.Addr, "reason", reason)
}

// register makes c the connection of its edge, unless there are as many edges as
// may be. It returns the one before.
func (h *Hub) register(c *edgeConn) (older *edgeConn, refusal *frame.Error) {
	h.mu.Lock()
	older = h.edges[c.id.EdgeID]
	full := older == nil && len(h.edges) >= h.conf.MaxEdges
	if !full {
		h.edges[c.id.EdgeID] = c
	}
	h.mu.Unlock()
	if full {
		h.refuse("", "full", "edge refused, too many are connected", "edge", c.id.EdgeID, "addr", c.id.Addr, "max_edges", h.conf.MaxEdges)
		return nil, &frame.Error{Code: frame.CodeBusy, Text: fmt.Sprintf("the hub has its %d edges: raise max_edges", h.conf.MaxEdges)}
	}
	return older, nil
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
		h.refuse(host, "hello", "connection without a valid hello refused", "addr", addr, "error", err.Error())
		return ctl, nil, nil, asError(err, frame.CodeProtocol)
	}
	ctl.SetReadDeadline(time.Time{})
	hello := &c.hello
	if hello.MaxVersion < frame.MinVersion || hello.MinVersion > frame.Version {
		text := fmt.Sprintf("the edge speaks protocol versions %d to %d, this hub %d to %d: update the older of the two",
			hello.MinVersion, hello.MaxVersion, frame.MinVersion, frame.Version)
		h.refuse(host, "version", "edge refused", "addr", addr, "name", printable(hello.Name), "reason", text)
		return ctl, nil, nil, &frame.Error{Code: frame.CodeVersion, Text: text}
	}
	secret, err := tlsSecret(c.conn)
	if err != nil {
		return ctl, nil, nil, &frame.Error{Code: frame.CodeInternal, Text: err.Error()}
	}
	id, refusal, why := h.verifier.verify(hello, secret)
	if refusal != nil {
		h.refuse(host, "auth "+why, "edge refused", "addr", addr, "edge", printable(hello.EdgeID), "name", printable(hello.Name), "reason", why)
		return ctl, nil, nil, refusal
	}
	hello.Password, hello.Signed, hello.DeviceSig, hello.NKeySig = "", nil, nil, nil
	id.Addr = addr
	id.Name = printable(id.Name)
	hello.Software = printable(hello.Software)
	c.id = id
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
			c.h.refuse(c.id.EdgeID, "open "+o.To+fe.Text, "export refused", "edge", c.id.EdgeID, "name", c.id.Name,
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
