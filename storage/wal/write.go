package wal

import (
	"errors"
	"slices"
	"time"

	"petiole/storage"
)

// What the writer's role does: batches into the active segment, and the next one.

// writeGroup writes batches up to the given LSN and, unless SyncInterval is
// set, syncs them. Writer's role.
func (l *Log) writeGroup(batches []batch, last storage.LSN) error {
	for i := range batches {
		b := &batches[i]
		size := int64(len(b.buf))
		if !l.active.fits(batchRoom(size)) {
			if err := l.rollover(); err != nil {
				return err
			}
		}
		s := l.active
		if size > largeBatch {
			if err := l.writeMark(l.durable.Load(), markLarge); err != nil {
				return err
			}
		}
		h := batchHeader{
			kind: kindRecords, epoch: s.hdr.epoch, num: s.hdr.num, log: logWord(s.hdr.logID), first: b.first,
			durable: storage.LSN(l.durable.Load()), length: int64(b.payload), count: b.count,
			crc: finishRecords(b.buf[batchHeaderSize:batchHeaderSize+b.payload], b.first, epochSeed(s.hdr.epoch)),
		}
		h.encode(b.buf)
		l.recorded, l.pristine = uint64(h.durable), false
		if err := l.write(s, b.buf); err != nil {
			return err
		}
		l.activeNext = h.last() + 1
		l.batches.Add(1)
		l.records.Add(uint64(b.count))
		l.bytes.Add(uint64(size))
	}
	if l.o.SyncInterval > 0 {
		l.written.Store(uint64(last))
		select {
		case l.dirty <- struct{}{}:
		default:
		}
		return nil
	}
	if err := l.datasync(watchWrite, l.active); err != nil {
		return err
	}
	l.written.Store(uint64(last))
	l.durable.Store(uint64(last))
	return nil
}

// writeMark records that everything up to durable, the last record written, is
// safe. There is room for it. Writer's role.
func (l *Log) writeMark(durable uint64, flags uint8) error {
	s := l.active
	b := make([]byte, sectorSize)
	h := batchHeader{
		kind: kindMark, flags: flags, epoch: s.hdr.epoch, num: s.hdr.num, log: logWord(s.hdr.logID),
		first: l.activeNext, durable: storage.LSN(durable),
	}
	h.encode(b)
	if err := l.write(s, b); err != nil {
		return err
	}
	l.recorded = durable
	return nil
}

// write writes a batch to the end of the active segment. Writer's role.
func (l *Log) write(s *segment, b []byte) error {
	defer l.watch.end(l.watch.begin(watchWrite, "write", s.path))
	if _, err := s.file.WriteAt(b, s.pos); err != nil {
		return err
	}
	s.pos += int64(len(b))
	s.batches++
	l.used.Store(s.pos)
	return s.clearAhead(len(b))
}

// clearAhead writes zeros behind the end of a file that was only preallocated,
// for the next batches to overwrite, after a batch of n bytes. Where a block is
// written for the first time, syncing it means that the file system has to note
// and sync that too: with small batches that would be every eighth of them, and
// it takes longer than the sync of the data.
func (s *segment) clearAhead(n int) error {
	if s.pos <= s.blank || s.blank >= s.size {
		return nil
	}
	if n > clearAhead/8 {
		s.blank = s.pos
		return nil
	}
	end := min(s.pos+clearAhead, s.size)
	if _, err := s.file.WriteAt(zeros[:end-s.pos], s.pos); err != nil {
		return err
	}
	s.blank = end
	return nil
}

// clearAhead is how far; zeros are those bytes.
const clearAhead = 64 << 10

var zeros [clearAhead]byte

// rollover starts the next segment, in the file planned for it, and seals the
// active one, which makes all of it durable. The footer comes last: it says that
// there is a next segment. Writer's role.
func (l *Log) rollover() error {
	defer l.watch.end(l.watch.begin(watchWrite, "next segment after", l.active.path))
	l.fileMu.Lock()
	defer l.fileMu.Unlock()
	if l.syncErr != nil {
		return l.syncErr
	}
	s := l.active
	prev, gap := l.activeNext, l.nextGap
	if gap != nil {
		prev = gap.First
	}
	if !s.sealed {
		if l.syncErr = s.file.Datasync(); l.syncErr != nil {
			return l.syncErr
		}
		l.durable.Store(max(l.durable.Load(), uint64(l.activeNext-1)))
	}
	l.mu.Lock()
	spare := l.plan.files[0]
	l.plan.files = l.plan.files[1:]
	l.mu.Unlock()
	note := l.note()
	n, err := l.createSegment(spare, s.hdr.num+1, prev, l.activeNext, note)
	for told := false; errors.Is(err, errNoName) && l.mayWait(); told = true {
		// The file has its blocks, but the directory has to grow.
		if !told {
			l.o.Log.Warn("no room for the name of a log segment, what has been appended waits for it; make room on the file system", "err", err)
		}
		time.Sleep(nameRetry)
		n, err = l.createSegment(spare, s.hdr.num+1, prev, l.activeNext, note)
	}
	if err != nil {
		l.mu.Lock()
		l.plan.files = slices.Insert(l.plan.files, 0, spare)
		l.mu.Unlock()
		return err
	}
	n.gap, l.nextGap = gap, nil
	if !s.sealed {
		if l.syncErr = s.seal(prev, false); l.syncErr != nil {
			return errors.Join(l.syncErr, n.closeFile())
		}
	}
	l.recorded = uint64(l.activeNext - 1)
	l.mu.Lock()
	l.segs = append(l.segs, n)
	l.mu.Unlock()
	l.active = n
	l.used.Store(n.pos)
	return nil
}

// mayWait says whether what has been appended may wait for room.
func (l *Log) mayWait() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err == nil && !l.closing
}
