//go:build unix

package boltfile

import (
	"os"
	"syscall"
)

// unlock lets go of bbolt's lock on a file.
func unlock(f *os.File) {
	if c, err := f.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { _ = syscall.Flock(int(fd), syscall.LOCK_UN) })
	}
}
