package jetstream

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/broker"
	"petiole/storage"
	"petiole/storage/metadb"
)

// A file of the store that is gone, or empty, is an error that leaves the rest
// alone, unless the log gives all of it back.
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
	open := func(t *testing.T, dir string) error {
		t.Helper()
		srv := must(broker.New(broker.Options{Host: "127.0.0.1", Port: -1, JetStream: true}))
		e, err := Open(Options{Account: srv.Account(), Dir: dir, SegmentSize: 1 << 20})
		if err == nil {
			err = errors.Join(errors.New("it opens"), e.Close())
		}
		return err
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
		want       string // in the error; "": everything is still there
	}{
		{"meta.db is gone", "meta.db", true, os.Remove, "meta.db does not know it"},
		{"meta.db is empty", "meta.db", true, empty, "has been cut"},
		{"messages are gone", msgs, true, os.Remove, "is gone"},
		{"messages are empty", msgs, true, empty, "has been cut"},
		{"meta.db is gone, the log has all", "meta.db", false, os.Remove, ""},
		{"messages are gone, the log has all", msgs, false, os.Remove, ""},
		{"a record of meta.db is hidden", "meta.db", true, hide, "lost its record"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := fill(t, c.trimmed)
			path := filepath.Join(dir, c.file)
			good := must(os.ReadFile(path))
			if err := c.damage(path); err != nil {
				t.Fatal(err)
			}
			if c.want != "" {
				for range 2 { // trying again changes nothing
					if err := open(t, dir); !errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
						t.Fatalf("opened: %v; want corrupt data and %q", err, c.want)
					}
				}
				if err := os.WriteFile(path, good, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			n := startNode(t, dir)
			s, ok := n.e.Stream("S")
			if !ok {
				t.Fatal("the stream is gone")
			}
			want := uint64(10)
			if c.trimmed {
				want = 12
			}
			if st := s.DurableState(); st.Msgs != want || st.First != 1 || st.Last != want {
				t.Fatalf("state %+v, want %d messages", st, want)
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

// The power may fail while the file of the very first stream is being made.
func TestFirstStreamHalfMade(t *testing.T) {
	dir := t.TempDir()
	half := filepath.Join(dir, "streams", groupDir(2))
	if err := os.MkdirAll(half, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(half, "msgs.db.new"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	n := startNode(t, dir)
	if _, err := os.Stat(half); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", half, err)
	}
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 1)
}
