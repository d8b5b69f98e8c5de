package jetstream

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/jetstream/command"
	"petiole/storage/msgstore"
)

// spoil destroys the pages of a stream's file, which is open, that hold the text.
func spoil(t *testing.T, path, text string) {
	t.Helper()
	b := must(os.ReadFile(path))
	f := must(os.OpenFile(path, os.O_RDWR, 0))
	const page = 8192 // of msgstore's files
	n := 0
	for off := 0; off+page <= len(b); off += page {
		if bytes.Contains(b[off:off+page], []byte(text)) {
			must(f.WriteAt(bytes.Repeat([]byte{0x5A}, page), int64(off)))
			n++
		}
	}
	if err := f.Close(); err != nil || n == 0 {
		t.Fatalf("%d pages, %v", n, err)
	}
}

// A stream whose messages' pages are destroyed goes on: what limits, deletions
// and purges remove is removed, and the file is repaired beside that. A purge of
// all needs no repair.
func TestRemovalOverDestroyedPages(t *testing.T) {
	ctx := testContext(t)
	for _, what := range []string{"limits", "limits, a large file", "delete", "purge", "purge all"} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			n := startNode(t, dir, func(o *Options) {
				if strings.HasSuffix(what, "a large file") {
					o.mendLong = 1
				}
			})
			_, js := n.connect()
			str := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s", "t"}, MaxMsgs: 500})
			c := must(str.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}))
			for i := range 500 {
				mark := "fine"
				if i >= 20 && i < 60 {
					mark = "SPOILED"
				}
				must(js.PublishAsync("s", []byte(mark+strings.Repeat("x", 400))))
			}
			<-js.PublishAsyncComplete()
			if err := n.e.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			s := must2(n.e.Stream("S"))
			spoil(t, n.e.storePath(s.group), "SPOILED")
			last := uint64(500)
			repaired := true
			switch what {
			case "limits", "limits, a large file":
				for range 30 {
					last = must(js.Publish(ctx, "t", nil)).Sequence
				}
			case "delete":
				if err := str.DeleteMsg(ctx, 40); err != nil {
					t.Fatal(err)
				}
			case "purge":
				if err := str.Purge(ctx, jetstream.WithPurgeSequence(50)); err != nil {
					t.Fatal(err)
				}
			case "purge all":
				if err := str.Purge(ctx); err != nil {
					t.Fatal(err)
				}
				repaired = false
			}
			if repaired {
				eventually(t, "the file is repaired", func() bool { return n.e.Damage().Repairs == 1 && s.keep.Load() == 0 })
			}
			if now, ok := n.e.Stream("S"); !ok || now != s {
				t.Fatal("the stream did not go on")
			}
			if seq := must(js.Publish(ctx, "t", nil)).Sequence; seq != last+1 {
				t.Errorf("sequence %d", seq)
			}
			if err := n.e.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			st := s.State()
			pending := must(c.Info(ctx)).NumPending
			if got := st.Msgs; pending != got {
				t.Errorf("%d messages pending of %d", pending, got)
			}
			if !repaired && st.Msgs != 1 || n.e.Damage().Repairs > 1 || len(n.e.DownStreams()) > 0 {
				t.Errorf("%+v, %+v", st, n.e.Damage())
			}
			for seen := uint64(0); seen < st.Msgs; seen++ {
				m, err := c.Next(jetstream.FetchMaxWait(patience))
				if err != nil {
					t.Fatalf("after %d of %d: %v", seen, st.Msgs, err)
				}
				if bytes.Contains(m.Data(), []byte("SPOILED")) && what == "purge all" {
					t.Error("what was destroyed is back")
				}
			}
			n.stop()
			n = startNode(t, dir)
			if again := must2(n.e.Stream("S")).State(); again != st || n.e.Damage().Repairs != 0 {
				t.Errorf("after a restart: %+v, was %+v", again, st)
			}
			if _, err := os.Stat(n.e.storePath(s.group)); err != nil {
				t.Error(err)
			}
		})
	}
}

// slowRepair is a store whose repair goes on until it is ended or let come to its end.
type slowRepair struct {
	*msgstore.Store
	begun chan struct{}
	end   chan struct{}
}

func (s slowRepair) Repair(ctx context.Context, alone func(step func() error) error) (msgstore.RepairReport, error) {
	s.begun <- struct{}{}
	select {
	case <-ctx.Done():
		return msgstore.RepairReport{}, ctx.Err()
	case <-s.end:
	}
	return s.Store.Repair(ctx, alone)
}

