package jetstream

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// However fast somebody acknowledges, a publish does not queue behind more than
// so many of the records.
func TestAcknowledgementsWait(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "QUEUE", Subjects: []string{"queue"}, Retention: jetstream.WorkQueuePolicy})
	const msgs = 4 * ackBacklog
	for range msgs {
		must(js.PublishAsync("queue", nil, jetstream.WithStallWait(20*time.Second))) // on a busy machine
	}
	<-js.PublishAsyncComplete()
	c := must(js.CreateConsumer(context.Background(), "QUEUE", jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1}))
	batch := must(c.Fetch(msgs, jetstream.FetchMaxWait(20*time.Second)))
	var got []jetstream.Msg
	for m := range batch.Messages() {
		got = append(got, m)
	}
	if len(got) != msgs {
		t.Fatalf("%d messages of %d: %v", len(got), msgs, batch.Error())
	}
	eventually(t, "deliveries applied", func() bool { return n.e.wal.Unapplied() == 0 })

	n.e.applyMu.Lock() // nothing is applied
	for _, m := range got {
		if err := m.Ack(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "acknowledgements under way", func() bool { return n.e.wal.Unapplied() > ackBacklog })
	time.Sleep(100 * time.Millisecond) // more would come
	waiting := n.e.wal.Unapplied()
	n.e.applyMu.Unlock()
	if waiting > ackBacklog+64+1 {
		t.Errorf("%d records wait to be applied, want %d and a few at most", waiting, ackBacklog)
	}
	if err := nc.FlushTimeout(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	s, _ := n.e.Stream("QUEUE")
	eventually(t, fmt.Sprint("all acknowledged, of ", msgs), func() bool { return s.State().Msgs == 0 })
}
