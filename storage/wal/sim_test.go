package wal_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"petiole/storage"
	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

const (
	dir      = "/store/wal"
	smallSeg = 16 << 10
)

// history is what a test did to a log, to compare with what it replays.
type history struct {
	mu      sync.Mutex
	recs    map[storage.LSN]entry
	last    storage.LSN // appended
	acked   storage.LSN // OnCommit saw it
	trimmed storage.LSN // Trim was asked for this
	count   uint64      // makes every record unlike any other
}

type entry struct {
	group storage.GroupID
	data  []byte
}

func newHistory() *history {
	return &history{recs: map[storage.LSN]entry{}, trimmed: 1}
}

// data makes a record of at least 8 bytes.
func (h *history) data(rng *rand.Rand, size int) []byte {
	h.count++
	b := make([]byte, max(size, 8))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	binary.BigEndian.PutUint64(b, h.count)
	return b
}

func (h *history) add(t testing.TB, lsn storage.LSN, g storage.GroupID, data []byte) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if lsn != h.last+1 {
		t.Fatalf("append got LSN %d after %d", lsn, h.last)
	}
	h.last = lsn
	h.recs[lsn] = entry{g, data}
}

// onCommit checks the order and notes what was acknowledged.
func (h *history) onCommit(t testing.TB) func([]wal.Record) {
	return func(recs []wal.Record) {
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, r := range recs {
			if r.LSN != h.acked+1 {
				t.Errorf("OnCommit got LSN %d after %d", r.LSN, h.acked)
			}
			h.acked = r.LSN
		}
	}
}

// check replays l: everything up to safe has to be there, the rest may end at
// any record. It forgets what has been lost. It returns false if the power went
// off meanwhile.
func (h *history) check(t testing.TB, l *wal.Log, safe storage.LSN) bool {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	oldest := l.Oldest()
	if oldest > h.trimmed {
		t.Fatalf("oldest is %d, but only records below %d were trimmed", oldest, h.trimmed)
	}
	next := oldest
	err := l.Replay(func(r wal.Record) error {
		if r.LSN != next {
			return fmt.Errorf("replay has LSN %d where %d is due", r.LSN, next)
		}
		e, ok := h.recs[r.LSN]
		if !ok {
			return fmt.Errorf("LSN %d was never appended", r.LSN)
		}
		if r.Group != e.group || !bytes.Equal(r.Data, e.data) {
			return fmt.Errorf("LSN %d has other contents than were appended (%d and %d bytes)", r.LSN, len(r.Data), len(e.data))
		}
		next++
		return nil
	})
	if errors.Is(err, simfs.ErrPowerOff) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	if next <= safe {
		t.Fatalf("replay ends before LSN %d, but everything up to %d was safe", next, safe)
	}
	if l.Durable() != next-1 {
		t.Fatalf("durable is %d after a replay up to %d", l.Durable(), next-1)
	}
	for lsn := next; lsn <= h.last; lsn++ {
		delete(h.recs, lsn)
	}
	h.last, h.acked = next-1, next-1
	return true
}

// seeds returns how many seeds a simulation runs: WAL_SEEDS overrides n.
func seeds(n int) uint64 {
	if s, err := strconv.Atoi(os.Getenv("WAL_SEEDS")); err == nil {
		n = s
	}
	if testing.Short() {
		n /= 10
	}
	return uint64(n)
}

// TestPowerCuts lives through power cuts and kills at every kind of moment, in
// the middle of rollover, recycling, recovery and close as well.
func TestPowerCuts(t *testing.T) {
	for _, mode := range []struct {
		name     string
		interval time.Duration
	}{{"strict", 0}, {"relaxed", time.Hour}} {
		t.Run(mode.name, func(t *testing.T) {
			t.Cleanup(func() {
				if full.Swap(0) == 0 {
					t.Error("no disk has been full")
				}
			})
			for seed := range seeds(100) {
				t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
					t.Parallel()
					powerCuts(t, seed, mode.interval)
				})
			}
		})
	}
}

