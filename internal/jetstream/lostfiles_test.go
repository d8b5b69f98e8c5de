package jetstream

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
	"petiole/storage/metadb"
	"petiole/storage/msgstore"
)

// nothingLeft is a salvage that finds nothing to begin with.
func nothingLeft(o *Options) {
	o.salvage = func(dir string) (msgstore.RepairReport, error) {
		return msgstore.RepairReport{}, &storage.CorruptError{File: dir, Reason: "nothing to begin with"}
	}
}

// A start finds its streams whatever file is gone or empty; messages that are
// lost are said to be, and their sequences not given out again.
func TestLostFiles(t *testing.T) {
	ctx := testContext(t)
	fill := func(t *testing.T, trimmed bool) (dir string) {
		dir = t.TempDir()
		n := startNode(t, dir)
		_, js := n.connect()
		must(js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}))
		for range 10 {
			must(js.Publish(ctx, "s.x", []byte("kept")))
		}
		if !trimmed {
			n.crash()
			return dir
		}
		n.stop()
		for range 2 { // the log forgets the segments before the last
			n = startNode(t, dir)
			_, js = n.connect()
			must(js.Publish(ctx, "s.x", []byte("kept too")))
			n.stop()
		}
		return dir
	}
	msgs := filepath.Join("streams", groupDir(2), "msgs.db")
	empty := func(path string) error { return os.Truncate(path, 0) }
	hide := func(path string) error { // as a flipped bit in a page of bbolt may
		db, err := metadb.Open(path)
		if err != nil {
			return err
		}
		return errors.Join(db.Put(bucketMeta, metadb.KV{Key: streamKey(2)}), db.Close())
	}
	for _, c := range []struct {
		name, file string
		trimmed    bool
		damage     func(string) error
		lost       bool // the messages
		parked     bool // the damaged file
	}{
		{"meta.db is gone", "meta.db", true, os.Remove, false, false},
		{"meta.db is empty", "meta.db", true, empty, false, true},
		{"messages are gone", msgs, true, os.Remove, true, false},
		{"messages are empty", msgs, true, empty, true, true},
		{"meta.db is gone, the log has all", "meta.db", false, os.Remove, false, false},
		{"messages are gone, the log has all", msgs, false, os.Remove, false, false},
		{"a record of meta.db is hidden", "meta.db", true, hide, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := fill(t, c.trimmed)
			if err := c.damage(filepath.Join(dir, c.file)); err != nil {
				t.Fatal(err)
			}
			want := storage.State{Msgs: 10, First: 1, Last: 10}
			if c.trimmed {
				want = storage.State{Msgs: 12, First: 1, Last: 12}
			}
			if c.lost { // sequences go on where they were
				want.Msgs, want.First = 0, want.Last+1
			}
			var uid [16]byte
			for i := range 2 {
				n := startNode(t, dir, nothingLeft)
				s, ok := n.e.Stream("S")
				if !ok {
					t.Fatal("the stream is gone")
				}
				if st := s.DurableState(); st.Msgs != want.Msgs || st.First != want.First || st.Last != want.Last {
					t.Fatalf("start %d: state %+v, want %+v", i, st, want)
				}
				if uid == [16]byte{} {
					uid = s.UID()
				}
				if s.UID() != uid || s.Config().Subjects[0] != "s.>" {
					t.Fatal("it is another stream")
				}
				st := n.e.Damage()
				if i == 0 && c.lost && (st.Repairs != 1 || st.LostMsgs != want.Last) || i > 0 && st != (DamageStats{}) {
					t.Fatalf("start %d: %+v", i, st)
				}
				if spans := s.Lost(0); c.lost != slices.Equal(spans, []storage.Span{{First: 1, Last: want.Last}}) {
					t.Fatalf("start %d: lost are %v", i, spans)
				}
				n.stop()
			}
			found := append(must(filepath.Glob(filepath.Join(dir, "parked", "*"))), must(filepath.Glob(filepath.Join(dir, c.file+".damaged-*")))...)
			if (len(found) > 0) != c.parked {
				t.Fatalf("parked are %v", found)
			}
			n := startNode(t, dir)
			_, js := n.connect()
			if ack := must(js.Publish(ctx, "s.x", nil)); ack.Sequence != want.Last+1 {
				t.Fatalf("the next message has sequence %d, want %d", ack.Sequence, want.Last+1)
			}
		})
	}
}

