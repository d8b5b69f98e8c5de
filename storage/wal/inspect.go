package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"petiole/storage"
)

// SegmentInfo describes a live segment, as Scan found it.
type SegmentInfo struct {
	File    string      // path
	First   storage.LSN // of the first record it holds, or would hold
	Next    storage.LSN // that follows the last record
	Size    int64       // of the file, octets
	Used    int64       // header and batches; what lies behind is reserved
	Batches int         // without marks
	Records int
	Created time.Time
	Sealed  bool
	Torn    bool // ends in a batch that no one was told to be safe; the next start cuts it off
}

// SpareInfo describes a file that is kept for reuse and holds nothing.
type SpareInfo struct {
	File string
	Size int64
}

// Info is what Scan found in a log directory.
type Info struct {
	Segments []SegmentInfo // oldest first
	Spares   []SpareInfo
	// Damage holds what a power cut does not explain, in the order of the
	// log: *CorruptError values, and errors that wrap ErrFormat.
	Damage []error
}

// Scan reads the log in dir from end to end and verifies every batch, without
// opening the log: it changes nothing, recovers nothing, and opens files for
// reading only. fn, if not nil, is called for every intact record in order,
// whose Data it may keep, until it returns an error, which Scan returns as it
// is. Damage does not end the scan; it is reported and passed over.
//
// The caller keeps other processes from writing to dir. Other errors are those
// of the file system.
func Scan(dir string, fn func(Record) error) (*Info, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("scan log: %w", err)
	}
	sc := &inspection{fn: fn, info: &Info{}}
	var names []string
	for _, e := range entries { // sorted
		path := filepath.Join(dir, e.Name())
		if _, ok := parseSegmentName(e.Name(), liveSuffix); ok {
			names = append(names, path)
		} else if strings.HasSuffix(e.Name(), spareSuffix) {
			fi, err := e.Info()
			if err != nil {
				return nil, fmt.Errorf("scan log: %w", err)
			}
			sc.info.Spares = append(sc.info.Spares, SpareInfo{path, fi.Size()})
		}
	}
	for i, path := range names {
		if err := sc.segment(path, i == len(names)-1); err != nil {
			return sc.info, err
		}
	}
	return sc.info, nil
}

// inspection is a Scan under way.
type inspection struct {
	fn    func(Record) error
	info  *Info
	logID [16]byte
	next  storage.LSN // 0: not known
	known bool        // logID is
	recs  []Record
}

func (in *inspection) damage(path string, off int64, format string, args ...any) {
	in.info.Damage = append(in.info.Damage, &CorruptError{path, off, fmt.Sprintf(format, args...)})
}

// report notes err if it is about the log's contents, and returns it if not.
func (in *inspection) report(path string, err error) error {
	if errors.Is(err, storage.ErrCorrupt) || errors.Is(err, ErrFormat) {
		in.info.Damage = append(in.info.Damage, err)
		return nil
	}
	return fmt.Errorf("scan log: read %s: %w", path, err)
}

// segment reads one live segment.
func (in *inspection) segment(path string, newest bool) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("scan log: %w", err)
	}
	defer f.Close() // was only read
	fi, err := f.Stat()
	if err != nil {
		return fmt.Errorf("scan log: %w", err)
	}
	in.info.Segments = append(in.info.Segments, SegmentInfo{File: path, Size: fi.Size()})
	si := &in.info.Segments[len(in.info.Segments)-1]
	b := make([]byte, sectorSize)
	n, err := readAt(f, b, 0)
	if err != nil {
		return fmt.Errorf("scan log: %w", err)
	}
	s := &segment{path: path, size: fi.Size()}
	if s.hdr, err = decodeSegmentHeader(path, b[:n]); err != nil {
		// Without the epoch nothing in the file can be told from what it held
		// before it was recycled.
		in.next = 0
		return in.report(path, err)
	}
	h := &s.hdr
	si.First, si.Next, si.Created = h.first, h.first, time.Unix(0, h.created)
	si.Used = segmentHeaderSize
	if num, _ := parseSegmentName(filepath.Base(path), liveSuffix); num != h.num {
		in.damage(path, 16, "the header is that of segment %016x", h.num)
	}
	if in.known && h.logID != in.logID {
		in.damage(path, 40, "the segment belongs to another log")
	}
	in.logID, in.known = h.logID, true
	if in.next != 0 && h.first != in.next {
		in.damage(path, 32, "the segment starts with LSN %d where LSN %d has to follow", h.first, in.next)
	}
	if s.size < minSegmentFor(0) || s.size%sectorSize != 0 {
		in.damage(path, s.size, "the file has been cut")
		s.size &^= sectorSize - 1
	}
	end := max(s.size-sectorSize, segmentHeaderSize) // where batches end at the latest
	if s.size >= minSegmentFor(0) {
		if _, err = readAt(f, b, s.size-sectorSize); err != nil {
			return fmt.Errorf("scan log: %w", err)
		}
		if foot, ok := decodeBatchHeader(b, h.epoch, h.num); ok && foot.kind == kindFooter && foot.length <= s.size-sectorSize && foot.first >= h.first {
			s.sealed, s.end, s.next, s.batches = true, foot.length, foot.first, foot.count
			end = s.end
		}
	}
	si.Sealed = s.sealed
	if !s.sealed && !newest {
		in.damage(path, s.size-sectorSize, "the footer is missing though a later segment exists")
	}
	if !s.sealed && newest {
		t, err := scanTail(path, f, s.size, h)
		var ce *CorruptError
		switch {
		case err == nil:
			end, si.Torn = t.end, t.torn
			switch {
			case s.size < h.length && t.end+sectorSize != s.size:
				in.damage(path, s.size, "the file has been cut, %d bytes are missing", h.length-s.size)
			case s.size < h.length && ruinedFooter(b, h):
				in.damage(path, t.end, "the footer fails its checksum; all batches before it are intact, the next start writes it anew")
			}
		case !errors.As(err, &ce):
			return in.report(path, err)
		}
		// Damage is found again below, and passed over.
	}
	return in.batches(f, s, si, end, newest)
}

