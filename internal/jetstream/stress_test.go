package jetstream

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
)

// Everything at once: publishers, consumers that come and go, limits, purges,
// checkpoints, a stream created and deleted. Whatever was acknowledged and not
// removed is there after a kill, in the order of its sequence numbers.
func TestEverythingAtOnce(t *testing.T) {
	dir := t.TempDir()
	tweak := func(o *Options) { o.SegmentSize, o.WALBudget, o.TableBudget = 64<<10, 256<<10, 64<<10 }
	n := startNode(t, dir, tweak)
	_, admin := n.connect()
	createStream(t, admin, jetstream.StreamConfig{Name: "KEEP", Subjects: []string{"keep.*"}})
	createStream(t, admin, jetstream.StreamConfig{Name: "WORK", Subjects: []string{"work"}, Retention: jetstream.WorkQueuePolicy})
	createStream(t, admin, jetstream.StreamConfig{Name: "LAST", Subjects: []string{"last.*"}, MaxMsgsPerSubject: 1, AllowDirect: true})
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()

	var wg sync.WaitGroup
	var mu sync.Mutex
	kept := map[uint64]string{}
	var worked, done atomic.Int64
	run := func(fn func(js jetstream.JetStream) error) {
		_, js := n.connect()
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := fn(js); err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range 2 {
		count := 0
		run(func(js jetstream.JetStream) error {
			var batch []jetstream.PubAckFuture
			var texts []string
			for range 20 {
				count++
				text := fmt.Sprintf("%d-%d", i, count)
				f, err := js.PublishAsync(fmt.Sprintf("keep.%d", i), append([]byte(text), make([]byte, 500)...))
				if err != nil {
					return err
				}
				batch, texts = append(batch, f), append(texts, text)
			}
			for k, f := range batch {
				select {
				case a := <-f.Ok():
					mu.Lock()
					kept[a.Sequence] = texts[k]
					mu.Unlock()
				case err := <-f.Err():
					return err
				}
			}
			return nil
		})
	}
	run(func(js jetstream.JetStream) error {
		_, err := js.Publish(context.Background(), "work", nil)
		if err == nil {
			worked.Add(1)
		}
		return err
	})
	run(func(js jetstream.JetStream) error {
		c, err := js.CreateOrUpdateConsumer(ctx, "WORK", jetstream.ConsumerConfig{Durable: "W", AckPolicy: jetstream.AckExplicitPolicy})
		if err != nil {
			return err
		}
		batch, err := c.Fetch(10, jetstream.FetchMaxWait(50*time.Millisecond))
		if err != nil {
			return err
		}
		for m := range batch.Messages() {
			if err := m.DoubleAck(context.Background()); err != nil {
				return err
			}
			done.Add(1)
		}
		return nil
	})
	k := 0
	run(func(js jetstream.JetStream) error {
		k++
		_, err := js.Publish(context.Background(), fmt.Sprintf("last.%d", k%5), fmt.Append(nil, k))
		return err
	})
	run(func(js jetstream.JetStream) error {
		s, err := js.Stream(ctx, "KEEP")
		if err != nil {
			return err
		}
		oc, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
		if err != nil {
			return err
		}
		batch, err := oc.Fetch(50, jetstream.FetchMaxWait(50*time.Millisecond))
		if err != nil {
			return err
		}
		for range batch.Messages() {
		}
		return nil
	})
	run(func(js jetstream.JetStream) error {
		if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "TEMP", Subjects: []string{"temp"}}); err != nil {
			return err
		}
		if _, err := js.Publish(ctx, "temp", nil); err != nil {
			return err
		}
		return js.DeleteStream(context.Background(), "TEMP")
	})
	wg.Go(func() {
		for ctx.Err() == nil {
			if err := n.e.Checkpoint(); err != nil {
				t.Error(err)
				return
			}
		}
	})
	wg.Wait()
	n.crash()

	n = startNode(t, dir, tweak)
	found := 0
	next := uint64(1)
	err := must2(n.e.Stream("KEEP")).Range(1, func(m storage.Message) bool {
		if m.Seq != next {
			t.Errorf("sequence %d follows %d", m.Seq, next-1)
		}
		next++
		if want, ok := kept[m.Seq]; ok {
			found++
			if string(m.Data[:len(want)]) != want {
				t.Errorf("message %d is %q, want %q", m.Seq, m.Data[:len(want)], want)
			}
		}
		return true
	})
	if err != nil || found != len(kept) {
		t.Errorf("%d of %d acknowledged messages: %v", found, len(kept), err)
	}
	// What was acknowledged twice over is gone; the rest waits.
	if left, most := int64(must2(n.e.Stream("WORK")).State().Msgs), worked.Load()-done.Load(); left > most+1 {
		t.Errorf("%d messages left in the work queue, want %d", left, most)
	}
	if st := must2(n.e.Stream("LAST")).State(); st.Msgs != uint64(min(k, 5)) {
		t.Errorf("last values: %+v", st)
	}
	if _, ok := n.e.Stream("TEMP"); ok {
		_, js := n.connect()
		if err := js.DeleteStream(context.Background(), "TEMP"); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			t.Error(err)
		}
	}
	t.Logf("%d kept, %d worked, %d done, %d last", len(kept), worked.Load(), done.Load(), k)
}
