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
	storetest.Crashes(t, 60, func(dir string, oldest storage.LSN) (storage.Store, error) {
		return Open(dir, Options{WALOldest: oldest, Inherited: true, Log: slog.New(slog.DiscardHandler)})
	})
}
