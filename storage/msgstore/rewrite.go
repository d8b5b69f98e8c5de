package msgstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/table"
)

const (
	// rewriteSlice is how many octets go into one transaction of a file that is
	// being made: what bbolt holds in memory is several times that.
	rewriteSlice = 4 << 20
	// repairSuffix and compactSuffix name files that are being made. What a
	// power cut leaves of them is removed by the next opening.
	repairSuffix  = ".repair"
	compactSuffix = ".compact"
)

// removeLeftovers removes what a power cut has left of files being made in the
// place of the one at path. All of them can be made again.
func removeLeftovers(path string) error {
	for _, suffix := range []string{repairSuffix, compactSuffix} {
		for _, name := range []string{path + suffix, path + suffix + ".new"} {
			if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove what is left of a file: %w", err)
			}
		}
	}
	return nil
}

// rewriter is a store's file being made, under another name, in transactions of
// some size. It is worth nothing until close. A write or sync of it that fails
// is storage.ErrFailed like any other, unless space is wanting.
type rewriter struct {
	im    *image
	tx    *bbolt.Tx
	mem   arena
	size  int // octets put into the transaction
	total int64
	cb    chunkBuilder
	open  bool // cb has messages
	key   [8]byte
}

// newRewriter makes the file at path for the store with that identity.
func newRewriter(path string, uid [16]byte) (*rewriter, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	// It is brought to disk where that matters, by sync.
	db, err := openFile(path, true, layout(uid))
	if err != nil {
		return nil, failure(err)
	}
	db.NoGrowSync = true // nor does its length
	w := &rewriter{im: newImage(path, db)}
	w.im.seals(uid)
	w.cb = chunkBuilder{seal: w.im.msgs, max: w.im.chunkBytes()}
	return w, nil
}

// guard runs fn, which works on the file.
func (w *rewriter) guard(fn func() error) error {
	err := boltfile.Guard(w.im.path, fn)
	if ce := (*storage.CorruptError)(nil); errors.As(err, &ce) && ce.File == w.im.path {
		// What has just been written cannot be read back.
		return fmt.Errorf("%w: %s", storage.ErrFailed, ce.Error())
	}
	return err
}

func (w *rewriter) bucket(name []byte) (*bbolt.Bucket, error) {
	if w.tx == nil {
		tx, err := w.im.db.Begin(true)
		if err != nil {
			return nil, err
		}
		w.tx = tx
	}
	b := w.tx.Bucket(name)
	b.FillPercent = 1 // keys come in order, and stay
	return b, nil
}

// put puts a value whose checksum is right; both are copied.
func (w *rewriter) put(bucket, key, value []byte) error {
	v := append(w.mem.take(len(value)), value...)
	return w.putOwned(bucket, key, v)
}

// putOwned is put for a value that does not change any more.
func (w *rewriter) putOwned(bucket, key, v []byte) error {
	b, err := w.bucket(bucket)
	if err != nil {
		return err
	}
	if err := b.Put(key, v); err != nil {
		return fmt.Errorf("bucket %q: %w", bucket, err)
	}
	w.size += len(key) + len(v)
	w.total += int64(len(key) + len(v))
	return nil
}

// record adds a message, above those added before, as the record that it was
// in a chunk.
func (w *rewriter) record(seq uint64, rec []byte) error {
	if w.open && !w.cb.fits(seq, len(rec)) {
		if err := w.flush(); err != nil {
			return err
		}
	}
	if !w.open {
		w.cb.reset(seq)
		w.open = true
	}
	w.cb.move(seq, rec)
	return nil
}

// flush puts the chunk that is being packed.
func (w *rewriter) flush() error {
	if !w.open {
		return nil
	}
	w.open = false
	binary.BigEndian.PutUint64(w.key[:], w.cb.base)
	return w.putOwned(bucketMsgs, w.key[:], w.cb.appendTo(w.mem.take(w.cb.size())))
}

// slice ends the transaction if it has become large.
func (w *rewriter) slice() error {
	if w.size < rewriteSlice {
		return nil
	}
	return w.commit()
}

func (w *rewriter) commit() error {
	w.size = 0
	w.mem.reset()
	if w.tx == nil {
		return nil
	}
	tx := w.tx
	w.tx = nil
	if err := boltfile.Commit(tx); err != nil {
		_ = tx.Rollback() // why it did not commit says more
		return failure(err)
	}
	w.im.count(tx)
	return nil
}

// sync brings to disk what has been committed.
func (w *rewriter) sync() error {
	if err := boltfile.SyncDB(w.im.db); err != nil {
		return failure(err)
	}
	return nil
}

// close finishes the file: it is complete and on disk. The state has been put.
func (w *rewriter) close() error {
	err := errors.Join(w.flush(), w.commit())
	if err == nil {
		err = w.sync()
	}
	return errors.Join(err, w.im.close())
}

// abort closes and removes the file.
func (w *rewriter) abort() error {
	if w.tx != nil {
		_ = w.tx.Rollback() // nothing of it is wanted
		w.tx = nil
	}
	return errors.Join(w.im.close(), os.Remove(w.im.path))
}

// putState puts the summary, which makes the file a store.
func (w *rewriter) putState(lsn storage.LSN, st storage.State, nextID uint64, spans []table.Span) error {
	return w.putOwned(bucketStore, bytes.Clone(keyState), w.im.store.finish(keyState, encodeState(lsn, st, nextID, spans)))
}
