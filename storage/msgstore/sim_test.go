package msgstore

import (
	"log/slog"
	"testing"

	"petiole/storage"
	"petiole/storage/storetest"
)

// TestCrashes cuts the power within checkpoints, between them, and while a store
// is being made.
func TestCrashes(t *testing.T) {
	n := 0
	storetest.Crashes(t, 60, func(dir string, oldest storage.LSN) (storage.Store, error) {
		n++
		o := Options{WALOldest: oldest, Inherited: true, Log: slog.New(slog.DiscardHandler)}
		if n%3 > 0 {
			// Everything that can be is in transactions of its own.
			o.slice, o.lazy = 300, true
		}
		return Open(dir, o)
	})
}