var full atomic.Int64 // appends that found the disk full

func powerCuts(t *testing.T, seed uint64, interval time.Duration) {
	rng := rand.New(rand.NewPCG(seed, 1))
	disk := simfs.New(seed)
	if seed%2 == 1 {
		disk.TearSectors(0.3)
	}
	if seed%3 == 2 { // becomes full at times
		disk.SetCapacity(int64(4+rng.IntN(8)) * 2 * smallSeg)
	}
	h := newHistory()
	var safe storage.LSN
	for range 12 {
		if rng.IntN(4) > 0 {
			disk.CutAtNth(1 + rng.IntN(1<<rng.IntN(9)))
		}
		dead := disk
		l, closed := session(t, rng, disk, h, safe, interval)
		if rng.IntN(4) > 0 {
			disk = disk.PowerCut()
		} else {
			// What was written is not lost; relaxed or not.
			disk = disk.Kill()
		}
		if l == nil {
			continue // not even opened
		}
		// The log's goroutines find the disk dead; none is left afterwards.
		dead.SetHook(nil)
		l.Close()
		allClosed(t, dead)
		safe = max(safe, l.Durable())
		if interval == 0 {
			safe = max(safe, h.acked)
		}
		if closed {
			safe = h.last
		}
	}
	if l, closed := session(t, rng, disk, h, safe, interval); !closed {
		l.Close()
	}
}

// session checks that records up to safe are there and uses the log until the
// disk fails or it has had enough. It returns the log, nil if it could not be
// opened, and whether it was closed without an error.
func session(t *testing.T, rng *rand.Rand, disk *simfs.FS, h *history, safe storage.LSN, interval time.Duration) (*wal.Log, bool) {
	o := wal.Options{FS: disk, Dir: dir, SegmentSize: smallSeg, SyncInterval: interval, OnCommit: h.onCommit(t)}
	if rng.IntN(8) == 0 {
		o.SegmentSize *= 2
	}
	o.Reserve = rng.IntN(4) - 1
	l, err := wal.Open(o)
	if err != nil {
		if !errors.Is(err, simfs.ErrPowerOff) {
			t.Fatalf("open: %v", err)
		}
		allClosed(t, disk)
		return nil, false
	}
	oneOpen(t, disk)
	if !h.check(t, l, safe) {
		l.Close()
		return nil, false
	}
	failed := func(err error) bool {
		if err != nil && !errors.Is(err, simfs.ErrPowerOff) {
			t.Fatal(err)
		}
		return err != nil
	}
	for range rng.IntN(120) {
		switch rng.IntN(20) {
		case 0:
			below := storage.LSN(1)
			if d := l.Durable(); d > 0 {
				below += storage.LSN(rng.Uint64N(uint64(d)))
			}
			h.trimmed = max(h.trimmed, below)
			failed(l.Trim(below))
		case 1, 2, 3, 4, 5:
			failed(l.Commit())
		case 6:
			failed(l.Sync())
		case 7:
			l.Kick()
		default:
			size := rng.IntN(1 << rng.IntN(13))
			if rng.IntN(50) == 0 {
				size = rng.IntN(3 * smallSeg)
			}
			g, data := storage.GroupID(1+rng.IntN(3)), h.data(rng, size)
			cut := rng.IntN(len(data))
			app := l.Append
			if rng.IntN(4) == 0 {
				app = l.AppendUrgent
			}
			if lsn, err := app(g, nil, data[:cut], nil, data[cut:]); errors.Is(err, wal.ErrNoSpace) {
				full.Add(1)
				if d := l.Durable(); d > 10 {
					h.trimmed = max(h.trimmed, d-10)
					failed(l.Trim(d - 10))
				}
			} else if !failed(err) {
				h.add(t, lsn, g, data)
			}
		}
	}
	return l, rng.IntN(3) == 0 && !failed(l.Close())
}

