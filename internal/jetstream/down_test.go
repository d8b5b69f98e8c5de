package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// ruin overwrites everything in a database behind its first pages.
func ruin(t *testing.T, path string) {
	t.Helper()
	f := must(os.OpenFile(path, os.O_RDWR, 0))
	defer f.Close()
	size := must(f.Stat()).Size()
	zero := make([]byte, 4096)
	for off := int64(2 * 4096); off < size; off += 4096 {
		must(f.WriteAt(zero, off))
	}
}

func errorCode(err error) int {
	var ae *jetstream.APIError
	if errors.As(err, &ae) {
		return int(ae.ErrorCode)
	}
	return 0
}

// A stream whose files cannot be repaired answers that it is offline, keeps its
// files and its part of the log, and is all there again when the files are. The
// other streams do not notice.
func TestQuarantine(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	for _, s := range []string{"A", "B"} {
		createStream(t, js, jetstream.StreamConfig{Name: s, Subjects: []string{strings.ToLower(s)}})
		publishN(t, js, strings.ToLower(s), 300)
	}
	sa := must(js.Stream(ctx, "A"))
	must(sa.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}))
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	publishN(t, js, "a", 5) // in the log only
	a, _ := n.e.Stream("A")
	path := n.e.storePath(a.group)
	n.crash()
	good := must(os.ReadFile(path))
	ruin(t, path)
	bad := must(os.ReadFile(path))

	for start := range 2 {
		n = startNode(t, dir, func(o *Options) {
			o.salvage = func(string) (msgstore.RepairReport, error) {
				return msgstore.RepairReport{}, &os.PathError{Op: "read", Path: path, Err: syscall.EIO}
			}
		})
		_, js = n.connect()
		if _, err := js.Publish(ctx, "a", nil); errorCode(err) != 10194 {
			t.Fatalf("start %d: publish: %v", start, err)
		}
		if _, err := js.Stream(ctx, "A"); errorCode(err) != 10194 {
			t.Fatalf("start %d: info: %v", start, err)
		}
		if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "A", Subjects: []string{"other"}}); errorCode(err) != 10194 {
			t.Fatalf("start %d: create: %v", start, err)
		}
		if ack := must(js.Publish(ctx, "b", nil)); ack.Sequence != uint64(301+start) {
			t.Fatalf("start %d: the other stream has sequence %d", start, ack.Sequence)
		}
		if st := n.e.Damage(); st.Quarantines != 1 || st.Repairs != 0 {
			t.Fatalf("start %d: %+v", start, st)
		}
		if down := n.e.DownStreams(); len(down) != 1 || down[0].Name != "A" || !down[0].Quarantined {
			t.Fatalf("start %d: %+v", start, down)
		}
		// The log does without, and goes on being trimmed.
		eventually(t, "its records are parked", func() bool {
			records := 0
			_, err := scanParked(filepath.Join(filepath.Dir(path), parkedName), func(*wal.Record, uint32) error { records++; return nil }, func(parkedGap) { t.Error("damaged") })
			return err == nil && records >= 5 && n.e.downs[a.group].from.Load() == 0
		})
		if now := must(os.ReadFile(path)); string(now) != string(bad) {
			t.Fatal("its file has been touched")
		}
		if err := n.e.Checkpoint(); err != nil {
			t.Fatal(err)
		}
		n.stop()
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	n = startNode(t, dir)
	_, js = n.connect()
	s, ok := n.e.Stream("A")
	if !ok || s.State().Msgs != 305 || s.State().Last != 305 {
		t.Fatalf("after its file was restored: %+v", s.State())
	}
	c := must(js.Consumer(ctx, "A", "C"))
	if info := must(c.Info(ctx)); info.NumPending != 305 {
		t.Fatalf("%+v", info)
	}
	n.stop()
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), parkedName)); !errors.Is(err, os.ErrNotExist) {
		t.Fatal("what was parked is there though it has been checkpointed")
	}
}

// Deleting is how to be rid of a stream that cannot be repaired.
func TestDeleteQuarantined(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	publishN(t, js, "a", 3)
	a, _ := n.e.Stream("A")
	path := n.e.storePath(a.group)
	n.stop()
	ruin(t, path)
	n = startNode(t, dir, func(o *Options) {
		o.salvage = func(string) (msgstore.RepairReport, error) { return msgstore.RepairReport{}, syscall.EIO }
	})
	_, js = n.connect()
	if err := js.DeleteStream(ctx, "A"); err != nil {
		t.Fatal(err)
	}
	createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	if ack := must(js.Publish(ctx, "a", nil)); ack.Sequence != 1 {
		t.Fatalf("sequence %d", ack.Sequence)
	}
	eventually(t, "its files go", func() bool {
		_, err := os.Stat(filepath.Dir(path))
		return errors.Is(err, os.ErrNotExist)
	})
}

