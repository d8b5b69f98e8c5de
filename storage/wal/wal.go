// Package wal is the write-ahead log that all groups of a store directory
// share.
//
// Records are appended to an open batch in memory. A commit writes all that
// has been appended since the last one with one write (one more for every
// 256 KiB) and one fdatasync, whatever the number of those who wait for it,
// and hands the records to OnCommit. Who waits commits: [Log.Commit] writes
// the open batch itself if no one else is writing, and waits for its turn if
// someone is. [Log.Kick] leaves that to the log's own goroutines. While
// OnCommit runs for one batch the next may be on its way to the disk; the
// calls of OnCommit stay in order, one at a time.
//
//	Append ─► open batch ─► write ─► fdatasync ─► OnCommit ─► Commit returns
//
// Record contents are copied once, by Append, into large buffers that are
// written as they are, handed to OnCommit, and never used again for anything
// else; the garbage collector frees them when the last record is dropped.
//
// # The four states of a record
//
// They come in this order, and each LSN that they are known by only rises:
//
//	appended  [Log.Appended]  has its LSN, in memory only
//	written   [Log.Written]   handed to the operating system: outlives the process
//	durable   [Log.Durable]   synced: outlives a power cut
//	applied   [Log.Applied]   OnCommit has returned for it
//
// Without SyncInterval written and durable come together, and before applied.
// With it a record is applied when it is written, and durable up to SyncInterval
// later. A checkpoint that goes beyond Durable would outlive the log, see
// [Log.SyncWritten]. Nothing above Applied is ever trimmed.
//
// # Format and damage
//
// The on-disk format is drawn in format.go. What is known to be on stable
// storage is recorded in every batch, which is how [Open] tells the end of a
// log that a power cut tore (cut off, no one was told that it is safe) from
// damage (reported record by record, see [Log.ReplayLossy]). What it cannot
// tell: damage to the very last batch of a log that was not closed, if it was
// written less than NoteDelay before the stop, looks like a torn write.
//
// # Errors
//
// The first write or sync that fails ends the log: nothing is acknowledged
// after it, and only a restart, which recovers from disk, helps. A sync is
// never tried again, because the kernel may have dropped what it could not write,
// and shows it all the same for as long as it is cached. Open therefore believes
// in what headers record as durable (they were written after the sync had
// succeeded), and writes all that lies behind it again before it syncs that.
//
// A file system without room is not an error but a state: room is set aside
// before a record is accepted, so that none is accepted that could not be
// written, see [ErrNoSpace] and [Options].OnSpace.
//
// Two build tags break durability on purpose, for tests of test rigs:
//
//	mutant_nofsync   no fdatasync for batches
//	mutant_ackearly  OnCommit runs before the batch is written
package wal

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"petiole/storage"
	"petiole/storage/vfs"
)

const (
	// MaxRecord is the largest record, in bytes: a message of 64 MiB with
	// subject, header and the command around it.
	MaxRecord = 80 << 20
	// LazyDelay is how long AppendLazy's records wait at most for a commit to
	// ride with.
	LazyDelay = 200 * time.Millisecond

	// NoteDelay is how long a log is idle before it notes that the last batch is
	// safe, and what the groups have come to.
	NoteDelay = time.Second

	slabSize       = 256 << 10
	minSegmentSize = 16 << 10
)

// ErrTooLarge is wrapped by Append's error for a record above MaxRecord.
var ErrTooLarge = errors.New("record too large for the log")

// ErrNoSpace is wrapped by the error of an append for which there is no room:
// the file system has none for a further segment, and what is left of those at
// hand is kept for urgent records (or, if the append was urgent, used up). The
// record has not become part of the log, and the log has not failed: it takes
// records again once there is room, see Options.OnSpace.
var ErrNoSpace = errors.New("no space for the log on the file system: make room, the log goes on by itself within a second")

// Record is one entry of the log.
type Record struct {
	LSN   storage.LSN
	Group storage.GroupID
	// Last is the lower half of the group's last sequence behind the record, as
	// far as it was known when the record was appended; see Log.SetLast.
	Last uint32
	// Data is immutable and stays valid for as long as it is referenced.
	Data []byte
	// Tag is what Append was given; nil in Replay.
	Tag any
}

