package wal_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"petiole/storage"
	"petiole/storage/vfs"
	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

// open opens a log on disk with small segments.
func open(t testing.TB, disk vfs.FS, change func(*wal.Options)) *wal.Log {
	t.Helper()
	o := wal.Options{FS: disk, Dir: dir, SegmentSize: smallSeg, Reserve: 1}
	if change != nil {
		change(&o)
	}
	l, err := wal.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// put appends and commits one record.
func put(t testing.TB, l *wal.Log, data string) storage.LSN {
	t.Helper()
	lsn, err := l.Append(1, nil, []byte(data))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Commit(); err != nil {
		t.Fatal(err)
	}
	return lsn
}

// contents replays l.
func contents(t testing.TB, l *wal.Log) []string {
	t.Helper()
	var got []string
	if err := l.Replay(func(r wal.Record) error {
		got = append(got, string(r.Data))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return got
}

// record is a string of the given length that is unlike any other i's.
func record(i, size int) string {
	s := fmt.Sprintf("record %d ", i)
	return s + strings.Repeat("x", max(size-len(s), 0))
}

// TestAppendCommitReplay counts what is written. It runs in a bubble, where no second
// passes by itself: after one without a commit the log would note its end.
func TestAppendCommitReplay(t *testing.T) { synctest.Test(t, testAppendCommitReplay) }

func testAppendCommitReplay(t *testing.T) {
	disk := simfs.New(1)
	type seen struct {
		lsn   storage.LSN
		group storage.GroupID
		data  string
		tag   any
	}
	var got []seen
	l := open(t, disk, func(o *wal.Options) {
		o.OnCommit = func(recs []wal.Record) {
			for _, r := range recs {
				got = append(got, seen{r.LSN, r.Group, string(r.Data), r.Tag})
			}
		}
	})
	part := []byte("ab")
	l.Append(7, "tag", part, nil, []byte("cd"))
	copy(part, "zz") // Append has copied it
	l.Append(8, nil)
	if l.Durable() != 0 || len(got) != 0 {
		t.Fatal("committed without being asked to")
	}
	if err := l.Commit(); err != nil {
		t.Fatal(err)
	}
	want := []seen{{1, 7, "abcd", "tag"}, {2, 8, "", nil}}
	if !slices.Equal(got, want) {
		t.Fatalf("OnCommit got %v, want %v", got, want)
	}
	if l.Durable() != 2 || l.Written() != 2 || l.Oldest() != 1 {
		t.Fatalf("durable %d, written %d, oldest %d", l.Durable(), l.Written(), l.Oldest())
	}
	if s := l.Stats(); s.Syncs != 1 || s.Batches != 1 || s.Records != 2 || s.Bytes != 512 || s.Segments != 1 {
		t.Fatalf("stats %+v", s)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(1, nil); !errors.Is(err, storage.ErrClosed) {
		t.Fatalf("append after close: %v", err)
	}
	l = open(t, disk, nil)
	if got := contents(t, l); !slices.Equal(got, []string{"abcd", ""}) {
		t.Fatalf("replay: %q", got)
	}
	if lsn := put(t, l, "next"); lsn != 3 {
		t.Fatalf("LSN %d after a restart, want 3", lsn)
	}
}

func TestAppendRefuses(t *testing.T) {
	l := open(t, discard{}, nil)
	if _, err := l.Append(1, nil, make([]byte, wal.MaxRecord/2), make([]byte, wal.MaxRecord/2+1)); !errors.Is(err, wal.ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	if _, err := l.Append(0, nil); err == nil {
		t.Error("group 0 was accepted")
	}
}

func TestOpenRefusesOptions(t *testing.T) {
	for name, o := range map[string]wal.Options{
		"no FS": {Dir: dir}, "no dir": {FS: simfs.New(1)}, "small segments": {FS: simfs.New(1), Dir: dir, SegmentSize: 4096},
	} {
		if l, err := wal.Open(o); err == nil {
			l.Close()
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestRestartsLeaveNothing opens and closes often without writing.
func TestRestartsLeaveNothing(t *testing.T) {
	disk := simfs.New(1)
	l := open(t, disk, nil)
	put(t, l, "only")
	for range 20 {
		l.Close()
		l = open(t, disk, nil)
	}
	if n := len(disk.Names(".wal")); n > 2 {
		t.Fatalf("%d segments after 20 empty restarts", n)
	}
	if got := contents(t, l); !slices.Equal(got, []string{"only"}) {
		t.Fatalf("replay: %q", got)
	}
	if lsn := put(t, l, "more"); lsn != 2 {
		t.Fatalf("LSN %d, want 2", lsn)
	}
}

func TestTrim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		l := open(t, disk, nil)
		for i := range 60 { // 2 KiB each: 5 in a segment
			put(t, l, record(i, 1900))
		}
		before := l.Stats().Segments
		if before < 10 {
			t.Fatalf("only %d segments", before)
		}
		size := l.Size()
		if err := l.Trim(31); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		s := l.Stats()
		if l.Oldest() > 31 || l.Oldest() < 20 {
			t.Errorf("oldest is %d after a trim below 31", l.Oldest())
		}
		// One more if it was being allocated while a segment became one.
		if s.Spares < 2 || s.Spares > 3 || len(disk.Names(".spare")) != s.Spares {
			t.Errorf("%d spares, files %v, want 2 or 3", s.Spares, disk.Names(".spare"))
		}
		if l.Size() >= size || len(disk.Names(".wal")) != s.Segments {
			t.Errorf("size was %d, is %d; files %v", size, l.Size(), disk.Names(".wal"))
		}
		// All of it: the active segment stays.
		if err := l.Trim(1000); err != nil {
			t.Fatal(err)
		}
		if s := l.Stats(); s.Segments != 1 {
			t.Errorf("%d segments left", s.Segments)
		}
		for i := range 5 {
			put(t, l, record(100+i, 1900))
		}
		synctest.Wait()
		if s := l.Stats(); s.Spares < 1 || s.Spares > 3 || len(disk.Names(".spare")) != s.Spares {
			t.Errorf("%d spares after a rollover, want 1 to 3", s.Spares)
		}
		oldest := l.Oldest()
		l.Close()
		l = open(t, disk, nil)
		if got := contents(t, l); len(got) != int(65-oldest+1) || got[len(got)-1] != record(104, 1900) {
			t.Errorf("%d records replayed, oldest was %d", len(got), oldest)
		}
		l.Close()
	})
}

// TestTrimKeepsUnapplied holds up OnCommit: what it has not seen is not trimmed,
// whatever is asked for.
func TestTrimKeepsUnapplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		l := open(t, simfs.New(1), func(o *wal.Options) { o.OnCommit = func([]wal.Record) { <-gate } })
		for i := range 12 {
			l.Append(1, nil, []byte(record(i, 4000)))
			l.Kick()
			synctest.Wait()
		}
		if l.Durable() != 12 || l.Applied() != 0 || l.Appended() != 12 || l.Stats().Segments < 3 {
			t.Fatalf("durable %d, applied %d, %d segments", l.Durable(), l.Applied(), l.Stats().Segments)
		}
		if err := l.Trim(13); err != nil || l.Oldest() != 1 {
			t.Errorf("oldest %d after a trim of what is not applied, %v", l.Oldest(), err)
		}
		close(gate)
		synctest.Wait()
		if err := l.Trim(13); err != nil || l.Oldest() == 1 || l.Applied() != 12 {
			t.Errorf("oldest %d, applied %d, %v", l.Oldest(), l.Applied(), err)
		}
		l.Close()
	})
}

// TestRecycledSegmentKeepsSilent cuts the power while a recycled segment is
// almost unused: the records it held before must not come back.
func TestRecycledSegmentKeepsSilent(t *testing.T) {
	disk := simfs.New(1)
	l := open(t, disk, nil)
	i := 0
	for ; l.Stats().Segments < 4; i++ {
		put(t, l, record(i, 400))
	}
	if err := l.Trim(l.Durable()); err != nil {
		t.Fatal(err)
	}
	for n := l.Stats().Segments; l.Stats().Segments == n; i++ {
		put(t, l, record(i, 400))
	}
	disk = disk.PowerCut()
	names := disk.Names(".wal")
	last := disk.Contents(names[len(names)-1])
	if n := bytes.Count(last, []byte("PWB\x02")); n < 10 {
		t.Fatalf("the last segment holds %d batch headers: it is not a recycled one", n)
	}
	l = open(t, disk, nil)
	got := contents(t, l)
	for j, s := range got {
		if want := record(int(l.Oldest())-1+j, 400); s != want {
			t.Fatalf("record %d is %.20q, want %.20q", j, s, want)
		}
	}
	if int(l.Oldest())-1+len(got) != i {
		t.Fatalf("replay ends at %d of %d", int(l.Oldest())-1+len(got), i)
	}
}

// TestCutAtEveryOperation runs one script, with rollovers, recycling, a record
// larger than a segment, and a close, and stops it at each operation in turn.
func TestCutAtEveryOperation(t *testing.T) {
	script := func(disk *simfs.FS, h *history) {
		rng := rand.New(rand.NewPCG(1, 1))
		for range 2 {
			l, err := wal.Open(wal.Options{FS: disk, Dir: dir, SegmentSize: smallSeg, OnCommit: h.onCommit(t)})
			if err != nil {
				return
			}
			defer l.Close()
			for i := range 18 {
				data := h.data(rng, 2500)
				if i == 8 {
					data = h.data(rng, 2*smallSeg)
				}
				lsn, err := l.Append(1, nil, data)
				if err != nil {
					return
				}
				h.add(t, lsn, 1, data)
				if l.Commit() != nil {
					return
				}
				if i%7 == 6 {
					h.trimmed = max(h.trimmed, lsn-3)
					if l.Trim(lsn-3) != nil {
						return
					}
				}
			}
			if l.Close() != nil {
				return
			}
		}
	}
	var counted atomic.Int64 // what prepares the next file counts, too
	disk := simfs.New(1)
	disk.SetHook(func(simfs.Op, string) error { counted.Add(1); return nil })
	script(disk, newHistory())
	ops := int(counted.Load())
	if ops < 100 {
		t.Fatalf("the script has %d operations only", ops)
	}
	for n := 1; n <= ops; n++ {
		for seed := range uint64(4) {
			disk := simfs.New(seed)
			disk.CutAtNth(n)
			h := newHistory()
			script(disk, h)
			acked := h.acked
			if seed == 3 {
				disk = disk.Kill()
			} else {
				disk = disk.PowerCut()
			}
			// The recovery is cut short, too.
			disk.CutAtNth(1 + int(seed)*2)
			if l, err := wal.Open(wal.Options{FS: disk, Dir: dir, SegmentSize: smallSeg}); err == nil {
				l.Close()
			}
			disk = disk.PowerCut()
			l, err := wal.Open(wal.Options{FS: disk, Dir: dir, SegmentSize: smallSeg, OnCommit: h.onCommit(t)})
			if err != nil {
				t.Fatalf("operation %d, seed %d: %v", n, seed, err)
			}
			h.check(t, l, acked)
			lsn, err := l.Append(1, nil, []byte("still works"))
			if err == nil {
				h.add(t, lsn, 1, []byte("still works"))
				err = l.Commit()
			}
			if err != nil {
				t.Fatalf("operation %d, seed %d: %v", n, seed, err)
			}
			l.Close()
		}
	}
}

// TestUnsupported opens logs that this version cannot read.
func TestUnsupported(t *testing.T) {
	for field, at := range map[string]int{"version": 8, "cipher": 10} {
		disk := simfs.New(1)
		l := open(t, disk, nil)
		put(t, l, "secret")
		l.Close()
		name := disk.Names(".wal")[0]
		b := disk.Contents(name)
		b[at] = 9
		binary.LittleEndian.PutUint32(b[508:], crc32.Checksum(b[:508], crc32.MakeTable(crc32.Castagnoli)))
		disk.SetContents(name, b)
		_, err := wal.Open(wal.Options{FS: disk, Dir: dir, SegmentSize: smallSeg})
		if !errors.Is(err, wal.ErrFormat) || errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), "9") {
			t.Errorf("%s: %v", field, err)
		}
		if !bytes.Equal(disk.Contents(name), b) {
			t.Errorf("%s: the segment was changed", field)
		}
	}
}

