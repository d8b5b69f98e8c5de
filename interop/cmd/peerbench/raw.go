package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"
)

// Clients that cost next to nothing. A client library needs more of a processor
// for a message than either server: on a machine that both share, what is
// measured with one is the library. A rawConn writes messages that were made
// before, many with one system call, and of what it reads it looks at the line
// before each message only.

const rawSubject = "bench.core"

// rawChunk is about how many octets a raw client writes and reads at once.
const rawChunk = 64 << 10

type rawConn struct {
	net.Conn
	buf []byte
}

// raw opens a connection that is closed when the repetition ends.
func (e *env) raw(ctx context.Context) (*rawConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", e.addr)
	if err != nil {
		return nil, err
	}
	r := &rawConn{Conn: c, buf: make([]byte, rawChunk)}
	e.raws = append(e.raws, r)
	if _, err := io.WriteString(r, `CONNECT {"verbose":false,"pedantic":false,"lang":"peerbench","version":"1","protocol":1}`+"\r\n"); err != nil {
		return nil, err
	}
	return r, r.roundTrip(20 * time.Second)
}

// roundTrip returns when the server has processed all that was written. Nothing
// but protocol text may be on its way here.
func (r *rawConn) roundTrip(within time.Duration) error {
	if err := r.SetReadDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	if _, err := io.WriteString(r, "PING\r\n"); err != nil {
		return err
	}
	var text []byte
	for !bytes.Contains(text, []byte("PONG\r\n")) { // nats-server says INFO behind the first
		n, err := r.Read(r.buf)
		if err != nil {
			return fmt.Errorf("wait for PONG: %w", err)
		}
		text = append(text, r.buf[:n]...)
		if i := bytes.Index(text, []byte("-ERR")); i >= 0 {
			return fmt.Errorf("the server says %q", text[i:])
		}
	}
	return r.SetReadDeadline(time.Time{})
}

// publish publishes messages of size octets until end, then waits until the
// server has them, and returns how many there were.
func (r *rawConn) publish(size int, end time.Time) (n int, err error) {
	one := fmt.Appendf(nil, "PUB %s %d\r\n%s\r\n", rawSubject, size, strings.Repeat("x", size))
	each := max(1, rawChunk/len(one))
	chunk := bytes.Repeat(one, each)
	for time.Now().Before(end) {
		if _, err := r.Write(chunk); err != nil {
			return 0, err
		}
		n += each
	}
	return n, r.roundTrip(30 * time.Second)
}

// subscribe subscribes.
func (r *rawConn) subscribe() error {
	if _, err := fmt.Fprintf(r, "SUB %s 1\r\n", rawSubject); err != nil {
		return err
	}
	return r.roundTrip(20 * time.Second)
}

var errNotAMessage = errors.New("what arrived is not a message that was published")

// receive counts messages of size octets until there are as many as want says,
// which it asks whenever it has looked through a read; below 0 it is not known yet.
func (r *rawConn) receive(size int, want func() int64) (n int64, err error) {
	line := fmt.Appendf(nil, "MSG %s 1 %d\r\n", rawSubject, size)
	frame := len(line) + size + 2
	buf := make([]byte, max(rawChunk, 2*frame))
	have := 0
	for {
		if w := want(); w >= 0 && n >= w {
			return n, nil
		}
		_ = r.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // to ask again
		k, err := r.Read(buf[have:])
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		have += k
		at := 0
		for at < have {
			if buf[at] == 'P' || buf[at] == 'I' { // PING or INFO, in between
				eol := bytes.IndexByte(buf[at:have], '\n')
				if eol < 0 {
					break
				}
				at += eol + 1
				continue
			}
			if have-at < frame {
				break
			}
			f := buf[at : at+frame]
			if !bytes.Equal(f[:len(line)], line) || f[frame-2] != '\r' || f[frame-1] != '\n' {
				return n, fmt.Errorf("%w: %.60q", errNotAMessage, f)
			}
			at += frame
			n++
		}
		have = copy(buf, buf[at:have])
	}
}

// benchRaw is benchCore with raw clients.
func benchRaw(sh shape) func(context.Context, *env) ([]metric, int, time.Duration, error) {
	return func(ctx context.Context, e *env) ([]metric, int, time.Duration, error) {
		open := func(n int) ([]*rawConn, error) {
			out := make([]*rawConn, n)
			for i := range out {
				var err error
				if out[i], err = e.raw(ctx); err != nil {
					return nil, err
				}
			}
			return out, nil
		}
		subs, err := open(sh.subs)
		if err != nil {
			return nil, 0, 0, err
		}
		for _, r := range subs {
			if err := r.subscribe(); err != nil {
				return nil, 0, 0, err
			}
		}
		pubs, err := open(sh.pubs)
		if err != nil {
			return nil, 0, 0, err
		}
		m, err := e.meter()
		if err != nil {
			return nil, 0, 0, err
		}
		var total counter
		var publishing, receiving sync.WaitGroup
		sent, got := make([]int, sh.pubs), make([]int64, sh.subs)
		errs := make([]error, sh.pubs+sh.subs)
		for i, r := range subs {
			receiving.Go(func() { got[i], errs[sh.pubs+i] = r.receive(sh.size, total.known) })
		}
		for i, r := range pubs {
			publishing.Go(func() { sent[i], errs[i] = r.publish(sh.size, m.start.Add(e.duration)) })
		}
		publishing.Wait()
		published := 0
		for _, n := range sent {
			published += n
		}
		total.set(published)
		stop := context.AfterFunc(ctx, func() { // so that receivers end
			for _, r := range subs {
				_ = r.Close()
			}
		})
		receiving.Wait()
		stop()
		wall, cpu, err := m.stop()
		if err := errors.Join(append(errs, err)...); err != nil {
			return nil, 0, 0, err
		}
		count := published
		if sh.subs > 0 {
			count = 0
			for _, n := range got {
				if n != int64(published) {
					return nil, 0, 0, fmt.Errorf("a subscriber got %d of %d messages", n, published)
				}
				count += int(n)
			}
		}
		return []metric{rate("rate", count, wall)}, count, cpu, nil
	}
}

// counter is a number that is known in the end.
type counter struct {
	mu   sync.Mutex
	n    int64
	done bool
}

func (c *counter) set(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n, c.done = int64(n), true
}

// known returns the number, or -1.
func (c *counter) known() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.done {
		return -1
	}
	return c.n
}
