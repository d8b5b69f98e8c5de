package jetstream

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/wal"
)

// What the log has lost, and what follows for the streams. A message that was
// acknowledged had a sequence, which must not be given to another one:
//
//	log     1 2 3 ░ ░ ░ 7 8     ░: lost, whose is not known
//	stream  1 2 3       7 8     leaves out 3 sequences: the record of 7 says which it is
//	log     1 2 3 ░ ░ ░ S 8     S: Skip, at the end of the recovery that met it
//
// Each record carries its stream's last sequence (see [wal.Log.SetLast]), and
// where none follows, the next note of the log tells (see [wal.Note]). Only a
// stream of which neither tells leaves out as many as may have been lost.
//
// Each recovery finds the same damage again, for as long as the log has it, and
// might know more or less about it than the one before (how many records were
// lost, say). So the first one settles it: before anything else is taken, each
// stream that may be concerned gets a [command.Skip] into the log, which says
// where it goes on. Whoever replays that later leaves out what it says and
// nothing else. Up to then the stream takes no messages.

// miss takes note of records that the log has lost, of which some may have been
// the stream's. The caller holds the lock.
func (s *Stream) miss(l *wal.Lost) {
	if s.memory || l.Last <= s.applied || l.Group != 0 && l.Group != s.group {
		return
	}
	s.unsettled.Store(true)
	from := max(l.First, s.applied+1)
	if !s.missed {
		s.missed, s.missedFrom = true, from
	}
	if l.Group != 0 && l.LastSeq != 0 {
		s.skip = s.behind(l.LastSeq)
	} else {
		more := mayHaveHad(l, s.m.Config())
		if rec, ok := s.e.book.record(uint64(s.group)); ok { // what the configuration became later
			more = max(more, mayHaveHad(l, &rec.Config))
		}
		s.skip += more
	}
	if s.dirtyFrom == 0 {
		s.dirtyFrom = from
	}
}

// maxIngestMsgs is how many messages one Ingest has at most: what edges send at
// once is 64 KiB.
const maxIngestMsgs = 1 << 16

// mayHaveHad returns how many sequences of a stream the records lost may have
// had.
func mayHaveHad(l *wal.Lost, cfg *api.StreamConfig) uint64 {
	if l.Uncertain {
		return 0 // there may have been none, and at most as many as fit into a segment
	}
	n := uint64(l.Last - l.First + 1)
	switch kind := command.Kind(l.Kind); {
	case kind == command.KindPublish:
		return n
	case kind == command.KindBatch:
		return n * maxBatchMsgs
	case kind == command.KindIngest:
		return n * maxIngestMsgs
	case kind != command.KindInvalid:
		return 0
	case cfg.Metadata[MetaIngest] == "true":
		return n * maxIngestMsgs
	case cfg.AllowAtomicPublish:
		return n * maxBatchMsgs
	}
	return n
}

// givesSequences reports whether a record may store messages.
func givesSequences(k command.Kind) bool {
	return k == command.KindPublish || k == command.KindBatch || k == command.KindIngest
}

// behind returns by how many sequences the stream is behind the one that a record
// of the log has in its header, of which it is the lower half.
func (s *Stream) behind(last uint32) uint64 {
	return uint64(max(0, int32(last-uint32(s.store.State().Last))))
}

// replay applies a record of the log after those that may be lost before it. What
// they had the record itself tells, if it was appended when that was known; else
// it may have been as much as they have room for. The caller holds the lock.
func (s *Stream) replay(r *wal.Record) error {
	kind := command.KindOf(r.Data)
	if s.missed && kind != command.KindSkip && (r.Last != 0 || givesSequences(kind)) {
		if r.Last != 0 {
			s.skip = s.behind(r.Last - uint32(command.Messages(r.Data)))
		}
		if s.missed = false; s.skip > 0 {
			if err := s.skipLost(); err != nil {
				return err
			}
		}
	}
	return s.apply(r)
}

// heed takes what a note of the log says of records that may have been lost before
// it. A record that follows may know more. The caller holds the lock.
func (s *Stream) heed(n *wal.Note) {
	if !s.missed {
		return
	}
	if last, ok := n.Last(s.group); ok {
		s.skip = s.behind(last)
	} else if s.missedFrom >= n.Quiet {
		s.skip = 0 // no record of the stream can have been among them
	}
}

