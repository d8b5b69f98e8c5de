package ingest_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"weak"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/hub/ingest"
	"petiole/internal/broker"
	engine "petiole/internal/jetstream"
	"petiole/internal/jetstream/api"
	"petiole/storage"
	"petiole/sync/export"
	"petiole/sync/frame"
	"petiole/sync/link"
)

// patience is how long tests wait for what is to happen anyway: however busy the
// machine is, it has happened by then.
const patience = time.Minute

// timing has links begin anew soon, but bear the silence of a busy machine.
var timing = link.Timing{
	Reconnect: 100 * time.Millisecond, Attempt: 2 * time.Second, Ping: 100 * time.Millisecond,
	Idle: 6 * time.Second, RetryMin: 200 * time.Millisecond, RetryMax: time.Second,
}

// node is a broker with an engine, as both programs have it.
type node struct {
	dir    string
	broker *broker.Server
	engine *engine.Engine
}

func startNode(t testing.TB, dir string) *node {
	t.Helper()
	n := &node{dir: dir}
	var err error
	kick := func() {}
	if n.broker, err = broker.New(broker.Options{Host: "127.0.0.1", Port: -1, JetStream: true, AfterRead: func() { kick() }}); err != nil {
		t.Fatal(err)
	}
	if n.engine, err = engine.Open(engine.Options{Account: n.broker.Account(), Dir: dir, ServerName: "test"}); err != nil {
		t.Fatal(err)
	}
	kick = n.engine.AfterRead
	if err := n.broker.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.stop() })
	return n
}

func (n *node) stop() {
	if n.broker == nil {
		return
	}
	n.broker.Shutdown(context.Background())
	n.engine.Close()
	n.broker = nil
}

type hub struct {
	*node
	link *link.Hub
}

