package storagetool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.etcd.io/bbolt"

	"petiole/internal/broker"
	engine "petiole/internal/jetstream"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/vfs"
	"petiole/storage/wal"
)

const perStream = 20

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// fill makes a store with a stream S in group 2 and stops it; with then, that
// runs while the program does. All is checkpointed, and the log is as if the
// program had died before it gave up what is.
func fill(t *testing.T, then func(dir string)) string {
	t.Helper()
	var log map[string][]byte
	dir := fillAndClose(t, func(dir string) {
		if then != nil {
			then(dir)
		}
		log = contents(t, dir)
	})
	for _, name := range must(filepath.Glob(filepath.Join(dir, "wal", "*"))) {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	for name, b := range log {
		if filepath.Base(filepath.Dir(name)) == "wal" {
			if err := os.WriteFile(name, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// fillAndClose is fill with a log that was closed.
func fillAndClose(t *testing.T, then func(dir string)) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	dir := t.TempDir()
	var e *engine.Engine
	srv := must(broker.New(broker.Options{Host: "127.0.0.1", Port: -1, JetStream: true, AfterRead: func() { e.AfterRead() }}))
	e = must(engine.Open(engine.Options{Account: srv.Account(), Dir: dir, SegmentSize: 1 << 20}))
	if err := srv.Start(); err != nil {
		t.Fatal(err)
	}
	nc := must(nats.Connect(srv.ClientURL(), nats.Timeout(time.Minute)))
	js := must(jetstream.New(nc))
	s := must(js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}))
	for i := range perStream {
		must(js.Publish(ctx, fmt.Sprintf("s.%d", i%3), fmt.Appendf(nil, "payload number %d", i+1)))
	}
	if err := s.DeleteMsg(ctx, 7); err != nil {
		t.Fatal(err)
	}
	must(s.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{Durable: "C"}))
	then(dir)
	nc.Close()
	if err := errors.Join(srv.Shutdown(ctx), e.Close()); err != nil {
		t.Fatal(err)
	}
	return dir
}

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) // only a lock
	return s
}

// contents returns all files of a store.
func contents(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for _, pattern := range []string{"*", "wal/*", "streams/*/*"} {
		for _, name := range must(filepath.Glob(filepath.Join(dir, pattern))) {
			// Beside a program that runs a file may get another name.
			fi, err := os.Stat(name)
			if errors.Is(err, fs.ErrNotExist) || err == nil && !fi.Mode().IsRegular() {
				continue
			}
			if b, err := os.ReadFile(name); !errors.Is(err, fs.ErrNotExist) {
				files[name] = must(b, err)
			}
		}
	}
	return files
}

// TestCleanShutdown: everything is checkpointed then, and the log empty.
func TestCleanShutdown(t *testing.T) {
	st := must(open(t, fillAndClose(t, func(string) {})).Stat())
	if l := st.Log; !l.CleanShutdown || l.Records != 0 || l.Segments != 1 || len(st.Damage) != 0 {
		t.Errorf("log: %+v, damage: %v", l, st.Damage)
	}
	// One message was deleted: it has been written all the same.
	if w := st.Written; w.Messages < st.Total.Content || w.Log <= w.Messages || w.Files <= 0 || st.Amplification != w.Amplification() || st.Amplification < 1 {
		t.Errorf("written: %+v, %.2f times", w, st.Amplification)
	}
}

// TestIntact looks at a store that nothing is wrong with, and leaves every
// octet of it as it was.
func TestIntact(t *testing.T) {
	dir := fill(t, nil)
	before := contents(t, dir)
	s := open(t, dir)
	st := must(s.Stat())
	if len(st.Streams) != 1 || len(st.Damage) != 0 {
		t.Fatalf("stat: %+v", st)
	}
	if got := st.Streams[0]; got.Name != "S" || got.Group != 2 || got.Messages != perStream-1 || got.First != 1 || got.Last != perStream ||
		got.LogRecords != 0 || got.PerMsg <= 0 || got.File != int64(len(before[filepath.Join(dir, "streams", "0000000000000002", "msgs.db")])) {
		t.Errorf("stream: %+v", got)
	}
	if l := st.Log; l.Segments < 1 || l.Oldest != 1 || l.Records != l.Newest || l.Records < perStream+3 || l.CleanShutdown {
		t.Errorf("log: %+v", l)
	}
	disk := int64(0)
	for name, b := range before {
		if base := filepath.Base(name); strings.HasSuffix(base, ".db") || base == "ballast" || filepath.Base(filepath.Dir(name)) == "wal" {
			disk += int64(len(b))
		}
	}
	if st.Total.Disk != disk || st.Total.Used+st.Total.Reserved != disk {
		t.Errorf("total %+v, files take %d", st.Total, disk)
	}
	r := must(s.Verify())
	if len(r.Damage) != 0 || r.Messages != perStream-1 || r.Records != st.Log.Records || r.Streams != 1 || r.MetaValues == 0 {
		t.Errorf("verify: %+v", r)
	}
	if err := s.Dump(DumpOptions{}, func(Line) error { return nil }); err != nil {
		t.Error(err)
	}
	if !maps.EqualFunc(before, contents(t, dir), bytes.Equal) {
		t.Error("the store has been changed")
	}
}

