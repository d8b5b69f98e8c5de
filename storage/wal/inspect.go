package wal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"petiole/storage"
)

// SegmentInfo describes a live segment, as Scan found it.
type SegmentInfo struct {
	File    string      // path
	First   storage.LSN // of the first record it holds, or would hold
	Next    storage.LSN // that follows the last record
	Durable storage.LSN // the highest that a batch or mark says to have been synced
	Size    int64       // of the file, octets
	Used    int64       // header and batches; what lies behind is reserved
	Batches int         // without marks
	Records int
	Created time.Time
	Sealed  bool
	Note    *Note // nil if it has none that is intact
	Closed  bool  // the newest, left by Close or not yet used: the next start goes on in it
	Torn    bool  // ends in a batch that no one was told to be safe; the next start cuts it off
}

// SpareInfo describes a file that is kept for reuse and holds nothing.
type SpareInfo struct {
	File string
	Size int64
}

// Info is what Scan found in a log directory.
type Info struct {
	Segments []SegmentInfo // oldest first; also those of which nothing can be read
	Spares   []SpareInfo
	Parked   []SpareInfo // damaged files that were set aside
	// Damage holds what a power cut does not explain: *CorruptError values, and
	// errors that wrap ErrFormat; first that of whole files, then that of what
	// is in them, in the order of the log.
	Damage []error
}

// Scan reads the log in dir from end to end and verifies every record, without
// opening the log: it changes nothing, recovers nothing, and opens files for
// reading only. fn, if not nil, is called for every intact record in order,
// whose Data it may keep, until it returns an error, which Scan returns as it
// is. Damage does not end the scan; it is reported and passed over.
//
// The caller keeps other processes from writing to dir. Other errors are those
// of the file system.
func Scan(dir string, fn func(Record) error) (*Info, error) {
	return ScanNotes(dir, fn, nil)
}

// ScanNotes is Scan that also hands out the segments' notes, each between what is
// below its Next and what is not.
func ScanNotes(dir string, fn func(Record) error, note func(*Note) error) (*Info, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("scan log: %w", err)
	}
	in := &inspection{info: &Info{}, r: replayer{fn: fn, note: note}}
	if fn == nil {
		in.r.fn = func(Record) error { return nil }
	}
	if note == nil {
		in.r.note = func(*Note) error { return nil }
	}
	var files []liveFile
	for _, e := range entries { // sorted
		path := filepath.Join(dir, e.Name())
		num, live := parseSegmentName(e.Name(), liveSuffix)
		if live {
			f, err := in.load(path, num)
			if err != nil {
				return nil, err
			}
			files = append(files, f)
			continue
		}
		spare, parked := strings.HasSuffix(e.Name(), spareSuffix), strings.Contains(e.Name(), damagedSuffix)
		if !spare && !parked {
			continue
		}
		fi, err := e.Info()
		switch {
		case errors.Is(err, fs.ErrNotExist):
			// The log is in use, and has begun to write to it under another name.
		case err != nil:
			return nil, fmt.Errorf("scan log: %w", err)
		case spare:
			in.info.Spares = append(in.info.Spares, SpareInfo{path, fi.Size()})
		default:
			in.info.Parked = append(in.info.Parked, SpareInfo{path, fi.Size()})
		}
	}
	c := link(files)
	in.info.Damage = c.damage
	for i := range files {
		f := &files[i]
		si := SegmentInfo{File: f.path, Size: f.size}
		at := slices.Index(c.segs, f.s)
		if f.s == nil || at < 0 {
			in.info.Segments = append(in.info.Segments, si)
			continue
		}
		si.First, si.Next, si.Created = f.s.hdr.first, f.s.hdr.first, time.Unix(0, f.s.hdr.created)
		si.Used, si.Sealed = segmentHeaderSize, f.s.sealed
		// The power may fail between the creation of a segment and the footer
		// of the one before.
		fresh := at == len(c.segs)-2 && c.after == nil && in.isEmpty(c.segs[at+1])
		err := in.segment(f.s, &si, fresh)
		in.info.Segments = append(in.info.Segments, si)
		if err != nil {
			return in.info, err
		}
	}
	return in.info, nil
}

// inspection is a Scan under way.
type inspection struct {
	info *Info
	r    replayer
}

func (in *inspection) damage(path string, off int64, format string, args ...any) {
	in.info.Damage = append(in.info.Damage, &CorruptError{path, off, fmt.Sprintf(format, args...)})
}

