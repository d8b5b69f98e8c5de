package wal

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"

	"petiole/storage"
)

// Open recovers the log in o.Dir, or starts an empty one.
//
// After a stop without Close it finds the end of the log, makes sure that all
// complete batches are on stable storage, cuts off what a power cut left of an
// incomplete one, and goes on in a new segment. Damage that a power cut does
// not explain is a *CorruptError, a segment of another format wraps ErrFormat;
// the directory is as it was then. Records are verified by Replay only.
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

// recover reads the directory and leaves a sealed log with an empty active
// segment at its end.
func (l *Log) recover() error {
	fs := l.o.FS
	if err := fs.MkdirAll(l.o.Dir); err != nil {
		return err
	}
	// A process that died may have left renames and removals that are not on
	// the medium yet. To build on them (to write to a spare that the medium
	// still holds under its live name, say) could ruin the log.
	if err := fs.SyncDir(l.o.Dir); err != nil {
		return err
	}
	names, err := fs.List(l.o.Dir)
	if err != nil {
		return err
	}
	var spares []string
	for _, name := range names { // sorted, so segments come in order
		if strings.HasSuffix(name, spareSuffix) {
			spares = append(spares, filepath.Join(l.o.Dir, name))
			continue
		}
		if strings.HasSuffix(name, newSuffix) {
			if err := fs.Remove(filepath.Join(l.o.Dir, name)); err != nil {
				return err
			}
			continue
		}
		num, ok := parseSegmentName(name, liveSuffix)
		if !ok {
			l.o.Log.Warn("log directory holds a file that is not part of the log", "dir", l.o.Dir, "file", name)
			continue
		}
		s, err := loadSegment(fs, l.o.Dir, name, num)
		if err != nil {
			return err
		}
		l.segs = append(l.segs, s)
	}

	num, next := uint64(1), storage.LSN(1)
	if len(l.segs) == 0 {
		rand.Read(l.logID[:])
	}
	for i, s := range l.segs {
		lastOne := i == len(l.segs)-1
		if i == 0 {
			l.logID, next = s.hdr.logID, s.hdr.first
		}
		switch {
		case s.hdr.logID != l.logID:
			return &CorruptError{s.path, 40, "the segment belongs to another log"}
		case s.hdr.first != next:
			return &CorruptError{s.path, 32, fmt.Sprintf("the segment starts with LSN %d where LSN %d has to follow: a segment is missing", s.hdr.first, next)}
		case !s.sealed && !lastOne:
			return &CorruptError{s.path, s.size - sectorSize, "the footer is missing though a later segment exists"}
		case !s.sealed:
			if err := l.sealTail(s); err != nil {
				return err
			}
		case lastOne:
			// The footer may be in the page cache only.
			if err := s.writeFooter(s.file); err != nil {
				return err
			}
		}
		if err := s.closeFile(); err != nil {
			return err
		}
		num, next = s.hdr.num+1, s.next
	}
	l.setRecovered(next)

	for _, path := range spares {
		if err := l.adoptSpare(path); err != nil {
			return err
		}
	}
	active, err := l.createSegment(num, next, l.o.SegmentSize)
	if err != nil {
		return err
	}
	sealed := l.segs
	l.segs = nil
	removed := false
	for _, s := range sealed {
		if s.next > s.hdr.first {
			l.segs = append(l.segs, s)
			continue
		}
		// Left by a start and stop without a record between. It told the
		// number and the LSN to go on from, which the active one does now.
		if err := fs.Remove(s.path); err != nil {
			return err
		}
		removed = true
	}
	l.segs = append(l.segs, active)
	if !removed {
		return nil // createSegment has synced what it changed
	}
	return fs.SyncDir(l.o.Dir)
}

// sealTail ends the segment that was being written when the log was last in
// use. Whether a complete batch is on the medium or in the page cache only
// cannot be known (after a failed sync the kernel may even hold its pages to
// be clean), so those not known to have been synced are written again. The
// footer ends the segment for good: no torn batch behind it can come back.
func (l *Log) sealTail(s *segment) error {
	t, err := scanTail(s.path, s.file, s.size, &s.hdr)
	if err != nil {
		return err
	}
	if s.size < s.hdr.length && t.end+sectorSize != s.size {
		return &CorruptError{s.path, s.size, fmt.Sprintf("the file has been cut, %d bytes are missing", s.hdr.length-s.size)}
	}
	if t.torn {
		l.o.Log.Warn("log ends in a batch that was not written completely and not acknowledged; it is cut off",
			"file", s.path, "offset", t.end, "lsn", t.next)
	}
	buf := make([]byte, min(readChunk, max(t.end-t.redo, 0)))
	for pos := t.redo; pos < t.end; {
		n := min(int64(len(buf)), t.end-pos)
		if m, err := readAt(s.file, buf[:n], pos); err != nil || int64(m) < n {
			return fmt.Errorf("read %s again at offset %d: %w", s.path, pos, errors.Join(err, storage.ErrCorrupt))
		}
		if _, err := s.file.WriteAt(buf[:n], pos); err != nil {
			return err
		}
		pos += n
	}
	s.pos, s.batches = t.end, t.batches
	return s.seal(t.next, true)
}

// adoptSpare keeps a spare of the right size for reuse and removes others.
func (l *Log) adoptSpare(path string) error {
	fi, err := l.o.FS.Stat(path)
	if err != nil {
		return err
	}
	if fi.Size() == l.o.SegmentSize && len(l.spares) < maxSpares {
		l.spares = append(l.spares, path)
		return nil
	}
	return l.o.FS.Remove(path)
}

// Replay calls fn for every record from Oldest on, in order, until fn returns
// an error, which is returned as it is. It is called after Open and before the
// first Append. Record.Data is immutable and stays valid for as long as it is
// referenced; it shares memory with its neighbours, about 1 MiB. A record that
// cannot be read back is a *CorruptError.
func (l *Log) Replay(fn func(Record) error) error {
	l.mu.Lock()
	segs := l.segs[:len(l.segs)-1]
	l.mu.Unlock()
	var recs []Record
	for _, s := range segs {
		var err error
		if recs, err = l.replaySegment(s, recs, fn); err != nil {
			return err
		}
	}
	return nil
}

func (l *Log) replaySegment(s *segment, recs []Record, fn func(Record) error) (_ []Record, err error) {
	f, err := l.o.FS.Open(s.path, false)
	if err != nil {
		return recs, fmt.Errorf("replay log: %w", err)
	}
	defer f.Close() // was only read
	size, err := f.Size()
	if err != nil {
		return recs, fmt.Errorf("replay log: %w", err)
	}
	sc := newScanner(f, size, &s.hdr)
	sc.limit, sc.fresh = s.end, true
	batches := uint32(0)
	for sc.pos < s.end {
		pos := sc.pos
		h, payload, bad, err := sc.step()
		if err != nil {
			return recs, fmt.Errorf("replay log: read %s: %w", s.path, err)
		}
		if bad == "" && h.kind == kindFooter {
			bad = "footer before the end of the batches"
		}
		if bad != "" {
			return recs, &CorruptError{s.path, pos, bad}
		}
		if recs, err = decodeRecords(recs[:0], payload, &h); err != nil {
			return recs, &CorruptError{s.path, pos, err.Error()}
		}
		for _, r := range recs {
			if err := fn(r); err != nil {
				return recs, err
			}
		}
		clear(recs)
		batches++
	}
	if sc.next != s.next || batches != s.batches {
		return recs, &CorruptError{s.path, s.end, fmt.Sprintf("the batches end before LSN %d, the footer says %d", sc.next, s.next)}
	}
	return recs, nil
}
