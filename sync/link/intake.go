package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"petiole/sync/frame"
	"petiole/sync/replay"
)

// intake is one offer at the hub: from the offer to the end of its stream.
type intake struct {
	c      *edgeConn
	o      frame.Offer
	ready  chan struct{} // closed when the sink has answered
	ctx    context.Context
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	target  Target // nil before ready, if refused, or after end
	open    bool   // its stream has come
	pending int    // batches under way
	idle    chan struct{}
	pos     frame.Position
	failed  *frame.Error
	meter   replay.Meter
	lost    [frame.GapDamaged + 1]uint64 // sequences in gaps not logged yet, by reason
	lostLog time.Time
}

// lostEvery bounds how often messages lost at an edge are logged, per export.
const lostEvery = 10 * time.Second

// tellLost logs messages that the edge lost before it could send them. What was
// deleted one by one was meant to be.
func (in *intake) tellLost(now time.Time) {
	in.mu.Lock()
	removed, damaged := in.lost[frame.GapRemoved], in.lost[frame.GapDamaged]
	tell := removed+damaged > 0 && now.Sub(in.lostLog) >= lostEvery
	if tell {
		clear(in.lost[:])
		in.lostLog = now
	}
	through := in.pos.Through
	in.mu.Unlock()
	if tell {
		in.c.h.log.Warn("messages were lost at an edge before they were sent", "edge", in.c.id.EdgeID, "name", in.c.id.Name,
			"stream", printable(in.o.Stream), "to", printable(in.o.To), "removed_by_limits", removed, "damaged", damaged, "through", through)
	}
}

// fail ends the intake, and tells the edge why unless the edge wanted it.
func (in *intake) fail(fe *frame.Error) {
	in.mu.Lock()
	first := in.failed == nil
	if first {
		in.failed = fe
	}
	in.mu.Unlock()
	if !first {
		return
	}
	fe.Offer = in.o.ID
	if fe.Code != frame.CodeNone && in.c.out != nil {
		in.c.out.add(fe.Append)
	}
	in.cancel(fe)
}

// end waits for batches under way and lets go of the target.
func (in *intake) end() {
	in.cancel(nil)
	in.mu.Lock()
	target := in.target
	in.target = nil
	var idle chan struct{}
	if in.pending > 0 {
		if in.idle == nil {
			in.idle = make(chan struct{})
		}
		idle = in.idle
	}
	in.mu.Unlock()
	if idle != nil {
		select {
		case <-idle:
		case <-time.After(drainTimeout):
		}
	}
	if target != nil {
		target.Close()
		in.mu.Lock()
		in.lostLog = time.Time{}
		in.mu.Unlock()
		in.tellLost(time.Now())
	}
}

// parcel is a batch with the buffer that it aliases.
type parcel struct {
	buf   []byte
	batch frame.Batch
}

var parcels = sync.Pool{New: func() any { return new(parcel) }}

// maxParcel bounds the buffers that are kept for reuse.
const maxParcel = 128 << 10

func (p *parcel) release() {
	if cap(p.buf) > maxParcel {
		p.buf = nil
	}
	clear(p.batch.Msgs)
	parcels.Put(p)
}

