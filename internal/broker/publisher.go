package broker

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"petiole/internal/subject"
)

// besideMessage is how many octets may be queued for a client beside a message,
// whatever MaxPending says: nobody could ever get a message that is larger than
// that, or as large and has a line, and streams may hold such messages, stored
// under another configuration or at another server.
const besideMessage = 64 << 10

// Publisher publishes like [Account.Publish], but remembers which
// subscriptions match the subjects it publishes to and leaves flushing to its
// owner. It is the fastest way to deliver many messages. A Publisher must not
// be used by two goroutines at the same time.
type Publisher struct {
	acc     *Account
	client  *client // whose read loop this belongs to; nil for internal ones
	cache   *subject.Cache[*subscription]
	root    *Publisher // outermost of those nested in handlers
	child   *Publisher // for publishing from within a handler that this one calls
	depth   int
	several bool // the message may get more than one copy
	handled bool // (root) a handler ran in this batch
	status  bool // the message is the server's to the client, not the client's

	// Destinations of the batch (of root only).
	dirty   []*client
	batch   uint64
	outMsgs uint64
	outOct  uint64

	// The message being routed.
	subj, reply, hdr, data []byte
	head                   []byte // "HMSG subject "; less the first octet it serves MSG
	tail                   []byte // "[reply ]size\r\n" for MSG; made when needed
	hTail                  []byte // "[reply ]header total\r\n" for HMSG; made when needed
	blob                   *slab  // header, data and line end, shared by the receivers
	bare                   *slab  // data and line end likewise, for receivers without headers
	msg                    Msg
	scratch                []byte
	mapped                 []byte // the subject that a mapping gives the client's message
}

// Subjects are classified once per cache entry.
const (
	noteValid     = 1 << iota // well-formed
	notePermitted             // and the client may publish to it
	noteWild                  // a token looks like a wildcard
)

// maxCached is the number of subjects a publisher remembers.
const maxCached = 1024

// shareFrom is the message size in octets from which several receivers share
// one copy. A message for a single one is copied to its queue, behind the line
// that announces it, unless it is larger than what the queue is made of.
const shareFrom = 8 << 10

// maxDepth bounds handlers that publish to handlers.
const maxDepth = 32

func newPublisher(a *Account, c *client) *Publisher {
	p := &Publisher{acc: a, client: c}
	p.root = p
	p.cache = subject.NewCache(&a.index, maxCached, func(subj []byte) uint8 {
		// Requests of the JetStream API carry filters in their subjects
		// ("$JS.API.CONSUMER.CREATE.S.C.orders.>"): in what is published, "*"
		// and ">" are tokens like others.
		note := uint8(0)
		if subject.Valid(subj) {
			note = noteValid
		}
		if subject.HasWildcard(subj) {
			note |= noteWild
		}
		if c == nil || c.perms.Load().mayPublish(subj) && !gatewayReply(subj) {
			note |= notePermitted
		}
		return note
	})
	return p
}

// NewPublisher returns a new Publisher.
func (a *Account) NewPublisher() *Publisher { return newPublisher(a, nil) }

// Publish is [Account.Publish]; the message leaves with the next Flush.
func (p *Publisher) Publish(subj, reply string, hdr, data []byte) {
	p.PublishBytes(bytesOf(subj), bytesOf(reply), hdr, data)
}

// PublishBytes is [Account.PublishBytes]; the message leaves with the next
// Flush.
func (p *Publisher) PublishBytes(subj, reply, hdr, data []byte) {
	e := p.cache.Lookup(subj)
	if e.Note&noteValid == 0 {
		p.acc.srv.log.Error("message published inside to a subject that is not valid was dropped", "subject", string(subj))
		return
	}
	p.route(e, subj, reply, hdr, data)
}

// Deliver sends to the subscribers of to a message that shows them another
// subject: JetStream delivers to an inbox what was published elsewhere. Who
// gets it is decided by to (queue groups included); the MSG or HMSG line has
// subj. The message leaves with the next Flush.
func (p *Publisher) Deliver(to, subj string, reply, hdr, data []byte) {
	e := p.cache.Lookup(bytesOf(to))
	p.route(e, bytesOf(subj), reply, hdr, data)
}

// Flush sends what was published since the last Flush. It does not block on
// clients: what a socket does not take at once is left to the background.
func (p *Publisher) Flush() { p.flush(false) }

