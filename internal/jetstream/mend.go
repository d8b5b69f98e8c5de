package jetstream

import (
	"errors"
	"os"
	"slices"
	"time"

	"petiole/storage"
	"petiole/storage/msgstore"
)

// mendMax is up to what size, in octets, a file is repaired while its stream goes
// on serving: no checkpoint of it is possible meanwhile, so that the log, which
// all streams share, keeps what it takes. With a larger one the stream is taken
// down, and its records are parked.
const mendMax = 256 << 20

// mendServing begins to repair the file of a stream that goes on serving; false
// if it has to be taken down. The caller holds applyMu.
func (e *Engine) mendServing(s *Stream, f *fileStore, cause error) bool {
	if s.mending.Load() {
		return true // the same damage once more, or it will be met again
	}
	if !e.live || e.closing.Load() || e.o.salvage != nil || !f.isOpen() || errors.Is(cause, msgstore.ErrStale) {
		return false
	}
	if fi, err := os.Stat(e.storePath(s.group)); err != nil || fi.Size() > mendMax {
		return false
	}
	s.mending.Store(true)
	if e.spawn(func() {
		defer s.mending.Store(false)
		e.mendBeside(s, f, cause)
	}) {
		return true
	}
	s.mending.Store(false)
	return false
}

// mendBeside repairs the file of a stream that goes on serving; if that cannot be
// done the stream is taken down.
func (e *Engine) mendBeside(s *Stream, f *fileStore, cause error) {
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
		rep, err = t.Repair(e.ending, func(step func() error) error {
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
