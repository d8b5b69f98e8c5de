package msgstore

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"maps"
	"math"
	"slices"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
	"petiole/storage/internal/table"
)

// Steps 4 and 5: the messages, their subjects and the keyed state.

// maxExtents is how many extents are remembered of a tree in order.
const maxExtents = 1 << 17

// extent is where messages are: all that exist in [first, last] are in the
// chunk at that place. Extents have no sequence in common.
type extent struct {
	first, last uint64
	off         int64
	size        uint32
	key         [8]byte
}

// present notes which sequences have been found.
type present map[uint64]*[table.PageLen / 64]uint64

func (p present) has(seq uint64) bool {
	w := p[seq/table.PageLen]
	return w != nil && w[seq%table.PageLen/64]&(1<<(seq%64)) != 0
}

func (p present) add(seq uint64) {
	w := p[seq/table.PageLen]
	if w == nil {
		w = new([table.PageLen / 64]uint64)
		p[seq/table.PageLen] = w
	}
	w[seq%table.PageLen/64] |= 1 << (seq % 64)
}

// subjects reads the numbers of subjects, which are kept.
func (s *salvage) subjects() error {
	used := map[uint64]bool{}
	if s.hint != nil {
		s.nextID = max(s.nextID, s.hint.nextID)
		for name, id := range s.hint.ids {
			s.ids[name], used[id] = id, true
		}
	}
	s.each(bucketSubj, func(k, v []byte, e boltpages.Entry) bool {
		x, err := s.im.parseSubject(k, v)
		// Whether it is staged does not matter: messages are counted anew.
		sub := x.now
		if sub.Msgs == 0 {
			sub = x.old
		}
		switch _, known := s.ids[sub.Name]; {
		case err == nil && (known || sub.Msgs == 0): // memory knows, or there is none
		case err != nil || used[sub.ID]:
			s.damaged("summary of subject %q, page %d: it fails its checksum", k, e.Page)
		default:
			used[sub.ID] = true
			s.ids[sub.Name] = sub.ID
			s.nextID = max(s.nextID, sub.ID+1)
		}
		return true
	})
	s.nextID = max(s.nextID, 1)
	return nil
}

// records calls fn for the intact messages in a chunk, ascending.
func (s *salvage) records(key, v []byte, fn func(m storage.Message, rec []byte)) (whole bool) {
	c, err := parseChunk(s.im.msgs, key, v)
	if err != nil {
		rescueChunk(s.im.msgs, key, v, fn)
		return false
	}
	whole = true
	for i := range c.n {
		if m, err := c.message(s.im.msgs, i); err == nil {
			fn(m, c.record(i))
		} else {
			whole = false
		}
	}
	return whole
}

// exists reports whether there is a message at seq in the state.
func (s *salvage) exists(seq uint64) bool {
	return seq >= s.st.First && seq <= s.st.Last && !s.gone.Contains(seq)
}

// take notes the messages in a chunk that exist and have not been found yet.
func (s *salvage) take(key, v []byte, off int64) (whole bool) {
	x := extent{off: off, size: uint32(len(v))}
	copy(x.key[:], key)
	whole = s.records(key, v, func(m storage.Message, _ []byte) {
		if !s.exists(m.Seq) || s.have.has(m.Seq) {
			return
		}
		s.have.add(m.Seq)
		if x.first != 0 {
			// All between that exist have to be of this chunk too.
			if next, ok := s.gone.Next(x.last+1, m.Seq); ok && next == m.Seq {
				x.last = m.Seq
				return
			}
			s.extents = append(s.extents, x)
		}
		x.first, x.last = m.Seq, m.Seq
	})
	if x.first != 0 {
		s.extents = append(s.extents, x)
	}
	return whole
}

// missing calls fn for the runs of sequences that exist and have not been
// found, until it returns false.
func (s *salvage) missing(fn func(storage.Span) bool) {
	var run storage.Span
	if s.st.First > s.st.Last {
		return
	}
	for seq, ok := s.gone.Next(s.st.First, s.st.Last); ok; seq, ok = s.gone.Next(seq+1, s.st.Last) {
		switch {
		case s.have.has(seq):
		case run.First != 0 && run.Last+1 == seq:
			run.Last = seq
		default:
			if run.First != 0 && !fn(run) {
				return
			}
			run = storage.Span{First: seq, Last: seq}
		}
	}
	if run.First != 0 {
		fn(run)
	}
}