// ruinedFooter says that b, which is not a valid footer, was one of this segment.
func ruinedFooter(b []byte, h *segmentHeader) bool {
	le := binary.LittleEndian
	return le.Uint64(b[8:]) == h.epoch || string(b[:4]) == batchMagic && le.Uint64(b[48:]) == h.num
}

// batches reads the batches of a segment up to end.
func (in *inspection) batches(f *os.File, s *segment, si *SegmentInfo, end int64, newest bool) error {
	sc := newScanner(f, s.size, &s.hdr)
	sc.limit, sc.fresh = end, in.fn != nil
	total, intact := uint32(0), true
	for sc.pos < end {
		pos, next := sc.pos, sc.next
		h, payload, bad, err := sc.step()
		if err != nil {
			return in.report(s.path, err)
		}
		if bad == "" && h.kind == kindFooter {
			if !s.sealed {
				break
			}
			bad = "footer before the end of the batches"
		}
		if bad == "" {
			if in.recs, err = decodeRecords(in.recs[:0], payload, &h); err != nil {
				bad = err.Error()
			}
		}
		if bad != "" {
			first := intact
			intact = false
			found, err := resync(sc, pos, next)
			if err != nil {
				return in.report(s.path, err)
			}
			switch {
			case found:
				in.damage(s.path, pos, "%s; the log goes on at offset %d with LSN %d (LSN %d was expected here)", bad, sc.pos, sc.next, next)
				continue
			case s.sealed:
				in.damage(s.path, pos, "%s; the records from LSN %d to %d cannot be read", bad, next, s.next-1)
				sc.next = s.next
			case newest && first:
				in.damage(s.path, pos, "%s; no record from LSN %d on can be read in this segment", bad, next)
			}
			// Else this is the end, which no footer tells: what lacks between it
			// and the next segment is found there.
			break
		}
		total++
		si.Used = sc.pos
		if h.kind == kindMark {
			continue
		}
		si.Batches++
		si.Records += len(in.recs)
		if in.fn != nil {
			for _, r := range in.recs {
				if err := in.fn(r); err != nil {
					return err
				}
			}
			clear(in.recs)
		}
	}
	if intact && s.sealed && (sc.next != s.next || total != s.batches) {
		in.damage(s.path, s.end, "the batches end before LSN %d, the footer says %d", sc.next, s.next)
	}
	si.Next, in.next = sc.next, sc.next
	return nil
}

// resync moves the scanner behind the damage at pos to the next header that
// belongs to the segment and continues it; false if there is none.
func resync(sc *scanner, pos int64, next storage.LSN) (bool, error) {
	for pos += sectorSize; pos+batchHeaderSize <= sc.limit; pos += sectorSize {
		b, err := sc.window(pos, batchHeaderSize)
		if err != nil {
			return false, err
		}
		if h, ok := decodeBatchHeader(b, sc.epoch, sc.num); ok && h.kind != kindFooter && h.first >= next {
			sc.pos, sc.next = pos, h.first
			return true, nil
		}
	}
	return false, nil
}
