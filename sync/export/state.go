package export

import (
	"encoding/binary"
	"errors"
	"fmt"

	"petiole/sync/frame"
)

// stateVersion is the first byte of an encoded State.
const stateVersion = 1

var errState = errors.New("export state cannot be read")

// Acknowledge records that the hub holds everything up to the rungs, which
// rise, and drops the oldest rungs beyond MaxLadder.
func (s *State) Acknowledge(rungs ...frame.Rung) {
	for _, r := range rungs {
		// A hub that went back to an older position has us send again:
		// what was above is overwritten.
		for n := len(s.Ladder); n > 0 && s.Ladder[n-1].Through >= r.Through; n-- {
			s.Ladder = s.Ladder[:n-1]
		}
		s.Ladder = append(s.Ladder, r)
	}
	if over := len(s.Ladder) - MaxLadder; over > 0 {
		s.Ladder = append(s.Ladder[:0], s.Ladder[over:]...)
	}
}

// clone returns a copy that shares nothing with s.
func (s *State) clone() State {
	c := *s
	c.Ladder = append([]frame.Rung(nil), s.Ladder...)
	return c
}

// Encode returns the state's form in a StateStore:
//
//	1 uid(16) incarnation base origin regressions flags(1: adopted)
//	  prior incarnation (uvarint each)
//	  prior, floor start, floor end: through(uvarint) chain(16) each
//	  rungs(uvarint) {through chain(16)}…
func (s *State) Encode() []byte {
	b := append([]byte{stateVersion}, s.UID[:]...)
	b = binary.AppendUvarint(b, s.Incarnation)
	b = binary.AppendUvarint(b, s.Base)
	b = binary.AppendUvarint(b, s.Origin)
	b = binary.AppendUvarint(b, s.Regressions)
	flags := uint64(0)
	if s.Adopted {
		flags = 1
	}
	b = binary.AppendUvarint(b, flags)
	b = binary.AppendUvarint(b, s.Prior.Incarnation)
	b = appendRung(b, s.Prior.Rung)
	b = appendRung(appendRung(b, s.Floor[0]), s.Floor[1])
	b = binary.AppendUvarint(b, uint64(len(s.Ladder)))
	for _, r := range s.Ladder {
		b = appendRung(b, r)
	}
	return b
}

func appendRung(b []byte, r frame.Rung) []byte {
	return append(binary.AppendUvarint(b, r.Through), r.Chain[:]...)
}

// DecodeState reads what Encode wrote.
func DecodeState(b []byte) (State, error) {
	if len(b) < 17 || b[0] != stateVersion {
		return State{}, fmt.Errorf("version or length: %w", errState)
	}
	s := State{UID: frame.UID(b[1:17])}
	b = b[17:]
	bad := false
	next := func() uint64 {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			bad, b = true, nil
			return 0
		}
		b = b[n:]
		return v
	}
	rung := func() frame.Rung {
		r := frame.Rung{Through: next()}
		if len(b) < len(r.Chain) {
			bad, b = true, nil
			return r
		}
		copy(r.Chain[:], b)
		b = b[len(r.Chain):]
		return r
	}
	s.Incarnation, s.Base, s.Origin, s.Regressions = next(), next(), next(), next()
	s.Adopted = next()&1 != 0
	s.Prior = Prior{Incarnation: next(), Rung: rung()}
	s.Floor = [2]frame.Rung{rung(), rung()}
	n := next()
	if n > MaxLadder {
		return State{}, fmt.Errorf("%d rungs: %w", n, errState)
	}
	var last uint64
	for ; n > 0 && !bad; n-- {
		r := rung()
		if r.Through <= last {
			bad = true
		}
		last = r.Through
		s.Ladder = append(s.Ladder, r)
	}
	if bad || len(b) != 0 {
		return State{}, fmt.Errorf("rungs: %w", errState)
	}
	return s, nil
}
