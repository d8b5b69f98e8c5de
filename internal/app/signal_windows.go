package app

import (
	"errors"
	"os"
	"syscall"
)

// Windows has no signals for these.
var reopenSignals, reloadSignals, lameDuckSignals, ignoredSignals []os.Signal

// signalNumbers is empty, so that --signal is refused.
var signalNumbers map[string]syscall.Signal

var kill = func(int, syscall.Signal) error { return errors.ErrUnsupported }
