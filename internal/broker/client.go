package broker

import (
	"bytes"
	"cmp"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"petiole/internal/subject"
	"petiole/internal/subject/transform"
	"petiole/internal/wire"
)

// Sizes of read buffers in octets. Buffers come from a pool and return to it
// when a client has sent nothing more for the moment and no operation is
// incomplete, so idle clients have none. Messages that do not fit get larger
// ones.
const (
	readSize    = 64 << 10
	readSizeTLS = 16 << 10 // held while waiting, and enough for the largest record
)

// After an error the rest of what a client sends is read and thrown away for
// this long and this many octets: closing a socket with input unread would
// take the error message back that the client is to see.
const (
	lingerTime  = 500 * time.Millisecond
	lingerBytes = 4 << 20
)

var (
	errSlowDeadline = fmt.Errorf("%w: took nothing within the write deadline", wire.ErrSlowConsumer)
	errSlowPending  = fmt.Errorf("%w: too many octets pending", wire.ErrSlowConsumer)
	errShutdown     = errors.New("server shut down")
)

// client is one connection. Its read loop owns what has no lock.
type client struct {
	srv   *Server
	acc   *Account
	sock  net.Conn      // the TCP connection
	conn  net.Conn      // sock, or TLS over it; set before the read loop starts
	raw   *directWriter // nil with TLS
	kind  string        // ConnStandard or ConnInProcess
	log   *slog.Logger
	start time.Time
	tls   atomic.Bool
	// tlsState is what TLS agreed on; nil without.
	tlsState atomic.Pointer[tlsState]
	cert     atomic.Pointer[x509.Certificate] // the client's; nil without one
	ready    atomic.Bool                      // open is done: the protocol may be spoken
	nonce    string

	out outbound
	pub *Publisher

	info      atomic.Pointer[ClientInfo] // replaced at CONNECT
	connected bool                       // CONNECT was accepted
	ponged    bool                       // and a PING after it answered
	verbose   bool
	pedantic  bool
	echo      bool
	headers   atomic.Bool // CONNECT said that headers are understood
	noResp    bool
	perms     atomic.Pointer[perms]      // nil permits everything
	cred      atomic.Pointer[connectArg] // what it authenticated with; nil before
	awaiting  atomic.Bool                // authentication is still due
	async     atomic.Bool                // understands INFO at any time, and is ready for it
	protocol  int                        // of CONNECT
	changed   atomic.Uint64              // counts changes of perms by others than the read loop
	seen      uint64                     // changed, when the publisher's cache was last emptied

	authMu  sync.Mutex // held while it is decided which user the client is, and what that permits
	proved  proof      // what was found out about cred; guarded by authMu
	mu      sync.Mutex // guards subs and pings
	subs    map[string]*subscription
	pings   int       // unanswered
	pinged  time.Time // when the last was sent
	pinger  *time.Timer
	authDue *time.Timer
	why     error // first reason for the end

	maps *transform.Map // during parse: the mappings; nil if there are none

	closing  atomic.Bool // input is to be thrown away
	activity atomic.Int64
	rtt      atomic.Int64
	inMsgs   atomic.Uint64
	inBytes  atomic.Uint64
	seenAct  int64 // activity at the last ping
}

// tlsState is a version of TLS and a cipher suite, by their numbers.
type tlsState struct{ version, cipher uint16 }

// connectArg is the document of CONNECT.
type connectArg struct {
	Verbose      bool   `json:"verbose"`
	Pedantic     bool   `json:"pedantic"`
	TLSRequired  bool   `json:"tls_required"`
	Token        string `json:"auth_token"`
	User         string `json:"user"`
	Pass         string `json:"pass"`
	Name         string `json:"name"`
	Lang         string `json:"lang"`
	Version      string `json:"version"`
	Protocol     int    `json:"protocol"`
	Echo         bool   `json:"echo"`
	Headers      bool   `json:"headers"`
	NoResponders bool   `json:"no_responders"`
	NKey         string `json:"nkey"`
	Sig          string `json:"sig"`

	// Once asked for an account of that name; an error today, as with nats-server.
	Account    string `json:"account"`
	NewAccount bool   `json:"new_account"`
}

