package table

import (
	"slices"

	"petiole/storage"
)

// Knowledge is what a table knows of its image, for whoever has to put a
// damaged one together again.
type Knowledge struct {
	First  uint64 // no message below it exists
	Last   uint64 // the highest sequence that the image can have
	Pages  map[uint64]*Page
	Spans  []Span
	NextID uint64
	IDs    map[string]uint64 // of subjects, as far as they are in memory
}

// Know returns what t knows.
func Know(t *Table) Knowledge {
	t.mu.RLock()
	defer t.mu.RUnlock()
	k := Knowledge{
		First: t.first, Last: t.diskEnd() - 1, NextID: t.nextID, Spans: t.gone.spans,
		Pages: make(map[uint64]*Page, len(t.gone.pages)), IDs: make(map[string]uint64, len(t.subjects)),
	}
	k.First = min(k.First, k.Last+1)
	for no, p := range t.gone.pages {
		q := *p // it goes on changing
		k.Pages[no] = &q
	}
	for name, s := range t.subjects {
		k.IDs[name] = s.id
	}
	return k
}

// Rebase gives t an image that has been made anew, and may have lost messages.
// fresh is a table that has been restored from that image and not used, lsn the
// last log record that it reflects; subjects have the same numbers in both. What
// t holds beyond the image is brought into fresh, which then takes t's place,
// sums and all. Of lost, the sequences that the image has lost, it returns those
// that had still existed.
//
// Nothing may be checkpointed meanwhile. The writer and readers wait for as long
// as it takes to go through what is not frozen.
func Rebase(t, fresh *Table, lsn storage.LSN, lost []storage.Span) ([]storage.Span, error) {
	t.mu.RLock()
	frozen := t.frozen
	t.mu.RUnlock()
	overlay := func(f *set) error {
		if f == nil || f.lsn <= lsn {
			return nil // the image has it
		}
		if err := fresh.overlay(f, f.state.First, f.state.Last, f.state.LastTime); err != nil {
			return err
		}
		fresh.Freeze(f.lsn, f.kvs)
		return nil
	}
	if err := overlay(frozen); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, storage.ErrClosed
	}
	if t.frozen != frozen {
		if err := overlay(t.frozen); err != nil {
			return nil, err
		}
	}
	if err := fresh.overlay(t.active, t.first, t.last, t.lastTime); err != nil {
		return nil, err
	}
	had := t.existing(lost)
	// What fresh has not taken over, the garbage collector takes: readers may
	// still look at it.
	t.msgs, t.bytes, t.first, t.last = fresh.msgs, fresh.bytes, fresh.first, fresh.last
	t.firstTime, t.lastTime = fresh.firstTime, fresh.lastTime
	t.gone, t.live, t.subjects, t.list = fresh.gone, fresh.live, fresh.subjects, fresh.list
	t.complete, t.broken, t.hurt, t.hidden = fresh.complete, nil, nil, nil
	t.thaws++
	t.listGen++
	t.nextID = max(t.nextID, fresh.nextID)
	t.gen, t.active, t.frozen = fresh.gen, fresh.active, fresh.frozen
	t.front, t.frontThrough = nil, 0
	return had, nil
}

// existing returns the parts of spans that exist.
func (t *Table) existing(spans []storage.Span) (out []storage.Span) {
	if t.msgs == 0 {
		return nil
	}
	for _, s := range spans {
		from, to := max(s.First, t.first), min(s.Last, t.last)
		for seq, ok := t.gone.next(from, to); ok; seq, ok = t.gone.next(seq+1, to) {
			if n := len(out); n > 0 && out[n-1].Last+1 == seq {
				out[n-1].Last = seq
			} else {
				out = append(out, storage.Span{First: seq, Last: seq})
			}
		}
	}
	return out
}

// overlay does to t, once more, what has been done to a table since its last
// freeze or within a frozen set; first, last and lastTime are that table's.
func (t *Table) overlay(s *set, first, last uint64, lastTime int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.purged && t.msgs > 0 {
		t.purgeAll()
	}
	if s.purged {
		t.active.purged = true
	}
	removed := slices.Clone(s.removed)
	slices.Sort(removed)
	for _, seq := range removed {
		if t.exists(seq) {
			if _, err := t.remove(seq); err != nil {
				return err
			}
		}
	}
	for t.msgs > 0 && t.first < first {
		if _, err := t.remove(t.first); err != nil {
			return err
		}
	}
	for _, r := range s.chunks {
		if r.c == nil {
			continue
		}
		for i := range r.c.slots {
			sl := &r.c.slots[i]
			if sl.subj == nil {
				continue
			}
			seq := r.no<<chunkShift + uint64(i)
			if seq > t.last+1 {
				t.skip(seq - 1)
			}
			had, err := t.lookup(sl.subj.name)
			if err != nil {
				return err
			}
			if had == nil {
				n := &subj{name: sl.subj.name, id: sl.subj.id, recent: make([]uint64, 0, 2)}
				t.subjects[n.name] = n
				t.list = append(t.list, n)
				t.nextID = max(t.nextID, n.id+1)
			}
			if _, err := t.append(sl.message(seq)); err != nil {
				return err
			}
		}
	}
	t.skip(last)
	if t.msgs == 0 {
		t.first, t.firstTime = t.last+1, 0
	}
	t.lastTime = lastTime
	return nil
}