// route delivers a message to what e says matches its subject, and reports
// whether anyone got it.
func (p *Publisher) route(e *subject.Entry[*subscription], subj, reply, hdr, data []byte) (delivered bool) {
	if e.Empty() {
		return false
	}
	p.begin(subj, reply, hdr, data)
	p.several = len(e.Plain)+len(e.Queues) > 1
	for _, s := range e.Plain {
		if p.deliver(s) {
			delivered = true
		}
	}
	for i := range e.Queues {
		members := e.Queues[i].Members
		k := 0
		if len(members) > 1 {
			k = int(rand.Uint32N(uint32(len(members))))
		}
		// A member that is about to leave does not take the message with it.
		for range members {
			if p.deliver(members[k]) {
				delivered = true
				break
			}
			if k++; k == len(members) {
				k = 0
			}
		}
	}
	p.end()
	return delivered
}

// begin sets the message that deliver delivers.
func (p *Publisher) begin(subj, reply, hdr, data []byte) {
	p.subj, p.reply, p.hdr, p.data = subj, reply, hdr, data
	p.head = append(p.head[:0], "HMSG "...)
	p.head = append(p.head, subj...)
	p.head = append(p.head, ' ')
	p.tail, p.hTail = p.tail[:0], p.hTail[:0]
}

// end forgets the message.
func (p *Publisher) end() {
	if p.blob != nil {
		p.blob.release()
		p.blob = nil
	}
	if p.bare != nil {
		p.bare.release()
		p.bare = nil
	}
	p.subj, p.reply, p.hdr, p.data = nil, nil, nil, nil
}

var lineEnd = []byte("\r\n")

// deliver gives the message to one subscription and reports whether it took it.
func (p *Publisher) deliver(s *subscription) bool {
	c := s.c
	if c == nil {
		return p.call(s)
	}
	if c == p.client && !c.echo && !p.status {
		return false
	}
	if s.filter.Load() && c.perms.Load().denied(p.subj, s.queue) {
		return false
	}
	head, tail, hdr := p.head[1:], p.tail, p.hdr
	shared := &p.bare
	if len(hdr) > 0 && c.headers.Load() {
		if len(p.hTail) == 0 {
			p.hTail = p.replyPart(p.hTail)
			p.hTail = strconv.AppendInt(p.hTail, int64(len(hdr)), 10)
			p.hTail = append(p.hTail, ' ')
			p.hTail = strconv.AppendInt(p.hTail, int64(len(hdr)+len(p.data)), 10)
			p.hTail = append(p.hTail, lineEnd...)
		}
		head, tail, shared = p.head, p.hTail, &p.blob
	} else {
		hdr = nil
		if len(p.tail) == 0 {
			p.tail = p.replyPart(p.tail)
			p.tail = strconv.AppendInt(p.tail, int64(len(p.data)), 10)
			p.tail = append(p.tail, lineEnd...)
			tail = p.tail
		}
	}
	size := len(hdr) + len(p.data)
	line := len(head) + len(s.sid) + 1 + len(tail)
	share := size >= shareFrom && (p.several || size >= maxTail/2)
	if share && *shared == nil {
		b := newSlab(size + len(lineEnd))
		b.b = append(append(append(b.b, hdr...), p.data...), lineEnd...)
		*shared = b
	}

	o := &c.out
	o.mu.Lock()
	if o.closed || s.closed.Load() || s.max > 0 && s.delivered >= s.max {
		o.mu.Unlock()
		return false
	}
	set := c.srv.set.Load()
	if set.NoStall && p.client != nil && o.pending > set.MaxPending/4*3 {
		o.mu.Unlock()
		return false
	}
	if o.pending > besideMessage && o.pending+int64(line+size+len(lineEnd)) > set.MaxPending {
		o.closed = true
		o.mu.Unlock()
		go c.disconnect(errSlowPending)
		return false
	}
	n := line
	if !share {
		n += size + len(lineEnd)
	}
	b := o.room(n)
	b = b[copy(b, head):]
	b = b[copy(b, s.sid):]
	b[0] = ' '
	b = b[1:]
	b = b[copy(b, tail):]
	if share {
		o.share(*shared)
	} else {
		b = b[copy(b, hdr):]
		b = b[copy(b, p.data):]
		b[0], b[1] = '\r', '\n'
	}
	o.msgs++
	o.octets += uint64(size)
	s.delivered++
	last := s.delivered == s.max
	if len(p.reply) > 0 {
		if perms := c.perms.Load(); perms != nil && perms.responses != nil {
			perms.expect(p.reply)
		}
	}
	p.touch(c)
	o.mu.Unlock()
	if set.Trace {
		c.trace("->>", slices.Concat(head, s.sid, []byte(" "), tail))
	}
	p.root.outMsgs++
	p.root.outOct += uint64(size)
	if last {
		c.unsubscribe(s, true)
	}
	return true
}