// Options configures a log. FS and Dir are required.
type Options struct {
	FS  vfs.FS
	Dir string // of the log alone; created if need be
	// SegmentSize is the length in bytes that segments are preallocated with;
	// default 64 MiB, at least 16 KiB. New segments are smaller, down to 1 MiB,
	// where this is more than 1/32 of what the file system has free.
	SegmentSize int64
	// Reserve is how many preallocated segments are kept for urgent records
	// (AppendUrgent, AppendLazy) when the file system has no room for more.
	// Default 2; below zero none.
	Reserve int
	// KeepFree is how many bytes of the file system segments leave free, those of
	// the reserve excepted: room that others need, who are to make room.
	KeepFree int64
	// OnSpace, if set, is told that the file system has no room for another
	// segment (true), and that it has again (false). Between the two Append
	// fails with ErrNoSpace once the segments outside of the reserve are used
	// up. Calls come in order, one at a time, without locks held.
	OnSpace func(full bool)
	// StallAfter is how long a write or sync may take before it is reported as
	// a stall, see Stats. Default 5 s; below zero never.
	StallAfter time.Duration
	// SyncInterval 0 syncs before OnCommit; above 0 OnCommit runs after the
	// write, and the sync follows at most this much later. A power cut then
	// loses what was acknowledged since.
	SyncInterval time.Duration
	// MaxPending bounds the bytes appended for which OnCommit has not
	// returned yet; Append blocks beyond it. Default 64 MiB.
	MaxPending int64
	// Messages, if set, says how many sequences of its group the record takes
	// that begins with these octets (the first part given to Append). It is
	// called with locks held. See Log.SetLast.
	Messages func(head []byte) int
	// OnCommit, if set, receives committed records in LSN order, one call at
	// a time. The slice is valid during the call only; Record.Data may be
	// kept. It must not call Append, Commit, Sync or Close, which may wait
	// for it to return; AppendLazy and Kick do not.
	OnCommit func([]Record)
	// OnDurable, if set, is told that Durable has grown, one call at a time;
	// if SyncInterval is 0, after OnCommit. The same calls are forbidden.
	OnDurable func(storage.LSN)
	// OnFail, if set, is called once, on a goroutine of its own, with the
	// first write or sync error; it wraps storage.ErrFailed.
	OnFail func(error)
	Log    *slog.Logger // default: discard
}

// Stats counts what the log did since Open.
type Stats struct {
	Syncs    uint64        // fdatasync calls for batches
	Batches  uint64        // batches written
	Records  uint64        // records written
	Bytes    uint64        // bytes written, headers and padding included
	LastSync time.Duration // how long the last fdatasync took
	Segments int           // live segments, the active one included
	Spares   int           // preallocated segments ready for use, the reserve included
	Lost     uint64        // records that Open and Replay found to be damaged or missing
	Stall    Stall
}

