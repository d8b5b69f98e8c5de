package broker

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// outbound is the queue of octets on their way to one client.
//
// At most one goroutine at a time is the flusher (flushing is set); it takes
// the queue over as a whole and writes it without holding the lock, so that
// others append meanwhile. Whoever finds the flag unset when there is
// something to write may become the flusher: usually the goroutine that reads
// from the publisher, which saves a switch to another goroutine. It only
// writes what the socket takes at once; the rest it hands to a goroutine that
// may wait.
type outbound struct {
	mu       sync.Mutex
	segs     []seg
	spare    []seg     // emptied list for the next swap
	tail     *slab     // slab being filled; the last of segs ends at its length
	pending  int64     // octets in segs and with the flusher
	sizing   int       // octets that recent flushes had, for the size of the first slab
	handed   bool      // the flusher is a goroutine that may wait
	moved    time.Time // when the flusher that may wait last wrote something, or began
	msgs     uint64    // messages and their octets, for monitoring
	octets   uint64
	low      int64 // a publisher held back goes on below this
	flushing bool
	closed   bool // nothing is accepted any more
	finish   bool // end the connection when all is written
	stall    chan struct{}

	// The publisher that last put this client on its list of clients to
	// flush, and in which of its batches.
	by    *Publisher
	batch uint64
}

// room returns n octets at the end of the queue to be filled in. The lock is held.
func (o *outbound) room(n int) []byte {
	t := o.tail
	if t == nil || cap(t.b)-len(t.b) < n {
		size := n
		switch {
		case t != nil:
			size = max(n, maxTail)
			t.release()
		case n < maxTail:
			size = max(n, min(o.sizing, maxTail))
		}
		t = newSlab(size)
		o.tail = t
		o.push(t, t.b)
	}
	start := len(t.b)
	t.b = t.b[:start+n]
	last := &o.segs[len(o.segs)-1]
	if last.own != t {
		o.push(t, t.b[start:])
	} else {
		last.b = last.b[:len(last.b)+n]
	}
	o.pending += int64(n)
	return t.b[start : start+n]
}

// push adds a piece of s, with a reference of its own. The lock is held.
func (o *outbound) push(s *slab, b []byte) {
	s.refs.Add(1)
	o.segs = append(o.segs, seg{s, b})
}

// share adds the contents of s without copying. The lock is held.
func (o *outbound) share(s *slab) {
	o.push(s, s.b)
	o.pending += int64(len(s.b))
}

// take hands the queue over to the flusher. The lock is held.
func (o *outbound) take() []seg {
	segs := o.segs
	o.segs, o.spare = o.spare[:0], nil
	if o.tail != nil {
		o.tail.release()
		o.tail = nil
	}
	return segs
}

// done accounts for n octets written. The lock is held.
func (o *outbound) done(n int) {
	if n == 0 {
		return
	}
	o.pending -= int64(n)
	o.sizing = (3*o.sizing + n) / 4
	if o.stall != nil && (o.pending < o.low || o.closed) {
		close(o.stall)
		o.stall = nil
	}
}

// drop discards the queue. The lock is held.
func (o *outbound) drop() {
	for _, s := range o.segs {
		s.own.release()
	}
	o.segs, o.spare = nil, nil
	if o.tail != nil {
		o.tail.release()
		o.tail = nil
	}
	if o.stall != nil {
		close(o.stall)
		o.stall = nil
	}
}

// Publishers are held back for a client with more than stallFrom octets
// pending (or a quarter of its limit, if less) until it has less than half of
// that, but for stallMax at most per read. It is about what caches of
// processors hold: a longer queue does not make anything faster, it only makes
// the octets in it cold, for the client too.
const (
	stallFrom = 512 << 10
	stallMax  = 10 * time.Millisecond
	// A client that has taken nothing for this long is not waited for: it must
	// not slow others down until it is disconnected. (A kernel that has buffered
	// megabytes takes more only when a good part of them is gone; shorter pauses
	// than this are normal.)
	stuckAfter = 250 * time.Millisecond
)