func TestParseGroups(t *testing.T) {
	for _, c := range []struct {
		value  string
		next   uint64
		groups []uint64
		listed bool
		bad    bool
	}{
		{value: "4", next: 4}, // as written before there was a list
		{value: "4 ", next: 4, listed: true},
		{value: "4 2,3", next: 4, groups: []uint64{2, 3}, listed: true},
		{value: "", bad: true},
		{value: "4 2,", bad: true},
		{value: "x 2", bad: true},
	} {
		next, groups, listed, err := parseGroups(c.value)
		if (err != nil) != c.bad {
			t.Errorf("%q: %v", c.value, err)
			continue
		}
		if got := slices.Sorted(maps.Keys(groups)); next != c.next || listed != c.listed || !slices.Equal(got, c.groups) {
			t.Errorf("%q: next %d, groups %d, listed %v", c.value, next, got, listed)
		}
		if listed && !c.bad {
			if b := appendGroups(next, c.groups); string(b) != c.value {
				t.Errorf("%q is written as %q", c.value, b)
			}
		}
	}
}

// The power may fail while the files of the very first stream are being made.
func TestFirstStreamHalfMade(t *testing.T) {
	for name, files := range map[string][]string{
		"nothing": nil, "floor": {"floor"}, "file": {"msgs.db.new"}, "both": {"floor", "msgs.db.new"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			half := filepath.Join(dir, "streams", groupDir(2))
			if err := os.MkdirAll(half, 0o700); err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				if err := os.WriteFile(filepath.Join(half, f), make([]byte, 1024), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			n := startNode(t, dir)
			if _, err := os.Stat(half); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is still there: %v", half, err)
			}
			_, js := n.connect()
			createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
			publishN(t, js, "s", 1)
		})
	}
}

// Where the log is lost, what is acknowledged after that keeps its sequence,
// though the next start finds the same hole in the log.
func TestLostLogDecidesOnce(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	for _, s := range []string{"A", "B"} {
		createStream(t, js, jetstream.StreamConfig{Name: s, Subjects: []string{s}})
		publishN(t, js, s, 5)
	}
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	publishN(t, js, "B", 3) // in the log only
	publishN(t, js, "A", 5)
	if err := must2(n.e.Stream("A")).checkpoint(); err != nil {
		t.Fatal(err)
	}
	n.crash()
	if err := os.RemoveAll(filepath.Join(dir, "wal")); err != nil {
		t.Fatal(err)
	}
	n = startNode(t, dir)
	_, js = n.connect()
	if n.e.Damage().LostRecords == 0 {
		t.Fatal("the loss is not counted")
	}
	ack := must(js.Publish(ctx, "B", []byte("after")))
	n.crash()
	n = startNode(t, dir)
	s := must2(n.e.Stream("B"))
	if m, err := s.store.Load(ack.Sequence); err != nil || string(m.Data) != "after" || s.State().Last != ack.Sequence {
		t.Fatalf("sequence %d was acknowledged: %q, %v, %+v", ack.Sequence, m.Data, err, s.State())
	}
}

// With the log a stream's file may be lost as well, or be an older copy. An empty
// log is none that the stream could come up to date from, and what it takes from
// then on must not look as if it were from before.
func TestLostLogAndFile(t *testing.T) {
	ctx := testContext(t)
	for _, older := range []bool{false, true} {
		dir := t.TempDir()
		n := startNode(t, dir)
		_, js := n.connect()
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		publishN(t, js, "s", 4)
		if err := n.e.Checkpoint(); err != nil {
			t.Fatal(err)
		}
		path := n.e.storePath(must2(n.e.Stream("S")).group)
		had := must(os.ReadFile(path))
		publishN(t, js, "s", 6)
		n.stop()
		if err := errors.Join(os.RemoveAll(filepath.Join(dir, "wal")), os.Remove(path)); err != nil {
			t.Fatal(err)
		}
		want := storage.State{First: 11, Last: 11, Msgs: 1}
		if older {
			want.First, want.Msgs = 1, 5
			if err := os.WriteFile(path, had, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		n = startNode(t, dir)
		_, js = n.connect()
		if st := n.e.Damage(); st.Repairs != 1 || st.LostMsgs == 0 {
			t.Fatalf("older %v: %+v", older, st)
		}
		if ack := must(js.Publish(ctx, "s", []byte("after"))); ack.Sequence != 11 {
			t.Fatalf("older %v: sequence %d", older, ack.Sequence)
		}
		n.crash()
		n = startNode(t, dir)
		s := must2(n.e.Stream("S"))
		st := s.State()
		if m, err := s.store.Load(11); err != nil || string(m.Data) != "after" || st.First != want.First || st.Last != want.Last || st.Msgs != want.Msgs {
			t.Fatalf("older %v: %q, %v, %+v", older, m.Data, err, st)
		}
		n.stop()
	}
}