// Stall counts writes and syncs that took longer than Options.StallAfter.
type Stall struct {
	Op      string        // the call that does not return now, with the file; "" if none
	Current time.Duration // for how long it has not; 0 if none
	Longest time.Duration // of those since Open, the current one included
	Count   uint64        // since Open
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

// batch is a run of records that are written with one header.
type batch struct {
	buf     []byte // header, records; padded when closed
	first   storage.LSN
	count   uint32
	payload int // bytes of records in buf
}

type groupState uint8

const (
	pending groupState = iota // being appended to
	writing
	written // waits for OnCommit, or is in it
	done
)

// group is what one commit writes: the batches appended since the last one.
type group struct {
	batches []batch
	recs    []Record
	bytes   int64
	last    storage.LSN
	state   groupState
	kicked  bool      // the log's goroutines are to commit it
	waiters int       // goroutines in cond
	cond    sync.Cond // on Log.mu: state is done, or a waiter has to take over a role
}

// Log is an open write-ahead log. Its methods may be called from any goroutine.
//
// Two roles go round among the goroutines in Commit and the log's own two
// workers: the writer writes and syncs a group, the applier runs OnCommit. At
// most one goroutine has each. Whoever gives up a role while there is more to
// do wakes one that can take it.
type Log struct {
	o     Options
	logID [16]byte

	mu        sync.Mutex
	err       error // set once: failed or closed
	closing   bool
	next      storage.LSN // of the next record
	pend      *group      // state pending
	newest    *group      // the last one that was not empty
	inflight  *group      // state writing
	applyQ    []*group    // state written, oldest first; the first may be in OnCommit
	writing   bool
	applying  bool
	unapplied int64     // bytes appended for which OnCommit has not returned
	blocked   int       // goroutines in space
	space     sync.Cond // unapplied has fallen, or there is room in files
	work      sync.Cond // a worker has something to do
	slab      []byte    // batches are cut from it, its free part starts at slabOff
	slabOff   int
	open      bool // the last batch of pend is at the end of the used part of slab
	freeRecs  [][]Record
	lazy      *time.Timer
	lazyArmed bool
	idle      *time.Timer
	idleArmed bool
	idleSeen  uint64     // durable when idle was armed
	segs      []*segment // oldest first; the last is the active one
	holds     holds
	lasts     lasts

	// Room, see space.go.
	plan      plan
	spares    []spareFile
	alloc     sync.Cond // the allocator has something to do
	starved   int       // appends that wait for a file
	full      error     // why the last file could not be allocated; nil if it could
	fullSince time.Time
	noRetry   bool // until tryAgain

	// Writer's role only.
	active     *segment
	activeNext storage.LSN // LSN that follows the last batch written
	recorded   uint64      // highest durable LSN in a header of the active segment
	nextGap    *Lost       // what is missing before the next segment
	pristine   bool        // nothing has been written since Open

	fileMu  sync.Mutex // held to sync the active file outside of the writer's role, and to change it
	syncErr error      // under fileMu: a sync has failed, and the next one would succeed without being true
	trimMu  sync.Mutex
	// needless is what Trim was asked for, under trimMu.
	needless storage.LSN
	durMu    sync.Mutex
	told     storage.LSN // what OnDurable was told, under durMu
	durable  atomic.Uint64
	written  atomic.Uint64
	applied  atomic.Uint64
	lost     atomic.Uint64
	used     atomic.Int64 // bytes used in the active segment
	watch    watchdog

	syncs, batches, records, bytes atomic.Uint64
	lastSync                       atomic.Int64

	dirty   chan struct{} // wakes the syncer, if SyncInterval is set
	stop    chan struct{}
	workers sync.WaitGroup
}

func newLog(o Options) *Log {
	l := &Log{o: o, dirty: make(chan struct{}, 1), stop: make(chan struct{})}
	l.space.L, l.work.L, l.alloc.L = &l.mu, &l.mu, &l.mu
	l.watch.init(o.StallAfter, o.Log)
	l.pend = l.newGroup()
	return l
}

// setRecovered says that everything below next has been recovered and synced.
func (l *Log) setRecovered(next storage.LSN) {
	l.next, l.activeNext, l.told, l.recorded = next, next, next-1, uint64(next-1)
	l.durable.Store(uint64(next - 1))
	l.written.Store(uint64(next - 1))
	l.applied.Store(uint64(next - 1))
	l.lasts.strange = next - 1
}

// start begins service with the last of segs active.
func (l *Log) start() {
	l.active = l.segs[len(l.segs)-1]
	l.used.Store(l.active.pos)
	l.plan.restart(l.active)
	l.pristine = true
	l.lazy = time.AfterFunc(time.Hour, l.lazyDue)
	l.lazy.Stop()
	l.idle = time.AfterFunc(time.Hour, l.noteDue)
	l.idle.Stop()
	for range 2 { // so that one can write while the other applies
		l.workers.Go(l.worker)
	}
	l.workers.Go(l.allocator)
	if l.o.SyncInterval > 0 {
		l.workers.Go(l.syncer)
	}
}

func (l *Log) newGroup() *group {
	g := &group{}
	g.cond.L = &l.mu
	if n := len(l.freeRecs); n > 0 {
		g.recs, l.freeRecs = l.freeRecs[n-1], l.freeRecs[:n-1]
	}
	return g
}

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

// usable says why nothing can be appended.
func (l *Log) usable() error {
	if l.err != nil {
		return l.err
	}
	if l.closing {
		return storage.ErrClosed
	}
	return nil
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

// Kick starts committing what has been appended and does not wait for it.
func (l *Log) Kick() {
	l.mu.Lock()
	l.kick()
	l.mu.Unlock()
}

// KickOrCommit is Kick for a goroutine that has just appended and has nothing
// else to do: if that was one record, and nothing is on its way to the disk, it
// commits the record itself. To hand that to another goroutine and back takes
// about as long as everything else but the disk. It may wait for the disk, and
// the rules for Commit apply.
func (l *Log) KickOrCommit() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pend.recs) != 1 || l.pend.kicked || l.writing || l.applying || len(l.applyQ) > 0 || l.usable() != nil {
		l.kick()
		return
	}
	_ = l.commit() // OnFail tells
}

