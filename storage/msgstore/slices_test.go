package msgstore

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/boltpages"
)

// tap calls its functions, where they are set, around changes to files.
type tap struct {
	update func(n int) error // before the n-th transaction
	before func(op boltfile.Op, name string) error
	after  func() // after any change
	n      int
}

func (p *tap) Update(db *bbolt.DB, fn func(*bbolt.Tx) error) error {
	p.n++
	if p.update != nil {
		if err := p.update(p.n); err != nil {
			return err
		}
	}
	err := db.Update(fn)
	if err == nil && p.after != nil {
		p.after()
	}
	return err
}

func (p *tap) Before(op boltfile.Op, name string) error {
	if p.before != nil {
		return p.before(op, name)
	}
	return nil
}

func (p *tap) Done(boltfile.Op, string, string) {
	if p.after != nil {
		p.after()
	}
}

func setTap(t *testing.T, p *tap) {
	t.Helper()
	boltfile.SetTap(p)
	t.Cleanup(func() { boltfile.SetTap(nil) })
}

// snapshot copies the files of a store as a power cut would leave them now.
func snapshot(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range names {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err == nil {
			err = os.WriteFile(filepath.Join(to, e.Name()), b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func openFast(tb testing.TB, dir string) *Store {
	tb.Helper()
	s, err := Open(dir, Options{Log: quiet(), noSync: true})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = s.Close() })
	return s
}

// fillMessages appends n messages that say whose they are.
func fillMessages(tb testing.TB, s *Store, n, size int, who string) {
	tb.Helper()
	for range n {
		seq := s.State().Last + 1
		data := append(fmt.Appendf(nil, "%s %d ", who, seq), make([]byte, size)...)
		if _, err := s.Append(storage.Message{Subject: fmt.Sprintf("s.%d", seq%10), Time: int64(seq), Data: data}); err != nil {
			tb.Fatal(err)
		}
	}
}

// holds checks that a store holds exactly the sequences that want says, each
// with the content that it should have.
func holds(t *testing.T, s *Store, want map[uint64]string) {
	t.Helper()
	n := 0
	if err := s.Range(0, func(m storage.Message) bool {
		who, ok := want[m.Seq]
		if !ok || !bytes.HasPrefix(m.Data, fmt.Appendf(nil, "%s %d ", who, m.Seq)) || m.Subject != fmt.Sprintf("s.%d", m.Seq%10) {
			t.Errorf("message %d: %s %.20q, wanted is %q", m.Seq, m.Subject, m.Data, who)
			return false
		}
		n++
		return true
	}); err != nil {
		t.Fatal(err)
	}
	if n != len(want) || s.State().Msgs != uint64(n) {
		t.Fatalf("%d messages, counted %d, want %d", n, s.State().Msgs, len(want))
	}
	for i := range 10 {
		f := storage.Filter{Patterns: []string{fmt.Sprintf("s.%d", i)}}
		n := 0
		for seq := uint64(0); ; n++ {
			m, err := s.LoadNext(f, seq)
			if errors.Is(err, storage.ErrEOF) {
				break
			}
			if err != nil || want[m.Seq] == "" || m.Seq%10 != uint64(i) {
				t.Fatalf("LoadNext(%s, %d) = %d %s, %v", f.Patterns[0], seq, m.Seq, m.Subject, err)
			}
			seq = m.Seq + 1
		}
		if st, _ := s.Subject(f.Patterns[0]); st.Msgs != uint64(n) {
			t.Fatalf("subject %d: %d messages, counted %d", i, n, st.Msgs)
		}
	}
}

func checkedOnDisk(t *testing.T, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Verify(s.dir(), func(err error) { t.Error(err) }); err != nil {
		t.Fatal(err)
	}
}

// twoStates makes a store with one checkpoint behind it and one frozen, of
// several slices, and returns what it holds at either.
func twoStates(t *testing.T, purge bool) (s *Store, before, after map[uint64]string) {
	t.Helper()
	s = openFast(t, t.TempDir())
	s.image.slice, s.image.fresh = 64<<10, 100<<10
	before, after = map[uint64]string{}, map[uint64]string{}
	const n = 600
	fillMessages(t, s, n, 500, "old")
	checkpoint(t, s, 1)
	for seq := uint64(1); seq <= n; seq++ {
		before[seq] = "old"
		if seq%3 == 0 && !purge {
			after[seq] = "old"
		} else if _, err := s.Remove(seq); !purge && err != nil {
			t.Fatal(err)
		}
	}
	if purge {
		if _, err := s.Purge("", 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	fillMessages(t, s, 1000, 300, "new")
	for seq := uint64(n) + 1; seq <= s.State().Last; seq++ {
		after[seq] = "new"
	}
	if !s.Freeze(2, []storage.KV{{Key: "k", Value: []byte("v")}}) {
		t.Fatal("Freeze refused")
	}
	return s, before, after
}

// Whenever the power fails during a checkpoint, a restart finds the state before
// or after it, whole, and goes on from there.
func TestCrashBetweenSlices(t *testing.T) {
	for _, purge := range []bool{false, true} {
		t.Run(fmt.Sprintf("purge=%v", purge), func(t *testing.T) {
			s, before, after := twoStates(t, purge)
			var crashed []string
			p := &tap{}
			p.after = func() { crashed = append(crashed, snapshot(t, s.dir())) }
			setTap(t, p)
			if err := s.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			boltfile.SetTap(nil)
			if p.n < 5 {
				t.Fatalf("the checkpoint has %d transactions: too few for this test", p.n)
			}
			seen := map[storage.LSN]int{}
			for i, dir := range crashed {
				c := openFast(t, dir)
				seen[c.Applied()]++
				want := before
				if c.Applied() == 2 {
					want = after
				}
				holds(t, c, want)
				// What the log brings may be cut into other slices, or be other
				// messages if its end is lost.
				if c.Applied() == 1 {
					fillMessages(t, c, 100+i*150, 300, "other")
					again := map[uint64]string{}
					for seq, who := range before {
						again[seq] = who
					}
					for seq := uint64(601); seq <= c.State().Last; seq++ {
						again[seq] = "other"
					}
					want = again
				}
				checkpoint(t, c, 3)
				holds(t, c, want)
				if err := c.Close(); err != nil {
					t.Fatal(err)
				}
				c = openFast(t, dir)
				holds(t, c, want)
				checkedOnDisk(t, c)
			}
			if seen[1] < 3 || seen[2] < 2 {
				t.Fatalf("crashed at %v", seen)
			}
			holds(t, s, after)
		})
	}
}

// Whichever transaction or change of a file fails, the store says why: want of
// space is nothing lost, anything else the end.
func TestFailedSlices(t *testing.T) {
	for _, purge := range []bool{false, true} {
		for _, fault := range []error{syscall.ENOSPC, syscall.EIO} {
			for at := 1; ; at++ {
				s, _, after := twoStates(t, purge)
				p := &tap{}
				failed := false
				fail := func() error {
					if failed || p.n != at {
						return nil
					}
					failed = true
					return &os.PathError{Op: "write", Path: "x", Err: fault}
				}
				p.update = func(int) error { return fail() }
				p.before = func(boltfile.Op, string) error {
					p.n++
					return fail()
				}
				setTap(t, p)
				err := s.Checkpoint()
				boltfile.SetTap(nil)
				if !failed {
					if err != nil {
						t.Fatal(err)
					}
					if at < 7 {
						t.Fatalf("only %d places to fail at", at)
					}
					break
				}
				ctx := fmt.Sprintf("purge %v, change %d: %v: %v", purge, at, fault, err)
				switch fault {
				case syscall.EIO:
					if !errors.Is(err, storage.ErrFailed) || !errors.Is(err, fault) {
						t.Fatal(ctx)
					}
					if err := s.Checkpoint(); !errors.Is(err, storage.ErrFailed) && s.Applied() != 2 {
						t.Fatalf("%s; after that %v", ctx, err)
					}
				default:
					if errors.Is(err, storage.ErrFailed) {
						t.Fatal(ctx)
					}
					if err := s.Checkpoint(); err != nil {
						t.Fatalf("%s; after that %v", ctx, err)
					}
					if s.Applied() != 2 {
						t.Fatalf("%s; at %d", ctx, s.Applied())
					}
					holds(t, s, after)
					checkedOnDisk(t, s)
				}
				_ = s.Close()
			}
		}
	}
}

// A checkpoint that meets a page that makes no sense says so, and that is all:
// nothing has failed, nothing has changed, and a repaired file may take its place.
func TestCheckpointMeetsDamage(t *testing.T) {
	for _, bucket := range [][]byte{bucketSubj, bucketPost, bucketGone, bucketKV, bucketStore} {
		t.Run(string(bucket), func(t *testing.T) {
			s := openFast(t, t.TempDir())
			for i := range 1000 {
				if _, err := s.Append(storage.Message{Subject: fmt.Sprintf("subject.%d", i%500), Time: 1, Data: make([]byte, 50)}); err != nil {
					t.Fatal(err)
				}
			}
			for i := uint64(2); i < 900; i += 50 {
				if _, err := s.Remove(i); err != nil {
					t.Fatal(err)
				}
			}
			if !s.Freeze(1, []storage.KV{{Key: "k", Value: make([]byte, 2000)}}) {
				t.Fatal("Freeze refused")
			}
			if err := s.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			whole := filepath.Join(s.dir(), "whole")
			copyFile(t, s, whole)
			state := s.State()
			// Put something else into the bucket's root page.
			var at int64
			if err := s.image.view(func(tx *bbolt.Tx) error {
				at = int64(tx.Bucket(bucket).Root()) * pageSize
				if at == 0 { // within its parent's page
					at = int64(tx.Cursor().Bucket().Root()) * pageSize
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			f, err := os.OpenFile(s.image.path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt(bytes.Repeat([]byte{0xff}, 64), at); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			for i := range 500 {
				if _, err := s.Append(storage.Message{Subject: fmt.Sprintf("subject.%d", i), Time: 2}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := s.Remove(1000); err != nil && !errors.Is(err, storage.ErrCorrupt) {
				t.Fatal(err)
			}
			if !s.Freeze(2, []storage.KV{{Key: "k", Value: []byte("v")}}) {
				t.Fatal("Freeze refused")
			}
			for range 2 {
				err := s.Checkpoint()
				if !errors.Is(err, storage.ErrCorrupt) || errors.Is(err, storage.ErrFailed) || !strings.Contains(err.Error(), s.image.path) {
					t.Fatalf("checkpoint: %v", err)
				}
				if seq, ok := storage.Damaged(err); ok {
					t.Fatalf("checkpoint blames message %d: %v", seq, err)
				}
			}
			if s.Applied() != 1 {
				t.Fatalf("at %d", s.Applied())
			}
			s.checkpoint.Lock()
			err = s.swapFile(whole, "")
			s.checkpoint.Unlock()
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			dir := s.dir()
			checkedOnDisk(t, s)
			if s = openFast(t, dir); s.Applied() != 2 || s.State().Last != state.Last+500 {
				t.Fatalf("at %d: %+v", s.Applied(), s.State())
			}
		})
	}
}

// freeBytes returns how much of the store's file is free for reuse.
func freeBytes(tb testing.TB, s *Store) int64 {
	tb.Helper()
	f, err := os.Open(s.image.path)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	p := boltpages.Open(f, fileSize(tb, s))
	free, err := p.Freelist(p.Metas()[0])
	if err != nil {
		tb.Fatal(err)
	}
	return int64(len(free)) * pageSize
}

// fileSize returns the length of the store's file.
func fileSize(tb testing.TB, s *Store) int64 {
	tb.Helper()
	fi, err := os.Stat(s.image.path)
	if err != nil {
		tb.Fatal(err)
	}
	return fi.Size()
}

// A file of which nothing lives any more is replaced, whether it was purged or
// consumed, and keeps what else it holds.
func TestFreshFile(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"purge", "consume"} {
		t.Run(how, func(t *testing.T) {
			s := openFast(t, t.TempDir())
			if !s.Freeze(1, []storage.KV{{Key: "config", Value: []byte("kept")}}) {
				t.Fatal("Freeze refused")
			}
			if err := s.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			fillMessages(t, s, 10_000, 2000, "old")
			checkpoint(t, s, 2)
			if n := fileSize(t, s); n < 20e6 {
				t.Fatalf("%d octets", n)
			}
			uid := s.image.uid
			if how == "purge" {
				if n, err := s.Purge("", 0, 0); err != nil || n != 10_000 {
					t.Fatal(n, err)
				}
			}
			fillMessages(t, s, 50, 100, "new")
			for seq := uint64(1); seq <= 10_000 && how == "consume"; seq++ {
				if _, err := s.Remove(seq); err != nil {
					t.Fatal(err)
				}
			}
			checkpoint(t, s, 3)
			if n := fileSize(t, s); n > 4<<20 {
				t.Fatalf("%d octets with 50 messages", n)
			}
			want := map[uint64]string{}
			for seq := uint64(10_001); seq <= 10_050; seq++ {
				want[seq] = "new"
			}
			holds(t, s, want)
			dir := s.dir()
			checkedOnDisk(t, s)
			s = openFast(t, dir)
			holds(t, s, want)
			got := ""
			if err := s.KVs("", func(k string, v []byte) error { got += k + "=" + string(v); return nil }); err != nil || got != "config=kept" {
				t.Fatalf("%q, %v", got, err)
			}
			if s.image.uid != uid || s.Applied() != 3 {
				t.Fatalf("at %d, another identity: %v", s.Applied(), s.image.uid != uid)
			}
		})
	}
}

// A bucket of keys, overwritten again and again, takes the space of what lives.
func TestKeysReclaimed(t *testing.T) {
	t.Parallel()
	const keys, rounds = 10_000, 6
	s := openFast(t, t.TempDir())
	last := make([]uint64, keys)
	rnd := rand.New(rand.NewPCG(1, 2))
	name := func(k int) string { return fmt.Sprintf("kv.bucket.key-%08x", uint32(k)*2654435761) }
	n := 0
	for range rounds {
		for _, k := range rnd.Perm(keys) {
			seq, err := s.Append(storage.Message{Subject: name(k), Time: 1, Data: fmt.Appendf(make([]byte, 300), "%d", s.State().Last+1)})
			if err != nil {
				t.Fatal(err)
			}
			if last[k] != 0 {
				if _, err := s.Remove(last[k]); err != nil {
					t.Fatal(err)
				}
			}
			last[k] = seq
			if n++; n%4000 == 0 {
				checkpoint(t, s, storage.LSN(n))
			}
		}
	}
	checkpoint(t, s, storage.LSN(n+1))
	live := int64(s.State().Bytes)
	info, err := s.image.inspect()
	if err != nil {
		t.Fatal(err)
	}
	used := used(t, s) - freeBytes(t, s)
	if err := s.image.view(func(tx *bbolt.Tx) error {
		for _, b := range buckets {
			st := tx.Bucket(b).Stats()
			t.Logf("%s: keys %d, leaf pages %d + %d, in use %d of %d, branch %d of %d", b, st.KeyN, st.LeafPageN, st.LeafOverflowN, st.LeafInuse, st.LeafAlloc, st.BranchInuse, st.BranchAlloc)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("live %d, file %d, used %d: %.2f", live, info.Size, used, float64(used)/float64(live))
	if used > 2*live+live/4 || info.Size > 3*live+allocSize {
		t.Errorf("a file of %d octets, of which %d are used, for %d that live", info.Size, used, live)
	}
	check := func() {
		t.Helper()
		for k, seq := range last {
			if m, err := s.LoadLast(name(k), 0); err != nil || m.Seq != seq || !bytes.HasSuffix(m.Data, fmt.Appendf(nil, "\x00%d", seq)) {
				t.Fatalf("key %d: message %d, %v, want %d", k, m.Seq, err, seq)
			}
		}
	}
	check()
	dir := s.dir()
	checkedOnDisk(t, s)
	s = openFast(t, dir)
	check()
}