// messages finds the messages.
func (s *salvage) messages() error {
	again := false
	chunk := func(k, v []byte, e boltpages.Entry) bool {
		if len(k) == 8 && binary.BigEndian.Uint64(k) > s.st.Last {
			if _, err := parseChunk(s.im.msgs, k, v); err != nil {
				s.orphan(e.Offset(), len(v))
			}
			return true // of a checkpoint that was not finished
		}
		n := len(s.extents)
		if !s.take(k, v, e.Offset()) && !again {
			s.damaged("messages, page %d: the chunk under key %x is damaged", e.Page, k)
			if len(s.extents) == n {
				s.orphan(e.Offset(), len(v))
			}
		}
		for _, x := range s.extents[n:] {
			s.ordered = s.ordered && x.first > s.highest
			s.highest = max(s.highest, x.last)
		}
		if len(s.extents) > s.most && s.ordered && !again {
			s.walk, s.extents = true, s.extents[:0]
		}
		return true
	}
	s.ordered = true
	s.each(bucketMsgs, chunk)
	if s.walk && !s.ordered {
		// Then there is no other way.
		s.walk, s.extents, s.have, again = false, nil, present{}, true
		hidden := s.hidden[string(bucketMsgs)]
		s.each(bucketMsgs, chunk)
		s.hidden[string(bucketMsgs)] = hidden
	}
	if s.walk {
		s.extents = s.extents[:0]
	}
	if err := s.ctx.Err(); err != nil {
		return err
	}
	var lost []storage.Span
	find := func() {
		lost = lost[:0]
		s.missing(func(r storage.Span) bool {
			lost = append(lost, r)
			return true
		})
	}
	find()
	if len(lost) > 0 {
		var buf []byte
		if err := s.scan(func(e boltpages.Entry) error {
			if len(e.Key) != 8 || e.Size() < chunkHeader {
				return nil
			}
			base := binary.BigEndian.Uint64(e.Key)
			i, _ := slices.BinarySearchFunc(lost, base, func(r storage.Span, b uint64) int { return cmp.Compare(r.Last, b) })
			if i == len(lost) || base <= math.MaxUint64-chunkSpan && lost[i].First > base+chunkSpan {
				return nil
			}
			v, err := e.Value(buf)
			if err != nil {
				return nil
			}
			buf = v
			s.take(e.Key, v, e.Offset())
			return nil
		}); err != nil {
			return err
		}
		find()
		s.adopt(lost)
	}
	slices.SortFunc(s.extents, func(a, b extent) int { return cmp.Compare(a.first, b.first) })
	return nil
}

// keyed is a value of the machine's state; lsn says how new it is.
type keyed struct {
	value []byte // as it is in the file
	lsn   storage.LSN
	stale bool
}

// keys finds the machine's keyed state.
func (s *salvage) keys() error {
	s.each(bucketKV, func(k, v []byte, e boltpages.Entry) bool {
		_, lsn, err := s.im.openKV(k, v)
		if err != nil {
			s.damaged("state, page %d: the value under key %q fails its checksum", e.Page, k)
			s.report.LostKeys = append(s.report.LostKeys, string(k))
			return false
		}
		s.kvs[string(k)] = keyed{value: bytes.Clone(v), lsn: lsn}
		return true
	})
	hidden := s.hidden[string(bucketKV)]
	if len(hidden) == 0 && s.whole {
		return s.ctx.Err()
	}
	// More than the one value: who knows what else there was. Nor whether the
	// key is what is damaged.
	s.report.KeysDoubtful = true
	if err := s.scan(func(e boltpages.Entry) error {
		if s.whole && !hides(hidden, e.Key) {
			return nil
		}
		v, err := e.Value(nil)
		if err != nil {
			return nil
		}
		_, lsn, err := s.im.openKV(e.Key, v)
		if err != nil || lsn > s.lsn {
			return nil // it is something else, or of a checkpoint that was not finished
		}
		old, ok := s.kvs[string(e.Key)]
		if ok && (s.whole && !old.stale || old.lsn >= lsn) {
			return nil
		}
		s.kvs[string(e.Key)] = keyed{value: v, lsn: lsn, stale: true}
		return nil
	}); err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(s.kvs)) {
		if s.kvs[k].stale {
			s.report.StaleKeys = append(s.report.StaleKeys, k)
		}
	}
	s.report.LostKeys = slices.DeleteFunc(s.report.LostKeys, func(k string) bool { return s.kvs[k].value != nil })
	return nil
}
