package msgstore

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/table"
)

// Info is what a store's file says of itself: what has been checkpointed. What
// the log holds beyond Applied is not part of it.
type Info struct {
	File    string
	State   storage.State
	Applied storage.LSN
	// The file's length in octets: Size = used pages + Free + Ahead.
	Size  int64
	Free  int64 // pages inside that are free for reuse
	Ahead int64 // behind the last page that was ever used
}

// Inspect reads the summary of the store in dir, without changing anything.
func Inspect(dir string) (Info, error) {
	im, err := openReadOnly(dir, true)
	if err != nil {
		return Info{}, err
	}
	info, err := im.inspect()
	return info, errors.Join(err, im.close())
}

func openReadOnly(dir string, free bool) (*image, error) {
	path := filepath.Join(dir, FileName)
	db, err := boltfile.OpenReadOnly(path, free)
	if err != nil {
		return nil, err
	}
	if err := boltfile.CheckBranches(db); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return newImage(path, db), nil
}

func (im *image) inspect() (Info, error) {
	info := Info{File: im.path}
	fi, err := os.Stat(im.path)
	if err != nil {
		return info, fmt.Errorf("inspect message store: %w", err)
	}
	info.Size = fi.Size()
	info.Free = int64(im.db.Stats().FreePageN) * int64(im.db.Info().PageSize)
	err = im.view(func(tx *bbolt.Tx) error {
		info.Ahead = max(info.Size-tx.Size(), 0)
		if err := im.identify(tx); err != nil {
			return err
		}
		var err error
		info.Applied, info.State, _, _, err = im.readState(tx)
		return err
	})
	if err != nil {
		return info, fmt.Errorf("inspect message store: %w", err)
	}
	return info, nil
}

// Rebuilt reports whether err, from Verify, is about what the store makes anew
// from its messages by itself.
func Rebuilt(err error) bool { return errors.Is(err, errDamagedIndex) }

// Verify reads everything in the store in dir, without changing anything: every
// value against its checksum, the summaries and indexes against the messages,
// the structure of the file. It calls found for each damage, which is a
// *storage.CorruptError or wraps one; [Rebuilt] tells those that the next start
// mends. An error is returned if nothing can be read at all.
func Verify(dir string, found func(error)) (Info, error) {
	im, err := openReadOnly(dir, false)
	if err != nil {
		return Info{}, err
	}
	info, err := im.inspect()
	if err == nil {
		im.verifyFloor(info, found)
		im.verify(found)
	}
	boltfile.Check(im.db, found)
	return info, errors.Join(err, im.close())
}

// verifyFloor compares the file with the floor file beside it. With neither,
// there is nothing to say.
func (im *image) verifyFloor(info Info, found func(error)) {
	f, err := ReadFloor(filepath.Dir(im.path))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err != nil:
		found(err)
		return
	}
	if foreign := f.Store != im.uid; foreign || info.Applied < f.Applied {
		found(&StaleError{
			File: im.path, Foreign: foreign, Applied: info.Applied, Floor: f,
			Lost: storage.Span{First: info.State.Last + 1, Last: f.Last},
		})
	}
	if err := im.view(func(tx *bbolt.Tx) error {
		if uint64(tx.ID()) != f.Txid || f.File == 0 || im.fileID(tx) != f.File {
			return nil
		}
		if sum, err := im.freeSum(f.Txid); err != nil || sum != f.FreeSum {
			return im.corruptIndex("list of free pages", cmp.Or(err, errChecksum))
		}
		return nil
	}); err != nil {
		found(err)
	}
}

// verification collects what is to agree.
type verification struct {
	im    *image
	found func(error)
	st    storage.State
	notes deletions
	subs  map[string]*table.Subject // as the summaries have them
	seqs  []uint64                  // of intact messages, ascending
	ids   []uint64                  // of their subjects; 0 if unknown
	lost  uint64                    // messages that are damaged
	// lostNotes says that notes of deletions are lost, so that nobody knows
	// which messages should be there.
	lostNotes bool
	whole     bool // all values could be read: sums can be compared
}

func (im *image) verify(found func(error)) {
	v := &verification{
		im: im, found: found, whole: true,
		subs: map[string]*table.Subject{},
	}
	// Each in a transaction of its own: a page that makes no sense ends one.
	for _, step := range []func(*bbolt.Tx) error{v.state, v.goneAndSubjects, v.messages, v.postings, v.kvs} {
		if err := im.view(step); err != nil {
			v.whole = false
			found(err)
		}
	}
}

// index reports damage to what is derived from messages.
func (v *verification) index(format string, args ...any) {
	v.whole = false
	v.found(v.im.corruptIndex(fmt.Sprintf(format, args...), errDamagedIndex))
}

func (v *verification) state(tx *bbolt.Tx) (err error) {
	_, v.st, _, v.notes.spans, err = v.im.readState(tx)
	return err
}

func (v *verification) goneAndSubjects(tx *bbolt.Tx) error {
	v.notes.pages, _ = v.im.readPages(tx, func(key []byte, err error) {
		v.index("index of deleted messages, page %x: %v", key, err)
		v.lostNotes = true
	})
	c := tx.Bucket(bucketSubj).Cursor()
	for k, val := c.First(); k != nil; k, val = c.Next() {
		s, ok, err := v.im.decodeSubject(tx, k, val)
		if err != nil {
			v.whole = false
			v.found(err)
			continue
		}
		if !ok {
			continue
		}
		v.subs[s.Name] = &s
	}
	return nil
}

