//go:build linux

package rig

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// AttemptHeader names each publish: "PUBLISHER-NUMBER", numbered from 1. A row
// that is published again because its acknowledgement never came is a new
// attempt, so that every attempt may be stored once at most, and every
// acknowledged one has to be.
const AttemptHeader = "Rig-Attempt"

// Held is one message that a stream holds, with a digest instead of its bytes.
type Held struct {
	Seq     uint64
	Attempt string
	Sum     Sum
}

// Sum is a digest over subject, header and data.
type Sum [16]byte

// SumOf digests a message.
func SumOf(subject string, header nats.Header, data []byte) Sum {
	h := sha256.New()
	part := func(s string) { fmt.Fprintf(h, "%d:%s", len(s), s) }
	part(subject)
	keys := make([]string, 0, len(header))
	for k := range header {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		part(k)
		for _, v := range header[k] {
			part(v)
		}
	}
	part(string(data))
	return Sum(h.Sum(nil))
}

// attempt is what became of one publish.
type attempt struct {
	publisher, number int
	row               int
	sum               Sum
	acked             bool
	seq               uint64
	// earlier, if set, are the attempts with the same row, one of which the
	// server holds in place of this one, as its acknowledgement said.
	earlier []*attempt
	at      uint64 // during a check: where it was found
}

// Ledger remembers every publish of a run and which of them were acknowledged.
// Its methods may be called concurrently.
type Ledger struct {
	mu       sync.Mutex
	attempts map[string]*attempt
	byRow    map[int][]*attempt
	acked    int
	lastAck  time.Time
	frozen   bool
	grew     chan struct{}
}

// NewLedger returns an empty ledger.
func NewLedger() *Ledger {
	return &Ledger{attempts: map[string]*attempt{}, byRow: map[int][]*attempt{}, grew: make(chan struct{})}
}

// Sending enters a publish before it is handed to the client.
func (l *Ledger) Sending(publisher, number, row int, m *nats.Msg) {
	id := fmt.Sprintf("%d-%d", publisher, number)
	m.Header.Set(AttemptHeader, id)
	a := &attempt{publisher: publisher, number: number, row: row, sum: SumOf(m.Subject, m.Header, m.Data)}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.attempts[id] = a
	l.byRow[row] = append(l.byRow[row], a)
}

// Acked enters an acknowledgement with the stream sequence that it names. If it
// says duplicate, the server had stored an earlier attempt with the same row,
// whose acknowledgement got lost, and that one has to be there.
func (l *Ledger) Acked(id string, seq uint64, duplicate bool) {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.attempts[id]
	if a == nil || a.acked || l.frozen {
		return
	}
	a.acked, a.seq = true, seq
	if duplicate {
		a.earlier = l.byRow[a.row]
	}
	l.acked++
	l.lastAck = now
	close(l.grew)
	l.grew = make(chan struct{})
}

// Freeze makes the ledger ignore acknowledgements from now on, until Thaw: what
// is acknowledged meanwhile may be there or not.
func (l *Ledger) Freeze() { l.setFrozen(true) }

// Thaw ends Freeze.
func (l *Ledger) Thaw() { l.setFrozen(false) }

func (l *Ledger) setFrozen(frozen bool) {
	l.mu.Lock()
	l.frozen = frozen
	l.mu.Unlock()
}

// Acknowledged returns how many publishes were acknowledged, and when the
// latest acknowledgement came.
func (l *Ledger) Acknowledged() (n int, last time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.acked, l.lastAck
}

// Sent returns how many publishes were handed to a client.
func (l *Ledger) Sent() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.attempts)
}

// WaitAcknowledged returns once at least n publishes were acknowledged.
func (l *Ledger) WaitAcknowledged(ctx context.Context, n int) error {
	for {
		l.mu.Lock()
		acked, grew := l.acked, l.grew
		l.mu.Unlock()
		if acked >= n {
			return nil
		}
		select {
		case <-grew:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d acknowledgements came: %w", acked, n, context.Cause(ctx))
		}
	}
}

// Verdict is the outcome of comparing what a stream holds with what it should.
type Verdict struct {
	What         string // what was compared, for the report
	Demand       string // what has to be there; default "acknowledged"
	Acknowledged int    // messages that have to be there
	Found        int    // of these, how many are there
	Missing      int    // of these, how many are not
	Duplicated   int    // messages there more than once, counted for each extra one
	Altered      int    // there, but with another subject, header, data or sequence
	OutOfOrder   int    // there, but after one that should come later
	Foreign      int    // there, but never published
	Examples     []string
}

// OK reports whether nothing is wrong.
func (v Verdict) OK() bool {
	return v.Missing+v.Duplicated+v.Altered+v.OutOfOrder+v.Foreign == 0
}

