package jetstream

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
)

// interested makes a stream with interest retention and the consumers A and B, of
// which B has seen everything on its subjects.
func interested(t *testing.T, js jetstream.JetStream, msgs int, filterB string) {
	t.Helper()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.*"}, Retention: jetstream.InterestPolicy})
	for name, filter := range map[string]string{"A": "s.*", "B": filterB} {
		cfg := jetstream.ConsumerConfig{Durable: name, FilterSubject: filter, AckPolicy: jetstream.AckExplicitPolicy}
		must(js.CreateConsumer(testContext(t), "S", cfg))
	}
	for i := range msgs {
		must(js.PublishAsync("s."+string("ab"[i%2]), fmt.Append(nil, i)))
	}
	<-js.PublishAsyncComplete()
}

// When a consumer is deleted, what nobody needs any more goes in slices, over
// restarts, and only that.
func TestSweep(t *testing.T) {
	for _, end := range []string{"", "crash", "stop"} {
		t.Run("restart by "+end, func(t *testing.T) {
			dir := t.TempDir()
			slices := func(o *Options) { o.SweepSlice = 10 }
			n := startNode(t, dir, slices)
			_, js := n.connect()
			interested(t, js, 300, "s.b")
			s := must2(n.e.Stream("S"))
			if end != "" {
				// Applied and swept a little, but no further.
				s.mu.Lock()
				s.sweep.done = make(chan struct{}) // as if somebody did
				s.mu.Unlock()
				cmd := consumerDelete("A")
				must(s.changeConsumer(cmd, true))
				must(s.propose(sweepRecord(7)))
				must(s.propose(sweepRecord(20)))
				if st := s.State(); st.Msgs != 300-14 {
					t.Fatalf("%d messages after looking at 27", st.Msgs)
				}
				if end == "crash" {
					must(s.propose(sweepRecord(3)))
					if err := s.checkpoint(); err != nil {
						t.Fatal(err)
					}
					must(s.propose(sweepRecord(4)))
					n.crash()
				} else {
					n.stop()
				}
				n = startNode(t, dir, slices)
				_, js = n.connect()
				s = must2(n.e.Stream("S"))
				eventually(t, "it is swept", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.sweep.last == 0 })
			} else if err := js.DeleteConsumer(testContext(t), "S", "A"); err != nil {
				t.Fatal(err)
			}
			if st := s.State(); st.Msgs != 150 || st.First != 2 || st.Last != 300 {
				t.Errorf("left are %+v", st)
			}
			if info := must(must(js.Consumer(testContext(t), "S", "B")).Info(testContext(t))); info.NumPending != 150 {
				t.Errorf("B has %d messages to come", info.NumPending)
			}
			if err := s.checkpoint(); err != nil {
				t.Fatal(err)
			}
			n.crash()
			n = startNode(t, dir, slices)
			s = must2(n.e.Stream("S"))
			if st := s.State(); st.Msgs != 150 || s.sweep.last != 0 {
				t.Errorf("after a restart there are %+v, to be swept up to %d", st, s.sweep.last)
			}
			_, js = n.connect()
			if err := js.DeleteConsumer(testContext(t), "S", "B"); err != nil {
				t.Fatal(err)
			}
			if st := s.State(); st.Msgs != 0 || st.Last != 300 {
				t.Errorf("with no consumer there are %+v", st)
			}
		})
	}
}

// BenchmarkDeleteConsumer deletes a consumer of a million messages while another
// stream is published to, and reports the longest time that such a publish took.
func BenchmarkDeleteConsumer(b *testing.B) {
	const msgs = 1_000_000
	for range b.N {
		b.StopTimer()
		srv, err := broker.New(broker.Options{Host: "127.0.0.1", Port: -1})
		if err != nil {
			b.Fatal(err)
		}
		e, err := Open(Options{Account: srv.Account(), Dir: b.TempDir()})
		if err != nil {
			b.Fatal(err)
		}
		s := must(e.EnsureStream(api.StreamConfig{Name: "S", Subjects: []string{"s.*"}, Retention: api.InterestPolicy}))
		other := must(e.EnsureStream(api.StreamConfig{Name: "OTHER", Subjects: []string{"o"}}))
		for name, filter := range map[string]string{"A": "s.*", "B": "s.b"} {
			cfg := api.ConsumerConfig{Durable: name, Name: name, FilterSubject: filter, AckPolicy: api.AckExplicit}
			must(s.changeConsumer(consumerCreate(b, name, &cfg), true))
		}
		data := make([]byte, 100)
		for i := range msgs {
			s.publish(fmt.Append(nil, "s.", string("ab"[i%2])), nil, nil, data)
			if i%64 == 63 {
				e.Kick()
			}
		}
		e.Kick()
		if err := s.e.Checkpoint(); err != nil {
			b.Fatal(err)
		}
		stop, longest := make(chan struct{}), make(chan time.Duration)
		go func() {
			most := time.Duration(0)
			for {
				select {
				case <-stop:
					longest <- most
					return
				default:
				}
				t := time.Now()
				must(other.propose(publishRecord("o")))
				most = max(most, time.Since(t))
			}
		}()
		time.Sleep(100 * time.Millisecond)
		b.StartTimer()
		if err := e.removeConsumer(s, "A", time.Time{}); err != nil {
			b.Fatal(err)
		}
		answered := b.Elapsed()
		for s.State().Msgs != msgs/2 {
			time.Sleep(time.Millisecond)
		}
		b.StopTimer()
		close(stop)
		b.ReportMetric(float64((<-longest).Microseconds())/1000, "ms-longest-publish")
		b.ReportMetric(float64(answered.Microseconds())/1000, "ms-to-answer")
		if err := e.close(false); err != nil {
			b.Fatal(err)
		}
	}
}
