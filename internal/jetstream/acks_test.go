package jetstream

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
	"petiole/storage/wal"
)

// However fast somebody acknowledges, a publish does not queue behind more than
// so many of the records.
func TestAcknowledgementsWait(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "QUEUE", Subjects: []string{"queue"}, Retention: jetstream.WorkQueuePolicy})
	const msgs = 4 * ackBacklog
	for range msgs {
		must(js.PublishAsync("queue", nil, jetstream.WithStallWait(patience))) // on a busy machine
	}
	<-js.PublishAsyncComplete()
	c := must(js.CreateConsumer(context.Background(), "QUEUE", jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1}))
	batch := must(c.Fetch(msgs, jetstream.FetchMaxWait(patience)))
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
	if err := nc.FlushTimeout(patience); err != nil {
		t.Fatal(err)
	}
	s, _ := n.e.Stream("QUEUE")
	eventually(t, fmt.Sprint("all acknowledged, of ", msgs), func() bool { return s.State().Msgs == 0 })
}

// fullProposer has no room for lazy records while full is set.
type fullProposer struct {
	proposer
	full    atomic.Bool
	refused atomic.Int64
}

func (p *fullProposer) ProposeLazy(g storage.GroupID, tag any, parts ...[]byte) error {
	if p.full.Load() {
		p.refused.Add(1)
		return fmt.Errorf("append: %w", wal.ErrNoSpace)
	}
	return p.proposer.ProposeLazy(g, tag, parts...)
}

// What has been acknowledged while the log had no room at all leaves a work queue as
// soon as there is.
func TestAcknowledgedWithoutRoom(t *testing.T) {
	for _, memory := range []bool{false, true} {
		t.Run(fmt.Sprintf("state of the consumer in memory %v", memory), func(t *testing.T) {
			n := startNode(t, t.TempDir())
			full := &fullProposer{proposer: n.e.prop}
			n.e.prop = full
			nc, js := n.connect()
			createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Retention: jetstream.WorkQueuePolicy})
			publishN(t, js, "s", 5)
			c := must(js.CreateConsumer(testContext(t), "S", jetstream.ConsumerConfig{Durable: "C", MemoryStorage: memory}))
			batch := must(c.Fetch(5))
			for i := range 5 {
				m := <-batch.Messages()
				if i == 0 {
					continue // it awaits its acknowledgement
				}
				full.full.Store(true)
				if err := m.Ack(); err != nil {
					t.Fatal(err)
				}
			}
			if err := nc.Flush(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the log has no room for any", func() bool { return full.refused.Load() >= 4 })
			s := must2(n.e.Stream("S"))
			if got := s.State().Msgs; got != 5 {
				t.Fatalf("%d messages", got)
			}
			full.full.Store(false)
			eventually(t, "they are gone", func() bool { return s.State().Msgs == 1 })
		})
	}
}

// What waits for room is not all tried again whenever something happens.
func TestManyAcknowledgedWithoutRoom(t *testing.T) {
	const msgs = 500
	n := startNode(t, t.TempDir())
	full := &fullProposer{proposer: n.e.prop}
	n.e.prop = full
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Retention: jetstream.WorkQueuePolicy})
	publishN(t, js, "s", msgs)
	c := must(js.CreateConsumer(testContext(t), "S", jetstream.ConsumerConfig{Durable: "C", MemoryStorage: true}))
	batch := must(c.Fetch(msgs))
	full.full.Store(true)
	for range msgs {
		if err := (<-batch.Messages()).Ack(); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	s := must2(n.e.Stream("S"))
	waiting := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.unlogged)
	}
	eventually(t, "all wait", func() bool { return waiting() == msgs })
	if got := full.refused.Load(); got > msgs*msgs/10 {
		t.Errorf("%d of %d messages were tried", got, msgs)
	}
	full.full.Store(false)
	eventually(t, "they are gone", func() bool { return s.State().Msgs == 0 })
}

// An acknowledgement that is answered is durable, even if the log had no room for
// it when it was made first, and it was repeated.
func TestConfirmedWithoutRoom(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	full := &fullProposer{proposer: n.e.prop}
	n.e.prop = full
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 3)
	must(js.CreateConsumer(testContext(t), "S", jetstream.ConsumerConfig{Durable: "C"}))
	c := must(js.Consumer(testContext(t), "S", "C"))
	m := must(c.Next())
	answers := must(nc.SubscribeSync("answers"))
	ack := func() {
		t.Helper()
		if err := nc.PublishRequest(m.Reply(), "answers", []byte("+ACK")); err != nil {
			t.Fatal(err)
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	full.full.Store(true)
	ack()
	ack()
	if got, err := answers.NextMsg(2 * spaceRetry); err == nil {
		t.Fatalf("answered without a record in the log: %q", got.Data)
	}
	full.full.Store(false)
	ack() // behind those that wait
	for range 3 {
		if _, err := answers.NextMsg(time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	n.crash()
	n = startNode(t, dir)
	_, js = n.connect()
	info := must(must(js.Consumer(testContext(t), "S", "C")).Info(testContext(t)))
	if info.AckFloor.Stream != 1 || info.NumAckPending != 0 {
		t.Errorf("after the crash the consumer has acknowledged up to %d, awaits %d", info.AckFloor.Stream, info.NumAckPending)
	}
}

// A consumer whose records wait for room takes no more acknowledgements than have
// room in memory, and goes on afterwards where it was.
func TestRecordsWaitingAreBounded(t *testing.T) {
	n := startNode(t, t.TempDir())
	full := &fullProposer{proposer: n.e.prop}
	n.e.prop = full
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 2)
	c := must(js.CreateConsumer(testContext(t), "S", jetstream.ConsumerConfig{Durable: "C"}))
	m := must(c.Next())
	full.full.Store(true)
	reply := strings.Repeat("r", 4000)
	s := must2(n.e.Stream("S"))
	waiting := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.consumers["C"].octets
	}
	for range maxWaiting / len(reply) * 2 {
		if err := nc.PublishRequest(m.Reply(), reply, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if got := waiting(); got < maxWaiting || got > maxWaiting+2*len(reply) {
		t.Errorf("%d octets wait, want about %d", got, maxWaiting)
	}
	full.full.Store(false)
	if _, err := c.Next(jetstream.FetchMaxWait(time.Minute)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing waits", func() bool { return waiting() == 0 })
}