// TestLocked refuses the store of a running program, and what is no store.
func TestLocked(t *testing.T) {
	fill(t, func(dir string) {
		if _, err := Open(dir); !errors.Is(err, storage.ErrLocked) {
			t.Errorf("store of a running program: %v", err)
		}
	})
	if _, err := Open(t.TempDir()); !errors.Is(err, ErrNoStore) {
		t.Errorf("empty directory: %v", err)
	}
}

// within returns the offsets in the file of the content of the value under the
// first key of a bucket at or after from: pages that are free now may still hold
// what it was copied from.
func within(t *testing.T, path, bucket string, from []byte) (offs []int64) {
	t.Helper()
	db := must(bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true}))
	defer db.Close()
	var v []byte
	err := db.View(func(tx *bbolt.Tx) error {
		_, found := tx.Bucket([]byte(bucket)).Cursor().Seek(from)
		v = bytes.Clone(found)
		return nil
	})
	const overhead = 5 // version and checksum
	if err != nil || len(v) <= overhead {
		t.Fatalf("no value in bucket %s: %v", bucket, err)
	}
	b := must(os.ReadFile(path))
	for at := 0; ; at++ {
		i := bytes.Index(b[at:], v)
		if i < 0 {
			return offs
		}
		at += i
		offs = append(offs, int64(at+overhead))
	}
}

// places returns the offsets of what in the file.
func places(t *testing.T, path, what string) (offs []int64) {
	t.Helper()
	b := must(os.ReadFile(path))
	for at := 0; ; at++ {
		i := bytes.Index(b[at:], []byte(what))
		if i < 0 {
			return offs
		}
		at += i
		offs = append(offs, int64(at))
	}
}

