//go:build unix

package broker

import (
	"net"
	"syscall"
)

// directWriter writes to a socket without waiting for it.
type directWriter struct {
	rc   syscall.RawConn
	fn   func(fd uintptr) bool
	segs []seg
	n    int
	err  error
}

// newDirectWriter returns nil if conn is not a plain socket.
func newDirectWriter(conn net.Conn) *directWriter {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return nil
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	w := &directWriter{rc: rc}
	// Made once: a closure per write would be allocated.
	w.fn = func(fd uintptr) bool {
		for len(w.segs) > 0 {
			n, err := syscall.Write(int(fd), w.segs[0].b)
			if err == syscall.EINTR {
				continue
			}
			if err != nil {
				if err != syscall.EAGAIN {
					w.err = err
				}
				return true
			}
			w.n += n
			w.segs = advance(w.segs, n)
		}
		return true
	}
	return w
}

// writeNow writes of segs what the socket takes at once, releases it and
// returns how much that was and what is left. Only the flusher may call it.
func (c *client) writeNow(segs []seg) (n int, rest []seg, err error) {
	w := c.raw
	w.segs, w.n, w.err = segs, 0, nil
	if err := w.rc.Write(w.fn); err != nil && w.err == nil {
		w.err = err
	}
	n, rest, err = w.n, w.segs, w.err
	w.segs = nil
	return n, rest, err
}
