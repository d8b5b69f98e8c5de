// Package vfs is the file system as Petiole's log sees it: the few calls whose
// failure modes matter for durability, behind an interface so that tests can
// put a simulated disk with power cuts and byte-level faults under the same code.
package vfs

import (
	"errors"
	"io"
	"io/fs"
	"strconv"
	"syscall"
	"time"
)

// FS is a file system. Names are slash-separated operating system paths.
// Errors are *fs.PathError values that name the operation and the path.
type FS interface {
	// Open opens name for reading and writing; with create it is created
	// (mode 0o600) if it does not exist. Creation is durable only after
	// SyncDir of the directory.
	Open(name string, create bool) (File, error)
	// Remove deletes a file; durable only after SyncDir.
	Remove(name string) error
	// Rename replaces newname; durable only after SyncDir.
	Rename(oldname, newname string) error
	// MkdirAll creates dir (mode 0o700) and its parents and syncs each parent.
	MkdirAll(dir string) error
	// List returns the names in dir, sorted.
	List(dir string) ([]string, error)
	// Stat describes name.
	Stat(name string) (fs.FileInfo, error)
	// SyncDir makes creations, renames and removals in dir durable.
	SyncDir(dir string) error
	// Free returns how many bytes this process may still write to the file
	// system that holds dir.
	Free(dir string) (int64, error)
	// Lock takes an exclusive advisory lock on name (created if need be) that
	// ends with the process; it fails at once if another process holds it.
	Lock(name string) (io.Closer, error)
}

// File is an open file.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Size returns the length in bytes.
	Size() (int64, error)
	// Truncate sets the length.
	Truncate(size int64) error
	// Sync is fsync: contents and all metadata.
	Sync() error
	// Datasync is fdatasync: contents and the length.
	Datasync() error
	// Preallocate reserves space for [0, size) so that later writes there
	// neither fail for want of space nor change metadata; the length becomes
	// at least size. Where the file system cannot reserve space, zeros are
	// written instead. If there is no room (IsNoSpace) the length may have
	// changed.
	Preallocate(size int64) error
}

// FreeName returns base followed by the time in Unix seconds, or a later one, so
// that it is the name of no file yet: what has been set aside before is not
// replaced.
func FreeName(f FS, base string) (string, error) {
	for at := time.Now().Unix(); ; at++ {
		name := base + strconv.FormatInt(at, 10)
		if _, err := f.Stat(name); errors.Is(err, fs.ErrNotExist) {
			return name, nil
		} else if err != nil {
			return "", err
		}
	}
}

// IsNoSpace reports whether err says that the file system, or the user's quota
// on it, has no room left.
func IsNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || isNoSpace(err)
}

// IsNoFiles reports whether err says that this process, or the system, has as many
// files open as it may.
func IsNoFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// IsMedium reports whether a read failed because the medium does not give back
// what was written there; other places may still be readable.
func IsMedium(err error) bool {
	return errors.Is(err, syscall.EIO) || errors.Is(err, syscall.EBADMSG) || isMedium(err)
}
