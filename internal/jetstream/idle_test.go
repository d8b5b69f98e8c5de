package jetstream

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
	"petiole/storage/msgstore"
)

// eventually fails the test if a condition does not come true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// openFiles counts the descriptors of this process under dir; false where the
// system does not tell.
func openFiles(dir string) (n int, ok bool) {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0, false
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, dir) {
			n++
		}
	}
	return n, true
}

// Streams that are not in use have no files open, are described without opening
// any, and go on where they were when they are used again.
func TestIdleStreams(t *testing.T) {
	const streams, bound = 24, 8
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir, func(o *Options) { o.MaxOpenStores, o.IdleClose = bound, 60*time.Millisecond })
	_, js := n.connect()
	name := func(i int) string { return fmt.Sprintf("S%d", i) }
	for i := range streams {
		createStream(t, js, jetstream.StreamConfig{Name: name(i), Subjects: []string{fmt.Sprintf("s.%d.>", i)}, FirstSeq: uint64(1 + 10*i)})
		for k := range 3 {
			must(js.Publish(ctx, fmt.Sprintf("s.%d.%d", i, k), []byte{byte(i), byte(k)}))
		}
	}
	// Above the bound, those with tables not checkpointed are checkpointed.
	eventually(t, "no more files open than allowed", func() bool { return n.e.openStores.Load() <= bound })
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	none := func(n *node) {
		t.Helper()
		eventually(t, "no files open", func() bool { return n.e.openStores.Load() == 0 })
		if got, ok := openFiles(filepath.Join(dir, "streams")); ok && got != 0 {
			t.Fatalf("%d descriptors of streams", got)
		}
	}
	check := func(n *node, js jetstream.JetStream) {
		t.Helper()
		none(n)
		seen := 0
		for info := range js.ListStreams(ctx).Info() {
			seen++
			if info.State.Msgs != 3 || info.State.LastSeq-info.State.FirstSeq != 2 || info.State.NumSubjects != 3 {
				t.Fatalf("%s: %+v", info.Config.Name, info.State)
			}
		}
		if open := n.e.openStores.Load(); seen != streams || open != 0 {
			t.Fatalf("%d streams described, with %d opened", seen, open)
		}
	}
	check(n, js)
	n.stop()
	n = startNode(t, dir, func(o *Options) { o.MaxOpenStores, o.IdleClose = bound, 60*time.Millisecond })
	_, js = n.connect()
	check(n, js)

	// One is used again: what it had is there, and it goes on.
	s := must(js.Stream(ctx, name(7)))
	c := must(s.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C"}))
	if ack := must(js.Publish(ctx, "s.7.9", nil)); ack.Sequence != 74 {
		t.Fatalf("sequence %d, want 74", ack.Sequence)
	}
	for want := uint64(71); want <= 74; want++ {
		m := must(c.Next(jetstream.FetchMaxWait(patience)))
		if meta := must(m.Metadata()); meta.Sequence.Stream != want {
			t.Fatalf("message %d, want %d", meta.Sequence.Stream, want)
		}
		if err := m.DoubleAck(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(n.e.wal.Commit(), n.e.Checkpoint()); err != nil { // with records that nobody waits for
		t.Fatal(err)
	}
	none(n)
	if info := must(c.Info(ctx)); info.AckFloor.Stream != 74 || info.NumPending != 0 {
		t.Fatalf("%+v", info)
	}
}

// The log stays within its budget while some streams are busy and many hold a
// few old records each, and what is in it comes back.
func TestLogBudgetWithIdleStreams(t *testing.T) {
	const idle, busy, budget = 20, 3, 2 << 20
	ctx := testContext(t)
	dir := t.TempDir()
	small := func(o *Options) { o.WALBudget, o.SegmentSize, o.TableBudget = budget, 256<<10, 512<<10 }
	n := startNode(t, dir, small)
	_, js := n.connect()
	for i := range idle + busy {
		createStream(t, js, jetstream.StreamConfig{Name: fmt.Sprintf("S%d", i), Subjects: []string{fmt.Sprintf("s.%d", i)}})
		must(js.Publish(ctx, fmt.Sprintf("s.%d", i), []byte("first")))
	}
	data := make([]byte, 4<<10)
	most := int64(0)
	for i := range 6000 {
		if _, err := js.PublishAsync(fmt.Sprintf("s.%d", idle+i%busy), data, jetstream.WithStallWait(patience)); err != nil {
			t.Fatal(err)
		}
		if i%64 == 0 {
			most = max(most, n.e.wal.Size())
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(patience):
		t.Fatal("publishing takes too long")
	}
	// What publishers have handed in when it is full comes on top.
	if most > budget+budget/2 {
		t.Fatalf("the log took %d octets, its budget is %d", most, budget)
	}
	n.crash()
	n = startNode(t, dir, small)
	for i := range idle + busy {
		want := uint64(1)
		if i >= idle {
			want = 2001
		}
		s, _ := n.e.Stream(fmt.Sprintf("S%d", i))
		if st := s.State(); st.Msgs != want {
			t.Fatalf("S%d: %+v, want %d messages", i, st, want)
		}
	}
}

// Deleting and creating streams wait neither for a checkpoint that runs nor for
// the meta database; files go later, also if the process is cut short before.
func TestDeleteInTheBackground(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	must(js.Publish(ctx, "a", []byte("one")))
	a, _ := n.e.Stream("A")
	group := a.group
	a.ckptMu.Lock() // a checkpoint that takes long
	n.e.book.saveMu.Lock()
	if err := js.DeleteStream(ctx, "A"); err != nil {
		t.Fatal(err)
	}
	createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	if ack := must(js.Publish(ctx, "a", []byte("two"))); ack.Sequence != 1 {
		t.Fatalf("sequence %d in a new stream", ack.Sequence)
	}
	files := func(g storage.GroupID) bool {
		_, err := os.Stat(filepath.Join(dir, "streams", groupDir(g)))
		return err == nil
	}
	if !files(group) {
		t.Fatal("the files have gone before the meta database knew")
	}
	// The log keeps what the meta database does not know.
	if h := n.e.book.holds(); h == 0 {
		t.Fatal("the log may drop the deletion")
	}
	n.e.book.saveMu.Unlock()
	a.ckptMu.Unlock()
	eventually(t, "files of a deleted stream go", func() bool { return !files(group) })

	// The power goes before the meta database knows of the next deletion.
	b, _ := n.e.Stream("A")
	n.e.book.saveMu.Lock()
	if err := js.DeleteStream(ctx, "A"); err != nil {
		t.Fatal(err)
	}
	image := copyLive(t, dir)
	n.e.book.saveMu.Unlock()
	n.stop()
	dir = image
	if !files(b.group) {
		t.Fatal("the files have gone before the meta database knew")
	}
	n = startNode(t, dir)
	if len(n.e.Streams()) != 0 {
		t.Fatal("a deleted stream is back")
	}
	eventually(t, "files of a deleted stream go after the next start", func() bool { return !files(b.group) })
	n.stop()
	if left, _ := os.ReadDir(filepath.Join(dir, "parked")); len(left) != 0 {
		t.Fatal("the directory of a deleted stream was parked")
	}
}

// A directory of messages that the list of streams does not know is put aside,
// whole; one that never came to be a stream's goes.
func TestUnknownDirectories(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	must(js.Publish(ctx, "a", nil))
	n.stop()
	streams := filepath.Join(dir, "streams")
	used := must(msgstore.Open(filepath.Join(streams, groupDir(77)), msgstore.Options{}))
	must(used.Append(storage.Message{Subject: "x", Data: []byte("kept")}))
	if !used.Freeze(1, nil) {
		t.Fatal("not frozen")
	}
	if err := used.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	if err := used.Close(); err != nil {
		t.Fatal(err)
	}
	if err := must(msgstore.Open(filepath.Join(streams, groupDir(78)), msgstore.Options{})).Close(); err != nil {
		t.Fatal(err)
	}
	beside := filepath.Join(streams, groupDir(80)) // an empty store with something parked beside it
	if err := must(msgstore.Open(beside, msgstore.Options{})).Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(beside, parkedName), parkedBegin(parkedVersion), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{groupDir(79), "notes"} {
		if err := os.MkdirAll(filepath.Join(streams, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(streams, name, "f"), []byte("f"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n = startNode(t, dir)
	if s, ok := n.e.Stream("A"); !ok || s.State().Msgs != 1 {
		t.Fatal("the stream is gone")
	}
	left := must(os.ReadDir(streams))
	if len(left) != 1 {
		t.Fatalf("%v are left", left)
	}
	var parked []string
	for _, d := range must(os.ReadDir(filepath.Join(dir, "parked"))) {
		parked = append(parked, strings.SplitN(d.Name(), ".", 2)[0])
		if strings.HasPrefix(d.Name(), groupDir(77)) {
			s := must(msgstore.Open(filepath.Join(dir, "parked", d.Name()), msgstore.Options{}))
			if m, err := s.Load(1); err != nil || string(m.Data) != "kept" {
				t.Fatalf("%q, %v", m.Data, err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if want := []string{groupDir(77), groupDir(79), groupDir(80), "notes"}; fmt.Sprint(parked) != fmt.Sprint(want) {
		t.Fatalf("parked are %v, want %v", parked, want)
	}
}
