package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nkeys"

	"petiole/storage"
	"petiole/sync/export"
	"petiole/sync/frame"
)

// memStream is a local stream in memory.
type memStream struct {
	mu       sync.Mutex
	uid      [16]byte
	msgs     map[uint64]storage.Message
	first    uint64
	last     uint64
	watchers map[int]func()
	nextW    int
	bad      map[uint64]bool // damaged
}

func newMemStream(uid byte) *memStream {
	return &memStream{uid: [16]byte{uid}, msgs: map[uint64]storage.Message{}, first: 1, watchers: map[int]func(){}}
}

func (s *memStream) UID() [16]byte { return s.uid }

func (s *memStream) DurableState() storage.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := storage.State{Msgs: uint64(len(s.msgs)), First: s.first, Last: s.last}
	for _, m := range s.msgs {
		st.Bytes = uint64(len(s.msgs)) * m.Size()
		break
	}
	return st
}

func (s *memStream) Range(from uint64, fn func(storage.Message) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for seq := max(from, s.first); seq <= s.last; seq++ {
		if s.bad[seq] {
			return &storage.CorruptError{File: "msgs.db", Seq: seq, Reason: "checksum"}
		}
		if m, ok := s.msgs[seq]; ok && !fn(m) {
			return nil
		}
	}
	return nil
}

func (s *memStream) Watch(fn func()) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.nextW
	s.nextW++
	s.watchers[id] = fn
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, id)
	}
}

// add appends messages with the data, one each.
func (s *memStream) add(data ...[]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range data {
		s.last++
		s.msgs[s.last] = storage.Message{
			Seq: s.last, Time: time.Now().UnixNano(),
			Subject: fmt.Sprintf("plant.sensor%d", s.last%7), Data: d,
		}
	}
	for _, fn := range s.watchers {
		fn()
	}
}

// addN appends n messages of that size, each with its number in front.
func (s *memStream) addN(n, size int) {
	data := make([][]byte, n)
	base := s.DurableState().Last
	for i := range data {
		data[i] = make([]byte, max(size, 8))
		binary.BigEndian.PutUint64(data[i], base+uint64(i)+1)
	}
	s.add(data...)
}

func (s *memStream) remove(seqs ...uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range seqs {
		delete(s.msgs, q)
	}
	for s.first <= s.last && s.msgs[s.first].Seq == 0 {
		s.first++
	}
}

// truncate forgets everything above last, as a disk that lied would.
func (s *memStream) truncate(last uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ; s.last > last; s.last-- {
		delete(s.msgs, s.last)
	}
}

type memSources struct {
	mu       sync.Mutex
	streams  map[string]*memStream
	repaired string // the name of one that is being repaired
	watchers []func()
}

func (m *memSources) Repairing(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return name == m.repaired
}

func (m *memSources) repair(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.repaired = name
}

func (m *memSources) Stream(name string) (export.Source, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.streams[name]
	return s, ok
}

func (m *memSources) set(name string, s *memStream) {
	m.mu.Lock()
	if s == nil {
		delete(m.streams, name)
	} else {
		m.streams[name] = s
	}
	ws := m.watchers
	m.mu.Unlock()
	for _, fn := range ws {
		fn()
	}
}

func (m *memSources) WatchStreams(fn func()) func() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watchers = append(m.watchers, fn)
	return func() {}
}

type memStates struct {
	mu   sync.Mutex
	m    map[string][]byte
	fail error // of Put

	broken error // of Get
	puts   int   // that failed
}

func (m *memStates) Get(key string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bytes.Clone(m.m[key]), m.broken
}

func (m *memStates) Put(key string, v []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		m.puts++
		return m.fail
	}
	m.m[key] = v
	return nil
}

func (m *memStates) copy() map[string][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := map[string][]byte{}
	for k, v := range m.m {
		c[k] = v
	}
	return c
}

// memSink is a hub's streams in memory; it outlives hubs, as a disk does.
type memSink struct {
	mu      sync.Mutex
	streams map[string]*memHubStream
	delay   time.Duration // of each apply
	fail    *frame.Error  // what Ingest answers, if set
	stored  chan struct{} // closed and replaced whenever something is stored
	after   func(n int)   // called when a stream holds so many, if set
}

