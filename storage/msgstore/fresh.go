package msgstore

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/table"
)

// freshBytes is from what size on a file none of whose messages lives is
// replaced rather than emptied.
const freshBytes = 8 << 20

// minSubject is about how many octets writing a subject takes at least.
const minSubject = 64

func (im *image) freshPath() string { return im.path + ".fresh" }

// worthFresh reports whether nothing of the file will live once f is in it, so
// that a new one takes less time, and no space.
func (s *Store) worthFresh(f table.Frozen) (ok bool, err error) {
	im := s.image
	err = im.view(func(tx *bbolt.Tx) error {
		if ok = f.Purged() && (tx.Size() >= im.fresh || f.Dirty()*minSubject > im.slice); ok {
			return nil // subjects are staged in what was, not in what is emptied
		}
		if tx.Size() < im.fresh {
			return nil
		}
		k, v := tx.Bucket(bucketMsgs).Cursor().Last()
		if k == nil {
			ok = true
			return nil
		}
		ck, err := parseChunk(im.msgs, k, v)
		ok = err == nil && ck.last() < f.State().First
		return nil
	})
	return ok, err
}

// writeFresh makes a file of the frozen set and the keyed state, and puts it in
// the place of the store's. If the space for that is wanting, the set goes into
// the old one.
func (s *Store) writeFresh(f table.Frozen) error {
	im := s.image
	path := im.freshPath()
	err := s.makeFresh(path, f)
	if err == nil {
		if err = s.swapFile(path, ""); err == nil {
			im.badPosts.Store(false)
			im.cut.Store(0)
			return nil
		}
	}
	removeErr := boltfile.Remove(path)
	if errors.Is(removeErr, fs.ErrNotExist) {
		removeErr = nil
	}
	if full(err) && removeErr == nil {
		return s.writeInto(f)
	}
	return errors.Join(err, removeErr)
}

func (s *Store) makeFresh(path string, f table.Frozen) (err error) {
	if err := boltfile.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	db, err := openFile(path, s.noSync, layout(s.image.uid))
	if err != nil {
		return err
	}
	im := newImage(path, db)
	im.slice, im.wrote = s.image.slice, s.image.wrote
	im.seals(s.image.uid)
	defer func() { err = errors.Join(err, im.close()) }()
	if err := s.image.copyKVs(im); err != nil {
		return fmt.Errorf("copy keyed state: %w", err)
	}
	w := im.newWriter(f)
	w.apart = true
	for done := false; !done; {
		if err := im.update(func(tx *bbolt.Tx) (err error) {
			done, err = w.write(tx)
			return err
		}); err != nil {
			return err
		}
		w.mem.reset()
	}
	return nil
}

// copyKVs copies the keyed state to another file of the same store, in slices.
func (im *image) copyKVs(to *image) error {
	var from []byte
	for more := true; more; {
		var kvs []storage.KV
		if err := im.view(func(tx *bbolt.Tx) error {
			kvs, more = nil, false
			n := 0
			c := tx.Bucket(bucketKV).Cursor()
			for k, v := c.Seek(from); k != nil; k, v = c.Next() {
				if n += len(k) + len(v); n > im.slice && len(kvs) > 0 {
					from, more = bytes.Clone(k), true
					return nil
				}
				// As it is: damage stays damage.
				kvs = append(kvs, storage.KV{Key: string(k), Value: bytes.Clone(v)})
			}
			return nil
		}); err != nil {
			return err
		}
		if err := to.update(func(tx *bbolt.Tx) error {
			b := tx.Bucket(bucketKV)
			b.FillPercent = 0.9
			for _, kv := range kvs {
				if err := b.Put([]byte(kv.Key), kv.Value); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}
