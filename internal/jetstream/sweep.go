package jetstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
)

// A stream that keeps messages by interest drops what no consumer needs any more.
// After one consumer is deleted that may be anything it holds, millions of
// messages, which have to be read to tell. So the deletion only begins a sweep;
// the stream is looked through by further records in the log, a slice by each, so
// that nobody waits for more than a slice where records of all streams are
// applied. How far it has come is part of the stream's state, and a restart goes
// on from there. A consumer that is created meanwhile keeps what it finds.

// keySweep is the key of a sweep that has not ended in a store's keyed state:
// uvarint next sequence to look at, uvarint last one.
const keySweep = "sweep"

const (
	// DefaultSweepSlice is the default of Options.SweepSlice.
	DefaultSweepSlice = 1024
	// sweepWait is how long the answer to a request waits for what follows from it
	// to be swept. A client waits for five seconds.
	sweepWait = 2 * time.Second
)

// sweep is where a sweep is; last is 0 if there is none.
type sweep struct {
	next, last uint64
	fresh      bool          // no checkpoint has it
	done       chan struct{} // closed when the sweeper ends; nil if there is none
}

func (w *sweep) set(next, last uint64) {
	if w.next != next || w.last != last {
		w.next, w.last, w.fresh = next, last, true
	}
}

func (w *sweep) restore(value []byte) error {
	next, n := binary.Uvarint(value)
	last, k := binary.Uvarint(value[max(n, 0):])
	if n <= 0 || k <= 0 {
		return fmt.Errorf("%w: how far messages have been looked through", command.ErrMalformed)
	}
	w.next, w.last = next, last
	return nil
}

func (w *sweep) changes(kvs []storage.KV) []storage.KV {
	if !w.fresh {
		return kvs
	}
	kv := storage.KV{Key: keySweep}
	if w.last != 0 {
		kv.Value = binary.AppendUvarint(binary.AppendUvarint(nil, w.next), w.last)
	}
	return append(kvs, kv)
}

// beginSweep has removed what the consumers that are left do not need. It is part
// of applying a record; the caller holds the lock.
func (s *Stream) beginSweep() error {
	st := s.store.State()
	switch {
	case s.m.Config().Retention != api.InterestPolicy:
		return nil
	case len(s.consumers) == 0: // all of it can go without a look
		s.sweep.set(0, 0)
		return s.m.Unwanted()
	case st.Msgs == 0:
		s.sweep.set(0, 0)
		return nil
	}
	s.sweep.set(st.First, st.Last)
	if s.live {
		s.startSweeper()
	}
	return nil
}

// sweepSlice looks at so many messages and removes those that nobody needs. It is
// part of applying a record; the caller holds the lock.
func (s *Stream) sweepSlice(n uint64) error {
	w := &s.sweep
	if w.last == 0 {
		return nil
	}
	if s.m.Config().Retention != api.InterestPolicy { // changed meanwhile
		w.set(0, 0)
		return nil
	}
	next := w.last + 1
	var seqs []uint64
	err := storage.RangeIntact(s.store, w.next, func(m storage.Message) bool {
		if m.Seq > w.last {
			return false
		}
		if n == 0 {
			next = m.Seq
			return false
		}
		n--
		if !s.needed(m.Seq, m.Subject) {
			seqs = append(seqs, m.Seq)
		}
		return true
	})
	if err != nil {
		return fmt.Errorf("looking for messages that no consumer needs: %w", err)
	}
	for _, seq := range seqs {
		if err := s.m.Acked(seq); err != nil {
			return err
		}
	}
	if next > w.last {
		w.set(0, 0)
	} else {
		w.set(next, w.last)
	}
	return nil
}

// needed reports whether a consumer needs a message. The caller holds the lock.
func (s *Stream) needed(seq uint64, subject string) bool {
	for _, c := range s.consumers {
		if c.m.NeedsAck(seq, subject) {
			return true
		}
	}
	return false
}

// startSweeper has a sweep go on. The caller holds the lock.
func (s *Stream) startSweeper() {
	if s.sweep.last == 0 || s.sweep.done != nil || s.stopped {
		return
	}
	done := make(chan struct{})
	if s.e.spawn(func() { s.sweeper(done) }) {
		s.sweep.done = done
	}
}

// sweeper proposes one slice after the other.
func (s *Stream) sweeper(done chan struct{}) {
	defer close(done)
	for {
		s.mu.Lock()
		from := s.sweep.next
		if s.sweep.last == 0 || s.stopped || s.gone {
			s.sweep.done = nil
			s.mu.Unlock()
			return
		}
		n := s.sweepStep()
		s.mu.Unlock()
		// What the slice reads is in memory when it is applied.
		left := n
		_ = storage.RangeIntact(s.store, from, func(storage.Message) bool { left--; return left > 0 }) // it is met again there
		r, err := s.propose((&command.Sweep{Max: n}).AppendTo(nil))
		if err == nil && r.err != nil {
			err = r.err
		}
		if err == nil {
			continue
		}
		if !errors.Is(err, api.ErrInsufficientResources) { // it is closing, has failed or is gone
			s.mu.Lock()
			s.sweep.done = nil
			s.mu.Unlock()
			return
		}
		select {
		case <-time.After(spaceRetry):
		case <-s.e.done:
		}
	}
}

// sweepStep returns how many messages the next slice looks at: fewer if there are
// many consumers to ask about each. The caller holds the lock.
func (s *Stream) sweepStep() uint64 {
	return uint64(max(s.e.o.SweepSlice/(1+len(s.consumers)/16), 1))
}

// awaitSweep waits until what a request has begun is done, or for so long that the
// client would wonder.
func (s *Stream) awaitSweep() {
	s.mu.Lock()
	done := s.sweep.done
	s.mu.Unlock()
	if done == nil {
		return
	}
	timer := time.NewTimer(sweepWait)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}
