package msgstore

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"math"
	"slices"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
	"petiole/storage/internal/table"
)

// Steps 1 to 3: whose file it is, the state of the store, and what was deleted.

// identity finds out whose file it is.
func (s *salvage) identity() error {
	if s.hint != nil {
		s.im.seals(s.hint.uid)
		return nil
	}
	seal := newSealer([16]byte{}, bucketStore)
	var newer error
	parse := func(v []byte) ([16]byte, bool) {
		c, err := seal.open(keyIdentity, v)
		if errors.Is(err, errVersion) && newer == nil {
			newer = s.im.newer(v)
		}
		if err != nil || len(c) != identitySize || c[16] != cipherNone {
			return [16]byte{}, false
		}
		return [16]byte(c), true
	}
	for _, m := range s.f.Metas() {
		buckets, _ := s.root(m)
		b, ok := buckets[string(bucketStore)]
		if !ok {
			continue
		}
		var uid [16]byte
		found := false
		w := s.f.NewWalker(func(boltpages.Damage) {})
		_ = w.Walk(b, func(e boltpages.Entry) error {
			if bytes.Equal(e.Key, keyIdentity) && !found {
				if v, err := e.Value(nil); err == nil {
					uid, found = parse(v)
				}
			}
			return nil
		})
		if newer != nil {
			return newer // what it says cannot be known, let alone repaired
		}
		if found && (s.floor == nil || s.floor.Store == uid) {
			s.im.seals(uid)
			return nil
		}
	}
	if s.floor != nil {
		s.im.seals(s.floor.Store)
		return nil
	}
	found := map[[16]byte]int{}
	if err := s.scan(func(e boltpages.Entry) error {
		if bytes.Equal(e.Key, keyIdentity) {
			if v, err := e.Value(nil); err == nil {
				if uid, ok := parse(v); ok {
					found[uid]++
				}
			}
		}
		return nil
	}); err != nil {
		return err
	}
	if len(found) != 1 {
		return &storage.CorruptError{File: s.path, Reason: "nothing tells which store it is of, so that nothing in it can be believed; restore the store from a backup"}
	}
	for uid := range found {
		s.im.seals(uid)
	}
	return nil
}

type summary struct {
	lsn    storage.LSN
	st     storage.State
	nextID uint64
	spans  []table.Span
}

// summary reads the state in the tree of a meta page.
func (s *salvage) summary(buckets map[string]boltpages.Bucket) (sum summary, ok bool) {
	b, ok := buckets[string(bucketStore)]
	if !ok {
		return sum, false
	}
	ok = false
	w := s.f.NewWalker(func(d boltpages.Damage) { s.damaged("bucket %q: %v", bucketStore, &d) })
	_ = w.Walk(b, func(e boltpages.Entry) error {
		if bytes.Equal(e.Key, keyState) && !ok {
			if v, err := e.Value(nil); err == nil {
				sum, ok = s.parseState(v)
			}
		}
		return nil
	})
	return sum, ok
}

func (s *salvage) parseState(v []byte) (sum summary, ok bool) {
	c, err := s.im.store.open(keyState, v)
	if err == nil {
		sum.lsn, sum.st, sum.nextID, sum.spans, err = decodeState(c)
	}
	if err == nil && (sum.st.Last == math.MaxUint64 || sum.st.First > sum.st.Last+1 || sum.st.Msgs > 0 && sum.st.First == 0) {
		err = errLayout
	}
	return sum, err == nil
}

