package wal

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"petiole/storage/vfs"
)

// Room for records is set aside before they are accepted: Append plans where in
// which segment a record will go, and takes a preallocated file for it if need
// be. So a disk that is full refuses records, but never fails a write that was
// promised. Files are allocated by a goroutine, ahead of need.

const (
	// allocRetry is how long the log waits to try again when there was no room.
	allocRetry = time.Second
	// nameRetry is the same for the name of a file that has its blocks.
	nameRetry = 100 * time.Millisecond
	// minAutoSegment and freeShare bound segments on small disks: no less than
	// this many bytes, unless Options.SegmentSize is, and no more than this
	// part of what is free.
	minAutoSegment = 1 << 20
	freeShare      = 32
	// freshNumber is the lowest number of a spare that no segment had before.
	freshNumber = 1 << 63
)

// spareFile is a preallocated file that holds nothing of the log.
type spareFile struct {
	path string
	size int64
	// fresh: never written to. Syncing writes to such a file takes the file
	// system longer, so that recycled ones go first.
	fresh bool
}

// class is who asks for room.
type class uint8

const (
	plain class = iota
	urgent
	lazy // urgent, and does not wait
)

// plan is where what has been appended will go. Under mu.
type plan struct {
	files    []spareFile // for batches that do not fit into the active segment; the writer takes them in order
	pos, end int64       // in the last of files, else in the active segment: where the next batch goes, and where there is room to
	reserve  bool        // that segment is of the reserve
}

// restart begins the plan at the end of the active segment.
func (p *plan) restart(s *segment) {
	*p = plan{pos: s.pos, end: max(s.room(), s.pos)}
}

// makeRoom plans for a record of need bytes, header included, and says whether
// there is room. Then the record extends the batch that is open, if one still is.
func (l *Log) makeRoom(need int, c class) bool {
	p := &l.plan
	size := batchRoom(roundUp(int64(batchHeaderSize + need)))
	if c != plain || !p.reserve || len(l.spares) >= l.o.Reserve {
		pos := p.pos
		if l.open {
			b := l.pend.batches[len(l.pend.batches)-1].buf
			if n := roundUp(int64(len(b) + need)); n <= int64(cap(b)) && pos+n <= p.end {
				return true
			}
			pos += roundUp(int64(len(b)))
		}
		if pos+size <= p.end {
			l.closeBatch()
			return true
		}
	}
	reserve := len(l.spares) <= l.o.Reserve
	if c == plain && reserve {
		return false
	}
	f, ok := l.takeSpare(minSegmentFor(size))
	if !ok {
		return false
	}
	l.closeBatch()
	p.files = append(p.files, f)
	p.pos, p.end, p.reserve = segmentHeaderSize, f.size-tailRoom, reserve
	return true
}

// waitRoom waits for room for a record of need bytes after makeRoom found none,
// or says why there will not be any. With mu held.
func (l *Log) waitRoom(need int, c class) error {
	size := minSegmentFor(batchRoom(roundUp(int64(batchHeaderSize + need))))
	large := func() bool { return slices.ContainsFunc(l.spares, func(f spareFile) bool { return f.size >= size }) }
	switch {
	case size > min(minAutoSegment, l.o.SegmentSize) && size > l.segmentSize() && !large():
		// No segment of the usual length takes it.
		l.mu.Unlock()
		spare, err := l.allocate(size, l.o.KeepFree)
		l.mu.Lock()
		switch {
		case err == nil:
			l.spares = append(l.spares, spare)
			return nil
		case vfs.IsNoSpace(err):
			return fmt.Errorf("append a record of %d bytes: %w: %w", need-recordHeaderSize, ErrNoSpace, err)
		}
		l.fail(err)
		return l.err
	case l.full != nil || c == lazy:
		return fmt.Errorf("append to log %s: %w", l.o.Dir, ErrNoSpace)
	}
	l.kick()
	l.starved++
	l.alloc.Signal()
	l.space.Wait()
	l.starved--
	return nil
}

// takeSpare takes the smallest spare of at least the given size, of those one
// that is recycled if there is. At Open, or with mu held.
func (l *Log) takeSpare(size int64) (spareFile, bool) {
	best := -1
	for i, f := range l.spares {
		if f.size >= size && (best < 0 || f.less(l.spares[best])) {
			best = i
		}
	}
	if best < 0 {
		return spareFile{}, false
	}
	f := l.spares[best]
	l.spares = slices.Delete(l.spares, best, best+1)
	return f, true
}

func (f spareFile) less(g spareFile) bool {
	return f.size < g.size || f.size == g.size && g.fresh && !f.fresh
}

// keepsSpare says whether a file of that length is worth keeping.
func (l *Log) keepsSpare(size int64) bool {
	return len(l.spares) <= l.o.Reserve && l.fitsSpare(size)
}

// fitsSpare says whether a file of that length can be of use.
func (l *Log) fitsSpare(size int64) bool {
	return size <= l.o.SegmentSize && size%sectorSize == 0 &&
		size >= min(minAutoSegment, l.o.SegmentSize)
}

// takeFresh takes a fresh spare of at most the given size, for a recycled one to
// take its place.
func (l *Log) takeFresh(size int64) (spareFile, bool) {
	for i, f := range l.spares {
		if f.fresh && f.size <= size {
			l.spares = slices.Delete(l.spares, i, i+1)
			return f, true
		}
	}
	return spareFile{}, false
}

