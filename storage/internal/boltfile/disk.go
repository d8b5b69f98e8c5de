package boltfile

import (
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"syscall"

	"go.etcd.io/bbolt"
)

// Op is a kind of change to files.
type Op int

// The changes that a Tap sees.
const (
	OpRename  Op = iota // in one directory, replacing what is there
	OpRemove            // of a file, or an empty directory
	OpSyncDir           // entries of a directory are on disk from now on
	OpSync              // so are the contents of a file
	OpRefresh           // and they are read from disk from now on
)

// Tap sees what the functions below do to files, and may make them fail. It is
// how tests simulate power cuts (see package simbolt); the product never sets one.
type Tap interface {
	// Update stands in for db.Update(fn).
	Update(db *bbolt.DB, fn func(*bbolt.Tx) error) error
	// Before is called before a change; an error stands in for it.
	Before(op Op, name string) error
	// Done is called after a change was made; newname is that of a rename.
	Done(op Op, name, newname string)
}

var tap atomic.Pointer[Tap]

// SetTap installs t for the whole process; nil removes it. For tests only.
func SetTap(t Tap) {
	if t == nil {
		tap.Store(nil)
		return
	}
	tap.Store(&t)
}

// Update runs a transaction that changes db and returns when it is on disk. All
// of Petiole's transactions that write go through here. With storage.ErrCorrupt
// nothing has changed: pages that would have been given free are not as long as they
// say; see lengths.go.
//
// An error of the operating system's is to be had with errors.As, also where
// bbolt has but its words.
func Update(db *bbolt.DB, change func(*bbolt.Tx) error) error {
	fn := func(tx *bbolt.Tx) error {
		if err := change(tx); err != nil {
			return err
		}
		return checkLengths(tx)
	}
	if t := tap.Load(); t != nil {
		return withErrno((*t).Update(db, fn))
	}
	return withErrno(db.Update(fn))
}

// withErrno returns err, which a transaction has ended with, so that it wraps
// the number of the operating system's error: bbolt passes on only the text of
// one that keeps a file from growing. What is not one of those for want of room
// is taken for an I/O error.
func withErrno(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	if !strings.HasPrefix(text, "file resize error: ") && !strings.HasPrefix(text, "file sync error: ") || errors.As(err, new(syscall.Errno)) {
		return err
	}
	errno := syscall.EIO
	for _, e := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT} {
		if strings.HasSuffix(text, e.Error()) {
			errno = e
		}
	}
	return &growError{err, errno}
}

// growError is an error of bbolt's with the number of its cause.
type growError struct {
	error
	errno syscall.Errno
}

func (e *growError) Unwrap() []error { return []error{e.error, e.errno} }

// do carries out a change that a Tap may see.
func do(op Op, name, newname string, change func() error) error {
	t := tap.Load()
	if t == nil {
		return change()
	}
	if err := (*t).Before(op, name); err != nil {
		return err
	}
	if err := change(); err != nil {
		return err
	}
	(*t).Done(op, name, newname)
	return nil
}

// Rename renames a file within its directory; durable only after SyncDir.
func Rename(oldname, newname string) error {
	return do(OpRename, oldname, newname, func() error { return os.Rename(oldname, newname) })
}

// Remove deletes a file or an empty directory; durable only after SyncDir.
func Remove(name string) error {
	return do(OpRemove, name, "", func() error { return os.Remove(name) })
}

// SyncDir makes creations, renames and removals in dir durable.
func SyncDir(dir string) error {
	return do(OpSyncDir, dir, "", func() error { return syncDir(dir) })
}

// SyncDB brings to disk what has been committed to a database whose
// transactions do not (bbolt's NoSync and NoGrowSync).
func SyncDB(db *bbolt.DB) error {
	return do(OpSync, db.Path(), "", db.Sync)
}

// Sync makes the contents and the length of an open file durable.
func Sync(f *os.File) error {
	return do(OpSync, f.Name(), "", func() error { return datasync(f) })
}
