package boltfile

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// dropCache drops the clean pages of a file from the page cache.
func dropCache(f *os.File) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var dropErr error
	err = rc.Control(func(fd uintptr) { dropErr = unix.Fadvise(int(fd), 0, 0, unix.FADV_DONTNEED) })
	if err == nil && !errors.Is(dropErr, unix.ENOSYS) {
		err = dropErr
	}
	if err != nil {
		return &os.PathError{Op: "fadvise", Path: f.Name(), Err: err}
	}
	return nil
}
