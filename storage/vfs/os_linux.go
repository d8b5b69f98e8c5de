package vfs

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// datasync is fdatasync(2), restarted when a signal interrupts it before it
// has begun. No other error is ever retried: after a failed sync the kernel may
// have dropped the dirty pages, and a second call would report success.
func datasync(f *os.File) error {
	err := control(f, func(fd int) error { return unix.Fdatasync(fd) })
	if retryFsync && err != nil {
		err = control(f, func(fd int) error { return unix.Fdatasync(fd) })
	}
	return err
}

// preallocate is fallocate(2) mode 0. Zeros are written on file systems that do
// not have it: running out of room must show now, not when a batch is written.
func preallocate(f *os.File, size int64) error {
	err := control(f, func(fd int) error { return unix.Fallocate(fd, 0, 0, size) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return zeroFill(f, size)
	}
	return err
}

// control runs fn on f's descriptor, which stays open meanwhile.
func control(f *os.File, fn func(fd int) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	err = rc.Control(func(fd uintptr) {
		for {
			if ferr = fn(int(fd)); ferr != unix.EINTR {
				return
			}
		}
	})
	if err != nil {
		return os.ErrClosed // the only reason; the error itself is internal to package os
	}
	return ferr
}