// subscription is one SUB of a client, or an internal handler.
type subscription struct {
	c       *client // nil for a handler
	handler Handler
	acc     *Account
	subject string
	queue   string
	sid     []byte
	filter  atomic.Bool // some of what matches is denied to the client

	// For a client's these are guarded by its out.mu.
	delivered int
	max       int // unsubscribe after this many; 0 is never
	closed    atomic.Bool
}

// inbox is what has been read and not yet processed.
type inbox struct {
	own *slab
	buf []byte // all of own's memory; nil if nothing is held
	w   int    // buf[:w] is filled
}

// grow makes the buffer at least n octets large and keeps what is in it.
func (in *inbox) grow(n int) {
	s := newSlab(n)
	buf := s.b[:cap(s.b)]
	copy(buf, in.buf[:in.w])
	in.free()
	in.own, in.buf = s, buf
}

// free gives the buffer back.
func (in *inbox) free() {
	if in.own != nil {
		in.own.release()
		in.own, in.buf = nil, nil
	}
}

// readLoop serves the client until the connection ends.
// pre is what has been read already.
func (c *client) readLoop(pre []byte) error {
	var (
		ev   wire.Event
		in   inbox
		need = 1 // octets below which parsing is pointless
		gone int // octets thrown away
		recv = c.reader(&in)
	)
	defer in.free()
	if len(pre) > 0 {
		in.grow(readSizeTLS)
		next := recv
		recv = func() (int, error) {
			recv = next
			return copy(in.buf, pre), nil
		}
	}
	for {
		n, err := recv()
		if n > 0 && c.closing.Load() {
			if gone += n; gone > lingerBytes {
				return nil
			}
			n = 0
		}
		if n > 0 {
			c.activity.Store(time.Now().UnixNano())
			in.w += n
			r := 0
			if in.w >= need {
				r, need = c.parse(in.buf[:in.w], &ev)
			}
			c.endBatch()
			in.w = copy(in.buf, in.buf[r:in.w])
			switch {
			case in.w == len(in.buf), need > len(in.buf) && in.w > len(in.buf)/2:
				// Grown by what has really arrived, not by what was announced.
				in.grow(2 * len(in.buf))
			case in.w == 0 && c.raw == nil && len(in.buf) > readSizeTLS:
				in.free()
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) || c.closing.Load() {
				return nil
			}
			return err
		}
	}
}

// waitingReader reads with a buffer that is held while waiting.
func (c *client) waitingReader(in *inbox) func() (int, error) {
	return func() (int, error) {
		if in.buf == nil {
			in.grow(readSizeTLS)
		}
		return c.conn.Read(in.buf[in.w:])
	}
}

// parse processes the operations in buf and returns how much of it is done
// with, and how much has to be there for going on.
func (c *client) parse(buf []byte, ev *wire.Event) (r, need int) {
	var msgs, octets uint64
	need = 1
	set := c.srv.set.Load()
	c.maps = set.maps
	lim := wire.Limits{ControlLine: set.MaxControlLine, Payload: set.MaxPayload}
	if n := c.changed.Load(); n != c.seen {
		c.seen = n
		c.pub.cache.Forget() // it knows what was permitted
	}
	for r < len(buf) && !c.closing.Load() {
		n, more, err := wire.Next(buf[r:], lim, ev)
		if err != nil {
			var we *wire.Error
			errors.As(err, &we)
			c.fail(we)
			break
		}
		if n == 0 {
			need = more
			break
		}
		r += n
		if set.Trace {
			c.traceIn(ev)
		}
		switch ev.Op {
		case wire.OpPub:
			msgs++
			octets += uint64(len(ev.Header) + len(ev.Data))
			c.onPub(ev)
		case wire.OpSub:
			c.onSub(ev)
		case wire.OpUnsub:
			c.onUnsub(ev)
		case wire.OpPing:
			c.onPing()
		case wire.OpPong:
			c.onPong()
		case wire.OpConnect:
			c.onConnect(ev.Arg)
		}
	}
	if msgs > 0 {
		c.inMsgs.Add(msgs)
		c.inBytes.Add(octets)
		c.srv.inMsgs.Add(msgs)
		c.srv.inBytes.Add(octets)
	}
	return r, need
}