// TestFaults fails one operation of each kind at each of its occurrences.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name string
		op   simfs.Op
		err  error
	}{
		{"write EIO", simfs.OpWrite, syscall.EIO},
		{"write ENOSPC", simfs.OpWrite, syscall.ENOSPC},
		{"sync EIO", simfs.OpSync, syscall.EIO},
		{"preallocate EIO", simfs.OpPreallocate, syscall.EIO},
		{"syncdir EIO", simfs.OpSyncDir, syscall.EIO},
		{"rename EIO", simfs.OpRename, syscall.EIO},
	} {
		t.Run(c.name, func(t *testing.T) {
			for n := 1; n < 100; n++ {
				hit := false
				synctest.Test(t, func(t *testing.T) { hit = fault(t, c.op, c.err, n) })
				if !hit {
					if n < 3 {
						t.Fatalf("%d faults came up", n-1)
					}
					break
				}
			}
		})
	}
}

// fault fails the nth operation of a kind, and says whether there was one.
func fault(t *testing.T, op simfs.Op, fault error, n int) bool {
	disk := simfs.New(uint64(n))
	h := newHistory()
	fails := make(chan error, 10)
	l := open(t, disk, func(o *wal.Options) {
		o.OnCommit, o.OnFail = h.onCommit(t), func(err error) { fails <- err }
	})
	synctest.Wait() // until the reserve is there
	fail := simfs.FailNth(op, n, fault)
	var mu sync.Mutex
	var failed, beside, told, again bool
	disk.SetHook(func(op simfs.Op, name string) error {
		mu.Lock()
		defer mu.Unlock()
		// Once it has failed the log must leave the disk alone. Where a file made in
		// advance fails, a batch may be under way beside that, and ends; and beside a
		// batch that fails a file may be made ready: nobody needs it.
		again = again || failed && (told || !beside) && strings.HasSuffix(name, ".wal")
		err := fail(op, name)
		if err != nil {
			failed = true
			beside = op == simfs.OpSyncDir || op == simfs.OpRename && strings.HasSuffix(name, ".spare") || strings.HasSuffix(name, ".new")
		}
		return err
	})
	rng := rand.New(rand.NewPCG(uint64(n), 1))
	var err error
	for i := 0; i < 20 && err == nil; i++ {
		data := h.data(rng, 1500)
		var lsn storage.LSN
		if lsn, err = l.Append(1, nil, data); err == nil {
			h.add(t, lsn, 1, data)
			err = l.Commit()
			synctest.Wait() // a segment may be made ahead of need
		}
	}
	mu.Lock()
	told = err != nil
	mu.Unlock()
	if !failed {
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		return false
	}
	if err == nil {
		_, err = l.Append(1, nil, []byte("x"))
	}
	if !errors.Is(err, storage.ErrFailed) || !errors.Is(err, fault) {
		t.Fatalf("fault %d: commit says %v", n, err)
	}
	var pe *fs.PathError
	if !errors.As(err, &pe) {
		t.Fatalf("fault %d: %v names no file", n, err)
	}
	acked := h.acked
	if _, err := l.Append(1, nil, []byte("x")); !errors.Is(err, storage.ErrFailed) {
		t.Fatalf("append after the fault: %v", err)
	}
	// If it was a segment made ahead of need that failed, all is safe.
	if err := l.Commit(); !errors.Is(err, storage.ErrFailed) && (err != nil || h.acked != h.last) {
		t.Fatalf("commit after the fault: %v", err)
	}
	l.Kick()
	if err := l.Close(); !errors.Is(err, storage.ErrFailed) {
		t.Fatalf("close after the fault: %v", err)
	}
	if again {
		t.Fatalf("fault %d: the log went on writing", n)
	}
	if h.acked != acked {
		t.Fatal("acknowledged after the fault")
	}
	if err := <-fails; !errors.Is(err, storage.ErrFailed) || len(fails) > 0 {
		t.Fatalf("OnFail got %v and %d more", err, len(fails))
	}
	// The kernel still shows what a failed sync did not write. It has to survive
	// the next power cut once it has been replayed.
	disk = disk.Kill()
	l = open(t, disk, nil)
	h.check(t, l, acked)
	disk = disk.PowerCut()
	l.Close()
	l = open(t, disk, nil)
	h.check(t, l, h.last)
	l.Close()
	return true
}

