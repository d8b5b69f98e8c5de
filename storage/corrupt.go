package storage

import "fmt"

// CorruptError says which stored message cannot be trusted, so that a reader
// can report it and go on with the next one. errors.Is(err, ErrCorrupt) holds.
type CorruptError struct {
	File   string // path of the damaged file
	Seq    uint64 // sequence of the message; 0 if the damage is not a message's
	Reason string // what was found
}

// Error names file, sequence and finding.
func (e *CorruptError) Error() string {
	if e.Seq == 0 {
		return fmt.Sprintf("%s: %s: %v", e.File, e.Reason, ErrCorrupt)
	}
	return fmt.Sprintf("%s: message %d: %s: %v", e.File, e.Seq, e.Reason, ErrCorrupt)
}

// Unwrap makes errors.Is(err, ErrCorrupt) hold.
func (e *CorruptError) Unwrap() error { return ErrCorrupt }
