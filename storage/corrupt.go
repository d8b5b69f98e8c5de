package storage

import (
	"errors"
	"fmt"
	"strings"
)

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

// Damaged returns the sequence of the message that err says is damaged; false
// if err says something else.
func Damaged(err error) (seq uint64, ok bool) {
	var ce *CorruptError
	if errors.As(err, &ce) && ce.Seq != 0 {
		return ce.Seq, true
	}
	return 0, false
}

// StructurePrefix is what the Reason of a CorruptError begins with that is about
// how the pages of a file hang together, not about one value.
const StructurePrefix = "the file's structure is damaged: "

// StructureDamage reports whether the Reason of a CorruptError is about how the
// pages of a file hang together.
func StructureDamage(reason string) bool { return strings.HasPrefix(reason, StructurePrefix) }

// RangeIntact is [Store.Range] that passes over damaged messages.
func RangeIntact(s interface {
	Range(seq uint64, fn func(Message) bool) error
}, seq uint64, fn func(Message) bool,
) error {
	for {
		err := s.Range(seq, fn)
		bad, ok := Damaged(err)
		if !ok || bad < seq {
			return err
		}
		seq = bad + 1
	}
}
