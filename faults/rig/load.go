//go:build linux

package rig

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Rows hands out what is to be published. Implementations are safe for
// concurrent use.
type Rows interface {
	// Next returns the next row; ok is false when there is none left.
	Next() (row int, what Row, ok bool)
	// Again takes a row back whose publish was not acknowledged.
	Again(row int)
}

// Load is one publisher with a connection of its own.
type Load struct {
	URL       string
	Prefix    string // of the rows' subjects
	Publisher int    // its number in the ledger; one Load per number
	Window    int    // publishes that may wait for an acknowledgement; 1: a lone synchronous publisher
	Plain     bool   // plain publishes that nobody acknowledges
	Ledger    *Ledger
	Rows      Rows
	// Pace, if set, is waited for before each publish.
	Pace func(context.Context) error

	number int
}

// ErrConnection is returned by Load.Run when the server went away.
var ErrConnection = errors.New("connection lost")

// Run publishes until ctx ends or the rows run out (nil), or until the
// connection is lost (ErrConnection). Rows without an acknowledgement go back
// to Rows. It may be called again after it returned.
func (l *Load) Run(ctx context.Context) error {
	nc, err := nats.Connect(l.URL, nats.NoReconnect(), nats.Timeout(20*time.Second), nats.ErrorHandler(quiet))
	if err != nil {
		return fmt.Errorf("publisher %d: %w: %w", l.Publisher, ErrConnection, err)
	}
	defer nc.Close()
	lost := nc.StatusChanged(nats.CLOSED)
	var mu sync.Mutex
	pending := map[string]int{} // attempt to row
	slots := make(chan struct{}, l.Window)
	finish := func(id string) {
		mu.Lock()
		_, known := pending[id]
		delete(pending, id)
		mu.Unlock()
		if known {
			<-slots
		}
	}
	var refused error
	js, err := jetstream.New(nc,
		jetstream.WithPublishAsyncMaxPending(2*l.Window),
		jetstream.WithPublishAsyncAckHandler(func(_ jetstream.JetStream, m *nats.Msg, ack *jetstream.PubAck) {
			id := m.Header.Get(AttemptHeader)
			l.Ledger.Acked(id, ack.Sequence, ack.Duplicate)
			finish(id)
		}),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, m *nats.Msg, err error) {
			// A refusal leaves the slot taken and the row pending: the run
			// ends below and gives the row back.
			mu.Lock()
			defer mu.Unlock()
			if refused == nil {
				refused = fmt.Errorf("publish %s: %w", m.Header.Get(AttemptHeader), err)
			}
		}))
	if err != nil {
		return err
	}
	defer func() {
		nc.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, row := range pending {
			l.Rows.Again(row)
		}
		clear(pending)
	}()
	failed := func() error {
		mu.Lock()
		defer mu.Unlock()
		return fmt.Errorf("publisher %d: %w: %w", l.Publisher, ErrConnection, errors.Join(nc.LastError(), refused))
	}
	for {
		if l.Pace != nil {
			if err := l.Pace(ctx); err != nil {
				return nil
			}
		}
		select {
		case slots <- struct{}{}:
		case <-lost:
			return failed()
		case <-ctx.Done():
			return nil
		}
		if ctx.Err() != nil {
			return nil
		}
		row, what, ok := l.Rows.Next()
		if !ok {
			<-slots
			break
		}
		l.number++
		m := &nats.Msg{Subject: l.Prefix + what.Subject, Header: nats.Header{}, Data: what.Data}
		maps.Copy(m.Header, what.Header)
		l.Ledger.Sending(l.Publisher, l.number, row, m)
		id := m.Header.Get(AttemptHeader)
		if l.Plain {
			<-slots
			if err := nc.PublishMsg(m); err != nil {
				return failed()
			}
			continue
		}
		mu.Lock()
		pending[id] = row
		mu.Unlock()
		if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(10*time.Second)); err != nil {
			return failed()
		}
	}
	if l.Plain {
		if err := nc.FlushTimeout(10 * time.Second); err != nil {
			return failed()
		}
		return nil
	}
	for range l.Window { // every slot free again: everything is acknowledged
		select {
		case slots <- struct{}{}:
		case <-lost:
			return failed()
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// quiet keeps the client from printing what the rig brings about on purpose;
// Run's own errors tell.
func quiet(*nats.Conn, *nats.Subscription, error) {}

// ReadStream returns what a stream holds from sequence from on, in stream order.
func ReadStream(ctx context.Context, nc *nats.Conn, stream string, from uint64) ([]Held, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", stream, err)
	}
	state := s.CachedInfo().State
	if state.Msgs == 0 || from > state.LastSeq {
		return nil, nil
	}
	cons, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(from, state.FirstSeq),
	})
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", stream, err)
	}
	it, err := cons.Messages()
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", stream, err)
	}
	defer it.Stop()
	stopped := context.AfterFunc(ctx, it.Stop)
	defer stopped()
	var out []Held
	for {
		m, err := it.Next()
		if err != nil {
			return out, fmt.Errorf("read stream %s after %d messages: %w", stream, len(out), errors.Join(err, ctx.Err()))
		}
		meta, err := m.Metadata()
		if err != nil {
			return out, err
		}
		seq := meta.Sequence.Stream
		out = append(out, Held{
			Seq: seq, Attempt: m.Headers().Get(AttemptHeader), Sum: SumOf(m.Subject(), m.Headers(), m.Data()),
		})
		if seq >= state.LastSeq {
			return out, nil
		}
	}
}

// StreamLast returns a stream's message count and last sequence; both zero if
// there is no such stream yet.
func StreamLast(ctx context.Context, nc *nats.Conn, stream string) (msgs, last uint64, err error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return 0, 0, err
	}
	s, err := js.Stream(ctx, stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("look at stream %s: %w", stream, err)
	}
	st := s.CachedInfo().State
	return st.Msgs, st.LastSeq, nil
}

// StreamLastAt is StreamLast with a connection of its own.
func StreamLastAt(ctx context.Context, url, stream string) (msgs, last uint64, err error) {
	err = on(url, func(nc *nats.Conn) error {
		msgs, last, err = StreamLast(ctx, nc, stream)
		return err
	})
	return msgs, last, err
}
