package msgstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/table"
)

const (
	// blockPosts is how many postings a block holds at most.
	blockPosts = 256
	// arenaSize is the unit in which a checkpoint allocates encoded values;
	// bbolt keeps them until the transaction ends.
	arenaSize = 256 << 10
	// sliceBytes is how much one transaction of a checkpoint adds at most: it is
	// in memory, twice, until it is committed.
	sliceBytes = 2 << 20
)

// arena hands out byte slices that live as long as a transaction.
type arena struct {
	free []byte
	used [][]byte // what free was taken from
	next int      // of used, which is free from here on
}

// take returns an empty slice with room for n octets.
func (a *arena) take(n int) []byte {
	if n > arenaSize/4 {
		return make([]byte, 0, n)
	}
	if len(a.free) < n {
		if a.next == len(a.used) {
			a.used = append(a.used, make([]byte, arenaSize))
		}
		a.free = a.used[a.next]
		a.next++
	}
	b := a.free[:0:n]
	a.free = a.free[n:]
	return b
}

// reset takes everything back: the transaction has ended.
func (a *arena) reset() { a.free, a.next = nil, 0 }

// writer is a checkpoint under way.
type writer struct {
	im    *image
	f     table.Frozen
	st    storage.State // what the file will say
	apart bool          // the file is one that nobody looks at yet
	mem   arena
	bytes int // that the transaction adds, about
	subs  subjectWriter
	cur   table.Cursor
	// m is the message that cur has returned last and no chunk holds yet.
	m    storage.Message
	more bool
	b    chunkBuilder
}

func (im *image) newWriter(f table.Frozen) *writer {
	w := &writer{im: im, f: f, st: f.State(), cur: f.Cursor()}
	w.b = chunkBuilder{seal: im.msgs, max: im.chunkBytes()}
	w.m, w.more = w.cur.Next()
	return w
}

// chunkBytes returns how large a chunk of several messages may be: two of them,
// which bbolt has in a leaf at least, fill a page.
func (o *open) chunkBytes() int {
	const header, element = 16, 16 + 8 // of a page; of an entry, with the key
	return (o.db.Info().PageSize-header)/2 - element
}

// write brings what the next transaction takes into it, and reports whether it
// was the last: that one moves the state, and with it everything that is derived
// from the messages. What the ones before have added lies above the state's
// last sequence, where nobody looks, and is dropped by the next checkpoint if
// this one does not get that far; or it is staged, see subjects.go.
func (w *writer) write(tx *bbolt.Tx) (done bool, err error) {
	w.bytes = 0
	if err := w.addMessages(tx); err != nil || w.more {
		return false, err
	}
	if err := w.prepareSubjects(); err != nil {
		return false, err
	}
	if ok, err := w.sliceSubjects(tx); err != nil || !ok {
		return false, err
	}
	im, f := w.im, w.f
	if f.Purged() && !w.apart {
		for _, b := range [][]byte{bucketSubj, bucketPost, bucketGone} {
			if err := empty(tx, b); err != nil {
				return false, err
			}
		}
	}
	if err := im.writeKVs(tx, f.LSN(), f.KVs()); err != nil {
		return false, err
	}
	if err := im.writePages(tx, f.Pages(), &w.mem); err != nil {
		return false, err
	}
	if err := w.writeSubjects(tx); err != nil {
		return false, err
	}
	if err := im.noteSparse(tx, f); err != nil {
		return false, err
	}
	return true, im.putState(tx, f.LSN(), w.st, f.NextID(), f.Spans())
}

func empty(tx *bbolt.Tx, name []byte) error {
	if err := boltfile.DeleteBucket(tx, name); err != nil {
		return err
	}
	_, err := tx.CreateBucket(name)
	return err
}

// addMessages adds messages until there are no more, or enough for one
// transaction.
func (w *writer) addMessages(tx *bbolt.Tx) error {
	b := tx.Bucket(bucketMsgs)
	// Sequences only rise: full leaves never have to be split again.
	b.FillPercent = 1
	put := func() error {
		v := w.b.appendTo(w.mem.take(w.b.size()))
		w.bytes += len(v)
		return b.Put(seqKey(w.b.base), v)
	}
	w.b.n = 0
	for w.more && w.bytes < w.im.slice {
		size := recordSize(&w.m)
		if w.b.n > 0 && !w.b.fits(w.m.Seq, size) {
			if err := put(); err != nil {
				return err
			}
			w.b.n = 0
			continue
		}
		if w.b.n == 0 {
			w.b.reset(w.m.Seq)
		}
		w.b.add(&w.m)
		w.m, w.more = w.cur.Next()
	}
	if w.b.n > 0 {
		return put()
	}
	return nil
}

