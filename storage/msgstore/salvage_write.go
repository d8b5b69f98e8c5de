package msgstore

import (
	"encoding/binary"
	"errors"
	"maps"
	"math"
	"slices"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
	"petiole/storage/internal/table"
)

// write puts what has been found into the file at path, complete and on disk.
func (s *salvage) write(path string) (err error) {
	w, err := newRewriter(path, s.im.uid)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.abort())
		}
	}()
	return w.guard(func() error { return s.fill(w) })
}

func (s *salvage) fill(w *rewriter) error {
	st := storage.State{First: s.st.Last + 1, Last: s.st.Last}
	subs := map[string]*table.Subject{}
	pages := map[uint64]*table.Page{}
	var spans []table.Span
	open := map[uint64][]uint64{} // postings not put yet
	posts := func(id uint64, seqs []uint64) error {
		key := postKey(id, seqs[0])
		v := appendPosts(make([]byte, overhead, overhead+3*len(seqs)+8), seqs[0], seqs)
		return w.putOwned(bucketPost, key, w.im.post.finish(key, v))
	}
	last := uint64(0) // written so far
	add := func(m storage.Message, rec []byte) error {
		if st.Msgs == 0 {
			st.First, st.FirstTime = m.Seq, m.Time
		} else {
			spans = table.AddGap(pages, spans, last+1, m.Seq-1)
		}
		last = m.Seq
		st.Msgs++
		st.Bytes += m.Size()
		st.LastTime = m.Time
		sub := subs[m.Subject]
		if sub == nil {
			name := string([]byte(m.Subject))
			id, known := s.ids[name]
			if !known {
				id = s.nextID
				s.nextID++
			}
			sub = &table.Subject{Name: name, ID: id, First: m.Seq}
			subs[name] = sub
		}
		sub.Msgs++
		sub.Bytes += m.Size()
		sub.Last = m.Seq
		seqs := append(open[sub.ID], m.Seq)
		if len(seqs) == blockPosts {
			if err := posts(sub.ID, seqs); err != nil {
				return err
			}
			seqs = seqs[:0]
		}
		open[sub.ID] = seqs
		return w.record(m.Seq, rec)
	}
	var failed error
	put := func(m storage.Message, rec []byte) {
		if m.Seq > last && s.exists(m.Seq) && failed == nil {
			failed = add(m, rec)
		}
	}
	var buf []byte
	found := s.extents
	// elsewhere puts what has been found outside of the tree below a sequence.
	elsewhere := func(below uint64) {
		for ; len(found) > 0 && found[0].first < below; found = found[1:] {
			if failed = errors.Join(failed, s.ctx.Err()); failed != nil {
				return
			}
			x := found[0]
			v, err := s.f.ReadAt(buf, x.off, int(x.size))
			if err != nil {
				continue // could be read a moment ago; what is not written is lost
			}
			buf = v
			s.records(x.key[:], v, func(m storage.Message, rec []byte) {
				if m.Seq >= x.first && m.Seq <= x.last {
					put(m, rec)
				}
			})
			if failed == nil {
				failed = w.slice()
			}
		}
	}
	if s.walk {
		b := s.buckets[string(bucketMsgs)]
		var v []byte
		if err := s.f.NewWalker(func(boltpages.Damage) {}).Walk(b, func(e boltpages.Entry) (err error) {
			if v, err = e.Value(v); err != nil {
				return nil // said before
			}
			s.records(e.Key, v, func(m storage.Message, rec []byte) {
				if s.exists(m.Seq) {
					elsewhere(m.Seq)
					put(m, rec)
				}
			})
			return errors.Join(failed, w.slice())
		}); err != nil {
			return err
		}
	}
	elsewhere(math.MaxUint64)
	if failed != nil {
		return failed
	}
	if err := w.flush(); err != nil {
		return err
	}
	if st.Msgs > 0 {
		spans = table.AddGap(pages, spans, last+1, st.Last)
	}
	s.report.Lost = s.lost(st, table.NewGone(pages, spans))
	// What the state says of the last message is right also if that is lost.
	st.LastTime = max(st.LastTime, s.st.LastTime)
	for _, id := range slices.Sorted(maps.Keys(open)) {
		if seqs := open[id]; len(seqs) > 0 {
			if err := errors.Join(posts(id, seqs), w.slice()); err != nil {
				return err
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(subs)) {
		sub := subs[name]
		key := []byte(name)
		x := subjEntry{now: *sub}
		v := x.encode(make([]byte, overhead, overhead+6*binary.MaxVarintLen64))
		if err := errors.Join(w.putOwned(bucketSubj, key, w.im.subj.finish(key, v)), w.slice()); err != nil {
			return err
		}
	}
	for _, no := range slices.Sorted(maps.Keys(pages)) {
		key := seqKey(no)
		v := make([]byte, overhead, overhead+table.PageLen/8)
		for _, word := range pages[no].Bits {
			v = binary.LittleEndian.AppendUint64(v, word)
		}
		if err := errors.Join(w.putOwned(bucketGone, key, w.im.gone.finish(key, v)), w.slice()); err != nil {
			return err
		}
	}
	for _, k := range slices.Sorted(maps.Keys(s.kvs)) {
		if err := errors.Join(w.putOwned(bucketKV, []byte(k), s.kvs[k].value), w.slice()); err != nil {
			return err
		}
	}
	st.Subjects = len(subs)
	if st.Msgs > 0 {
		st.Deleted = st.Last - st.First + 1 - st.Msgs
	}
	s.report.State, s.report.Kept, s.report.Applied = st, st.Msgs, s.lsn
	if err := w.putState(s.lsn, st, s.nextID, spans); err != nil {
		return err
	}
	return w.close()
}

// lost returns the sequences that exist and are not in a file with that state
// and those gaps.
func (s *salvage) lost(st storage.State, gaps *table.Gone) (lost []storage.Span) {
	if s.st.First > s.st.Last {
		return nil
	}
	for seq, ok := s.gone.Next(s.st.First, s.st.Last); ok; seq, ok = s.gone.Next(seq+1, s.st.Last) {
		if st.Msgs == 0 || seq < st.First || gaps.Contains(seq) {
			if n := len(lost); n > 0 && lost[n-1].Last+1 == seq {
				lost[n-1].Last = seq
			} else {
				lost = append(lost, storage.Span{First: seq, Last: seq})
			}
		}
	}
	return lost
}
