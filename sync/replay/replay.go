// Package replay keeps the books of a replay in progress: which batches are
// under way, how many more may be, how fast it goes. It does no I/O and has no
// goroutines; its types are not for concurrent use unless they say so.
package replay

import (
	"errors"
	"fmt"
	"time"

	"petiole/sync/frame"
)

// DefaultWindow is the number of bytes that an export has under way at most.
const DefaultWindow = 8 << 20

// Limiter sizes a window. An adaptive one learns from the acknowledgements.
type Limiter interface {
	// Limit returns the bytes that may be under way now.
	Limit() int64
	// Acked tells of bytes acknowledged and how long after sending.
	Acked(bytes int64, after time.Duration)
}

// Fixed is a Limiter that never changes.
type Fixed int64

// Limit returns the fixed size.
func (f Fixed) Limit() int64 { return int64(f) }

// Acked does nothing.
func (Fixed) Acked(int64, time.Duration) {}

// Capped is a Limiter held below a bound, such as the peer's wish.
type Capped struct {
	Limiter
	Bound int64
}

// Limit returns the smaller of both.
func (c Capped) Limit() int64 { return min(c.Limiter.Limit(), c.Bound) }

// Item is one batch under way.
type Item struct {
	Rung    frame.Rung // its end
	Wire    int64      // bytes on the wire
	Bytes   int64      // bytes of its messages
	Msgs    uint64
	Gaps    uint64   // runs of missing sequences
	Missing uint64   // sequences in them
	Damaged []uint64 // sequences among the missing whose messages are damaged
	Sent    time.Time
}

// ErrAck says that the hub acknowledged something that was not sent like this.
var ErrAck = errors.New("the hub acknowledged what was not sent")

// Window is the sliding window of an export: batches sent and not yet
// acknowledged, in order.
type Window struct {
	limit    Limiter
	items    []Item // a queue; items[head:] are under way
	head     int
	inFlight int64
	through  uint64 // acknowledged up to here
}

// NewWindow returns a window in which everything up to through is
// acknowledged. A nil limiter means Fixed(DefaultWindow).
func NewWindow(through uint64, limit Limiter) *Window {
	if limit == nil {
		limit = Fixed(DefaultWindow)
	}
	return &Window{limit: limit, through: through}
}

// Room returns how many bytes may be sent now. A batch may exceed it: one is
// always let through when nothing is under way.
func (w *Window) Room() int64 {
	if w.head == len(w.items) {
		return max(1, w.limit.Limit())
	}
	return w.limit.Limit() - w.inFlight
}

// InFlight returns the bytes and batches under way.
func (w *Window) InFlight() (bytes int64, batches int) {
	return w.inFlight, len(w.items) - w.head
}

// Through returns the sequence acknowledged.
func (w *Window) Through() uint64 { return w.through }

// Sent notes that a batch is under way.
func (w *Window) Sent(it Item) {
	if w.head > 32 && w.head*2 > len(w.items) {
		w.items = append(w.items[:0], w.items[w.head:]...)
		w.head = 0
	}
	w.items = append(w.items, it)
	w.inFlight += it.Wire
}

// Ack takes the hub's position and calls fn for every batch that it settles.
// It returns ErrAck if the position is not the end of a batch under way.
// A position that is already known changes nothing.
func (w *Window) Ack(through uint64, chain frame.Chain, now time.Time, fn func(Item)) error {
	if through <= w.through {
		return nil
	}
	end := w.head
	for end < len(w.items) && w.items[end].Rung.Through < through {
		end++
	}
	if end == len(w.items) || w.items[end].Rung != (frame.Rung{Through: through, Chain: chain}) {
		return fmt.Errorf("position %d: %w", through, ErrAck)
	}
	for ; w.head <= end; w.head++ {
		it := w.items[w.head]
		w.inFlight -= it.Wire
		w.limit.Acked(it.Wire, now.Sub(it.Sent))
		if fn != nil {
			fn(it)
		}
	}
	w.through = through
	return nil
}

// meterSpan is the time over which a Meter averages, in seconds.
const meterSpan = 10

// Meter measures a rate over the last ten seconds. The zero value is ready.
type Meter struct {
	buckets [meterSpan + 1]struct {
		second      int64
		msgs, bytes uint64
	}
	start int64
}

// Add counts messages and bytes at now.
func (m *Meter) Add(now time.Time, msgs, bytes uint64) {
	s := now.Unix()
	if m.start == 0 {
		m.start = s
	}
	b := &m.buckets[s%int64(len(m.buckets))]
	if b.second != s {
		b.second, b.msgs, b.bytes = s, 0, 0
	}
	b.msgs += msgs
	b.bytes += bytes
}

// Rate returns messages and bytes per second at now.
func (m *Meter) Rate(now time.Time) (msgs, bytes float64) {
	s := now.Unix()
	for _, b := range m.buckets {
		if b.second > s-meterSpan && b.second <= s {
			msgs += float64(b.msgs)
			bytes += float64(b.bytes)
		}
	}
	// A replay that began less than ten seconds ago is not slower for it.
	span := float64(min(meterSpan, s-m.start)) + float64(now.Nanosecond())/1e9
	span = min(max(span, 1), meterSpan)
	return msgs / span, bytes / span
}