// allClosed checks that a log which is closed, or could not be opened, has left no
// file open.
func allClosed(t testing.TB, disk *simfs.FS) {
	t.Helper()
	if left := disk.OpenFiles(""); len(left) > 0 {
		t.Fatalf("left open: %q", left)
	}
}

// oneOpen checks that a log keeps no segment open but the active one.
func oneOpen(t testing.TB, disk *simfs.FS) {
	t.Helper()
	if segs := disk.OpenFiles(".wal"); len(segs) != 1 {
		t.Fatalf("segments that are open: %q", segs)
	}
}

// TestPowerCutsConcurrent cuts the power under several publishers at once, so
// that commits overlap.
func TestPowerCutsConcurrent(t *testing.T) {
	for seed := range seeds(60) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 2))
			disk := simfs.New(seed)
			h := newHistory()
			for range 4 {
				l, err := wal.Open(wal.Options{FS: disk, Dir: dir, SegmentSize: 2 * smallSeg, OnCommit: h.onCommit(t)})
				if err != nil {
					t.Fatal(err)
				}
				h.check(t, l, h.acked)
				disk.CutAtNth(1 + rng.IntN(150))
				var wg sync.WaitGroup
				for p := range 4 {
					rng := rand.New(rand.NewPCG(rng.Uint64(), 3))
					wg.Go(func() { publish(t, rng, l, h, storage.GroupID(p+1)) })
				}
				wg.Wait()
				l.Close() // so that none of its goroutines is left
				disk = disk.PowerCut()
			}
		})
	}
}

// publish appends and commits until the log fails.
func publish(t *testing.T, rng *rand.Rand, l *wal.Log, h *history, g storage.GroupID) {
	for {
		h.mu.Lock()
		data := h.data(rng, rng.IntN(1<<rng.IntN(12)))
		h.mu.Unlock()
		lsn, err := l.Append(g, nil, data)
		if err == nil {
			h.mu.Lock()
			h.recs[lsn] = entry{g, data}
			h.last = max(h.last, lsn)
			h.mu.Unlock()
			if rng.IntN(3) > 0 {
				err = l.Commit()
				h.mu.Lock()
				if err == nil && h.acked < lsn {
					t.Errorf("commit of LSN %d returned before OnCommit, which is at %d", lsn, h.acked)
				}
				h.mu.Unlock()
			} else {
				l.Kick()
			}
		}
		if err != nil {
			if !errors.Is(err, storage.ErrFailed) || !errors.Is(err, simfs.ErrPowerOff) {
				t.Error(err)
			}
			return
		}
	}
}

// TestSyncNotTriedAgain has several goroutines ask for the same data to be
// synced. When it fails for one, it must not succeed for the next: the disk has
// dropped what it could not write.
func TestSyncNotTriedAgain(t *testing.T) {
	for seed := range seeds(200) {
		disk := simfs.New(seed)
		l, err := wal.Open(wal.Options{FS: disk, Dir: dir, SegmentSize: smallSeg, SyncInterval: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Append(1, nil, []byte("acknowledged early")); err != nil {
			t.Fatal(err)
		}
		if err := l.Commit(); err != nil {
			t.Fatal(err)
		}
		// A spare that is made meanwhile is synced, too: that is not the one.
		fail := simfs.FailNth(simfs.OpSync, 1, syscall.EIO)
		disk.SetHook(func(op simfs.Op, name string) error {
			if !strings.HasSuffix(name, ".wal") {
				return nil
			}
			return fail(op, name)
		})
		before := l.Durable()
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := l.SyncWritten(); err == nil {
					t.Error("a sync succeeded after one that failed")
				}
			})
		}
		wg.Wait()
		if err := l.Close(); err == nil {
			t.Error("closed as if nothing had happened")
		}
		if d := l.Durable(); d != before {
			t.Errorf("durable is %d, was %d", d, before)
		}
	}
}