// begin makes the bucket of messages end where the state does, or a little
// above: a chunk at the end that is half empty is filled up first. It is part
// of the first transaction.
func (w *writer) begin(tx *bbolt.Tx) error {
	_, st, _, _, err := w.im.readState(tx)
	if err != nil {
		return err
	}
	if err := w.im.cutMessages(tx, st.Last); err != nil || !w.more {
		return err
	}
	k, v := tx.Bucket(bucketMsgs).Cursor().Last()
	if k == nil || len(v) > w.b.max/2 {
		return nil
	}
	ck, err := parseChunk(w.im.msgs, k, v)
	if err != nil || ck.last() < w.st.First {
		return nil // damaged, or of no use any more: leave it
	}
	return w.fillUp(tx, ck)
}

// fillUp adds messages to the last chunk as long as they fit.
func (w *writer) fillUp(tx *bbolt.Tx, ck chunk) error {
	w.b.reset(ck.base)
	for i := range ck.n {
		w.b.move(ck.seq(i), ck.record(i))
	}
	had := w.b.n
	for w.more && w.b.fits(w.m.Seq, recordSize(&w.m)) {
		w.b.add(&w.m)
		w.m, w.more = w.cur.Next()
	}
	if w.b.n == had {
		return nil
	}
	return tx.Bucket(bucketMsgs).Put(seqKey(ck.base), w.b.appendTo(w.mem.take(w.b.size())))
}

