package msgstore

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/table"
)

// Summaries and postings of few subjects go into the last transaction of a
// checkpoint. Those of many, as a bucket of keys has them, are staged: they go
// into transactions of their own before that, and count when it has moved the
// state.
//
//	key "staged"      subject "a"                          what "a" is
//	begun 7, done 7   as of 3: …                           as of 3
//	begun 8, done 7   as of 8: msgs 5 …, before: msgs 4 …  before
//	begun 8, done 8   as of 8: msgs 5 …, before: msgs 4 …  as of 8
//
// Staging number 8 is begun with its first transaction and done with the
// checkpoint's last. What is done or not is told by the number beside a summary.
// Postings are only added to meanwhile: those above the state's last sequence are
// passed over when a store is opened and finds a staging that is not done.
//
// What is to go then (subjects without messages, postings of deleted ones) goes
// afterwards, in slices as well. If that, or the staging, has not come to its
// end, the next checkpoint goes through all subjects first and clears up.

// staging is what key "staged" says: numbers of the stagings that have been
// begun, done, and cleared up after.
type staging struct{ begun, done, swept uint64 }

func (im *image) readStaging(tx *bbolt.Tx) (s staging, err error) {
	v := tx.Bucket(bucketStore).Get(keyStaged)
	if v == nil {
		return s, nil
	}
	c, err := im.store.open(keyStaged, v)
	if err == nil {
		c, err = decodeNumbers(c, &s.begun, &s.done, &s.swept)
	}
	if err == nil && len(c) > 0 {
		err = errLayout
	}
	if err != nil {
		err = im.corruptIndex("state of a checkpoint", err)
	}
	return s, err
}

func (im *image) putStaging(tx *bbolt.Tx, s staging) error {
	v := appendNumbers(make([]byte, overhead, overhead+3*binary.MaxVarintLen64), s.begun, s.done, s.swept)
	return tx.Bucket(bucketStore).Put(keyStaged, im.store.finish(keyStaged, v))
}

// subjEntry is what stands under a subject's name. Without messages there is none.
type subjEntry struct {
	tag uint64        // of the staging; 0: it is not of one
	now table.Subject // what it is when that is done
	old table.Subject // before
}

// at returns the summary after the staging with that number.
func (e *subjEntry) at(done uint64) table.Subject {
	if e.tag > done {
		return e.old
	}
	return e.now
}

// encode appends the content of e.
func (e *subjEntry) encode(v []byte) []byte {
	v = binary.AppendUvarint(v, e.tag)
	v = appendNumbers(v, e.now.ID, e.now.Msgs, e.now.Bytes, e.now.First, e.now.Last-e.now.First)
	if e.tag > 0 {
		v = appendNumbers(v, e.old.ID, e.old.Msgs, e.old.Bytes, e.old.First, e.old.Last-e.old.First)
	}
	return v
}

func decodeEntry(name string, c []byte) (e subjEntry, err error) {
	c, err = decodeNumbers(c, &e.tag)
	e.now.Name, e.old.Name = name, name
	if err == nil {
		c, err = decodeNumbers(c, &e.now.ID, &e.now.Msgs, &e.now.Bytes, &e.now.First, &e.now.Last)
	}
	if err == nil && e.tag > 0 {
		c, err = decodeNumbers(c, &e.old.ID, &e.old.Msgs, &e.old.Bytes, &e.old.First, &e.old.Last)
	}
	if err == nil && len(c) > 0 {
		err = errLayout
	}
	e.now.Last += e.now.First
	e.old.Last += e.old.First
	return e, err
}

// parseSubject reads what stands under a subject's name.
func (im *image) parseSubject(k, v []byte) (subjEntry, error) {
	c, err := im.subj.open(k, v)
	var e subjEntry
	if err == nil {
		e, err = decodeEntry(string(k), c)
	}
	if err != nil {
		return e, im.corruptIndex(fmt.Sprintf("summary of subject %q", k), fmt.Errorf("%w: %w", errDamagedIndex, err))
	}
	return e, nil
}

