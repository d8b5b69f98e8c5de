package export

import (
	"fmt"
	"sync"

	"petiole/storage"
	"petiole/sync/frame"
)

// TooLargeError says that a message exceeds what the hub takes.
type TooLargeError struct {
	Seq         uint64
	Size, Limit int
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("message %d has %d bytes, the hub takes %d: delete it from the stream, or have the hub take larger ones",
		e.Seq, e.Size, e.Limit)
}

// Batch is an encoded batch.
type Batch struct {
	Frames  []byte     // frames to write, in one piece
	First   uint64     // first sequence covered
	Rung    frame.Rung // end of the batch
	Msgs    uint64     // messages
	Gaps    uint64     // runs of missing sequences
	Missing uint64     // sequences in them
	Bytes   int64      // subject, header and data of the messages
	Damaged []uint64   // sequences among the missing whose messages are damaged
}

var batches = sync.Pool{New: func() any { return new(Batch) }}

// maxPooled bounds the buffers that are kept for reuse.
const maxPooled = 256 << 10

// Release gives the batch's buffer back once it has been written.
func (b *Batch) Release() {
	if cap(b.Frames) > maxPooled {
		b.Frames = nil
	}
	b.Damaged = nil
	batches.Put(b)
}

// Cursor reads a source from a position on and encodes what it holds, missing
// sequences as gaps. It is not for concurrent use.
type Cursor struct {
	src         Source
	offer       uint32
	incarnation uint64
	base        uint64
	next        uint64
	chain       frame.Chain
	compress    bool
	limit       int
	lost        []uint64 // sequences in the batch at hand that damage has taken
	soft        int64    // bytes after which a batch ends; grows from firstBatch
	b           frame.Builder
}

// firstBatch is how many bytes of messages the first batch after a connection
// was made holds at most, unless one message alone is larger. The next ones
// double until they fill a frame. A full frame exceeds what a new connection may
// have in flight, so the hub would store nothing for a further round trip.
const firstBatch = 8 << 10

// maxLost bounds the sequences listed as damaged in one batch.
const maxLost = 1 << 16

// NewCursor returns a cursor that goes on where d says, for the connection's
// offer. Messages of which header and data exceed limit bytes are refused (0:
// none are).
func NewCursor(src Source, offer uint32, d *Decision, compress bool, limit int) *Cursor {
	return &Cursor{
		src: src, offer: offer, incarnation: d.State.Incarnation, base: d.State.Base,
		next: d.Next, chain: d.Chain, compress: compress, limit: limit, soft: firstBatch,
	}
}

// Next returns the first sequence not read yet.
func (c *Cursor) Next() uint64 { return c.next }

