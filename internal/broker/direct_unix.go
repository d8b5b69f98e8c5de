//go:build unix

package broker

import (
	"io"
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
			n, err := writePieces(int(fd), w.segs)
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

// reader returns the function that reads what has arrived behind in.w; it
// waits for input if there is none.
func (c *client) reader(in *inbox) func() (int, error) {
	if c.raw == nil {
		return c.waitingReader(in)
	}
	var n int
	var err error
	read := func(fd uintptr) bool {
		for {
			if in.buf == nil {
				in.grow(readSize)
			}
			n, err = syscall.Read(int(fd), in.buf[in.w:])
			switch err {
			case nil:
				if n == 0 {
					err = io.EOF
				}
				return true
			case syscall.EINTR:
			case syscall.EAGAIN:
				// To wait now; the buffer serves others meanwhile.
				if in.w == 0 {
					in.free()
				}
				return false
			default:
				n = 0
				return true
			}
		}
	}
	return func() (int, error) {
		n, err = 0, nil
		if waitErr := c.raw.rc.Read(read); waitErr != nil {
			return 0, waitErr
		}
		return n, err
	}
}
