package table

import (
	"petiole/storage"
)

// Freeze makes the active set the frozen one; see storage.Store.
func (t *Table) Freeze(lsn storage.LSN, kvs []storage.KV) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.frozen != nil || t.closed {
		return false
	}
	a := t.active
	a.lsn, a.kvs, a.state, a.nextID = lsn, kvs, t.state(), t.nextID
	a.spans = t.gone.spans // never changed in place
	t.frozen = a
	t.gen++
	t.active = t.newSet(t.last + 1)
	return true
}

// Frozen is what a checkpoint has to bring into the image. Nothing of it
// changes until Thaw.
type Frozen struct {
	t *Table
	s *set
}

// FrozenOf returns the frozen set of t; false if there is none.
func FrozenOf(t *Table) (Frozen, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return Frozen{t, t.frozen}, t.frozen != nil
}

// LSN returns the last log record reflected.
func (f Frozen) LSN() storage.LSN { return f.s.lsn }

// KVs returns the keyed state that has changed.
func (f Frozen) KVs() []storage.KV { return f.s.kvs }

// State returns the summary.
func (f Frozen) State() storage.State { return f.s.state }

// NextID returns the lowest subject id not given out.
func (f Frozen) NextID() uint64 { return f.s.nextID }

// Spans returns all spans of sequences without messages.
func (f Frozen) Spans() []Span { return f.s.spans }

// Pages returns the changed pages; a nil page has been dropped.
func (f Frozen) Pages() map[uint64]*Page { return f.s.pages }

// Purged reports whether all that the image holds has been deleted before
// what this set brings.
func (f Frozen) Purged() bool { return f.s.purged }

// Removed returns the sequences to delete from the image, beside all below
// State().First.
func (f Frozen) Removed() []uint64 { return f.s.removed }

// Count returns how many messages there are to add.
func (f Frozen) Count() int {
	n := 0
	for _, r := range f.s.chunks {
		if r.c != nil {
			n += r.c.live
		}
	}
	return n
}

// Cursor goes over the messages to add, in order.
type Cursor struct {
	s    *set
	i, j int // the next to look at: chunk and slot
}

// Cursor returns one that stands before the first message to add.
func (f Frozen) Cursor() Cursor { return Cursor{s: f.s} }

// Next returns the next message; false if there is none.
func (c *Cursor) Next() (m storage.Message, ok bool) {
	for ; c.i < len(c.s.chunks); c.i, c.j = c.i+1, 0 {
		r := c.s.chunks[c.i]
		if r.c == nil {
			continue
		}
		for c.j < chunkLen {
			j := c.j
			c.j++
			if sl := &r.c.slots[j]; sl.subj != nil {
				return sl.message(r.no<<chunkShift + uint64(j)), true
			}
		}
	}
	return m, false
}

// Added returns the sequences to add by subject: those of the i-th subject
// that Subjects reports are seqs[ends[i-1]:ends[i]], ascending. Not to be called
// concurrently.
func (f Frozen) Added() (seqs []uint64, ends []int) {
	dirty := f.s.dirty
	// Every subject of a message added is among them. Nobody else looks at mark.
	for i, s := range dirty {
		s.mark = i
	}
	ends = make([]int, len(dirty)+1)
	n := 0
	f.slots(func(sl *slot, _ uint64) {
		ends[sl.subj.mark]++
		n++
	})
	at := 0
	for i := range ends { // where those of each begin
		at, ends[i] = at+ends[i], at
	}
	seqs = make([]uint64, n)
	f.slots(func(sl *slot, seq uint64) {
		p := &ends[sl.subj.mark]
		seqs[*p] = seq
		*p++
	})
	return seqs, ends[:len(dirty)]
}

func (f Frozen) slots(fn func(sl *slot, seq uint64)) {
	for _, r := range f.s.chunks {
		if r.c == nil {
			continue
		}
		for i := range r.c.slots {
			if sl := &r.c.slots[i]; sl.subj != nil {
				fn(sl, r.no<<chunkShift+uint64(i))
			}
		}
	}
}

// Dirty returns how many subjects have changed.
func (f Frozen) Dirty() int { return len(f.s.dirty) }

// Subject is the summary of one subject as the image keeps it.
type Subject struct {
	Name                         string
	ID, Msgs, Bytes, First, Last uint64
}

// Subjects calls fn for the subjects that have changed, in the order of their
// first change; those without messages are to be deleted. The same name may
// come twice, with different ids: the later one counts.
func (f Frozen) Subjects(fn func(Subject) error) error {
	var buf [256]Subject
	for dirty := f.s.dirty; len(dirty) > 0; {
		n := min(len(buf), len(dirty))
		f.t.mu.RLock()
		for i, s := range dirty[:n] {
			v := s.sums
			if s.snap != nil && s.snap.gen == f.s.gen {
				v = s.snap.sums
			}
			buf[i] = Subject{Name: s.name, ID: s.id, Msgs: v.msgs, Bytes: v.bytes, First: v.first, Last: v.last}
		}
		f.t.mu.RUnlock()
		dirty = dirty[n:]
		for _, s := range buf[:n] {
			if err := fn(s); err != nil {
				return err
			}
		}
	}
	return nil
}

// Thaw drops the frozen set: the image holds it now.
func (f Frozen) Thaw() {
	t := f.t
	t.mu.Lock()
	t.frozen = nil
	t.mu.Unlock()
	f.s.release()
	held := f.s.state.Last + 1
	for dirty := f.s.dirty; len(dirty) > 0; {
		n := min(256, len(dirty))
		t.mu.Lock()
		for _, s := range dirty[:n] {
			s.cutRecent(held)
			if s.snap != nil && s.snap.gen == f.s.gen {
				s.snap = nil
			}
			if s.msgs == 0 && s.gen == f.s.gen && t.subjects[s.name] == s {
				delete(t.subjects, s.name)
				t.thaws++
			}
		}
		t.mu.Unlock()
		dirty = dirty[n:]
	}
	t.mu.Lock()
	t.prune()
	t.mu.Unlock()
}

// Restore fills an empty table with what the image says it holds. Pages are
// added by AddPage before any other use; subjects are looked up when they are
// used.
func Restore(t *Table, st storage.State, nextID uint64, spans []Span) {
	t.msgs, t.bytes, t.first, t.firstTime = st.Msgs, st.Bytes, st.First, st.FirstTime
	t.last, t.lastTime = st.Last, st.LastTime
	t.gone.spans = spans
	t.nextID = nextID
	t.live, t.complete = st.Subjects, st.Msgs == 0
	t.active = t.newSet(t.last + 1)
}

// AddPage adds a page of sequences without messages.
func AddPage(t *Table, no uint64, p *Page) {
	if t.gone.pages == nil {
		t.gone.pages = make(map[uint64]*Page)
	}
	if len(t.gone.pages) == 0 || no < t.gone.low {
		t.gone.low = no
	}
	p.gen = 0
	t.gone.pages[no] = p
}

// AddGap notes in pages and spans, as they are passed to AddPage and Restore,
// that there are no messages in [from, to], which lies above all noted before.
func AddGap(pages map[uint64]*Page, spans []Span, from, to uint64) []Span {
	if from > to {
		return spans
	}
	g := gone{pages: pages, spans: spans}
	g.skip(from, to, 0, nil)
	return g.spans
}

// Consistent reports whether what has been added to a restored table adds up:
// as many messages as sequences that are not gone.
func Consistent(t *Table) bool {
	return t.msgs == 0 || t.last+1-t.first-t.gone.count(t.first, t.last) == t.msgs
}
