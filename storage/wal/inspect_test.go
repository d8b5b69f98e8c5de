package wal

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"petiole/storage"
	"petiole/storage/vfs"
)

// TestScan reads a log that is still open, as a crash would leave it: what has
// been committed is there, a torn batch at the end is no damage, a flipped octet
// before it is, and the records behind are still read. In a bubble the log is not
// idle, and so notes nothing, however long that takes.
func TestScan(t *testing.T) { synctest.Test(t, testScan) }

func testScan(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(Options{FS: vfs.OS, Dir: dir, SegmentSize: 64 << 10})
	if err != nil {
		t.Fatal(err)
	}
	const records = 40
	for range records {
		if _, err := l.Append(2, nil, make([]byte, 5000)); err != nil {
			t.Fatal(err)
		}
		if err := l.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	scan := func() (*Info, []storage.LSN) {
		t.Helper()
		var lsns []storage.LSN
		info, err := Scan(dir, func(r Record) error {
			if len(r.Data) != 5000 || r.Group != 2 {
				t.Errorf("record %d: group %d, %d octets", r.LSN, r.Group, len(r.Data))
			}
			lsns = append(lsns, r.LSN)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return info, lsns
	}
	info, lsns := scan()
	if len(info.Damage) > 0 || len(lsns) != records || lsns[0] != 1 || lsns[records-1] != records {
		t.Fatalf("damage %v, LSNs %v", info.Damage, lsns)
	}
	n := len(info.Segments)
	last := info.Segments[n-1]
	if n < 3 || !info.Segments[0].Sealed || last.Sealed || last.Torn || last.Next != records+1 || last.Size != 64<<10 {
		t.Fatalf("segments: %+v", info.Segments)
	}
	if used := l.Size() - 64<<10*int64(n-1); last.Used != used {
		t.Errorf("%d octets used in the last segment, the log has %d", last.Used, used)
	}
	flip := func(path string, off int64) {
		t.Helper()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[off] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	// The payload of the last batch, which nothing tells from a torn write.
	flip(last.File, last.Used-sectorSize)
	info, lsns = scan()
	if len(info.Damage) > 0 || len(lsns) != records-1 || !info.Segments[n-1].Torn {
		t.Errorf("torn end: damage %v, LSNs %v, %+v", info.Damage, lsns, info.Segments[n-1])
	}
	flip(last.File, last.Used-sectorSize)

	// The second batch of the first segment and of the last, which are followed.
	off := int64(segmentHeaderSize) + roundUp(batchHeaderSize+recordHeaderSize+5000)
	for _, s := range []SegmentInfo{info.Segments[0], last} {
		flip(s.File, off+100)
		info, lsns = scan()
		var ce *CorruptError
		if len(info.Damage) != 1 || !errors.As(info.Damage[0], &ce) || ce.File != s.File || ce.Offset != off || len(lsns) != records-1 {
			t.Errorf("flipped octet in %s: damage %v, LSNs %v", filepath.Base(s.File), info.Damage, lsns)
		}
		flip(s.File, off+100)
	}

	// The footer of a segment that is followed by another.
	flip(info.Segments[0].File, 64<<10-sectorSize+20)
	info, lsns = scan()
	var ce *CorruptError
	if len(info.Damage) != 1 || !errors.As(info.Damage[0], &ce) || ce.Offset != 64<<10-sectorSize || len(lsns) != records {
		t.Errorf("flipped octet in a footer: damage %v, LSNs %v", info.Damage, lsns)
	}
	flip(info.Segments[0].File, 64<<10-sectorSize+20)

	// Recycled segments are kept apart.
	if err := l.Trim(last.First); err != nil {
		t.Fatal(err)
	}
	if info, _ = scan(); len(info.Segments) != 1 || len(info.Spares) == 0 || info.Spares[0].Size != 64<<10 || len(info.Damage) > 0 {
		t.Errorf("after trimming: %+v", info)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if info, lsns = scan(); len(info.Damage) > 0 || info.Segments[0].Torn || lsns[len(lsns)-1] != records {
		t.Errorf("after closing: %+v, LSNs %v", info, lsns)
	}
}

// A log in use is scanned while its spares come, get other names and go.
func TestScanBesideSpares(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(Options{FS: vfs.OS, Dir: dir, SegmentSize: 64 << 10})
	if err != nil {
		t.Fatal(err)
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := uint64(0); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			name := filepath.Join(dir, segmentName(freshNumber+n%64, spareSuffix))
			if os.WriteFile(name, nil, 0o600) == nil && n%64 == 63 {
				for i := range uint64(64) {
					_ = os.Remove(filepath.Join(dir, segmentName(freshNumber+i, spareSuffix)))
				}
			}
		}
	}()
	for range 300 {
		if _, err := Scan(dir, nil); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	<-done
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}
