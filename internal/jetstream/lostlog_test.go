package jetstream

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// fullBacking is a store whose checkpoints find no room.
type fullBacking struct{ backing }

func (fullBacking) Checkpoint() error {
	return &os.PathError{Op: "write", Path: "msgs.db", Err: syscall.ENOSPC}
}

// newestSegment returns the path of the log's newest segment.
func newestSegment(t *testing.T, dir string) string {
	t.Helper()
	list := must(filepath.Glob(filepath.Join(dir, "wal", "*.wal")))
	if len(list) == 0 {
		t.Fatal("there is no log")
	}
	return slices.Max(list)
}

// flip changes a bit of the log in what is found there; with header that of the
// batch before it.
func flip(t *testing.T, dir, what string, header bool) {
	t.Helper()
	for _, path := range must(filepath.Glob(filepath.Join(dir, "wal", "*.wal"))) {
		b := must(os.ReadFile(path))
		at := bytes.Index(b, []byte(what))
		if at < 0 {
			continue
		}
		if header {
			at = bytes.LastIndex(b[:at], []byte("PWB\x02")) + 20
		}
		b[at] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatalf("%q is not in the log", what)
}

// content returns what a stream has under each sequence.
func content(t *testing.T, s *Stream) map[uint64]string {
	t.Helper()
	m := map[uint64]string{}
	if err := s.store.Range(0, func(msg storage.Message) bool { m[msg.Seq] = string(msg.Data); return true }); err != nil {
		t.Fatal(err)
	}
	return m
}

// What has been decided about the end of a log that was cut is in the log, so
// that it holds though nothing could be checkpointed before the next start.
func TestLossIsSettledOnFullDisk(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	for _, s := range []string{"A", "B"} {
		createStream(t, js, jetstream.StreamConfig{Name: s, Subjects: []string{s}})
		publishN(t, js, s, 5)
	}
	n.crash()
	path := newestSegment(t, dir)
	if err := os.Truncate(path, must(os.Stat(path)).Size()-1000); err != nil {
		t.Fatal(err)
	}
	n = startNode(t, dir, func(o *Options) {
		o.openStore = func(dir string, o msgstore.Options) (backing, error) {
			st, err := msgstore.Open(dir, o)
			return fullBacking{st}, err
		}
	})
	_, js = n.connect()
	if n.e.Damage().LostRecords == 0 {
		t.Fatal("the loss is not counted")
	}
	ack := must(js.Publish(ctx, "B", []byte("after")))
	n.crash()
	for range 2 {
		n = startNode(t, dir)
		s := must2(n.e.Stream("B"))
		if got := content(t, s); got[ack.Sequence] != "after" || len(got) != 6 || s.State().Last != ack.Sequence {
			t.Fatalf("sequence %d was acknowledged: %v, %+v", ack.Sequence, got, s.State())
		}
		n.stop()
	}
}

// A stream takes nothing while there is no room to settle what the log has lost.
func TestUnsettledTakesNothing(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 3)
	s := must2(n.e.Stream("S"))
	s.mu.Lock()
	s.skip = 2
	s.mu.Unlock()
	s.unsettled.Store(true)
	if _, err := js.Publish(testContext(t), "s", nil); errorCode(err) != 10023 {
		t.Fatalf("publish: %v", err)
	}
	n.e.space.unsettled.Store(true)
	n.e.wakeKeeper()
	eventually(t, "it is settled", func() bool { return !s.unsettled.Load() })
	if ack := must(js.Publish(testContext(t), "s", nil)); ack.Sequence != 6 {
		t.Fatalf("sequence %d", ack.Sequence)
	}
	if got := s.Lost(0); fmt.Sprint(got) != "[{4 5}]" {
		t.Fatalf("lost are %v", got)
	}
}

// A stream that does not serve at the start leaves out what the log has lost as
// well, and it is settled before it serves.
func TestLossOfStreamThatIsDown(t *testing.T) {
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
	for i := 6; i <= 8; i++ {
		must(js.Publish(ctx, "s", fmt.Appendf(nil, "message number %d", i)))
	}
	n.crash()
	flip(t, dir, "message number 7", true)
	ruin(t, path)
	n = startNode(t, dir, func(o *Options) {
		o.salvage = func(string) (msgstore.RepairReport, error) {
			return msgstore.RepairReport{File: path}, os.WriteFile(path, good, 0o600)
		}
	})
	_, js = n.connect()
	eventually(t, "the stream serves again", func() bool { _, ok := n.e.Stream("S"); return ok })
	if ack := must(js.Publish(ctx, "s", []byte("after"))); ack.Sequence != 9 {
		t.Fatalf("sequence %d", ack.Sequence)
	}
	want := map[uint64]string{6: "message number 6", 8: "message number 8", 9: "after"}
	for start := range 2 {
		got := content(t, must2(n.e.Stream("S")))
		for seq, data := range want {
			if got[seq] != data {
				t.Fatalf("start %d: message %d is %q, want %q", start, seq, got[seq], data)
			}
		}
		if got := must2(n.e.Stream("S")).Lost(0); fmt.Sprint(got) != "[{7 7}]" {
			t.Fatalf("lost are %v", got)
		}
		n.crash()
		n = startNode(t, dir)
	}
}

