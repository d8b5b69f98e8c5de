package jetstream

import (
	"fmt"
	"slices"
	"sync"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
)

type pendingIngest struct {
	lsn  storage.LSN
	done func()
}

// Ingest appends what an edge exported. It hands the batch in (call
// [Engine.Kick] after the last one at hand) and returns; done is called when
// the batch is durable and applied, or was refused (command.ErrStaleIncarnation,
// ErrOutOfOrder, ErrDiverged, stream.ErrFull), with the position then held. Calls
// of done are in the order of Ingest; done must not block or call the stream.
// The batch may be reused when Ingest has returned.
func (s *Stream) Ingest(in *command.Ingest, done func(command.Position, error)) {
	finish := func(r callResult) {
		var pos command.Position
		if r.Position != nil {
			pos = *r.Position
		}
		err := r.Err
		if r.err != nil {
			err = r.err
		}
		if s.e.o.SyncInterval <= 0 || s.memory || r.stream == nil {
			done(pos, err)
			return
		}
		to := r.stream // s, or what it was made anew as
		to.durMu.Lock()
		to.ingests = append(to.ingests, pendingIngest{lsn: r.lsn, done: func() { done(pos, err) }})
		to.durMu.Unlock()
	}
	if refused := s.e.room(s, 0); refused != nil {
		done(command.Position{}, refused)
		return
	}
	if !s.memory {
		s.e.pass(s)
		s.warm()
	}
	if splitPosition(s, in, finish) {
		return
	}
	buf := ingestPool.Get().(*[]byte)
	defer ingestPool.Put(buf)
	*buf = in.AppendTo((*buf)[:0])
	if s.memory {
		r, err := s.propose(slices.Clone(*buf))
		if err != nil {
			done(command.Position{}, err)
			return
		}
		finish(r)
		return
	}
	if err := s.e.prop.Propose(s.group, &call{fn: finish}, *buf); noSpace(err) {
		done(command.Position{}, fmt.Errorf("%w: %w", api.ErrInsufficientResources, err))
	} else if err != nil {
		done(command.Position{}, fmt.Errorf("stream %q: %w", s.name, err))
	}
}

var ingestPool = sync.Pool{New: func() any { return new([]byte) }}

// Position returns how far the stream has what an edge's stream holds. With
// Options.SyncInterval set it may be ahead of the disk.
func (s *Stream) Position(edge string, uid [16]byte) (command.Position, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.m.Position(edge, uid)
	if !ok {
		return command.Position{}, false
	}
	return *p, true
}

// DurablePosition is [Stream.Position], returned when a power cut cannot take
// it any more.
func (s *Stream) DurablePosition(edge string, uid [16]byte) (command.Position, bool, error) {
	p, ok := s.Position(edge, uid)
	if err := s.Sync(); err != nil {
		return command.Position{}, false, err
	}
	return p, ok, nil
}

// Positions returns how far the stream has what edges export, by edge and
// stream ("edge/uid in hex").
func (s *Stream) Positions() map[string]command.Position {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := map[string]command.Position{}
	s.m.Positions(func(edge string, uid [16]byte, p *command.Position) {
		list[edge+"/"+fmt.Sprintf("%x", uid)] = *p
	})
	return list
}