// decodeSubject returns the summary that stands under a subject's name; ok is
// false if there are no messages of it.
func (im *image) decodeSubject(tx *bbolt.Tx, k, v []byte) (s table.Subject, ok bool, err error) {
	e, err := im.parseSubject(k, v)
	if err != nil {
		return s, false, err
	}
	var st staging
	if e.tag > 0 {
		if st, err = im.readStaging(tx); err != nil {
			return s, false, err
		}
	}
	s = e.at(st.done)
	return s, s.Msgs > 0, nil
}

// putEntry puts what is to stand under a subject's name; now has it.
func (im *image) putEntry(b *bbolt.Bucket, e *subjEntry, mem *arena) error {
	key := []byte(e.now.Name)
	return b.Put(key, im.subj.finish(key, e.encode(mem.take(overhead + 11*binary.MaxVarintLen64)[:overhead])))
}

func (im *image) putSubject(b *bbolt.Bucket, s table.Subject, mem *arena) error {
	return im.putEntry(b, &subjEntry{now: s}, mem)
}

// changed is a subject that a checkpoint changes.
type changed struct {
	table.Subject
	seqs []uint64 // added
}

// cost returns about how many octets writing it takes.
func (c *changed) cost() int { return len(c.Name) + 64 + 3*len(c.seqs) }

// subjectWriter is how far a checkpoint is with subjects.
type subjectWriter struct {
	ready  bool
	sliced bool       // they are too many for one transaction
	tag    uint64     // number of the staging; 0: there is none
	order  []*changed // those to put next
	posts  []*changed // of which postings are to be added next; nil as long as there is order
	drops  []*changed // to be cleared up after, then
	seqs   []uint64   // scratch
}

// prepareSubjects finds out what subjects there are to write.
func (w *writer) prepareSubjects() error {
	u := &w.subs
	if u.ready {
		return nil
	}
	u.ready = true
	seqs, ends := w.f.Added()
	subs := make([]changed, 0, len(ends))
	from, size := 0, 0
	if err := w.f.Subjects(func(s table.Subject) error {
		end := ends[len(subs)]
		subs = append(subs, changed{s, seqs[from:end]})
		size += subs[len(subs)-1].cost()
		from = end
		return nil
	}); err != nil {
		return err
	}
	// In the order of the keys: bbolt keeps what a transaction adds to a leaf in
	// one slice, and inserting all over a long one is quadratic. Of two of the
	// same name the later, whose id is higher, comes last.
	u.order = make([]*changed, len(subs))
	for i := range subs {
		u.order[i] = &subs[i]
	}
	slices.SortFunc(u.order, func(a, b *changed) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return cmp.Compare(a.ID, b.ID)
	})
	// Where all is replaced, or made anew from damaged indexes, it is at once.
	u.sliced = size > w.im.slice && (w.apart || !w.f.Purged() && !w.im.badPosts.Load())
	return nil
}

// byID orders subjects as their postings are.
func byID(subs []*changed) []*changed {
	subs = slices.Clone(subs)
	slices.SortFunc(subs, func(a, b *changed) int { return cmp.Compare(a.ID, b.ID) })
	return subs
}

// sliceSubjects writes, of subjects that are too many for one transaction, as
// many as there is still room for in this one. It reports whether all are done.
func (w *writer) sliceSubjects(tx *bbolt.Tx) (done bool, err error) {
	u, im := &w.subs, w.im
	if !u.sliced {
		return true, nil
	}
	subj, posts := tx.Bucket(bucketSubj), tx.Bucket(bucketPost)
	subj.FillPercent, posts.FillPercent = 0.9, 0.8
	st, err := im.readStaging(tx)
	if err != nil {
		return false, err
	}
	if u.posts == nil {
		u.posts = byID(u.order)
		if !w.apart {
			st.begun++
			u.tag, u.drops = st.begun, u.posts
			if err := im.putStaging(tx, st); err != nil {
				return false, err
			}
		}
	}
	for ; len(u.order) > 0; u.order = u.order[1:] {
		if w.bytes >= im.slice {
			return false, nil
		}
		s := u.order[0]
		if err := w.stage(subj, s.Subject, st.done); err != nil {
			return false, fmt.Errorf("subject %q: %w", s.Name, err)
		}
		w.bytes += len(s.Name) + 64
	}
	for ; len(u.posts) > 0; u.posts = u.posts[1:] {
		if w.bytes >= im.slice {
			return false, nil
		}
		s := u.posts[0]
		if err := im.writePosts(posts, s.Subject, s.seqs, !w.apart, &w.mem, &u.seqs); err != nil {
			return false, err
		}
		w.bytes += 32 + 3*len(s.seqs)
	}
	return true, nil
}