// TestFlippedOctets finds one flipped octet in every class of file and value,
// in the right place.
func TestFlippedOctets(t *testing.T) {
	dir := fill(t, nil)
	msgs := filepath.Join(dir, "streams", "0000000000000002", "msgs.db")
	floor := filepath.Join(filepath.Dir(msgs), "floor")
	meta := filepath.Join(dir, "meta.db")
	// The segment that holds the messages.
	var seg string
	for _, name := range must(filepath.Glob(filepath.Join(dir, "wal", "*.wal"))) {
		if bytes.Contains(must(os.ReadFile(name)), []byte("payload number 3")) {
			seg = name
		}
	}
	if seg == "" {
		t.Fatal("no segment holds the messages")
	}
	const salvage = "check the disk, then run `edge storage salvage`: it keeps everything whose checksum is right; or restore a backup"
	logged := int64(bytes.Index(must(os.ReadFile(seg)), []byte("payload number 3")))
	for _, c := range []struct {
		name, file string
		offs       []int64
		at         int64 // offset reported; -1: none
		seq        uint64
		problem    string
		remedy     string
	}{
		{"log header", seg, []int64{33}, 0, 0, "segment header fails its checksum", remedyLog},
		{"log batch", seg, []int64{logged}, logged &^ 511, 0, "the record fails its checksum; LSN", remedyLog},
		{"log batch header", seg, []int64{4096 + 17}, 4096, 0, "no valid batch header; the log goes on at", remedyLog},
		{"message", msgs, places(t, msgs, "payload number 3"), -1, 3, "it fails its checksum", remedyMessage},
		{"table of a chunk", msgs, within(t, msgs, "msgs", nil), -1, 0, "chunk of messages from 1 on: it fails its checksum", salvage},
		{"summary of a subject", msgs, within(t, msgs, "subj", nil), -1, 0, `summary of subject "s.0"`, remedyRebuilt},
		{"index of subjects", msgs, within(t, msgs, "post", nil), -1, 0, "index of subject number", remedyRebuilt},
		{"index of deleted", msgs, within(t, msgs, "gone", nil), -1, 0, "index of deleted messages", remedyRebuilt},
		{"keyed state", msgs, within(t, msgs, "kv", []byte("config")), -1, 0, `state under key "config"`, salvage},
		{"summary of the store", msgs, within(t, msgs, "store", []byte("state")), -1, 0, "summary of the store", salvage},
		{"floor", floor, []int64{48, 512 + 48}, -1, 0, "neither slot: it fails its checksum", remedyFloor},
		{"meta page", msgs, []int64{16 + 48}, -1, 0, "meta page 0, at offset 0, fails its checksum", salvage},
		{"meta.db", meta, within(t, meta, "jetstream", []byte("stream/2")), -1, 0, "jetstream/stream/2 fails its checksum", remedyMeta},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := must(os.ReadFile(c.file))
			flipped := slices.Clone(b)
			for _, off := range c.offs {
				flipped[off] ^= 0x10
			}
			if err := os.WriteFile(c.file, flipped, 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			r, err := s.Verify()
			if err = errors.Join(err, s.Close(), os.WriteFile(c.file, b, 0o600)); err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(r.Damage, func(d Damage) bool {
				at := int64(-1)
				if d.Offset != nil {
					at = *d.Offset
				}
				return d.File == c.file && at == c.at && d.Seq == c.seq && strings.Contains(d.Problem, c.problem) && d.Remedy == c.remedy
			}) {
				for _, d := range r.Damage {
					t.Logf("%+v", d)
				}
				t.Error("not found as it should be")
			}
		})
	}
	if r := must(open(t, dir).Verify()); len(r.Damage) != 0 {
		t.Errorf("after all: %+v", r.Damage)
	}
}

// TestLostFiles names the files that are gone.
func TestLostFiles(t *testing.T) {
	for name, remedy := range map[string]string{"meta.db": remedyMeta, "wal": remedyLog} {
		dir := fill(t, nil)
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		s := open(t, dir)
		r := must(s.Verify())
		if len(r.Damage) != 1 || r.Damage[0].File != filepath.Join(dir, name) || r.Damage[0].Remedy != remedy {
			t.Errorf("%s: %+v", name, r.Damage)
		}
		if left := must(s.BeyondSalvage()); !slices.Equal(left, r.Damage) {
			t.Errorf("%s, beyond salvage: %+v", name, left)
		}
	}
}

func TestDump(t *testing.T) {
	s := open(t, fill(t, nil))
	dump := func(o DumpOptions) (lines []Line) {
		if err := s.Dump(o, func(l Line) error { lines = append(lines, l); return nil }); err != nil {
			t.Error(err)
		}
		return lines
	}
	all := dump(DumpOptions{})
	kinds := map[string]int{}
	due := storage.LSN(1)
	for _, l := range all {
		kinds[l.Kind]++
		if l.LSN != due || (l.Size == 0 || l.Group == 0) != (l.Kind == "note") {
			t.Errorf("record %d: %+v", due, l)
		}
		if l.Kind != "note" {
			due++
		}
	}
	if kinds["stream-create"] != 1 || kinds["publish"] != perStream || kinds["delete-msg"] != 1 || kinds["consumer-create"] != 1 || kinds["malformed"] != 0 {
		t.Errorf("kinds: %v", kinds)
	}
	if l := all[0]; l.Group != storage.MetaGroup || l.Stream != "(meta)" || !strings.HasPrefix(l.Fields, `name "S" group 2 `) {
		t.Errorf("first: %+v", l)
	}
	got := dump(DumpOptions{From: 2, Limit: 3, Group: 2})
	if len(got) != 3 || got[0].LSN < 2 || got[0].Stream != "S" || got[0].Group != 2 || !strings.Contains(got[0].Fields, `subject "s.0" header 0 data 16 `) {
		t.Errorf("some: %+v", got)
	}
}