// Damage met while a stream is in use takes it out of service for as long as
// the repair takes; what was acknowledged and only in the log is there again,
// and the damage is told.
func TestDamageAtRunTime(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	var saved atomic.Pointer[[]byte]
	n := startNode(t, dir, func(o *Options) {
		o.salvage = func(dir string) (msgstore.RepairReport, error) {
			path := filepath.Join(dir, msgstore.FileName)
			return msgstore.RepairReport{File: path, Lost: []storage.Span{{First: 1990, Last: 1991}}, Parked: "there"},
				os.WriteFile(path, *saved.Load(), 0o600)
		}
	})
	nc, js := n.connect()
	events := must(nc.SubscribeSync(api.AdvisoryStreamDamagedSubject + ".>"))
	for _, s := range []string{"A", "B"} {
		createStream(t, js, jetstream.StreamConfig{Name: s, Subjects: []string{strings.ToLower(s)}})
	}
	publishN(t, js, "a", 2000)
	c := must(must(js.Stream(ctx, "A")).CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}))
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	publishN(t, js, "a", 5)
	a, _ := n.e.Stream("A")
	path := n.e.storePath(a.group)
	b := must(os.ReadFile(path))
	saved.Store(&b)
	ruin(t, path) // in the page cache, which is what is mapped

	// Applying this meets it.
	up := must(js.Stream(ctx, "A")).CachedInfo().Config
	up.MaxMsgs = 100
	_, err := js.UpdateStream(ctx, up)
	if code := errorCode(err); err != nil && code != 10194 {
		t.Fatalf("update: %v", err)
	}
	eventually(t, "the stream serves again", func() bool { _, ok := n.e.Stream("A"); return ok })
	s, _ := n.e.Stream("A")
	if s == a || s.UID() != a.UID() {
		t.Fatal("not made anew")
	}
	if st := s.State(); st.Msgs != 100 || st.Last != 2005 { // the update was in the log
		t.Fatalf("%+v", st)
	}
	if ack := must(js.Publish(ctx, "a", []byte("next"))); ack.Sequence != 2006 {
		t.Fatalf("sequence %d", ack.Sequence)
	}
	if m := must(c.Next(jetstream.FetchMaxWait(patience))); must(m.Metadata()).Sequence.Stream != 1906 && must(m.Metadata()).Sequence.Stream != 1907 {
		t.Fatalf("delivered %d", must(m.Metadata()).Sequence.Stream)
	}
	ev := must(events.NextMsg(patience))
	var adv api.StreamDamagedAdvisory
	if err := json.Unmarshal(ev.Data, &adv); err != nil {
		t.Fatal(err)
	}
	if adv.Type != api.AdvisoryStreamDamaged || adv.Stream != "A" || adv.LostMsgs != 2 || fmt.Sprint(adv.Lost) != "[{1990 1991}]" || adv.Quarantined {
		t.Fatalf("%+v", adv)
	}
	if st := n.e.Damage(); st.Repairs != 1 || st.LostMsgs != 2 || st.Quarantines != 0 {
		t.Fatalf("%+v", st)
	}
	if got := s.Lost(0); fmt.Sprint(got) != "[{1990 1991}]" {
		t.Fatalf("lost are %v", got)
	}
	must(js.Publish(ctx, "b", nil))
	n.stop()
	n = startNode(t, dir)
	s, _ = n.e.Stream("A")
	if st := s.State(); st.Msgs != 100 || st.Last != 2006 {
		t.Fatalf("after a restart: %+v", st)
	}
	if got := s.Lost(0); fmt.Sprint(got) != "[{1990 1991}]" {
		t.Fatalf("lost are %v after a restart", got)
	}
}

// Why a stream does not serve is asked by requests while its repair finds out that
// there is none.
func TestReasonOfQuarantine(t *testing.T) {
	srv := must(broker.New(broker.Options{Host: "127.0.0.1", Port: -1}))
	e := newEngine(Options{Account: srv.Account(), Dir: t.TempDir()})
	d := &downStream{rec: &streamRecord{Name: "S"}, cause: errors.New("damage was found")}
	asked, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for first := true; !strings.Contains(d.reason(), "could not be repaired (no way)"); first = false {
			if first {
				close(asked)
			}
			runtime.Gosched()
		}
	}()
	<-asked
	e.quarantine(d, errors.New("no way"))
	<-done
}