// flush writes what is queued as far as the socket takes it at once, and
// leaves the rest to a goroutine. It does not block on the client.
func (c *client) flush() {
	o := &c.out
	o.mu.Lock()
	if o.flushing || len(o.segs) == 0 {
		o.mu.Unlock()
		return
	}
	o.flushing = true
	if c.raw == nil {
		c.hand(nil)
		return
	}
	// Others may keep appending for as long as this goroutine writes. It has
	// its own client to serve: after two rounds someone else has to go on.
	for range 2 {
		segs := o.take()
		o.mu.Unlock()
		n, rest, err := c.writeNow(segs)
		if err != nil {
			c.flushFailed(n, err, rest)
			return
		}
		if len(rest) > 0 {
			o.mu.Lock()
			o.done(n)
			c.hand(rest)
			return
		}
		o.mu.Lock()
		o.done(n)
		o.spare = segs[:0]
		if len(o.segs) == 0 {
			c.flushed()
			return
		}
	}
	c.hand(nil)
}

// hand leaves segs and all that is queued to a goroutine, which is the flusher
// from now on. It is called with the lock held and releases it.
func (c *client) hand(segs []seg) {
	// Its time counts from here: until it gets a processor, publishers could
	// queue a lot for a client that seems to have taken nothing for long.
	c.out.handed, c.out.moved = true, time.Now()
	c.out.mu.Unlock()
	go c.flushLoop(segs)
}

// flushed ends the flusher's turn with nothing left to write. It is called
// with the lock held and releases it.
func (c *client) flushed() {
	o := &c.out
	o.flushing, o.handed = false, false
	finish := o.finish
	o.mu.Unlock()
	if finish {
		c.halfClose()
	}
}

// flushFailed ends the flusher's turn with an error after n octets.
func (c *client) flushFailed(n int, err error, rest []seg) {
	o := &c.out
	for _, s := range rest {
		s.own.release()
	}
	o.mu.Lock()
	o.done(n)
	o.flushing, o.handed = false, false
	o.mu.Unlock()
	c.disconnect(err)
}

// flushAsync has a goroutine write what is queued.
func (c *client) flushAsync() {
	o := &c.out
	o.mu.Lock()
	if o.flushing || len(o.segs) == 0 {
		o.mu.Unlock()
		return
	}
	o.flushing = true
	c.hand(nil)
}

// flushLoop is the flusher that may wait for the client. It writes segs, then
// all that is queued.
func (c *client) flushLoop(segs []seg) {
	o := &c.out
	const atOnce = 16
	const writeMax = 128 << 10 // not more, so that progress shows
	var vec [atOnce][]byte
	armed := time.Time{}
	for {
		if len(segs) == 0 {
			o.mu.Lock()
			if len(o.segs) == 0 {
				if !armed.IsZero() {
					// A deadline that stays would fail later direct writes.
					_ = c.conn.SetWriteDeadline(time.Time{})
				}
				c.flushed()
				return
			}
			segs = o.take()
			o.mu.Unlock()
		}
		k, size := 0, 0
		for k < min(len(segs), atOnce) && size < writeMax {
			b := segs[k].b
			vec[k] = b[:min(len(b), writeMax-size)]
			size += len(vec[k])
			k++
		}
		bufs := net.Buffers(vec[:k])
		if now := time.Now(); now.Sub(armed) > c.srv.set.Load().WriteDeadline/8 {
			armed = now
			_ = c.conn.SetWriteDeadline(now.Add(c.srv.set.Load().WriteDeadline))
		}
		n64, err := bufs.WriteTo(c.conn)
		n := int(n64)
		segs = advance(segs, n)
		if err != nil {
			if n > 0 && errors.Is(err, os.ErrDeadlineExceeded) && c.raw != nil {
				armed = time.Time{} // slow, but it takes something
			} else {
				if errors.Is(err, os.ErrDeadlineExceeded) {
					err = errSlowDeadline
				}
				c.flushFailed(n, err, segs)
				return
			}
		}
		o.mu.Lock()
		o.moved = time.Now()
		o.done(n)
		o.mu.Unlock()
	}
}

// advance releases the first n octets of segs and returns the rest.
func advance(segs []seg, n int) []seg {
	for len(segs) > 0 && n >= len(segs[0].b) {
		n -= len(segs[0].b)
		segs[0].own.release()
		segs[0] = seg{}
		segs = segs[1:]
	}
	if n > 0 {
		segs[0].b = segs[0].b[n:]
	}
	return segs
}
