package jetstream

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func createStream(t *testing.T, js jetstream.JetStream, cfg jetstream.StreamConfig) jetstream.Stream {
	t.Helper()
	s, err := js.CreateStream(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func publishN(t *testing.T, js jetstream.JetStream, subject string, n int) {
	t.Helper()
	for i := range n {
		if _, err := js.PublishAsync(subject, fmt.Appendf(nil, "%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(patience):
		t.Fatal("publishing takes too long")
	}
}

func TestPullConsumer(t *testing.T) {
	for _, storage := range []jetstream.StorageType{jetstream.FileStorage, jetstream.MemoryStorage} {
		t.Run(storage.String(), func(t *testing.T) {
			n := startNode(t, t.TempDir())
			_, js := n.connect()
			ctx := testContext(t)
			s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.*"}, Storage: storage})
			publishN(t, js, "s.a", 50)
			c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy})
			if err != nil {
				t.Fatal(err)
			}
			batch, err := c.Fetch(20)
			if err != nil {
				t.Fatal(err)
			}
			i := 0
			for m := range batch.Messages() {
				if string(m.Data()) != fmt.Sprint(i) || m.Subject() != "s.a" {
					t.Fatalf("message %d: %q on %q", i, m.Data(), m.Subject())
				}
				if err := m.DoubleAck(ctx); err != nil {
					t.Fatal(err)
				}
				i++
			}
			if i != 20 || batch.Error() != nil {
				t.Fatalf("%d messages: %v", i, batch.Error())
			}
			info, err := c.Info(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if info.AckFloor.Stream != 20 || info.NumPending != 30 || info.NumAckPending != 0 {
				t.Fatalf("after 20: %+v", info)
			}
			var got atomic.Int32
			done := make(chan struct{})
			cc, err := c.Consume(func(m jetstream.Msg) {
				_ = m.Ack()
				if got.Add(1) == 40 {
					close(done)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			defer cc.Stop()
			publishN(t, js, "s.b", 10) // delivered as they come
			select {
			case <-done:
			case <-time.After(patience):
				t.Fatalf("%d of 40 messages", got.Load())
			}
		})
	}
}

func TestPushAndOrderedConsumers(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 300)

	old, err := nc.JetStream(nats.MaxWait(patience))
	if err != nil {
		t.Fatal(err)
	}
	sub, err := old.SubscribeSync("s", nats.AckExplicit(), nats.DeliverAll())
	if err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		m, err := sub.NextMsg(patience)
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if string(m.Data) != fmt.Sprint(i) {
			t.Fatalf("message %d is %q", i, m.Data)
		}
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
	}

	oc, err := s.OrderedConsumer(testContext(t), jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	it, err := oc.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer it.Stop()
	for i := range 300 {
		m, err := it.Next()
		if err != nil {
			t.Fatal(err)
		}
		if string(m.Data()) != fmt.Sprint(i) {
			t.Fatalf("ordered message %d is %q", i, m.Data())
		}
	}
}

func TestConsumerStateSurvives(t *testing.T) {
	for _, checkpoint := range []bool{true, false} {
		t.Run(fmt.Sprintf("checkpoint=%v", checkpoint), func(t *testing.T) {
			dir := t.TempDir()
			n := startNode(t, dir)
			_, js := n.connect()
			ctx := testContext(t)
			s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
			publishN(t, js, "s", 10)
			c := must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}))
			if !checkpoint { // the consumer is in the image, its acknowledgements in the log
				if err := n.e.Checkpoint(); err != nil {
					t.Fatal(err)
				}
			}
			batch := must(c.Fetch(5))
			for m := range batch.Messages() {
				if err := m.DoubleAck(ctx); err != nil {
					t.Fatal(err)
				}
			}
			n.end(checkpoint)

			n = startNode(t, dir)
			_, js = n.connect()
			c, err := js.Consumer(ctx, "S", "C")
			if err != nil {
				t.Fatal(err)
			}
			m, err := c.Next()
			if err != nil {
				t.Fatal(err)
			}
			if string(m.Data()) != "5" {
				t.Fatalf("the first message after the restart is %q, want 5", m.Data())
			}
			if info := must(c.Info(ctx)); info.AckFloor.Stream != 5 {
				t.Fatalf("acknowledgement floor %+v", info.AckFloor)
			}
		})
	}
}

func TestKeyValue(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	ctx := testContext(t)
	kv, err := js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "B", History: 3})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if _, err := kv.Put(ctx, "a.b", fmt.Appendf(nil, "v%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	e, err := kv.Get(ctx, "a.b")
	if err != nil || string(e.Value()) != "v4" || e.Revision() != 5 {
		t.Fatalf("get: %v, %v", e, err)
	}
	if h := must(kv.History(ctx, "a.b")); len(h) != 3 || string(h[0].Value()) != "v2" {
		t.Fatalf("history: %v", h)
	}
	if _, err := kv.Create(ctx, "a.b", nil); !errors.Is(err, jetstream.ErrKeyExists) {
		t.Fatalf("create of an existing key: %v", err)
	}
	if _, err := kv.Update(ctx, "a.b", []byte("x"), 3); err == nil {
		t.Fatal("update of an old revision")
	}
	if _, err := kv.Update(ctx, "a.b", []byte("x"), 5); err != nil {
		t.Fatal(err)
	}
	w, err := kv.WatchAll(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if u := <-w.Updates(); u == nil || string(u.Value()) != "x" {
		t.Fatalf("first update: %v", u)
	}
	if u := <-w.Updates(); u != nil {
		t.Fatalf("end of the first values: %v", u)
	}
	if err := kv.Delete(ctx, "a.b"); err != nil {
		t.Fatal(err)
	}
	if u := <-w.Updates(); u == nil || u.Operation() != jetstream.KeyValueDelete {
		t.Fatalf("update by delete: %v", u)
	}
	if _, err := kv.Get(ctx, "a.b"); !errors.Is(err, jetstream.ErrKeyNotFound) {
		t.Fatalf("get of a deleted key: %v", err)
	}
	if _, err := kv.Create(ctx, "a.b", []byte("again")); err != nil {
		t.Fatalf("create after delete: %v", err)
	}
	if err := kv.Purge(ctx, "a.b"); err != nil {
		t.Fatal(err)
	}
	if h := must(kv.History(ctx, "a.b")); len(h) != 1 || h[0].Operation() != jetstream.KeyValuePurge {
		t.Fatalf("history after purge: %v", h)
	}
	if keys, err := kv.Keys(ctx); !errors.Is(err, jetstream.ErrNoKeysFound) {
		t.Fatalf("keys: %v, %v", keys, err)
	}
}

func TestObjectStore(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	ctx := testContext(t)
	store, err := js.CreateObjectStore(ctx, jetstream.ObjectStoreConfig{Bucket: "O"})
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 1<<20)
	_, _ = rand.Read(data)
	if _, err := store.PutBytes(ctx, "x", data); err != nil {
		t.Fatal(err)
	}
	got, err := store.GetBytes(ctx, "x")
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("get: %d octets, %v", len(got), err)
	}
	list, err := store.List(ctx)
	if err != nil || len(list) != 1 {
		t.Fatalf("list: %v, %v", list, err)
	}
	if err := store.Delete(ctx, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Get(ctx, "x"); !errors.Is(err, jetstream.ErrObjectNotFound) {
		t.Fatalf("get of a deleted object: %v", err)
	}
}

func TestRetentionByConsumers(t *testing.T) {
	for _, tc := range []struct {
		name   string
		policy jetstream.RetentionPolicy
		kept   uint64 // after one of two interested consumers acknowledged 3 of 5
	}{
		{"workqueue", jetstream.WorkQueuePolicy, 2},
		{"interest", jetstream.InterestPolicy, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			n := startNode(t, dir)
			_, js := n.connect()
			ctx := testContext(t)
			s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Retention: tc.policy})
			c := must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}))
			publishN(t, js, "s", 5)
			for m := range must(c.Fetch(3)).Messages() {
				if err := m.DoubleAck(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if st := must(s.Info(ctx)).State; st.Msgs != tc.kept || st.LastSeq != 5 {
				t.Fatalf("after 3 acknowledgements: %+v", st)
			}
			n.crash()
			n = startNode(t, dir)
			if st := must2(n.e.Stream("S")).DurableState(); st.Msgs != tc.kept || st.Last != 5 {
				t.Fatalf("after the restart: %+v", st)
			}
		})
	}
}

func TestMaxAge(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	ctx, cancel := context.WithTimeout(testContext(t), patience)
	defer cancel()
	s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, MaxAge: 150 * time.Millisecond})
	publishN(t, js, "s", 20)
	gone := make(chan struct{}, 1)
	cancelWatch := must2(n.e.Stream("S")).Watch(func() {
		select {
		case gone <- struct{}{}:
		default:
		}
	})
	defer cancelWatch()
	for {
		st := must(s.Info(ctx)).State
		if st.Msgs == 0 {
			if st.FirstSeq != 21 || st.LastSeq != 20 {
				t.Fatalf("after expiry: %+v", st)
			}
			return
		}
		select {
		case <-gone:
		case <-ctx.Done():
			t.Fatalf("messages did not expire: %+v", st)
		}
	}
}
