package wal

import (
	"sync"

	"petiole/storage"
)

// How those who wait for records commit them together, see Log: whoever comes
// first leads, the others follow.

type groupState uint8

const (
	pending groupState = iota // being appended to
	writing
	written // waits for OnCommit, or is in it
	done
)

// group is what one commit writes: the batches appended since the last one.
type group struct {
	batches []batch
	recs    []Record
	bytes   int64
	last    storage.LSN
	state   groupState
	kicked  bool      // the log's goroutines are to commit it
	waiters int       // goroutines in cond
	cond    sync.Cond // on Log.mu: state is done, or a waiter has to take over a role
}

func (l *Log) newGroup() *group {
	g := &group{}
	g.cond.L = &l.mu
	if n := len(l.freeRecs); n > 0 {
		g.recs, l.freeRecs = l.freeRecs[n-1], l.freeRecs[:n-1]
	}
	return g
}

// Kick starts committing what has been appended and does not wait for it.
func (l *Log) Kick() {
	l.mu.Lock()
	l.kick()
	l.mu.Unlock()
}

// KickOrCommit is Kick for a goroutine that has just appended and has nothing
// else to do: if that was one record, and nothing is on its way to the disk, it
// commits the record itself. To hand that to another goroutine and back takes
// about as long as everything else but the disk. It may wait for the disk, and
// the rules for Commit apply.
func (l *Log) KickOrCommit() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pend.recs) != 1 || l.pend.kicked || l.writing || l.applying || len(l.applyQ) > 0 || l.usable() != nil {
		l.kick()
		return
	}
	_ = l.commit() // OnFail tells
}

func (l *Log) kick() {
	if p := l.pend; len(p.recs) > 0 && !p.kicked {
		p.kicked = true
		if !l.writing {
			l.work.Signal()
		}
	}
}

// lazyDue is the timer of AppendLazy.
func (l *Log) lazyDue() {
	l.mu.Lock()
	l.lazyArmed = false
	l.kick()
	l.mu.Unlock()
}

// Commit returns when all that was appended before the call is durable (if
// SyncInterval is set: written) and OnCommit has run for it. The error wraps
// storage.ErrFailed if that will never be.
func (l *Log) Commit() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.commit()
}

func (l *Log) commit() error {
	g := l.newest
	if g == nil {
		return l.err
	}
	for g.state != done {
		switch {
		case l.err != nil:
			return l.err
		case g.state == pending && !l.writing:
			l.lead()
		case g.state == written && !l.applying:
			l.apply()
		default:
			g.waiters++
			g.cond.Wait()
			g.waiters--
		}
	}
	l.passOnApplier()
	return nil
}

// worker commits what was kicked, and applies what no one waits for.
func (l *Log) worker() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil {
		canWrite := l.pend.kicked && !l.writing
		switch {
		case len(l.applyQ) > 0 && !l.applying:
			if canWrite {
				l.work.Signal()
			}
			l.apply()
		case canWrite:
			l.lead()
		default:
			l.work.Wait()
		}
	}
}

// lead takes the writer's role and commits the pending group. It is called
// and returns with mu held.
func (l *Log) lead() {
	g := l.pend
	l.closeBatch()
	l.pend = l.newGroup()
	g.state, l.inflight, l.writing = writing, g, true
	batches, last := g.batches, g.last
	if ackEarly {
		l.queue(g)
		l.apply()
	}
	l.mu.Unlock()
	err := l.writeGroup(batches, last)
	l.mu.Lock()
	l.writing, l.inflight = false, nil
	l.closeWait()
	if err != nil {
		l.fail(err)
		g.cond.Broadcast() // no list holds it any more
		return
	}
	if !ackEarly {
		l.queue(g)
	}
	if !l.idleArmed {
		l.armIdle()
	}
	l.passOnWriter()
}

// passOnWriter wakes someone to write the pending group if anyone wants it
// written.
func (l *Log) passOnWriter() {
	switch p := l.pend; {
	case len(p.recs) == 0 || l.writing:
	case p.waiters > 0:
		p.cond.Signal()
	case p.kicked:
		l.work.Signal()
	}
}

// queue hands a group to the applier.
func (l *Log) queue(g *group) {
	g.state = written
	l.applyQ = append(l.applyQ, g)
}

// passOnApplier wakes someone to apply the next group.
func (l *Log) passOnApplier() {
	switch {
	case len(l.applyQ) == 0 || l.applying:
	case l.applyQ[0].waiters > 0:
		l.applyQ[0].cond.Signal()
	default:
		l.work.Signal()
	}
}

// apply takes the applier's role and runs OnCommit for the oldest written
// group. It is called and returns with mu held.
func (l *Log) apply() {
	g := l.applyQ[0]
	l.applying = true
	l.mu.Unlock()
	if l.o.OnCommit != nil {
		l.o.OnCommit(g.recs)
	}
	if l.o.SyncInterval == 0 {
		l.tellDurable()
	}
	l.mu.Lock()
	l.applying = false
	l.applied.Store(uint64(g.last))
	l.closeWait()
	l.applyQ[0] = nil
	if l.applyQ = l.applyQ[1:]; len(l.applyQ) == 0 {
		l.applyQ = nil
	}
	g.state = done
	l.unapplied -= g.bytes
	recs := g.recs
	clear(recs)
	g.recs, g.batches = nil, nil
	if len(l.freeRecs) < 4 && cap(recs) <= 64<<10 {
		l.freeRecs = append(l.freeRecs, recs[:0])
	}
	if g.waiters > 0 {
		g.cond.Broadcast()
	}
	if l.blocked > 0 {
		l.space.Broadcast()
	}
}

// closeWait lets Close see that a role has been given up.
func (l *Log) closeWait() {
	if l.closing {
		l.work.Broadcast()
	}
}
