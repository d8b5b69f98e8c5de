package msgstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func mustOpen(tb testing.TB, dir string) *Store {
	tb.Helper()
	s, err := Open(dir, Options{Log: quiet()})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = s.Close() })
	return s
}

func checkpoint(tb testing.TB, s *Store, lsn storage.LSN) {
	tb.Helper()
	if !s.Freeze(lsn, nil) {
		tb.Fatal("Freeze refused")
	}
	if err := s.Checkpoint(); err != nil {
		tb.Fatal(err)
	}
}

// written makes a closed store of n messages and returns its directory.
func written(t *testing.T, n int) string {
	t.Helper()
	dir := t.TempDir()
	s := mustOpen(t, dir)
	for i := 1; i <= n; i++ {
		m := storage.Message{
			Subject: fmt.Sprintf("subject-of-%d.x", i%3),
			Time:    int64(i) * 1000,
			Header:  fmt.Appendf(nil, "NATS/1.0\r\nHeader: head-of-%d.\r\n\r\n", i),
			Data:    fmt.Appendf(nil, "data-of-%d.", i),
		}
		if _, err := s.Append(m); err != nil {
			t.Fatal(err)
		}
	}
	checkpoint(t, s, 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

// damage flips a bit shift octets after every place where the file holds what.
func damage(t *testing.T, dir, what string, shift int) {
	t.Helper()
	path := filepath.Join(dir, FileName)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for i := 0; ; n++ {
		j := bytes.Index(raw[i:], []byte(what))
		if j < 0 {
			break
		}
		raw[i+j+shift] ^= 0x10
		i += j + 1
	}
	if n == 0 {
		t.Fatalf("%s does not hold %q", path, what)
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestFlippedBit(t *testing.T) {
	const n, bad = 100, 50
	header := fmt.Sprintf("NATS/1.0\r\nHeader: head-of-%d.", bad)
	data := fmt.Sprintf("data-of-%d.", bad)
	// The subject of message 50, told from the others' by what follows it.
	subject := "subject-of-2.x" + header
	for _, c := range []struct {
		where string
		what  string
		shift int
	}{
		{"data", data, 3},
		{"header", header, 12},
		{"subject", subject, 2},
		{"length of data", subject, -1},
		{"length of header", subject, -2},
		{"length of subject", subject, -3},
		{"time", subject, -6},
		{"sequence", subject, -13},
		{"checksum", subject, -15},
	} {
		t.Run(c.where, func(t *testing.T) {
			dir := written(t, n)
			damage(t, dir, c.what, c.shift)
			s := mustOpen(t, dir)
			isBad := func(err error) {
				t.Helper()
				var ce *storage.CorruptError
				if !errors.As(err, &ce) || ce.Seq != bad || !errors.Is(err, storage.ErrCorrupt) || !strings.Contains(ce.File, dir) {
					t.Fatalf("error is %v", err)
				}
			}
			for seq := uint64(1); seq <= n; seq++ {
				m, err := s.Load(seq)
				next, nextErr := s.LoadNext(storage.Filter{}, seq)
				own, ownErr := s.LoadNext(storage.Filter{Patterns: []string{fmt.Sprintf("subject-of-%d.x", seq%3)}}, seq)
				if seq == bad {
					isBad(err)
					isBad(nextErr)
					isBad(ownErr)
					continue
				}
				if err != nil || nextErr != nil || ownErr != nil || next.Seq != seq || own.Seq != seq ||
					string(m.Data) != fmt.Sprintf("data-of-%d.", seq) || !bytes.Equal(m.Data, next.Data) {
					t.Fatalf("message %d: %q, %v, %v, %v", seq, m.Data, err, nextErr, ownErr)
				}
			}
			var seen uint64
			isBad(s.Range(0, func(m storage.Message) bool { seen = m.Seq; return true }))
			if seen != bad-1 {
				t.Fatalf("Range reaches %d", seen)
			}
			if err := s.Range(bad+1, func(m storage.Message) bool { seen = m.Seq; return true }); err != nil || seen != n {
				t.Fatalf("Range behind the damage reaches %d, %v", seen, err)
			}
			// It can be removed, and counts where it belonged.
			if _, err := s.Remove(bad); err != nil {
				t.Fatal(err)
			}
			if st := s.State(); st.Msgs != n-1 || st.Deleted != 1 {
				t.Fatalf("state %+v", st)
			}
			if st, _ := s.Subject("subject-of-2.x"); st.Msgs != 32 {
				t.Fatalf("subject %+v", st)
			}
			if err := s.Range(0, func(storage.Message) bool { return true }); err != nil {
				t.Fatal(err)
			}
			checkpoint(t, s, 2)
			if got, err := s.Purge("", n-1, 0); err != nil || got != n-3 {
				t.Fatalf("purge: %d, %v", got, err)
			}
		})
	}
}

// A message that the summary counts and the file lacks is damage, not absence.
func TestMissingMessage(t *testing.T) {
	dir := written(t, 20)
	db, err := bbolt.Open(filepath.Join(dir, FileName), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	im := newImage(dir, db)
	if err := errors.Join(db.Update(func(tx *bbolt.Tx) error {
		if err := im.identify(tx); err != nil {
			return err
		}
		k, v := tx.Bucket(bucketMsgs).Cursor().First()
		c, err := parseChunk(im.msgs, k, v)
		if err != nil {
			return err
		}
		b := chunkBuilder{seal: im.msgs, max: chunkMax}
		b.reset(c.base)
		for i := range c.n {
			if c.seq(i) != 7 {
				b.move(c.seq(i), c.record(i))
			}
		}
		return tx.Bucket(bucketMsgs).Put(bytes.Clone(k), b.appendTo(nil))
	}), db.Close()); err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, dir)
	_, loadErr := s.Load(7)
	_, nextErr := s.LoadNext(storage.Filter{}, 7)
	rangeErr := s.Range(1, func(storage.Message) bool { return true })
	for what, err := range map[string]error{"Load": loadErr, "LoadNext": nextErr, "Range": rangeErr} {
		var ce *storage.CorruptError
		// Not the message's: nobody may give it up before a repair has looked for it.
		if !errors.As(err, &ce) || ce.Seq != 0 || !strings.Contains(ce.Reason, "message 7 ") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if m, err := s.LoadNext(storage.Filter{}, 8); err != nil || m.Seq != 8 {
		t.Errorf("LoadNext behind it: %d, %v", m.Seq, err)
	}
	if _, err := s.Remove(7); err != nil {
		t.Errorf("remove: %v", err)
	}
	if st, _ := s.Subject("subject-of-1.x"); st.Msgs != 6 {
		t.Errorf("subject %+v", st)
	}
}

// What is derived from the messages is made anew if it is damaged.
func TestDamagedIndex(t *testing.T) {
	for _, bucket := range [][]byte{bucketSubj, bucketPost, bucketGone} {
		t.Run(string(bucket), func(t *testing.T) {
			dir := written(t, 3000)
			s := mustOpen(t, dir)
			for seq := uint64(1); seq < 2900; seq += 7 {
				if _, err := s.Remove(seq); err != nil {
					t.Fatal(err)
				}
			}
			checkpoint(t, s, 2)
			want := s.State()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			db, err := bbolt.Open(filepath.Join(dir, FileName), 0o600, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(db.Update(func(tx *bbolt.Tx) error {
				b := tx.Bucket(bucket)
				k, v := b.Cursor().First()
				v = bytes.Clone(v)
				v[len(v)-1] ^= 1
				return b.Put(bytes.Clone(k), v)
			}), db.Close()); err != nil {
				t.Fatal(err)
			}
			s = mustOpen(t, dir)
			if bytes.Equal(bucket, bucketPost) {
				// Found out when used, and healed by the next checkpoint.
				if _, _, err := s.image.Posts(1, 1, 1, nil); !errors.Is(err, storage.ErrCorrupt) {
					t.Fatalf("damaged postings: %v", err)
				}
				checkpoint(t, s, 3)
			}
			if bytes.Equal(bucket, bucketGone) {
				// With the notes of deletions of a page, of 2048 sequences, lost,
				// messages of it that have not been cleared away are back.
				for seq := uint64(8); seq < 2048; seq += 7 {
					m, err := s.Load(seq)
					if err != nil {
						t.Fatal(err)
					}
					want.Msgs++
					want.Deleted--
					want.Bytes += m.Size()
				}
			}
			check := func() {
				t.Helper()
				if got := s.State(); got != want {
					t.Fatalf("state\n got %+v\nwant %+v", got, want)
				}
				f := storage.Filter{Patterns: []string{"subject-of-1.x"}}
				st, _ := s.Subject(f.Patterns[0])
				pending := uint64(0)
				if err := s.Range(1500, func(m storage.Message) bool {
					if m.Subject == f.Patterns[0] {
						pending++
					}
					return true
				}); err != nil {
					t.Fatal(err)
				}
				if n := s.NumPending(f, 1500); n != pending {
					t.Fatalf("%d of %d pending, want %d", n, st.Msgs, pending)
				}
				n := uint64(0)
				for seq := uint64(0); ; n++ {
					m, err := s.LoadNext(f, seq)
					if errors.Is(err, storage.ErrEOF) {
						break
					}
					if err != nil {
						t.Fatal(err)
					}
					seq = m.Seq + 1
				}
				if n != st.Msgs {
					t.Fatalf("%d messages, %d counted", n, st.Msgs)
				}
			}
			check()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = mustOpen(t, dir)
			check()
		})
	}
}

func TestOpenFailures(t *testing.T) {
	t.Run("foreign", func(t *testing.T) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, FileName), bytes.Repeat([]byte("not a store "), 4000), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(dir, Options{})
		if !errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), dir) {
			t.Fatal(err)
		}
	})
	t.Run("other bolt file", func(t *testing.T) {
		dir := t.TempDir()
		db, err := bbolt.Open(filepath.Join(dir, FileName), 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err = Open(dir, Options{}); !errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), dir) {
			t.Fatal(err)
		}
	})
	t.Run("cut short", func(t *testing.T) {
		dir := written(t, 2000)
		if err := os.Truncate(filepath.Join(dir, FileName), 20_000); err != nil {
			t.Fatal(err)
		}
		s, err := Open(dir, Options{Log: quiet()})
		if err == nil { // the summary is still there, the messages are not
			t.Cleanup(func() { _ = s.Close() })
			_, err = s.Load(1000)
		}
		if !errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), dir) {
			t.Fatal(err)
		}
	})
	t.Run("locked", func(t *testing.T) {
		dir := t.TempDir()
		mustOpen(t, dir)
		if _, err := Open(dir, Options{}); !errors.Is(err, storage.ErrLocked) || !strings.Contains(err.Error(), dir) {
			t.Fatal(err)
		}
	})
	t.Run("not a directory", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(dir, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir, Options{}); err == nil || !strings.Contains(err.Error(), dir) {
			t.Fatal(err)
		}
	})
	t.Run("crash while made", func(t *testing.T) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, FileName+".new"), make([]byte, 5000), 0o600); err != nil {
			t.Fatal(err)
		}
		mustOpen(t, dir)
	})
}

