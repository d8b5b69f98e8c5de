package wal

import (
	"fmt"
	"math"

	"petiole/storage"
)

// How records join the open batch: copied once, into the buffer that is written.

// Append adds one record, the concatenated parts, to the open batch and
// returns its LSN. The parts are copied. It starts no commit, unless it has to
// wait because MaxPending is exceeded. The tag comes back in OnCommit.
//
// The record is not safe before OnCommit has seen it.
func (l *Log) Append(g storage.GroupID, tag any, parts ...[]byte) (storage.LSN, error) {
	return l.append(g, tag, plain, parts)
}

// AppendLazy is AppendUrgent for records that no one waits for: they ride with
// the next commit, or are committed after LazyDelay. It never blocks.
func (l *Log) AppendLazy(g storage.GroupID, parts ...[]byte) (storage.LSN, error) {
	return l.append(g, nil, lazy, parts)
}

// AppendUrgent is Append for records that must get through when the disk is
// full, such as those that lead to room being freed: it may use the reserve,
// and fails with ErrNoSpace only when that is used up as well.
func (l *Log) AppendUrgent(g storage.GroupID, tag any, parts ...[]byte) (storage.LSN, error) {
	return l.append(g, tag, urgent, parts)
}

func (l *Log) append(g storage.GroupID, tag any, c class, parts [][]byte) (storage.LSN, error) {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	if n > MaxRecord {
		return 0, fmt.Errorf("append a record of %d bytes: %w (at most %d bytes)", n, ErrTooLarge, MaxRecord)
	}
	if g == 0 || g > math.MaxUint32 {
		return 0, fmt.Errorf("wal: append to group %d", g)
	}
	need := recordHeaderSize + n

	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if err := l.usable(); err != nil {
			return 0, err
		}
		if c != lazy && l.unapplied > 0 && l.unapplied+int64(need) > l.o.MaxPending {
			l.kick()
			l.blocked++
			l.space.Wait()
			l.blocked--
			continue
		}
		if l.makeRoom(need, c) {
			break
		}
		if err := l.waitRoom(need, c); err != nil {
			return 0, err
		}
	}
	p := l.pend
	b, dst := l.reserve(need)
	last := l.lasts.next(l.next, g, l.o.Messages, parts)
	putRecordHeader(dst, n, g, last)
	data := dst[recordHeaderSize:]
	at := 0
	for _, part := range parts {
		at += copy(data[at:], part)
	}
	lsn := l.next
	l.next++
	b.count++
	b.payload += need
	p.last = lsn
	p.bytes += int64(need)
	l.unapplied += int64(need)
	p.recs = append(p.recs, Record{LSN: lsn, Group: g, Last: last, Data: data[:n:n], Tag: tag})
	l.newest = p
	if c == lazy && !l.lazyArmed && !p.kicked {
		l.lazyArmed = true
		l.lazy.Reset(LazyDelay)
	}
	return lsn, nil
}

// batch is a run of records that are written with one header.
type batch struct {
	buf     []byte // header, records; padded when closed
	first   storage.LSN
	count   uint32
	payload int // bytes of records in buf
}

// reserve returns the batch that takes a record of need bytes and the room for
// it there, after makeRoom. Batches are cut one after the other from a slab, so
// that a batch of any size wastes no memory beyond padding; a large record gets
// its own.
func (l *Log) reserve(need int) (*batch, []byte) {
	p := l.pend
	if l.open {
		b := &p.batches[len(p.batches)-1]
		n := len(b.buf)
		b.buf = b.buf[:n+need]
		return b, b.buf[n:]
	}
	size := int(roundUp(int64(batchHeaderSize + need)))
	var buf []byte
	if size > l.slabLen()/2 {
		buf = make([]byte, size)
		l.plan.pos += batchRoom(int64(size))
	} else {
		if size > len(l.slab)-l.slabOff {
			l.slab, l.slabOff = make([]byte, l.slabLen()), 0
		}
		buf = l.slab[l.slabOff:]
		l.open = true
	}
	p.batches = append(p.batches, batch{buf: buf[:batchHeaderSize+need], first: l.next})
	b := &p.batches[len(p.batches)-1]
	if !l.open {
		b.buf = buf // closed: padded
		return b, buf[batchHeaderSize : batchHeaderSize+need]
	}
	return b, b.buf[batchHeaderSize:]
}

// slabLen is the length of slabs: no batch cut from one may be too large for
// a segment.
func (l *Log) slabLen() int {
	return int(min(slabSize, l.o.SegmentSize-minSegmentFor(0)))
}

// closeBatch pads the open batch.
func (l *Log) closeBatch() {
	if !l.open {
		return
	}
	b := &l.pend.batches[len(l.pend.batches)-1]
	n := int(roundUp(int64(len(b.buf))))
	b.buf = b.buf[:n:n]
	l.slabOff += n
	l.plan.pos += int64(n)
	l.open = false
	l.wakeAllocator()
}
