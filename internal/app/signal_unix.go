//go:build !windows

package app

import (
	"os"
	"syscall"
)

// Signals beyond those that stop the program.
var (
	reopenSignals  = []os.Signal{syscall.SIGUSR1}
	reloadSignals  = []os.Signal{syscall.SIGHUP}
	ignoredSignals = []os.Signal{syscall.SIGXFSZ}
)
