package jetstream

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/broker"
)

// However long the log is, a start holds no more of it in memory than
// publishing does, and it keeps the log until all streams have had their part.
func TestReplayKeepsTablesSmall(t *testing.T) {
	dir := t.TempDir()
	const streams, each, size = 3, 60, 16 << 10
	n := startNode(t, dir) // whose budgets are larger than all of it
	_, js := n.connect()
	for i := range streams {
		createStream(t, js, jetstream.StreamConfig{Name: fmt.Sprint("S", i), Subjects: []string{fmt.Sprint("s.", i)}})
	}
	for range each {
		for i := range streams {
			must(js.Publish(context.Background(), fmt.Sprint("s.", i), make([]byte, size)))
		}
	}
	if held := n.e.tableBytes.Load(); held < streams*each*size {
		t.Fatalf("tables of %d octets, the test wants them all in the log", held)
	}
	n.crash()

	const budget = 256 << 10
	srv := must(broker.New(broker.Options{Host: "127.0.0.1", Port: -1, JetStream: true}))
	e := newEngine(Options{Account: srv.Account(), Dir: dir, SegmentSize: 1 << 20, TableBudget: budget})
	if err := e.recover(); err != nil {
		t.Fatal(err)
	}
	if held, most := e.tableBytes.Load(), tableBurst*budget+e.checkEvery()+2*size; held > most {
		t.Errorf("tables of %d octets after the replay, want %d at most", held, most)
	}
	if oldest := e.wal.Oldest(); oldest != 1 {
		t.Errorf("the log begins with record %d before the streams serve", oldest)
	}
	// To open the file of a large store takes its time.
	if open := e.openStores.Load(); open != streams {
		t.Errorf("%d stores are open, want all %d, so that none is opened twice", open, streams)
	}
	if err := e.release(); err != nil { // as if it was killed in the middle of its start
		t.Fatal(err)
	}

	n = startNode(t, dir)
	for i := range streams {
		s, ok := n.e.Stream(fmt.Sprint("S", i))
		if !ok {
			t.Fatalf("stream %d is gone", i)
		}
		if st := s.State(); st.Msgs != each || st.Last != each {
			t.Errorf("stream %d: %+v", i, st)
		}
	}
}

// The budget of tables is for all streams together.
func TestTablesShareBudget(t *testing.T) {
	const streams, size, budget = 6, 8 << 10, 32 << 10
	n := startNode(t, t.TempDir(), func(o *Options) { o.TableBudget = budget })
	_, admin := n.connect()
	for i := range streams {
		createStream(t, admin, jetstream.StreamConfig{Name: fmt.Sprint("S", i), Subjects: []string{fmt.Sprint("s.", i)}})
	}
	var wg sync.WaitGroup
	for i := range streams {
		_, js := n.connect()
		wg.Go(func() {
			for range 40 {
				if _, err := js.Publish(context.Background(), fmt.Sprint("s.", i), make([]byte, size)); err != nil {
					t.Error(err)
					return
				}
				// Beside what a burst may take: what streams with small tables may add,
				// and one message of each that was on its way.
				if held, most := n.e.tableBytes.Load(), tableBurst*budget+budget/4+n.e.checkEvery()+2*streams*size; held > most {
					t.Errorf("tables of %d octets, want %d at most", held, most)
				}
			}
		})
	}
	wg.Wait()
	eventually(t, "tables within the budget", func() bool { return n.e.tableBytes.Load() <= budget })
	sum := int64(0)
	for _, s := range n.e.Streams() {
		s.mu.Lock()
		if held := s.store.TableBytes(); s.tableBytes.Load() != held {
			t.Errorf("stream %s is counted with %d octets and has %d", s.name, s.tableBytes.Load(), held)
		}
		sum += s.tableBytes.Load()
		s.mu.Unlock()
	}
	for i := range streams {
		ask(t, admin.Conn(), fmt.Sprint("STREAM.DELETE.S", i), "")
	}
	if held := n.e.tableBytes.Load(); held != 0 {
		t.Errorf("%d octets are counted of streams that are gone; it were %d", held, sum)
	}
}

// Streams that are hardly used do not wait for the checkpoints of busy ones.
func TestSmallTablesPass(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "BUSY", Subjects: []string{"busy"}})
	createStream(t, js, jetstream.StreamConfig{Name: "CALM", Subjects: []string{"calm"}})
	busy, _ := n.e.Stream("BUSY")
	calm, _ := n.e.Stream("CALM")
	busy.tableBytes.Store(n.e.o.TableBudget)
	n.e.tableGate.set(true)
	n.e.pass(calm) // would hang
	done := make(chan struct{})
	go func() {
		n.e.pass(busy)
		close(done)
	}()
	select {
	case <-done:
		t.Error("the publisher of a large table does not wait")
	case <-time.After(50 * time.Millisecond):
	}
	n.e.tableGate.set(false)
	<-done
	busy.tableBytes.Store(0)
}
