package app

import "os"

// Windows has neither signal.
var (
	reopenSignals []os.Signal
	reloadSignals []os.Signal
)