func TestDescribe(t *testing.T) {
	pub := command.Publish{Subject: "a", Header: []byte("hh"), Data: []byte("ddd")}
	for _, c := range []struct {
		b            []byte
		kind, fields string
	}{
		{pub.AppendTo(nil), "publish", `subject "a" header 2 data 3 time 1970-01-01T00:00:00.000000000Z`},
		{
			(&command.Publish{Subject: "a", Header: []byte("h"), Steady: 3e9}).AppendTo(nil), "publish",
			`subject "a" header 1 data 0 time 1970-01-01T00:00:00.000000000Z steady 1970-01-01T00:00:03.000000000Z`,
		},
		{(&command.Batch{Msgs: []command.Publish{pub}}).AppendTo(nil), "batch", `messages 1; subject "a" header 2 data 3 time 1970-01-01T00:00:00.000000000Z`},
		{(&command.Purge{Subject: "a.>", Seq: 9, Keep: 1}).AppendTo(nil), "purge", `subject "a.>" below 9 keep 1`},
		{(&command.DeleteMsg{Seq: 4}).AppendTo(nil), "delete-msg", "seq 4"},
		{(&command.Acked{Seq: 4}).AppendTo(nil), "acked", "seq 4"},
		{(&command.Sweep{Max: 5}).AppendTo(nil), "sweep", "messages 5"},
		{(&command.SetConfig{JSON: []byte("{}")}).AppendTo(nil), "set-config", "{}"},
		{(&command.Expire{Now: 1}).AppendTo(nil), "expire", "now 1970-01-01T00:00:00.000000001Z"},
		{(&command.StreamDelete{Group: 3}).AppendTo(nil), "stream-delete", "group 3"},
		{(&command.Ingest{Edge: "E", Incarnation: 1, First: 2, Through: 3}).AppendTo(nil), "ingest", "edge E incarnation 1 seq 2 to 3 messages 0 gaps 0"},
		{(&command.ConsumerDelete{Name: "C"}).Append(nil), "consumer-delete", `consumer "C"`},
		{
			(&command.ConsumerDelivered{Name: "C", DSeq: 5, Ranges: []command.Range{{First: 2, Count: 3, Attempt: 1}}}).Append(nil),
			"delivered", `consumer "C" from consumer seq 5: seq 2 to 4 attempt 1`,
		},
		{
			(&command.ConsumerEvent{Kind: command.KindConsumerNak, Name: "C", Seq: 2, DSeq: 5}).Append(nil),
			"nak", `consumer "C" seq 2 consumer seq 5 time 1970-01-01T00:00:00.000000000Z`,
		},
		{[]byte{byte(command.KindPublish)}, "malformed", "malformed command of kind 1"},
		{[]byte{200}, "kind 200", "not known to this program version"},
	} {
		if kind, fields := describe(c.b); kind != c.kind || fields != c.fields {
			t.Errorf("got  %s %s\nwant %s %s", kind, fields, c.kind, c.fields)
		}
	}
}

// A log that was closed has noted what its groups had come to.
func TestDumpNote(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	l, err := wal.Open(wal.Options{FS: vfs.OS, Dir: dir, SegmentSize: 64 << 10, Messages: func([]byte) int { return 1 }})
	if err != nil {
		t.Fatal(err)
	}
	l.SetLast(2, 40)
	if _, err := l.Append(2, nil, []byte("record")); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	s := open(t, filepath.Dir(dir))
	var lines []Line
	if err := s.Dump(DumpOptions{}, func(l Line) error { lines = append(lines, l); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(lines) != 2 || lines[1].Kind != "note" || lines[1].LSN != 2 || !strings.HasSuffix(lines[1].Fields, " 41 in group 2 (sequences modulo 2^32)") {
		t.Errorf("got %+v", lines)
	}
	lines = nil
	if err := s.Dump(DumpOptions{Group: 2}, func(l Line) error { lines = append(lines, l); return nil }); err != nil || len(lines) != 1 {
		t.Errorf("of one group: %+v, %v", lines, err)
	}
}

// TestPositionsBeforeCheckpoint: of a stream whose first checkpoint is still to
// come there is no floor, and that is no damage.
func TestPositionsBeforeCheckpoint(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "copy")
	fillAndClose(t, func(live string) {
		if err := os.CopyFS(dir, os.DirFS(live)); err != nil {
			t.Fatal(err)
		}
	})
	p := must(open(t, dir).Positions())
	if len(p.Damage) != 0 {
		t.Errorf("damage %v", p.Damage)
	}
	g := p.Groups[len(p.Groups)-1]
	if g.Stream != "S" || g.Applied != 0 || g.Floor != 0 || g.Pending == 0 {
		t.Errorf("%+v", g)
	}
}
