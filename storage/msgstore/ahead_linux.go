package msgstore

import (
	"os"

	"golang.org/x/sys/unix"
)

// readAhead asks for a part of f to be brought into memory, and does not wait.
func readAhead(f *os.File, from, n int64) {
	// Advice: what comes of it is of no consequence.
	_ = unix.Fadvise(int(f.Fd()), from, n, unix.FADV_WILLNEED)
}