// A stream whose repair takes long serves meanwhile, until log or tables become too
// long for that. From then on nobody else has to wait for it, and nothing of it is
// lost.
func TestLongRepairMakesWay(t *testing.T) {
	const msgs = 500
	for _, test := range []struct {
		name    string
		pressed bool
	}{{"idle", false}, {"pressed", true}} {
		t.Run(test.name, func(t *testing.T) {
			ctx := testContext(t)
			begun, end := make(chan struct{}, 2), make(chan struct{})
			n := startNode(t, t.TempDir(), func(o *Options) {
				o.mendLong = 1
				o.SegmentSize, o.WALBudget = 128<<10, 1<<20
				o.openStore = func(dir string, o msgstore.Options) (backing, error) {
					s, err := msgstore.Open(dir, o)
					if err != nil {
						return nil, err
					}
					return slowRepair{s, begun, end}, nil
				}
			})
			_, js := n.connect()
			str := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
			createStream(t, js, jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"o"}})
			for i := range msgs {
				mark := "fine"
				if i >= 20 && i < 60 {
					mark = "SPOILED"
				}
				must(js.PublishAsync("s", []byte(mark+strings.Repeat("x", 400))))
			}
			<-js.PublishAsyncComplete()
			if err := n.e.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			s := must2(n.e.Stream("S"))
			spoil(t, n.e.storePath(s.group), "SPOILED")
			if err := str.DeleteMsg(ctx, 40); err != nil {
				t.Fatal(err)
			}
			<-begun
			if seq := must(js.Publish(ctx, "s", []byte("meanwhile"))).Sequence; seq != msgs+1 {
				t.Fatalf("sequence %d", seq)
			}
			others := 0
			if test.pressed {
				for range 5 { // budgets
					for range 100 {
						must(js.PublishAsync("o", make([]byte, 10<<10)))
						others++
					}
					<-js.PublishAsyncComplete()
				}
				<-begun // anew, with the stream out of service
				if down := n.e.DownStreams(); len(down) != 1 || down[0].Name != "S" {
					t.Fatalf("%+v", down)
				}
				eventually(t, "the log does without it", func() bool {
					n.e.wakeCheckpointer()
					return n.e.wal.Size() <= n.e.o.WALBudget
				})
			}
			close(end)
			eventually(t, "the file is repaired", func() bool {
				now, ok := n.e.Stream("S")
				return n.e.Damage().Repairs == 1 && ok && now.keep.Load() == 0
			})
			now := must2(n.e.Stream("S"))
			if !test.pressed && now != s {
				t.Error("the stream did not go on")
			}
			lost := n.e.Damage().LostMsgs
			if st := now.State(); st.Last != msgs+1 || st.Msgs+lost != msgs || lost == 0 || lost > 60 {
				t.Errorf("%+v, lost %d", st, lost)
			}
			if m := must(str.GetMsg(ctx, msgs+1)); string(m.Data) != "meanwhile" {
				t.Errorf("message %d is %q", m.Sequence, m.Data)
			}
			if st := must2(n.e.Stream("OTHER")).State(); st.Msgs != uint64(others) {
				t.Errorf("others: %+v", st)
			}
			n.stop()
		})
	}
}

// A long repair makes way also if the others are in use all the time, so that there
// always is one to be checkpointed.
func TestLongRepairMakesWayForBusy(t *testing.T) {
	begun, end := make(chan struct{}, 2), make(chan struct{})
	var busy atomic.Pointer[func()] // called after each checkpoint
	n := startNode(t, t.TempDir(), func(o *Options) {
		o.mendLong = 1
		o.SegmentSize, o.WALBudget = 128<<10, 1<<20
		o.openStore = func(dir string, o msgstore.Options) (backing, error) {
			s, err := msgstore.Open(dir, o)
			if err != nil {
				return nil, err
			}
			return busyStore{slowRepair{s, begun, end}, &busy}, nil
		}
	})
	_, js := n.connect()
	str := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	createStream(t, js, jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"o"}})
	for range 100 {
		must(js.Publish(testContext(t), "s", []byte("SPOILED"+strings.Repeat("x", 400))))
	}
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	s, other := must2(n.e.Stream("S")), must2(n.e.Stream("OTHER"))
	spoil(t, n.e.storePath(s.group), "SPOILED")
	if err := str.DeleteMsg(testContext(t), 40); err != nil {
		t.Fatal(err)
	}
	<-begun
	eventually(t, "the log is kept", func() bool { return s.keep.Load() != 0 })
	more := func() {
		p := pubPool.Get().(*pubReq)
		p.reply, p.head = p.reply[:0], command.AppendPublishHead(p.head[:0], time.Now().UnixNano(), 0, "o", 0)
		if err := n.e.prop.Propose(other.group, p, p.head, make([]byte, 1000)); err == nil {
			_ = n.e.wal.Commit()
		}
	}
	busy.Store(&more)
	defer busy.Store(nil)
	for range 60 {
		must(js.Publish(testContext(t), "o", make([]byte, 10<<10)))
	}
	n.e.wakeCheckpointer()
	eventually(t, "the stream is taken out of service", func() bool { return len(n.e.DownStreams()) == 1 })
	busy.Store(nil)
	close(end)
	eventually(t, "the file is repaired", func() bool { return n.e.Damage().Repairs == 1 && len(n.e.DownStreams()) == 0 })
	if st := must2(n.e.Stream("OTHER")).State(); st.Msgs < 61 {
		t.Errorf("others: %+v", st)
	}
}