func (l *Log) kick() {
	if p := l.pend; len(p.recs) > 0 && !p.kicked {
		p.kicked = true
		if !l.writing {
			l.work.Signal()
		}
	}
}

// lazyDue is the timer of AppendLazy.
func (l *Log) lazyDue() {
	l.mu.Lock()
	l.lazyArmed = false
	l.kick()
	l.mu.Unlock()
}

// Commit returns when all that was appended before the call is durable (if
// SyncInterval is set: written) and OnCommit has run for it. The error wraps
// storage.ErrFailed if that will never be.
func (l *Log) Commit() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.commit()
}

func (l *Log) commit() error {
	g := l.newest
	if g == nil {
		return l.err
	}
	for g.state != done {
		switch {
		case l.err != nil:
			return l.err
		case g.state == pending && !l.writing:
			l.lead()
		case g.state == written && !l.applying:
			l.apply()
		default:
			g.waiters++
			g.cond.Wait()
			g.waiters--
		}
	}
	l.passOnApplier()
	return nil
}

// worker commits what was kicked, and applies what no one waits for.
func (l *Log) worker() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil {
		canWrite := l.pend.kicked && !l.writing
		switch {
		case len(l.applyQ) > 0 && !l.applying:
			if canWrite {
				l.work.Signal()
			}
			l.apply()
		case canWrite:
			l.lead()
		default:
			l.work.Wait()
		}
	}
}

// lead takes the writer's role and commits the pending group. It is called
// and returns with mu held.
func (l *Log) lead() {
	g := l.pend
	l.closeBatch()
	l.pend = l.newGroup()
	g.state, l.inflight, l.writing = writing, g, true
	batches, last := g.batches, g.last
	if ackEarly {
		l.queue(g)
		l.apply()
	}
	l.mu.Unlock()
	err := l.writeGroup(batches, last)
	l.mu.Lock()
	l.writing, l.inflight = false, nil
	l.closeWait()
	if err != nil {
		l.fail(err)
		g.cond.Broadcast() // no list holds it any more
		return
	}
	if !ackEarly {
		l.queue(g)
	}
	if !l.idleArmed {
		l.armIdle()
	}
	l.passOnWriter()
}

func (l *Log) armIdle() {
	l.idleArmed, l.idleSeen = true, l.durable.Load()
	l.idle.Reset(NoteDelay)
}

// noteDue writes a note if the log has been idle since the timer was set.
func (l *Log) noteDue() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idleArmed = false
	d := l.durable.Load()
	switch {
	case l.err != nil || l.closing:
		return
	case l.writing || len(l.pend.recs) > 0 || d != l.idleSeen || d != l.written.Load():
		l.armIdle()
		return
	}
	if l.recorded >= d || l.active.sealed {
		return // the next segment will tell
	}
	l.writing = true
	l.mu.Unlock()
	err := l.writeNote()
	l.mu.Lock()
	l.writing = false
	l.closeWait()
	if err != nil {
		l.fail(err)
		return
	}
	l.passOnWriter()
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

// queue hands a group to the applier.
func (l *Log) queue(g *group) {
	g.state = written
	l.applyQ = append(l.applyQ, g)
}

// passOnWriter wakes someone to write the pending group if anyone wants it
// written.
func (l *Log) passOnWriter() {
	switch p := l.pend; {
	case len(p.recs) == 0 || l.writing:
	case p.waiters > 0:
		p.cond.Signal()
	case p.kicked:
		l.work.Signal()
	}
}

// passOnApplier wakes someone to apply the next group.
func (l *Log) passOnApplier() {
	switch {
	case len(l.applyQ) == 0 || l.applying:
	case l.applyQ[0].waiters > 0:
		l.applyQ[0].cond.Signal()
	default:
		l.work.Signal()
	}
}

