package app

// openFiles returns how many files and connections the system lets this process
// have open; Windows has no limit that matters.
var openFiles = func() int { return 1 << 30 }
