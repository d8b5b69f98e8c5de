// Package boltfile opens bbolt files the way all of Petiole's storage needs it:
// never hanging on a lock, never leaving a half-made file behind, and turning
// what bbolt reports by panicking, and what a failing disk does to a memory
// map, into errors.
package boltfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"petiole/storage"
)

// LockTimeout is how long Open waits for another process to let go of a file.
const LockTimeout = time.Second

// createAlloc is how much a new file is larger than what is in it: bbolt's own
// 16 MiB would be most of the length of many.
const createAlloc = 16 << 10

// minSize is what every database exceeds: two pages of the smallest size.
const minSize = 2 * 4096

// Open opens the file at path. If there is none it is created (mode 0600), and
// appears under its name only once init has succeeded and everything is on
// disk. Errors are storage.ErrLocked if another process has it open, and
// storage.ErrCorrupt if it is not a database or a damaged one.
func Open(path string, o bbolt.Options, init func(*bbolt.Tx) error) (*bbolt.DB, error) {
	if o.Timeout == 0 {
		o.Timeout = LockTimeout
	}
	fi, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = create(path, o, init)
	case err == nil && fi.Size() < minSize: // an empty one bbolt would take for new
		return nil, &storage.CorruptError{File: path, Reason: fmt.Sprintf("the file has been cut to %d bytes", fi.Size())}
	}
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	return open(path, o)
}

func open(path string, o bbolt.Options) (db *bbolt.DB, err error) {
	var file *os.File
	openFile := o.OpenFile
	if openFile == nil {
		openFile = os.OpenFile
	}
	o.OpenFile = func(name string, flag int, perm os.FileMode) (f *os.File, err error) {
		file, err = openFile(name, flag, perm)
		return file, err
	}
	defer func() {
		if err != nil && file != nil {
			// A panic of bbolt's leaves it open and mapped, which keeps the lock.
			// Without one it is closed already.
			unlock(file)
			_ = file.Close()
		}
	}()
	err = Guard(path, func() (err error) {
		db, err = bbolt.Open(path, 0o600, &o)
		return err
	})
	switch {
	case err == nil:
		return db, nil
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("open %s: %w", path, storage.ErrLocked)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrVersionMismatch), errors.Is(err, berrors.ErrChecksum):
		return nil, &storage.CorruptError{File: path, Reason: "not a database of this kind (" + err.Error() + ")"}
	case errors.Is(err, storage.ErrCorrupt):
		return nil, err
	case fromSystem(err):
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	// What is left is what bbolt does not like in the file: it has been cut, say.
	return nil, &storage.CorruptError{File: path, Reason: err.Error()}
}

// fromSystem reports whether an error is the operating system's.
func fromSystem(err error) bool {
	var errno syscall.Errno
	var path *fs.PathError
	var call *os.SyscallError
	return errors.As(err, &errno) || errors.As(err, &path) || errors.As(err, &call) || errors.Is(err, berrors.ErrMaxSizeReached)
}

func create(path string, o bbolt.Options, init func(*bbolt.Tx) error) error {
	tmp := path + ".new"
	if err := Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	db, err := open(tmp, o)
	if err != nil {
		return err
	}
	db.AllocSize = createAlloc
	if init != nil {
		err = Update(db, init)
	}
	if err = errors.Join(err, db.Sync(), db.Close()); err != nil {
		return err
	}
	if err := Rename(tmp, path); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Guard runs fn, which works on the file at path, and returns its error; a
// panic or a fault in it (a page that cannot be read, a structure that makes
// no sense) becomes a storage.CorruptError, and a closed database
// storage.ErrClosed.
func Guard(path string, fn func() error) (err error) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		if r := recover(); r != nil {
			err = &storage.CorruptError{File: path, Reason: plain(r)}
		}
	}()
	if err = fn(); errors.Is(err, berrors.ErrDatabaseNotOpen) {
		return storage.ErrClosed
	}
	return err
}

// OpenReadOnly opens the file at path for reading only: it changes nothing, and
// shares the file with other readers. With free, the list of free pages is
// loaded, so that Stats has their number.
func OpenReadOnly(path string, free bool) (*bbolt.DB, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	if fi.Size() < minSize {
		return nil, &storage.CorruptError{File: path, Reason: fmt.Sprintf("the file has been cut to %d bytes", fi.Size())}
	}
	return open(path, bbolt.Options{
		ReadOnly: true, Timeout: LockTimeout, FreelistType: bbolt.FreelistMapType, PreLoadFreelist: free,
	})
}

// Check calls found for what is wrong with the structure of the database, which
// has been opened by OpenReadOnly: its two meta pages, of which one that is
// damaged would silently be passed over for the older one, the tree of pages and
// the list of free ones.
func Check(db *bbolt.DB, found func(error)) {
	corrupt := func(format string, args ...any) {
		found(&storage.CorruptError{File: db.Path(), Reason: fmt.Sprintf(format, args...)})
	}
	if err := checkMetas(db, corrupt); err != nil {
		found(fmt.Errorf("read %s: %w", db.Path(), err))
	}
	err := View(db.Path(), db, func(tx *bbolt.Tx) error {
		for err := range tx.Check() {
			corrupt("%s", plain(err))
		}
		return nil
	})
	if err != nil {
		found(err)
	}
}

// metaSize is the length of what the checksum of a meta page covers; it stands
// behind a page header and is followed by the checksum.
const (
	pageHeader = 16
	metaSize   = 56
)

func checkMetas(db *bbolt.DB, corrupt func(string, ...any)) (err error) {
	f, err := os.Open(db.Path())
	if err != nil {
		return err
	}
	defer f.Close() // was only read
	for i := range 2 {
		off := int64(i * db.Info().PageSize)
		b := make([]byte, pageHeader+metaSize+8)
		if _, err := f.ReadAt(b, off); err != nil {
			return err
		}
		h := fnv.New64a()
		_, _ = h.Write(b[pageHeader : pageHeader+metaSize]) // never fails
		if h.Sum64() != binary.NativeEndian.Uint64(b[pageHeader+metaSize:]) {
			corrupt("meta page %d, at offset %d, fails its checksum", i, off)
		}
	}
	return nil
}