func startHub(t testing.TB, dir, listen string, mod func(*ingest.Options)) *hub {
	t.Helper()
	h := &hub{node: startNode(t, dir)}
	o := ingest.Options{Engine: h.engine}
	if mod != nil {
		mod(&o)
	}
	conf := link.HubOptions{
		Sink: ingest.New(o),
		Config: link.HubConfig{
			Listen: listen, Name: "hub", TLS: link.ServerTLS{Dir: dir}, Timing: timing,
			Users: []link.User{{Name: "edge", Password: "pw", Streams: []string{"PLANT*"}}},
		},
	}
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		var err error
		if h.link, err = link.NewHub(conf); err != nil {
			t.Fatal(err)
		}
		if err = h.link.Start(); err == nil {
			t.Cleanup(h.stop)
			return h
		}
		// Its port may be somebody else's for a moment, who was given any.
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func (h *hub) stop() {
	h.link.Close()
	h.node.stop()
}

func startEdge(t testing.TB, n *node, h *hub, exports ...link.Export) *link.Edge {
	t.Helper()
	device, err := link.LoadDevice(n.dir, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	e, err := link.NewEdge(link.EdgeOptions{
		Device: device, Sources: export.Engine(n.engine), States: export.Meta(n.engine.Meta()),
		Config: link.EdgeConfig{
			URLs: []string{"quic://" + h.link.Addr().String()}, Auth: link.Auth{User: "edge", Password: "pw"},
			TLS: link.ClientTLS{Pinned: h.link.Fingerprint()}, Exports: exports, Timing: timing,
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	e.Start()
	t.Cleanup(func() { e.Close() })
	return e
}

func connect(t testing.TB, n *node) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(n.broker.ClientURL(), nats.Timeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func publish(t testing.TB, js jetstream.JetStream, from, n int) {
	t.Helper()
	for i := range n {
		d := binary.BigEndian.AppendUint64(nil, uint64(from+i))
		m := &nats.Msg{Subject: fmt.Sprintf("readings.line%d", i%3), Data: d, Header: nats.Header{"Unit": {"bar"}}}
		if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(patience)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(patience):
		t.Fatal("publishing does not complete")
	}
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// check verifies that the hub's stream holds the numbers from 1 to n in order.
func check(t *testing.T, h *hub, name string, n int) {
	t.Helper()
	s, ok := h.engine.Stream(name)
	if !ok {
		t.Fatalf("no stream %s at the hub", name)
	}
	until(t, "what is acknowledged to be read", func() bool { return last(h, name) >= uint64(n) }) // it may be a moment later
	next := uint64(1)
	err := s.Range(1, func(m storage.Message) bool {
		if got := binary.BigEndian.Uint64(m.Data); got != next || !strings.HasPrefix(m.Subject, "readings.line") || !strings.Contains(string(m.Header), "Unit: bar") {
			t.Fatalf("message %d of the hub is %q %q with number %d, want %d", m.Seq, m.Subject, m.Header, got, next)
		}
		next++
		return true
	})
	if err != nil || next != uint64(n)+1 {
		t.Fatalf("hub holds %d messages, want %d (%v)", next-1, n, err)
	}
}

func last(h *hub, name string) uint64 {
	if s, ok := h.engine.Stream(name); ok {
		return s.DurableState().Last
	}
	return 0
}

func TestEdgeToHub(t *testing.T) {
	dir := t.TempDir()
	edge := startNode(t, filepath.Join(dir, "edge"))
	hubDir := filepath.Join(dir, "hub")
	h := startHub(t, hubDir, "127.0.0.1:0", nil)
	addr := h.link.Addr().String()
	js := connect(t, edge)
	ctx := context.Background()
	// The link comes up before the stream exists.
	l := startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT"})
	until(t, "connected", func() bool { return l.Status().Connected })
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}}); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 1, 3000)
	until(t, "replayed", func() bool { return last(h, "PLANT") == 3000 })

	// The hub's clients read it like any stream.
	hjs := connect(t, h.node)
	cons, err := hjs.OrderedConsumer(ctx, "PLANT", jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := cons.Next()
	if err != nil || binary.BigEndian.Uint64(m.Data()) != 1 || m.Headers().Get("Unit") != "bar" {
		t.Fatalf("first message at the hub: %v, %v", m, err)
	}

	// An outage of the hub, with publishing going on; twice.
	for round := range 2 {
		h.stop()
		publish(t, js, 3001+1000*round, 1000)
		h = startHub(t, hubDir, addr, nil)
		until(t, "replayed", func() bool { return last(h, "PLANT") == uint64(4000+1000*round) })
	}
	check(t, h, "PLANT", 5000)

	// The edge restarts: it goes on where the hub is.
	l.Close()
	edge.stop()
	edge = startNode(t, edge.dir)
	js = connect(t, edge)
	l = startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT"})
	publish(t, js, 5001, 500)
	until(t, "acknowledged", func() bool {
		x := l.Status().Exports[0]
		return x.Through == 5500 && x.LagMsgs == 0
	})
	check(t, h, "PLANT", 5500)
	if x := l.Status().Exports[0]; x.Incarnation != 1 || x.Regressions != 0 || x.Sent != 500 {
		t.Errorf("after the restart %+v", x)
	}
}

func TestGapsReachTheHub(t *testing.T) {
	dir := t.TempDir()
	edge := startNode(t, filepath.Join(dir, "edge"))
	h := startHub(t, filepath.Join(dir, "hub"), "127.0.0.1:0", nil)
	js := connect(t, edge)
	ctx := context.Background()
	s, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}, MaxMsgs: 100})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, js, 1, 50)
	l := startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT"})
	until(t, "replayed", func() bool { return last(h, "PLANT") == 50 })
	l.Close()
	publish(t, js, 51, 150) // 200 in all, the last hundred are held
	if err := s.DeleteMsg(ctx, 150); err != nil {
		t.Fatal(err)
	}
	l = startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT"})
	until(t, "acknowledged", func() bool { return l.Status().Exports[0].Through == 200 })
	st, _ := h.engine.Stream("PLANT")
	es, _ := edge.engine.Stream("READINGS")
	p, ok := st.Position(l.EdgeID(), es.UID())
	if !ok || p.Through != 200 || p.Gaps != 51 || p.Msgs != 149 {
		t.Errorf("position %+v", p)
	}
	if x := l.Status().Exports[0]; x.GapMsgs != 51 || x.Gaps != 2 {
		t.Errorf("edge tells %d gaps of %d", x.Gaps, x.GapMsgs)
	}
	until(t, "what is acknowledged to be read", func() bool { return last(h, "PLANT") == 149 })
}

