package consumer

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"petiole/internal/jetstream/api"
)

// model is what a consumer with acknowledgements has to do, without the means
// to do it fast.
type model struct {
	*rig
	rt       *rapid.T
	cfg      api.ConsumerConfig
	exists   map[uint64]string
	attempts map[uint64]uint64 // deliveries by sequence
	first    map[uint64]uint64 // consumer sequence of the first
	pend     map[uint64]bool
	given    map[uint64]bool // given up after too many attempts
	done     map[uint64]bool
	lastS    uint64
	floorD   uint64
	floorS   uint64
	dseq     uint64
	asked    int // messages that requests still allow for
	seen     int
	advised  int
	snap     []byte
}

func (m *model) fatalf(f string, args ...any) { m.rt.Helper(); m.rt.Fatalf(f, args...) }

func (m *model) wants(s string) bool { return m.cfg.FilterSubject == "" || s == m.cfg.FilterSubject }

func (m *model) low() (seq uint64, ok bool) {
	for s := range m.pend {
		if !ok || s < seq {
			seq, ok = s, true
		}
	}
	return seq, ok
}

// drop takes a message out of pend and moves the floor as it has to.
func (m *model) drop(seq uint64) {
	if !m.pend[seq] {
		return
	}
	l, _ := m.low()
	delete(m.pend, seq)
	if l == seq || len(m.pend) == 0 {
		m.setFloor()
	}
}

func (m *model) setFloor() {
	if l, ok := m.low(); ok {
		m.floorD, m.floorS = m.first[l]-1, l-1
	} else {
		m.floorD, m.floorS = m.dseq, m.lastS
	}
}

// observe checks what the machine has just done.
func (m *model) observe() {
	for _, d := range m.sink.out[m.seen:] {
		seq, subj := d.ref.Seq, d.msg.Subject
		if m.exists[seq] != subj {
			m.fatalf("delivered %d, which is gone", seq)
		}
		if !m.wants(subj) {
			m.fatalf("delivered %d on %s against the filter", seq, subj)
		}
		if m.done[seq] || m.given[seq] {
			m.fatalf("delivered %d again after it was done", seq)
		}
		if m.attempts[seq]++; m.attempts[seq] != d.ref.Deliveries {
			m.fatalf("delivery count of %d is %d, want %d", seq, d.ref.Deliveries, m.attempts[seq])
		}
		if m.cfg.MaxDeliver > 0 && d.ref.Deliveries > uint64(m.cfg.MaxDeliver) {
			m.fatalf("delivery %d of %d", d.ref.Deliveries, seq)
		}
		if m.dseq++; d.ref.ConsumerSeq != m.dseq {
			m.fatalf("consumer sequence %d, want %d", d.ref.ConsumerSeq, m.dseq)
		}
		if d.ref.Deliveries == 1 {
			if len(m.pend) >= m.cfg.MaxAckPending {
				m.fatalf("delivered %d with %d pending", seq, len(m.pend))
			}
			for s := m.lastS + 1; s < seq; s++ {
				if subj, ok := m.exists[s]; ok && m.wants(subj) {
					m.fatalf("delivered %d before %d", seq, s)
				}
			}
			m.lastS = seq
			m.first[seq] = m.dseq
			m.pend[seq] = true
		} else if !m.pend[seq] {
			m.fatalf("delivered %d again, which is not pending", seq)
		}
		m.asked--
	}
	m.seen = len(m.sink.out)
	for _, a := range m.sink.advisories[m.advised:] {
		if a.Type == api.AdvisoryMaxDeliver {
			if !m.pend[a.StreamSeq] || a.Deliveries != m.attempts[a.StreamSeq] || a.Deliveries != uint64(m.cfg.MaxDeliver) {
				m.fatalf("gave %d up after %d attempts of %d", a.StreamSeq, a.Deliveries, m.attempts[a.StreamSeq])
			}
			m.given[a.StreamSeq] = true
			delete(m.pend, a.StreamSeq) // the floor stays
		}
	}
	m.advised = len(m.sink.advisories)
	if m.asked < 0 {
		m.fatalf("more delivered than asked for")
	}
}

// check compares the machine's description of itself with the model.
func (m *model) check() {
	in := m.m.Info(m.now)
	pending, redelivered := 0, 0
	for s, subj := range m.exists {
		if s > m.lastS && m.wants(subj) {
			pending++
		}
		if (m.pend[s] && m.attempts[s] > 1) || m.given[s] {
			redelivered++
		}
	}
	if m.cfg.MaxDeliver == 1 {
		redelivered = 0
	}
	want := fmt.Sprintf("delivered %d/%d floor %d/%d ack %d redelivered %d pending %d",
		m.dseq, m.lastS, m.floorD, m.floorS, len(m.pend), redelivered, pending)
	got := fmt.Sprintf("delivered %d/%d floor %d/%d ack %d redelivered %d pending %d",
		in.Delivered.Consumer, in.Delivered.Stream, in.AckFloor.Consumer, in.AckFloor.Stream,
		in.NumAckPending, in.NumRedelivered, in.NumPending)
	if got != want {
		m.fatalf("info\n%s, want\n%s", got, want)
	}
	for s, subj := range m.exists {
		want := m.wants(subj) && (s > m.lastS || m.pend[s] || m.given[s])
		if m.cfg.AckPolicy == api.AckExplicit && m.m.NeedsAck(s, subj) != want {
			m.fatalf("NeedsAck(%d) is %v", s, !want)
		}
	}
}