// String is one line of figures, with examples of what is wrong below it.
func (v Verdict) String() string {
	demand := v.Demand
	if demand == "" {
		demand = "acknowledged"
	}
	s := fmt.Sprintf("%s: %s %d, found %d, missing %d, duplicated %d, altered %d, out of order %d, foreign %d",
		v.What, demand, v.Acknowledged, v.Found, v.Missing, v.Duplicated, v.Altered, v.OutOfOrder, v.Foreign)
	if len(v.Examples) > 0 {
		s += "\n  " + strings.Join(v.Examples, "\n  ")
	}
	return s
}

func (v *Verdict) wrong(counter *int, format string, args ...any) {
	*counter++
	if len(v.Examples) < 10 {
		v.Examples = append(v.Examples, fmt.Sprintf(format, args...))
	}
}

// Check compares a stream's messages, in stream order, with the ledger: every
// acknowledged publish is there exactly once under the sequence that was
// acknowledged, with its bytes; unacknowledged ones at most once; those of one
// publisher in the order of publishing.
func (l *Ledger) Check(what string, held []Held) Verdict { return l.check(what, held, true) }

// CheckCopy is Check for a copy of the stream, which numbers for itself.
func (l *Ledger) CheckCopy(what string, held []Held) Verdict { return l.check(what, held, false) }

func (l *Ledger) check(what string, held []Held, sequences bool) Verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := Verdict{What: what, Acknowledged: l.acked}
	for _, a := range l.attempts {
		a.at = 0
	}
	latest := map[int]int{}
	for _, h := range held {
		a := l.attempts[h.Attempt]
		switch {
		case a == nil:
			v.wrong(&v.Foreign, "sequence %d holds %q, which was never published", h.Seq, h.Attempt)
			continue
		case a.at != 0:
			v.wrong(&v.Duplicated, "publish %s is there again at sequence %d", h.Attempt, h.Seq)
			continue
		}
		a.at = h.Seq
		switch {
		case a.sum != h.Sum:
			v.wrong(&v.Altered, "publish %s has other bytes at sequence %d", h.Attempt, h.Seq)
		case a.earlier != nil:
			v.wrong(&v.Duplicated, "publish %s is there at sequence %d although its acknowledgement called it a duplicate of %d", h.Attempt, h.Seq, a.seq)
		case sequences && a.acked && a.seq != h.Seq:
			v.wrong(&v.Altered, "publish %s was acknowledged with sequence %d and is at %d", h.Attempt, a.seq, h.Seq)
		}
		if a.number < latest[a.publisher] {
			v.wrong(&v.OutOfOrder, "publish %s is at sequence %d, after number %d of the same publisher", h.Attempt, h.Seq, latest[a.publisher])
		} else {
			latest[a.publisher] = a.number
		}
	}
	for id, a := range l.attempts {
		if !a.acked {
			continue
		}
		there := a.at != 0
		for _, e := range a.earlier {
			there = there || e.at != 0 && (!sequences || e.at == a.seq)
		}
		if there {
			v.Found++
		} else {
			v.wrong(&v.Missing, "publish %s was acknowledged with sequence %d and is not there", id, a.seq)
		}
	}
	return v
}

// Compare checks that the hub's copy holds exactly what the edge's stream
// holds: each message once, with the same bytes, in the edge's order.
func Compare(what string, edge, hub []Held) Verdict {
	v := Verdict{What: what, Demand: "held by the edge", Acknowledged: len(edge)}
	place := make(map[string]int, len(edge))
	for i, e := range edge {
		place[e.Attempt] = i
	}
	seen := make([]bool, len(edge))
	last := -1
	for _, h := range hub {
		i, ok := place[h.Attempt]
		switch {
		case !ok:
			v.wrong(&v.Foreign, "the hub holds %q at sequence %d, which the edge does not hold", h.Attempt, h.Seq)
			continue
		case seen[i]:
			v.wrong(&v.Duplicated, "the hub holds publish %s again at sequence %d", h.Attempt, h.Seq)
			continue
		}
		seen[i] = true
		v.Found++
		if edge[i].Sum != h.Sum {
			v.wrong(&v.Altered, "publish %s has other bytes at the hub's sequence %d", h.Attempt, h.Seq)
		}
		if i < last {
			v.wrong(&v.OutOfOrder, "the hub holds publish %s at sequence %d, after %s", h.Attempt, h.Seq, edge[last].Attempt)
		} else {
			last = i
		}
	}
	for i, e := range edge {
		if !seen[i] {
			v.wrong(&v.Missing, "publish %s, the edge's sequence %d, is not at the hub", e.Attempt, e.Seq)
		}
	}
	return v
}