// endBatch does what is due after the octets of one read.
func (c *client) endBatch() {
	p := c.pub
	if p.handled {
		p.handled = false
		if f := c.srv.set.Load().AfterRead; f != nil {
			f()
		}
	}
	if len(p.dirty) > 0 {
		p.flush(true)
	}
}

var (
	lineOK   = []byte("+OK\r\n")
	linePing = []byte("PING\r\n")
	linePong = []byte("PONG\r\n")
)

// reply queues protocol text for this client; it is flushed with the batch.
func (c *client) reply(text []byte) {
	c.text(text, true)
}

// text queues protocol text. With batch it is called on the read loop and
// flushed with the batch.
func (c *client) text(text []byte, batch bool) {
	o := &c.out
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.closed:
	case o.pending+int64(len(text)) > c.srv.set.Load().MaxPending:
		o.closed = true
		go c.disconnect(errSlowPending)
	default:
		copy(o.room(len(text)), text)
		if batch {
			c.pub.touch(c)
		}
		if c.srv.set.Load().Trace {
			c.trace("->>", text)
		}
	}
}

func (c *client) ok() {
	if c.verbose {
		c.reply(lineOK)
	}
}

// sendErr queues an error and flushes it. The connection stays.
func (c *client) sendErr(text string) {
	line := make([]byte, 0, len(text)+10)
	line = append(append(append(line, "-ERR '"...), text...), "'\r\n"...)
	c.text(line, false)
	c.flush()
}

// fail sends err and ends the connection.
func (c *client) fail(err *wire.Error) { c.finish(err, err.Error()) }

// finish sends text, if any, as error and ends the connection.
func (c *client) finish(why error, text string) {
	if c.closing.Swap(true) {
		return
	}
	c.because(why)
	o := &c.out
	o.mu.Lock()
	if o.closed {
		o.mu.Unlock()
		return
	}
	if text != "" {
		line := "-ERR '" + text + "'\r\n"
		copy(o.room(len(line)), line)
		if c.srv.set.Load().Trace {
			c.trace("->>", []byte(line))
		}
	}
	o.closed, o.finish = true, true
	idle := !o.flushing && len(o.segs) == 0
	o.mu.Unlock()
	if idle {
		c.halfClose()
		return
	}
	c.flush()
}

// halfClose ends the sending side; the read loop ends soon after.
func (c *client) halfClose() {
	_ = c.sock.SetReadDeadline(time.Now().Add(lingerTime))
	if hc, ok := c.sock.(interface{ CloseWrite() error }); !ok || hc.CloseWrite() != nil {
		_ = c.sock.Close()
	}
}

// disconnect ends the connection at once. The read loop cleans up.
func (c *client) disconnect(why error) {
	c.closing.Store(true)
	c.because(why)
	o := &c.out
	o.mu.Lock()
	o.closed = true
	o.drop()
	o.mu.Unlock()
	_ = c.sock.Close()
}

func (c *client) because(why error) {
	c.mu.Lock()
	if c.why == nil {
		c.why = why
	}
	c.mu.Unlock()
}