func TestOpenRefuses(t *testing.T) {
	n := startNode(t, t.TempDir())
	if _, err := n.engine.EnsureStream(api.StreamConfig{Name: "MIRROR", Replicas: 1, Metadata: map[string]string{engine.MetaIngest: "true"}}); err != nil {
		t.Fatal(err)
	}
	id := &link.Identity{EdgeID: "E", User: "u", Streams: []string{"A*", "MIRROR", "bad name"}}
	for _, c := range []struct {
		to   string
		o    ingest.Options
		code frame.Code
		text string
	}{
		{"OTHER", ingest.Options{}, frame.CodeDenied, "add it to the streams of this user"},
		{"A1", ingest.Options{NoCreate: true}, frame.CodeTarget, "create it"},
		{"bad name", ingest.Options{}, frame.CodeTarget, "name"},
		{"A1", ingest.Options{}, frame.CodeNone, ""},
	} {
		c.o.Engine = n.engine
		target, err := ingest.New(c.o).Open(t.Context(), id, &frame.Offer{ID: 1, To: c.to})
		if c.code == frame.CodeNone {
			if err != nil || target == nil {
				t.Errorf("%s: %v", c.to, err)
			}
			continue
		}
		var fe *frame.Error
		if !errors.As(err, &fe) || fe.Code != c.code || !strings.Contains(fe.Text, c.text) {
			t.Errorf("%s: %v, want code %v with %q", c.to, err, c.code, c.text)
		}
	}
	s, _ := n.engine.Stream("A1")
	if cfg := s.Config(); len(cfg.Subjects) != 0 || cfg.Metadata[engine.MetaIngest] != "true" {
		t.Errorf("created with %+v", cfg)
	}
}

func TestFullStreamIsToldAndDrainsLater(t *testing.T) {
	dir := t.TempDir()
	edge := startNode(t, filepath.Join(dir, "edge"))
	h := startHub(t, filepath.Join(dir, "hub"), "127.0.0.1:0", func(o *ingest.Options) {
		o.Template = api.StreamConfig{MaxMsgs: 100, Discard: api.DiscardNew}
	})
	js := connect(t, edge)
	ctx := context.Background()
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}}); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 1, 150)
	l := startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT"})
	until(t, "the cause in the status", func() bool {
		return strings.Contains(l.Status().Exports[0].LastError, "is full: raise its limits")
	})
	hjs := connect(t, h.node)
	hs, err := hjs.Stream(ctx, "PLANT")
	if err != nil {
		t.Fatal(err)
	}
	cfg := hs.CachedInfo().Config
	cfg.MaxMsgs = -1
	if _, err := hjs.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	until(t, "acknowledged", func() bool { return l.Status().Exports[0].Through == 150 })
	check(t, h, "PLANT", 150)
}

// A stream deleted at the hub comes back with all that the edge still holds.
func TestStreamDeletedAtTheHub(t *testing.T) {
	dir := t.TempDir()
	edge := startNode(t, filepath.Join(dir, "edge"))
	h := startHub(t, filepath.Join(dir, "hub"), "127.0.0.1:0", nil)
	js := connect(t, edge)
	ctx := context.Background()
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}}); err != nil {
		t.Fatal(err)
	}
	l := startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT"})
	publish(t, js, 1, 100)
	until(t, "replayed", func() bool { return l.Status().Exports[0].Through == 100 })
	if err := connect(t, h.node).DeleteStream(ctx, "PLANT"); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 101, 10)
	until(t, "replayed again", func() bool { return last(h, "PLANT") == 110 })
	until(t, "the failure is past", func() bool { return !l.Status().Exports[0].Failing })
	if text, want := l.Status().Exports[0].LastError, `stream "PLANT" was removed at the hub; it is made anew and filled from the first message here`; text != "" && text != want {
		t.Errorf("the edge is told %q, want %q", text, want)
	}
	check(t, h, "PLANT", 110)
}

