//go:build unix

package msgstore

import (
	"syscall"
	"time"
)

// cpuTime returns the processor time that the process has taken so far.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