// A batch had a sequence for each of its messages.
func TestLostBatch(t *testing.T) {
	ctx := testContext(t)
	for _, header := range []bool{false, true} {
		dir := t.TempDir()
		n := startNode(t, dir)
		nc, js := n.connect()
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, AllowAtomicPublish: true})
		publishN(t, js, "s", 2)
		for i := 1; i <= 7; i++ {
			m := &nats.Msg{Subject: "s", Header: nats.Header{}, Data: fmt.Appendf(nil, "of the batch %d", i)}
			m.Header.Set("Nats-Batch-Id", "B")
			m.Header.Set("Nats-Batch-Sequence", fmt.Sprint(i))
			if i == 7 {
				m.Header.Set("Nats-Batch-Commit", "1")
			}
			must(nc.RequestMsgWithContext(ctx, m))
		}
		if last := must2(n.e.Stream("S")).State().Last; last != 9 {
			t.Fatalf("the last message is %d", last)
		}
		n.crash()
		flip(t, dir, "of the batch 3", header)
		n = startNode(t, dir)
		_, js = n.connect()
		if ack := must(js.Publish(ctx, "s", nil)); ack.Sequence < 10 || ack.Sequence > 3+maxBatchMsgs {
			t.Errorf("header %v: sequence %d was given out again", header, ack.Sequence)
		}
		n.stop()
	}
}

// Records of a stream that nothing tells of are put aside once, however often
// the log is read.
func TestOrphansAreParkedOnce(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "ORPHANED", Subjects: []string{"s"}})
	publishN(t, js, "s", 10)
	n.crash()
	flip(t, dir, "ORPHANED", false)
	for _, name := range []string{"meta.db", "streams"} {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	size := int64(0)
	for start := range 3 {
		n = startNode(t, dir)
		list := must(filepath.Glob(filepath.Join(dir, "parked", "*", parkedName)))
		if len(list) != 1 {
			t.Fatalf("start %d: parked are %v", start, list)
		}
		records := 0
		if _, err := scanParked(list[0], func(*wal.Record, uint32) error { records++; return nil }, func(parkedGap) { t.Error("damaged") }); err != nil || records != 10 {
			t.Fatalf("start %d: %d records are parked: %v", start, records, err)
		}
		if now := must(os.Stat(list[0])).Size(); start > 0 && now != size {
			t.Fatalf("start %d: what is parked has grown from %d to %d octets", start, size, now)
		} else {
			size = now
		}
		if parked := n.e.Damage().Parked; start > 0 && parked != 0 {
			t.Fatalf("start %d: %d things are said to have been parked", start, parked)
		}
		n.crash()
	}
}

