package broker

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"petiole/internal/wire"
)

// What a client is told, and how a connection ends.

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

// sendErrSoon queues an error that is flushed with the batch.
func (c *client) sendErrSoon(text string) {
	c.reply([]byte("-ERR '" + text + "'\r\n"))
}

func (c *client) violation(text string) {
	c.log.Warn("client violates its permissions", "cid", c.info.Load().ID, "user", c.info.Load().User, "violation", text)
	c.sendErrSoon(text)
}

var (
	errSlowDeadline = fmt.Errorf("%w: took nothing within the write deadline", wire.ErrSlowConsumer)
	errSlowPending  = fmt.Errorf("%w: too many octets pending", wire.ErrSlowConsumer)
	errShutdown     = errors.New("server shut down")
)

// After an error the rest of what a client sends is read and thrown away for
// this long and this many octets: closing a socket with input unread would
// take the error message back that the client is to see.
const (
	lingerTime  = 500 * time.Millisecond
	lingerBytes = 4 << 20
)

// clientError is an error that a client reported by "-ERR".
type clientError struct{ text string }

func (e *clientError) Error() string { return "the client reports an error: " + strconv.Quote(e.text) }

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
