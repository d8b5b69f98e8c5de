package consumer

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/storage"
)

// fakeStore is a stream's messages in a slice, by sequence.
type fakeStore struct {
	msgs []storage.Message
	last uint64
	// ranged counts the messages that Range has handed out.
	ranged int
}

func (s *fakeStore) append(t int64, subject string, data string) uint64 {
	s.last++
	s.msgs = append(s.msgs, storage.Message{Seq: s.last, Time: t, Subject: subject, Data: []byte(data)})
	return s.last
}

func (s *fakeStore) at(seq uint64) int {
	return sort.Search(len(s.msgs), func(i int) bool { return s.msgs[i].Seq >= seq })
}

func (s *fakeStore) remove(seq uint64) (string, bool) {
	i := s.at(seq)
	if i == len(s.msgs) || s.msgs[i].Seq != seq {
		return "", false
	}
	subj := s.msgs[i].Subject
	s.msgs = slices.Delete(s.msgs, i, i+1)
	return subj, true
}

func (s *fakeStore) State() storage.State {
	st := storage.State{Msgs: uint64(len(s.msgs)), First: s.last + 1, Last: s.last}
	if len(s.msgs) > 0 {
		st.First = s.msgs[0].Seq
	}
	return st
}

func (s *fakeStore) Load(seq uint64) (storage.Message, error) {
	i := s.at(seq)
	if i == len(s.msgs) || s.msgs[i].Seq != seq {
		return storage.Message{}, fmt.Errorf("message %d: %w", seq, storage.ErrNotFound)
	}
	return s.msgs[i], nil
}

func (s *fakeStore) LoadNext(f storage.Filter, seq uint64) (storage.Message, error) {
	for _, m := range s.msgs[s.at(seq):] {
		if f.Match(m.Subject) {
			return m, nil
		}
	}
	return storage.Message{}, storage.ErrEOF
}

func (s *fakeStore) LoadLast(pattern string, limit uint64) (storage.Message, error) {
	for i := len(s.msgs) - 1; i >= 0; i-- {
		if m := s.msgs[i]; (limit == 0 || m.Seq <= limit) && storage.MatchSubject(pattern, m.Subject) {
			return m, nil
		}
	}
	return storage.Message{}, storage.ErrNotFound
}

func (s *fakeStore) Range(seq uint64, fn func(storage.Message) bool) error {
	for _, m := range s.msgs[s.at(seq):] {
		s.ranged++
		if !fn(m) {
			break
		}
	}
	return nil
}

func (s *fakeStore) Subjects(pattern string, fn func(string, storage.SubjectState) bool) {
	by := map[string]storage.SubjectState{}
	for _, m := range s.msgs {
		if pattern != "" && !storage.MatchSubject(pattern, m.Subject) {
			continue
		}
		st := by[m.Subject]
		if st.Msgs++; st.First == 0 {
			st.First = m.Seq
		}
		st.Last = m.Seq
		by[m.Subject] = st
	}
	for k, v := range by {
		if !fn(k, v) {
			return
		}
	}
}

func (s *fakeStore) NumPending(f storage.Filter, seq uint64) (n uint64) {
	for _, m := range s.msgs[s.at(seq):] {
		if f.Match(m.Subject) {
			n++
		}
	}
	return n
}

func (s *fakeStore) SeqAtTime(t int64) uint64 {
	for _, m := range s.msgs {
		if m.Time >= t {
			return m.Seq
		}
	}
	return s.last + 1
}

// delivery is a message that the sink was given.
type delivery struct {
	to  string
	ref AckRef
	msg storage.Message
}

// fakeSink remembers the effects.
type fakeSink struct {
	out        []delivery
	status     []string // "subject: header" with line ends as |
	records    [][]byte
	replies    []string // acknowledgement replies that wait for a record
	advisories []api.ConsumerAdvisory
	acked      []string
	deaf       map[string]bool
	busy       map[string]bool
	hook       func() // called after a delivery or an advisory
}

func (s *fakeSink) Deliver(subject string, reply []byte, m *storage.Message) {
	stream, cons, ref, ok := ParseAck(string(reply))
	if !ok || stream != "S" || cons != "C" {
		panic("bad reply subject " + string(reply))
	}
	c := *m
	c.Header = slices.Clone(m.Header)
	s.out = append(s.out, delivery{subject, ref, c})
	if s.hook != nil {
		s.hook()
	}
}

func (s *fakeSink) Status(subject, reply string, header []byte) {
	t := subject + ": " + strings.ReplaceAll(string(header), "\r\n", "|")
	if reply != "" {
		t += " reply=" + reply
	}
	s.status = append(s.status, t)
}

func (s *fakeSink) Record(cmd []byte, ackReply string) {
	s.records = append(s.records, slices.Clone(cmd))
	if ackReply != "" {
		s.replies = append(s.replies, ackReply)
	}
}

func (s *fakeSink) Interest(subject string) bool { return !s.deaf[subject] }

func (s *fakeSink) Congested(subject string) bool { return s.busy[subject] }

func (s *fakeSink) Advisory(_ string, a *api.ConsumerAdvisory) {
	s.advisories = append(s.advisories, *a)
	if s.hook != nil {
		s.hook()
	}
}

func (s *fakeSink) Acked(seq uint64, logged bool) {
	s.acked = append(s.acked, fmt.Sprintf("%d/%v", seq, logged))
}