// due ends clients that do something before they are authenticated. Without
// CONNECT they count as the user for those without credentials, if there is
// one: whoever types the protocol need not begin with it.
func (c *client) due() bool {
	if !c.awaiting.Load() {
		return false
	}
	if c.srv.set.Load().auth.noAuth != nil {
		if !c.authenticate(&connectArg{}) {
			return true
		}
		c.connected = false // CONNECT may still come
		return false
	}
	c.srv.authErrors.Add(1)
	c.fail(wire.ErrAuthorization)
	return true
}

func (c *client) onPing() {
	if c.due() {
		return
	}
	c.reply(linePong)
	if !c.connected {
		return
	}
	first := !c.ponged
	c.ponged = true
	if c.protocol >= 1 {
		// Not before: a client that waits for its first PONG takes nothing else.
		c.async.Store(true)
		if first {
			c.reply(c.srv.infoLine(c, c.srv.set.Load(), c.tls.Load(), connects))
		}
	}
}

func (c *client) onPong() {
	c.mu.Lock()
	if c.pings > 0 && !c.pinged.IsZero() {
		c.rtt.Store(int64(time.Since(c.pinged)))
	}
	c.pings = 0
	c.mu.Unlock()
}

// onConnect takes CONNECT. A client that sends another one keeps what that does
// not mention, but not its subscriptions, and has to prove again who it is.
func (c *client) onConnect(doc []byte) {
	arg := connectArg{Echo: true, Verbose: true, Pedantic: true}
	if c.connected {
		arg = *c.cred.Load()
	}
	if err := json.Unmarshal(doc, &arg); err != nil {
		c.fail(wire.ErrParser)
		return
	}
	headers := arg.Headers && !c.srv.set.Load().NoHeaders
	if c.connected {
		c.unsubscribeAll()
	}
	switch {
	case !c.authenticate(&arg):
		return
	case arg.Account != "" || arg.NewAccount:
		c.srv.authErrors.Add(1)
		c.fail(wire.ErrAuthorization)
		return
	case arg.Protocol < 0 || arg.Protocol > 1:
		c.fail(wire.ErrProtocol)
		return
	case arg.NoResponders && !headers:
		c.fail(wire.ErrNoResponders)
		return
	}
	c.verbose, c.pedantic, c.echo, c.noResp = arg.Verbose, arg.Pedantic, arg.Echo, arg.NoResponders
	c.protocol = arg.Protocol
	c.headers.Store(headers)
	c.ok()
}

// unsubscribeAll ends the client's subscriptions.
func (c *client) unsubscribeAll() {
	c.mu.Lock()
	subs := make([]*subscription, 0, len(c.subs))
	for _, sub := range c.subs {
		subs = append(subs, sub)
	}
	c.mu.Unlock()
	for _, sub := range subs {
		c.unsubscribe(sub, false)
	}
}

// authenticate makes the client the user that its CONNECT names. It reports
// whether it may stay.
func (c *client) authenticate(arg *connectArg) bool {
	c.srv.reload.RLock()
	defer c.srv.reload.RUnlock()
	c.authMu.Lock()
	defer c.authMu.Unlock()
	id := c.identity(arg)
	user, ok := c.srv.set.Load().auth.check(id)
	if !ok {
		c.srv.authErrors.Add(1)
		c.log.Warn("client failed to authenticate", "user", arg.User, "nkey", arg.NKey, "addr", c.addr())
		c.fail(wire.ErrAuthorization)
		return false
	}
	c.mu.Lock()
	if c.authDue != nil {
		c.authDue.Stop()
	}
	c.mu.Unlock()
	info := *c.info.Load()
	var perms *perms
	switch {
	case user != nil:
		info.User = cmp.Or(user.Name, user.NKey)
		perms = newPerms(user.Permissions)
	case len(arg.Token) == 0:
		info.User = arg.User
	}
	if perms != nil || c.perms.Load() != nil {
		c.perms.Store(perms)
		c.pub.cache.Forget()
	}
	info.Name, info.Lang, info.Version = arg.Name, arg.Lang, arg.Version
	info.Headers = arg.Headers && !c.srv.set.Load().NoHeaders
	c.info.Store(&info)
	c.connected = true
	c.cred.Store(arg)
	c.proved = id.proved
	c.awaiting.Store(false)
	return true
}