func TestRelaxed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		var committed, durable atomic.Uint64
		l := open(t, disk, func(o *wal.Options) {
			o.SyncInterval = 100 * time.Millisecond
			o.OnCommit = func(recs []wal.Record) { committed.Store(uint64(recs[len(recs)-1].LSN)) }
			o.OnDurable = func(lsn storage.LSN) { durable.Store(uint64(lsn)) }
		})
		for range 3 {
			put(t, l, "x")
		}
		if committed.Load() != 3 || l.Written() != 3 || l.Durable() != 0 || durable.Load() != 0 {
			t.Fatalf("committed %d, written %d, durable %d, told %d", committed.Load(), l.Written(), l.Durable(), durable.Load())
		}
		time.Sleep(101 * time.Millisecond)
		synctest.Wait()
		if l.Durable() != 3 || durable.Load() != 3 || l.Stats().Syncs != 1 {
			t.Fatalf("durable %d, told %d, %d syncs", l.Durable(), durable.Load(), l.Stats().Syncs)
		}
		put(t, l, "x")
		if err := l.Sync(); err != nil || l.Durable() != 4 || durable.Load() != 4 {
			t.Fatalf("after Sync: durable %d, told %d, %v", l.Durable(), durable.Load(), err)
		}
		l.Close()
	})
}

