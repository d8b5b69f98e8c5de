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
