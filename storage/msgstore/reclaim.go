package msgstore

import (
	"encoding/binary"
	"fmt"
	"slices"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/table"
)

// Space of deleted messages is given back after the checkpoint that deletes
// them, in transactions of their own, which change nothing of what the file
// says: chunks below the first message are dropped, those of which less than
// half lives are written anew, together with their neighbours if those are as
// empty. Which have to be looked at is noted in the checkpoint ("sparse"), so
// that a crash does not make it forgotten.

const (
	// reclaimChunks is how many chunks one transaction looks at, at most.
	reclaimChunks = 2048
	// reclaimBytes is how much it writes, at most (and a chunk).
	reclaimBytes = 1 << 20
)

// liveness tells what the file says to exist.
type liveness struct {
	im    *image
	b     *bbolt.Bucket
	st    storage.State
	spans []table.Span
	no    uint64 // of the page at hand
	page  []byte // nil: no bits set
	have  bool
}

func (im *image) liveness(tx *bbolt.Tx) (*liveness, error) {
	_, st, _, spans, err := im.readState(tx)
	return &liveness{im: im, b: tx.Bucket(bucketGone), st: st, spans: spans}, err
}

// exists reports whether there is a message with that sequence.
func (l *liveness) exists(seq uint64) (bool, error) {
	if l.st.Msgs == 0 || seq < l.st.First || seq > l.st.Last {
		return false, nil
	}
	const bits = uint64(len(table.Page{}.Bits)) * 64
	if no := seq / bits; !l.have || no != l.no {
		key := seqKey(no)
		l.no, l.have, l.page = no, true, nil
		if v := l.b.Get(key); v != nil {
			c, err := l.im.gone.open(key, v)
			if err == nil && uint64(len(c)) != bits/8 {
				err = errLayout
			}
			if err != nil {
				l.have = false
				return false, l.im.corruptIndex("index of deleted messages", fmt.Errorf("%w: %w", errDamagedIndex, err))
			}
			l.page = c
		}
	}
	if l.page != nil && binary.LittleEndian.Uint64(l.page[seq%bits/64*8:])&(1<<(seq%64)) != 0 {
		return false, nil
	}
	i, _ := slices.BinarySearchFunc(l.spans, seq, func(s table.Span, q uint64) int {
		if s.Last < q {
			return -1
		}
		return 1
	})
	return i == len(l.spans) || l.spans[i].First > seq, nil
}

// readSparse returns the keys of chunks to be looked at.
func (im *image) readSparse(tx *bbolt.Tx) (keys []uint64, err error) {
	v := tx.Bucket(bucketStore).Get(keySparse)
	if v == nil {
		return nil, nil
	}
	c, err := im.store.open(keySparse, v)
	if err == nil {
		keys, err = decodePosts(c, 0, nil)
	}
	if err != nil {
		err = im.corruptIndex("list of sparse chunks", err)
	}
	return keys, err
}

func (im *image) putSparse(tx *bbolt.Tx, keys []uint64) error {
	b := tx.Bucket(bucketStore)
	if len(keys) == 0 {
		return b.Delete(keySparse)
	}
	return b.Put(keySparse, im.store.finish(keySparse, appendPosts(make([]byte, overhead, overhead+4*len(keys)), 0, keys)))
}

// noteSparse notes the chunks that the frozen set removes messages from.
func (im *image) noteSparse(tx *bbolt.Tx, f table.Frozen) error {
	removed := slices.Clone(f.Removed())
	if len(removed) == 0 {
		return nil
	}
	slices.Sort(removed)
	keys, err := im.readSparse(tx)
	if err != nil {
		keys = nil // only space is lost
	}
	had := len(keys)
	c := tx.Bucket(bucketMsgs).Cursor()
	first := f.State().First
	through := uint64(0) // of the chunk before
	for _, seq := range removed {
		if seq < first || seq <= through {
			continue
		}
		k, v := seekChunk(c, seq)
		if k == nil {
			break
		}
		base, err := im.chunkKey(k)
		if err != nil {
			return err
		}
		ck, err := parseChunk(im.msgs, k, v)
		if err != nil {
			through = seq // leave it alone
			continue
		}
		if through = max(seq, ck.last()); ck.last() >= seq {
			keys = append(keys, base)
		}
	}
	if len(keys) == had {
		return nil
	}
	slices.Sort(keys)
	return im.putSparse(tx, slices.Compact(keys))
}