// stage puts a summary that is to count when the staging is done.
func (w *writer) stage(b *bbolt.Bucket, s table.Subject, done uint64) error {
	im, key := w.im, []byte(s.Name)
	if w.apart {
		if s.Msgs == 0 {
			return b.Delete(key)
		}
		return im.putSubject(b, s, &w.mem)
	}
	e := subjEntry{tag: w.subs.tag, now: s}
	if v := b.Get(key); v != nil {
		had, err := im.parseSubject(key, v)
		if err != nil {
			return err
		}
		e.old = had.at(done)
	} else if s.Msgs == 0 {
		return nil
	}
	return im.putEntry(b, &e, &w.mem)
}

// writeSubjects brings summaries and postings up to date, in the checkpoint's
// last transaction.
func (w *writer) writeSubjects(tx *bbolt.Tx) error {
	u, im := &w.subs, w.im
	if u.sliced {
		if u.tag == 0 {
			return nil
		}
		st, err := im.readStaging(tx)
		if err != nil {
			return err
		}
		st.done = u.tag
		return im.putStaging(tx, st)
	}
	subj := tx.Bucket(bucketSubj)
	posts := tx.Bucket(bucketPost)
	subj.FillPercent, posts.FillPercent = 0.9, 0.8
	for _, s := range u.order {
		var err error
		if s.Msgs == 0 {
			err = subj.Delete([]byte(s.Name))
		} else {
			err = im.putSubject(subj, s.Subject, &w.mem)
		}
		if err != nil {
			return fmt.Errorf("subject %q: %w", s.Name, err)
		}
	}
	if im.badPosts.Load() {
		return im.rebuildPosts(tx, w.f.State())
	}
	for _, s := range byID(u.order) {
		if err := im.writePosts(posts, s.Subject, s.seqs, false, &w.mem, &u.seqs); err != nil {
			return err
		}
	}
	return nil
}

// dropSubjects clears up after a staging that is done: it drops subjects that
// have no messages any more, and postings of deleted ones, as many as one
// transaction takes. It reports whether that was all.
func (w *writer) dropSubjects(tx *bbolt.Tx) (done bool, err error) {
	u, im := &w.subs, w.im
	subj, posts := tx.Bucket(bucketSubj), tx.Bucket(bucketPost)
	n := 0
	for ; len(u.drops) > 0; u.drops = u.drops[1:] {
		if n++; n > reclaimChunks*4 {
			return false, nil
		}
		if err := im.drop(subj, posts, u.drops[0].Subject, &w.mem, &u.seqs); err != nil {
			return false, err
		}
	}
	st, err := im.readStaging(tx)
	if err != nil {
		return false, err
	}
	st.swept = st.done
	return true, im.putStaging(tx, st)
}

// drop drops what is left of a subject: postings below its first message, and
// all of it if there are none.
func (im *image) drop(subj, posts *bbolt.Bucket, s table.Subject, mem *arena, scratch *[]uint64) error {
	if s.Msgs == 0 {
		key := []byte(s.Name)
		if v := subj.Get(key); v != nil {
			e, err := im.parseSubject(key, v)
			if err != nil {
				return err
			}
			if e.now.ID == s.ID && e.now.Msgs == 0 {
				if err := subj.Delete(key); err != nil {
					return err
				}
			}
		}
	}
	return im.writePosts(posts, s, nil, false, mem, scratch)
}