// What lies behind lost records tells whose they were: only the stream that lost
// a message has a gap, and nothing else moves.
func TestLossOfOneStreamMovesNoOther(t *testing.T) {
	ctx := testContext(t)
	for _, header := range []bool{false, true} {
		dir := t.TempDir()
		n := startNode(t, dir)
		_, js := n.connect()
		for _, s := range []string{"A", "B", "C"} {
			createStream(t, js, jetstream.StreamConfig{Name: s, Subjects: []string{s + ".>"}, AllowAtomicPublish: s == "B"})
		}
		c := must(must(js.Stream(ctx, "C")).CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C", AckPolicy: jetstream.AckExplicitPolicy}))
		for i := 1; i <= 6; i++ {
			for _, s := range []string{"A", "B", "C"} {
				must(js.Publish(ctx, s+".x", fmt.Appendf(nil, "message %d of %s", i, s)))
			}
			if err := must(c.Next(jetstream.FetchMaxWait(patience))).DoubleAck(ctx); err != nil {
				t.Fatal(err)
			}
		}
		n.crash()
		flip(t, dir, "message 3 of A", header)
		flip(t, dir, "message 5 of A", header)
		for start := range 3 {
			n = startNode(t, dir)
			_, js = n.connect()
			for _, name := range []string{"A", "B", "C"} {
				s := must2(n.e.Stream(name))
				got, last := content(t, s), uint64(6+start)
				for i := uint64(1); i <= last; i++ {
					want := fmt.Sprintf("message %d of %s", i, name)
					if name == "A" && (i == 3 || i == 5) {
						want = ""
					}
					if got[i] != want {
						t.Fatalf("header %v, start %d: message %d of %s is %q", header, start, i, name, got[i])
					}
				}
				lost, want := fmt.Sprint(s.Lost(0)), "[]"
				if name == "A" {
					want = "[{3 3} {5 5}]"
				}
				if lost != want || s.State().Last != last {
					t.Fatalf("header %v, start %d: %s has lost %s, is at %d", header, start, name, lost, s.State().Last)
				}
				ack := must(js.Publish(ctx, name+".x", fmt.Appendf(nil, "message %d of %s", last+1, name)))
				if ack.Sequence != last+1 {
					t.Fatalf("header %v, start %d: %s goes on at %d", header, start, name, ack.Sequence)
				}
			}
			n.crash()
		}
	}
}

// Of streams at rest, of which nothing follows in the log, the head of the next
// segment tells what they have lost: nothing, if it was another's.
func TestLossOfOthersAtRest(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	small := func(o *Options) { o.SegmentSize = 64 << 10 }
	n := startNode(t, dir, small)
	_, js := n.connect()
	for _, s := range []string{"A", "B", "C"} {
		createStream(t, js, jetstream.StreamConfig{Name: s, Subjects: []string{s}})
		for i := 1; i <= 4; i++ {
			must(js.Publish(ctx, s, fmt.Appendf(nil, "message %d of %s", i, s)))
		}
	}
	for first := newestSegment(t, dir); newestSegment(t, dir) == first; {
		createStream(t, js, jetstream.StreamConfig{Name: "D", Subjects: []string{"d"}})
		must(js.Publish(ctx, "d", make([]byte, 8<<10)))
	}
	n.crash()
	flip(t, dir, "message 2 of A", true)
	flip(t, dir, "message 4 of B", true)
	want := map[string]string{"A": "[{2 2}]", "B": "[{4 4}]", "C": "[]", "D": "[]"}
	for start := range 3 {
		n = startNode(t, dir, small)
		_, js = n.connect()
		for name, lost := range want {
			s := must2(n.e.Stream(name))
			if got := fmt.Sprint(s.Lost(0)); got != lost {
				t.Errorf("start %d: %s has lost %s, want %s", start, name, got, lost)
			}
			if last := s.State().Last; name != "D" && last != uint64(4+start) {
				t.Errorf("start %d: %s is at %d", start, name, last)
			}
			must(js.Publish(ctx, must2(n.e.Stream(name)).Config().Subjects[0], nil))
		}
		n.crash()
	}
}

// A loss before the only segment of the log is told, and settled once.
func TestLossOfWholeLog(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 5)
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	publishN(t, js, "s", 3)
	n.crash()
	path := newestSegment(t, dir)
	if err := os.WriteFile(path, make([]byte, must(os.Stat(path)).Size()), 0o600); err != nil {
		t.Fatal(err)
	}
	for start := range 3 {
		n = startNode(t, dir)
		_, js = n.connect()
		// Until a checkpoint has what was settled the log is read from before the loss.
		if told := n.e.Damage().LostRecords > 0; told != (start < 2) {
			t.Fatalf("start %d: %d records are said to be lost", start, n.e.Damage().LostRecords)
		}
		if ack := must(js.Publish(ctx, "s", nil)); ack.Sequence != uint64(6+start) {
			t.Fatalf("start %d: sequence %d", start, ack.Sequence)
		}
		if start == 1 {
			if err := n.e.Checkpoint(); err != nil {
				t.Fatal(err)
			}
		}
		n.crash()
	}
}

// A segment of which nothing is left, before all others, is a loss that what follows
// tells the extent of.
func TestLossOfOldestSegment(t *testing.T) {
	ctx := testContext(t)
	for _, left := range []int64{0, 72, 3000} {
		dir := t.TempDir()
		small := func(o *Options) { o.SegmentSize = 64 << 10 }
		n := startNode(t, dir, small)
		_, js := n.connect()
		for _, s := range []string{"S", "D"} {
			createStream(t, js, jetstream.StreamConfig{Name: s, Subjects: []string{s}})
		}
		publishN(t, js, "S", 5)
		must(js.Publish(ctx, "D", nil))
		if err := n.e.Checkpoint(); err != nil {
			t.Fatal(err)
		}
		publishN(t, js, "S", 3)
		oldest := newestSegment(t, dir)
		for newestSegment(t, dir) == oldest {
			must(js.Publish(ctx, "D", make([]byte, 8<<10)))
		}
		sent := must(js.Publish(ctx, "D", nil)).Sequence
		n.crash()
		if err := os.Truncate(oldest, left); err != nil {
			t.Fatal(err)
		}
		for start := range 3 {
			n = startNode(t, dir, small)
			_, js = n.connect()
			s, d := must2(n.e.Stream("S")), must2(n.e.Stream("D"))
			if got := fmt.Sprint(s.Lost(0)); got != "[{6 8}]" {
				t.Errorf("%d octets left, start %d: S has lost %s", left, start, got)
			}
			if st := d.State(); st.Last != sent || st.Msgs >= sent || len(d.Lost(0)) == 0 {
				t.Errorf("%d octets left, start %d: D of %d: %+v, lost %v", left, start, sent, st, d.Lost(0))
			}
			if told := n.e.Damage().LostRecords > 0; start == 0 && !told {
				t.Errorf("%d octets left: the loss is not counted", left)
			}
			if seq := must(js.Publish(ctx, "S", nil)).Sequence; seq != uint64(9+start) {
				t.Errorf("%d octets left, start %d: sequence %d", left, start, seq)
			}
			n.crash()
		}
	}
}
