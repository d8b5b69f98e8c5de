package link

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"petiole/sync/frame"
)

// Limits of a connection, in bytes unless said otherwise.
const (
	helloLimit   = 64 << 10 // content of a frame before the edge is known
	controlLimit = 64 << 10 // content of any frame on the control stream
	maxOutbox    = 1 << 20  // control frames that the peer has not taken yet
	helloTimeout = 10 * time.Second
	deadAfter    = 20 * time.Second // without a pong, the peer is stuck
)

func (t *Timing) defaults() {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&t.Reconnect, DefaultReconnect)
	set(&t.Attempt, DefaultAttempt)
	set(&t.Ping, DefaultPing)
	set(&t.Idle, DefaultIdle)
	set(&t.RetryMin, DefaultRetryMin)
	set(&t.RetryMax, DefaultRetryMax)
	set(&t.Part, DefaultPart)
}

// quicConfig is common to both ends. Streams, and windows, differ.
func quicConfig(t *Timing) *quic.Config {
	return &quic.Config{
		HandshakeIdleTimeout: t.Attempt,
		MaxIdleTimeout:       t.Idle,
		KeepAlivePeriod:      t.Ping,
	}
}

// tlsSecret returns the secret that binds credentials to the connection.
func tlsSecret(c *quic.Conn) ([]byte, error) {
	st := c.ConnectionState().TLS
	b, err := st.ExportKeyingMaterial(frame.ExporterLabel, nil, 32)
	if err != nil {
		return nil, fmt.Errorf("export secret of the TLS connection: %w", err)
	}
	return b, nil
}

// closeWith ends a connection for a reason that the peer gets to see.
func closeWith(c *quic.Conn, e *frame.Error) {
	// The reason has to fit into one packet.
	text := e.Text
	if len(text) > 600 {
		text = text[:600]
	}
	c.CloseWithError(quic.ApplicationErrorCode(e.Code), text)
}

// remote returns the error with which the peer closed the connection, nil if
// it ended otherwise.
func remote(err error) *frame.Error {
	var app *quic.ApplicationError
	if errors.As(err, &app) && app.Remote {
		return &frame.Error{Code: frame.Code(app.ErrorCode), Text: app.ErrorMessage}
	}
	return nil
}

// asError returns the error as it is told to the peer.
func asError(err error, code frame.Code) *frame.Error {
	var fe *frame.Error
	if errors.As(err, &fe) {
		return fe
	}
	switch {
	case errors.Is(err, frame.ErrTooLarge):
		code = frame.CodeTooLarge
	case errors.Is(err, frame.ErrMalformed), errors.Is(err, frame.ErrChecksum),
		errors.Is(err, frame.ErrUnknownType), errors.Is(err, frame.ErrChain):
		code = frame.CodeProtocol
	}
	return &frame.Error{Code: code, Text: err.Error()}
}

// outbox writes control frames from many goroutines to one stream, without
// blocking them. Positions are coalesced: only the latest of each offer goes.
type outbox struct {
	w    *quic.Stream
	full context.CancelCauseFunc // called when the peer takes nothing
	wake chan struct{}

	mu    sync.Mutex
	buf   []byte
	pos   map[uint32]frame.Position
	order []uint32 // offers in pos
}

func newOutbox(w *quic.Stream, full context.CancelCauseFunc) *outbox {
	return &outbox{w: w, full: full, wake: make(chan struct{}, 1), pos: map[uint32]frame.Position{}}
}

// add queues what fn appends.
func (o *outbox) add(fn func([]byte) []byte) {
	o.mu.Lock()
	full := len(o.buf) > maxOutbox
	if !full {
		o.buf = fn(o.buf)
	}
	o.mu.Unlock()
	if full {
		o.full(&frame.Error{Code: frame.CodeTooLarge, Text: "control frames are not taken by their receiver"})
	}
	o.kick()
}

// position queues an acknowledgement, replacing an earlier one of the offer.
func (o *outbox) position(offer uint32, p frame.Position) {
	p.Ladder = nil
	o.mu.Lock()
	if _, queued := o.pos[offer]; !queued {
		o.order = append(o.order, offer)
	}
	o.pos[offer] = p
	o.mu.Unlock()
	o.kick()
}

func (o *outbox) kick() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// run writes until the stream fails or done is closed.
func (o *outbox) run(done <-chan struct{}) error {
	var out []byte
	for {
		select {
		case <-done:
			return nil
		case <-o.wake:
		}
		o.mu.Lock()
		out, o.buf = o.buf, out[:0]
		for _, id := range o.order {
			p := o.pos[id]
			out = frame.AppendPosition(out, id, &p)
			delete(o.pos, id)
		}
		o.order = o.order[:0]
		o.mu.Unlock()
		if len(out) == 0 {
			continue
		}
		if _, err := o.w.Write(out); err != nil {
			return fmt.Errorf("write control stream: %w", err)
		}
	}
}
