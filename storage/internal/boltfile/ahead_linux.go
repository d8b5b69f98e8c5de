package boltfile

import (
	"os"

	"golang.org/x/sys/unix"
)

// willNeed asks the system to read that part of f soon, without waiting for it.
func willNeed(f *os.File, off, n int64) {
	if rc, err := f.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { _ = unix.Fadvise(int(fd), off, n, unix.FADV_WILLNEED) }) // a slow read is no error
	}
}