func TestKickAndLazy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := open(t, simfs.New(1), nil)
		l.Append(1, nil, []byte("kicked"))
		synctest.Wait()
		if l.Durable() != 0 {
			t.Fatal("committed without a kick")
		}
		l.Kick()
		synctest.Wait()
		if l.Durable() != 1 {
			t.Fatal("the kick did nothing")
		}
		l.AppendLazy(1, []byte("lazy"))
		time.Sleep(wal.LazyDelay - time.Millisecond)
		synctest.Wait()
		if l.Durable() != 1 {
			t.Fatal("the lazy record did not wait")
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if l.Durable() != 2 {
			t.Fatal("the lazy record was not committed")
		}
		l.AppendLazy(1, []byte("lazy"))
		put(t, l, "takes it along")
		if l.Durable() != 4 || l.Stats().Syncs != 3 {
			t.Fatalf("durable %d, %d syncs", l.Durable(), l.Stats().Syncs)
		}
		l.Close()
	})
}

// TestBackPressure blocks the disk until Append has to wait.
func TestBackPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		l := open(t, disk, func(o *wal.Options) { o.MaxPending = 10 << 10 })
		gate := make(chan struct{})
		disk.SetHook(func(op simfs.Op, _ string) error {
			if op == simfs.OpSync {
				<-gate
			}
			return nil
		})
		n := 0
		go func() {
			for range 20 {
				l.Append(1, nil, make([]byte, 1<<10))
				n++
			}
			l.AppendLazy(1, make([]byte, 1<<10))
			n++
		}()
		synctest.Wait()
		if n != 9 {
			t.Fatalf("%d appends of 1 KiB passed with MaxPending of 10 KiB", n)
		}
		if _, err := l.AppendLazy(1, []byte("lazy")); err != nil {
			t.Fatal(err) // and it did not block
		}
		close(gate)
		synctest.Wait()
		if n != 21 {
			t.Fatalf("%d appends after the disk came back", n)
		}
		l.Close()
	})
}

