package wal

import (
	"fmt"
	"io"

	"petiole/storage"
)

// Lost is a run of records that the log cannot give back, because what the
// disk holds in their place is damaged or missing. They may have been
// acknowledged.
type Lost struct {
	First, Last storage.LSN
	// Uncertain: nothing tells how many records there were; Last is the highest
	// LSN that can have been given out.
	Uncertain bool
	// Before: it lies before the oldest record that the log has, so that it is of
	// no matter to whoever has been checkpointed since.
	Before bool
	// Group, Kind and LastSeq are known if only the data of a single record is
	// damaged: its group, the first byte of its data (0 if it has none), and what
	// Record.Last would be. Group is 0 if they are not known.
	Group   storage.GroupID
	Kind    byte
	LastSeq uint32
	// File and Offset say where, and Reason what was found there.
	File   string
	Offset int64
	Reason string
}

// Replay calls fn for every record from Oldest on, in order, until fn returns
// an error, which is returned as it is. It is called after Open and before the
// first Append. Record.Data is immutable and stays valid for as long as it is
// referenced; it shares memory with its neighbours, about 1 MiB. A record that
// cannot be read back is a *CorruptError; see ReplayLossy.
func (l *Log) Replay(fn func(Record) error) error {
	return l.replay(&replayer{fn: fn, lost: func(lost Lost) error {
		return &CorruptError{lost.File, lost.Offset, fmt.Sprintf("%s: records %d to %d are lost", lost.Reason, lost.First, lost.Last)}
	}})
}

// ReplayLossy is Replay that goes on behind damage: lost is called, in the order
// of the log, for every run of records that cannot be given back. Every LSN from
// Oldest to Durable is in exactly one call of either, after at most one of lost
// for what is missing before Oldest. An error of lost ends the replay like one of fn. What is lost is logged as an error, and counted in
// Stats.
//
// Damaged files from which records can still be read stay in the log until Trim
// has passed them, so that a start that is cut short repeats with the same
// result. They are then renamed to "<name>.damaged-<Unix seconds>" rather than
// reused, and never deleted.
func (l *Log) ReplayLossy(fn func(Record) error, lost func(Lost) error) error {
	return l.ReplayNotes(fn, lost, nil)
}

// ReplayNotes is ReplayLossy that also hands out the segments' notes, each between
// what is below its Next and what is not.
func (l *Log) ReplayNotes(fn func(Record) error, lost func(Lost) error, note func(*Note) error) error {
	l.lost.Store(0)
	return l.replay(&replayer{fn: fn, note: note, lost: func(x Lost) error {
		if !x.Uncertain {
			l.lost.Add(uint64(x.Last - x.First + 1))
		}
		if !x.Before {
			l.o.Log.Error("records of the log are lost", "first_lsn", x.First, "last_lsn", x.Last, "at_most", x.Uncertain,
				"group", x.Group, "file", x.File, "offset", x.Offset, "reason", x.Reason)
		}
		return lost(x)
	}})
}

func (l *Log) replay(r *replayer) error {
	l.mu.Lock()
	segs, gap := l.segs, l.nextGap
	l.mu.Unlock()
	for _, s := range segs {
		if s.gap != nil {
			if err := r.lost(*s.gap); err != nil {
				return err
			}
		}
		if err := l.replaySegment(s, r); err != nil {
			return err
		}
	}
	if gap != nil {
		return r.lost(*gap)
	}
	return nil
}

// replayer hands out records, and has room for them.
type replayer struct {
	fn   func(Record) error
	lost func(Lost) error
	note func(*Note) error // nil: not wanted
	recs []Record
	gone []Lost
}

// readNote returns a segment's note, if it is wanted and makes sense where the
// segment ends.
func (r *replayer) readNote(f io.ReaderAt, s *segment) (*Note, error) {
	if r.note == nil {
		return nil, nil
	}
	n, err := readNote(f, &s.hdr)
	if err != nil {
		return nil, fmt.Errorf("read the note of %s: %w", s.path, err)
	}
	if n != nil && n.Next > s.next {
		n = nil
	}
	return n, nil
}

func (l *Log) replaySegment(s *segment, r *replayer) (err error) {
	empty := s.end == segmentHeaderSize && s.next == s.hdr.first
	if empty && r.note == nil {
		return nil
	}
	f, err := l.o.FS.Open(s.path, false)
	if err != nil {
		return fmt.Errorf("replay log: %w", err)
	}
	defer f.Close() // was only read
	sc := newScanner(f, s.size, &s.hdr)
	sc.limit, sc.fresh = s.end, true
	lost := func(x Lost, pos int64) error {
		s.damaged = true
		x.File, x.Offset = s.path, pos
		return r.lost(x)
	}
	note, err := r.readNote(f, s)
	if err != nil {
		return fmt.Errorf("replay log: %w", err)
	}
	for {
		if note != nil && sc.next >= note.Next {
			if err := r.note(note); err != nil {
				return err
			}
			note = nil
		}
		if sc.next >= s.next {
			return nil
		}
		pos, next := sc.pos, sc.next
		h, payload, bad, err := sc.step()
		if err != nil {
			return fmt.Errorf("replay log: read %s: %w", s.path, err)
		}
		if bad == "" && h.kind == kindFooter {
			bad = "footer before the end of the batches"
		}
		if bad == "" {
			if err := r.batch(&h, payload, sc.seed, func(x Lost) error { return lost(x, pos) }); err != nil {
				return err
			}
			continue
		}
		found, err := sc.resync(pos)
		if err != nil {
			return fmt.Errorf("replay log: read %s: %w", s.path, err)
		}
		if !found || sc.next > s.next {
			sc.next = s.next
		}
		if note != nil && next < note.Next && note.Next < sc.next {
			if err := lost(Lost{First: next, Last: note.Next - 1, Reason: bad}, pos); err != nil {
				return err
			}
			if err := r.note(note); err != nil {
				return err
			}
			next, note = note.Next, nil
		}
		if sc.next > next {
			if err := lost(Lost{First: next, Last: sc.next - 1, Reason: bad}, pos); err != nil {
				return err
			}
		}
	}
}

// batch hands out the records of a batch.
func (r *replayer) batch(h *batchHeader, payload []byte, seed uint32, lost func(Lost) error) error {
	if h.kind != kindRecords {
		return nil
	}
	r.recs, r.gone = decodeRecords(r.recs[:0], r.gone[:0], payload, h, seed)
	gone := r.gone
	for i := range r.recs {
		for ; len(gone) > 0 && gone[0].First < r.recs[i].LSN; gone = gone[1:] {
			if err := lost(gone[0]); err != nil {
				return err
			}
		}
		if err := r.fn(r.recs[i]); err != nil {
			return err
		}
	}
	for _, x := range gone {
		if err := lost(x); err != nil {
			return err
		}
	}
	clear(r.recs)
	return nil
}

// SkipTo makes next, if it is higher than the LSN that would follow, the LSN of
// the next record. It is called after Replay and before the first append, if a
// checkpoint shows that the log had records which are lost, so that their LSNs
// are not given out again.
func (l *Log) SkipTo(next storage.LSN) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.usable(); err != nil {
		return err
	}
	if next <= l.next {
		return nil
	}
	if !l.pristine {
		return fmt.Errorf("wal: SkipTo after an append")
	}
	first := l.next
	if l.nextGap != nil {
		first = l.nextGap.First
	}
	l.nextGap = &Lost{First: first, Last: next - 1, Uncertain: true, File: l.active.path, Reason: "the log ends before what has been checkpointed"}
	l.active.full = true
	l.plan.restart(l.active)
	l.setRecovered(next)
	return nil
}