type memHubStream struct {
	msgs []frame.Msg // as stored, Seq is the edge's
	gaps []frame.Gap
	pos  map[string]*frame.Position
}

func newMemSink() *memSink {
	return &memSink{streams: map[string]*memHubStream{}, stored: make(chan struct{})}
}

func (s *memSink) stream(name string) *memHubStream {
	h := s.streams[name]
	if h == nil {
		h = &memHubStream{pos: map[string]*frame.Position{}}
		s.streams[name] = h
	}
	return h
}

type memTarget struct {
	s     *memSink
	name  string
	key   string
	uid   frame.UID
	queue chan func()
}

func (s *memSink) Open(_ context.Context, id *Identity, o *frame.Offer) (Target, error) {
	if !id.MayWrite(o.To) {
		return nil, &frame.Error{Code: frame.CodeDenied, Text: "user " + id.User + " may not write stream " + o.To}
	}
	t := &memTarget{s: s, name: o.To, key: id.EdgeID + o.UID.String(), uid: o.UID, queue: make(chan func(), 64)}
	go func() {
		for fn := range t.queue {
			fn()
		}
	}()
	return t, nil
}

func (t *memTarget) Position() (frame.Position, bool) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	p := t.s.stream(t.name).pos[t.key]
	if p == nil {
		return frame.Position{}, false
	}
	return *p, true
}

func (t *memTarget) Ingest(ctx context.Context, b *frame.Batch, done func(frame.Position, error)) error {
	select {
	case t.queue <- func() { done(t.apply(b)) }:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *memTarget) Close() { close(t.queue) }

func (t *memTarget) apply(b *frame.Batch) (frame.Position, error) {
	t.s.mu.Lock()
	delay := t.s.delay
	t.s.mu.Unlock()
	time.Sleep(delay)
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.s.fail != nil {
		return frame.Position{}, t.s.fail
	}
	h := t.s.stream(t.name)
	p := h.pos[t.key]
	switch {
	case p != nil && b.Incarnation < p.Incarnation:
		return *p, &frame.Error{Code: frame.CodeStale, Text: "stale"}
	case p != nil && b.Incarnation == p.Incarnation:
		switch {
		case b.Through <= p.Through:
			return *p, nil
		case b.First != p.Through+1:
			return *p, &frame.Error{Code: frame.CodeOrder, Text: "out of order"}
		case b.Prev != p.Chain:
			return *p, &frame.Error{Code: frame.CodeDiverged, Text: "diverged"}
		}
	case b.First != b.Base || b.Prev != frame.Seed(t.uid, b.Incarnation, b.Base):
		return frame.Position{}, &frame.Error{Code: frame.CodeOrder, Text: "not at base"}
	}
	n := frame.Position{Incarnation: b.Incarnation, Through: b.Through, Chain: b.Chain}
	if p != nil {
		n.Gaps, n.Msgs = p.Gaps, p.Msgs
		if p.Incarnation == b.Incarnation {
			n.Ladder = append(n.Ladder, p.Ladder[max(0, len(p.Ladder)-31):]...)
		}
	}
	n.Ladder = append(n.Ladder, frame.Rung{Through: b.Through, Chain: b.Chain})
	for _, m := range b.Msgs {
		m.Data = append([]byte(nil), m.Data...)
		m.Header = append([]byte(nil), m.Header...)
		h.msgs = append(h.msgs, m)
		n.Msgs++
	}
	for _, g := range b.Gaps {
		h.gaps = append(h.gaps, g)
		n.Gaps += g.Last - g.First + 1
	}
	h.pos[t.key] = &n
	if t.s.after != nil {
		t.s.after(len(h.msgs))
	}
	close(t.s.stored)
	t.s.stored = make(chan struct{})
	return n, nil
}

// seqs returns the sequences stored in the hub's stream, in order.
func (s *memSink) seqs(name string) []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []uint64
	for _, m := range s.stream(name).msgs {
		out = append(out, m.Seq)
	}
	return out
}

func (s *memSink) count(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.stream(name).msgs)
}

