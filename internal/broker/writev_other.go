//go:build unix && !darwin && !linux && !openbsd

package broker

import "syscall"

// writePieces writes the first piece of segs to fd.
func writePieces(fd int, segs []seg) (int, error) { return syscall.Write(fd, segs[0].b) }
