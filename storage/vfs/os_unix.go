//go:build unix

package vfs

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

var errNotDir error = unix.ENOTDIR

func syncDir(dir string) error {
	f, err := openFile(dir, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	err = f.Sync()
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// lockFile takes flock(2): it ends with the last descriptor, so a process that
// dies in any way gives it up.
func lockFile(f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			return ErrLocked
		default:
			return err
		}
	}
}

func freeSpace(dir string) (int64, error) {
	var st unix.Statfs_t
	for {
		err := unix.Statfs(dir, &st)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		// Below zero on systems where root may use more than there is.
		return max(int64(st.Bavail), 0) * int64(st.Bsize), err //nolint:unconvert // of 32 bits elsewhere
	}
}

// isNoSpace has nothing to add on unix.
func isNoSpace(error) bool { return false }

// isMedium has nothing to add on unix.
func isMedium(error) bool { return false }