// wait waits until the sink's stream satisfies ok.
func (s *memSink) wait(t *testing.T, what, name string, ok func(h *memHubStream) bool) {
	t.Helper()
	deadline := time.After(patience)
	for {
		s.mu.Lock()
		h := s.stream(name)
		good, n, ch := ok(h), len(h.msgs), s.stored
		s.mu.Unlock()
		if good {
			return
		}
		select {
		case <-ch:
		case <-deadline:
			t.Fatalf("%s: not within %v; stream %s holds %d messages", what, patience, name, n)
		}
	}
}

func (s *memSink) waitCount(t *testing.T, name string, n int) {
	t.Helper()
	s.wait(t, fmt.Sprintf("%d messages", n), name, func(h *memHubStream) bool { return len(h.msgs) >= n })
}

// until waits for a condition that nothing signals.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func device(t testing.TB) nkeys.KeyPair {
	t.Helper()
	kp, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	return kp
}

// patience is how long tests wait for what is to happen anyway: however busy the
// machine is, it has happened by then.
const patience = time.Minute

// quick is a timing for tests, a tenth of the real one or less, but for the
// silence that ends a connection: a busy machine may be silent for a while.
var quick = Timing{
	Reconnect: 100 * time.Millisecond, Attempt: 2 * time.Second, Ping: 100 * time.Millisecond,
	Idle: 6 * time.Second, RetryMin: 200 * time.Millisecond, RetryMax: time.Second,
}

// brisk is quick for an edge that is to notice silence soon.
func brisk() Timing {
	t := quick
	t.Idle = 600 * time.Millisecond
	return t
}

const password = "correct horse"

func startHub(t *testing.T, dir, listen string, sink Sink, mod func(*HubConfig)) *Hub {
	t.Helper()
	c := HubConfig{
		Listen: listen, Name: "hub", ID: "HUB1", TLS: ServerTLS{Dir: dir}, Timing: quick,
		Users: []User{{Name: "edge", Password: password, Streams: []string{"PLANT*"}}},
	}
	if mod != nil {
		mod(&c)
	}
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		h, err := NewHub(HubOptions{Config: c, Sink: sink, Software: "test"})
		if err != nil {
			t.Fatal(err)
		}
		err = h.Start()
		if err == nil {
			t.Cleanup(func() { h.Close() })
			return h
		}
		// Its port may be somebody else's for a moment, who was given any.
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

type rig struct {
	sources *memSources
	stream  *memStream
	states  *memStates
	sink    *memSink
	hubDir  string
	hub     *Hub
	device  nkeys.KeyPair
}

func newRig(t *testing.T) *rig {
	r := &rig{
		stream: newMemStream(1), states: &memStates{m: map[string][]byte{}}, sink: newMemSink(),
		hubDir: t.TempDir(), device: device(t),
	}
	r.sources = &memSources{streams: map[string]*memStream{"READINGS": r.stream}}
	r.hub = startHub(t, r.hubDir, "127.0.0.1:0", r.sink, nil)
	return r
}

func (r *rig) url() string { return "quic://" + r.hub.Addr().String() }

func (r *rig) edge(t *testing.T, url string, mod func(*EdgeOptions)) *Edge {
	t.Helper()
	o := EdgeOptions{
		Config: EdgeConfig{
			URLs: []string{url}, Name: "edge1", Auth: Auth{User: "edge", Password: password},
			TLS: ClientTLS{Pinned: r.hub.Fingerprint()}, Timing: quick,
			Exports: []Export{{Stream: "READINGS", To: "PLANT"}},
		},
		Device: r.device, Sources: r.sources, States: r.states, Software: "test",
	}
	if mod != nil {
		mod(&o)
	}
	e, err := NewEdge(o)
	if err != nil {
		t.Fatal(err)
	}
	e.Start()
	t.Cleanup(func() { e.Close() })
	return e
}

// inOrder checks that the hub holds first to last, each once, in order.
func inOrder(t *testing.T, seqs []uint64, first, last uint64) {
	t.Helper()
	want := first
	for i, q := range seqs {
		if q != want {
			t.Fatalf("message %d at the hub has sequence %d, want %d", i, q, want)
		}
		want++
	}
	if want != last+1 {
		t.Fatalf("hub's stream ends at %d, want %d", want-1, last)
	}
}
