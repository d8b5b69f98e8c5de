//go:build linux

package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Asker is a publisher that waits for each answer and tells how long it took
// and what it was. Its methods are for one goroutine.
type Asker struct {
	NC        *nats.Conn
	Ledger    *Ledger
	Publisher int // its number in the ledger; one Asker per number
	Prefix    string
	Rows      Rows
	number    int
}

// Answer is what became of a publish.
type Answer struct {
	ID      string // the attempt
	Seq     uint64
	Took    time.Duration
	Refused *jetstream.APIError // nil if it was acknowledged
}

// Publish publishes the next row. The error is not nil if there was no answer.
func (a *Asker) Publish(ctx context.Context) (Answer, error) {
	row, what, ok := a.Rows.Next()
	if !ok {
		return Answer{}, errors.New("no rows left")
	}
	a.number++
	m := &nats.Msg{Subject: a.Prefix + what.Subject, Header: nats.Header{}, Data: what.Data}
	a.Ledger.Sending(a.Publisher, a.number, row, m)
	ans := Answer{ID: m.Header.Get(AttemptHeader)}
	sent := time.Now()
	reply, err := a.NC.RequestMsgWithContext(ctx, m)
	ans.Took = time.Since(sent)
	if err != nil {
		return ans, fmt.Errorf("publish %s: no answer after %v: %w", ans.ID, ans.Took.Round(time.Millisecond), err)
	}
	var ack struct {
		Seq   uint64              `json:"seq"`
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(reply.Data, &ack); err != nil {
		return ans, fmt.Errorf("publish %s: answer %q: %w", ans.ID, reply.Data, err)
	}
	ans.Seq, ans.Refused = ack.Seq, ack.Error
	if ack.Error == nil {
		a.Ledger.Acked(ans.ID, ack.Seq, false)
	}
	return ans, nil
}

// Askers are several of them on one connection.
type Askers struct {
	Each []*Asker

	mu      sync.Mutex
	refused map[string]bool
	slowest time.Duration
	answers atomic.Int64
}

// NewAskers returns n askers that share connection, ledger and rows; their
// numbers in the ledger begin with first.
func NewAskers(nc *nats.Conn, l *Ledger, prefix string, rows Rows, first, n int) *Askers {
	as := &Askers{refused: map[string]bool{}}
	for i := range n {
		as.Each = append(as.Each, &Asker{NC: nc, Ledger: l, Publisher: first + i, Prefix: fmt.Sprintf("%s%d.", prefix, first+i), Rows: rows})
	}
	return as
}

// Run publishes from all of them until enough says so of an answer, or ctx ends.
// It fails if an answer does not come within patience.
func (as *Askers) Run(ctx context.Context, patience time.Duration, enough func(Answer) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, len(as.Each))
	for i, a := range as.Each {
		wg.Go(func() {
			for ctx.Err() == nil {
				one, stop := context.WithTimeout(context.WithoutCancel(ctx), patience)
				ans, err := a.Publish(one)
				stop()
				if err != nil {
					errs[i] = err
					cancel()
					return
				}
				as.answers.Add(1)
				as.mu.Lock()
				as.slowest = max(as.slowest, ans.Took)
				if ans.Refused != nil {
					as.refused[ans.ID] = true
				}
				as.mu.Unlock()
				if enough(ans) {
					cancel()
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Refused returns how many publishes were refused, and Slowest the longest that
// an answer took.
func (as *Askers) Refused() int {
	as.mu.Lock()
	defer as.mu.Unlock()
	return len(as.refused)
}

// Slowest returns the longest that an answer took since the last call.
func (as *Askers) Slowest() time.Duration {
	as.mu.Lock()
	defer as.mu.Unlock()
	d := as.slowest
	as.slowest = 0
	return d
}

// Stored returns an error if a publish that was refused is held nevertheless.
func (as *Askers) Stored(held []Held) error {
	as.mu.Lock()
	defer as.mu.Unlock()
	for _, h := range held {
		if as.refused[h.Attempt] {
			return fmt.Errorf("publish %s was refused and is stored at sequence %d", h.Attempt, h.Seq)
		}
	}
	return nil
}

// Sized makes rows of the given length without end.
type Sized struct {
	Seed     uint64
	Min, Max int // bytes
	n        atomic.Uint64
}

// Next returns the next row.
func (s *Sized) Next() (int, Row, bool) {
	n := s.n.Add(1)
	r := rand.New(rand.NewPCG(s.Seed, n))
	b := make([]byte, s.Min+r.IntN(s.Max-s.Min+1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return int(n), Row{Subject: "n", Data: b}, true
}

// Again does nothing: there are always more rows.
func (s *Sized) Again(int) {}
