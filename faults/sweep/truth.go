//go:build linux && (amd64 || arm64)

package main

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"petiole/faults/rig"
)

// fate is what a client knows about a request: nothing was sent, it was sent
// and perhaps done, or it was acknowledged.
type fate int

const (
	never fate = iota
	perhaps
	done
)

// sent is one publish.
type sent struct {
	sum rig.Sum
	seq uint64 // 0 until acknowledged
}

// stream is what a client knows about one stream.
type stream struct {
	created, deleted, purged fate
	publishes                map[string]*sent // by attempt
	before                   map[string]bool  // attempts acknowledged before a purge was asked for
	removed                  map[uint64]fate  // single messages deleted
}

func newStream() *stream {
	return &stream{publishes: map[string]*sent{}, before: map[string]bool{}, removed: map[uint64]fate{}}
}

// truth is what the clients of one store know. Its methods may be called
// concurrently.
type truth struct {
	mu       sync.Mutex
	streams  map[string]*stream
	consumer fate            // of the durable consumer of keepStream
	taken    map[uint64]fate // messages that this consumer acknowledged
	next     int             // number of the next attempt
	acks     int             // everything that was acknowledged
	lastAck  time.Time       // when the latest acknowledgement came
	failedAt time.Time       // from here on nothing may be acknowledged; zero: no such moment
	late     []string        // what was acknowledged nevertheless
	refused  map[string]int  // error answers
}

func newTruth() *truth {
	t := &truth{streams: map[string]*stream{}, taken: map[uint64]fate{}, refused: map[string]int{}}
	for _, name := range []string{keepStream, newStreamName, oldStream, goneStream} {
		t.streams[name] = newStream()
	}
	return t
}

// clone is a copy that goes its own way, without counts of acknowledgements.
func (t *truth) clone() *truth {
	c := newTruth()
	for name, s := range t.streams {
		n := newStream()
		n.created, n.deleted, n.purged = s.created, s.deleted, s.purged
		for id, p := range s.publishes {
			q := *p
			n.publishes[id] = &q
		}
		maps.Copy(n.removed, s.removed)
		c.streams[name] = n
	}
	c.consumer, c.next = t.consumer, t.next
	maps.Copy(c.taken, t.taken)
	return c
}

// acknowledged notes that an answer to what has come; set enters it.
func (t *truth) acknowledged(what string, set func()) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	set()
	t.acks++
	t.lastAck = now
	if !t.failedAt.IsZero() && now.After(t.failedAt) {
		t.late = append(t.late, fmt.Sprintf("%s, %v after the failure", what, now.Sub(t.failedAt).Round(10*time.Microsecond)))
	}
}

func (t *truth) refuse(answer string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.refused[answer]++
}

func (t *truth) try(f *fate) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if *f == never {
		*f = perhaps
	}
}

// whenQuiet returns once no acknowledgement has come for a while, so that what
// was under way to the clients has arrived, and sets the moment from which on
// nothing may be acknowledged any more.
func (t *truth) whenQuiet() {
	const quiet, patience = 30 * time.Millisecond, 500 * time.Millisecond
	start := time.Now()
	for {
		t.mu.Lock()
		since := time.Since(t.lastAck)
		if since >= quiet && time.Since(start) >= quiet || time.Since(start) > patience {
			t.failedAt = time.Now()
			t.mu.Unlock()
			return
		}
		t.mu.Unlock()
		time.Sleep(quiet / 6)
	}
}

// tally is how what a store holds compares with what its clients know.
type tally struct {
	acknowledged, found int
	wrong               []string
}

func (y *tally) badf(format string, args ...any) {
	y.wrong = append(y.wrong, fmt.Sprintf(format, args...))
}

func (y *tally) err() error {
	if len(y.wrong) == 0 {
		return nil
	}
	if len(y.wrong) > 10 {
		y.wrong = append(y.wrong[:10], fmt.Sprintf("and %d more", len(y.wrong)-10))
	}
	return fmt.Errorf("acknowledged %d, found %d:\n  %s", y.acknowledged, y.found, strings.Join(y.wrong, "\n  "))
}

// settle compares the streams that exist and what they hold with what is known,
// and enters what has turned out into the truth: what was perhaps done is done
// or was never asked for, from now on.
func (t *truth) settle(y *tally, held map[string][]rig.Held) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range held {
		if t.streams[name] == nil {
			y.badf("there is a stream %s, which nobody created", name)
		}
	}
	for name, s := range t.streams {
		msgs, exists := held[name]
		switch {
		case !exists && s.created == done && s.deleted == never:
			y.badf("stream %s is gone", name)
			continue
		case exists && (s.created == never || s.deleted == done):
			y.badf("stream %s is there, which was deleted or never created", name)
			continue
		case !exists:
			// Both are settled now; the same name may not come back.
			s.created, s.deleted, s.publishes = never, never, map[string]*sent{}
			continue
		}
		s.created, s.deleted = done, never
		s.settle(y, name, msgs)
	}
}

func (s *stream) settle(y *tally, name string, msgs []rig.Held) {
	at := map[string]uint64{}
	for _, h := range msgs {
		p := s.publishes[h.Attempt]
		switch {
		case p == nil:
			y.badf("%s holds %q at %d, which was never published", name, h.Attempt, h.Seq)
			continue
		case at[h.Attempt] != 0:
			y.badf("%s holds publish %s twice, at %d and %d", name, h.Attempt, at[h.Attempt], h.Seq)
		case p.sum != h.Sum:
			y.badf("%s holds publish %s at %d with other bytes", name, h.Attempt, h.Seq)
		case p.seq != 0 && p.seq != h.Seq:
			y.badf("%s holds publish %s at %d, acknowledged with %d", name, h.Attempt, h.Seq, p.seq)
		case s.removed[h.Seq] == done:
			y.badf("%s holds message %d, which was deleted", name, h.Seq)
		case s.purged == done && s.before[h.Attempt]:
			y.badf("%s holds message %d, which was purged", name, h.Seq)
		}
		at[h.Attempt] = h.Seq
		delete(s.removed, h.Seq)
	}
	// A purge happened as a whole or not at all.
	purged := len(s.before) > 0
	for id := range s.before {
		purged = purged && at[id] == 0
	}
	for id, p := range s.publishes {
		if p.seq == 0 {
			if at[id] == 0 {
				delete(s.publishes, id)
			} else {
				p.seq = at[id] // it is kept from now on
			}
			continue
		}
		if s.before[id] && (s.purged == done || s.purged == perhaps && purged) {
			delete(s.publishes, id)
			continue
		}
		y.acknowledged++
		switch {
		case at[id] != 0:
			y.found++
		case s.removed[p.seq] != never:
			y.found++ // as it should: it is gone
			delete(s.publishes, id)
		default:
			y.badf("%s: publish %s was acknowledged with %d and is not there", name, id, p.seq)
		}
	}
	s.purged, s.before = never, map[string]bool{}
}