// reclaimer gives space back, a slice at a time.
type reclaimer struct {
	im   *image
	mem  arena
	more bool // there is more to do

	puts  []entry
	drops [][]byte
	bytes int
}

type entry struct {
	key uint64
	v   []byte
}

func (s *Store) reclaimer() *reclaimer { return &reclaimer{im: s.image} }

// slice runs one transaction, also if it has nothing to do.
func (r *reclaimer) slice() error {
	r.more = false
	err := r.im.update(r.run)
	r.mem.reset()
	return err
}

func (r *reclaimer) run(tx *bbolt.Tx) error {
	im := r.im
	r.puts, r.drops, r.bytes = r.puts[:0], r.drops[:0], 0
	live, err := im.liveness(tx)
	if err != nil {
		return err
	}
	b := tx.Bucket(bucketMsgs)
	b.FillPercent = 1
	if err := r.front(b, live); err != nil {
		return err
	}
	keys, err := im.readSparse(tx)
	if err != nil {
		return tx.Bucket(bucketStore).Delete(keySparse) // only space is lost
	}
	left, err := r.sparse(b, live, keys)
	if err != nil {
		return err
	}
	// The cursors are done with: now for the changes.
	for _, k := range r.drops {
		if err := b.Delete(k); err != nil {
			return err
		}
	}
	for _, e := range r.puts {
		if err := b.Put(seqKey(e.key), e.v); err != nil {
			return err
		}
	}
	if len(left) > 0 {
		r.more = true
	}
	if len(left) == len(keys) {
		return nil
	}
	return im.putSparse(tx, left)
}

// front collects the chunks that end below the first message.
func (r *reclaimer) front(b *bbolt.Bucket, live *liveness) error {
	c := b.Cursor()
	for k, v := c.First(); k != nil; {
		if _, err := r.im.chunkKey(k); err != nil {
			return err
		}
		if len(r.drops) == reclaimChunks {
			r.more = true
			return nil
		}
		next, nv := c.Next()
		if next != nil {
			base, err := r.im.chunkKey(next)
			if err != nil {
				return err
			}
			if base > live.st.First {
				return nil
			}
		} else if ck, err := parseChunk(r.im.msgs, k, v); err != nil || ck.last() >= live.st.First {
			return nil
		}
		r.drops = append(r.drops, append(r.mem.take(8), k...))
		k, v = next, nv
	}
	return nil
}

// sparse collects what is to become of chunks that are noted, and returns those
// that it has not come to.
func (r *reclaimer) sparse(b *bbolt.Bucket, live *liveness, keys []uint64) (left []uint64, err error) {
	c := b.Cursor()
	w := chunkBuilder{seal: r.im.msgs, max: r.im.chunkBytes()}
	flush := func() {
		if w.n > 0 {
			v := w.appendTo(r.mem.take(w.size()))
			r.puts = append(r.puts, entry{w.base, v})
			r.bytes += len(v)
			w.n = 0
		}
	}
	adjacent := false // what is in w may go on with the chunk at c
	seen := 0
	var k, v []byte
	for i, key := range keys {
		if seen >= reclaimChunks || r.bytes >= reclaimBytes {
			left = keys[i:]
			break
		}
		seen++
		if !adjacent || len(k) != 8 || binary.BigEndian.Uint64(k) != key {
			flush()
			if key < live.st.First {
				continue // if it is below; if it is only in part, it soon will be
			}
			k, v = c.Seek(seqKey(key))
			if len(k) != 8 || binary.BigEndian.Uint64(k) != key {
				adjacent = false
				continue
			}
		}
		ck, err := parseChunk(r.im.msgs, k, v)
		if err != nil {
			flush()
			adjacent = false
			continue // damaged: nothing is lost by leaving it
		}
		var idx []int
		size := 0
		for i := range ck.n {
			ok, err := live.exists(ck.seq(i))
			if err != nil {
				return nil, err
			}
			if ok {
				idx = append(idx, i)
				size += chunkEntry + len(ck.record(i))
			}
		}
		if 2*size >= len(v) {
			flush()
		} else {
			r.drops = append(r.drops, append(r.mem.take(8), k...))
			for _, i := range idx {
				seq, rec := ck.seq(i), ck.record(i)
				if w.n > 0 && !w.fits(seq, len(rec)) {
					flush()
				}
				if w.n == 0 {
					w.reset(seq)
				}
				w.move(seq, rec)
			}
		}
		k, v = c.Next()
		adjacent = true
	}
	flush()
	return left, nil
}
