//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/faults/rig"
)

// work is what is done to the program, and what is known of it.
type work struct {
	r  *rand.Rand
	nc *nats.Conn
	js jetstream.JetStream

	published                   map[string]rig.Sum // the data of every publish, by its header
	done, acked, flips, missing int
	history                     []string

	mu   sync.Mutex
	lost map[string][]span // sequences that were told to be lost, by stream
}

// streams is how many there are.
const streams = 5

func streamName(i int) string { return fmt.Sprintf("S%d", i) }

// barrierStream is for what makes all before it safe; it is not looked at.
const barrierStream = "BARRIER"

// start starts the program and connects to it.
func (w *work) start(ctx context.Context, t *target) error {
	url, err := t.start()
	if err != nil {
		return err
	}
	if w.nc, err = nats.Connect(url, nats.NoReconnect(), nats.Timeout(rig.StartTimeout)); err != nil {
		return err
	}
	if w.js, err = jetstream.New(w.nc, jetstream.WithDefaultTimeout(patience)); err != nil {
		return err
	}
	if err := w.heed(); err != nil {
		return err
	}
	return w.persist(func() error {
		_, err := w.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: barrierStream, Subjects: []string{barrierStream}, MaxMsgs: 1})
		return err
	})
}

// patience is how long an answer may take.
const patience = 30 * time.Second

// barrier returns when everything that was sent before it has been read, and is
// safe with what it led to, as far as that has been done.
func (w *work) barrier(ctx context.Context) error {
	if err := w.nc.FlushTimeout(patience); err != nil {
		return err
	}
	m := w.message(barrierStream, 0)
	err := w.persist(func() error {
		_, err := w.js.PublishMsg(ctx, m)
		return err
	})
	if err != nil {
		return fmt.Errorf("publish to %s: %w", barrierStream, err)
	}
	return nil
}

// message makes a message whose data is known by its header.
func (w *work) message(subject string, size int) *nats.Msg {
	m := nats.NewMsg(subject)
	m.Data = make([]byte, size)
	for i := range m.Data {
		m.Data[i] = byte(w.r.Uint32())
	}
	id := fmt.Sprintf("1-%d", len(w.published)+1)
	m.Header.Set(rig.AttemptHeader, id)
	w.published[id] = rig.SumOf("", nil, m.Data)
	return m
}

// operate does one thing to one of the streams, or creates it. That it is
// refused is no error, that it is not answered is.
func (w *work) operate(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	name := streamName(w.r.IntN(streams))
	var s jetstream.Stream
	err := w.persist(func() (err error) {
		s, err = w.js.Stream(ctx, name)
		return err
	})
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return w.create(ctx, name)
	case err != nil:
		return fmt.Errorf("info of %s: %w", name, err)
	}
	switch k := w.r.IntN(100); {
	case k < 45:
		return w.publish(ctx, name)
	case k < 55:
		return w.remove(ctx, s)
	case k < 60:
		return w.purge(ctx, s)
	case k < 68:
		return w.update(ctx, s)
	case k < 70:
		return w.answered("delete "+name, w.js.DeleteStream(ctx, name))
	case k < 78:
		return w.consumer(ctx, s)
	case k < 82:
		c := w.durable()
		return w.answered("delete consumer "+c+" of "+name, s.DeleteConsumer(ctx, c))
	}
	return w.consume(ctx, s)
}

