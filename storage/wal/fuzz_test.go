package wal_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"petiole/storage"
	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

const firstSegment = dir + "/0000000000000001.wal"

// sampleSegments returns segments as stops of several kinds leave them.
func sampleSegments(t testing.TB) map[string][]byte {
	samples := map[string][]byte{}
	disk := simfs.New(1)
	l := open(t, disk, func(o *wal.Options) { o.Messages = oneMessage })
	for g := storage.GroupID(1); g < 4; g++ {
		l.SetLast(g, uint64(g)*100)
	}
	samples["empty"] = disk.Contents(firstSegment)
	put(t, l, "one")
	for i := range 3 {
		l.Append(storage.GroupID(i+1), nil, []byte(record(i, 100*i)))
	}
	l.Commit()
	samples["open"] = disk.Contents(firstSegment)
	torn := disk.Contents(firstSegment)
	clear(torn[4096+512+200 : 4096+512+300])
	samples["torn"] = torn
	l.Close()
	samples["closed"] = disk.Contents(firstSegment)
	return samples
}

// repair makes the checksums of headers match, so that fuzzing gets behind
// them: of the segment header, the note, and of every sector that looks like a batch.
func repair(b []byte) {
	sum := func(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }
	le := binary.LittleEndian
	if len(b) >= 4096 {
		le.PutUint32(b[508:], sum(b[:508]))
		if n := 48 + 8*int(le.Uint32(b[512+40:])%186); string(b[512:516]) == "PWN\x02" {
			le.PutUint32(b[516:], sum(b[520:512+n]))
		}
	}
	for at := 4096; at+64 <= len(b); at += 512 {
		h := b[at : at+64]
		if string(h[:4]) != "PWB\x02" {
			continue
		}
		le.PutUint32(h[60:], sum(h[:60]))
	}
}

// FuzzSegment opens and replays anything, with zeros up to size, as a segment.
// Whatever it holds, the log opens, unless it has another format; what it replays
// is in order, and the same again after the next stop.
func FuzzSegment(f *testing.F) {
	for _, b := range sampleSegments(f) {
		size := uint16(len(b))
		b = bytes.TrimRight(b, "\x00")
		f.Add(b, size, false)
		f.Add(b, size, true)
		f.Add(b, size/2, true)
	}
	f.Fuzz(func(t *testing.T, prefix []byte, size uint16, fix bool) {
		b := make([]byte, size)
		copy(b, prefix)
		if fix {
			repair(b)
		}
		disk := simfs.New(1)
		disk.SetContents(firstSegment, b)
		var first []wal.Record
		for round := range 2 {
			l, err := wal.Open(wal.Options{FS: disk, Dir: dir, SegmentSize: smallSeg})
			if err != nil {
				if !errors.Is(err, wal.ErrFormat) || round > 0 {
					t.Fatalf("round %d: %v", round, err)
				}
				if !slices.Equal(disk.Contents(firstSegment), b) {
					t.Fatal("a segment that was refused has been changed")
				}
				return
			}
			var recs []wal.Record
			next := l.Oldest()
			err = l.ReplayLossy(func(r wal.Record) error {
				if r.LSN != next || r.Group == 0 {
					t.Fatalf("record %d of group %d where LSN %d is due", r.LSN, r.Group, next)
				}
				next++
				recs = append(recs, r)
				return nil
			}, func(x wal.Lost) error {
				if x.Before && next == l.Oldest() && x.Last == next-1 {
					return nil
				}
				if x.First != next || x.Last < x.First {
					t.Fatalf("lost %+v where LSN %d is due", x, next)
				}
				next = x.Last + 1
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if next != l.Durable()+1 {
				t.Fatalf("replay ends before LSN %d, durable is %d", next, l.Durable())
			}
			if round == 0 {
				first = recs
			} else if !slices.EqualFunc(first, recs, func(a, b wal.Record) bool {
				return a.LSN == b.LSN && a.Group == b.Group && string(a.Data) == string(b.Data)
			}) {
				t.Fatal("the second replay differs from the first")
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			disk = disk.PowerCut()
		}
	})
}

// TestSampleSegments keeps the format from changing by accident: segments
// written by the first version have to be read by every later one.
func TestSampleSegments(t *testing.T) {
	if os.Getenv("WAL_WRITE_SAMPLES") != "" {
		for name, b := range sampleSegments(t) {
			if err := os.WriteFile(filepath.Join("testdata", "v2-"+name+".wal"), b[:min(len(b), 8192)], 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, want := range map[string]int{"empty": 0, "closed": 4} {
		b, err := os.ReadFile(filepath.Join("testdata", "v2-"+name+".wal"))
		if err != nil {
			t.Fatal(err)
		}
		b = append(b, make([]byte, smallSeg-len(b))...) // stored without the unused rest
		disk := simfs.New(1)
		disk.SetContents(firstSegment, b)
		l := open(t, disk, nil)
		got := contents(t, l)
		if len(got) != want || want > 0 && (got[0] != "one" || got[3] != record(2, 200)) {
			t.Errorf("%s: %q", name, got)
		}
	}
}
