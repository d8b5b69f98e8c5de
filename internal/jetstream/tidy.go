package jetstream

import (
	"context"
	"errors"
	"time"

	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/vfs"
)

// What is done to streams' files in the background: those that hold little for
// their size are made smaller, one at a time, and all are read through now and
// then, so that damage is found while what it was can still be had elsewhere.
// With large files that takes hours, for which the others need not wait.

const (
	// tidyEvery is how often it is looked for files worth compacting, and
	// tidyAgain how long one waits that has been postponed.
	tidyEvery = 5 * time.Second
	tidyAgain = time.Minute
	// scrubFirst is how long after the start the first scrub begins, and
	// scrubEvery how long after the end of one the next. scrubRate is how many
	// octets it reads in a second.
	scrubFirst = time.Hour
	scrubEvery = 7 * 24 * time.Hour
	scrubRate  = 2 << 20
)

// tidyable is what a file can do that is to be looked after; a test's backing
// need not.
type tidyable interface {
	backing
	Waste() (msgstore.Waste, error)
	Compact(ctx context.Context, o msgstore.CompactOptions) (msgstore.CompactReport, error)
	Scrub(ctx context.Context, bytesPerSecond int, report func(error)) (msgstore.ScrubReport, error)
	Repair(ctx context.Context, alone func(step func() error) error) (msgstore.RepairReport, error)
}

var _ tidyable = (*msgstore.Store)(nil)

// peek runs fn on the file if it is open, which does not count as use.
func (f *fileStore) peek(fn func(tidyable) error) error {
	if f.refs.Add(1) <= 0 {
		f.refs.Add(-1)
		return nil
	}
	defer f.refs.Add(-1)
	t, ok := f.st.(tidyable)
	if !ok {
		return nil
	}
	return fn(t)
}

// tidier compacts files, until the engine ends.
func (e *Engine) tidier() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-e.done:
		case <-e.broken:
		case <-ctx.Done():
		}
		cancel()
	}()
	e.spawn(func() { e.scrubber(ctx) })
	later := map[*Stream]time.Time{} // those postponed
	looked := map[*Stream]storage.State{}
	timer := time.NewTimer(e.o.tidyEvery)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if err := e.tidyFiles(ctx, later, looked); err != nil {
			e.failBehind(err)
			return
		}
		timer.Reset(e.o.tidyEvery)
	}
}

// tidyFiles compacts the files that are worth it. looked has the states of
// those that were not when they were looked at last.
func (e *Engine) tidyFiles(ctx context.Context, later map[*Stream]time.Time, looked map[*Stream]storage.State) error {
	streams := *e.streams.Load()
	for s := range looked {
		if streams[s.name] != s {
			delete(looked, s)
			delete(later, s)
		}
	}
	for _, s := range streams {
		f, ok := s.store.(*fileStore)
		if !ok || !f.isOpen() || s.mending.Load() {
			continue
		}
		st := f.State()
		if looked[s] == st || time.Now().Before(later[s]) {
			continue
		}
		var waste msgstore.Waste
		look := func() error {
			return f.peek(func(t tidyable) (err error) {
				waste, err = t.Waste()
				return err
			})
		}
		err := look()
		if err == nil && waste.Worth {
			// What has been deleted is in the log only so far, perhaps.
			if err = s.checkpoint(); err == nil {
				err = look()
			}
		}
		switch {
		case err != nil:
		case !waste.Worth:
			s.postponed.Store(nil)
			looked[s] = st
			continue
		default:
			err = e.compactFile(ctx, s, f)
		}
		switch {
		case err == nil:
			s.postponed.Store(nil)
			delete(later, s)
		case ctx.Err() != nil && !errors.Is(err, storage.ErrFailed), errors.Is(err, storage.ErrClosed):
		case errors.Is(err, msgstore.ErrPostponed), vfs.IsNoSpace(err):
			if later[s].IsZero() {
				e.log.Warn("A stream's files cannot be made smaller yet.", "stream", s.name, "reason", err)
			}
			why := err.Error()
			s.postponed.Store(&why)
			later[s] = time.Now().Add(tidyAgain)
		case errors.Is(err, storage.ErrCorrupt), errors.Is(err, storage.ErrFailed):
			if err := e.settle(s, err); err != nil {
				return err
			}
		case (*e.streams.Load())[s.name] != s:
			// Deleted meanwhile, with its files.
		default:
			e.log.Warn("A stream's files cannot be made smaller.", "stream", s.name, "err", err)
			later[s] = time.Now().Add(tidyAgain)
		}
	}
	return nil
}

// CompactionPostponed returns why the stream's files cannot be made smaller,
// though they hold little for their size; "" if they are as small as need be.
func (s *Stream) CompactionPostponed() string {
	if why := s.postponed.Load(); why != nil {
		return *why
	}
	return ""
}

func (e *Engine) compactFile(ctx context.Context, s *Stream, f *fileStore) error {
	return f.peek(func(t tidyable) error {
		r, err := t.Compact(ctx, msgstore.CompactOptions{})
		if err != nil {
			return err
		}
		e.log.Info("A stream's files have been made smaller.", "stream", s.name,
			"bytes", r.After, "before", r.Before, "messages", r.Messages, "took", r.Duration.Round(time.Millisecond))
		return nil
	})
}

// scrubber reads all files through now and then, until ctx ends.
func (e *Engine) scrubber(ctx context.Context) {
	timer := time.NewTimer(e.o.scrubFirst)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		e.scrubFiles(ctx)
		timer.Reset(scrubEvery)
	}
}

// scrubFiles reads all files through.
func (e *Engine) scrubFiles(ctx context.Context) {
	for _, s := range *e.streams.Load() {
		f, ok := s.store.(*fileStore)
		if !ok || ctx.Err() != nil {
			continue
		}
		var found error
		n := 0
		err := f.with(func(st backing) error {
			t, ok := st.(tidyable)
			if !ok {
				return nil
			}
			_, err := t.Scrub(ctx, scrubRate, func(err error) {
				if n++; n <= 10 {
					e.log.Error("Damage has been found in a stream's files.", "stream", s.name, "err", err)
				}
				found = err
			})
			return err
		})
		if found != nil {
			// The repair keeps all that is intact, and names what is lost.
			e.noteDamage(f, found)
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, storage.ErrClosed) {
			e.log.Warn("A stream's files could not be read through.", "stream", s.name, "err", err)
		}
	}
}
