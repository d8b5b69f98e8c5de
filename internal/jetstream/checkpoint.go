package jetstream

import (
	"fmt"
	"maps"
	"slices"

	"petiole/internal/jetstream/consumer"
	"petiole/storage"
)

// changes collects the keyed state that changed since the last checkpoint. The
// caller holds the lock. undo takes back what taking snapshots marked as done.
func (s *Stream) changes() (kvs []storage.KV, undo func()) {
	kvs = s.sweep.changes(append(s.m.Changes(), s.lostChanges()...))
	var taken []*consumer.Machine
	for _, name := range slices.Sorted(maps.Keys(s.consumers)) {
		c := s.consumers[name].m
		if c.Durable() && c.Dirty() {
			kvs = append(kvs, storage.KV{Key: prefixConsumer + name, Value: c.Snapshot()})
			taken = append(taken, c)
		}
	}
	for name := range s.lost {
		if c, again := s.consumers[name]; !again || !c.m.Durable() {
			kvs = append(kvs, storage.KV{Key: prefixConsumer + name})
		}
	}
	return kvs, func() {
		for _, c := range taken {
			c.MarkDirty()
		}
	}
}

// checkpoint writes what was applied to the stream's store.
func (s *Stream) checkpoint() error {
	if s.memory {
		return nil
	}
	s.ckptMu.Lock()
	defer s.ckptMu.Unlock()
	s.mu.Lock()
	if s.gone || s.skip > 0 { // the next start would not know any more that there is something to settle
		s.mu.Unlock()
		return nil
	}
	if s.frozen == 0 && s.dirtyFrom != 0 {
		kvs, undo := s.changes()
		if s.store.Freeze(s.applied, kvs) {
			s.m.Saved()
			clear(s.lost)
			s.lostFresh, s.lostGone, s.sweep.fresh = false, nil, false
			s.frozen, s.dirtyFrom = s.dirtyFrom, 0
			s.frozenAt = s.applied
			s.frozenPos = positionsOf(kvs)
		} else {
			undo()
			s.mu.Unlock()
			if f, ok := s.store.(*fileStore); ok {
				// It was closed, as the stream was taken down, or cannot be opened.
				if _, err := f.acquire(); err != nil {
					return fmt.Errorf("checkpoint of stream %q: %w", s.name, err)
				}
				f.release()
			}
			return fmt.Errorf("checkpoint of stream %q: a set is frozen already", s.name)
		}
	}
	frozen, at, positions := s.frozen, s.frozenAt, s.frozenPos
	s.mu.Unlock()
	if frozen == 0 {
		return nil
	}
	// The store must not be ahead of the log: after a power cut the log would
	// give out the numbers of lost records again. No waiting for onCommit here:
	// deleting the stream waits there for ckptMu.
	if err := s.e.wal.SyncWritten(); err != nil {
		return err
	}
	if len(positions) > 0 {
		if err := s.e.copyPositions(s.group, at, s.store.Applied(), positions); err != nil {
			return fmt.Errorf("checkpoint of stream %q: %w", s.name, err)
		}
	}
	if err := s.store.Checkpoint(); err != nil {
		return fmt.Errorf("checkpoint of stream %q: %w", s.name, err)
	}
	s.mu.Lock()
	s.frozen, s.frozenPos = 0, nil
	s.measure()
	parked, lost := s.parked, s.parkedLost
	s.parked = false
	s.mu.Unlock()
	if parked {
		return s.e.loseParked(s, lost)
	}
	return nil
}

// holds returns the first record that the log has to keep for the stream; 0 if
// it needs none.
func (s *Stream) holds() storage.LSN {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.memory || s.gone:
		return 0
	case s.frozen != 0:
		return earlier(s.frozen, storage.LSN(s.keep.Load()))
	}
	return earlier(s.dirtyFrom, storage.LSN(s.keep.Load()))
}
