package wal_test

import (
	"slices"
	"strconv"
	"testing"
	"testing/synctest"

	"petiole/storage"
	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"

	"pgregory.net/rapid"
)

// TestHolders has 1,000 groups, of which 990 wrote once and are idle, one is
// deleted, and nine write on: the log stays within bounds if those that hold
// back the oldest segment are checkpointed.
func TestHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const groups, budget = 1000, 10 * smallSeg
		disk := simfs.New(1)
		first := map[storage.GroupID]storage.LSN{} // not checkpointed
		var l *wal.Log
		onCommit := func(recs []wal.Record) {
			for _, r := range recs {
				if first[r.Group] == 0 {
					first[r.Group] = r.LSN
					l.Hold(r.Group, r.LSN)
				}
			}
		}
		l = open(t, disk, func(o *wal.Options) { o.OnCommit = onCommit })
		for g := range storage.GroupID(groups) {
			if _, err := l.Append(g+1, nil, []byte(record(int(g), 200))); err != nil {
				t.Fatal(err)
			}
			if g%10 == 9 {
				if err := l.Commit(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if l.Stats().Segments < 10 {
			t.Fatalf("%d segments", l.Stats().Segments)
		}
		if err := l.TrimHeld(); err != nil || l.Oldest() != 1 {
			t.Fatalf("oldest %d, %v: group 1 holds record 1", l.Oldest(), err)
		}
		got := l.Holders(5)
		if !slices.Equal(got, []storage.GroupID{1, 2, 3, 4, 5}) {
			t.Fatalf("held back by %v", got)
		}
		checkpoint := func(g storage.GroupID) {
			first[g] = 0
			l.Hold(g, 0)
		}
		checkpoint(3) // deleted
		if got := l.Holders(3); !slices.Equal(got, []storage.GroupID{1, 2, 4}) {
			t.Fatalf("held back by %v", got)
		}
		checkpoints := 0
		for i := range 2000 {
			put(t, l, record(i, 300)) // of group 1
			for g := range storage.GroupID(8) {
				l.Append(10+g, nil, []byte(record(i, 50)))
			}
			synctest.Wait()
			for l.Size() > budget {
				holders := l.Holders(64)
				if len(holders) == 0 {
					t.Fatalf("%d bytes, and no group holds anything back", l.Size())
				}
				for _, g := range holders {
					checkpoints++
					checkpoint(g)
				}
				if err := l.TrimHeld(); err != nil {
					t.Fatal(err)
				}
			}
			if n := disk.Used(); n > budget+5*smallSeg {
				t.Fatalf("%d bytes on disk", n)
			}
		}
		if checkpoints < groups-10 || checkpoints > 4*groups {
			t.Errorf("%d checkpoints", checkpoints)
		}
		// All of it.
		for g := range first {
			checkpoint(g)
		}
		if err := l.Commit(); err != nil {
			t.Fatal(err)
		}
		for g := range first {
			checkpoint(g)
		}
		if got := l.Holders(1); len(got) > 0 {
			t.Errorf("held back by %v", got)
		}
		if err := l.TrimHeld(); err != nil || l.Stats().Segments != 1 {
			t.Errorf("%d segments left, %v", l.Stats().Segments, err)
		}
		l.Close()
		if l = open(t, disk, nil); len(contents(t, l)) > 0 {
			t.Error("an emptied log has records after a restart")
		}
		l.Close()
	})
}

// TestHoldModel compares Holders with a model.
func TestHoldModel(t *testing.T) {
	l := open(t, discard{}, func(o *wal.Options) { o.SegmentSize = 1 << 20 })
	for range 10_000 {
		l.Append(1, nil, make([]byte, 200))
	}
	if err := l.Commit(); err != nil {
		t.Fatal(err)
	}
	all := l.Holders(1)
	if l.Stats().Segments < 2 || len(all) > 0 {
		t.Fatalf("%d segments, held by %v", l.Stats().Segments, all)
	}
	model := map[storage.GroupID]storage.LSN{}
	next := storage.LSN(0) // of the second segment, from what is held
	rapid.Check(t, func(t *rapid.T) {
		for range rapid.IntRange(1, 50).Draw(t, "n") {
			g := storage.GroupID(rapid.IntRange(1, 30).Draw(t, "group"))
			from := storage.LSN(rapid.IntRange(0, 10_000).Draw(t, "from"))
			model[g] = from
			l.Hold(g, from)
		}
		got := l.Holders(1000)
		low := map[storage.GroupID]bool{}
		last := storage.LSN(0)
		for _, g := range got {
			if model[g] < last || model[g] == 0 {
				t.Fatalf("group %d at %d after %d", g, model[g], last)
			}
			last = model[g]
			low[g] = true
		}
		next = max(next, last)
		for g, from := range model {
			if from > 0 && from <= last && !low[g] {
				t.Fatalf("group %d at %d is missing from %v", g, from, got)
			}
		}
		if n := min(len(got), 3); !slices.Equal(l.Holders(n), got[:n]) {
			t.Fatal("fewer are others")
		}
	})
	if next == 0 {
		t.Fatal("nothing was ever held")
	}
}

func BenchmarkHold(b *testing.B) {
	for _, groups := range []int{10, 1000, 100_000} {
		b.Run("groups="+strconv.Itoa(groups), func(b *testing.B) {
			l := open(b, discard{}, nil)
			for g := range groups {
				l.Hold(storage.GroupID(g+1), storage.LSN(g+1))
			}
			b.ResetTimer()
			for i := range b.N {
				l.Hold(storage.GroupID(i%groups+1), storage.LSN(groups+i+1))
				l.Holders(1)
			}
		})
	}
}
