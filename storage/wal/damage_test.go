package wal_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"petiole/storage"
	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

// damagedLog makes a log of 12 batches with three records of some 300 bytes each
// in three segments, stopped by Close or by a power cut before it was idle.
func damagedLog(t *testing.T, closed bool) (files map[string][]byte, names []string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { files, names = makeDamagedLog(t, closed) })
	return files, names
}

func makeDamagedLog(t *testing.T, closed bool) (files map[string][]byte, names []string) {
	disk := simfs.New(1)
	l := open(t, disk, func(o *wal.Options) { o.Reserve, o.SegmentSize = -1, 4096+4*3072+1536 })
	for i := range 36 {
		if _, err := l.Append(storage.GroupID(1+i%3), nil, []byte(record(i, 900+i))); err != nil {
			t.Fatal(err)
		}
		if i%3 == 2 {
			if err := l.Commit(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if closed {
		l.Close()
	}
	disk = disk.PowerCut()
	names = disk.Names(".wal")
	if len(names) != 3 {
		t.Fatalf("files %v, want 3", names)
	}
	files = map[string][]byte{}
	for _, name := range names {
		files[name] = disk.Contents(name)
	}
	return files, names
}

// outcome is what a lossy replay gave.
type outcome struct {
	recs map[storage.LSN]string
	lost []wal.Lost
	next storage.LSN
}

// survey replays l and checks that every number comes once, in order.
func survey(t *testing.T, l *wal.Log) outcome {
	t.Helper()
	o := outcome{recs: map[storage.LSN]string{}, next: l.Oldest()}
	err := l.ReplayLossy(func(r wal.Record) error {
		if r.LSN != o.next {
			return fmt.Errorf("LSN %d where %d is due", r.LSN, o.next)
		}
		o.recs[r.LSN] = string(r.Data)
		o.next++
		return nil
	}, func(x wal.Lost) error {
		if x.Before && len(o.lost)+len(o.recs) == 0 && x.Last == o.next-1 {
			o.next = x.First
		}
		if x.First != o.next || x.Last < x.First || x.File == "" || x.Reason == "" {
			return fmt.Errorf("lost %+v where LSN %d is due", x, o.next)
		}
		o.lost = append(o.lost, x)
		o.next = x.Last + 1
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if o.next != l.Durable()+1 {
		t.Fatalf("the replay ends before LSN %d, durable is %d", o.next, l.Durable())
	}
	return o
}

// TestFlippedBits flips bits all over a log. Every start succeeds, no record has
// other contents than it was given, no more is lost than the record hit, or the
// batch if it was its header, and what is lost is said; the log goes on, and
// sets the damaged segment aside when it is not needed any more.
func TestFlippedBits(t *testing.T) {
	for _, closed := range []bool{true, false} {
		t.Run(fmt.Sprintf("closed=%v", closed), func(t *testing.T) {
			files, names := damagedLog(t, closed)
			one, batch, none, cut := 0, 0, 0, 0
			for i, name := range names {
				b := files[name]
				for bit := int64(3); bit < int64(len(b))*8; bit += 8*37 + 1 {
					where := fmt.Sprintf("segment %d, byte %d, bit %d", i+1, bit/8, bit%8)
					disk := simfs.New(1)
					for _, n := range names {
						disk.SetContents(n, files[n])
					}
					disk.Flip(name, bit)
					l := open(t, disk, func(o *wal.Options) { o.Reserve = -1 })
					got := survey(t, l)
					lost := 0
					for lsn := storage.LSN(1); lsn <= 36; lsn++ {
						data, ok := got.recs[lsn]
						if ok && data != record(int(lsn)-1, 900+int(lsn)-1) {
							t.Fatalf("%s: record %d has other contents", where, lsn)
						}
						if !ok {
							lost++
						}
					}
					switch {
					case lost == 0 && len(got.lost) == 0:
						none++ // unused space, padding, a copy
					case lost == 1 && len(got.lost) == 1:
						one++
						x := got.lost[0]
						if at := int64(bytes.Index(b, []byte(fmt.Sprintf("record %d ", x.First-1)))); x.Group != 0 || bit/8 >= at {
							if x.Group != storage.GroupID(1+(x.First-1)%3) || x.Kind != 'r' && bit/8 != at {
								t.Fatalf("%s: lost %+v", where, x)
							}
						}
					case lost == 3 && len(got.lost) == 1 && got.lost[0].Last == got.lost[0].First+2:
						batch++
					case lost == 3 && len(got.lost) == 0 && !closed && got.next == 34:
						cut++ // the last batch of a log that was not closed
					default:
						t.Fatalf("%s: %d records are lost, told %+v", where, lost, got.lost)
					}
					if l.Stats().Lost != uint64(lost) && len(got.lost) > 0 {
						t.Fatalf("%s: %+v", where, l.Stats())
					}
					if bit%64 == 3 { // some of them, for it takes time
						goesOn(t, disk, l, &got, where)
					}
					l.Close()
				}
			}
			if one < 200 || batch < 5 || none == 0 || closed != (cut == 0) {
				t.Errorf("%d lost one record, %d a batch, %d none, %d cut the last", one, batch, none, cut)
			}
		})
	}
}

// goesOn writes to a log that has lost something, cuts the power, and sees the
// same again, until the log is trimmed.
func goesOn(t *testing.T, disk *simfs.FS, l *wal.Log, got *outcome, where string) {
	t.Helper()
	if lsn := put(t, l, "goes on"); lsn != got.next {
		t.Fatalf("%s: LSN %d after a replay up to %d", where, lsn, got.next-1)
	}
	after := disk.PowerCut()
	n := open(t, after, nil)
	defer n.Close()
	again := survey(t, n)
	if again.recs[got.next] != "goes on" || len(again.recs) != len(got.recs)+1 || len(again.lost) != len(got.lost) {
		t.Fatalf("%s: the next start sees %d records, lost %+v; before %d, lost %+v", where, len(again.recs), again.lost, len(got.recs), got.lost)
	}
	for i, x := range again.lost {
		if y := got.lost[i]; x.First != y.First || x.Last != y.Last || x.Group != y.Group {
			t.Fatalf("%s: lost %+v, before %+v", where, x, y)
		}
	}
	for range 20 {
		put(t, n, record(0, 2000))
	}
	if err := n.Trim(n.Durable()); err != nil {
		t.Fatal(err)
	}
	parked := 0
	for _, name := range after.Names("") {
		if strings.Contains(name, ".damaged-") {
			parked++
		}
	}
	if len(got.lost) > 0 && parked == 0 {
		t.Fatalf("%s: no file is set aside: %v", where, after.Names(""))
	}
}

// TestDamagedFiles takes whole files away, exchanges, and cuts them.
func TestDamagedFiles(t *testing.T) {
	const unknown = 1 << 20 // more were possible
	for _, c := range []struct {
		name   string
		change func(d *simfs.FS, n []string)
		lost   [2]storage.LSN // the range; 0, 0: nothing
		parked bool
	}{
		{"middle segment missing", func(d *simfs.FS, n []string) { d.Lose(n[1]) }, [2]storage.LSN{13, 24}, false},
		{"last segment missing", func(d *simfs.FS, n []string) { d.Lose(n[2]) }, [2]storage.LSN{25, unknown}, false},
		{"first under the second's name", func(d *simfs.FS, n []string) { d.SetContents(n[1], d.Contents(n[0])) }, [2]storage.LSN{13, 24}, true},
		{"first also under a new name", func(d *simfs.FS, n []string) {
			d.SetContents(strings.Replace(n[0], "1.wal", "9.wal", 1), d.Contents(n[0]))
		}, [2]storage.LSN{37, unknown}, true},
		{"segment of another log", func(d *simfs.FS, n []string) {
			other := simfs.New(9)
			l := open(t, other, nil)
			for i := range 40 {
				put(t, l, record(i, 1000))
			}
			d.SetContents(n[1], other.Contents(n[1]))
		}, [2]storage.LSN{13, 24}, true},
		{"footer gone", func(d *simfs.FS, n []string) { d.Scramble(n[0], 17408, 512) }, [2]storage.LSN{}, false},
		{"both segment headers gone", func(d *simfs.FS, n []string) { d.Scramble(n[1], 0, 4096) }, [2]storage.LSN{}, false},
		{"header and first batch gone", func(d *simfs.FS, n []string) { d.Scramble(n[1], 0, 5000) }, [2]storage.LSN{13, 15}, false},
		{"block in the middle gone", func(d *simfs.FS, n []string) { d.Scramble(n[1], 7168, 512) }, [2]storage.LSN{16, 18}, false},
		{"all of a segment gone", func(d *simfs.FS, n []string) { d.Scramble(n[1], 0, 17920) }, [2]storage.LSN{13, 24}, true},
		{"last file cut", func(d *simfs.FS, n []string) { d.SetContents(n[2], d.Contents(n[2])[:4096+3072+5]) }, [2]storage.LSN{28, unknown}, false},
		{"middle file cut", func(d *simfs.FS, n []string) { d.SetContents(n[1], d.Contents(n[1])[:4096+3072+5]) }, [2]storage.LSN{16, 24}, false},
		{"last file emptied", func(d *simfs.FS, n []string) { d.SetContents(n[2], nil) }, [2]storage.LSN{25, unknown}, true},
		{"middle file emptied", func(d *simfs.FS, n []string) { d.SetContents(n[1], nil) }, [2]storage.LSN{13, 24}, true},
		{"bad block", func(d *simfs.FS, n []string) {
			d.Inject(simfs.Fault{Op: simfs.OpRead, Suffix: n[1], Off: 7168, Len: 512, Times: -1, Err: syscall.EIO})
		}, [2]storage.LSN{13, 18}, false}, // given up by blocks of 4 KiB
		{"bad block in the last segment", func(d *simfs.FS, n []string) {
			d.Inject(simfs.Fault{Op: simfs.OpRead, Suffix: n[2], Off: 7168, Len: 512, Times: -1, Err: syscall.EIO})
		}, [2]storage.LSN{25, 30}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			files, names := damagedLog(t, true)
			disk := simfs.New(1)
			for name, b := range files {
				disk.SetContents(name, b)
			}
			c.change(disk, names)
			l := open(t, disk, nil)
			oneOpen(t, disk)
			got := survey(t, l)
			if c.lost[0] == 0 {
				if len(got.lost) > 0 || len(got.recs) != 36 {
					t.Fatalf("lost %+v", got.lost)
				}
			} else {
				first, last := got.lost[0].First, got.lost[len(got.lost)-1].Last
				if first != c.lost[0] || last != c.lost[1] && (c.lost[1] != unknown || last < unknown || !got.lost[len(got.lost)-1].Uncertain) {
					t.Fatalf("lost %+v, want %v", got.lost, c.lost)
				}
				if c.lost[1] == unknown {
					first--
				} else {
					first = 36 - (last - first + 1)
				}
				if len(got.recs) != int(first) {
					t.Fatalf("%d records, want %d", len(got.recs), first)
				}
				if err := l.Replay(func(wal.Record) error { return nil }); !errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), "restore") {
					t.Fatalf("Replay: %v; want ErrCorrupt with a remedy", err)
				}
			}
			for lsn, data := range got.recs {
				if data != record(int(lsn)-1, 900+int(lsn)-1) {
					t.Fatalf("record %d has other contents", lsn)
				}
			}
			parked := slices.ContainsFunc(disk.Names(""), func(name string) bool { return strings.Contains(name, ".damaged-") })
			if parked != c.parked {
				t.Errorf("set aside: %v; files %v", parked, disk.Names(""))
			}
			if c.lost[0] != 0 {
				// A missing file cannot be parked; a bad block does not outlive the cut.
				if lsn := put(t, l, "goes on"); lsn != got.next {
					t.Fatalf("LSN %d after a replay up to %d", lsn, got.next-1)
				}
				l.Close()
				l = open(t, disk, nil)
				again := survey(t, l)
				if again.recs[got.next] != "goes on" || len(again.recs) != len(got.recs)+1 {
					t.Fatalf("the next start sees %d records, lost %+v", len(again.recs), again.lost)
				}
			}
		})
	}
}

// TestDeadDisk: if a whole segment cannot be read, the disk does not work. That
// is no damage to go on with.
func TestDeadDisk(t *testing.T) {
	disk := simfs.New(1)
	l := open(t, disk, func(o *wal.Options) { o.SegmentSize = 1 << 20 })
	for i := range 400 {
		l.Append(1, nil, []byte(record(i, 2000)))
		if i%10 == 9 {
			l.Commit()
		}
	}
	l.Close()
	disk.Inject(simfs.Fault{Op: simfs.OpRead, Off: 8192, Len: 1 << 20, Times: -1, Err: syscall.EIO})
	if l, err := wal.Open(wal.Options{FS: disk, Dir: dir, SegmentSize: 1 << 20}); !errors.Is(err, syscall.EIO) {
		l.Close()
		t.Fatalf("got %v, want EIO", err)
	}
	if names := disk.Names(""); slices.ContainsFunc(names, func(s string) bool { return strings.Contains(s, ".damaged-") }) {
		t.Fatalf("files %v", names)
	}
}

// TestSkipTo: numbers that a checkpoint has seen are not given out again.
func TestSkipTo(t *testing.T) {
	for _, lose := range []bool{true, false} {
		disk := simfs.New(1)
		l := open(t, disk, nil)
		put(t, l, "one")
		l.Close()
		if lose {
			for _, name := range disk.Names(".wal") {
				disk.Lose(name)
			}
		}
		for range 2 { // nothing was written after the first
			l = open(t, disk, nil)
			before := survey(t, l)
			if err := l.SkipTo(500); err != nil {
				t.Fatal(err)
			}
			l.SkipTo(100)
			if l.Durable() != 499 {
				t.Fatalf("durable %d", l.Durable())
			}
			l.Close()
			if lose != (len(before.recs) == 0) {
				t.Fatalf("records %v", before.recs)
			}
		}
		l = open(t, disk, nil)
		survey(t, l)
		if err := l.SkipTo(500); err != nil {
			t.Fatal(err)
		}
		if lsn := put(t, l, "after"); lsn != 500 {
			t.Fatalf("LSN %d", lsn)
		}
		if err := l.SkipTo(1000); err == nil {
			t.Error("skipped after an append")
		}
		disk = disk.PowerCut()
		l = open(t, disk, nil)
		got := survey(t, l)
		n := len(got.lost)
		if got.recs[500] != "after" || n != 1 || got.lost[0].Last != 499 || lsnAfter(t, l) != 501 {
			t.Fatalf("%+v", got)
		}
	}
}

func lsnAfter(t *testing.T, l *wal.Log) storage.LSN { return put(t, l, "next") }

// TestFlippedBitsReopened damages a segment that several runs have written to,
// each behind the closing mark of the one before.
func TestFlippedBitsReopened(t *testing.T) { synctest.Test(t, testFlippedBitsReopened) }

func testFlippedBitsReopened(t *testing.T) {
	base := simfs.New(1)
	const runs, each = 4, 3
	for run := range runs {
		l := open(t, base, func(o *wal.Options) { o.Reserve = -1 })
		survey(t, l)
		for i := range each {
			put(t, l, record(run*each+i, 300))
		}
		l.Close()
	}
	names := base.Names(".wal")
	if len(names) != 1 {
		t.Fatalf("files %v", names)
	}
	b := base.Contents(names[0])
	told, none := 0, 0
	for at := 0; at < 4096+512*(runs*(each+2)+2); at += 5 {
		disk := simfs.New(1)
		disk.SetContents(names[0], b)
		disk.Flip(names[0], int64(at)*8+int64(at)%8)
		l := open(t, disk, func(o *wal.Options) { o.Reserve = -1 })
		got := survey(t, l)
		lost := uint64(0)
		for _, x := range got.lost {
			lost += uint64(x.Last - x.First + 1)
		}
		if len(got.recs)+int(lost) != runs*each || lost > 1 {
			t.Fatalf("byte %d: %d records, lost %+v", at, len(got.recs), got.lost)
		}
		for lsn, data := range got.recs {
			if data != record(int(lsn)-1, 300) {
				t.Fatalf("byte %d: record %d has other contents", at, lsn)
			}
		}
		if lost > 0 {
			told++
		} else {
			none++
		}
		if at%3 == 0 {
			goesOn(t, disk, l, &got, fmt.Sprintf("byte %d", at))
		}
		l.Close()
	}
	if told < 100 || none < 100 {
		t.Errorf("%d times a record was lost, %d times none", told, none)
	}
}

// TestCleanStartReadsLittle: a log that was closed with nothing in it that is
// needed takes no reading, even if its segment holds old batches.
func TestCleanStartReadsLittle(t *testing.T) {
	disk := simfs.New(1)
	l := open(t, disk, func(o *wal.Options) { o.SegmentSize = 4 << 20 })
	for range 3 {
		for i := range 45 {
			if _, err := l.Append(1, nil, make([]byte, 100_000)); err != nil {
				t.Fatal(err)
			}
			if i%15 == 14 {
				if err := errors.Join(l.Commit(), l.Trim(l.Durable()+1)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if err := l.Trim(l.Durable() + 1); err != nil {
		t.Fatal(err)
	}
	l.Close()
	remove := disk.Inject(simfs.Fault{Op: simfs.OpRead, Off: 3 << 20, Len: 900 << 10, Times: -1, Err: errors.New("read too much")})
	defer remove()
	l = open(t, disk, func(o *wal.Options) { o.SegmentSize = 4 << 20 })
	if got := survey(t, l); len(got.recs)+len(got.lost) > 0 || got.next != 136 {
		t.Fatalf("next LSN %d, %d records", got.next, len(got.recs))
	}
}

// TestLargeBatchHeaderDamaged: behind the damaged header of a batch larger than
// what is searched for the end of a log, its end is still found.
func TestLargeBatchHeaderDamaged(t *testing.T) { synctest.Test(t, testLargeBatchHeaderDamaged) }

func testLargeBatchHeaderDamaged(t *testing.T) {
	disk := simfs.New(1)
	size := func(o *wal.Options) { o.SegmentSize, o.Reserve = 24<<20, -1 }
	l := open(t, disk, size)
	put(t, l, "before")
	large, err := l.Append(1, nil, make([]byte, 12<<20))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Commit(); err != nil {
		t.Fatal(err)
	}
	put(t, l, "after")
	put(t, l, "last")
	disk = disk.Kill()
	name := disk.Names(".wal")[0]
	disk.Flip(name, (4096+512+512+20)*8) // "before", the mark, the batch
	l = open(t, disk, size)
	got := survey(t, l)
	if len(got.lost) != 1 || got.lost[0].First != large || got.lost[0].Last != large || got.recs[large+1] != "after" || got.next != large+3 {
		t.Fatalf("lost %+v, next LSN %d", got.lost, got.next)
	}
}
