package jetstream

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// within fails the test if fn takes longer than anything but a deadlock does.
func within(t *testing.T, what string, fn func()) {
	t.Helper()
	stuck := time.AfterFunc(10*time.Second, func() { panic(what + " does not end") }) // with all stacks
	defer stuck.Stop()
	fn()
}

// A stream can be deleted while it is being checkpointed.
func TestDeleteDuringCheckpoint(t *testing.T) {
	for _, interval := range []time.Duration{0, 5 * time.Millisecond} {
		t.Run(fmt.Sprint(interval), func(t *testing.T) {
			n := startNode(t, t.TempDir(), func(o *Options) { o.SyncInterval = interval })
			_, js := n.connect()
			ctx := testContext(t)
			for i := range 20 {
				createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
				publishN(t, js, "s", 10)
				s := must2(n.e.Stream("S"))
				checked := make(chan error, 1)
				began := make(chan struct{})
				go func() {
					close(began)
					// About as long as a commit takes, more or less.
					time.Sleep(time.Duration(i) * 100 * time.Microsecond)
					checked <- s.checkpoint()
				}()
				<-began
				within(t, "deleting a stream", func() {
					if err := js.DeleteStream(ctx, "S"); err != nil {
						t.Error(err)
					}
					if err := <-checked; err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}

// A stream may come to capture what its own consumer delivers. Interest in the
// consumer's subject then changes under the stream's lock.
func TestCaptureOwnDeliveries(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	ctx := testContext(t)
	cfg := jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, MaxMsgs: 100}
	createStream(t, js, cfg)
	publishN(t, js, "s", 3)
	old := must(nc.JetStream())
	if _, err := old.AddConsumer("S", &nats.ConsumerConfig{Durable: "P", DeliverSubject: "out.x", AckPolicy: nats.AckNonePolicy}); err != nil {
		t.Fatal(err)
	}
	cfg.Subjects = []string{"s", "out.>"}
	within(t, "updating a stream", func() {
		if _, err := js.UpdateStream(ctx, cfg); err != nil {
			t.Error(err)
		}
	})
	s := must2(n.e.Stream("S"))
	within(t, "delivering", func() {
		for s.DurableState().Last < 20 {
			time.Sleep(time.Millisecond) // deliveries come back as messages
		}
	})
	cfg.Subjects = []string{"s"}
	within(t, "updating a stream", func() {
		if _, err := js.UpdateStream(ctx, cfg); err != nil {
			t.Error(err)
		}
	})
	cfg.Subjects = []string{"s", "out.>"}
	within(t, "deleting a stream", func() {
		if _, err := js.UpdateStream(ctx, cfg); err != nil {
			t.Error(err)
		}
		if err := js.DeleteStream(ctx, "S"); err != nil {
			t.Error(err)
		}
	})
}

// A consumer that was deleted does not come back in place of one of the same
// name that keeps no state.
func TestConsumerReplacedByMemory(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	ctx := testContext(t)
	s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}))
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteConsumer(ctx, "C"); err != nil {
		t.Fatal(err)
	}
	must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy, MemoryStorage: true}))
	n.stop()
	n = startNode(t, dir)
	if k := must2(n.e.Stream("S")).NumConsumers(); k != 0 {
		t.Errorf("%d consumers", k)
	}
}