// The budget keeps a fast edge from filling the hub's memory, and never blocks
// for good.
func TestBudget(t *testing.T) {
	dir := t.TempDir()
	edge := startNode(t, filepath.Join(dir, "edge"))
	h := startHub(t, filepath.Join(dir, "hub"), "127.0.0.1:0", func(o *ingest.Options) { o.PerExport, o.Total = 1000, 1500 })
	js := connect(t, edge)
	if _, err := js.CreateStream(context.Background(), jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}}); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 1, 5000)
	startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT1"}, link.Export{Stream: "READINGS", To: "PLANT2"})
	until(t, "replayed", func() bool { return last(h, "PLANT1") == 5000 && last(h, "PLANT2") == 5000 })
	check(t, h, "PLANT1", 5000)
	check(t, h, "PLANT2", 5000)
}

// A stream of the hub that keeps what consumers want keeps nothing of an export
// that none wants.
func TestExportToInterestStream(t *testing.T) {
	dir := t.TempDir()
	edge := startNode(t, filepath.Join(dir, "edge"))
	h := startHub(t, filepath.Join(dir, "hub"), "127.0.0.1:0", nil)
	js, hjs := connect(t, edge), connect(t, h.node)
	ctx := context.Background()
	plant, err := hjs.CreateStream(ctx, jetstream.StreamConfig{Name: "PLANT", Retention: jetstream.InterestPolicy})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}}); err != nil {
		t.Fatal(err)
	}
	startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT"})
	publish(t, js, 1, 30)
	until(t, "replayed", func() bool { return last(h, "PLANT") == 30 })
	st, _ := h.engine.Stream("PLANT")
	if n := st.State().Msgs; n != 0 {
		t.Errorf("%d messages are kept that nobody wants", n)
	}
	if _, err := plant.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", FilterSubject: "readings.line1"}); err != nil {
		t.Fatal(err)
	}
	publish(t, js, 31, 30)
	until(t, "replayed", func() bool { return last(h, "PLANT") == 60 })
	if n := st.State().Msgs; n != 10 {
		t.Errorf("%d messages are kept, want 10", n)
	}
}

// take has a target take a batch, and returns what the batch aliased.
func take(t *testing.T, target link.Target, b *frame.Builder) weak.Pointer[byte] {
	t.Helper()
	var batch frame.Batch
	typ, content, err := frame.NewReader(bytes.NewReader(b.AppendFrames(nil, false)), 4<<20).Next(nil)
	if err != nil || typ != frame.TypeBatch || (&frame.Decoder{}).Batch(content, &batch) != nil {
		t.Fatal(typ, err)
	}
	done := make(chan error, 1)
	if err := target.Ingest(t.Context(), &batch, func(_ frame.Position, err error) { done <- err }); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return weak.Make(&content[0])
}

// An export that waits for more keeps nothing of what has come: of large messages
// to thousands of exports that would be all the memory there is.
func TestIdleExportKeepsNothing(t *testing.T) {
	h := startHub(t, t.TempDir(), "127.0.0.1:0", nil)
	sink := ingest.New(ingest.Options{Engine: h.engine})
	uid := frame.UID{9}
	target, err := sink.Open(t.Context(), &link.Identity{EdgeID: "E", Streams: []string{"*"}}, &frame.Offer{ID: 1, Stream: "S", To: "PLANT", UID: uid})
	if err != nil {
		t.Fatal(err)
	}
	var b frame.Builder
	b.Reset(1, 1, 1, 1, frame.Seed(uid, 1, 1))
	b.Msg(1, "s", nil, make([]byte, 1<<20))
	kept := take(t, target, &b)
	runtime.GC()
	if kept.Value() != nil {
		t.Error("the buffer of a batch that has been stored is still referenced")
	}
	runtime.KeepAlive(target)
}