// TestCloseFreesBlocked closes a log while Append waits.
func TestCloseFreesBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		l := open(t, disk, func(o *wal.Options) { o.MaxPending = 1 << 10 })
		gate := make(chan struct{})
		disk.SetHook(func(op simfs.Op, _ string) error { <-gate; return nil })
		var err error
		go func() {
			for err == nil {
				_, err = l.Append(1, nil, make([]byte, 1000))
			}
		}()
		synctest.Wait()
		go l.Close()
		synctest.Wait()
		if !errors.Is(err, storage.ErrClosed) {
			t.Fatalf("the blocked append got %v", err)
		}
		close(gate)
		synctest.Wait()
	})
}

// TestPipeline holds up OnCommit: the next batch becomes durable meanwhile,
// but is not handed out.
func TestPipeline(t *testing.T) {
	for _, how := range []string{"kick", "commit"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gate := make(chan struct{})
				var running, calls int
				l := open(t, simfs.New(1), func(o *wal.Options) {
					o.OnCommit = func(recs []wal.Record) {
						running++
						calls++
						if running > 1 {
							t.Error("two calls of OnCommit at once")
						}
						if recs[0].LSN == 1 {
							<-gate
						}
						running--
					}
				})
				for i := range 3 {
					l.Append(1, nil, []byte("x"))
					if how == "kick" {
						l.Kick()
					} else {
						go l.Commit()
					}
					synctest.Wait()
					if d := l.Durable(); d != storage.LSN(i+1) {
						t.Fatalf("durable %d while OnCommit runs for the first", d)
					}
				}
				if calls != 1 {
					t.Fatalf("%d calls of OnCommit", calls)
				}
				close(gate)
				synctest.Wait()
				if calls != 3 {
					t.Fatalf("%d calls of OnCommit in the end", calls)
				}
				l.Close()
			})
		})
	}
}