func TestDestroy(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "stream")
	s := mustOpen(t, dir)
	if err := s.Destroy(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("the directory is still there: %v", err)
	}
}

// A checkpoint that fails for want of space changes nothing, and succeeds once
// there is space.
func TestNoSpace(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	add := func(n int) {
		t.Helper()
		for range n {
			if _, err := s.Append(storage.Message{Subject: "s", Time: 1, Data: make([]byte, 10_000)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	readable := func(n int) {
		t.Helper()
		seen := 0
		if err := s.Range(0, func(m storage.Message) bool { seen++; return len(m.Data) == 10_000 }); err != nil || seen != n {
			t.Fatalf("%d messages, %v", seen, err)
		}
	}
	add(10)
	checkpoint(t, s, 1)
	add(500)
	s.image.db.MaxSize = 1 << 20
	if !s.Freeze(2, []storage.KV{{Key: "k", Value: []byte("v")}}) {
		t.Fatal("Freeze refused")
	}
	if err := s.Checkpoint(); err == nil || errors.Is(err, storage.ErrFailed) {
		t.Fatalf("checkpoint into a full file: %v", err)
	}
	if s.Applied() != 1 || s.Freeze(3, nil) {
		t.Fatalf("applied %d after a failed checkpoint", s.Applied())
	}
	readable(510)
	add(1)
	s.image.db.MaxSize = 0
	if err := s.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	readable(511)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, dir)
	if s.Applied() != 2 {
		t.Fatalf("applied %d", s.Applied())
	}
	readable(510)
}

// A process that dies in the middle of a checkpoint leaves the state before
// it: what the file holds at any moment is a whole one.
func TestCrashInCheckpoint(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	for i := range 100 {
		if _, err := s.Append(storage.Message{Subject: "s", Time: int64(i + 1)}); err != nil {
			t.Fatal(err)
		}
	}
	checkpoint(t, s, 1)
	for i := range 5000 {
		if _, err := s.Append(storage.Message{Subject: "s", Time: int64(i + 101), Data: make([]byte, 100)}); err != nil {
			t.Fatal(err)
		}
	}
	for seq := uint64(1); seq < 90; seq += 2 {
		if _, err := s.Remove(seq); err != nil {
			t.Fatal(err)
		}
	}
	if !s.Freeze(2, nil) {
		t.Fatal("Freeze refused")
	}
	done := make(chan error, 1)
	go func() { done <- s.Checkpoint() }()
	var crashed []string
	for running := true; running; {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			running = false
		default:
		}
		if len(crashed) < 6 {
			raw, err := os.ReadFile(s.image.path)
			if err != nil {
				t.Fatal(err)
			}
			d := t.TempDir()
			if err := os.WriteFile(filepath.Join(d, FileName), raw, 0o600); err != nil {
				t.Fatal(err)
			}
			crashed = append(crashed, d)
		}
	}
	for _, d := range append(crashed, dir) {
		if d == dir {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		c := mustOpen(t, d)
		want := uint64(100)
		if c.Applied() == 2 {
			want = 5100 - 45
		}
		n := uint64(0)
		if err := c.Range(0, func(storage.Message) bool { n++; return true }); err != nil || n != want || c.State().Msgs != want {
			t.Errorf("at %d: %d messages, %v, counted %d", c.Applied(), n, err, c.State().Msgs)
		}
	}
}

// Pages that lead back to one above them do not make the program run for ever,
// nor out of memory.
func TestCyclicPages(t *testing.T) {
	dir := written(t, 20_000)
	path := filepath.Join(dir, FileName)
	s := mustOpen(t, dir)
	var root uint64
	if err := s.image.view(func(tx *bbolt.Tx) error {
		root = uint64(tx.Bucket(bucketMsgs).Root())
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	page := int(root) * pageSize
	if n := binary.NativeEndian.Uint16(whole[page+10:]); binary.NativeEndian.Uint16(whole[page+8:]) != 1 || n < 20 {
		t.Fatalf("the root of messages has %d children: not a branch page worth the test", n)
	}
	for _, child := range []int{0, 5, 19} {
		raw := bytes.Clone(whole)
		binary.NativeEndian.PutUint64(raw[page+16+16*child+8:], root)
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir, Options{Log: quiet()}); !errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), fmt.Sprintf("page %d", root)) {
			t.Fatalf("child %d is the page itself: %v", child, err)
		}
	}
}
