//go:build unix

package app

import "syscall"

// openFiles returns how many files and connections the system lets this process
// have open.
var openFiles = func() int {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return 1 << 30
	}
	return int(min(lim.Cur, 1<<30))
}
