//go:build !linux

package app

import "time"

// sinceProcessStart returns the time since the fallback: the moment before
// anything was opened.
func sinceProcessStart(fallback time.Time) time.Duration { return time.Since(fallback) }
