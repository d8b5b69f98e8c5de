package jetstream

import (
	"errors"
	"fmt"
	"io/fs"
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
	"petiole/storage/vfs"
)

// A copy of the store directory taken while the process runs is what a kill
// leaves behind.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	ctx := testContext(t)
	createStream(t, js, jetstream.StreamConfig{Name: "GONE", Subjects: []string{"gone"}})
	publishN(t, js, "gone", 3)
	s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 100)
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	c := must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}))
	if _, err := js.UpdateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s", "t"}, Description: "changed"}); err != nil {
		t.Fatal(err)
	}
	publishN(t, js, "t", 100)
	if err := s.DeleteMsg(ctx, 150); err != nil {
		t.Fatal(err)
	}
	for m := range must(c.Fetch(7)).Messages() {
		if err := m.DoubleAck(ctx); err != nil {
			t.Fatal(err)
		}
	}
	n.e.book.saveMu.Lock() // its files go only when the list of streams is saved
	if err := js.DeleteStream(ctx, "GONE"); err != nil {
		t.Fatal(err)
	}
	created := must2(n.e.Stream("S")).Created()

	copied := copyLive(t, dir)
	n.e.book.saveMu.Unlock()
	n.crash()

	n = startNode(t, copied)
	_, js = n.connect()
	if names := n.e.Streams(); len(names) != 1 || names[0].Name() != "S" {
		t.Fatalf("streams after the restart: %v", names)
	}
	es := must2(n.e.Stream("S"))
	if st := es.DurableState(); st.Msgs != 199 || st.Last != 200 || st.Deleted != 1 {
		t.Errorf("state %+v", st)
	}
	if cfg := es.Config(); cfg.Description != "changed" || len(cfg.Subjects) != 2 || !es.Created().Equal(created) {
		t.Errorf("configuration %+v, created %v", cfg, es.Created())
	}
	c, err := js.Consumer(ctx, "S", "C")
	if err != nil {
		t.Fatal(err)
	}
	if info := c.CachedInfo(); info.AckFloor.Stream != 7 || info.NumPending != 192 {
		t.Errorf("consumer %+v", info)
	}
	if a, err := js.Publish(ctx, "t", nil); err != nil || a.Sequence != 201 {
		t.Errorf("publish after the restart: %+v, %v", a, err)
	}
	// A new stream of the old name does not see the old one's messages.
	createStream(t, js, jetstream.StreamConfig{Name: "GONE", Subjects: []string{"gone"}})
	if a, err := js.Publish(ctx, "gone", nil); err != nil || a.Sequence != 1 {
		t.Errorf("publish to the stream created again: %+v, %v", a, err)
	}
	dirs := must(os.ReadDir(filepath.Join(copied, "streams")))
	if len(dirs) != 2 {
		t.Errorf("%d stream directories, want 2", len(dirs))
	}
}

// The log stays within its budget although one stream has been idle since its
// beginning, and nothing is lost.
func TestLogBudget(t *testing.T) {
	dir := t.TempDir()
	tweak := func(o *Options) { o.SegmentSize, o.WALBudget, o.TableBudget = 256<<10, 1<<20, 512<<10 }
	n := startNode(t, dir, tweak)
	_, js := n.connect()
	ctx := testContext(t)
	createStream(t, js, jetstream.StreamConfig{Name: "IDLE", Subjects: []string{"idle"}})
	publishN(t, js, "idle", 1)
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	data := make([]byte, 16<<10)
	const msgs = 400 // 6.4 MB
	for range msgs {
		if _, err := js.PublishAsync("s", data); err != nil {
			t.Fatal(err)
		}
	}
	<-js.PublishAsyncComplete()
	// The checkpointer has the last word some time after the last commit.
	deadline := time.Now().Add(patience)
	for n.e.wal.Size() > 3<<20 { // budget, what came in since, and the segment at hand
		if time.Now().After(deadline) {
			t.Fatalf("the log has %d octets", n.e.wal.Size())
		}
		n.e.wakeCheckpointer()
		time.Sleep(10 * time.Millisecond)
	}
	if n.e.wal.Oldest() == 1 {
		t.Error("the idle stream holds back the first record")
	}
	n.crash()
	n = startNode(t, dir, tweak)
	_, js = n.connect()
	for name, want := range map[string]uint64{"IDLE": 1, "S": msgs} {
		if st := must2(n.e.Stream(name)).DurableState(); st.Msgs != want || st.Last != want {
			t.Errorf("%s after the restart: %+v", name, st)
		}
	}
	if a, err := js.Publish(ctx, "s", nil); err != nil || a.Sequence != msgs+1 {
		t.Errorf("publish after the restart: %+v, %v", a, err)
	}
}

