package app

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// sinceProcessStart returns the time since the kernel created this process, or
// since the fallback if /proc does not tell.
func sinceProcessStart(fallback time.Time) time.Duration {
	since := time.Since(fallback)
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return since
	}
	// proc_pid_stat(5): the name in parentheses may hold blanks; the start
	// time is the 22nd field, in hundredths of a second since boot.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return since
	}
	ticks, err := strconv.ParseInt(string(fields[19]), 10, 64)
	if err != nil {
		return since
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return since
	}
	// The kernel cuts the start time down to a tick, so the result may be up
	// to 10 ms too long, never too short.
	return max(since, time.Duration(now.Nano())-time.Duration(ticks)*10*time.Millisecond)
}