// sweep clears up after a staging that has not come to its end.
func (im *image) sweep() error {
	var st staging
	var last uint64
	if err := im.view(func(tx *bbolt.Tx) (err error) {
		if st, err = im.readStaging(tx); err == nil && st.begun != st.swept {
			_, state, _, _, serr := im.readState(tx)
			last, err = state.Last, serr
		}
		return err
	}); err != nil || st.begun == st.swept {
		return err
	}
	mem := &arena{}
	slice := func(fn func(tx *bbolt.Tx) error) error {
		err := im.update(fn)
		mem.reset()
		return err
	}
	for from := []byte{}; from != nil; {
		if err := slice(func(tx *bbolt.Tx) (err error) {
			from, err = im.sweepSubjects(tx, from, st.done, mem)
			return err
		}); err != nil {
			return err
		}
	}
	for from := []byte{}; from != nil && st.begun > st.done && !im.badPosts.Load(); {
		if err := slice(func(tx *bbolt.Tx) (err error) {
			from, err = im.sweepPosts(tx, from, last, mem)
			return err
		}); err != nil && !im.badPosts.Load() { // those are made anew
			return err
		}
	}
	st.begun, st.swept = st.done, st.done
	if err := slice(func(tx *bbolt.Tx) error { return im.putStaging(tx, st) }); err != nil {
		return err
	}
	im.cut.Store(0)
	return nil
}

// sweepSubjects goes through summaries from a key on, as many as one transaction
// takes, and returns the key to go on with, nil at the end.
func (im *image) sweepSubjects(tx *bbolt.Tx, from []byte, done uint64, mem *arena) (next []byte, err error) {
	subj, posts := tx.Bucket(bucketSubj), tx.Bucket(bucketPost)
	var todo []subjEntry
	n := 0
	c := subj.Cursor()
	k, v := c.Seek(from)
	for ; k != nil && n < 4*im.slice; k, v = c.Next() {
		n += len(k) + len(v)
		e, err := im.parseSubject(k, v)
		if err != nil {
			return nil, err
		}
		if e.tag > done || e.now.Msgs == 0 {
			todo = append(todo, e)
		}
	}
	next = bytes.Clone(k)
	var scratch []uint64
	for i := range todo {
		e := &todo[i]
		if s := e.at(done); s.Msgs > 0 {
			err = im.putSubject(subj, s, mem)
		} else if e.tag > done {
			err = subj.Delete([]byte(s.Name)) // its postings are above the last sequence
		} else {
			err = im.drop(subj, posts, s, mem, &scratch)
		}
		if err != nil {
			return nil, err
		}
	}
	return next, nil
}

// sweepPosts is sweepSubjects for postings above last.
func (im *image) sweepPosts(tx *bbolt.Tx, from []byte, last uint64, mem *arena) (next []byte, err error) {
	posts := tx.Bucket(bucketPost)
	type cut struct {
		key  []byte
		seqs []uint64
	}
	var todo []cut
	var seqs []uint64
	n := 0
	b := &block{c: posts.Cursor()}
	for b.k, b.v = b.c.Seek(from); b.k != nil && n < 4*im.slice; b.k, b.v = b.c.Next() {
		n += len(b.k) + len(b.v)
		if len(b.k) != 16 {
			im.badPosts.Store(true)
			return nil, im.corruptIndex("index of subjects", errLayout)
		}
		b.id = binary.BigEndian.Uint64(b.k)
		if seqs, err = im.allPosts(b, seqs[:0]); err != nil {
			return nil, err
		}
		if i, _ := slices.BinarySearch(seqs, last+1); i < len(seqs) {
			todo = append(todo, cut{bytes.Clone(b.k), slices.Clone(seqs[:i])})
		}
	}
	next = bytes.Clone(b.k)
	for _, x := range todo {
		if err = posts.Delete(x.key); err == nil && len(x.seqs) > 0 {
			err = im.putPosts(posts, binary.BigEndian.Uint64(x.key), binary.BigEndian.Uint64(x.key[8:]), x.seqs, mem)
		}
		if err != nil {
			return nil, err
		}
	}
	return next, nil
}