// noteOf takes what a note of the log says of all streams.
func (e *Engine) noteOf(n *wal.Note) error {
	if len(e.lost) == 0 {
		return nil
	}
	for _, s := range e.groups {
		s.mu.Lock()
		s.heed(n)
		s.mu.Unlock()
	}
	return nil
}

// skipLost leaves out as many sequences as lost records may have had. The caller
// holds the lock.
func (s *Stream) skipLost() error {
	last := s.store.State().Last
	span := storage.Span{First: last + 1, Last: last + s.skip}
	s.skip = 0
	if err := s.store.Skip(span.Last); err != nil {
		return fmt.Errorf("stream %q: %w", s.name, err)
	}
	s.leftOut(span, time.Now())
	return nil
}

// leftOut says that sequences have been left out. The caller holds the lock.
func (s *Stream) leftOut(span storage.Span, found time.Time) {
	s.addLost(span, found)
	s.e.damage.LostMsgs.Add(span.Len())
	s.e.log.Error("messages of a stream may have been in records that the log has lost; their sequences are left out",
		"stream", s.name, "first", span.First, "last", span.Last)
}

// settlement returns the record that settles what the log has lost, nil if
// there is nothing to settle.
func (s *Stream) settlement() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.unsettled.Load() {
		return nil
	}
	return (&command.Skip{To: s.store.State().Last + s.skip, Time: time.Now().UnixNano()}).AppendTo(nil)
}

// concerns returns from where on no checkpoint has what records that are lost may
// have done to some stream; 0 if all have it.
func (e *Engine) concerns(l *wal.Lost) storage.LSN {
	if len(e.downs) > 0 {
		return l.First
	}
	from := storage.LSN(0)
	for _, s := range e.groups {
		if !s.memory && l.Last > s.applied {
			from = earlier(from, max(l.First, s.applied+1))
		}
	}
	return from
}

// lostRecords takes note of records that the log cannot give back.
func (e *Engine) lostRecords(l wal.Lost) error {
	if l.Before {
		from := e.concerns(&l)
		if from == 0 {
			return nil // an earlier start has settled it, or all was checkpointed
		}
		l.First = from
		e.log.Error("records of the log may be lost, before the oldest that it has", "first_lsn", l.First, "last_lsn", l.Last,
			"file", l.File, "reason", l.Reason)
	}
	e.damage.LostRecords.Add(uint64(l.Last - l.First + 1)) // the log has told of it
	if l.Group == storage.MetaGroup || l.Group == 0 {
		e.metaLost = true
	}
	if l.Group == storage.MetaGroup {
		return nil
	}
	if n := len(e.lost); n > 0 && e.lost[n-1].Last+1 == l.First && e.lost[n-1].Group == l.Group && e.lost[n-1].Kind == l.Kind && !l.Uncertain && !e.lost[n-1].Uncertain {
		e.lost[n-1].Last = l.Last
	} else {
		e.lost = append(e.lost, l)
	}
	miss := func(s *Stream) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.miss(&l)
	}
	if l.Group != 0 {
		if s := e.groups[l.Group]; s != nil {
			miss(s)
		}
		if d := e.downs[l.Group]; d != nil {
			d.hold(l.First)
		}
		return nil
	}
	for _, s := range e.groups {
		miss(s)
	}
	for _, d := range e.downs {
		d.hold(l.First)
	}
	return nil
}

// settleLost settles what the log has lost, before anything is taken. What finds
// no room in the log is settled later.
func (e *Engine) settleLost() error {
	proposed := false
	e.tellMissed()
	for _, s := range *e.streams.Load() {
		rec := s.settlement()
		if rec == nil {
			continue
		}
		err := e.prop.ProposeUrgent(s.group, nil, rec)
		if noSpace(err) {
			e.log.Error("there is no room in the log to settle what it has lost: a stream takes no messages until there is", "stream", s.name, "err", err)
			e.space.unsettled.Store(true)
			e.trySpace()
			continue
		}
		if err != nil {
			return fmt.Errorf("settling what the log has lost: stream %q: %w", s.name, err)
		}
		proposed = true
	}
	if !proposed {
		return nil
	}
	return e.wal.Commit() // and applied
}