// state decides which state of the store is put together again.
func (s *salvage) state() error {
	s.meta = -1
	var sum summary
	found := false
	for i, m := range s.f.Metas() {
		buckets, damage := s.root(m)
		got, ok := s.summary(buckets)
		if i == 0 {
			for _, d := range damage {
				s.damaged("bucket of buckets: %v", &d)
			}
			// Even without a state its messages count.
			s.meta, s.buckets = i, buckets
		}
		if ok && (!found || got.lsn > sum.lsn) {
			sum, found = got, true
			s.whole = i == 0
			if len(s.buckets) == 0 {
				s.meta, s.buckets = i, buckets
			}
		}
		if s.whole {
			break
		}
	}
	want := storage.LSN(0) // what is known to have been durable
	if s.floor != nil {
		want = s.floor.Applied
	}
	if s.hint != nil {
		want = s.hint.applied
	}
	// The tree's own state is exact. An older one is too, if the log goes on
	// from there.
	if s.whole && (sum.lsn >= want || s.hint == nil && s.logFrom > 0 && sum.lsn+1 >= s.logFrom) {
		s.lsn, s.st, s.nextID, s.spans = sum.lsn, sum.st, sum.nextID, sum.spans
		return nil
	}
	s.whole = false
	if s.hint != nil {
		s.damaged("the state of the store in the file is lost or old; memory has it")
		h := s.hint
		s.lsn, s.nextID, s.spans = h.applied, h.nextID, h.spans
		s.st = storage.State{First: h.first, Last: h.last}
		if s.floor != nil && s.floor.Applied == h.applied {
			s.st.LastTime = s.floor.LastTime
		}
		return nil
	}
	if !found || sum.lsn < want {
		// A newer one may stand somewhere, if only the way to it is destroyed.
		if err := s.scan(func(e boltpages.Entry) error {
			if bytes.Equal(e.Key, keyState) {
				if v, err := e.Value(nil); err == nil {
					if got, ok := s.parseState(v); ok && (!found || got.lsn > sum.lsn) && (s.floor == nil || got.lsn <= s.floor.Applied) {
						sum, found = got, true
					}
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	switch {
	case found && sum.lsn >= want:
		s.damaged("the state of the store at the last commit is lost; that at LSN %d is used", sum.lsn)
		s.lsn, s.st, s.nextID, s.spans = sum.lsn, sum.st, sum.nextID, sum.spans
	case s.floor != nil:
		s.damaged("the state of the store is lost; that at LSN %d is put together, which the floor file knows", s.floor.Applied)
		s.lsn = s.floor.Applied
		s.st = storage.State{First: max(s.floor.First, 1), Last: s.floor.Last, LastTime: s.floor.LastTime}
		if found {
			// Long jumps in the numbering are nowhere else.
			s.spans, s.nextID = sum.spans, sum.nextID
		}
	default:
		return &storage.CorruptError{File: s.path, Reason: "no state of the store can be found in it, and there is no floor file that knows one; restore the store from a backup"}
	}
	return nil
}

// deletions finds out which sequences hold no message.
func (s *salvage) deletions() error {
	parse := func(k, v []byte) (uint64, *table.Page, bool) {
		p := &table.Page{}
		if len(k) != 8 || len(v) != overhead+8*len(p.Bits) {
			return 0, nil, false
		}
		c, err := s.im.gone.open(k, v)
		if err != nil {
			return 0, nil, false
		}
		for i := range p.Bits {
			p.Bits[i] = binary.LittleEndian.Uint64(c[8*i:])
		}
		return binary.BigEndian.Uint64(k), p, true
	}
	add := func(no uint64, p *table.Page) {
		if q := s.pages[no]; q != nil {
			for i := range q.Bits {
				q.Bits[i] |= p.Bits[i]
			}
			return
		}
		s.pages[no] = p
	}
	s.each(bucketGone, func(k, v []byte, e boltpages.Entry) bool {
		no, p, ok := parse(k, v)
		if ok {
			add(no, p)
		} else {
			s.damaged("notes of deletions, page %d: those under key %x fail their checksum", e.Page, k)
		}
		return ok
	})
	hidden := s.hidden[string(bucketGone)]
	switch {
	case len(hidden) == 0 && s.whole:
	case s.hint != nil:
		for no, p := range s.hint.pages {
			if !s.whole || hides(hidden, seqKey(no)) {
				add(no, p)
			}
		}
	default:
		if err := s.scan(func(e boltpages.Entry) error {
			if len(e.Key) != 8 || s.whole && !hides(hidden, e.Key) {
				return nil
			}
			if v, err := e.Value(nil); err == nil {
				if no, p, ok := parse(e.Key, v); ok {
					add(no, p)
				}
			}
			return nil
		}); err != nil {
			return err
		}
		if !s.whole {
			hidden = []boltpages.Damage{{}}
		}
		for _, d := range hidden {
			from, to := uint64(0), uint64(math.MaxUint64)
			if len(d.Low) >= 8 {
				if from = binary.BigEndian.Uint64(d.Low); len(d.Low) > 8 && from < math.MaxUint64 {
					from++
				}
			}
			if len(d.High) >= 8 {
				if to = binary.BigEndian.Uint64(d.High); len(d.High) == 8 && to > 0 {
					to--
				}
			}
			from, to = max(from, s.st.First/table.PageLen), min(to, s.st.Last/table.PageLen)
			if from <= to && s.st.First <= s.st.Last {
				s.report.Doubtful = append(s.report.Doubtful, storage.Span{
					First: max(from*table.PageLen, s.st.First), Last: min(to*table.PageLen+table.PageLen-1, s.st.Last),
				})
			}
		}
		s.report.Doubtful = merge(s.report.Doubtful)
	}
	s.gone = table.NewGone(s.pages, s.spans)
	return nil
}

// merge sorts spans and joins those that touch.
func merge(spans []storage.Span) []storage.Span {
	slices.SortFunc(spans, func(a, b storage.Span) int { return cmp.Compare(a.First, b.First) })
	out := spans[:0]
	for _, s := range spans {
		if n := len(out); n > 0 && (s.First <= out[n-1].Last || s.First == out[n-1].Last+1) {
			out[n-1].Last = max(out[n-1].Last, s.Last)
		} else {
			out = append(out, s)
		}
	}
	return out
}