func (m *model) finish(seq uint64) {
	if m.cfg.AckPolicy != api.AckAll {
		if m.pend[seq] {
			m.done[seq] = true
			m.drop(seq)
		}
		delete(m.given, seq)
		return
	}
	if seq <= m.floorS {
		return
	}
	var d uint64
	for s := range m.pend {
		if s <= seq {
			m.done[s] = true
			d = max(d, m.first[s])
			delete(m.pend, s)
		}
	}
	if len(m.pend) == 0 {
		m.setFloor()
	} else if d > 0 {
		m.floorD, m.floorS = d, seq
	}
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := api.ConsumerConfig{
			Durable: "C", AckPolicy: rapid.SampledFrom([]api.AckPolicy{api.AckExplicit, api.AckExplicit, api.AckAll}).Draw(rt, "policy"),
			AckWait:       10 * time.Second,
			MaxAckPending: rapid.SampledFrom([]int{2, 5, 1000}).Draw(rt, "max pending"),
			MaxDeliver:    rapid.SampledFrom([]int{-1, -1, 1, 2, 3}).Draw(rt, "max deliver"),
			FilterSubject: rapid.SampledFrom([]string{"", "a"}).Draw(rt, "filter"),
		}
		if rapid.Bool().Draw(rt, "back off") && cfg.MaxDeliver == -1 {
			cfg.BackOff = []time.Duration{5 * time.Second, 20 * time.Second}
		}
		m := &model{
			rig: newRig(t).start(cfg), rt: rt, exists: map[uint64]string{}, attempts: map[uint64]uint64{},
			first: map[uint64]uint64{}, pend: map[uint64]bool{}, given: map[uint64]bool{}, done: map[uint64]bool{},
		}
		m.cfg = *m.m.Config()
		m.sink.hook = m.observe
		orig := *m.cfg.Clone()
		withRef := func(name string, fn func(d delivery)) func(*rapid.T) {
			return func(rt *rapid.T) {
				if len(m.sink.out) == 0 {
					rt.Skip("nothing delivered")
				}
				n := len(m.sink.out)
				fn(m.sink.out[rapid.IntRange(max(0, n-20), n-1).Draw(rt, name)])
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"publish": func(rt *rapid.T) {
				for range rapid.IntRange(1, 5).Draw(rt, "n") {
					s := rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "subject")
					m.exists[m.st.last+1] = s
					m.publish(s)
				}
			},
			"next": func(rt *rapid.T) {
				n := rapid.IntRange(1, 8).Draw(rt, "batch")
				if m.m.wait.len() < m.cfg.MaxWaiting {
					m.asked += n
				}
				m.next("in", strconv.Itoa(n))
			},
			"remove": func(rt *rapid.T) {
				if len(m.exists) == 0 {
					rt.Skip("no message")
				}
				seq := rapid.Uint64Range(1, m.st.last).Draw(rt, "seq")
				delete(m.exists, seq)
				delete(m.given, seq)
				m.drop(seq)
				m.remove(seq)
			},
			"ack": withRef("ack", func(d delivery) {
				m.finish(d.ref.Seq)
				m.m.Ack(m.now, d.ref, []byte(rapid.SampledFrom([]string{"", "+ACK", "+TERM"}).Draw(rt, "how")), "")
				m.pump()
			}),
			"nak": withRef("nak", func(d delivery) {
				m.m.Ack(m.now, d.ref, []byte(rapid.SampledFrom([]string{"-NAK", `-NAK {"delay":3000000000}`}).Draw(rt, "how")), "")
				m.pump()
			}),
			"progress": withRef("progress", func(d delivery) { m.m.Ack(m.now, d.ref, []byte("+WPI"), "") }),
			"pass": func(rt *rapid.T) {
				m.pass(time.Duration(rapid.IntRange(1, 12).Draw(rt, "seconds")) * time.Second)
			},
			"snapshot": func(*rapid.T) { m.snap = m.m.Snapshot() },
			"restart": func(*rapid.T) {
				// The log replayed from wherever the snapshot was taken, or from
				// the start with the stream as it is now; requests are lost.
				if m.snap == nil && m.st.last != uint64(len(m.st.msgs)) {
					return // where the consumer began cannot be found out any more
				}
				m.asked = 0
				m.restart(m.snap, orig)
			},
			"": func(*rapid.T) { m.check() },
		})
		// In the end everything is delivered, unless it was given up.
		m.asked += 100000
		for range 50 {
			m.m.Next(m.now, "in", []byte("1000"))
		}
		m.pump()
		answered := 0
		for range 200 {
			for ; answered < len(m.sink.out); answered++ {
				d := m.sink.out[answered]
				m.finish(d.ref.Seq)
				m.m.Ack(m.now, d.ref, nil, "")
				m.pump()
			}
			m.pass(21 * time.Second)
		}
		m.check()
		for s, subj := range m.exists {
			if m.wants(subj) && !m.done[s] && !m.given[s] && m.attempts[s] == 0 {
				m.fatalf("%d was never delivered", s)
			}
		}
		if len(m.pend) > 0 {
			m.fatalf("still pending: %v", slices.Sorted(func(yield func(uint64) bool) {
				for s := range m.pend {
					if !yield(s) {
						return
					}
				}
			}))
		}
	})
}
