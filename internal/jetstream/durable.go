package jetstream

import (
	"fmt"
	"maps"
	"slices"

	"petiole/storage"
)

// How what was applied becomes what a power cut cannot take. Without
// Options.SyncInterval the two are one.

type pendingState struct {
	lsn   storage.LSN
	state storage.State
}

// committed makes the state applied up to lsn the durable one, or remembers it
// until it is.
func (s *Stream) committed(lsn storage.LSN) {
	st := s.store.State()
	if s.e.o.SyncInterval <= 0 {
		s.durable.Store(&st)
		s.notify()
		return
	}
	s.durMu.Lock()
	s.pending = append(s.pending, pendingState{lsn: lsn, state: st})
	s.durMu.Unlock()
	s.e.durMu.Lock()
	s.e.awaitingSync[s] = struct{}{}
	s.e.durMu.Unlock()
	if d := s.e.wal.Durable(); d >= lsn {
		s.e.onDurable(d)
	}
}

// advance takes over what has become durable; it reports whether some has not.
func (s *Stream) advance(lsn storage.LSN) (more bool) {
	s.durMu.Lock()
	var grown bool
	for len(s.pending) > 0 && s.pending[0].lsn <= lsn {
		st := s.pending[0].state
		s.durable.Store(&st)
		s.pending = s.pending[1:]
		grown = true
	}
	for len(s.ingests) > 0 && s.ingests[0].lsn <= lsn {
		s.ingests[0].done()
		s.ingests = s.ingests[1:]
	}
	more = len(s.pending) > 0 || len(s.ingests) > 0
	s.durMu.Unlock()
	if grown {
		s.notify()
	}
	return more
}

func (s *Stream) notify() {
	s.watchMu.Lock()
	defer s.watchMu.Unlock()
	for _, fn := range s.watch {
		fn()
	}
}

// DurableState returns the summary of what a power cut cannot take.
func (s *Stream) DurableState() storage.State { return *s.durable.Load() }

// Watch calls fn, which must not block or call the stream, after the durable
// state grew, until cancel is called.
func (s *Stream) Watch(fn func()) (cancel func()) {
	s.watchMu.Lock()
	defer s.watchMu.Unlock()
	s.watchID++
	id := s.watchID
	s.watch[id] = fn
	return func() {
		s.watchMu.Lock()
		defer s.watchMu.Unlock()
		delete(s.watch, id)
	}
}

// Sync returns when everything applied so far is durable. That is at once
// unless Options.SyncInterval is set.
func (s *Stream) Sync() error {
	if s.memory {
		return nil
	}
	if err := s.e.wal.SyncWritten(); err != nil {
		return fmt.Errorf("stream %q: %w", s.name, err)
	}
	return nil
}

// onDurable tells streams that the log's durable end has moved.
func (e *Engine) onDurable(lsn storage.LSN) {
	if e.o.SyncInterval <= 0 {
		return // applied means durable
	}
	e.durMu.Lock()
	list := slices.Collect(maps.Keys(e.awaitingSync))
	clear(e.awaitingSync)
	e.durMu.Unlock()
	for _, s := range list {
		if s.advance(lsn) {
			e.durMu.Lock()
			e.awaitingSync[s] = struct{}{}
			e.durMu.Unlock()
		}
	}
}
