package app

import "os"

// Windows has none of these signals.
var (
	reopenSignals  []os.Signal
	reloadSignals  []os.Signal
	ignoredSignals []os.Signal
)