// A clean end leaves nothing to replay.
func TestCleanEndCheckpoints(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 10)
	n.stop()
	n = startNode(t, dir)
	s := must2(n.e.Stream("S"))
	if s.holds() != 0 {
		t.Errorf("record %d was replayed", s.holds())
	}
	if st := s.DurableState(); st.Msgs != 10 {
		t.Errorf("state %+v", st)
	}
}

func TestLocked(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, err := Open(Options{Account: n.srv.Account(), Dir: n.dir})
	if !errors.Is(err, storage.ErrLocked) || !strings.Contains(err.Error(), n.dir) {
		t.Errorf("%v", err)
	}
}

// A log that was lost does not keep the store from starting, and does not number
// from one again: its new records would be taken for old ones.
func TestLostLog(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 10)
	n.stop()
	if err := os.RemoveAll(filepath.Join(dir, "wal")); err != nil {
		t.Fatal(err)
	}
	for start := range 2 {
		n = startNode(t, dir)
		_, js = n.connect()
		if lost := n.e.Damage().LostRecords; start == 0 && lost == 0 {
			t.Error("no records are said to be lost")
		}
		if ack := must(js.Publish(ctx, "s", nil)); ack.Sequence != uint64(11+start) {
			t.Errorf("start %d: sequence %d", start, ack.Sequence)
		}
		n.crash()
	}
	n = startNode(t, dir)
	if st := must2(n.e.Stream("S")).State(); st.Msgs != 12 || st.Last != 12 {
		t.Errorf("%+v", st)
	}
}

// brokenFS fails every sync once it is told to.
type brokenFS struct {
	vfs.FS
	broken atomic.Bool
}

type brokenFile struct {
	vfs.File
	fs *brokenFS
}

func (f *brokenFS) Open(name string, create bool) (vfs.File, error) {
	file, err := f.FS.Open(name, create)
	return &brokenFile{file, f}, err
}

func (f *brokenFile) Datasync() error {
	if f.fs.broken.Load() {
		return &fs.PathError{Op: "fdatasync", Path: "wal", Err: errors.New("input/output error")}
	}
	return f.File.Datasync()
}

func TestStorageFailure(t *testing.T) {
	disk := &brokenFS{FS: vfs.OS}
	dir := t.TempDir()
	n := startNode(t, dir, func(o *Options) { o.FS = disk })
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 3)
	disk.broken.Store(true)
	inbox := must(nc.SubscribeSync(nats.NewInbox()))
	if err := nc.PublishRequest("s", inbox.Subject, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-n.fail:
		if !strings.Contains(err.Error(), "input/output error") {
			t.Errorf("reported %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the failure is not reported")
	}
	if m, err := inbox.NextMsg(50 * time.Millisecond); err == nil {
		t.Errorf("answered %q", m.Data)
	}
	// From now on every publish is refused, and nothing waits for ever.
	if m, err := nc.Request("s", nil, patience); err != nil || !strings.Contains(string(m.Data), `"error"`) {
		t.Errorf("after the failure: %v, %v", m, err)
	}
	m, err := nc.Request("$JS.API.STREAM.PURGE.S", nil, patience)
	if err != nil || !strings.Contains(string(m.Data), `"error"`) {
		t.Errorf("purge after the failure: %v, %v", m, err)
	}
	n.srv.Account() // the node is ended by hand: closing reports the failure again
	ctx := testContext(t)
	if err := n.srv.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	_ = n.e.close(false)
	n.srv = nil
}

// brokenDirFS fails the syncs of one directory.
type brokenDirFS struct {
	vfs.FS
	dir string
}

func (f brokenDirFS) SyncDir(dir string) error {
	if dir == f.dir {
		return &fs.PathError{Op: "sync", Path: dir, Err: syscall.EIO}
	}
	return f.FS.SyncDir(dir)
}

// A failed sync of the directory of a stream that is deleted is a failed sync
// like any other.
func TestDeletionFails(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir, func(o *Options) { o.FS = brokenDirFS{vfs.OS, filepath.Join(dir, "streams")} })
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 3)
	if m, err := nc.Request("$JS.API.STREAM.DELETE.S", nil, patience); err != nil || !strings.Contains(string(m.Data), `"success":true`) {
		t.Fatalf("delete: %v, %v", m, err)
	}
	n.e.wakeKeeper()
	select {
	case err := <-n.fail:
		if !errors.Is(err, storage.ErrFailed) || !errors.Is(err, syscall.EIO) {
			t.Errorf("reported %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the failure is not reported")
	}
	if err := n.srv.Shutdown(testContext(t)); err != nil {
		t.Error(err)
	}
	_ = n.e.close(false) // it has been reported
	n.srv = nil
}

