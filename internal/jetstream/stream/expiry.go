package stream

import (
	"container/heap"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"petiole/internal/jetstream/command"
	"petiole/storage"
)

// ttls are the messages with a time to live of their own.
type ttls struct {
	heap  ttlHeap
	never map[uint64]struct{} // messages that maximum age does not remove
	// longest is the longest time to live of all that have been added.
	longest time.Duration
}

type ttlEntry struct {
	at  int64 // Unix nanoseconds
	seq uint64
}

type ttlHeap []ttlEntry

func (h ttlHeap) Len() int { return len(h) }
func (h ttlHeap) Less(i, j int) bool {
	if h[i].at != h[j].at {
		return h[i].at < h[j].at
	}
	// Markers are stored in the order in which messages expire, which must not
	// depend on how the heap came about.
	return h[i].seq < h[j].seq
}
func (h ttlHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *ttlHeap) Push(x any)   { *h = append(*h, x.(ttlEntry)) }
func (h *ttlHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

func (t *ttls) add(seq uint64, stored int64, ttl time.Duration) {
	if ttl == neverTTL {
		if t.never == nil {
			t.never = map[uint64]struct{}{}
		}
		t.never[seq] = struct{}{}
		return
	}
	t.longest = max(t.longest, ttl)
	heap.Push(&t.heap, ttlEntry{at: after(stored, ttl), seq: seq})
}

// after returns t plus d, or the end of time if that lies before.
func after(t int64, d time.Duration) int64 {
	if t > math.MaxInt64-int64(d) {
		return math.MaxInt64
	}
	return t + int64(d)
}

// pruneTTLs forgets messages that are gone, if they are most of those
// remembered: what has an hour or a year to live is often replaced long before.
func (m *Machine) pruneTTLs() {
	limit := 2*m.store.State().Msgs + 1024
	gone := func(seq uint64) bool {
		_, err := m.store.Load(seq)
		return errors.Is(err, storage.ErrNotFound)
	}
	if t := &m.ttls; uint64(len(t.heap)) > limit {
		t.heap = slices.DeleteFunc(t.heap, func(e ttlEntry) bool { return gone(e.seq) })
		heap.Init(&t.heap)
	}
	if t := &m.ttls; uint64(len(t.never)) > limit {
		maps.DeleteFunc(t.never, func(seq uint64, _ struct{}) bool { return gone(seq) })
	}
}

// scanTTLs finds the messages with a time to live, which only streams that
// allow it have.
func (m *Machine) scanTTLs() error {
	m.ttls = ttls{}
	if !m.cfg.AllowMsgTTL {
		return nil
	}
	return storage.RangeIntact(m.store, 0, func(msg storage.Message) bool {
		if ttl := headerTTL(msg.Header); ttl != 0 {
			m.ttls.add(msg.Seq, msg.Time, ttl)
		}
		return true
	})
}

// LongestTTL returns a time that no message's own time to live exceeds, but for
// those that never expire.
func (m *Machine) LongestTTL() time.Duration { return m.ttls.longest }

// NextExpiry returns when the next message expires, in Unix nanoseconds; false
// if none will as things stand.
func (m *Machine) NextExpiry() (int64, bool) {
	next, ok := int64(0), false
	if m.cfg.MaxAge > 0 {
		if first, found := m.firstAging(); found {
			next, ok = after(first.Time, m.cfg.MaxAge), true
		}
	}
	for len(m.ttls.heap) > 0 {
		e := m.ttls.heap[0]
		if _, err := m.store.Load(e.seq); errors.Is(err, storage.ErrNotFound) {
			heap.Pop(&m.ttls.heap) // removed otherwise
			continue
		}
		if !ok || e.at < next {
			next, ok = e.at, true
		}
		break
	}
	return next, ok
}

// firstAging returns the sequence and time of the first message that maximum
// age applies to.
func (m *Machine) firstAging() (storage.Message, bool) {
	st := m.store.State()
	if st.Msgs == 0 {
		return storage.Message{}, false
	}
	if len(m.ttls.never) == 0 {
		return storage.Message{Seq: st.First, Time: st.FirstTime}, true
	}
	for seq := st.First; ; {
		msg, err := m.store.LoadNext(storage.Filter{}, seq)
		if bad, damaged := storage.Damaged(err); damaged {
			seq = bad + 1
			continue
		}
		if err != nil {
			return storage.Message{}, false
		}
		if _, never := m.ttls.never[msg.Seq]; !never {
			return msg, true
		}
		seq = msg.Seq + 1
	}
}

func (m *Machine) expire(c *command.Expire, r *Result) error {
	if m.cfg.Sealed {
		return nil
	}
	if m.cfg.MaxAge > 0 {
		if err := m.expireAged(c.Now, r); err != nil {
			return err
		}
	}
	for len(m.ttls.heap) > 0 && m.ttls.heap[0].at <= c.Now {
		e := heap.Pop(&m.ttls.heap).(ttlEntry)
		if err := m.removeExpired(e.seq, c.Now, r); err != nil && !errors.Is(err, storage.ErrNotFound) {
			return err
		}
	}
	return nil
}

// removeExpired removes one message. If it was the last one of its subject and
// the stream is configured so, a marker takes its place for a while.
func (m *Machine) removeExpired(seq uint64, now int64, r *Result) error {
	last := ""
	if m.cfg.SubjectDeleteMarkerTTL > 0 {
		msg, err := m.store.Load(seq)
		if _, damaged := storage.Damaged(err); err != nil && !damaged {
			return fmt.Errorf("expiring message %d: %w", seq, err)
		}
		if ss, ok := m.store.Subject(msg.Subject); ok && ss.Msgs == 1 && !isMarker(msg.Header) {
			last = msg.Subject
		}
	}
	if err := m.remove(seq); err != nil {
		return err
	}
	r.Removed++
	if last == "" {
		return nil
	}
	ttl := m.cfg.SubjectDeleteMarkerTTL.Truncate(time.Second)
	marker := storage.Message{
		Time: max(now, m.lastTime), Subject: last,
		Header: []byte("NATS/1.0\r\n" + headerMarker + ": MaxAge\r\n" + HeaderTTL + ": " + ttl.String() + "\r\n" + HeaderRollup + ": sub\r\n\r\n"),
	}
	if err := m.append(&marker, ttl); err != nil {
		return err
	}
	if m.lastID != "" {
		m.lastID, m.dirtyLastID = "", true
	}
	return m.enforceTotals()
}

// expireAged removes the messages stored a maximum age or longer before now.
func (m *Machine) expireAged(now int64, r *Result) error {
	cutoff := now - int64(m.cfg.MaxAge)
	st := m.store.State()
	if st.Msgs == 0 || st.FirstTime > cutoff {
		return nil
	}
	end := m.store.SeqAtTime(cutoff + 1)
	if len(m.ttls.never) == 0 && m.cfg.SubjectDeleteMarkerTTL <= 0 {
		n, err := m.doPurge("", end, 0)
		r.Removed += n
		if err != nil {
			return fmt.Errorf("expiring messages below %d: %w", end, err)
		}
		return nil
	}
	for seq := st.First; ; {
		msg, err := m.store.LoadNext(storage.Filter{}, seq)
		if bad, damaged := storage.Damaged(err); damaged {
			// Its time cannot be told but by those around it.
			msg, err = storage.Message{Seq: bad}, nil
		}
		if errors.Is(err, storage.ErrEOF) || err == nil && msg.Seq >= end {
			return nil
		}
		if err != nil {
			return fmt.Errorf("expiring messages below %d: %w", end, err)
		}
		if _, never := m.ttls.never[msg.Seq]; !never {
			if err := m.removeExpired(msg.Seq, now, r); err != nil {
				return err
			}
		}
		seq = msg.Seq + 1
	}
}
