package broker

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

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
		if c.awaiting.Load() && buf[r]|0x20 != 'c' && c.due() {
			break
		}
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
		case wire.OpInfo:
			var doc info
			if json.Unmarshal(ev.Arg, &doc) != nil {
				c.fail(wire.ErrParser)
			}
		case wire.OpErr:
			c.finish(&clientError{string(ev.Arg)}, "")
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
