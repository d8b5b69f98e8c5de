package wal_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"petiole/storage"
	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

// noted is a replay with notes, rendered: numbers of records, "-N" for what is
// lost up to N, "~N" if uncertain, and notes in brackets.
func noted(t *testing.T, l *wal.Log) (s string) {
	t.Helper()
	err := l.ReplayNotes(func(r wal.Record) error {
		s += fmt.Sprintf("%d ", r.LSN)
		return nil
	}, func(x wal.Lost) error {
		if x.Uncertain {
			s += fmt.Sprintf("%d~ ", x.First)
		} else {
			s += fmt.Sprintf("%d-%d ", x.First, x.Last)
		}
		return nil
	}, func(n *wal.Note) error {
		s += fmt.Sprintf("[%d quiet %d", n.Next, n.Quiet)
		for _, g := range n.Groups {
			s += fmt.Sprintf(" %d:%d", g.Group, g.Last)
		}
		s += "] "
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func oneMessage([]byte) int { return 1 }

// TestNote waits until a log is idle: whatever becomes of its end then, even if
// nothing is left of it, what is lost is found, and the note says of whom it was.
func TestNote(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		l := open(t, disk, func(o *wal.Options) { o.Messages = oneMessage })
		l.SetLast(1, 10)
		l.SetLast(2, 1<<32+20)
		put(t, l, "one")
		put(t, l, "two")
		time.Sleep(2*wal.NoteDelay + time.Millisecond)
		name := disk.Names(".wal")[0]
		at := int64(bytes.Index(disk.Contents(name), []byte("two"))) / 512 * 512
		for what, c := range map[string]struct {
			damage func(d *simfs.FS)
			want   string
		}{
			"nothing":  {func(*simfs.FS) {}, "1 2 [3 quiet 1 1:12 2:20] "},
			"data":     {func(d *simfs.FS) { d.Flip(name, (at+82)*8) }, "1 2-2 [3 quiet 1 1:12 2:20] "},
			"header":   {func(d *simfs.FS) { d.Flip(name, at*8) }, "1 2-2 [3 quiet 1 1:12 2:20] "},
			"the rest": {func(d *simfs.FS) { d.SetContents(name, append(d.Contents(name)[:at], make([]byte, smallSeg-at)...)) }, "1 2-2 [3 quiet 1 1:12 2:20] "},
			"all": {func(d *simfs.FS) {
				d.SetContents(name, append(d.Contents(name)[:4096], make([]byte, smallSeg-4096)...))
			}, "1-2 [3 quiet 1 1:12 2:20] "},
			"cut":  {func(d *simfs.FS) { d.SetContents(name, d.Contents(name)[:at]) }, "1 2-2 [3 quiet 1 1:12 2:20] 3~ "},
			"note": {func(d *simfs.FS) { d.Flip(name, (512+60)*8) }, "1 2 "},
		} {
			killed := disk.Kill()
			c.damage(killed)
			for start := range 3 { // the same, whatever the starts before have written
				n := open(t, killed, nil)
				if got := noted(t, n); got != c.want {
					t.Errorf("%s, start %d: %s, want %s", what, start, got, c.want)
				}
				killed = killed.Kill()
				n.Close()
			}
		}
		l.Close()
	})
}

// TestIdleWritesNothing: a log that has noted its end writes nothing more, however
// long it is idle.
func TestIdleWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		l := open(t, disk, func(o *wal.Options) { o.Messages = oneMessage })
		l.SetLast(1, 10)
		put(t, l, "one")
		time.Sleep(3 * wal.NoteDelay)
		disk.SetHook(func(op simfs.Op, name string) error {
			if op == simfs.OpWrite || op == simfs.OpSync {
				t.Errorf("an idle log writes to %s", name)
			}
			return nil
		})
		time.Sleep(time.Hour)
		disk.SetHook(nil)
		l.Close()
	})
}