// busyStore is a store with which something happens as soon as it has been
// checkpointed.
type busyStore struct {
	slowRepair
	then *atomic.Pointer[func()]
}

func (s busyStore) Checkpoint() error {
	err := s.slowRepair.Checkpoint()
	if then := s.then.Load(); then != nil {
		(*then)()
	}
	return err
}

// The table of a stream whose file is being repaired for long, which cannot be
// checkpointed, has no others checkpointed.
func TestLargestWithoutRepaired(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	for _, name := range []string{"S", "OTHER"} {
		createStream(t, js, jetstream.StreamConfig{Name: name, Subjects: []string{name}})
		publishN(t, js, name, 10)
	}
	s := must2(n.e.Stream("S"))
	grow := 2 * n.e.tableLimit.Load()
	s.mu.Lock()
	s.tableBytes.Add(grow)
	n.e.tableBytes.Add(grow)
	list := n.e.largest()
	none := context.CancelFunc(func() {})
	s.yields.Store(&none)
	repaired := n.e.largest()
	s.yields.Store(nil)
	s.measure()
	s.mu.Unlock()
	if len(list) != 1 || list[0] != s {
		t.Errorf("%d streams are to be checkpointed", len(list))
	}
	if len(repaired) != 0 {
		t.Errorf("%d streams are to be checkpointed during the repair", len(repaired))
	}
}

// Messages that damage only hides, as the way to them is destroyed, are given up by
// nobody: neither by the stream nor by a consumer, who waits for the repair.
func TestHiddenMessagesAreFound(t *testing.T) {
	ctx := testContext(t)
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	str := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	const msgs = 3000
	for range msgs {
		must(js.PublishAsync("s", bytes.Repeat([]byte("x"), 400)))
	}
	<-js.PublishAsyncComplete()
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	s := must2(n.e.Stream("S"))
	blurBranches(t, n.e.storePath(s.group))
	// Who asks for one is told so, once at most: it is found.
	for told := false; ; told = true {
		m, err := str.GetMsg(ctx, msgs-1)
		if err == nil && m.Sequence == msgs-1 {
			break
		}
		if !strings.HasSuffix(fmt.Sprint(err), mendingText) {
			t.Fatalf("after %v: %v", told, err)
		}
		eventually(t, "the file is repaired", func() bool { return n.e.Damage().Repairs > 0 })
	}
	c := must(str.CreateConsumer(ctx, jetstream.ConsumerConfig{AckPolicy: jetstream.AckNonePolicy}))
	next := uint64(1)
	for next <= msgs {
		batch, err := c.Fetch(500, jetstream.FetchMaxWait(patience))
		if err != nil {
			t.Fatal(err)
		}
		had := next
		for m := range batch.Messages() {
			if seq := must(m.Metadata()).Sequence.Stream; seq != next {
				t.Fatalf("sequence %d, want %d", seq, next)
			}
			next++
		}
		if next == had {
			t.Fatalf("nothing comes after %d: %v", next-1, batch.Error())
		}
	}
	if st, d := s.State(), n.e.Damage(); st.Msgs != msgs || d.LostMsgs != 0 || d.Repairs == 0 {
		t.Errorf("%+v, %+v", st, d)
	}
}

// blurBranches zeroes the second half of the keys of each branch page of a bbolt
// file that is open: searches end in the wrong leaf.
func blurBranches(t *testing.T, path string) {
	t.Helper()
	b := must(os.ReadFile(path))
	f := must(os.OpenFile(path, os.O_RDWR, 0))
	const page = 8192 // of msgstore's files
	n := 0
	for off := 0; off+page <= len(b); off += page {
		// id, flags (1: branch), number of elements of 16 octets; keys of 8 behind them
		id, flags := binary.LittleEndian.Uint64(b[off:]), binary.LittleEndian.Uint16(b[off+8:])
		count := int(binary.LittleEndian.Uint16(b[off+10:]))
		if id != uint64(off/page) || flags != 1 || count < 16 || 16+24*count > page {
			continue
		}
		must(f.WriteAt(make([]byte, 4*count), int64(off+16+16*count+4*count)))
		n++
	}
	if err := f.Close(); err != nil || n == 0 {
		t.Fatalf("%d branch pages, %v", n, err)
	}
}
