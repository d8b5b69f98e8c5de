package msgstore

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"petiole/storage"
	"petiole/storage/internal/table"
)

const (
	// blockPosts is how many postings a block holds at most.
	blockPosts = 256
	// arenaSize is the unit in which a checkpoint allocates encoded values;
	// bbolt keeps them until the transaction ends.
	arenaSize = 1 << 20
	// reclaimMin is how many messages below the first a checkpoint deletes at
	// least if there are as many. What remains is for the next: one purge must
	// not make one transaction of millions of pages. It costs file space only.
	reclaimMin = 1 << 15
)

// arena hands out byte slices that live as long as a transaction.
type arena struct{ free []byte }

// take returns an empty slice with room for n octets.
func (a *arena) take(n int) []byte {
	if n > arenaSize/4 {
		return make([]byte, 0, n)
	}
	if len(a.free) < n {
		a.free = make([]byte, arenaSize)
	}
	b := a.free[:0:n]
	a.free = a.free[n:]
	return b
}

type post struct{ id, seq uint64 }

// write brings the frozen set into the transaction.
func (im *image) write(tx *bbolt.Tx, f table.Frozen) error {
	st := f.State()
	if f.Purged() {
		for _, b := range [][]byte{bucketMsgs, bucketSubj, bucketPost, bucketGone} {
			if err := empty(tx, b); err != nil {
				return err
			}
		}
	}
	var mem arena
	if err := im.writeKVs(tx, f.KVs()); err != nil {
		return err
	}
	if err := im.writePages(tx, f.Pages(), &mem); err != nil {
		return err
	}
	added, err := im.writeMessages(tx, f, st, &mem)
	if err != nil {
		return err
	}
	if err := im.writeSubjects(tx, f, added, &mem); err != nil {
		return err
	}
	return im.putState(tx, f.LSN(), st, f.NextID(), f.Spans())
}

func empty(tx *bbolt.Tx, name []byte) error {
	if err := tx.DeleteBucket(name); err != nil {
		return err
	}
	_, err := tx.CreateBucket(name)
	return err
}

func (im *image) writeKVs(tx *bbolt.Tx, kvs []storage.KV) error {
	b := tx.Bucket(bucketKV)
	// In the order of the keys for the reason given in writeSubjects; of two
	// for the same key the later counts.
	kvs = slices.Clone(kvs)
	slices.SortStableFunc(kvs, func(a, b storage.KV) int { return strings.Compare(a.Key, b.Key) })
	for _, kv := range kvs {
		key := []byte(kv.Key)
		var err error
		if kv.Value == nil {
			err = b.Delete(key)
		} else {
			v := append(make([]byte, overhead, overhead+len(kv.Value)), kv.Value...)
			err = b.Put(key, im.kv.finish(key, v))
		}
		if err != nil {
			return fmt.Errorf("key %q: %w", kv.Key, err)
		}
	}
	return nil
}

func (im *image) writePages(tx *bbolt.Tx, pages map[uint64]*table.Page, mem *arena) error {
	b := tx.Bucket(bucketGone)
	nos := make([]uint64, 0, len(pages))
	for no := range pages {
		nos = append(nos, no)
	}
	slices.Sort(nos)
	for _, no := range nos {
		key := seqKey(no)
		p := pages[no]
		if p == nil {
			if err := b.Delete(key); err != nil {
				return err
			}
			continue
		}
		v := mem.take(overhead + 8*len(p.Bits))[:overhead]
		for _, w := range p.Bits {
			v = binary.LittleEndian.AppendUint64(v, w)
		}
		if err := b.Put(key, im.gone.finish(key, v)); err != nil {
			return err
		}
	}
	return nil
}