// cutMessages drops messages above last, the last one of the state: a
// checkpoint has not come to its end.
func (im *image) cutMessages(tx *bbolt.Tx, last uint64) error {
	b := tx.Bucket(bucketMsgs)
	c := b.Cursor()
	var drop [][]byte
	k, v := c.Last()
	for ; k != nil; k, v = c.Prev() {
		base, err := im.chunkKey(k)
		if err != nil {
			return err
		}
		if base <= last {
			break
		}
		drop = append(drop, bytes.Clone(k))
	}
	if k != nil {
		// One that has been filled up.
		if ck, err := parseChunk(im.msgs, k, v); err == nil && ck.last() > last {
			w := chunkBuilder{seal: im.msgs, max: chunkMax}
			w.reset(ck.base)
			for i := 0; i < ck.n && ck.seq(i) <= last; i++ {
				w.move(ck.seq(i), ck.record(i))
			}
			if w.n == 0 {
				drop = append(drop, bytes.Clone(k))
				k, _ = c.Prev()
			} else if err := b.Put(bytes.Clone(k), w.appendTo(nil)); err != nil {
				return err
			}
		}
	}
	if k == nil && len(drop) > 0 {
		// Nothing remains. With all of its pages emptied one by one, bbolt's
		// cursor would look for the last entry without end.
		return empty(tx, bucketMsgs)
	}
	for _, k := range drop {
		if err := b.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

func (im *image) writeKVs(tx *bbolt.Tx, lsn storage.LSN, kvs []storage.KV) error {
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
			v := appendNumbers(make([]byte, overhead, overhead+binary.MaxVarintLen64+len(kv.Value)), uint64(lsn))
			v = append(v, kv.Value...)
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

func (im *image) putPosts(b *bbolt.Bucket, id, base uint64, seqs []uint64, mem *arena) error {
	key := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(mem.take(16), id), base)
	// Most distances are small; append copes with the rest.
	v := appendPosts(mem.take(overhead + 3*len(seqs) + 8)[:overhead], base, seqs)
	return b.Put(key, im.post.finish(key, v))
}

// encodeState encodes what is known of the store as a whole: LSN, messages,
// octets, first, its time, last, its time, the next subject's id, subjects,
// spans, and of each span first and last-first.
func encodeState(lsn storage.LSN, st storage.State, nextID uint64, spans []table.Span) []byte {
	v := appendNumbers(make([]byte, overhead, 128), uint64(lsn), st.Msgs, st.Bytes, st.First, uint64(st.FirstTime),
		st.Last, uint64(st.LastTime), nextID, uint64(st.Subjects), uint64(len(spans)))
	for _, s := range spans {
		v = appendNumbers(v, s.First, s.Last-s.First)
	}
	return v
}

func decodeState(c []byte) (lsn storage.LSN, st storage.State, nextID uint64, spans []table.Span, err error) {
	var l, firstTime, lastTime, subjects, n uint64
	c, err = decodeNumbers(c, &l, &st.Msgs, &st.Bytes, &st.First, &firstTime, &st.Last, &lastTime, &nextID, &subjects, &n)
	if subjects > st.Msgs {
		err = errors.Join(err, errLayout)
	}
	st.Subjects = int(subjects)
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
	fail := func(err error) error {
		if err = failure(err); errors.Is(err, storage.ErrFailed) {
			// After a failed fsync the kernel may take for clean what is not
			// on disk; trying again would succeed without being true.
			im.failed.Store(true)
		}
		return fmt.Errorf("checkpoint %s: %w", im.path, err)
	}
	if im.failed.Load() {
		return fail(storage.ErrFailed)
	}
	if err := table.Broken(s.Table); err != nil {
		return fail(err)
	}
	if s.written != f {
		if err := s.writeOrMend(f); err != nil {
			return fail(err)
		}
		// Whatever fails from here on, the file has it.
		s.written = f
	}
	// One transaction more, so that either of the two meta pages of the file
	// leads to this state, or one that is as good: it gives space back.
	r := s.reclaimer()
	err := r.slice()
	if !passable(err) {
		return fail(err)
	}
	if err := s.writeFloor(); err != nil {
		return fail(err)
	}
	s.written = table.Frozen{}
	s.applied.Store(uint64(f.LSN()))
	f.Thaw()
	again := false
	for w := s.after; err == nil && w != nil && !s.Closed(); {
		again = true
		var done bool
		err = im.update(func(tx *bbolt.Tx) (err error) {
			done, err = w.dropSubjects(tx)
			return err
		})
		if w.mem.reset(); done {
			break
		}
	}
	s.after = nil // what is left of it, the next checkpoint finds
	for err == nil && r.more && !s.Closed() {
		again = true
		err = r.slice()
	}
	if again && passable(err) {
		err = errors.Join(err, s.writeFloor())
	}
	if err != nil && !full(err) { // that can wait
		return fail(err)
	}
	return nil
}

// passable reports whether the file can still be written to after err.
func passable(err error) bool {
	return err == nil || errors.Is(err, storage.ErrCorrupt) || full(err)
}

// writeOrMend is writeFrozen that makes damaged indexes anew.
func (s *Store) writeOrMend(f table.Frozen) error {
	im := s.image
	bad := im.badPosts.Load()
	err := s.writeFrozen(f)
	if err != nil && !bad && im.badPosts.Load() {
		// Found out on the way: once more, and make them anew.
		bad = true
		err = s.writeFrozen(f)
	}
	if err == nil && bad {
		im.badPosts.Store(false)
		s.log.Warn("Damaged indexes of a message store have been made anew from its messages.", "file", im.path)
	}
	return err
}

// writeFrozen brings the frozen set into the file, or a new one.
func (s *Store) writeFrozen(f table.Frozen) error {
	fresh, err := s.worthFresh(f)
	if err == nil && fresh {
		return s.writeFresh(f)
	}
	if err == nil {
		err = s.writeInto(f)
	}
	if f.Purged() && errors.Is(err, storage.ErrCorrupt) && !errors.Is(err, storage.ErrFailed) {
		// Nothing of what is damaged is needed any more, but the keyed state.
		s.log.Warn("A damaged message store that has been purged is replaced by a new one.", "file", s.image.path, "error", err)
		return s.writeFresh(f)
	}
	return err
}

// writeInto brings the frozen set into the file, a slice at a time.
func (s *Store) writeInto(f table.Frozen) error {
	im := s.image
	if err := im.sweep(); err != nil {
		return err
	}
	w := im.newWriter(f)
	for first, done := true, false; !done; first = false {
		if err := im.update(func(tx *bbolt.Tx) (err error) {
			if first {
				if err = w.begin(tx); err != nil {
					return err
				}
			}
			done, err = w.write(tx)
			return err
		}); err != nil {
			return err
		}
		w.mem.reset()
	}
	if w.subs.tag != 0 {
		s.after = w
	}
	return nil
}

// failure makes an error of something that writes storage.ErrFailed unless it is
// one of those that leave the store as good as it was.
func failure(err error) error {
	for _, harmless := range []error{storage.ErrFailed, storage.ErrClosed, storage.ErrCorrupt, storage.ErrLocked, fs.ErrPermission, syscall.EMFILE, syscall.ENFILE} {
		if errors.Is(err, harmless) {
			return err
		}
	}
	if full(err) {
		return err
	}
	return fmt.Errorf("%w: %w", storage.ErrFailed, err)
}

// full reports whether err is for want of space, which may come back.
func full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, berrors.ErrMaxSizeReached)
}