// Read appends to out the batches that can be built now, but not more than
// about room bytes of them (at least one), and returns out. It returns at
// once: nothing new means nothing appended. Batches appended are good even if
// it also returns an error.
func (c *Cursor) Read(out []*Batch, room int) ([]*Batch, error) {
	st := c.src.DurableState()
	if c.next > st.Last {
		return out, nil
	}
	c.b.Reset(c.offer, c.incarnation, c.base, c.next, c.chain)
	c.lost = nil
	begin, seed, sent := c.next, c.chain, len(out)
	gaps := false
	var damaged []uint64
	emit := func() {
		if c.b.Empty() {
			return
		}
		b := batches.Get().(*Batch)
		b.Frames = c.b.AppendFrames(b.Frames[:0], c.compress)
		b.First, b.Rung = c.next, c.b.Rung()
		b.Msgs, b.Gaps, b.Missing, b.Bytes = c.b.Counts()
		b.Damaged, damaged = append(damaged, c.lost...), nil
		c.lost = nil
		gaps = gaps || b.Gaps > 0
		c.next, c.chain = b.Rung.Through+1, b.Rung.Chain
		c.b.Reset(c.offer, c.incarnation, c.base, c.next, c.chain)
		c.soft = min(2*c.soft, frame.MaxPayload)
		room -= len(b.Frames)
		out = append(out, b)
	}
	var failed error
	full := false
	each := func(m storage.Message) bool {
		if m.Seq > st.Last {
			return false
		}
		if m.Seq <= c.b.Through() {
			failed = fmt.Errorf("stream returned message %d after %d: %w", m.Seq, c.b.Through(), storage.ErrCorrupt)
			return false
		}
		size := len(m.Subject) + len(m.Header) + len(m.Data)
		// The limit is that of a publish, which the subject does not count in.
		if c.limit > 0 && max(len(m.Header)+len(m.Data), size-frame.MaxFrame) > c.limit {
			failed = &TooLargeError{Seq: m.Seq, Size: size, Limit: c.limit}
			return false
		}
		_, _, _, have := c.b.Counts()
		if !c.b.Empty() && (!c.b.Fits(size) || have+int64(size) > c.soft) {
			emit()
			if room <= 0 {
				full = true
				return false
			}
		}
		c.gap(m.Seq-1, st.First)
		c.b.Msg(m.Time, m.Subject, m.Header, m.Data)
		return true
	}
	err := c.src.Range(c.next, each)
	suspect := uint64(0)
	for err != nil && failed == nil && !full {
		seq, ok := storage.Damaged(err)
		if !ok || seq <= c.b.Through() {
			break
		}
		if seq > st.Last {
			err = nil
			break
		}
		if seq == suspect { // read twice: what the hub is told cannot be taken back
			if !c.b.Fits(0) {
				emit()
				if room <= 0 {
					full, err = true, nil
					break
				}
			}
			c.gap(seq-1, st.First)
			c.b.Gap(seq, frame.GapDamaged)
			damaged = append(damaged, seq)
			suspect = 0
			seq++
		} else {
			suspect = seq
		}
		err = c.src.Range(seq, each)
	}
	if err == nil && failed == nil && !full {
		c.gap(st.Last, st.First)
	}
	emit()
	if s, ok := c.src.(Syncer); ok && gaps {
		// What the hub has as a gap must not come back.
		if serr := s.Sync(); serr != nil {
			c.next, c.chain = begin, seed
			return out[:sent], fmt.Errorf("export gaps from %d on: %w", begin, serr)
		}
	}
	if failed != nil {
		err = failed
	}
	if err != nil {
		return out, fmt.Errorf("read stream from %d: %w", c.next, err)
	}
	return out, nil
}

// gap adds the sequences up to last as missing, those below first because the
// stream's limits removed them.
func (c *Cursor) gap(last, first uint64) {
	if l, ok := c.src.(Loser); ok && c.b.Through() < last {
		for _, span := range l.Lost(c.b.Through() + 1) {
			if span.First > last {
				break
			}
			c.missing(span.First-1, first)
			for seq := c.b.Through() + 1; seq <= min(span.Last, last) && len(c.lost) < maxLost; seq++ {
				c.lost = append(c.lost, seq)
			}
			c.b.Gap(min(span.Last, last), frame.GapDamaged)
		}
	}
	c.missing(last, first)
}

// missing is gap for sequences that no damage has taken.
func (c *Cursor) missing(last, first uint64) {
	if c.b.Through() < last && c.b.Through()+1 < first {
		c.b.Gap(min(last, first-1), frame.GapRemoved)
	}
	c.b.Gap(last, frame.GapDeleted)
}

// Chain is the Recompute of a source.
func Chain(src Source) Recompute {
	var ch frame.Chainer
	return func(from frame.Rung, through uint64) (frame.Chain, bool, error) {
		at, chain := from.Through, from.Chain
		err := src.Range(at+1, func(m storage.Message) bool {
			if m.Seq != at+1 || m.Seq > through {
				return false
			}
			chain = ch.Msg(chain, m.Seq, m.Subject, m.Header, m.Data)
			at = m.Seq
			return at < through
		})
		if _, damaged := storage.Damaged(err); damaged {
			err = nil // as good as not stored any more
		}
		return chain, at == through, err
	}
}