// TestGroupCommit lets many wait for one slow sync: the next takes them all.
func TestGroupCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		l := open(t, disk, nil)
		disk.SetHook(func(op simfs.Op, _ string) error {
			if op == simfs.OpSync {
				time.Sleep(time.Millisecond)
			}
			return nil
		})
		var wg sync.WaitGroup
		for range 101 {
			wg.Go(func() {
				l.Append(1, nil, []byte("x"))
				if err := l.Commit(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if s := l.Stats(); s.Records != 101 || s.Syncs > 2 {
			t.Fatalf("%d syncs for %d records", s.Syncs, s.Records)
		}
		l.Close()
	})
}

// TestConcurrent has every kind of caller at once on a real disk.
func TestConcurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "wal")
	h := newHistory()
	perGroup := map[storage.GroupID]uint64{}
	var mu sync.Mutex
	check := h.onCommit(t)
	o := wal.Options{FS: vfs.OS, Dir: path, SegmentSize: 256 << 10, MaxPending: 64 << 10}
	o.OnCommit = func(recs []wal.Record) {
		check(recs)
		mu.Lock()
		defer mu.Unlock()
		for _, r := range recs {
			n := binary.BigEndian.Uint64(r.Data)
			if n != perGroup[r.Group] {
				t.Errorf("group %d: record %d where %d is due", r.Group, n, perGroup[r.Group])
			}
			perGroup[r.Group]++
		}
	}
	l, err := wal.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	const groups, each = 16, 60
	var wg sync.WaitGroup
	for g := range groups {
		wg.Go(func() {
			body := make([]byte, 100+g*300)
			for i := range uint64(each) {
				if _, err := l.Append(storage.GroupID(g+1), i, binary.BigEndian.AppendUint64(nil, i), body); err != nil {
					t.Error(err)
					return
				}
				switch g % 4 {
				case 0:
					l.Kick()
				case 3:
					if i%16 == 15 {
						l.Trim(l.Durable())
					}
					l.Kick()
				default:
					if err := l.Commit(); err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					n := perGroup[storage.GroupID(g+1)]
					mu.Unlock()
					if n != i+1 {
						t.Errorf("commit returned before OnCommit: %d of %d", n, i+1)
					}
				}
			}
		})
	}
	wg.Wait()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if h.acked != groups*each {
		t.Fatalf("%d records committed, want %d", h.acked, groups*each)
	}
	o.OnCommit = nil
	l, err = wal.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	next := l.Oldest()
	if err := l.Replay(func(r wal.Record) error {
		if r.LSN != next {
			return fmt.Errorf("LSN %d where %d is due", r.LSN, next)
		}
		next++
		return nil
	}); err != nil || next != groups*each+1 {
		t.Fatalf("replay ends before %d: %v", next, err)
	}
}

