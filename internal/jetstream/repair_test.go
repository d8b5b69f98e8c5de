package jetstream

import (
	"bytes"
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// A repair that finds no room is done when there is. Up to then the stream says
// that resources are insufficient, and the log does without it.
func TestRepairWaitsForRoom(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 5)
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	path := n.e.storePath(must2(n.e.Stream("S")).group)
	good := must(os.ReadFile(path))
	publishN(t, js, "s", 3) // in the log only
	n.crash()
	ruin(t, path)
	var room atomic.Bool
	n = startNode(t, dir, func(o *Options) {
		o.salvage = func(string) (msgstore.RepairReport, error) {
			if !room.Load() {
				return msgstore.RepairReport{}, &os.PathError{Op: "write", Path: path, Err: syscall.ENOSPC}
			}
			return msgstore.RepairReport{File: path}, os.WriteFile(path, good, 0o600)
		}
	})
	_, js = n.connect()
	if _, err := js.Publish(ctx, "s", nil); errorCode(err) != 10023 {
		t.Fatalf("publish: %v", err)
	}
	if _, err := js.Stream(ctx, "S"); errorCode(err) != 10023 {
		t.Fatalf("info: %v", err)
	}
	if down := n.e.DownStreams(); len(down) != 1 || down[0].Quarantined || n.e.Damage().Quarantines != 0 {
		t.Fatalf("%+v", down)
	}
	d := (*n.e.downNames.Load())["S"]
	eventually(t, "its records are parked", func() bool { return d.from.Load() == 0 })
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	room.Store(true)
	n.e.onSpace(false)
	eventually(t, "the stream serves again", func() bool { _, ok := n.e.Stream("S"); return ok })
	if ack := must(js.Publish(ctx, "s", nil)); ack.Sequence != 9 {
		t.Fatalf("sequence %d", ack.Sequence)
	}
	if st := must2(n.e.Stream("S")).State(); st.Msgs != 9 {
		t.Fatalf("%+v", st)
	}
	n.stop()
	n = startNode(t, dir)
	if st := must2(n.e.Stream("S")).State(); st.Msgs != 9 {
		t.Fatalf("after a restart: %+v", st)
	}
}

// What an open store knows is used for its repair: nothing is lost of what the
// damaged pages held beside the messages hit.
func TestRepairOfOpenStore(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 500)
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	publishN(t, js, "s", 20) // in the log only
	old := must2(n.e.Stream("S"))
	// Both meta pages: from outside there is nothing to begin with but the floor.
	f := must(os.OpenFile(n.e.storePath(old.group), os.O_RDWR, 0))
	must(f.WriteAt(make([]byte, 2*4096), 0))
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	n.e.applyMu.Lock()
	n.e.takeDown(old, &storage.CorruptError{Reason: "test"}, nil)
	n.e.applyMu.Unlock()
	eventually(t, "the stream serves again", func() bool { s, ok := n.e.Stream("S"); return ok && s != old })
	if st := must2(n.e.Stream("S")).State(); st.Msgs != 520 || st.Last != 520 {
		t.Fatalf("%+v", st)
	}
	if d := n.e.Damage(); d.Repairs != 1 || d.LostMsgs != 0 {
		t.Fatalf("%+v", d)
	}
}

// Who is closing does not wait for repairs that begin after that.
func TestNothingBeginsAfterClose(t *testing.T) {
	n := startNode(t, t.TempDir())
	n.stop()
	if n.e.spawn(func() { t.Error("it began") }) {
		t.Error("it was let begin")
	}
}

// urgentRefusing is a proposer for whose urgent records there is no room at first.
type urgentRefusing struct {
	proposer
	left atomic.Int32 // to be refused
}

func (p *urgentRefusing) ProposeUrgent(g storage.GroupID, tag any, parts ...[]byte) error {
	if p.left.Add(-1) >= 0 {
		return wal.ErrNoSpace
	}
	return p.proposer.ProposeUrgent(g, tag, parts...)
}

// A message found damaged is given up though there was no room to say so the
// first time.
func TestGivingUpIsTriedAgain(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	for _, data := range []string{"one", "damage this message", "three"} {
		must(js.Publish(testContext(t), "s", []byte(data)))
	}
	path := n.e.storePath(must2(n.e.Stream("S")).group)
	n.stop()
	b := must(os.ReadFile(path))
	if err := os.WriteFile(path, bytes.ReplaceAll(b, []byte("damage this"), []byte("DAMAGE THIS")), 0o600); err != nil {
		t.Fatal(err)
	}
	n = startNode(t, dir)
	p := &urgentRefusing{proposer: n.e.prop}
	p.left.Store(1)
	n.e.prop = p // nobody is connected yet
	s := must2(n.e.Stream("S"))
	if _, err := s.store.Load(2); err == nil {
		t.Fatal("it is not damaged")
	}
	eventually(t, "it is given up", func() bool { return s.State().Msgs == 2 })
	if p.left.Load() >= 0 {
		t.Error("nothing was refused")
	}
	eventually(t, "it is forgotten", func() bool { n.e.mu.Lock(); defer n.e.mu.Unlock(); return len(n.e.losing) == 0 })
}

// A file with more damaged messages than are remembered is repaired as a whole.
func TestManyDamagedMessages(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 3)
	old := must2(n.e.Stream("S"))
	f := old.store.(*fileStore)
	n.e.mu.Lock()
	for i := range uint64(maxLosing) {
		n.e.losing[lostMsg{f, 1000 + i}] = struct{}{}
	}
	n.e.mu.Unlock()
	n.e.noteLost(f, 1, &storage.CorruptError{Reason: "test"})
	eventually(t, "the file is repaired", func() bool { return n.e.Damage().Repairs == 1 })
	if st := must2(n.e.Stream("S")).State(); st.Msgs != 3 {
		t.Fatalf("%+v", st)
	}
}

// A stream that was never checkpointed and whose file is destroyed is made anew from
// the log as it was, and not as if it had always had the configuration of now.
func TestRepairBeforeFirstCheckpoint(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	cfg := jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, MaxMsgs: 100, Discard: jetstream.DiscardNew, FirstSeq: 50}
	createStream(t, js, cfg)
	publishN(t, js, "s", 30)
	if err := n.e.saveMeta(); err != nil {
		t.Fatal(err)
	}
	cfg.MaxMsgs = 10
	must(js.UpdateStream(testContext(t), cfg))
	if err := n.e.saveMeta(); err != nil {
		t.Fatal(err)
	}
	s := must2(n.e.Stream("S"))
	want, path := s.State(), n.e.storePath(s.group)
	n.crash()
	b := must(os.ReadFile(path)) // it has an identity, and nothing else
	if err := os.WriteFile(path, bytes.Repeat([]byte{0xA5}, len(b)), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		n = startNode(t, dir)
		eventually(t, "the stream serves", func() bool { _, ok := n.e.Stream("S"); return ok })
		s = must2(n.e.Stream("S"))
		if st := s.State(); st != want {
			t.Fatalf("%+v, was %+v", st, want)
		}
		if c := s.Config(); c.MaxMsgs != cfg.MaxMsgs {
			t.Fatalf("%+v", c)
		}
		n.stop()
	}
}