// lateDirFS fails the syncs of one directory, when it is told to.
type lateDirFS struct {
	vfs.FS
	dir        string
	under, now chan struct{}
}

func (f *lateDirFS) SyncDir(dir string) error {
	if dir != f.dir {
		return f.FS.SyncDir(dir)
	}
	select {
	case f.under <- struct{}{}:
	default:
	}
	<-f.now
	return &fs.PathError{Op: "sync", Path: dir, Err: syscall.EIO}
}

// What fails in the background while the engine is being closed is what Close
// returns: nobody waits for it any more, and nothing may be taken for saved.
func TestFailureWhileClosing(t *testing.T) {
	dir := t.TempDir()
	late := &lateDirFS{FS: vfs.OS, dir: filepath.Join(dir, "streams"), under: make(chan struct{}, 1), now: make(chan struct{})}
	n := startNode(t, dir, func(o *Options) { o.FS = late })
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 3)
	if m, err := nc.Request("$JS.API.STREAM.DELETE.S", nil, patience); err != nil || !strings.Contains(string(m.Data), `"success":true`) {
		t.Fatalf("delete: %v, %v", m, err)
	}
	n.e.wakeKeeper()
	<-late.under // the keeper removes the stream's files
	if err := n.srv.Shutdown(testContext(t)); err != nil {
		t.Error(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- n.e.Close() }()
	<-n.e.ending.Done() // it has begun
	close(late.now)
	if err := <-closed; !errors.Is(err, storage.ErrFailed) || !errors.Is(err, syscall.EIO) {
		t.Errorf("closed with %v", err)
	}
	n.srv = nil
}

func TestIngestAndWatch(t *testing.T) {
	for _, interval := range []time.Duration{0, 20 * time.Millisecond} {
		t.Run(fmt.Sprint(interval), func(t *testing.T) {
			dir := t.TempDir()
			tweak := func(o *Options) { o.SyncInterval = interval }
			n := startNode(t, dir, tweak)
			seen := make(chan struct{}, 1)
			defer n.e.WatchStreams(func() {
				select {
				case seen <- struct{}{}:
				default:
				}
			})()
			cfg := api.StreamConfig{Name: "PLANT", Metadata: map[string]string{MetaIngest: "true"}}
			s, err := n.e.EnsureStream(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if again, err := n.e.EnsureStream(cfg); err != nil || again != s {
				t.Fatalf("once more: %v, %v", again, err)
			}
			<-seen
			grown := make(chan struct{}, 1)
			defer s.Watch(func() {
				select {
				case grown <- struct{}{}:
				default:
				}
			})()
			uid := [16]byte{7}
			in := &command.Ingest{Edge: "E", UID: uid, Incarnation: 1, Base: 1}
			prev := command.Seed(uid, 1, 1)
			type outcome struct {
				pos command.Position
				err error
			}
			results := make(chan outcome, 20)
			for i := range uint64(10) {
				in.First, in.Through = i+1, i+1
				in.PrevChain, in.Chain = prev, [16]byte{byte(i + 1)}
				in.Msgs = []command.IngestMsg{{Seq: i + 1, Time: 5, Subject: "plant.a", Data: fmt.Append(nil, i)}}
				prev = in.Chain
				s.Ingest(in, func(p command.Position, err error) {
					if st := s.DurableState(); interval > 0 && st.Last < p.Through {
						err = errors.Join(err, fmt.Errorf("through %d is acknowledged, %d durable", p.Through, st.Last))
					}
					results <- outcome{p, err}
				})
			}
			in.First, in.Through, in.PrevChain = 12, 12, prev
			in.Msgs[0].Seq = 12
			s.Ingest(in, func(p command.Position, err error) { results <- outcome{p, err} })
			n.e.Kick()
			for i := range uint64(10) {
				if r := <-results; r.err != nil || r.pos.Through != i+1 {
					t.Fatalf("batch %d: %+v, %v", i, r.pos, r.err)
				}
			}
			if r := <-results; !errors.Is(r.err, command.ErrOutOfOrder) || r.pos.Through != 10 {
				t.Fatalf("a batch with a hole: %+v, %v", r.pos, r.err)
			}
			for s.DurableState().Last != 10 {
				select {
				case <-grown:
				case <-time.After(patience):
					t.Fatalf("durable: %+v", s.DurableState())
				}
			}
			n.crash()
			n = startNode(t, dir, tweak)
			s = must2(n.e.Stream("PLANT"))
			if p, ok := s.Position("E", uid); !ok || p.Through != 10 || p.Msgs != 10 || len(p.Ladder) != 10 {
				t.Errorf("position after the restart: %+v", p)
			}
			if st := s.DurableState(); st.Msgs != 10 {
				t.Errorf("state after the restart: %+v", st)
			}
		})
	}
}