// TestLargeRecords has records larger than a segment on a real disk.
func TestLargeRecords(t *testing.T) {
	o := wal.Options{FS: vfs.OS, Dir: filepath.Join(t.TempDir(), "wal"), SegmentSize: 1 << 20}
	l, err := wal.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	var sums []uint32
	for _, size := range []int{10, 1 << 20, 20, 64 << 20, 300 << 10, 128<<10 - 76, 30} {
		b := make([]byte, size)
		for i := 0; i+8 <= size; i += 8 {
			binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
		}
		sums = append(sums, crc32.ChecksumIEEE(b))
		if _, err := l.Append(1, nil, b); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if l, err = wal.Open(o); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var got []uint32
	if err := l.Replay(func(r wal.Record) error {
		got = append(got, crc32.ChecksumIEEE(r.Data))
		return nil
	}); err != nil || !slices.Equal(got, sums) {
		t.Fatalf("replay: %v, equal: %v", err, slices.Equal(got, sums))
	}
	if err := l.Trim(8); err != nil {
		t.Fatal(err)
	}
	if n := l.Size(); n > 1<<20 {
		t.Fatalf("%d bytes left after trimming all", n)
	}
}

func TestAppendDoesNotAllocate(t *testing.T) {
	l := open(t, discard{}, func(o *wal.Options) { o.SegmentSize = 64 << 20 })
	body := make([]byte, 100)
	n := 0
	allocs := testing.AllocsPerRun(20000, func() {
		l.Append(1, nil, body[:10], body)
		if n++; n%500 == 0 {
			l.Commit()
		}
	})
	// AllocsPerRun rounds down: one allocation per record would show.
	if allocs > 0 {
		t.Errorf("%v allocations per record", allocs)
	}
}

// TestKickOrCommit: one record on an idle log is committed by the goroutine that
// appended it; otherwise nobody waits.
func TestKickOrCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		l := open(t, disk, nil)
		one := func(data string) storage.LSN {
			lsn, err := l.Append(1, nil, []byte(data))
			if err != nil {
				t.Fatal(err)
			}
			return lsn
		}
		lsn := one("alone")
		l.KickOrCommit()
		if got := l.Applied(); got != lsn {
			t.Fatalf("applied up to %d when it returned, want %d", got, lsn)
		}

		gate := make(chan struct{})
		disk.SetHook(func(op simfs.Op, _ string) error { <-gate; return nil })
		one("two")
		lsn = one("at a time")
		l.KickOrCommit() // the disk hangs: it would not return
		synctest.Wait()
		lsn = max(lsn, one("while one is on its way"))
		l.KickOrCommit()
		synctest.Wait()
		if got := l.Applied(); got >= lsn {
			t.Fatalf("applied up to %d while the disk hangs", got)
		}
		close(gate)
		synctest.Wait()
		if got := l.Applied(); got != lsn {
			t.Fatalf("applied up to %d once the disk is back, want %d", got, lsn)
		}
		l.KickOrCommit() // nothing to do
	})
}

func TestUnapplied(t *testing.T) {
	dir := t.TempDir()
	in, out := make(chan struct{}), make(chan struct{})
	l, err := wal.Open(wal.Options{FS: vfs.OS, Dir: dir, SegmentSize: 1 << 20, OnCommit: func([]wal.Record) { in <- struct{}{}; <-out }})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := l.Append(1, nil, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	l.Kick()
	<-in
	if n := l.Unapplied(); n != 3 {
		t.Errorf("%d unapplied while OnCommit has 3", n)
	}
	close(out)
	if err := l.Commit(); err != nil {
		t.Fatal(err)
	}
	if n := l.Unapplied(); n != 0 {
		t.Errorf("%d unapplied after the commit", n)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}