// apply takes the applier's role and runs OnCommit for the oldest written
// group. It is called and returns with mu held.
func (l *Log) apply() {
	g := l.applyQ[0]
	l.applying = true
	l.mu.Unlock()
	if l.o.OnCommit != nil {
		l.o.OnCommit(g.recs)
	}
	if l.o.SyncInterval == 0 {
		l.tellDurable()
	}
	l.mu.Lock()
	l.applying = false
	l.applied.Store(uint64(g.last))
	l.closeWait()
	l.applyQ[0] = nil
	if l.applyQ = l.applyQ[1:]; len(l.applyQ) == 0 {
		l.applyQ = nil
	}
	g.state = done
	l.unapplied -= g.bytes
	recs := g.recs
	clear(recs)
	g.recs, g.batches = nil, nil
	if len(l.freeRecs) < 4 && cap(recs) <= 64<<10 {
		l.freeRecs = append(l.freeRecs, recs[:0])
	}
	if g.waiters > 0 {
		g.cond.Broadcast()
	}
	if l.blocked > 0 {
		l.space.Broadcast()
	}
}

// closeWait lets Close see that a role has been given up.
func (l *Log) closeWait() {
	if l.closing {
		l.work.Broadcast()
	}
}

// fail ends the log with its first error.
func (l *Log) fail(err error) {
	if l.err != nil {
		return
	}
	l.err = fmt.Errorf("%w: log %s: %w", storage.ErrFailed, l.o.Dir, err)
	l.wakeAll()
	if l.o.OnFail != nil {
		go l.o.OnFail(l.err)
	}
}

// wakeAll lets every waiting goroutine see err.
func (l *Log) wakeAll() {
	l.pend.cond.Broadcast()
	if l.inflight != nil {
		l.inflight.cond.Broadcast()
	}
	if l.newest != nil {
		l.newest.cond.Broadcast()
	}
	for _, g := range l.applyQ {
		g.cond.Broadcast()
	}
	l.space.Broadcast()
	l.work.Broadcast()
	l.alloc.Broadcast()
}

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

// datasync makes what has been written to the active segment durable.
func (l *Log) datasync(w watched, s *segment) error {
	if noFsync {
		return nil
	}
	defer l.watch.end(l.watch.begin(w, "fdatasync", s.path))
	start := time.Now()
	if err := s.file.Datasync(); err != nil {
		return err
	}
	l.lastSync.Store(int64(time.Since(start)))
	l.syncs.Add(1)
	return nil
}

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

// syncer syncs what was written within SyncInterval.
func (l *Log) syncer() {
	timer := time.NewTimer(l.o.SyncInterval)
	timer.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-l.dirty:
		}
		timer.Reset(l.o.SyncInterval)
		select {
		case <-l.stop:
			return
		case <-timer.C:
		}
		if l.syncWritten() != nil {
			return
		}
	}
}

// syncWritten makes all that is written durable.
func (l *Log) syncWritten() error {
	l.fileMu.Lock()
	w := l.written.Load()
	err := l.syncErr
	if err == nil && w > l.durable.Load() {
		if l.active.file == nil {
			err = storage.ErrClosed
		} else if err = l.datasync(watchSync, l.active); err == nil {
			l.durable.Store(w)
		} else {
			l.syncErr = err
		}
	}
	l.fileMu.Unlock()
	if err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fail(err)
		return l.err
	}
	l.tellDurable()
	return nil
}

// tellDurable calls OnDurable if there is something new.
func (l *Log) tellDurable() {
	if l.o.OnDurable == nil {
		return
	}
	l.durMu.Lock()
	defer l.durMu.Unlock()
	if d := l.Durable(); d > l.told {
		l.told = d
		l.o.OnDurable(d)
	}
}

// Sync returns when all that was appended before the call is durable and
// OnCommit has run for it, whatever SyncInterval is.
func (l *Log) Sync() error {
	if err := l.Commit(); err != nil {
		return err
	}
	return l.SyncWritten()
}

// SyncWritten returns when everything that OnCommit has been given is durable.
// A checkpoint that goes beyond Durable would outlive the log; call SyncWritten
// before it. Unlike Sync it waits for no call of OnCommit, so that it may be
// called with locks held that OnCommit takes, but not those of OnDurable.
func (l *Log) SyncWritten() error {
	if l.o.SyncInterval == 0 {
		return nil
	}
	l.mu.Lock()
	err := l.err
	l.mu.Unlock()
	if err != nil {
		return err
	}
	return l.syncWritten()
}

// Durable returns the LSN up to which records are on stable storage.
func (l *Log) Durable() storage.LSN { return storage.LSN(l.durable.Load()) }

// Written returns the LSN up to which records have been handed to the
// operating system. Unless SyncInterval is set it equals Durable.
func (l *Log) Written() storage.LSN { return storage.LSN(l.written.Load()) }

