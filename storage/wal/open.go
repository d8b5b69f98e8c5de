package wal

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"petiole/storage"
	"petiole/storage/vfs"
)

// Open recovers the log in o.Dir, or starts an empty one.
//
// After a stop without Close it finds the end of the log, makes sure that all
// complete batches are on stable storage, cuts off what a power cut left of an
// incomplete one, and goes on in a new segment. Nothing that a torn write left
// behind can come back there, under another epoch. If there is no room for a new
// segment it goes on in the old one, once all of its rest has been overwritten
// with zeros and that is synced. After Close it goes on where it ended.
//
// Damage does not keep a log from opening. What is damaged or missing is logged
// as an error, and [Log.ReplayLossy] tells which records it cost. If nothing
// tells how many records there were at the end of the log, the log goes on with
// an LSN that is high enough not to be used twice. Files of which nothing can
// be used are set aside under another name, never deleted. A segment of another
// format wraps ErrFormat; nothing is changed then. Other errors are those of
// the file system, among them one that wraps ErrNoSpace for a log that has no
// file yet.
//
// The caller keeps other processes away from o.Dir.
func Open(o Options) (*Log, error) {
	if o.FS == nil || o.Dir == "" {
		return nil, errors.New("wal: FS and Dir are required")
	}
	if o.SegmentSize == 0 {
		o.SegmentSize = 64 << 20
	}
	if o.SegmentSize = roundUp(o.SegmentSize); o.SegmentSize < minSegmentSize {
		return nil, fmt.Errorf("wal: segment size of %d bytes is below the minimum of %d", o.SegmentSize, minSegmentSize)
	}
	switch {
	case o.Reserve == 0:
		o.Reserve = 2
	case o.Reserve < 0:
		o.Reserve = 0
	}
	if o.StallAfter == 0 {
		o.StallAfter = 5 * time.Second
	}
	if o.MaxPending <= 0 {
		o.MaxPending = 64 << 20
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	l := newLog(o)
	if err := l.recover(); err != nil {
		for _, s := range l.segs {
			err = errors.Join(err, s.closeFile())
		}
		return nil, fmt.Errorf("open log %s: %w", o.Dir, err)
	}
	l.start()
	return l, nil
}

// recover reads the directory and leaves a log with an active segment at its end.
func (l *Log) recover() error {
	fs := l.o.FS
	if err := fs.MkdirAll(l.o.Dir); err != nil {
		return err
	}
	// A process that died may have left renames and removals that are not on
	// the medium yet. To build on them (to write to a spare that the medium
	// still holds under its live name, say) could ruin the log.
	if err := l.syncDir(); err != nil {
		return err
	}
	names, err := fs.List(l.o.Dir)
	if err != nil {
		return err
	}
	var files []liveFile
	for _, name := range names { // sorted, so segments come in order
		path := filepath.Join(l.o.Dir, name)
		num, live := parseSegmentName(name, liveSuffix)
		switch {
		case live:
			f, err := l.loadSegment(path, num)
			if f.s != nil {
				l.segs = append(l.segs, f.s) // for Open to close its file
			}
			if err != nil {
				return err
			}
			files = append(files, f)
		case strings.HasSuffix(name, spareSuffix):
			err = l.adoptSpare(path)
		case strings.HasSuffix(name, newSuffix):
			err = fs.Remove(path)
		case strings.Contains(name, damagedSuffix):
		default:
			l.o.Log.Warn("log directory holds a file that is not part of the log", "dir", l.o.Dir, "file", name)
		}
		if err != nil {
			return err
		}
	}
	c := link(files)
	for _, err := range c.damage {
		l.o.Log.Error("the log is damaged, it goes on with what can be read", "err", err)
	}
	if l.logID = c.logID; len(c.segs) == 0 {
		rand.Read(l.logID[:])
	}
	for _, f := range c.out {
		if f.s != nil {
			if err := f.s.closeFile(); err != nil {
				return err
			}
		}
	}
	for _, s := range c.segs[:max(len(c.segs)-1, 0)] {
		if s.unended {
			err = l.endSegment(s)
		}
		if err := errors.Join(err, s.closeFile()); err != nil {
			return err
		}
	}
	if err := l.begin(&c); err != nil {
		return err
	}
	return l.setAside(c.out)
}

// loadSegment opens a live segment and reads its header and footer. The file
// stays open if there is a segment.
func (l *Log) loadSegment(path string, num uint64) (f liveFile, err error) {
	file, err := l.o.FS.Open(path, false)
	if err != nil {
		return f, err
	}
	f = liveFile{path: path, num: num}
	if f.size, err = file.Size(); err == nil {
		f.s, f.damage, err = readSegment(file, path, f.size, num)
	}
	if err != nil || f.s == nil {
		return f, errors.Join(err, file.Close())
	}
	f.s.file, f.s.damaged = file, f.damage != nil
	return f, nil
}

// endSegment writes the footer of a segment that has none though it is not the
// last, if all its records are there: it was synced before the next was begun.
func (l *Log) endSegment(s *segment) error {
	sc := newScanner(s.file, s.size, &s.hdr)
	batches := uint32(0)
	for sc.next < s.next {
		b, payload, bad, err := sc.step()
		if err != nil {
			return fmt.Errorf("read %s: %w", s.path, err)
		}
		if bad != "" || b.kind == kindFooter {
			break
		}
		if _, lost := decodeRecords(nil, nil, payload, &b, sc.seed); len(lost) > 0 {
			break
		}
		batches++
	}
	if sc.next != s.next {
		l.o.Log.Error("the log is damaged, it goes on with what can be read", "err",
			&CorruptError{s.path, sc.pos, fmt.Sprintf("the records from LSN %d to %d cannot be read, and the footer is missing", sc.next, s.next-1)})
		s.damaged = true
		return nil // left as it is
	}
	s.pos, s.batches = sc.pos, batches
	return s.seal(s.next, false)
}

// begin finds the end of the log and leaves it with an active segment.
func (l *Log) begin(c *chain) error {
	l.segs = c.segs
	num, next := c.num+1, storage.LSN(1)
	var last *segment
	var t tail
	if n := len(l.segs); n > 0 {
		last = l.segs[n-1]
		next = last.next
	}
	if last != nil && last.sealed {
		// Nothing is written to it any more, and Replay opens what it reads.
		if err := last.closeFile(); err != nil {
			return err
		}
	}
	if last != nil && !last.sealed {
		var err error
		if t, err = scanTail(last.file, last.size, &last.hdr); err != nil {
			return fmt.Errorf("read %s: %w", last.path, err)
		}
		if t.damage != "" {
			last.damaged = true
			l.o.Log.Error("the log is damaged, it goes on with what can be read", "err", &CorruptError{last.path, t.at, t.damage})
		}
		if missing := last.hdr.length - last.size; missing > 0 && c.after == nil {
			last.damaged = true
			c.after = &Lost{Uncertain: true, File: last.path, Offset: last.size, Reason: fmt.Sprintf("the file has been cut, %d bytes are missing", missing)}
			l.o.Log.Error("the log is damaged, it goes on with what can be read", "err", &CorruptError{last.path, last.size, c.after.Reason})
		}
		if t.more > 0 && c.after == nil {
			c.after = &Lost{Uncertain: true, File: last.path, Offset: t.at, Reason: t.damage}
		}
		next = t.next
		last.pos, last.batches, last.end, last.next = t.end, t.batches, t.end, next
	}
	prev := next
	if c.after != nil {
		// More than any segment that this log can have written holds.
		next += storage.LSN(max(l.o.SegmentSize, 64<<20) / recordHeaderSize)
		c.after.First, c.after.Last = prev, next-1
		l.o.Log.Error("records at the end of the log are lost, nothing tells how many", "file", c.after.File,
			"reason", c.after.Reason, "first_lsn", prev, "log_goes_on_with_lsn", next)
	}
	l.setRecovered(next)
	if last != nil && !last.sealed {
		if c.after == nil && !last.damaged && t.closed && last.fitsMark(false) {
			return l.resume(last, &t)
		}
		if err := l.secureTail(last, &t); err != nil {
			return err
		}
	}
	gap := c.after
	empty := last != nil && !last.sealed && last.next == last.hdr.first && !last.damaged
	if empty {
		// Its place, number and LSN become the active one's, with what is missing
		// before it.
		prev = last.hdr.prev
		if last.gap != nil {
			before := *last.gap
			before.Last, before.Uncertain = next-1, before.Uncertain || c.after != nil
			gap = &before
		}
	}
	active, err := l.firstSegment(num, prev, next)
	switch {
	case err == nil:
	case !vfs.IsNoSpace(err):
		return err
	case last == nil:
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	case last.sealed:
		// Not to be written to, but to be read. The gap comes with the next one.
		l.nextGap = c.after
		return nil
	default:
		return l.goOnIn(last, next)
	}
	if active.gap = gap; gap != nil && last == nil {
		gap.Before = true
	}
	l.segs = append(l.segs, active)
	if last == nil || last.sealed {
		return nil
	}
	if empty {
		if err := last.closeFile(); err != nil {
			return err
		}
		if err := l.o.FS.Remove(last.path); err != nil {
			return err
		}
		l.segs = append(l.segs[:len(l.segs)-2], active)
		return l.syncDir()
	}
	return last.seal(last.next, !last.damaged)
}

// resume goes on in a segment that ends in a closing mark. Another mark follows the closing mark before anything else does.
func (l *Log) resume(s *segment, t *tail) error {
	l.active, l.activeNext = s, t.next
	if err := l.writeMark(uint64(t.next-1), 0); err != nil {
		return err
	}
	// The closing mark may be in the page cache only, and the kernel hold it to
	// be clean after a sync that failed.
	return l.rewrite(s, t.end-sectorSize, t.end)
}

// secureTail writes again and syncs what is not known to have been synced.
// Whether a complete batch is on the medium or in the page cache only cannot be
// known: after a failed sync the kernel may even hold its pages to be clean.
func (l *Log) secureTail(s *segment, t *tail) error {
	if t.torn && t.damage == "" {
		l.o.Log.Warn("log ends in a batch that was not written completely and not acknowledged; it is cut off",
			"file", s.path, "offset", t.end, "lsn", t.next)
	}
	return l.rewrite(s, t.redo, t.end)
}

// rewrite reads bytes pos to end-1 of a segment, writes them again and syncs.
func (l *Log) rewrite(s *segment, pos, end int64) error {
	buf := make([]byte, min(readChunk, max(end-pos, 0)))
	sc := newScanner(s.file, s.size, &s.hdr) // reads around what cannot be read
	for pos < end {
		n := min(int64(len(buf)), end-pos)
		b, err := sc.window(pos, n)
		if err != nil {
			return fmt.Errorf("read %s again at offset %d: %w", s.path, pos, err)
		}
		if _, err := s.file.WriteAt(b, pos); err != nil {
			return err
		}
		pos += n
	}
	return s.file.Datasync()
}

// firstSegment makes the segment that the log begins to write to.
func (l *Log) firstSegment(num uint64, prev, next storage.LSN) (*segment, error) {
	spare, ok := l.takeSpare(0)
	if !ok {
		var err error
		if spare, err = l.allocate(l.segmentSize(), 0); err != nil {
			return nil, err
		}
	}
	return l.createSegment(spare, num, prev, next, nil) // nothing is known of the groups yet
}

// goOnIn makes a segment that was not closed the active one again: there is no
// room for another. All behind the end is overwritten, so that nothing of it can
// come back, whatever the medium holds there.
func (l *Log) goOnIn(s *segment, next storage.LSN) error {
	zeros := make([]byte, readChunk)
	for pos := s.pos; pos < s.size; pos += readChunk {
		if _, err := s.file.WriteAt(zeros[:min(readChunk, s.size-pos)], pos); err != nil {
			return err
		}
	}
	if err := s.file.Sync(); err != nil {
		return err
	}
	s.end, s.next = s.pos, next
	l.active, l.activeNext = s, next
	if !s.fitsMark(true) {
		s.full = true // to be read only
		return nil
	}
	if err := l.writeMark(uint64(next-1), 0); err != nil {
		return err
	}
	s.end = s.pos
	return s.file.Datasync()
}

// setAside renames files of which nothing can be used.
func (l *Log) setAside(files []liveFile) error {
	for _, f := range files {
		switch err := l.park(f.path); {
		case vfs.IsNoSpace(err):
			// It is found as it is by the next start, which tries again.
			l.o.Log.Warn("no room to set a damaged file of the log aside", "file", f.path, "err", err)
		case err != nil:
			return err
		}
	}
	if len(files) == 0 {
		return nil
	}
	return l.syncDir()
}

// park renames a damaged file.
func (l *Log) park(path string) error {
	name, err := vfs.FreeName(l.o.FS, path+damagedSuffix)
	if err != nil {
		return err
	}
	l.o.Log.Error("a damaged file of the log is set aside", "file", path, "as", name)
	return l.o.FS.Rename(path, name)
}

// adoptSpare keeps a spare of a fitting size for reuse and removes others.
func (l *Log) adoptSpare(path string) error {
	fi, err := l.o.FS.Stat(path)
	if err != nil {
		return err
	}
	if size := fi.Size(); l.keepsSpare(size) {
		// A copy of the directory may have holes in place of the zeros.
		f, err := l.o.FS.Open(path, false)
		if err != nil {
			return err
		}
		err = f.Preallocate(size)
		if err = errors.Join(err, f.Close()); err == nil {
			num, _ := parseSegmentName(filepath.Base(path), spareSuffix)
			l.spares = append(l.spares, spareFile{path, size, num >= freshNumber})
			return nil
		}
		if !vfs.IsNoSpace(err) {
			return err
		}
	}
	return l.o.FS.Remove(path)
}
