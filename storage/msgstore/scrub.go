package msgstore

import (
	"context"
	"errors"
)

// ScrubReport says what a scrub has read.
type ScrubReport struct {
	Bytes    int64  // read from the file
	Messages uint64 // with their checksums
	Damaged  uint64 // calls of report
}

// Scrub reads everything in the file, pages and values, and compares it with
// its checksums, at no more than bytesPerSecond (0: no limit). It calls report
// for each damage, which is a *storage.CorruptError or wraps one; those of
// messages have their sequence. It runs beside everything else and changes
// nothing; ctx ends it early, with ctx's error.
func (s *Store) Scrub(ctx context.Context, bytesPerSecond int, report func(error)) (ScrubReport, error) {
	return ScrubReport{}, errors.ErrUnsupported
}
