package vfs

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"time"
)

// ErrLocked is wrapped by Lock's error if another process holds the lock.
var ErrLocked = errors.New("in use by another process")

// OS is the operating system's file system.
var OS FS = osFS{}

type osFS struct{}

// Open opens name read-write.
func (osFS) Open(name string, create bool) (File, error) {
	flag := os.O_RDWR
	if create {
		flag |= os.O_CREATE
	}
	f, err := openFile(name, flag, 0o600)
	if err != nil {
		return nil, err
	}
	return &osFile{f}, nil
}

const (
	// filesWait is how long an opening waits for others to close files if no more
	// may be open: whoever cannot open a file has to give up acknowledging.
	filesWait  = 10 * time.Second
	filesRetry = 5 * time.Millisecond
)

// openFile is os.OpenFile that waits for a while if too many files are open.
func openFile(name string, flag int, perm fs.FileMode) (*os.File, error) {
	for begun := time.Now(); ; time.Sleep(filesRetry) {
		f, err := os.OpenFile(name, flag, perm)
		if err == nil || !IsNoFiles(err) || time.Since(begun) >= filesWait {
			return f, err
		}
	}
}

func (osFS) Remove(name string) error { return os.Remove(name) }

// Rename reports a *fs.PathError about newname (os.Rename has a *LinkError).
func (osFS) Rename(oldname, newname string) error {
	err := os.Rename(oldname, newname)
	var le *os.LinkError
	if errors.As(err, &le) {
		return &fs.PathError{Op: "rename " + oldname + " to", Path: newname, Err: le.Err}
	}
	return err
}

// MkdirAll creates missing directories one by one and syncs the parent of each.
func (o osFS) MkdirAll(dir string) error {
	dir = filepath.Clean(dir)
	fi, err := os.Stat(dir)
	if err == nil {
		if !fi.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir, Err: errNotDir}
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := o.MkdirAll(parent); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return o.SyncDir(parent)
}

func (osFS) List(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	sort.Strings(names)
	return names, nil
}

func (osFS) Stat(name string) (fs.FileInfo, error) { return os.Stat(name) }

func (osFS) SyncDir(dir string) error { return syncDir(dir) }

func (osFS) Free(dir string) (int64, error) {
	n, err := freeSpace(dir)
	if err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return n, nil
}

func (osFS) Lock(name string) (io.Closer, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := lockFile(f); err != nil {
		f.Close()
		return nil, &fs.PathError{Op: "lock", Path: name, Err: err}
	}
	return f, nil
}

// osFile is an *os.File; its own methods report *fs.PathError throughout.
type osFile struct{ f *os.File }

func (f *osFile) ReadAt(p []byte, off int64) (int, error)  { return f.f.ReadAt(p, off) }
func (f *osFile) WriteAt(p []byte, off int64) (int, error) { return f.f.WriteAt(p, off) }
func (f *osFile) Close() error                             { return f.f.Close() }
func (f *osFile) Truncate(size int64) error                { return f.f.Truncate(size) }
func (f *osFile) Sync() error                              { return f.f.Sync() }

func (f *osFile) Size() (int64, error) {
	fi, err := f.f.Stat()
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}

func (f *osFile) Datasync() error {
	if err := datasync(f.f); err != nil {
		return pathError("fdatasync", f.f, err)
	}
	return nil
}

func (f *osFile) Preallocate(size int64) error {
	if err := preallocate(f.f, size); err != nil {
		return pathError("fallocate", f.f, err)
	}
	return nil
}

// pathError wraps err unless it is a *fs.PathError already.
func pathError(op string, f *os.File, err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return err
	}
	return &fs.PathError{Op: op, Path: f.Name(), Err: err}
}

// zeroFill makes the length at least size by writing zeros, where space cannot
// be reserved in another way.
func zeroFill(f *os.File, size int64) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	zeros := make([]byte, min(max(size-fi.Size(), 0), 1<<20))
	for at := fi.Size(); at < size; {
		n, err := f.WriteAt(zeros[:min(int64(len(zeros)), size-at)], at)
		if err != nil {
			return err
		}
		at += int64(n)
	}
	return nil
}