// TestNoteOfNewSegment: each segment begins with what the groups had come to when
// it did, going by what was written by then, and goes without groups for which
// there is no room.
func TestNoteOfNewSegment(t *testing.T) {
	disk := simfs.New(1)
	l := open(t, disk, func(o *wal.Options) { o.Messages, o.SegmentSize = oneMessage, 64<<10 })
	const groups = 1000
	want := map[storage.GroupID]uint32{}
	for g := storage.GroupID(2); g < 2+groups; g++ {
		l.SetLast(g, uint64(g)*100)
		want[g] = uint32(g) * 100
	}
	type state map[storage.GroupID]uint32
	by := map[storage.LSN]state{1: {}} // what the groups have come to below an LSN
	for g, last := range want {
		by[1][g] = last
	}
	newest := map[storage.GroupID]storage.LSN{}
	add := func(g storage.GroupID, size int) {
		lsn, err := l.Append(g, nil, make([]byte, size))
		if err != nil {
			t.Fatal(err)
		}
		want[g]++
		newest[g] = lsn
		s := state{}
		for g, last := range want {
			s[g] = last
		}
		by[lsn+1] = s
	}
	for i := range 300 { // more under way than a segment has room for
		add(storage.GroupID(2+i*7%groups), 1500)
		if i%60 == 59 {
			if err := l.Commit(); err != nil {
				t.Fatal(err)
			}
		}
	}
	l.Close()
	info, at := 0, map[storage.GroupID][]storage.LSN{}
	l = open(t, disk, nil)
	var notes []*wal.Note
	if err := l.ReplayNotes(func(r wal.Record) error {
		at[r.Group] = append(at[r.Group], r.LSN)
		return nil
	}, func(x wal.Lost) error { return fmt.Errorf("lost %+v", x) }, func(n *wal.Note) error {
		notes = append(notes, n)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, n := range notes {
		for _, g := range n.Groups {
			if g.Last != by[n.Next][g.Group] {
				t.Fatalf("below %d group %d is said to have come to %d, which was %d", n.Next, g.Group, g.Last, by[n.Next][g.Group])
			}
		}
		if len(n.Groups) != 186 || !slices.IsSortedFunc(n.Groups, func(a, b wal.GroupLast) int { return int(a.Group) - int(b.Group) }) {
			t.Fatalf("%d groups are listed", len(n.Groups))
		}
		for g, lsns := range at {
			_, listed := n.Last(g)
			for _, lsn := range lsns {
				if !listed && lsn >= n.Quiet && lsn < n.Next {
					t.Fatalf("group %d has record %d, which the note below %d does not know of (quiet from %d)", g, lsn, n.Next, n.Quiet)
				}
				if !listed && lsn < n.Next {
					info++
				}
			}
		}
	}
	if len(notes) < 5 || info == 0 {
		t.Fatalf("%d notes, %d times a record of a group that is not listed", len(notes), info)
	}
}

// TestLossBeforeOnlySegment: what is missing before the only segment there is, or
// before an empty one, is told at each start.
func TestLossBeforeOnlySegment(t *testing.T) { synctest.Test(t, testLossBeforeOnlySegment) }

func testLossBeforeOnlySegment(t *testing.T) {
	for _, records := range []int{0, 2} {
		disk := simfs.New(1)
		l := open(t, disk, nil)
		put(t, l, "one")
		l.Close()
		disk.SetContents(disk.Names(".wal")[0], make([]byte, smallSeg))
		want := "1~ "
		for start := range 4 {
			l := open(t, disk, nil)
			if got := noted(t, l); got != want {
				t.Fatalf("start %d: %q, want %q", start, got, want)
			}
			if start < records {
				want += fmt.Sprintf("%d ", put(t, l, "more"))
			}
			disk = disk.Kill()
			l.Close()
		}
	}
}

// TestLossBeforeEmptySegment: starts that write nothing do not make more of a
// loss, nor forget it.
func TestLossBeforeEmptySegment(t *testing.T) { synctest.Test(t, testLossBeforeEmptySegment) }

func testLossBeforeEmptySegment(t *testing.T) {
	disk := simfs.New(1)
	l := open(t, disk, nil)
	put(t, l, "one")
	disk = disk.Kill()
	l.Close()
	name := disk.Names(".wal")[0]
	disk.SetContents(name, disk.Contents(name)[:smallSeg-1024])
	for start := range 4 {
		l := open(t, disk, nil)
		if got := noted(t, l); got != "1 2~ " {
			t.Fatalf("start %d: %q", start, got)
		}
		if l.Stats().Lost != 0 {
			t.Fatalf("start %d: %+v", start, l.Stats())
		}
		disk = disk.Kill()
		l.Close()
	}
}

// TestDamagedNotes: whatever a note holds, the log opens and has its records.
func TestDamagedNotes(t *testing.T) {
	disk := simfs.New(1)
	l := open(t, disk, func(o *wal.Options) { o.Messages = oneMessage })
	l.SetLast(1, 10)
	l.SetLast(3, 10)
	put(t, l, "one")
	l.Close()
	name := disk.Names(".wal")[0]
	good := disk.Contents(name)
	for at := 512; at < 512+48+16; at++ {
		for _, fix := range []bool{false, true} {
			b := slices.Clone(good)
			b[at] ^= 0x55
			if fix {
				binary.LittleEndian.PutUint32(b[516:], crc32.Checksum(b[520:512+48+16], crc32.MakeTable(crc32.Castagnoli)))
			}
			d := simfs.New(1)
			d.SetContents(name, b)
			l := open(t, d, nil)
			if got := survey(t, l); got.recs[1] != "one" {
				t.Fatalf("octet %d, fixed %v: %+v", at, fix, got)
			}
			if lsn := put(t, l, "goes on"); lsn < 2 {
				t.Fatalf("octet %d: LSN %d", at, lsn)
			}
			l.Close()
		}
	}
}