// writeMessages adds and deletes messages; it returns the additions by
// subject and sequence.
func (im *image) writeMessages(tx *bbolt.Tx, f table.Frozen, st storage.State, mem *arena) ([]post, error) {
	b := tx.Bucket(bucketMsgs)
	if k, _ := b.Cursor().Last(); len(k) == 8 && binary.BigEndian.Uint64(k) < st.First {
		// All of it is below the first: far cheaper than one by one.
		if err := empty(tx, bucketMsgs); err != nil {
			return nil, err
		}
		b = tx.Bucket(bucketMsgs)
	}
	// Sequences only rise: full leaves never have to be split again.
	b.FillPercent = 1
	var key [8]byte
	removed := slices.Clone(f.Removed())
	slices.Sort(removed)
	for _, seq := range removed {
		if seq < st.First {
			continue // below
		}
		binary.BigEndian.PutUint64(key[:], seq)
		if err := b.Delete(key[:]); err != nil {
			return nil, err
		}
	}
	var below [][]byte
	limit := reclaimMin + 2*f.Count()
	c := b.Cursor()
	for k, _ := c.First(); len(k) == 8 && binary.BigEndian.Uint64(k) < st.First && len(below) < limit; k, _ = c.Next() {
		below = append(below, append(mem.take(8), k...))
	}
	for _, k := range below {
		if err := b.Delete(k); err != nil {
			return nil, err
		}
	}
	// Additions come last: deleting from the leaf they make long is slow.
	added := make([]post, 0, f.Count())
	err := f.Messages(func(id uint64, m storage.Message) error {
		added = append(added, post{id, m.Seq})
		v := appendMessage(mem.take(messageSize(&m))[:overhead], &m)
		key := binary.BigEndian.AppendUint64(mem.take(8), m.Seq)
		return b.Put(key, im.msgs.finish(key, v))
	})
	if err != nil {
		return nil, err
	}
	return added, nil
}

// writeSubjects brings summaries and postings up to date.
func (im *image) writeSubjects(tx *bbolt.Tx, f table.Frozen, added []post, mem *arena) error {
	subj := tx.Bucket(bucketSubj)
	posts := tx.Bucket(bucketPost)
	subj.FillPercent, posts.FillPercent = 0.9, 0.8
	var subs []table.Subject
	if err := f.Subjects(func(s table.Subject) error {
		subs = append(subs, s)
		return nil
	}); err != nil {
		return err
	}
	// In the order of the keys: bbolt keeps what a transaction adds to a leaf in
	// one slice, and inserting all over a long one is quadratic. Of two of the
	// same name the later, whose id is higher, comes last.
	slices.SortFunc(subs, func(a, b table.Subject) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return cmp.Compare(a.ID, b.ID)
	})
	for _, s := range subs {
		var err error
		if s.Msgs == 0 {
			err = subj.Delete([]byte(s.Name))
		} else {
			err = im.putSubject(subj, s, mem)
		}
		if err != nil {
			return fmt.Errorf("subject %q: %w", s.Name, err)
		}
	}
	if im.badPosts.Load() {
		return im.rebuildPosts(tx, f.State())
	}
	slices.SortFunc(subs, func(a, b table.Subject) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(added, func(a, b post) int {
		if c := cmp.Compare(a.id, b.id); c != 0 {
			return c
		}
		return cmp.Compare(a.seq, b.seq)
	})
	var seqs []uint64
	for _, s := range subs {
		i := 0
		for seqs = seqs[:0]; i < len(added) && added[i].id == s.ID; i++ {
			seqs = append(seqs, added[i].seq)
		}
		added = added[i:]
		if err := im.writePosts(posts, s, seqs, mem); err != nil {
			return err
		}
	}
	if len(added) > 0 {
		return im.corruptIndex("checkpoint", fmt.Errorf("subject number %d is not among the changed ones", added[0].id))
	}
	return nil
}

