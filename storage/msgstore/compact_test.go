package msgstore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
)

// chunkBytes returns how many octets the chunks of messages have.
func chunkBytes(t *testing.T, s *Store) (n int64) {
	t.Helper()
	if err := s.image.view(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketMsgs).ForEach(func(_, v []byte) error {
			n += int64(len(v))
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// What is deleted after it has been copied is given back by the checkpoints after
// the compaction, though those during it have dealt with it in the old file.
func TestCompactNotesSparse(t *testing.T) {
	s := openFast(t, t.TempDir())
	const n = 5000
	fillMessages(t, s, n, 500, "old")
	checkpoint(t, s, 1)
	want := map[uint64]string{}
	slices := 0
	r, err := s.Compact(t.Context(), CompactOptions{BytesPerSecond: -1, SliceBytes: 200_000, step: func() {
		if slices++; slices != 6 {
			return
		}
		for seq := uint64(1); seq <= n; seq++ {
			if seq%10 == 1 {
				want[seq] = "old"
			} else if _, err := s.Remove(seq); err != nil {
				t.Fatal(err)
			}
		}
		checkpoint(t, s, 2)
	}})
	if err != nil || len(want) == 0 || r.Messages >= n || r.Messages < n/5 {
		t.Fatalf("%+v, %v", r, err)
	}
	holds(t, s, want)
	checkpoint(t, s, 3)
	if got, live := chunkBytes(t, s), int64(s.State().Bytes); got > 2*live {
		t.Errorf("chunks of %d octets for %d of messages", got, live)
	}
	holds(t, s, want)
	checkedOnDisk(t, s)
}

// Large messages leave free pages behind that a new file has too, once the last of
// them has come: to compact for those would be for nothing, but not for what is
// removed.
func TestLargeMessagesAreNotWaste(t *testing.T) {
	s := openFast(t, t.TempDir())
	const size = 8 << 20
	for i := range 6 {
		fillMessages(t, s, 1, size, "large")
		checkpoint(t, s, storage.LSN(i+1))
		if w, err := s.Waste(); err != nil || w.Worth {
			t.Fatalf("of %d messages: %+v, %v", i+1, w, err)
		}
	}
	for seq := range uint64(5) {
		if _, err := s.Remove(seq + 1); err != nil {
			t.Fatal(err)
		}
	}
	checkpoint(t, s, 7)
	checkpoint(t, s, 8)
	if w, err := s.Waste(); err != nil || !w.Worth {
		t.Fatalf("of one message: %+v, %v", w, err)
	}
}

// A new file that cannot be written is a failed write, which ends the program;
// one that there is no room for can wait.
func TestNewFileFails(t *testing.T) {
	compact := func(t *testing.T, s *Store) error {
		_, err := s.Compact(t.Context(), CompactOptions{BytesPerSecond: -1})
		return err
	}
	repair := func(t *testing.T, s *Store) error {
		_, err := s.Repair(t.Context(), nil)
		return err
	}
	salvage := func(t *testing.T, s *Store) error {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		_, err := Salvage(s.dir(), SalvageOptions{Log: quiet()})
		return err
	}
	for _, c := range []struct {
		name string
		run  func(*testing.T, *Store) error
	}{{"compact", compact}, {"repair", repair}, {"salvage", salvage}} {
		for _, fault := range []error{syscall.EIO, syscall.ENOSPC} {
			t.Run(fmt.Sprint(c.name, " ", fault), func(t *testing.T) {
				for at := 1; ; at++ {
					s := openFast(t, t.TempDir())
					fillMessages(t, s, 300, 100, "old")
					checkpoint(t, s, 1)
					p, failed, op := &tap{}, false, boltfile.Op(-1)
					fail := func() error {
						if p.n != at {
							return nil
						}
						failed = true
						return &os.PathError{Op: "write", Path: "x", Err: fault}
					}
					p.update = func(int) error { return fail() }
					p.before = func(of boltfile.Op, _ string) error {
						p.n++
						if p.n == at {
							op = of
						}
						return fail()
					}
					setTap(t, p)
					err := c.run(t, s)
					boltfile.SetTap(nil)
					if !failed {
						if err != nil {
							t.Fatal(err)
						}
						if at < 4 {
							t.Fatalf("only %d places to fail at", at)
						}
						return
					}
					switch {
					case op == boltfile.OpRemove: // of what is in the way
					case fault == syscall.EIO, op == boltfile.OpSyncDir && errors.Is(err, storage.ErrFailed):
						if !errors.Is(err, storage.ErrFailed) || !errors.Is(err, fault) {
							t.Errorf("change %d, %v: %v", at, op, err)
						}
						if c.name != "salvage" && s.Freeze(2, nil) && !errors.Is(s.Checkpoint(), storage.ErrFailed) {
							t.Errorf("change %d, %v: checkpoints go on", at, op)
						}
					case !errors.Is(err, fault) || errors.Is(err, storage.ErrFailed) || c.name == "compact" && !errors.Is(err, ErrPostponed):
						t.Errorf("change %d, %v: %v", at, op, err)
					default:
						if c.name != "salvage" {
							fillMessages(t, s, 10, 100, "old")
							checkpoint(t, s, 2)
						}
					}
				}
			})
		}
	}
}

// Of damaged files that repairs have put aside the newest are kept.
func TestParkedFiles(t *testing.T) {
	s := openFast(t, t.TempDir())
	fillMessages(t, s, 300, 100, "old")
	checkpoint(t, s, 1)
	dir := s.dir()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	parked := func() (names []string) {
		all, err := filepath.Glob(filepath.Join(dir, "*"+damagedInfix+"*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range all {
			names = append(names, strings.TrimPrefix(filepath.Base(n), FileName+damagedInfix))
		}
		slices.Sort(names)
		return names
	}
	at := time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC)
	for i := range 12 {
		r, err := Salvage(dir, SalvageOptions{Log: quiet(), now: func() time.Time { return at }})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(r.Parked); err != nil {
			t.Errorf("round %d: the newest is gone: %v", i, err)
		}
	}
	if got, want := parked(), []string{"20310101T000000Z-10", "20310101T000000Z-11", "20310101T000000Z-12"}; !slices.Equal(got, want) {
		t.Errorf("kept are %v, want %v", got, want)
	}
	// Large ones.
	for i, size := range []int64{ParkedBytes / 2, ParkedBytes, ParkedBytes * 2} {
		name := filepath.Join(dir, FileName+damagedInfix+at.Add(time.Duration(i+1)*time.Hour).Format(parkedTime))
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(name, size); err != nil {
			t.Fatal(err)
		}
	}
	forgetParked(filepath.Join(dir, FileName), "", quiet())
	if got, want := parked(), []string{"20310101T020000Z", "20310101T030000Z"}; !slices.Equal(got, want) {
		t.Errorf("kept are %v, want %v", got, want)
	}
	if _, err := os.Stat(filepath.Join(dir, FileName)); err != nil {
		t.Error(err)
	}
}
