//go:build darwin || linux || openbsd

package broker

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// writePieces writes the first pieces of segs to fd, several with one system
// call: a large payload and the line before it are pieces of their own.
func writePieces(fd int, segs []seg) (int, error) {
	if len(segs) == 1 {
		return syscall.Write(fd, segs[0].b)
	}
	var vec [8][]byte // so many that Writev does not allocate
	k := 0
	for k < min(len(segs), len(vec)) {
		vec[k] = segs[k].b
		k++
	}
	return unix.Writev(fd, vec[:k])
}
