package wal_test

import (
	"sync"
	"testing"
	"testing/synctest"

	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

// TestClearAhead counts the writes of small commits: to a file that was only
// preallocated zeros go ahead of them, a few times; to one that is used again
// they do not. In a bubble no note of an idle log comes in between.
func TestClearAhead(t *testing.T) { synctest.Test(t, testClearAhead) }

func testClearAhead(t *testing.T) {
	disk := simfs.New(1)
	var mu sync.Mutex
	writes := map[string]int{}
	disk.SetHook(func(op simfs.Op, name string) error {
		if op == simfs.OpWrite {
			mu.Lock()
			writes[name]++
			mu.Unlock()
		}
		return nil
	})
	const segment = 256 << 10
	l := open(t, disk, func(o *wal.Options) { o.SegmentSize = segment })
	// fill fills the segment in use with small commits and returns how many
	// writes to it were neither of them nor its footer. Its header is written
	// while it still has another name.
	fill := func(name string) int {
		t.Helper()
		commits := 0
		for before := l.Stats().Segments; l.Stats().Segments == before; commits++ {
			put(t, l, record(commits, 100))
		}
		commits-- // the last one is in the next segment
		mu.Lock()
		defer mu.Unlock()
		return writes[name] - commits - 1
	}
	if got := fill(dir + "/0000000000000001.wal"); got != segment/(64<<10) {
		t.Errorf("a file that was only preallocated got %d writes beside the commits, want one for each 64 KiB", got)
	}
	if err := l.Trim(l.Applied()); err != nil { // the file is to be used again
		t.Fatal(err)
	}
	fill(dir + "/0000000000000002.wal")
	// One commit is in it already.
	if got := fill(dir+"/0000000000000003.wal") - 1; got != 0 {
		t.Errorf("a file that has been written before got %d writes beside the commits", got)
	}
}
