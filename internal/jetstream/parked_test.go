package jetstream

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/vfs"
	"petiole/storage/wal"
)

// What was parked of the log and has been damaged since costs the messages that
// it hits: the others keep their sequences, the loss is told, and none of the
// sequences is given out again.
func TestDamagedParkedLog(t *testing.T) {
	for _, test := range []struct {
		name   string
		hit    int // record, from 0; -1: the beginning of the file; -2: the version there
		cut    bool
		missed []storage.Span
	}{
		{name: "one in the middle", hit: 2, missed: []storage.Span{{First: 13, Last: 13}}},
		{name: "the last", hit: 4, missed: []storage.Span{{First: 15, Last: 15}}},
		{name: "the last, cut", hit: 4, cut: true, missed: []storage.Span{{First: 15, Last: 15}}},
		{name: "the beginning", hit: -1},
		{name: "the version", hit: -2},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			n := startNode(t, dir)
			_, js := n.connect()
			createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
			publishN(t, js, "a", 10)
			if err := n.e.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			publishN(t, js, "a", 5) // in the log only
			a, _ := n.e.Stream("A")
			path := n.e.storePath(a.group)
			n.crash()
			good := must(os.ReadFile(path))
			ruin(t, path)
			n = startNode(t, dir, func(o *Options) {
				o.salvage = func(string) (msgstore.RepairReport, error) {
					return msgstore.RepairReport{}, &os.PathError{Op: "read", Path: path, Err: syscall.EIO}
				}
			})
			parked := filepath.Join(filepath.Dir(path), parkedName)
			var at []int64
			eventually(t, "its records are parked", func() bool {
				at = nil
				end := int64(parkedHead)
				_, err := scanParked(parked, func(r *wal.Record, _ uint32) error {
					at = append(at, end)
					end += int64(parkedHead + len(r.Data))
					return nil
				}, func(parkedGap) { t.Error("damaged") })
				return err == nil && len(at) >= 5 && n.e.downs[a.group].from.Load() == 0
			})
			if err := n.e.Checkpoint(); err != nil { // the log has them no more
				t.Fatal(err)
			}
			n.stop()
			if err := os.WriteFile(path, good, 0o600); err != nil {
				t.Fatal(err)
			}
			b := must(os.ReadFile(parked))
			at = at[len(at)-5:]
			switch {
			case test.hit == -1:
				b[3] ^= 1
			case test.hit == -2:
				b[len(parkedMagic)] ^= 3 // 1 becomes 2
			case test.cut:
				b = b[:at[test.hit]+parkedHead/2]
			default:
				b[at[test.hit]+parkedHead+2] ^= 1
			}
			if err := os.WriteFile(parked, b, 0o600); err != nil {
				t.Fatal(err)
			}
			n = startNode(t, dir)
			_, js = n.connect()
			s, ok := n.e.Stream("A")
			if !ok {
				t.Fatal("the stream is gone")
			}
			msgs := uint64(15)
			for _, span := range test.missed {
				msgs -= span.Len()
			}
			got := s.Lost(0)
			if st := s.State(); st.Msgs != msgs || test.hit == 2 && st.Last != 15 {
				t.Fatalf("%+v, want %d messages", st, msgs)
			}
			// Of what is behind the last that can be read, no more than there is room for.
			for i, span := range test.missed {
				if len(got) <= i || got[i].First != span.First || got[i].Last < span.Last || got[i].Len() > 8 {
					t.Fatalf("lost are %v, want %v", got, test.missed)
				}
			}
			if m, err := s.store.Load(14); err != nil || m.Seq != 14 {
				t.Fatalf("sequence 14: %+v, %v", m, err)
			}
			if ack := must(js.Publish(testContext(t), "a", nil)); ack.Sequence <= 15 {
				t.Fatalf("sequence %d is given out again", ack.Sequence)
			}
			n.stop()
			n = startNode(t, dir)
			s, _ = n.e.Stream("A")
			if now := s.Lost(0); len(now) != len(got) || s.State().Msgs != msgs+1 {
				t.Fatalf("after another start lost are %v, not %v: %+v", now, got, s.State())
			}
			n.stop()
			kept := must(filepath.Glob(parked + "*"))
			if test.hit >= 0 && (len(kept) != 1 || !strings.Contains(kept[0], ".damaged-")) {
				t.Fatalf("the damaged file should be kept: %v", kept)
			}
		})
	}
}

// A file of another version is not passed over, and not removed.
func TestParkedLogOfAnotherVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), parkedName)
	if err := os.WriteFile(path, append(parkedBegin(parkedVersion+1), "........................................"...), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := scanParked(path, func(*wal.Record, uint32) error { return nil }, func(parkedGap) {})
	if !errors.Is(err, storage.ErrFormat) {
		t.Fatal(err)
	}
}

// A stream that goes back into service is seen by a trim at any time, as what it
// was or what it is: else the log would give up what it needs.
func TestEveryoneSeesTheMoved(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	s, _ := n.e.Stream("A")
	rec, _ := n.e.book.record(uint64(s.group))
	var wg sync.WaitGroup
	end := make(chan struct{})
	wg.Go(func() {
		for {
			streams, downs := n.e.everyone()
			if streams["A"] == nil && downs["A"] == nil {
				t.Error("neither serves nor does not")
				return
			}
			select {
			case <-end:
				return
			default:
			}
		}
	})
	for until := time.Now().Add(200 * time.Millisecond); time.Now().Before(until); {
		d := &downStream{rec: rec}
		n.e.applyMu.Lock()
		n.e.setDown(d, true)
		n.e.removeStream(s)
		n.e.serveAgain(d, s)
		n.e.applyMu.Unlock()
	}
	close(end)
	wg.Wait()
}

// apartFS is one whose directory parked is on another file system than the rest.
type apartFS struct{ vfs.FS }

func (f apartFS) Rename(from, to string) error {
	if dir := filepath.Dir(to); filepath.Base(dir) == parkedDir && filepath.Dir(dir) != filepath.Dir(from) {
		return &fs.PathError{Op: "rename", Path: to, Err: syscall.EXDEV}
	}
	return f.FS.Rename(from, to)
}

// Where the streams are on a file system of their own, what is put aside of them
// stays there, and is let alone by the next start.
func TestParkOnAnotherFileSystem(t *testing.T) {
	dir := t.TempDir()
	unknown := filepath.Join(dir, "streams", "notes")
	if err := os.MkdirAll(unknown, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(unknown, "f"), []byte("f"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		n := startNode(t, dir, func(o *Options) { o.FS = apartFS{vfs.OS} })
		n.stop()
		left := must(filepath.Glob(filepath.Join(dir, "streams", "*")))
		parked := must(filepath.Glob(filepath.Join(dir, "streams", parkedDir, "notes.*", "f")))
		if len(left) != 1 || len(parked) != 1 {
			t.Fatalf("there are %v, and parked %v", left, parked)
		}
	}
}