func (c *client) identity(arg *connectArg) *identity {
	return &identity{arg: arg, nonce: c.nonce, cert: c.cert.Load(), kind: c.kind}
}

func (c *client) onPub(ev *wire.Event) {
	if c.due() {
		return
	}
	if ev.HasHdr && !c.headers.Load() {
		c.fail(wire.ErrHeaders)
		return
	}
	p := c.pub
	if c.maps != nil && c.mapped(ev) {
		return
	}
	e := p.cache.Lookup(ev.Subject)
	if e.Note&noteValid == 0 {
		c.sendErrSoon(wire.ErrPublishSubject.Error())
		if c.noResp && len(ev.Reply) > 0 {
			c.noResponders(ev.Subject, ev.Reply) // it waits for an answer
		}
		return
	}
	if c.pedantic && e.Note&noteWild != 0 {
		c.sendErrSoon(wire.ErrPublishSubject.Error()) // a warning: the message goes on
	}
	if e.Note&notePermitted == 0 && !c.mayRespond(ev.Subject) {
		c.violation("Permissions Violation for Publish to " + strconv.Quote(string(ev.Subject)))
		return
	}
	if len(ev.Reply) > 0 && reservedReply(ev.Reply) {
		c.violation("Permissions Violation for Publish with Reply of " + strconv.Quote(string(ev.Reply)))
		return
	}
	c.ok()
	if !p.route(e, ev.Subject, ev.Reply, ev.Header, ev.Data) && c.noResp && len(ev.Reply) > 0 {
		c.noResponders(ev.Subject, ev.Reply)
	}
}

// reservedReply reports whether only a server may ask for answers there: what
// gateways and imported services route answers by, and the subjects by which
// consumers of JetStream learn what was acknowledged.
func reservedReply(reply []byte) bool {
	if reply[0] != '$' && reply[0] != '_' {
		return false
	}
	return gatewayReply(reply) || bytes.HasPrefix(reply, []byte("_R_.")) || bytes.HasPrefix(reply, []byte("$JS.ACK."))
}

// gatewayReply reports whether subj is one that gateways route answers by.
// Clients may not publish there.
func gatewayReply(subj []byte) bool {
	return bytes.HasPrefix(subj, []byte("_GR_.")) || bytes.HasPrefix(subj, []byte("$GR."))
}

// mapped replaces the subject of ev by the one that a mapping gives it, and
// reports whether the mapping wants the message to be lost instead.
func (c *client) mapped(ev *wire.Event) (lost bool) {
	if !subject.Valid(ev.Subject) {
		return false // to be refused
	}
	p := c.pub
	to, ok := c.maps.Apply(p.mapped[:0], unsafe.String(unsafe.SliceData(ev.Subject), len(ev.Subject)))
	p.mapped = to
	switch {
	case !ok:
		return false
	case len(to) > 0:
		ev.Subject = to
		return false
	}
	c.ok()
	if c.noResp && len(ev.Reply) > 0 {
		c.noResponders(nil, ev.Reply)
	}
	return true
}

// sendErrSoon queues an error that is flushed with the batch.
func (c *client) sendErrSoon(text string) {
	c.reply([]byte("-ERR '" + text + "'\r\n"))
}

func (c *client) violation(text string) {
	c.log.Warn("client violates its permissions", "cid", c.info.Load().ID, "user", c.info.Load().User, "violation", text)
	c.sendErrSoon(text)
}

