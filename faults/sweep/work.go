//go:build linux && (amd64 || arm64)

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/faults/rig"
)

// The streams: one that is kept, one that is created under the sweep, one that
// is purged and one that is deleted.
const (
	keepStream    = "KEEP"
	newStreamName = "NEW"
	oldStream     = "OLD"
	goneStream    = "GONE"
	consumerName  = "worker"
)

// errGone says that the edge does not answer any more.
var errGone = errors.New("the edge is gone")

// client is a connection that notes in the truth what the edge acknowledges.
type client struct {
	nc   *nats.Conn
	js   jetstream.JetStream
	t    *truth
	gone chan nats.Status
}

func connect(url string, t *truth) (*client, error) {
	nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(rig.StartTimeout), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errGone, err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return &client{nc: nc, js: js, t: t, gone: nc.StatusChanged(nats.CLOSED)}, nil
}

// answered notes an answer: done, refused with an error of JetStream's, or none
// because the edge is gone, which is the error returned.
func (c *client) answered(what string, f *fate, err error) error {
	if err == nil {
		c.t.acknowledged(what, func() { *f = done })
		return nil
	}
	var api jetstream.JetStreamError
	if errors.As(err, &api) && api.APIError() != nil {
		c.t.refuse(fmt.Sprintf("%s: %d, %d %s", what, api.APIError().Code, api.APIError().ErrorCode, api.APIError().Description))
		return nil
	}
	if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) { // which has but the answer's text
		c.t.refuse(fmt.Sprintf("%s: %v", what, err))
		return nil
	}
	return fmt.Errorf("%s: %w: %w", what, errGone, err)
}

func (c *client) create(ctx context.Context, name string) error {
	s := c.t.streams[name]
	c.t.try(&s.created)
	_, err := c.js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{strings.ToLower(name) + ".>"}, Storage: jetstream.FileStorage})
	return c.answered("create stream "+name, &s.created, err)
}

// publish publishes n messages at once and waits for their answers.
func (c *client) publish(ctx context.Context, name string, n int) error {
	t, s := c.t, c.t.streams[name]
	if s.created != done {
		return nil // its creation was refused
	}
	inbox := nats.NewInbox()
	sub, err := c.nc.SubscribeSync(inbox + ".*")
	if err != nil {
		return fmt.Errorf("%w: %w", errGone, err)
	}
	defer func() { _ = sub.Unsubscribe() }() // fails if the connection is gone, which the caller knows
	for range n {
		t.mu.Lock()
		id := fmt.Sprintf("a-%d", t.next)
		t.next++
		m := &nats.Msg{Subject: strings.ToLower(name) + ".x", Reply: inbox + "." + id, Header: nats.Header{rig.AttemptHeader: {id}}, Data: make([]byte, 40+rand.IntN(400))}
		for i := range m.Data {
			m.Data[i] = byte(rand.IntN(256))
		}
		s.publishes[id] = &sent{sum: rig.SumOf(m.Subject, m.Header, m.Data)}
		t.mu.Unlock()
		if err := c.nc.PublishMsg(m); err != nil {
			return fmt.Errorf("%w: %w", errGone, err)
		}
	}
	for range n {
		m, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return fmt.Errorf("publish to %s: %w: %w", name, errGone, err)
		}
		var ack struct {
			Seq   uint64              `json:"seq"`
			Error *jetstream.APIError `json:"error"`
		}
		id := m.Subject[len(inbox)+1:]
		if err := json.Unmarshal(m.Data, &ack); err != nil {
			return fmt.Errorf("publish %s: answer %q: %w", id, m.Data, err)
		}
		if ack.Error != nil {
			t.refuse(fmt.Sprintf("publish: %d, %d %s", ack.Error.Code, ack.Error.ErrorCode, ack.Error.Description))
			continue
		}
		t.acknowledged("publish "+id, func() { s.publishes[id].seq = ack.Seq })
	}
	return nil
}

// consume creates the consumer if there is none and acknowledges n messages,
// each acknowledgement confirmed.
func (c *client) consume(ctx context.Context, n int) error {
	t := c.t
	t.try(&t.consumer)
	cons, err := c.js.CreateOrUpdateConsumer(ctx, keepStream, jetstream.ConsumerConfig{Durable: consumerName, AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Minute})
	if e := c.answered("create consumer", &t.consumer, err); e != nil || err != nil {
		return e
	}
	batch, err := cons.Fetch(n, jetstream.FetchMaxWait(2*time.Second))
	if err != nil {
		return fmt.Errorf("fetch: %w: %w", errGone, err)
	}
	for m := range batch.Messages() {
		meta, err := m.Metadata()
		if err != nil {
			return err
		}
		seq := meta.Sequence.Stream
		t.mu.Lock()
		before := t.taken[seq]
		t.taken[seq] = max(before, perhaps)
		t.mu.Unlock()
		if before == done {
			return fmt.Errorf("message %d was delivered although its acknowledgement was confirmed", seq)
		}
		if err := m.DoubleAck(ctx); err != nil {
			return fmt.Errorf("acknowledge %d: %w: %w", seq, errGone, err)
		}
		t.acknowledged(fmt.Sprintf("consumer's acknowledgement of %d", seq), func() { t.taken[seq] = done })
	}
	if err := batch.Error(); err != nil {
		return fmt.Errorf("fetch: %w: %w", errGone, err)
	}
	return nil
}