// Applied returns the LSN up to which OnCommit has returned.
func (l *Log) Applied() storage.LSN { return storage.LSN(l.applied.Load()) }

// Appended returns the LSN of the last record appended.
func (l *Log) Appended() storage.LSN {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next - 1
}

// Unapplied returns how many records have been appended for which OnCommit has
// not returned.
func (l *Log) Unapplied() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return uint64(l.next-1) - l.applied.Load()
}

// Size returns the bytes that records take in live segments, the unused part
// of the active one and spares not included.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.used.Load()
	for _, s := range l.segs[:len(l.segs)-1] {
		n += s.size
	}
	return n
}

// Oldest returns the LSN of the oldest record held, or of the next one if none.
func (l *Log) Oldest() storage.LSN {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.segs[0].hdr.first
}

// Stats returns the counters.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{
		Syncs: l.syncs.Load(), Batches: l.batches.Load(), Records: l.records.Load(), Bytes: l.bytes.Load(),
		LastSync: time.Duration(l.lastSync.Load()), Segments: len(l.segs), Spares: len(l.spares),
		Lost: l.lost.Load(), Stall: l.watch.stall(),
	}
}

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

// Close commits what is pending, marks the log as closed so that the next Open
// needs no recovery, and releases its files. The log is unusable afterwards; Close
// returns the log's error if it had failed.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closing {
		l.mu.Unlock()
		return storage.ErrClosed
	}
	l.closing = true
	l.space.Broadcast()
	err := l.commit()
	l.mu.Unlock()
	if err == nil {
		err = l.empty()
	}
	l.mu.Lock()
	failed := l.err
	if l.err == nil {
		l.err = storage.ErrClosed
	}
	l.wakeAll()
	l.lazy.Stop()
	l.idle.Stop()
	for l.writing || l.applying {
		l.work.Wait()
	}
	l.mu.Unlock()
	close(l.stop)
	l.workers.Wait()
	l.trimMu.Lock()
	defer l.trimMu.Unlock()
	l.fileMu.Lock()
	defer l.fileMu.Unlock()
	l.watch.stop()
	if failed == nil {
		failed = l.syncErr // by the syncer, meanwhile
	}
	if failed != nil || err != nil {
		return errors.Join(failed, l.active.closeFile())
	}
	if err := l.closeActive(); err != nil {
		return errors.Join(fmt.Errorf("close log: %w", err), l.active.closeFile())
	}
	return l.active.closeFile()
}

// empty begins a new segment if no record of the active one is needed, and trims
// that. Without a file for it it does nothing.
func (l *Log) empty() error {
	l.trimMu.Lock()
	defer l.trimMu.Unlock()
	l.mu.Lock()
	for l.writing || l.applying {
		l.work.Wait()
	}
	s := l.active
	if l.err != nil || l.needless < l.next || l.applied.Load()+1 < uint64(l.next) || l.next == s.hdr.first {
		l.mu.Unlock()
		return nil
	}
	f, ok := l.takeSpare(0)
	if !ok {
		l.mu.Unlock()
		return nil
	}
	l.plan.files = append(l.plan.files, f)
	l.writing = true
	l.mu.Unlock()
	err := l.rollover()
	l.mu.Lock()
	l.writing = false
	room := !errors.Is(err, errNoName)
	if err != nil && room {
		l.fail(err)
		err = l.err
	}
	l.mu.Unlock()
	switch {
	case !room:
		return nil // the next start reads what is not needed
	case err != nil:
		return err
	}
	return l.trim(l.needless)
}

// closeActive ends the active segment with a closing mark. Without room for it
// the next start does without.
func (l *Log) closeActive() error {
	s := l.active
	if s.sealed {
		return nil // there was no room for another
	}
	// The mark says that all before it is durable, so this has to be first.
	if l.durable.Load() < uint64(l.activeNext-1) {
		if err := l.datasync(watchWrite, s); err != nil {
			return err
		}
		l.durable.Store(uint64(l.activeNext - 1))
	}
	if !s.fitsMark(true) {
		return nil
	}
	if l.activeNext > s.hdr.first {
		if err := l.writeNote(); err != nil {
			return err
		}
	}
	if err := l.writeMark(l.durable.Load(), markClosing); err != nil {
		return err
	}
	return s.file.Datasync()
}
