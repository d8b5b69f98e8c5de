package consumer

import (
	"errors"
	"fmt"
	"testing"

	"petiole/internal/jetstream/api"
	"petiole/storage"
)

// countSink counts deliveries and drops them.
type countSink struct {
	n, records, octets int
	last               AckRef
}

func (s *countSink) Deliver(_ string, reply []byte, m *storage.Message) {
	s.n++
	s.last = AckRef{Seq: m.Seq, Deliveries: 1}
}
func (s *countSink) Status(string, string, []byte)          {}
func (s *countSink) Record(cmd []byte, _ string)            { s.records++; s.octets += len(cmd) }
func (s *countSink) Interest(string) bool                   { return true }
func (s *countSink) Congested(string) bool                  { return false }
func (s *countSink) Advisory(string, *api.ConsumerAdvisory) {}
func (s *countSink) Acked(uint64, bool)                     {}

// BenchmarkPump delivers messages from memory to one pull request and
// acknowledges each.
func BenchmarkPump(b *testing.B) {
	for _, policy := range []api.AckPolicy{api.AckNone, api.AckExplicit} {
		for _, tail := range []bool{false, true} {
			b.Run(fmt.Sprintf("ack=%d/tail=%v", policy, tail), func(b *testing.B) {
				st := &fakeStore{}
				for range 1000 {
					st.append(1, "a.b.c", "payload of a message")
				}
				sink := &countSink{}
				cfg := api.ConsumerConfig{Durable: "C", AckPolicy: policy, MaxAckPending: -1}
				sc := api.StreamConfig{Name: "S"}
				if err := Defaults(&cfg, &sc, Limits{}, false); err != nil {
					b.Fatal(err)
				}
				m := New("C", &cfg, epoch, Env{Sink: sink, Messages: st, Stream: &sc})
				m.Start(epoch)
				m.Next(epoch, "in", []byte(`{"batch":1000000000}`))
				for m.Pump(epoch) {
				}
				b.ReportAllocs()
				for b.Loop() {
					if tail {
						seq := st.last + 1
						st.msgs = st.msgs[:0]
						st.append(1, "a.b.c", "payload of a message")
						m.MsgAppended(seq, "a.b.c")
						m.Pump(epoch)
						m.Ack(epoch, AckRef{Seq: seq, ConsumerSeq: seq, Deliveries: 1}, nil, "")
						continue
					}
					first := st.last + 1
					st.msgs = st.msgs[:0]
					for range 1000 {
						st.append(1, "a.b.c", "payload of a message")
						m.MsgAppended(st.last, "a.b.c")
					}
					for m.Pump(epoch) {
					}
					for s := first; s <= st.last; s++ {
						m.Ack(epoch, AckRef{Seq: s, ConsumerSeq: s, Deliveries: 1}, nil, "")
					}
				}
				if policy == api.AckExplicit && len(m.pend) > 1000 {
					b.Fatalf("%d pending", len(m.pend))
				}
			})
		}
	}
}

func FuzzRestore(f *testing.F) {
	cfg := explicit
	r := newRig(f, "a", "b", "c").start(cfg)
	f.Add(r.m.Snapshot())
	r.next("in", "3")
	r.ack(1, "", "")
	r.ack(0, "-NAK", "")
	r.m.skip, r.m.resume = []uint64{7, 9}, 12
	f.Add(r.m.Snapshot())
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Restore(b, r.env())
		if err != nil {
			if !errors.Is(err, storage.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		again := m.Snapshot()
		n, err := Restore(again, r.env())
		if err != nil {
			t.Fatalf("%x: %v", again, err)
		}
		if string(n.Snapshot()) != string(again) {
			t.Fatalf("%x comes back as %x", again, n.Snapshot())
		}
	})
}