// An edge whose clock is ahead does not push the times of all others there.
func TestClockAhead(t *testing.T) {
	h := startHub(t, t.TempDir(), "127.0.0.1:0", nil)
	sink := ingest.New(ingest.Options{Engine: h.engine})
	id := &link.Identity{EdgeID: "E", Streams: []string{"*"}}
	uid := frame.UID{9}
	target, err := sink.Open(t.Context(), id, &frame.Offer{ID: 1, Stream: "S", To: "PLANT", UID: uid})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	old, near, far := now.Add(-time.Hour).UnixNano(), now.Add(2*time.Second).UnixNano(), now.AddDate(70, 0, 0).UnixNano()
	var b frame.Builder
	b.Reset(1, 1, 1, 1, frame.Seed(uid, 1, 1))
	for _, at := range []int64{old, near, far} {
		b.Msg(at, "s", nil, nil)
	}
	take(t, target, &b)
	until(t, "what is acknowledged to be read", func() bool { return last(h, "PLANT") == 3 })
	st, _ := h.engine.Stream("PLANT")
	var got []int64
	if err := st.Range(1, func(m storage.Message) bool { got = append(got, m.Time); return true }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || got[0] != old || got[1] != near || got[2] < near || got[2] > time.Now().Add(time.Minute).UnixNano() {
		t.Errorf("times %v, sent %v", got, []int64{old, near, far})
	}
}

// Where an export stands is told only once a power cut cannot take it, also if
// the log is synced at intervals.
func TestPositionIsDurable(t *testing.T) {
	srv, err := broker.New(broker.Options{Host: "127.0.0.1", Port: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srv.Shutdown(context.Background()) })
	e, err := engine.Open(engine.Options{Account: srv.Account(), Dir: t.TempDir(), SyncInterval: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	sink := ingest.New(ingest.Options{Engine: e})
	id := &link.Identity{EdgeID: "E", Streams: []string{"*"}}
	uid := frame.UID{9}
	offer := &frame.Offer{ID: 1, Stream: "S", To: "PLANT", UID: uid}
	target, err := sink.Open(t.Context(), id, offer)
	if err != nil {
		t.Fatal(err)
	}
	if _, known := target.Position(); known {
		t.Fatal("known before it began")
	}
	seed := frame.Seed(uid, 1, 1)
	done := make(chan uint64, 1) // how far the stream was durable when the position was told
	err = target.Ingest(t.Context(), &frame.Batch{
		Incarnation: 1, Base: 1, First: 1, Through: 1, Prev: seed, Chain: frame.Chain{1},
		Msgs: []frame.Msg{{Seq: 1, Time: 1, Subject: "s"}},
	}, func(frame.Position, error) {
		st, _ := e.Stream("PLANT")
		done <- st.DurableState().Last
	})
	if err != nil {
		t.Fatal(err)
	}
	st, _ := e.Stream("PLANT")
	// The log may be synced for another reason meanwhile, to save the list of
	// streams: what counts is what is durable at the time.
	until(t, "applied", func() bool { return st.State().Last == 1 })
	if target, err = sink.Open(t.Context(), id, offer); err != nil {
		t.Fatal(err)
	}
	if p, known := target.Position(); !known || p.Through != 1 {
		t.Fatalf("position %+v", p)
	}
	if last := st.DurableState().Last; last != 1 {
		t.Fatalf("position 1 was told, durable is %d", last)
	}
	select {
	case last := <-done:
		if last != 1 {
			t.Errorf("acknowledged when the stream was durable up to %d", last)
		}
	case <-time.After(patience):
		t.Error("durable, and not acknowledged")
	}
}