// messages reads all messages and compares the summaries with them.
func (v *verification) messages(tx *bbolt.Tx) error {
	im, st := v.im, v.st
	sums := map[string]*table.Subject{}
	var msgs, bytes uint64
	expect := st.First // the next sequence that is there, or deleted
	missing := func(to uint64) {
		if st.Msgs == 0 || v.lostNotes {
			return
		}
		for seq := expect; seq < to; seq++ {
			if i := slices.IndexFunc(v.notes.spans, func(s table.Span) bool { return s.First <= seq && seq <= s.Last }); i >= 0 {
				seq = v.notes.spans[i].Last
				continue
			}
			if !v.notes.has(seq) {
				v.lost++
				v.found(im.corrupt(seq, errors.New("it is missing, and not among the deleted ones")))
			}
		}
	}
	message := func(m storage.Message, err error) {
		if m.Seq < st.First || m.Seq > st.Last || v.notes.has(m.Seq) {
			return // deleted, or of a checkpoint that has not come to its end
		}
		if m.Seq < expect {
			v.found(im.corrupt(m.Seq, errors.New("it is out of order")))
			v.whole = false
			return
		}
		missing(m.Seq)
		expect = m.Seq + 1
		if err != nil {
			v.lost++
			v.found(im.corrupt(m.Seq, err))
			return
		}
		msgs++
		bytes += m.Size()
		sum := sums[m.Subject]
		if sum == nil {
			name := strings.Clone(m.Subject)
			sum = &table.Subject{Name: name, First: m.Seq}
			sums[name] = sum
		}
		sum.Msgs++
		sum.Bytes += m.Size()
		sum.Last = m.Seq
		id := uint64(0)
		if s := v.subs[m.Subject]; s != nil {
			id = s.ID
		}
		v.seqs, v.ids = append(v.seqs, m.Seq), append(v.ids, id)
	}
	c := tx.Bucket(bucketMsgs).Cursor()
	last := uint64(0) // of the chunk before
	for k, val := c.First(); k != nil; k, val = c.Next() {
		base, err := im.chunkKey(k)
		if err != nil {
			v.found(err)
			continue
		}
		ck, err := parseChunk(im.msgs, k, val)
		if err != nil {
			v.found(im.corruptIndex(fmt.Sprintf("chunk of messages from %d on", base), err))
			rescueChunk(im.msgs, k, val, func(m storage.Message, _ []byte) { message(m, nil) })
			continue
		}
		if base <= last && last != 0 {
			v.found(im.corruptIndex(fmt.Sprintf("chunk of messages from %d on", base), fmt.Errorf("the one before it goes to %d", last)))
			v.whole = false
		}
		last = ck.last()
		for i := range ck.n {
			message(ck.message(im.msgs, i))
		}
	}
	missing(st.Last + 1)
	if !v.whole || v.lost > 0 {
		return nil // what cannot be read cannot be counted
	}
	if msgs != st.Msgs || bytes != st.Bytes {
		v.found(im.corruptIndex("summary of the store", fmt.Errorf("it says %d messages of %d bytes, there are %d of %d", st.Msgs, st.Bytes, msgs, bytes)))
	}
	if len(sums) != st.Subjects {
		v.found(im.corruptIndex("summary of the store", fmt.Errorf("it says %d subjects, there are %d", st.Subjects, len(sums))))
	}
	for name, sum := range sums {
		s := v.subs[name]
		if s == nil {
			v.index("subject %q has messages and no summary", name)
		} else if s.Msgs != sum.Msgs || s.Bytes != sum.Bytes || s.First != sum.First || s.Last < sum.Last {
			v.index("summary of subject %q says %d messages, %d to %d; there are %d, %d to %d", name, s.Msgs, s.First, s.Last, sum.Msgs, sum.First, sum.Last)
		}
	}
	for name := range v.subs {
		if sums[name] == nil {
			v.index("summary of subject %q, which has no messages", name)
		}
	}
	return nil
}

// postings checks that every message is found under its subject.
func (v *verification) postings(tx *bbolt.Tx) error {
	posted := map[uint64]uint64{} // messages found, by subject
	last := map[uint64]uint64{}
	intact := true
	b := &block{c: tx.Bucket(bucketPost).Cursor()}
	var seqs []uint64
	for b.k, b.v = b.c.First(); b.k != nil; b.k, b.v = b.c.Next() {
		if len(b.k) != 16 {
			v.index("index of subjects: %v", errLayout)
			intact = false
			continue
		}
		b.id = binary.BigEndian.Uint64(b.k)
		var err error
		if seqs, err = v.im.posts(b, seqs[:0]); err != nil {
			intact = false
			v.whole = false
			v.found(fmt.Errorf("%w: %w", errDamagedIndex, err))
			continue
		}
		for _, seq := range seqs {
			if seq <= last[b.id] && last[b.id] != 0 {
				continue // twice: counted once
			}
			last[b.id] = seq
			if i, ok := slices.BinarySearch(v.seqs, seq); ok && v.ids[i] == b.id {
				posted[b.id]++
			}
		}
	}
	if !intact || !v.whole || v.lost > 0 {
		return nil
	}
	for name, s := range v.subs {
		if posted[s.ID] != s.Msgs {
			v.index("index of subject %q leads to %d of its %d messages", name, posted[s.ID], s.Msgs)
		}
	}
	return nil
}

func (v *verification) kvs(tx *bbolt.Tx) error {
	c := tx.Bucket(bucketKV).Cursor()
	for k, val := c.First(); k != nil; k, val = c.Next() {
		if _, err := v.im.kv.open(k, val); err != nil {
			v.found(v.im.corruptIndex(fmt.Sprintf("state under key %q", k), err))
		}
	}
	return nil
}