// writePosts drops the blocks of a subject that lie below its first message,
// unless it is to keep them, and appends seqs.
func (im *image) writePosts(b *bbolt.Bucket, s table.Subject, seqs []uint64, keep bool, mem *arena, scratch *[]uint64) error {
	first := s.First
	switch {
	case keep:
		first = 0
	case s.Msgs == 0:
		first = table.End
	}
	cur := &block{c: b.Cursor(), id: s.ID}
	var drop [][]byte
	for ok := !keep && cur.at(0); ok; {
		key := cur.k
		if ok = cur.next(); ok && cur.base() <= first || !ok && s.Msgs == 0 {
			drop = append(drop, bytes.Clone(key))
		} else if ok {
			break
		}
	}
	if len(seqs) > 0 && cur.at(table.End) && cur.base() <= seqs[0] {
		old, err := im.posts(cur, (*scratch)[:0])
		if err != nil {
			return err
		}
		// What is below the first is gone: a subject that never has but a few
		// messages has but a few postings.
		n, _ := slices.BinarySearch(old, first)
		if kept := old[n:]; len(kept) < blockPosts {
			n := min(len(seqs), blockPosts-len(kept))
			kept = append(kept, seqs[:n]...)
			seqs = seqs[n:]
			if kept[0] != cur.base() {
				drop = append(drop, bytes.Clone(cur.k))
			}
			if err := im.putPosts(b, s.ID, kept[0], kept, mem); err != nil {
				return err
			}
		}
		*scratch = old
	}
	for len(seqs) > 0 {
		n := min(len(seqs), blockPosts)
		if err := im.putPosts(b, s.ID, seqs[0], seqs[:n], mem); err != nil {
			return err
		}
		seqs = seqs[n:]
	}
	for _, k := range drop {
		if err := b.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

// Subject implements table.Image.
func (im *image) Subject(name string) (s table.Subject, ok bool, err error) {
	err = im.view(func(tx *bbolt.Tx) (err error) {
		c := tx.Bucket(bucketSubj).Cursor()
		k, v := c.Seek([]byte(name))
		if string(k) == name && k != nil {
			s, ok, err = im.decodeSubject(tx, k, v)
			return err
		}
		// That there is none is believed if its neighbours are what they should
		// be: a key that is damaged is one of them.
		if err := im.neighbour(k, v, name, 1); err != nil {
			return err
		}
		if k != nil {
			k, v = c.Prev()
		} else {
			k, v = c.Last()
		}
		return im.neighbour(k, v, name, -1)
	})
	if err != nil {
		return s, false, fmt.Errorf("read %s: %w", im.path, err)
	}
	return s, ok, nil
}

// neighbour checks a summary that stands before (order -1) or behind (1) the
// place where that of name would be, if there is one.
func (im *image) neighbour(k, v []byte, name string, order int) error {
	if k == nil {
		return nil
	}
	if strings.Compare(string(k), name) != order {
		return im.corruptIndex("summaries of the subjects", fmt.Errorf("%q stands in the place of %q", k, name))
	}
	_, err := im.parseSubject(k, v)
	return err
}

// SubjectsAfter implements table.Image.
func (im *image) SubjectsAfter(name string, n int, dst []table.Subject) ([]table.Subject, error) {
	had := len(dst)
	err := im.view(func(tx *bbolt.Tx) error {
		dst = dst[:had]
		c := tx.Bucket(bucketSubj).Cursor()
		k, v := c.Seek([]byte(name))
		if k != nil && string(k) == name {
			k, v = c.Next()
		}
		for ; k != nil && len(dst)-had < n; k, v = c.Next() {
			s, ok, err := im.decodeSubject(tx, k, v)
			if err != nil {
				return err
			}
			if ok {
				dst = append(dst, s)
			}
		}
		return nil
	})
	if err != nil {
		return dst[:had], fmt.Errorf("read %s: %w", im.path, err)
	}
	return dst, nil
}

// audit looks through the summaries of the subjects, which have not been taken
// in: one that is missing would not be missed otherwise.
func (s *Store) audit() {
	im := s.image
	err := im.view(func(tx *bbolt.Tx) error {
		_, st, _, _, err := im.readState(tx)
		if err != nil {
			return err
		}
		var subjects int
		var msgs, octets uint64
		c := tx.Bucket(bucketSubj).Cursor()
		for k, v := c.First(); k != nil; k, v = c.Next() {
			if !s.auditing.Load() {
				return nil
			}
			sub, ok, err := im.decodeSubject(tx, k, v)
			if err != nil {
				return err
			}
			if ok {
				subjects++
				msgs += sub.Msgs
				octets += sub.Bytes
			}
		}
		if subjects != st.Subjects || msgs != st.Msgs || octets != st.Bytes {
			return im.corruptIndex("summaries of the subjects", fmt.Errorf("%w: they do not add up", errDamagedIndex))
		}
		return nil
	})
	if errors.Is(err, storage.ErrCorrupt) {
		s.log.Error("The summaries of a message store's subjects are damaged.", "error", err)
		table.Break(s.Table, err)
	}
}