// receive reads an export stream and hands its batches to the target. Only a
// breach of the protocol is returned: it ends the connection.
func (c *edgeConn) receive(rs *quic.ReceiveStream) error {
	code := quic.StreamErrorCode(frame.CodeNone)
	defer func() { rs.CancelRead(code) }()
	r := frame.NewReader(rs, frame.MaxPayload)
	rs.SetReadDeadline(time.Now().Add(helloTimeout))
	t, content, err := r.Next(nil)
	if err != nil {
		return c.streamError(err)
	}
	if t != frame.TypeOpen {
		return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("%v at the start of an export stream", t)}
	}
	id, err := frame.DecodeOpen(content)
	if err != nil {
		return err
	}
	in := c.find(id)
	if in == nil {
		return nil // ended in the meantime; the edge knows, or will
	}
	<-in.ready
	in.mu.Lock()
	target, opened := in.target, in.open
	in.open = true
	in.mu.Unlock()
	if target == nil {
		return nil
	}
	if opened {
		return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("offer %d was opened twice", id)}
	}
	defer c.forget(in)
	defer in.end()
	stop := context.AfterFunc(in.ctx, func() { rs.CancelRead(code) })
	defer stop()
	rs.SetReadDeadline(time.Time{})

	// A message beyond a frame needs memory out of proportion to what has
	// arrived: few may be received at a time, and each has to get on. How long
	// the whole may take is the line's business.
	slot := false
	release := func() {
		if slot {
			slot = false
			<-c.large
			<-c.h.large
		}
	}
	defer release()
	r.More = func() error {
		if slot {
			return rs.SetReadDeadline(time.Now().Add(c.h.conf.Timing.Part))
		}
		for _, ch := range []chan struct{}{c.large, c.h.large} {
			select {
			case ch <- struct{}{}:
			case <-in.ctx.Done():
				if ch == c.h.large {
					<-c.large
				}
				return context.Cause(in.ctx)
			}
		}
		slot = true
		return rs.SetReadDeadline(time.Now().Add(c.h.conf.Timing.Part))
	}
	// What a batch adds to its messages is less than two frames.
	r.SetLimit(c.h.conf.MaxMessage + 2*frame.MaxFrame)
	var dec frame.Decoder
	for {
		p := parcels.Get().(*parcel)
		var t frame.Type
		t, p.buf, err = r.Next(p.buf)
		if err != nil {
			p.release()
			return c.streamError(err)
		}
		if t != frame.TypeBatch {
			return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("%v on an export stream", t)}
		}
		if err := dec.Batch(p.buf, &p.batch); err != nil {
			return err
		}
		if p.batch.Offer != id {
			return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("a batch of offer %d on the stream of %d", p.batch.Offer, id)}
		}
		in.mu.Lock()
		in.pending++
		in.mu.Unlock()
		err = target.Ingest(in.ctx, &p.batch, func(pos frame.Position, err error) { in.settled(p, pos, err) })
		if err != nil {
			in.settled(p, frame.Position{}, err)
			return nil
		}
		if slot {
			release()
			rs.SetReadDeadline(time.Time{})
		}
	}
}

// settled takes the outcome of a batch.
func (in *intake) settled(p *parcel, pos frame.Position, err error) {
	in.mu.Lock()
	failed := in.failed != nil
	if err == nil && !failed {
		var bytes int
		for i := range p.batch.Msgs {
			m := &p.batch.Msgs[i]
			bytes += len(m.Subject) + len(m.Header) + len(m.Data)
		}
		in.pos = pos
		for _, g := range p.batch.Gaps {
			if int(g.Reason) < len(in.lost) {
				in.lost[g.Reason] += g.Last - g.First + 1
			}
		}
		in.meter.Add(time.Now(), uint64(len(p.batch.Msgs)), uint64(bytes))
	}
	in.mu.Unlock()
	p.release()
	switch {
	case failed:
	case err != nil:
		if in.ctx.Err() == nil {
			fe := *asError(err, frame.CodeInternal)
			in.c.h.refuse(in.c.id.EdgeID, "ingest "+in.o.To+fe.Text, "export stopped", "edge", in.c.id.EdgeID, "name", in.c.id.Name,
				"stream", printable(in.o.Stream), "to", printable(in.o.To), "error", fe.Text)
			in.fail(&fe)
		}
	default:
		in.c.out.position(in.o.ID, pos)
		in.tellLost(time.Now())
	}
	in.mu.Lock()
	in.pending--
	if in.pending == 0 && in.idle != nil {
		close(in.idle)
		in.idle = nil
	}
	in.mu.Unlock()
}

// streamError sorts out what a failed read of an export stream means: nil if
// only the stream has ended.
func (c *edgeConn) streamError(err error) error {
	var se *quic.StreamError
	switch {
	case errors.Is(err, io.EOF), errors.As(err, &se), c.ctx.Err() != nil:
		return nil
	case errors.Is(err, io.ErrUnexpectedEOF):
		return &frame.Error{Code: frame.CodeProtocol, Text: "an export stream ended inside a frame"}
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return &frame.Error{Code: frame.CodeTimeout, Text: "a large message has begun, and the next part of it did not arrive in time"}
	}
	return fmt.Errorf("read export stream: %w", err)
}

func (in *intake) status(now time.Time) EdgeExport {
	in.mu.Lock()
	defer in.mu.Unlock()
	x := EdgeExport{
		Stream: printable(in.o.Stream), To: printable(in.o.To), UID: in.o.UID.String(),
		Incarnation: in.pos.Incarnation, Through: in.pos.Through, Msgs: in.pos.Msgs, GapMsgs: in.pos.Gaps,
	}
	x.MsgRate, x.ByteRate = in.meter.Rate(now)
	if in.failed != nil && in.failed.Code != frame.CodeNone {
		x.Error = in.failed.Error()
	}
	return x
}