// writePosts drops the blocks of a subject that lie below its first message
// and appends seqs.
func (im *image) writePosts(b *bbolt.Bucket, s table.Subject, seqs []uint64, mem *arena) error {
	first := s.First
	if s.Msgs == 0 {
		first = table.End
	}
	cur := &block{c: b.Cursor(), id: s.ID}
	var drop [][]byte
	for ok := cur.at(0); ok; {
		key := cur.k
		if ok = cur.next(); ok && cur.base() <= first || !ok && s.Msgs == 0 {
			drop = append(drop, bytes.Clone(key))
		} else if ok {
			break
		}
	}
	if len(seqs) > 0 {
		var old []uint64
		base := uint64(0)
		if cur.at(table.End) && cur.base() <= seqs[0] {
			var err error
			base = cur.base()
			if old, err = im.posts(cur, nil); err != nil {
				return err
			}
			if len(old) < blockPosts {
				n := min(len(seqs), blockPosts-len(old))
				old = append(old, seqs[:n]...)
				seqs = seqs[n:]
				if err := im.putPosts(b, s.ID, base, old, mem); err != nil {
					return err
				}
			}
		}
		for len(seqs) > 0 {
			n := min(len(seqs), blockPosts)
			if err := im.putPosts(b, s.ID, seqs[0], seqs[:n], mem); err != nil {
				return err
			}
			seqs = seqs[n:]
		}
	}
	for _, k := range drop {
		if err := b.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

func (im *image) putPosts(b *bbolt.Bucket, id, base uint64, seqs []uint64, mem *arena) error {
	key := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(mem.take(16), id), base)
	// Most distances are small; append copes with the rest.
	v := appendPosts(mem.take(overhead + 3*len(seqs) + 8)[:overhead], base, seqs)
	return b.Put(key, im.post.finish(key, v))
}

// encodeState encodes what is known of the store as a whole.
func encodeState(lsn storage.LSN, st storage.State, nextID uint64, spans []table.Span) []byte {
	v := appendNumbers(make([]byte, overhead, 128), uint64(lsn), st.Msgs, st.Bytes, st.First, uint64(st.FirstTime),
		st.Last, uint64(st.LastTime), nextID, uint64(len(spans)))
	for _, s := range spans {
		v = appendNumbers(v, s.First, s.Last-s.First)
	}
	return v
}

func decodeState(c []byte) (lsn storage.LSN, st storage.State, nextID uint64, spans []table.Span, err error) {
	var l, firstTime, lastTime, n uint64
	c, err = decodeNumbers(c, &l, &st.Msgs, &st.Bytes, &st.First, &firstTime, &st.Last, &lastTime, &nextID, &n)
	st.FirstTime, st.LastTime = int64(firstTime), int64(lastTime)
	for ; err == nil && n > 0; n-- {
		var s table.Span
		c, err = decodeNumbers(c, &s.First, &s.Last)
		s.Last += s.First
		spans = append(spans, s)
	}
	if err == nil && len(c) > 0 {
		err = errLayout
	}
	return storage.LSN(l), st, nextID, spans, err
}

// Checkpoint writes the frozen set; see storage.Store.
func (s *Store) Checkpoint() error {
	s.checkpoint.Lock()
	defer s.checkpoint.Unlock()
	if s.Closed() {
		return storage.ErrClosed
	}
	f, ok := table.FrozenOf(s.Table)
	if !ok {
		return nil
	}
	im := s.image
	if im.failed.Load() {
		return fmt.Errorf("checkpoint %s: %w", im.path, storage.ErrFailed)
	}
	bad := im.badPosts.Load()
	write := func(tx *bbolt.Tx) error { return im.write(tx, f) }
	err := im.update(write)
	if err != nil && !bad && im.badPosts.Load() {
		// Found out on the way: once more, and make them anew.
		bad = true
		err = im.update(write)
	}
	if err == nil && bad {
		im.badPosts.Store(false)
		s.log.Warn("Damaged indexes of a message store have been made anew from its messages.", "file", im.path)
	}
	if err != nil {
		if !errors.Is(err, storage.ErrClosed) && !full(err) {
			// After a failed fsync the kernel may take for clean what is not
			// on disk; trying again would succeed without being true.
			im.failed.Store(true)
			return fmt.Errorf("checkpoint %s: %w: %w", im.path, storage.ErrFailed, err)
		}
		return fmt.Errorf("checkpoint %s: %w", im.path, err)
	}
	s.applied.Store(uint64(f.LSN()))
	f.Thaw()
	return nil
}

// full reports whether err is for want of space, which may come back.
func full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, berrors.ErrMaxSizeReached)
}