// answered notes an operation and passes on an error that is no answer.
func (w *work) answered(what string, err error) error {
	w.done++
	var refused *jetstream.APIError
	text := "done"
	if err != nil {
		text = err.Error()
	}
	w.history = append(w.history, what+": "+text)
	if err == nil || errors.As(err, &refused) {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// recent is the newest n of what has been done.
func (w *work) recent(n int) string {
	return strings.Join(w.history[max(0, len(w.history)-n):], "\n")
}

// often is true once in n times.
func (w *work) often(n int) bool { return w.r.IntN(n) == 0 }

func subjects(name string) string { return strings.ToLower(name) + ".*" }

func (w *work) subject(name string) string {
	return fmt.Sprintf("%s.%d", strings.ToLower(name), w.r.IntN(8))
}

func (w *work) durable() string { return fmt.Sprintf("c%d", w.r.IntN(4)) }

func (w *work) create(ctx context.Context, name string) error {
	c := jetstream.StreamConfig{
		Name: name, Subjects: []string{subjects(name)},
		AllowDirect: w.often(2), AllowRollup: w.often(2), AllowMsgTTL: w.often(2),
		Retention: jetstream.RetentionPolicy(w.r.IntN(3)),
	}
	if w.often(2) {
		c.MaxMsgs = 20 + w.r.Int64N(300)
	}
	if w.often(3) {
		c.MaxMsgsPerSubject = 1 + w.r.Int64N(20)
	}
	if w.often(3) {
		c.MaxBytes = 20_000 + w.r.Int64N(500_000)
	}
	if w.often(3) {
		c.Discard = jetstream.DiscardNew
		c.DiscardNewPerSubject = c.MaxMsgsPerSubject > 0 && w.often(2)
	}
	if w.often(4) {
		c.FirstSeq = 1 + w.r.Uint64N(1000)
		if w.often(3) {
			c.FirstSeq = 1<<32 - 50 // keys and positions grow beyond 32 bits
		}
	}
	if w.often(4) {
		c.SubjectTransform = &jetstream.SubjectTransformConfig{Source: subjects(name), Destination: "t." + name + ".{{wildcard(1)}}"}
	}
	_, err := w.js.CreateStream(ctx, c)
	return w.answered(fmt.Sprintf("create %+v", c), err)
}

// publish publishes some messages, waiting for each acknowledgement or for all
// of them in the end.
func (w *work) publish(ctx context.Context, name string) error {
	n, each, acked := 1+w.r.IntN(30), w.often(4), 0
	var futures []jetstream.PubAckFuture
	var first error // that is an answer
	count := func(err error) error {
		var refused *jetstream.APIError
		switch {
		case err == nil:
			acked++
		case !errors.As(err, &refused) && !errors.Is(err, nats.ErrNoResponders):
			return fmt.Errorf("publish to %s: %w", name, err)
		case first == nil:
			first = err
		}
		return nil
	}
	for range n {
		m := w.any(name)
		if !each {
			f, err := w.js.PublishMsgAsync(m)
			if err != nil {
				return err
			}
			futures = append(futures, f)
			continue
		}
		_, err := w.js.PublishMsg(ctx, m)
		if err := count(err); err != nil {
			return err
		}
	}
	for _, f := range futures {
		var err error
		select {
		case <-f.Ok():
		case err = <-f.Err():
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err := count(err); err != nil {
			return err
		}
	}
	w.acked += acked
	return w.answered(fmt.Sprintf("publish %d to %s, %d acknowledged, the first refused: %v", n, name, acked, first), nil)
}

// any is some message for a stream, with headers that the server heeds.
func (w *work) any(name string) *nats.Msg {
	size := w.r.IntN(3000)
	if w.often(40) {
		size = 200_000
	}
	m := w.message(w.subject(name), size)
	if w.often(6) {
		m.Header.Set(jetstream.MsgIDHeader, fmt.Sprint(w.r.IntN(200)))
	}
	if w.often(60) {
		m.Header.Set(jetstream.MsgRollup, []string{jetstream.MsgRollupSubject, jetstream.MsgRollupAll}[w.r.IntN(2)])
	}
	if w.often(30) {
		m.Header.Set("Nats-TTL", []string{"1h", "never"}[w.r.IntN(2)])
	}
	if w.often(30) {
		m.Header.Set(jetstream.ExpectedLastSubjSeqHeader, fmt.Sprint(w.r.IntN(20)))
	}
	return m
}

// remove deletes a message that may be there.
func (w *work) remove(ctx context.Context, s jetstream.Stream) error {
	st := s.CachedInfo().State
	if st.Msgs == 0 {
		return nil
	}
	seq := st.FirstSeq + w.r.Uint64N(st.LastSeq-st.FirstSeq+1)
	err := s.DeleteMsg(ctx, seq)
	if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
		err = &jetstream.APIError{Description: err.Error()} // the client makes text of it
	}
	return w.answered(fmt.Sprintf("delete message %d of %s", seq, s.CachedInfo().Config.Name), err)
}

func (w *work) purge(ctx context.Context, s jetstream.Stream) error {
	i := s.CachedInfo()
	what := "purge " + i.Config.Name
	var o []jetstream.StreamPurgeOpt
	if w.often(2) {
		subject := w.subject(i.Config.Name)
		o = append(o, jetstream.WithPurgeSubject(subject))
		what += " of " + subject
	}
	switch w.r.IntN(3) {
	case 0:
		keep := w.r.Uint64N(10)
		o = append(o, jetstream.WithPurgeKeep(keep))
		what += fmt.Sprintf(" but for %d", keep)
	case 1:
		to := i.State.FirstSeq + w.r.Uint64N(50)
		o = append(o, jetstream.WithPurgeSequence(to))
		what += fmt.Sprintf(" up to %d", to)
	}
	return w.answered(what, s.Purge(ctx, o...))
}

func (w *work) update(ctx context.Context, s jetstream.Stream) error {
	c := s.CachedInfo().Config
	switch w.r.IntN(6) {
	case 0:
		c.MaxMsgs = 10 + w.r.Int64N(300)
	case 1:
		c.MaxMsgsPerSubject = 1 + w.r.Int64N(10)
	case 2:
		c.MaxBytes = 10_000 + w.r.Int64N(300_000)
	case 3:
		c.Subjects = []string{subjects(c.Name), fmt.Sprintf("x%s.%d", c.Name, w.r.IntN(3))}
	case 4:
		c.Discard, c.DiscardNewPerSubject = 1-c.Discard, false
	case 5:
		switch c.Retention {
		case jetstream.LimitsPolicy:
			c.Retention = jetstream.InterestPolicy
		case jetstream.InterestPolicy:
			c.Retention = jetstream.LimitsPolicy
		}
	}
	_, err := w.js.UpdateStream(ctx, c)
	return w.answered(fmt.Sprintf("update %+v", c), err)
}

func (w *work) consumer(ctx context.Context, s jetstream.Stream) error {
	name := s.CachedInfo().Config.Name
	// Nothing becomes due by itself while a round lasts.
	c := jetstream.ConsumerConfig{Durable: w.durable(), AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Hour, MaxDeliver: -1}
	if w.often(3) {
		c.AckPolicy = jetstream.AckAllPolicy
	}
	if w.often(3) {
		c.FilterSubjects = []string{w.subject(name)}
	}
	_, err := s.CreateOrUpdateConsumer(ctx, c)
	return w.answered(fmt.Sprintf("consumer %s of %s, filter %v", c.Durable, name, c.FilterSubjects), err)
}

// consume takes some messages and acknowledges most.
func (w *work) consume(ctx context.Context, s jetstream.Stream) error {
	name := s.CachedInfo().Config.Name + " " + w.durable()
	stream, durable, _ := strings.Cut(name, " ")
	var c jetstream.Consumer
	err := w.persist(func() (err error) {
		c, err = s.Consumer(ctx, durable)
		return err
	})
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("info of consumer %s of %s: %w", durable, stream, err)
	}
	batch, err := c.FetchNoWait(1 + w.r.IntN(30))
	if err != nil {
		return fmt.Errorf("fetch %s of %s: %w", durable, stream, err)
	}
	got, acked := 0, 0
	for m := range batch.Messages() {
		got++
		var err error
		switch w.r.IntN(6) {
		case 0: // left
		case 1:
			err = m.Nak()
		case 2:
			err = m.Term()
		default:
			err = m.DoubleAck(ctx)
			acked++
		}
		if err != nil {
			return fmt.Errorf("answer a message of %s of %s: %w", durable, stream, err)
		}
	}
	return w.answered(fmt.Sprintf("consume %d by %s of %s, %d acknowledged", got, durable, stream, acked), nil)
}
