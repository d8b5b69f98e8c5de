package wal

import (
	"errors"
	"fmt"

	"petiole/storage"
	"petiole/storage/vfs"
)

// Trim recycles or removes the segments that hold only records below the given
// LSN, and sets aside those that are damaged. The active segment stays, and so
// does what OnCommit has not returned for. If no record is needed any more when
// the log is closed, Close leaves an empty segment, so that the next start has
// nothing to read.
func (l *Log) Trim(below storage.LSN) error {
	l.trimMu.Lock()
	defer l.trimMu.Unlock()
	l.mu.Lock()
	l.needless = max(l.needless, min(below, l.next)) // of what there is now
	err := l.usable()
	l.mu.Unlock()
	if err != nil {
		return err
	}
	return l.trim(below)
}

func (l *Log) trim(below storage.LSN) error {
	below = min(below, l.Applied()+1)
	for {
		l.mu.Lock()
		if l.err != nil {
			defer l.mu.Unlock()
			return l.err
		}
		s := l.segs[0]
		// A segment is sealed before its successor is listed.
		if len(l.segs) == 1 || s.next > below {
			l.mu.Unlock()
			return nil
		}
		recycle := !s.damaged && l.keepsSpare(s.size)
		fresh := spareFile{}
		if !s.damaged && !recycle && l.fitsSpare(s.size) {
			fresh, recycle = l.takeFresh(s.size)
		}
		l.mu.Unlock()
		err := l.trimOne(s, recycle)
		if fresh.path != "" {
			err = errors.Join(err, l.o.FS.Remove(fresh.path))
		}
		if vfs.IsNoSpace(err) && !errors.Is(err, storage.ErrFailed) {
			return nil // for setting it aside: it stays, up to the next call
		}
		if err != nil {
			return fmt.Errorf("trim log: %w", err)
		}
		l.tryAgain() // there may be room now
	}
}

// trimOne takes the oldest segment out of the log. The directory is synced
// after each, so that no power cut leaves a hole between segments.
func (l *Log) trimOne(s *segment, recycle bool) error {
	defer l.watch.end(l.watch.begin(watchTrim, "trim", s.path))
	spare := spareFile{s.path[:len(s.path)-len(liveSuffix)] + spareSuffix, s.size, false}
	var err error
	switch {
	case s.damaged:
		err = l.park(s.path)
	case recycle:
		if err = l.o.FS.Rename(s.path, spare.path); vfs.IsNoSpace(err) { // for the name
			recycle, err = false, l.o.FS.Remove(s.path)
		}
	default:
		err = l.o.FS.Remove(s.path)
	}
	if err != nil {
		return err
	}
	if err := l.syncDir(); err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fail(err)
		return l.err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.segs = l.segs[1:]
	if recycle {
		l.spares = append(l.spares, spare)
		l.space.Broadcast()
	}
	return nil
}
