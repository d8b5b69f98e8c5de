package demo

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// read returns all messages of a stream, in its order.
func read(ctx context.Context, nc *nats.Conn, stream string) ([]*nats.Msg, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	info, err := s.Info(ctx)
	if err != nil {
		return nil, err
	}
	count := info.State.Msgs
	if count == 0 {
		return nil, nil
	}
	cons, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	it, err := cons.Messages(jetstream.PullMaxMessages(1000))
	if err != nil {
		return nil, err
	}
	defer it.Stop()
	stop := context.AfterFunc(ctx, it.Stop)
	defer stop()
	out := make([]*nats.Msg, 0, count)
	for uint64(len(out)) < count {
		m, err := it.Next()
		if err != nil {
			return nil, fmt.Errorf("after %d of %d messages: %w", len(out), count, err)
		}
		out = append(out, &nats.Msg{Subject: m.Subject(), Header: m.Headers(), Data: m.Data()})
	}
	return out, nil
}

// verdict compares what a side holds with what was published.
type verdict struct {
	messages, missing, duplicated, disordered, different int
}

func (v verdict) good(want int) bool {
	return v == verdict{messages: want}
}

// judge compares what was got with what was sent, whose n-th message has the
// number n in its header. A message that has no valid number counts as
// different.
func judge(sent, got []*nats.Msg) verdict {
	v := verdict{messages: len(got)}
	seen := make([]bool, len(sent))
	last := 0
	for _, m := range got {
		n, err := strconv.Atoi(m.Header.Get(numberHeader))
		if err != nil || n < 1 || n > len(sent) {
			v.different++
			continue
		}
		switch {
		case seen[n-1]:
			v.duplicated++
		case n < last:
			v.disordered++
		}
		seen[n-1] = true
		last = max(last, n)
		want := sent[n-1]
		if m.Subject != want.Subject || !bytes.Equal(m.Data, want.Data) || !maps.EqualFunc(m.Header, want.Header, slices.Equal[[]string]) {
			v.different++
		}
	}
	for _, ok := range seen {
		if !ok {
			v.missing++
		}
	}
	return v
}
