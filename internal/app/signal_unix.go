//go:build !windows

package app

import (
	"os"
	"syscall"
)

// Signals beyond those that stop the program.
var (
	reopenSignals   = []os.Signal{syscall.SIGUSR1}
	reloadSignals   = []os.Signal{syscall.SIGHUP}
	lameDuckSignals = []os.Signal{syscall.SIGUSR2}
	ignoredSignals  = []os.Signal{syscall.SIGXFSZ}
)

// signalNumbers are the commands of --signal.
var signalNumbers = map[string]syscall.Signal{
	"stop":   syscall.SIGKILL,
	"quit":   syscall.SIGINT,
	"term":   syscall.SIGTERM,
	"reopen": syscall.SIGUSR1,
	"ldm":    syscall.SIGUSR2,
	"reload": syscall.SIGHUP,
}

// kill sends a signal.
var kill = syscall.Kill