// segmentSize returns the length of the next segment to be allocated.
func (l *Log) segmentSize() int64 {
	size := l.o.SegmentSize
	free, err := l.o.FS.Free(l.o.Dir)
	if err != nil {
		return size
	}
	for size > minAutoSegment && size > free/freeShare {
		size = max(size/2&^(sectorSize-1), minAutoSegment)
	}
	return size
}

// allocate makes a spare file, if it leaves so many bytes free.
func (l *Log) allocate(size, keep int64) (spareFile, error) {
	defer l.watch.end(l.watch.begin(watchAlloc, "allocate", l.o.Dir))
	if keep > 0 {
		if free, err := l.o.FS.Free(l.o.Dir); err == nil && free < size+keep {
			return spareFile{}, &fs.PathError{
				Op: "allocate a log segment in", Path: l.o.Dir, Err: fmt.Errorf("%w: %d bytes are free, %d of them are to stay so", syscall.ENOSPC, free, keep),
			}
		}
	}
	var id [8]byte
	rand.Read(id[:])
	num := binary.BigEndian.Uint64(id[:]) | freshNumber
	path := filepath.Join(l.o.Dir, segmentName(num, newSuffix))
	spare := spareFile{filepath.Join(l.o.Dir, segmentName(num, spareSuffix)), size, true}
	err := l.fill(path, size)
	if err == nil {
		err = l.o.FS.Rename(path, spare.path)
	}
	if err == nil {
		return spare, l.syncDir()
	}
	if vfs.IsNoSpace(err) {
		// Give back what could be had.
		if rerr := l.o.FS.Remove(path); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return spare, err
}

// fill makes a file of the given length. It is synced, so that a power cut does
// not take it away when the disk is full.
func (l *Log) fill(path string, size int64) error {
	f, err := l.o.FS.Open(path, true)
	if err != nil {
		return err
	}
	if err = f.Preallocate(size); err != nil {
		err = fmt.Errorf("reserve %d bytes for a log segment: %w", size, err)
	} else {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// wantsSpares says whether the allocator has something to do: there is to be
// one file beyond the reserve by the time that the segment in use is half full,
// and always while the disk is known to be full.
func (l *Log) wantsSpares() bool {
	want := l.o.Reserve
	if l.full != nil || l.plan.pos > l.plan.end/2 || l.starved > 0 {
		want++
	}
	return len(l.spares) < want
}

// wakeAllocator lets the allocator look again. With mu held.
func (l *Log) wakeAllocator() {
	if l.wantsSpares() {
		l.alloc.Signal()
	}
}

// allocator keeps spares at hand.
func (l *Log) allocator() {
	retry := time.AfterFunc(time.Hour, func() { l.tryAgain() })
	defer retry.Stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for l.err == nil && !l.closing && (l.noRetry || !l.wantsSpares()) {
			if l.full != nil && !l.wantsSpares() {
				l.setFull(nil)
				continue
			}
			l.alloc.Wait()
		}
		if l.err != nil || l.closing {
			return
		}
		keep := l.o.KeepFree
		if len(l.spares) < l.o.Reserve {
			keep = 0
		}
		l.mu.Unlock()
		spare, err := l.allocate(l.segmentSize(), keep)
		l.mu.Lock()
		switch {
		case err == nil:
			l.spares = append(l.spares, spare)
			l.space.Broadcast()
		case vfs.IsNoSpace(err):
			l.noRetry = true
			retry.Reset(allocRetry)
			l.setFull(err)
		default:
			l.fail(err)
		}
	}
}

// tryAgain lets the allocator try again, though there was no room.
func (l *Log) tryAgain() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noRetry = false
	l.alloc.Signal()
}

// setFull notes whether the disk is full, and why, and tells OnSpace if that
// has changed. It is called by the allocator with mu held, which it releases
// for the call.
func (l *Log) setFull(err error) {
	changed := (l.full == nil) != (err == nil)
	l.full = err
	if !changed {
		return
	}
	full := err != nil
	took := time.Since(l.fullSince)
	l.fullSince = time.Now()
	l.space.Broadcast()
	l.mu.Unlock()
	if full {
		l.o.Log.Warn("no room for another log segment, the log goes on in what it has in reserve; make room on the file system", "err", err)
	} else {
		l.o.Log.Info("there is room for log segments again", "after", took)
	}
	if l.o.OnSpace != nil {
		l.o.OnSpace(full)
	}
	l.mu.Lock()
}

// Space returns the log's state as to room on the file system.
func (l *Log) Space() Space {
	size := l.segmentSize()
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Space{Full: l.full != nil, Err: l.full, SegmentSize: size}
	if s.Full {
		s.Since = time.Since(l.fullSince)
	}
	free := l.plan.end - l.plan.pos
	if l.open {
		free -= roundUp(int64(len(l.pend.batches[len(l.pend.batches)-1].buf)))
	}
	if l.plan.reserve && len(l.spares) < l.o.Reserve {
		s.Reserve += free
	} else {
		s.Room += free
	}
	spares := slices.Clone(l.spares)
	slices.SortFunc(spares, func(a, b spareFile) int { return int(a.size - b.size) }) // as takeSpare does
	for i, f := range spares {
		if n := f.size - minSegmentFor(0); i < len(spares)-l.o.Reserve {
			s.Room += n
		} else {
			s.Reserve += n
		}
	}
	return s
}

// Space is what the log knows about its room on the file system.
type Space struct {
	Full        bool          // the last try to allocate a segment failed for want of space
	Since       time.Duration // how long it has been so
	Err         error         // of that try; nil unless Full
	SegmentSize int64         // bytes that the next segment is allocated with
	Room        int64         // bytes that Append may still use without a further segment
	Reserve     int64         // bytes kept for urgent records beyond that
}
