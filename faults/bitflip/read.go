//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/faults/rig"
)

// answerTimeout is how long a pull may be without an answer before its consumer
// is taken for gone.
const answerTimeout = 15 * time.Second

// errGone says that a consumer is not there any more.
var errGone = errors.New("the consumer is gone")

// readAll reads a stream to its end. A consumer that goes, because the stream is
// repaired meanwhile, is followed by another one.
//
// Requests are made here: those of the client library that do not wait are given
// up after a second, and what is sent afterwards is lost.
func readAll(ctx context.Context, nc *nats.Conn, s jetstream.Stream, fn func(seq uint64, sum rig.Sum, subject string)) error {
	next := uint64(1)
	for {
		c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{
			AckPolicy: jetstream.AckNonePolicy, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: next,
			MemoryStorage: true, InactiveThreshold: 5 * time.Minute,
		})
		if err == nil {
			info := c.CachedInfo()
			err = pullAll(ctx, nc, info.Stream, info.Name, func(m *nats.Msg, seq uint64) {
				fn(seq, rig.SumOf(m.Subject, m.Header, m.Data), m.Subject)
				next = seq + 1
			})
			if err == nil {
				return nil
			}
		}
		if !errors.Is(err, errGone) {
			return fmt.Errorf("read from %d on: %w", next, err)
		}
		if err := idle(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("read from %d on: %w: %w", next, errGone, err)
		}
	}
}

// pullAll hands on what a consumer delivers, until it says that there is no more.
func pullAll(ctx context.Context, nc *nats.Conn, stream, consumer string, fn func(m *nats.Msg, seq uint64)) error {
	const batch = 5000
	request, err := json.Marshal(map[string]any{"batch": batch, "no_wait": true})
	if err != nil {
		return err
	}
	inbox := nc.NewRespInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return err
	}
	for {
		if err := nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT."+stream+"."+consumer, inbox, request); err != nil {
			return err
		}
		for range batch {
			wait, cancel := context.WithTimeout(ctx, answerTimeout)
			m, err := sub.NextMsgWithContext(wait)
			cancel()
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrNoResponders):
				return errGone
			case err != nil:
				return err
			}
			if status := m.Header.Get("Status"); status == "404" {
				return nil
			} else if status != "" {
				return fmt.Errorf("%w: %s %s", errGone, status, m.Header.Get("Description"))
			}
			meta, err := m.Metadata()
			if err != nil {
				return err
			}
			fn(m, meta.Sequence.Stream)
		}
	}
}
