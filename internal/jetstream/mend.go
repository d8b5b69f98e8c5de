package jetstream

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"petiole/storage"
	"petiole/storage/msgstore"
)

// mendLong is from what size on, in octets, the repair of a file takes so long that
// nobody can wait for it. No checkpoint of its stream is possible meanwhile, so that
// the log, which all streams share, keeps what it takes, and memory as well. A repair
// of a smaller one the others wait for, if need be. A longer one ends when log or
// tables have half of what they may (see makeWay): then the stream is taken down, its
// records of the log are parked, and the repair begins anew.
const mendLong = 256 << 20

// mendServing begins to repair the file of a stream that goes on serving; false
// if it has to be taken down. The caller holds applyMu.
func (e *Engine) mendServing(s *Stream, f *fileStore, cause error) bool {
	if s.mending.Load() {
		return true // the same damage once more, or it will be met again
	}
	if !e.live || e.closing.Load() || e.o.salvage != nil || !f.isOpen() || errors.Is(cause, msgstore.ErrStale) {
		return false
	}
	ctx, cancel := context.WithCancel(e.ending)
	long, err := e.takesLong(s.group)
	if err != nil {
		cancel()
		return false
	}
	if long {
		s.yields.Store(&cancel)
	}
	s.mending.Store(true)
	if e.spawn(func() {
		defer e.wakeCheckpointer() // the log can do without more, and publishers may wait
		defer cancel()
		defer s.mending.Store(false)
		defer s.yields.Store(nil)
		e.mendBeside(ctx, s, f, cause)
	}) {
		return true
	}
	cancel()
	s.yields.Store(nil)
	s.mending.Store(false)
	return false
}

// takesLong reports whether the repair of a stream's file takes long.
func (e *Engine) takesLong(g storage.GroupID) (bool, error) {
	fi, err := os.Stat(e.storePath(g))
	return err == nil && fi.Size() >= e.o.mendLong, err
}

// yield ends a repair of the stream's file that takes long, if there is one.
func (s *Stream) yield() {
	if end := s.yields.Load(); end != nil {
		(*end)()
	}
}

// makeWay ends the repairs that take long if the log or the tables have half of what
// they may when everything else has been checkpointed, or that does not help.
func (e *Engine) makeWay() {
	if e.wal.Size() <= e.o.WALBudget/2 && e.tableBytes.Load() <= tableBurst*e.tableLimit.Load()/2 && !e.tableGate.shut.Load() {
		return
	}
	for _, s := range *e.streams.Load() {
		s.yield()
	}
}

// mendBeside repairs the file of a stream that goes on serving; if that cannot be
// done the stream is taken down.
func (e *Engine) mendBeside(ctx context.Context, s *Stream, f *fileStore, cause error) {
	since := time.Now()
	e.log.Error("a stream's files are damaged; they are repaired while it goes on", "stream", s.name, "directory", e.streamDir(s.group), "err", cause)
	// Until there is a checkpoint the log goes as far back as it does now: if the
	// process ends before, an older state of the file may be what is intact.
	e.trimMu.Lock()
	s.keep.Store(uint64(e.wal.Oldest()))
	e.trimMu.Unlock()
	defer s.keep.Store(0)
	var rep msgstore.RepairReport
	err := f.peek(func(t tidyable) (err error) {
		rep, err = t.Repair(ctx, func(step func() error) error {
			// Between two steps of the machine: what it has seen is there.
			s.mu.Lock()
			defer s.mu.Unlock()
			err := step()
			if err == nil && !s.gone {
				s.Purged()
				s.measure()
			}
			return err
		})
		return err
	})
	switch {
	case errors.Is(err, storage.ErrClosed) || e.closing.Load() || e.failed.Load():
		return
	case errors.Is(err, storage.ErrFailed):
		e.fail(err)
		return
	case err == nil && rep.File == "":
		return // it was closed; the damage is met again when it is opened
	case err != nil:
		e.log.Warn("a damaged file could not be repaired while its stream went on", "stream", s.name, "err", err)
		e.giveWay(s, cause)
		return
	}
	s.mu.Lock()
	for _, span := range rep.Lost {
		s.addLost(span, since)
	}
	if s.dirtyFrom == 0 { // all of the keyed state is to be written again
		s.dirtyFrom = s.applied + 1
	}
	s.m.Touch()
	for _, c := range s.consumers {
		c.m.MarkDirty()
	}
	s.mu.Unlock()
	e.report(&downStream{cause: cause, since: since, reports: []msgstore.RepairReport{rep}}, s)
	// The frozen set first, if there is one, and then what is above it.
	for range 2 {
		if err = s.checkpoint(); err != nil {
			break
		}
	}
	e.mu.Lock()
	e.suspects = slices.DeleteFunc(e.suspects, func(x suspect) bool { return x.store == f })
	e.mu.Unlock()
	if errors.Is(err, storage.ErrCorrupt) && !errors.Is(err, storage.ErrFailed) {
		e.giveWay(s, err)
	} else if err := e.settle(s, err); err != nil && !e.closing.Load() {
		e.fail(err)
	}
}

// giveWay takes a stream down whose file could not be repaired while it served.
func (e *Engine) giveWay(s *Stream, cause error) {
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	if e.groups[s.group] == s {
		e.takeDown(s, cause, nil)
	}
}