// noResponders tells the client that nobody got its request, if it subscribes to
// the reply itself; members of queue groups are not told, as with nats-server.
func (c *client) noResponders(subj, reply []byte) {
	var sub *subscription
	e := c.pub.cache.Lookup(reply)
	for _, s := range e.Plain {
		if s.c == c {
			sub = s
			break
		}
	}
	if sub == nil {
		return
	}
	hdr := wire.AppendStatus(c.pub.scratch[:0], 503, "", "Nats-Subject", string(subj))
	c.pub.scratch = hdr
	c.pub.begin(reply, nil, hdr, nil)
	c.pub.status = true
	c.pub.deliver(sub)
	c.pub.status = false
	c.pub.end()
}

func (c *client) onSub(ev *wire.Event) {
	if c.due() {
		return
	}
	if !subject.Valid(ev.Subject) {
		c.sendErrSoon(wire.ErrSubject.Error())
		return
	}
	sub := &subscription{c: c, acc: c.acc, subject: string(ev.Subject), queue: string(ev.Queue), sid: bytes.Clone(ev.SID)}
	perms := c.perms.Load()
	if perms != nil {
		ok, filter := perms.maySubscribe(sub.subject, sub.queue)
		if !ok {
			text := "Permissions Violation for Subscription to " + strconv.Quote(sub.subject)
			if sub.queue != "" {
				text += " using queue " + strconv.Quote(sub.queue)
			}
			c.violation(text)
			return
		}
		sub.filter.Store(filter)
	}
	if m := c.srv.set.Load().MaxSubTokens; m > 0 && subject.NumTokens(sub.subject) > m {
		c.violation("Permissions Violation for Subscription to " + strconv.Quote(sub.subject) + ", too many tokens")
		return
	}
	c.mu.Lock()
	if _, dup := c.subs[string(ev.SID)]; dup {
		c.mu.Unlock()
		c.ok() // as nats-server: the first one stays
		return
	}
	if m := c.srv.set.Load().MaxSubs; m > 0 && len(c.subs) >= m {
		c.mu.Unlock()
		c.sendErrSoon(wire.ErrMaxSubs.Error())
		return
	}
	c.subs[string(sub.sid)] = sub
	c.mu.Unlock()
	if c.perms.Load() != perms {
		c.recheck(sub) // the permissions changed meanwhile, and who changed them may not have seen sub
	}
	c.acc.insert(sub, false)
	c.ok()
}

func (c *client) onUnsub(ev *wire.Event) {
	if c.due() {
		return
	}
	c.mu.Lock()
	sub := c.subs[string(ev.SID)]
	c.mu.Unlock()
	if sub != nil {
		end := ev.Max == 0
		if !end {
			c.out.mu.Lock()
			sub.max = ev.Max
			end = sub.delivered >= ev.Max
			c.out.mu.Unlock()
		}
		if end {
			c.unsubscribe(sub, false)
		}
	}
	c.ok()
}

// unsubscribe takes sub out; no message is delivered to it any more. It may be
// called from any goroutine, more than once; async is for [Account.remove].
func (c *client) unsubscribe(sub *subscription, async bool) {
	if sub.closed.Swap(true) {
		return
	}
	// Deliveries check the flag with out.mu held, and what the client is told
	// next is queued under it too: no message follows the answer to UNSUB.
	c.mu.Lock()
	if c.subs[string(sub.sid)] == sub {
		delete(c.subs, string(sub.sid))
	}
	c.mu.Unlock()
	c.acc.remove(sub, async)
}

// pingTick sends a PING, or finds that the client does not answer.
func (c *client) pingTick() {
	if c.closing.Load() {
		return
	}
	act := c.activity.Load()
	c.mu.Lock()
	if act != c.seenAct {
		c.seenAct = act
		c.pings = 0
	}
	stale := c.pings >= c.srv.set.Load().MaxPingsOut
	if !stale {
		c.pings++
		c.pinged = time.Now()
		if c.pinger != nil {
			c.pinger.Reset(c.srv.set.Load().PingInterval)
		}
	}
	c.mu.Unlock()
	if stale {
		c.srv.stale.Add(1)
		c.fail(wire.ErrStale)
		return
	}
	c.text(linePing, false)
	c.flush()
}
