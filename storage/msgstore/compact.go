package msgstore

import (
	"context"
	"errors"
	"time"
)

// ErrPostponed says that a compaction has not been begun, for the reason that
// it is wrapped with: too little room on the file system, mostly. It is worth
// trying again later.
var ErrPostponed = errors.New("compaction postponed")

// CompactOptions tune Compact. The zero value is ready for use.
type CompactOptions struct {
	// SliceBytes is how many octets are copied, and brought to disk, at once
	// (default 1 MiB).
	SliceBytes int64
	// BytesPerSecond limits how fast is copied (default 16 MiB; negative: as
	// fast as possible).
	BytesPerSecond int64
	// Free returns how much room the file system of a directory has, in octets
	// (default: what the system says).
	Free func(dir string) (int64, error)
}

// CompactReport says what a compaction did.
type CompactReport struct {
	Before, After int64 // length of the file in octets
	Copied        int64 // octets of values
	Slices        int
	Messages      uint64
	Duration      time.Duration
	// Blocked is how long a checkpoint could not have run, at the end.
	Blocked time.Duration
}

// Waste is how much of a store's file holds nothing. Sizes are in octets.
type Waste struct {
	File int64 // length of the file
	Used int64 // pages in use
	Live int64 // of the messages, as limits count them
	Free int64 // pages free for reuse, and what lies behind the last page used
	// Worth says that compacting gives back at least a quarter of a file of
	// some size.
	Worth bool
}

// Waste says, without reading messages, whether Compact is worth it.
func (s *Store) Waste() (Waste, error) {
	return Waste{}, errors.ErrUnsupported
}

// Compact makes the file smaller: it copies what lives into a new one, beside
// readers, the writer and checkpoints, which wait for the last part only. It
// returns ErrPostponed if there is too little room for both, and ctx's error
// if that ends; the file is as it was then, as it is after any other error.
// Only one runs at a time for a store.
func (s *Store) Compact(ctx context.Context, o CompactOptions) (CompactReport, error) {
	return CompactReport{}, errors.ErrUnsupported
}
