package jetstream

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"petiole/storage/wal"
)

// gate is where publishers wait while too much of something has piled up.
type gate struct {
	shut atomic.Bool
	mu   sync.Mutex
	open chan struct{} // closed when the gate opens; nil while it is open
}

func (g *gate) set(shut bool) {
	if g.shut.Load() == shut {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if shut == g.shut.Load() {
		return
	}
	if shut {
		g.open = make(chan struct{})
	} else {
		close(g.open)
	}
	g.shut.Store(shut)
}

// await waits until the gate is open, or the engine does not serve any more.
func (e *Engine) await(g *gate) {
	if !g.shut.Load() {
		return
	}
	e.prop.Kick() // what this publisher has handed in before may be waited for
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	if open == nil {
		return
	}
	select {
	case <-open:
	case <-e.broken:
	case <-e.done:
	}
}

// pass is called before something is added to a stream. It waits while the log
// exceeds its budget, and while the tables of all streams do by far, unless it is
// not this stream's that is large: one busy stream does not hold up the others.
func (e *Engine) pass(s *Stream) {
	e.await(&e.logGate)
	if e.tableGate.shut.Load() && s.tableBytes.Load() > e.tableLimit.Load()/4/int64(len(*e.streams.Load())+1) {
		e.await(&e.tableGate)
	}
}

// tableBurst is how many times the tables' budget they may take before publishers
// wait for checkpoints. A small budget keeps memory small, and in use again before
// it is given back to the system, when checkpoints keep up; this is what there is
// room for when they do not for a while.
const tableBurst = 6

// regulate shuts and opens the gates, so that publishers cannot outrun the
// checkpoints.
func (e *Engine) regulate() {
	limit, burst := e.o.TableBudget, tableBurst*e.o.TableBudget
	if free, err := e.o.FS.Free(e.o.Dir); err == nil {
		// What cannot be checkpointed any more holds back the log, and there is
		// no way out but by a purge: on a small disk, or one that is filling up,
		// that is to be little.
		limit = min(limit, max(free/tablePart, minBallast))
		burst = min(burst, max(free/burstPart, 2*minBallast))
		if free < lowWater && !e.space.full.Load() {
			e.low()
		}
	}
	e.tableLimit.Store(limit)
	e.logGate.set(e.wal.Size() > e.o.WALBudget)
	e.tableGate.set(e.tableBytes.Load() > burst)
}

// Which part of what is free on the file system all tables together take at
// most before they are checkpointed, from 1 MiB on, and in a burst, from 2 MiB on.
const (
	tablePart = 8
	burstPart = 4
)

func (e *Engine) openGates() {
	e.logGate.set(false)
	e.tableGate.set(false)
}

// checkEvery is how many octets are applied between two looks at the budgets.
func (e *Engine) checkEvery() int64 { return min(1<<20, e.o.WALBudget/64, e.o.TableBudget/16) }

// measure takes over the size of the stream's table into the engine's total. The
// caller holds the lock.
func (s *Stream) measure() {
	if s.memory || s.uncounted {
		return
	}
	n := s.store.TableBytes()
	s.e.tableBytes.Add(n - s.tableBytes.Swap(n))
}

// uncount takes a stream that is gone out of the engine's total.
func (s *Stream) uncount() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.uncounted = true
	s.e.tableBytes.Add(-s.tableBytes.Swap(0))
}

// largest returns the streams with the largest tables, so many of them that the
// others' take no more than half of the budget; none if all are within it. Those whose
// files are being repaired for long cannot be checkpointed, and do not count: the
// others are not to be checkpointed again and again for them.
func (e *Engine) largest() []*Stream {
	total, budget := e.tableBytes.Load(), e.tableLimit.Load()
	if total <= budget {
		return nil
	}
	type sized struct {
		s *Stream
		n int64
	}
	var all []sized
	for _, s := range *e.streams.Load() {
		switch n := s.tableBytes.Load(); {
		case s.yields.Load() != nil:
			total -= n
		case n > 0:
			all = append(all, sized{s, n})
		}
	}
	if total <= budget {
		return nil
	}
	slices.SortFunc(all, func(a, b sized) int { return cmp.Compare(b.n, a.n) })
	var list []*Stream
	for _, x := range all {
		if total <= budget/2 {
			break
		}
		total -= x.n
		list = append(list, x.s)
	}
	return list
}

// boundReplay makes checkpoints before a record is replayed, if the tables have
// grown as large as they may be while publishing, so that a start takes no more
// memory, however long the log is. The log is not trimmed: streams that have had
// nothing of it yet do not know that they hold it. The caller holds applyMu.
func (e *Engine) boundReplay(r *wal.Record) error {
	if e.sinceCheck += int64(len(r.Data)); e.sinceCheck < e.checkEvery() {
		return nil
	}
	e.sinceCheck = 0
	if e.tableBytes.Load() <= tableBurst*e.o.TableBudget {
		return nil
	}
	e.lastLSN.Store(uint64(r.LSN - 1)) // what a stream that is damaged has had
	for _, s := range e.largest() {
		err := e.fits(s)
		if err == nil {
			err = s.checkpoint()
		}
		switch {
		case err == nil:
		case noSpace(err):
			return nil // tried again once the streams serve
		case isDamage(err):
			e.takeDown(s, err, nil)
		default:
			return fmt.Errorf("stream %q: %w", s.name, err)
		}
	}
	return nil
}
