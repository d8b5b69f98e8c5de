package msgstore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
)

// swapFile puts the file at newPath, in the store's directory, in the place of
// the store's file, under its readers. The new one has to be a complete store
// of the same identity, closed and on disk, with all messages that the table
// believes to be in the image: a checkpoint must not run meanwhile, so that the
// caller holds s.checkpoint. Unless park is empty, the old file stays, under
// that path in the same directory; else it is gone.
//
// If the power fails on the way, one of the two is in place, whole. After an
// error the old file is in use as before; if it wraps storage.ErrFailed, which
// of the two a restart finds is open.
//
// Readers wait for no more than an exchange of pointers, and the exchange for
// no more than the reads that are under way.
func (s *Store) swapFile(newPath, park string) error {
	im := s.image
	s.auditing.Store(false) // what is made anew adds up, and nobody is to wait
	fail := func(err error) error { return fmt.Errorf("replace %s by %s: %w", im.path, newPath, err) }
	if im.failed.Load() {
		return fail(storage.ErrFailed)
	}
	if _, err := os.Stat(newPath); err != nil {
		return fail(err) // opening would make it
	}
	db, err := openFile(newPath, s.noSync, nil)
	if err != nil {
		return fail(err)
	}
	next := &open{db: db}
	check := &image{path: newPath, open: next}
	err = check.view(func(tx *bbolt.Tx) error { return check.identify(tx) })
	if err == nil && check.uid != im.uid {
		err = fmt.Errorf("it is another store's: %w", storage.ErrCorrupt)
	}
	if err == nil && park != "" {
		if err = parkFile(im.path, park); err != nil {
			err = failure(err)
		}
	}
	if err != nil {
		return fail(errors.Join(err, next.close()))
	}
	if runtime.GOOS == "windows" {
		// An open file cannot be renamed there, nor replaced.
		return s.swapClosed(next, newPath)
	}
	if err := boltfile.Rename(newPath, im.path); err != nil {
		return fail(errors.Join(failure(err), next.close()))
	}
	syncErr := boltfile.SyncDir(filepath.Dir(im.path))
	im.mu.Lock()
	old := im.open
	im.open = next
	im.mu.Unlock()
	if syncErr != nil {
		im.failed.Store(true)
		return fail(errors.Join(storage.ErrFailed, syncErr, old.close()))
	}
	if err := old.close(); err != nil {
		// The file is gone, and nothing in it is of use any more.
		s.log.Warn("Closing a message store's file that has been replaced failed.", "file", im.path, "error", err)
	}
	return nil
}

// swapClosed is the end of swapFile with both files closed: readers wait.
func (s *Store) swapClosed(next *open, newPath string) error {
	im := s.image
	im.mu.Lock()
	defer im.mu.Unlock()
	err := errors.Join(next.close(), im.open.close())
	if err == nil {
		err = boltfile.Rename(newPath, im.path)
	}
	if err == nil {
		err = boltfile.SyncDir(filepath.Dir(im.path))
	}
	db, openErr := openFile(im.path, s.noSync, nil)
	if openErr == nil {
		im.open = &open{db: db}
	}
	if err = errors.Join(err, openErr); err != nil {
		im.failed.Store(true)
		return fmt.Errorf("replace %s by %s: %w: %w", im.path, newPath, storage.ErrFailed, err)
	}
	return nil
}

// parkFile gives the file at path, which stays where it is, another name.
func parkFile(path, name string) error {
	if err := os.Link(path, name); err != nil {
		// A file system without links: for a moment there is no file under the
		// old name, and after a power cut then an operator has to look.
		if err := boltfile.Rename(path, name); err != nil {
			return err
		}
	}
	return boltfile.SyncDir(filepath.Dir(path))
}