// rig is a consumer "C" of stream "S" with a clock.
type rig struct {
	skew  func() time.Duration // of the wall clock; nil: none
	t     testing.TB
	st    *fakeStore
	sink  *fakeSink
	cfg   api.StreamConfig
	m     *Machine
	now   time.Time
	seenD int
	seenS int
	// removed are the messages removed before the n-th record.
	removed map[int][]storage.Message
}

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func newRig(t testing.TB, subjects ...string) *rig {
	r := &rig{
		t: t, st: &fakeStore{}, sink: &fakeSink{deaf: map[string]bool{}, busy: map[string]bool{}}, now: epoch,
		removed: map[int][]storage.Message{},
		cfg:     api.StreamConfig{Name: "S", Subjects: []string{"none.>"}},
	}
	for _, s := range subjects {
		r.st.append(r.now.UnixNano(), s, "data of "+s)
		r.now = r.now.Add(time.Second)
	}
	return r
}

func (r *rig) env() Env {
	return Env{Sink: r.sink, Messages: r.st, Stream: &r.cfg, Skew: r.skew}
}

// start makes the consumer, with the defaults of the API.
func (r *rig) start(cfg api.ConsumerConfig) *rig {
	r.t.Helper()
	if err := Defaults(&cfg, &r.cfg, Limits{}, false); err != nil {
		r.t.Fatal(err)
	}
	if err := Validate(&cfg, &r.cfg, Limits{}, nil); err != nil {
		r.t.Fatal(err)
	}
	r.m = New("C", &cfg, r.now, r.env())
	r.m.Start(r.now)
	r.pump()
	return r
}

func (r *rig) pump() {
	for r.m.Pump(r.now) {
	}
}

func (r *rig) publish(subjects ...string) {
	for _, s := range subjects {
		seq := r.st.append(r.now.UnixNano(), s, "data of "+s)
		r.m.MsgAppended(seq, s)
	}
	r.pump()
}

func (r *rig) next(reply, req string) {
	r.m.Next(r.now, reply, []byte(req))
	r.pump()
}

// remove removes a message from the stream.
func (r *rig) remove(seq uint64) bool {
	subj, ok := r.st.remove(seq)
	if ok {
		n := len(r.sink.records)
		r.removed[n] = append(r.removed[n], storage.Message{Seq: seq, Subject: subj})
		r.m.MsgRemoved(seq, subj)
		r.pump()
	}
	return ok
}

// ack answers the i-th delivery ever made.
func (r *rig) ack(i int, payload, reply string) {
	r.m.Ack(r.now, r.sink.out[i].ref, []byte(payload), reply)
	r.pump()
}

// pass lets time go by, ticking whenever the machine asks for it.
func (r *rig) pass(d time.Duration) (dead bool) {
	end := r.now.Add(d)
	for i := 0; ; i++ {
		if i > 10000 {
			r.t.Fatalf("deadline %v does not move", r.m.Deadline())
		}
		at := r.m.Deadline()
		if at.IsZero() || at.After(end) {
			break
		}
		if at.After(r.now) {
			r.now = at
		}
		_, d := r.m.Tick(r.now)
		if d {
			return true
		}
		r.pump()
	}
	r.now = end
	return false
}

// got returns what was delivered since the last call, as "to:seq" with "x2"
// for a second attempt, and what was said.
func (r *rig) got() string {
	var out []string
	for _, d := range r.sink.out[r.seenD:] {
		s := fmt.Sprintf("%s:%d", d.to, d.ref.Seq)
		if d.ref.Seq != d.msg.Seq {
			s += "!"
		}
		if d.ref.Deliveries > 1 {
			s += fmt.Sprintf("x%d", d.ref.Deliveries)
		}
		out = append(out, s)
	}
	r.seenD = len(r.sink.out)
	return strings.Join(out, " ")
}

func (r *rig) said() string {
	s := strings.Join(r.sink.status[r.seenS:], "\n")
	r.seenS = len(r.sink.status)
	return s
}

func (r *rig) want(deliveries string) {
	r.t.Helper()
	if g := r.got(); g != deliveries {
		r.t.Fatalf("delivered %q, want %q", g, deliveries)
	}
}

func (r *rig) wantSaid(status string) {
	r.t.Helper()
	if g := r.said(); g != status {
		r.t.Fatalf("said\n%q, want\n%q", g, status)
	}
}

// wantInfo compares delivered, floor, ack pending, redelivered, waiting, pending.
func (r *rig) wantInfo(want string) {
	r.t.Helper()
	in := r.m.Info(r.now)
	g := fmt.Sprintf("delivered %d/%d floor %d/%d ack %d redelivered %d waiting %d pending %d",
		in.Delivered.Consumer, in.Delivered.Stream, in.AckFloor.Consumer, in.AckFloor.Stream,
		in.NumAckPending, in.NumRedelivered, in.NumWaiting, in.NumPending)
	if g != want {
		r.t.Fatalf("info\n%s, want\n%s", g, want)
	}
}

// restart replays the log into a machine made from the snapshot, or from
// nothing (nil), and goes on with it.
func (r *rig) restart(snap []byte, cfg api.ConsumerConfig) {
	r.t.Helper()
	var m *Machine
	if snap != nil {
		var err error
		if m, err = Restore(snap, r.env()); err != nil {
			r.t.Fatal(err)
		}
	} else {
		m = New("C", &cfg, r.m.Created(), r.env())
	}
	for i, c := range r.sink.records {
		for _, g := range r.removed[i] {
			m.MsgRemoved(g.Seq, g.Subject)
		}
		if err := m.Apply(c); err != nil {
			r.t.Fatal(err)
		}
	}
	for _, g := range r.removed[len(r.sink.records)] {
		m.MsgRemoved(g.Seq, g.Subject)
	}
	r.m = m
	m.Start(r.now)
	r.pump()
}