// load reads header and footer of a live file.
func (in *inspection) load(path string, num uint64) (f liveFile, err error) {
	file, err := os.Open(path)
	if err != nil {
		return f, fmt.Errorf("scan log: %w", err)
	}
	defer file.Close() // was only read
	fi, err := file.Stat()
	if err != nil {
		return f, fmt.Errorf("scan log: %w", err)
	}
	f = liveFile{path: path, num: num, size: fi.Size()}
	f.s, f.damage, err = readSegment(file, path, fi.Size(), num)
	if errors.Is(err, ErrFormat) {
		f.damage, err = err, nil
	}
	if err != nil {
		err = fmt.Errorf("scan log: read %s: %w", path, err)
	}
	return f, err
}

// isEmpty says whether a segment holds no batch.
func (in *inspection) isEmpty(s *segment) bool {
	f, err := os.Open(s.path)
	if err != nil {
		return false
	}
	defer f.Close() // was only read
	t, err := scanTail(f, s.size, &s.hdr)
	return err == nil && t.empty
}

// segment reads one segment of the log. fresh: the next one has just been begun.
func (in *inspection) segment(s *segment, si *SegmentInfo, fresh bool) error {
	f, err := os.Open(s.path)
	if err != nil {
		return fmt.Errorf("scan log: %w", err)
	}
	defer f.Close() // was only read
	if !s.sealed && !s.unended {
		t, err := scanTail(f, s.size, &s.hdr)
		if err != nil {
			return fmt.Errorf("scan log: read %s: %w", s.path, err)
		}
		si.Closed = (t.closed || t.empty) && t.damage == ""
		s.end, s.next, s.batches, si.Torn = t.end, t.next, t.batches, t.torn && t.damage == ""
		if missing := s.hdr.length - s.size; missing > 0 {
			in.damage(s.path, s.size, "the file has been cut, %d bytes are missing", missing)
		}
	}
	before := len(in.info.Damage)
	if si.Note, err = in.r.readNote(f, s); err != nil {
		return fmt.Errorf("scan log: %w", err)
	}
	note := si.Note
	pass := func(next storage.LSN) error { // the note, if it belongs there
		n := note
		if n == nil || next < n.Next {
			return nil
		}
		note = nil
		return in.r.note(n)
	}
	sc := newScanner(f, s.size, &s.hdr)
	sc.limit, sc.fresh = s.end, true
	end := int64(0)
	for sc.next < s.next || !s.unended && sc.pos < s.end {
		if err := pass(sc.next); err != nil {
			return err
		}
		pos, next := sc.pos, sc.next
		h, payload, bad, err := sc.step()
		if err != nil {
			return fmt.Errorf("scan log: read %s: %w", s.path, err)
		}
		if bad == "" && h.kind == kindFooter {
			bad = "footer before the end of the batches"
		}
		if bad == "" {
			end = sc.pos
			si.Durable = max(si.Durable, h.durable)
			if h.kind == kindRecords {
				si.Batches++
			}
			err := in.r.batch(&h, payload, sc.seed, func(x Lost) error {
				si.Records -= int(x.Last - x.First + 1)
				what := ""
				if x.Group != 0 {
					what = fmt.Sprintf(" of group %d", x.Group)
				}
				in.damage(s.path, pos, "%s; LSN %d to %d%s cannot be read", x.Reason, x.First, x.Last, what)
				return nil
			})
			if err != nil {
				return err
			}
			si.Records += int(h.count)
			continue
		}
		found, err := sc.resync(pos)
		if err != nil {
			return fmt.Errorf("scan log: read %s: %w", s.path, err)
		}
		if found && sc.next <= s.next {
			in.damage(s.path, pos, "%s; the log goes on at offset %d with LSN %d (LSN %d was expected here)", bad, sc.pos, sc.next, next)
			continue
		}
		if next < s.next {
			in.damage(s.path, pos, "%s; the records from LSN %d to %d cannot be read", bad, next, s.next-1)
		}
		break
	}
	if err := pass(s.next); err != nil {
		return err
	}
	if si.Used = s.end; s.unended {
		si.Used = end
		if !fresh && len(in.info.Damage) == before {
			in.damage(s.path, s.size-sectorSize, "the footer is missing though a later segment exists")
		}
	}
	si.Next = s.next
	return nil
}
