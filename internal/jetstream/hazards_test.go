package jetstream

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// within fails the test if fn takes longer than anything but a deadlock does.
func within(t *testing.T, what string, fn func()) {
	t.Helper()
	stuck := time.AfterFunc(patience, func() { panic(what + " does not end") }) // with all stacks
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
	old := must(nc.JetStream(nats.MaxWait(patience)))
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

// Deliveries that come back into a stream wait while the log cannot take them,
// instead of piling up in memory.
func TestDeliveriesWaitForTheLog(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	createStream(t, js, jetstream.StreamConfig{Name: "B", Subjects: []string{"b"}})
	publishN(t, js, "a", 10)
	stuck := make(chan struct{})
	n.e.async.add(asyncLimit+1, func() { <-stuck }) // as a publish does that waits for the disk
	old := must(nc.JetStream(nats.MaxWait(patience)))
	if _, err := old.AddConsumer("A", &nats.ConsumerConfig{Durable: "P", DeliverSubject: "b", AckPolicy: nats.AckNonePolicy}); err != nil {
		t.Fatal(err)
	}
	s := must2(n.e.Stream("A"))
	for range 20 { // each of them an occasion to deliver
		s.mu.Lock()
		s.wakePump()
		s.mu.Unlock()
		if q := n.e.async.octets.Load(); q != asyncLimit+1 {
			t.Errorf("%d octets are queued", q)
			break
		}
		time.Sleep(time.Millisecond)
	}
	close(stuck)
	b := must2(n.e.Stream("B"))
	within(t, "storing what was delivered", func() {
		for b.DurableState().Msgs < 10 || n.e.async.octets.Load() != 0 {
			time.Sleep(time.Millisecond)
		}
	})
}

// What clients send is stored or refused. It never ends the process, now or at
// the next checkpoint or start.
func TestOversize(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	ctx := testContext(t)
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	ids := []string{strings.Repeat("i", 40_000), strings.Repeat("i", 40_001), "short"}
	publish := func(first uint64, dup bool) {
		t.Helper()
		for i, id := range ids {
			ack, err := js.Publish(ctx, "s", nil, jetstream.WithMsgID(id))
			if err != nil {
				t.Fatal(err)
			}
			if ack.Sequence != first+uint64(i) || ack.Duplicate != dup {
				t.Errorf("id of %d octets: %+v", len(id), ack)
			}
		}
	}
	publish(1, false)
	publish(1, true)
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	s, err := n.e.EnsureStream(api.StreamConfig{Name: "PLANT", Metadata: map[string]string{MetaIngest: "true"}})
	if err != nil {
		t.Fatal(err)
	}
	uid := [16]byte{7}
	for _, subj := range []string{"", strings.Repeat("a", 40_000), "a b", "a..b"} {
		in := &command.Ingest{
			Edge: "E", UID: uid, Incarnation: 1, Base: 1, First: 1, Through: 2, PrevChain: command.Seed(uid, 1, 1),
			Msgs: []command.IngestMsg{{Seq: 1, Subject: "good"}, {Seq: 2, Subject: subj}},
		}
		res := make(chan error, 1)
		s.Ingest(in, func(_ command.Position, err error) { res <- err })
		n.e.Kick()
		select {
		case err := <-res:
			if err == nil {
				t.Errorf("subject %.10q was taken", subj)
			}
		case err := <-n.fail:
			t.Fatalf("subject %.10q: the storage failed: %v", subj, err)
		}
	}
	if st := s.DurableState(); st.Last != 0 {
		t.Errorf("a part of a refused batch was stored: %+v", st)
	}
	n.crash()
	n = startNode(t, dir)
	_, js = n.connect()
	publish(1, true)
}

// Who asks what is deleted does not have to wait until a damaged message is given
// up: it is as good as gone.
func TestDeletedDetailsOverDamage(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	ctx := testContext(t)
	s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	for _, data := range []string{"one", "two", "three", "damage this message", "five"} {
		must(js.Publish(ctx, "s", []byte(data)))
	}
	if err := s.DeleteMsg(ctx, 2); err != nil {
		t.Fatal(err)
	}
	n.stop()
	files := must(filepath.Glob(filepath.Join(dir, "streams", "*", "msgs.db")))
	b := must(os.ReadFile(files[0]))
	if !bytes.Contains(b, []byte("damage this")) {
		t.Fatal("nothing to damage")
	}
	if err := os.WriteFile(files[0], bytes.ReplaceAll(b, []byte("damage this"), []byte("DAMAGE THIS")), 0o600); err != nil {
		t.Fatal(err)
	}
	n = startNode(t, dir)
	_, js = n.connect()
	info, err := must(js.Stream(ctx, "S")).Info(ctx, jetstream.WithDeletedDetails(true))
	if err != nil || fmt.Sprint(info.State.Deleted) != "[2 4]" {
		t.Errorf("%+v, %v", info, err)
	}
}

// A message damaged on disk is in nobody's way: others come and go, limits
// and consumers work.
func TestDamagedMessage(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	ctx := testContext(t)
	cfg := jetstream.StreamConfig{Name: "S", Subjects: []string{"s.*"}, MaxMsgs: 4}
	s := createStream(t, js, cfg)
	cfg.Name, cfg.Subjects, cfg.MaxMsgs, cfg.Retention = "I", []string{"i.*"}, -1, jetstream.InterestPolicy
	i := createStream(t, js, cfg)
	for _, name := range []string{"C", "D"} {
		must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: name, AckPolicy: jetstream.AckExplicitPolicy}))
		must(i.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: name, AckPolicy: jetstream.AckExplicitPolicy}))
	}
	for _, data := range []string{"one", "damage this message", "three"} {
		must(js.Publish(ctx, "s.a", []byte(data)))
		must(js.Publish(ctx, "i.a", []byte(data)))
	}
	n.stop()
	files := must(filepath.Glob(filepath.Join(dir, "streams", "*", "msgs.db")))
	if len(files) != 2 {
		t.Fatal(files)
	}
	for _, f := range files {
		b := must(os.ReadFile(f))
		if !bytes.Contains(b, []byte("damage this")) {
			t.Fatal("nothing to damage")
		}
		b = bytes.ReplaceAll(b, []byte("damage this"), []byte("DAMAGE THIS"))
		if err := os.WriteFile(f, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n = startNode(t, dir)
	_, js = n.connect()
	// Consumers pass over it.
	var got []string
	for m := range must(must(js.Consumer(ctx, "S", "C")).Fetch(2)).Messages() {
		got = append(got, string(m.Data()))
	}
	if fmt.Sprint(got) != "[one three]" {
		t.Errorf("delivered %q", got)
	}
	// Who asks for it is told.
	var apiErr *jetstream.APIError
	// It is given up soon, and then is not there.
	if _, err := must(js.Stream(ctx, "S")).GetMsg(ctx, 2); !errors.As(err, &apiErr) ||
		!strings.Contains(apiErr.Description, "message 2 is damaged") && apiErr.ErrorCode != jetstream.JSErrCodeMessageNotFound {
		t.Errorf("get of a damaged message: %v", err)
	}
	// A rule about the damaged message's subject asks for its sequence only.
	must(js.Publish(ctx, "s.a", []byte("four"), jetstream.WithExpectLastSequencePerSubject(3)))
	for k := range 4 {
		must(js.Publish(ctx, "s.a", fmt.Append(nil, k)))
	}
	st := must2(n.e.Stream("S")).State()
	if st.Msgs != 4 || st.First != 5 {
		t.Errorf("%+v", st)
	}
	if err := must(js.Stream(ctx, "I")).DeleteConsumer(ctx, "C"); err != nil {
		t.Error(err)
	}
	select {
	case err := <-n.fail:
		t.Error(err)
	default:
	}
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

// A stream may be taken down while a checkpoint of it is about to begin: that is
// no failure of the store.
func TestCheckpointOfStreamTakenDown(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 10)
	old := must2(n.e.Stream("S"))
	n.e.applyMu.Lock()
	n.e.takeDown(old, &storage.CorruptError{Reason: "test"}, nil)
	n.e.applyMu.Unlock()
	eventually(t, "the stream serves again", func() bool { s, ok := n.e.Stream("S"); return ok && s != old })
	if old.holds() == 0 {
		t.Fatal("there is nothing to checkpoint")
	}
	if err := n.e.kept(old); err != nil {
		t.Fatal(err)
	}
	if st := must2(n.e.Stream("S")).State(); st.Msgs != 10 {
		t.Fatalf("%+v", st)
	}
}

// stateBacking is a store that is asked for its state by others while it is.
type stateBacking struct {
	backing
	asked func()
}

func (b *stateBacking) State() storage.State {
	if fn := b.asked; fn != nil {
		b.asked = nil
		fn()
		b.asked = fn
	}
	return b.backing.State()
}

// Whoever asks for the state while a file is being closed gets that of now.
func TestStateWhileResting(t *testing.T) {
	n := startNode(t, t.TempDir())
	f := n.e.newFileStore(77, true)
	open, asked := f.open, 0
	f.open = func(dir string, o msgstore.Options) (backing, error) {
		st, err := open(dir, o)
		b := &stateBacking{backing: st}
		b.asked = func() {
			if asked++; f.State().Last != 1 {
				t.Error("the state is that of before the file was opened")
			}
		}
		return b, err
	}
	must(f.Append(storage.Message{Subject: "s"}))
	if rested := must(f.rest()); !rested || asked == 0 {
		t.Fatalf("rested %v, asked %d times", rested, asked)
	}
	if err := f.Destroy(); err != nil {
		t.Fatal(err)
	}
}

// A write that has failed ends the process, whatever else the error is.
func TestFailureIsNoDamage(t *testing.T) {
	err := fmt.Errorf("open: %w: %w", storage.ErrFailed, syscall.EIO)
	if isDamage(err) || !isDamage(syscall.EIO) || !isDamage(&storage.CorruptError{}) {
		t.Error("failures and damage are not told apart")
	}
}

// refusing is a proposer for whose lazy records there is no room at first.
type refusing struct {
	proposer
	left atomic.Int32 // to be refused
}

func (p *refusing) ProposeLazy(g storage.GroupID, tag any, parts ...[]byte) error {
	if p.left.Add(-1) >= 0 {
		return wal.ErrNoSpace
	}
	return p.proposer.ProposeLazy(g, tag, parts...)
}

// Messages expire though there was no room to say so the first time, and nothing
// else happens to their stream.
func TestExpiryIsTriedAgain(t *testing.T) {
	n := startNode(t, t.TempDir())
	p := &refusing{proposer: n.e.prop}
	p.left.Store(1)
	n.e.prop = p // nobody is connected yet
	s := must(n.e.EnsureStream(api.StreamConfig{Name: "S", Subjects: []string{"s"}, Storage: api.FileStorage, MaxAge: 200 * time.Millisecond}))
	s.publish([]byte("s"), nil, nil, []byte("x"))
	n.e.Kick()
	eventually(t, "the message is stored", func() bool { return s.DurableState().Last == 1 })
	eventually(t, "the message expires", func() bool { return s.DurableState().Msgs == 0 })
	if p.left.Load() >= 0 {
		t.Error("nothing was refused")
	}
}

// What a stream republishes to another one, which takes it slowly, takes no more
// memory than it should: those who publish wait.
func TestRepublishedWaits(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "SLOW", Subjects: []string{"slow"}})
	createStream(t, js, jetstream.StreamConfig{
		Name: "FAST", Subjects: []string{"fast"}, Storage: jetstream.MemoryStorage, MaxMsgs: 1,
		RePublish: &jetstream.RePublish{Source: "fast", Destination: "slow"},
	})
	slow := must2(n.e.Stream("SLOW"))
	n.e.logGate.set(true) // as while checkpoints do not keep up
	const msgs, size = 400, 64 << 10
	published := make(chan error, 1)
	go func() {
		data := make([]byte, size)
		for range msgs {
			if err := nc.Publish("fast", data); err != nil {
				published <- err
				return
			}
		}
		published <- nc.FlushTimeout(time.Minute)
	}()
	for !n.e.async.full() {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(200 * time.Millisecond) // for more, if it does not wait
	if q := n.e.async.octets.Load(); q > asyncLimit+2*size {
		t.Errorf("%d octets are queued", q)
	}
	n.e.logGate.set(false)
	if err := <-published; err != nil {
		t.Error(err)
	}
	for slow.State().Msgs < msgs { // all of it arrives
		time.Sleep(time.Millisecond)
	}
}