func (p *Publisher) replyPart(b []byte) []byte {
	if len(p.reply) > 0 {
		b = append(b, p.reply...)
		b = append(b, ' ')
	}
	return b
}

// touch notes that c has to be flushed at the end of the batch. c.out.mu is held.
func (p *Publisher) touch(c *client) {
	r := p.root
	if c.out.by != r || c.out.batch != r.batch {
		c.out.by, c.out.batch = r, r.batch
		r.dirty = append(r.dirty, c)
	}
}

// call runs an internal handler.
func (p *Publisher) call(s *subscription) bool {
	if s.closed.Load() {
		return false
	}
	if p.depth >= maxDepth {
		p.acc.srv.log.Error("message dropped: handlers publish to each other without end", "subject", string(p.subj))
		return false
	}
	if p.child == nil {
		p.child = newPublisher(p.acc, nil)
		p.child.root = p.root
		p.child.depth = p.depth + 1
	}
	p.root.handled = true
	m := &p.msg
	*m = Msg{Subject: p.subj, Reply: p.reply, Header: p.hdr, Data: p.data, pub: p.child}
	if p.client != nil {
		m.Client = p.client.info.Load()
	}
	s.handler(m)
	*m = Msg{}
	return true
}

// flush ends a batch. With hold, the calling publisher is held back for a
// while if a destination lags far behind.
func (p *Publisher) flush(hold bool) {
	p.count()
	for _, c := range p.dirty {
		c.flush()
	}
	if hold && !p.acc.srv.set.Load().NoStall {
		for _, c := range p.dirty {
			if c != p.client && p.holdBack(c) {
				break
			}
		}
	}
	p.endBatch()
}

// endBatch forgets the destinations.
func (p *Publisher) endBatch() {
	clear(p.dirty)
	if cap(p.dirty) > 4096 {
		p.dirty = nil
	}
	p.dirty = p.dirty[:0]
	p.batch++
	p.count()
}

// count makes the messages of the batch count for the server.
func (p *Publisher) count() {
	if p.outMsgs > 0 {
		p.acc.srv.outMsgs.Add(p.outMsgs)
		p.acc.srv.outBytes.Add(p.outOct)
		p.outMsgs, p.outOct = 0, 0
	}
}

// holdBack waits a little for a client with much pending, and reports whether
// it did. One that takes nothing at all is not waited for again.
func (p *Publisher) holdBack(c *client) bool {
	o := &c.out
	o.mu.Lock()
	// A flusher that does not wait for the client is only short of a processor.
	if o.pending < c.srv.stallFrom || o.closed || o.handed && time.Since(o.moved) > c.srv.stuckAfter {
		o.mu.Unlock()
		return false
	}
	if o.stall == nil {
		o.stall = make(chan struct{})
	}
	stall := o.stall
	o.mu.Unlock()
	c.srv.stalls.Add(1)
	t := time.NewTimer(c.srv.stallMax)
	defer t.Stop()
	select {
	case <-stall:
	case <-t.C:
	}
	return true
}

// Respond publishes to the reply subject of m; it does nothing if m has none.
// The response leaves when the input at hand has been processed, together
// with others.
func (m *Msg) Respond(hdr, data []byte) {
	if len(m.Reply) > 0 {
		m.pub.PublishBytes(m.Reply, nil, hdr, data)
	}
}

// Publish publishes from inside a handler. The message leaves when the input
// at hand has been processed, together with others. Valid during the handler
// call only; use [Account.Publish] later and from other goroutines.
func (m *Msg) Publish(subj, reply string, hdr, data []byte) { m.pub.Publish(subj, reply, hdr, data) }

// Error sends the client a protocol error ("-ERR 'text'"); the connection
// stays. It may be called at any time.
func (c *ClientInfo) Error(text string) {
	if c.c != nil {
		c.c.sendErr(text)
	}
}