// maxNames bounds the streams that one line of the log names.
const maxNames = 100

// tellMissed says of which streams records may be lost: not only messages, but
// also what was removed and acknowledged, and consumers.
func (e *Engine) tellMissed() {
	var names []string
	for name, s := range *e.streams.Load() {
		if s.unsettled.Load() {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return
	}
	slices.Sort(names)
	e.log.Error("records that the log has lost may have been of these streams: messages may be missing, messages that were removed be back, "+
		"consumers be missing or deliver again what was acknowledged",
		"count", len(names), "streams", names[:min(len(names), maxNames)])
}

// settleLater tries again what found no room in the log.
func (e *Engine) settleLater() {
	if !e.space.unsettled.Swap(false) {
		return
	}
	for _, s := range *e.streams.Load() {
		rec := s.settlement()
		if rec == nil {
			continue
		}
		if _, err := s.propose(rec); err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, storage.ErrFailed) {
			e.space.unsettled.Store(true)
			e.trySpace()
		}
	}
}

// settleDown settles what the log has lost for a stream made anew that does not
// serve yet: the record is with those committed since it went down.
func (e *Engine) settleDown(s *Stream) error {
	rec := s.settlement()
	if rec == nil {
		return nil
	}
	_, err := e.propose(s.group, rec) // refused, as the stream does not serve, and kept
	if errors.Is(err, api.ErrInsufficientResources) {
		return fmt.Errorf("settling what the log has lost: %w: %w", wal.ErrNoSpace, err)
	}
	return err
}

// scanGroup calls fn for a stream's records in the log from one position through
// another, lost, if records before may be missing, and note, if there are notes.
func (e *Engine) scanGroup(g storage.GroupID, from, upTo storage.LSN, lost func(*wal.Lost), fn func(*wal.Record) error, note func(*wal.Note)) error {
	missing := e.lost
	miss := func(upTo storage.LSN) {
		for len(missing) > 0 && missing[0].First <= upTo {
			if l := &missing[0]; l.Last >= from && (l.Group == 0 || l.Group == g) {
				lost(l)
			}
			missing = missing[1:]
		}
	}
	e.trimMu.Lock()
	defer e.trimMu.Unlock()
	var failed error
	info, err := wal.ScanNotes(filepath.Join(e.o.Dir, "wal"), func(r wal.Record) error {
		if r.LSN > upTo {
			return errScanned
		}
		if r.Group == g && r.LSN >= from {
			miss(r.LSN)
			if failed = fn(&r); failed != nil {
				return errScanned
			}
		}
		return nil
	}, func(n *wal.Note) error {
		if n.Next > upTo+1 {
			return errScanned
		}
		if n.Next > from {
			miss(n.Next - 1)
			note(n)
		}
		return nil
	})
	if failed != nil {
		return failed
	}
	if err != nil && err != errScanned {
		return fmt.Errorf("reading the log: %w", err)
	}
	miss(upTo)
	if info != nil && len(info.Damage) > 0 {
		e.log.Error("the log is damaged where the records of one stream are read", "group", g, "err", errors.Join(info.Damage...))
	}
	return nil
}

var errScanned = errors.New("scanned")

// parkOrphans puts records aside that belong to no stream known, where the
// record that created the stream may be among those lost.
func (e *Engine) parkOrphans(upTo storage.LSN) error {
	for g, from := range e.orphans {
		if e.groups[g] != nil || e.downs[g] != nil {
			continue
		}
		p := e.newParker(filepath.Join(e.o.Dir, "parked", groupDir(g)))
		if err := e.scanGroup(g, from, upTo, func(*wal.Lost) {}, p.add, func(*wal.Note) {}); err != nil {
			return err
		}
		if err := p.finish(); err != nil {
			return err
		}
		if p.added == 0 {
			continue // an earlier start has put them aside
		}
		e.damage.Parked.Add(1)
		e.log.Error("records of the log belong to a stream that nothing tells of; they have been put aside", "directory", p.dir, "records", p.added)
	}
	e.orphans = nil
	return nil
}