func (c *client) deleteMessage(ctx context.Context, seq uint64) error {
	s := c.t.streams[keepStream]
	c.t.mu.Lock()
	s.removed[seq] = perhaps
	c.t.mu.Unlock()
	var f fate
	st, err := c.js.Stream(ctx, keepStream)
	if err == nil {
		err = st.DeleteMsg(ctx, seq)
	}
	err = c.answered("delete message", &f, err)
	if f == done {
		c.t.mu.Lock()
		s.removed[seq] = done
		c.t.mu.Unlock()
	}
	return err
}

func (c *client) purge(ctx context.Context) error {
	s := c.t.streams[oldStream]
	c.t.mu.Lock()
	for id, p := range s.publishes {
		if p.seq != 0 {
			s.before[id] = true
		}
	}
	c.t.mu.Unlock()
	c.t.try(&s.purged)
	st, err := c.js.Stream(ctx, oldStream)
	if err == nil {
		err = st.Purge(ctx)
	}
	return c.answered("purge", &s.purged, err)
}

func (c *client) deleteStream(ctx context.Context) error {
	s := c.t.streams[goneStream]
	c.t.try(&s.deleted)
	return c.answered("delete stream", &s.deleted, c.js.DeleteStream(ctx, goneStream))
}

// base is how many messages each stream has before the work begins.
var base = []struct {
	stream string
	msgs   int
}{{keepStream, 150}, {oldStream, 40}, {goneStream, 20}}

// fill makes the streams that the work needs, as far as they are not there.
func fill(ctx context.Context, url string, t *truth) error {
	c, err := connect(url, t)
	if err != nil {
		return err
	}
	defer c.nc.Close()
	for _, b := range base {
		if t.streams[b.stream].created == done {
			continue
		}
		if err := c.create(ctx, b.stream); err != nil {
			return err
		}
		if err := c.publish(ctx, b.stream, b.msgs); err != nil {
			return err
		}
	}
	return nil
}

// work is the first life's part of the script.
func work(ctx context.Context, url string, t *truth) error {
	c, err := connect(url, t)
	if err != nil {
		return err
	}
	defer c.nc.Close()
	steps := []func() error{
		func() error { return c.create(ctx, newStreamName) },
		func() error { return c.publish(ctx, newStreamName, 60) },
		func() error { return c.publish(ctx, keepStream, 30) },
		func() error { return c.consume(ctx, 8) },
		func() error { return c.publish(ctx, keepStream, 1) }, // a lone one
		func() error { return c.deleteMessage(ctx, 7) },
		func() error { return c.purge(ctx) },
		func() error { return c.publish(ctx, oldStream, 15) },
		func() error { return c.deleteStream(ctx) },
		func() error { return c.publish(ctx, keepStream, 15) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// again is the second life's part.
func again(ctx context.Context, url string, t *truth) error {
	c, err := connect(url, t)
	if err != nil {
		return err
	}
	defer c.nc.Close()
	for _, name := range []string{newStreamName, keepStream} {
		if err := c.publish(ctx, name, 10); err != nil {
			return err
		}
	}
	return c.consume(ctx, 3)
}

// check compares what the edge at url holds with the truth, and settles it.
func check(ctx context.Context, url string, t *truth) (*tally, error) {
	nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(rig.StartTimeout))
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	held := map[string][]rig.Held{}
	names := js.StreamNames(ctx)
	for name := range names.Name() {
		held[name] = nil
	}
	if err := names.Err(); err != nil {
		return nil, fmt.Errorf("list streams: %w", err)
	}
	for name := range held {
		if held[name], err = rig.ReadStream(ctx, nc, name, 1); err != nil {
			return nil, err
		}
	}
	y := &tally{}
	t.settle(y, held)
	return y, t.checkConsumer(ctx, js, y)
}

// checkConsumer counts what the consumer still has to deliver: confirmed
// acknowledgements hold, and nothing else was taken for acknowledged.
func (t *truth) checkConsumer(ctx context.Context, js jetstream.JetStream, y *tally) error {
	if t.streams[keepStream].created != done {
		return nil
	}
	cons, err := js.Consumer(ctx, keepStream, consumerName)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		if t.consumer == done {
			y.badf("the consumer is gone")
		}
		t.consumer = never
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at the consumer: %w", err)
	}
	if t.consumer == never {
		y.badf("there is a consumer that nobody created")
	}
	t.consumer = done
	info := cons.CachedInfo()
	s := t.streams[keepStream]
	s2 := func(least fate) (n int) {
		for _, p := range s.publishes {
			if t.taken[p.seq] < least {
				n++
			}
		}
		return n
	}
	// Of what is held: at most everything that was not confirmed, at least
	// everything that was not even tried.
	left, most, fewest := int(info.NumPending)+info.NumAckPending, s2(done), s2(perhaps)
	if left > most || left < fewest {
		y.badf("the consumer has %d messages left to deliver or to be acknowledged, want %d to %d", left, fewest, most)
	}
	return nil
}
