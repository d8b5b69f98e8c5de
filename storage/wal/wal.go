// Package wal is the write-ahead log shared by all groups of a store directory.
package wal

import (
	"errors"
	"log/slog"
	"time"

	"petiole/storage"
	"petiole/storage/vfs"
)

// Record is one entry of the log.
type Record struct {
	LSN   storage.LSN
	Group storage.GroupID
	// Data is immutable and stays valid for as long as it is referenced.
	Data []byte
	// Tag is what Append was given; nil in Replay.
	Tag any
}

// Options configures a log. FS and Dir are required.
type Options struct {
	FS  vfs.FS
	Dir string // holds nothing but the log's segments
	// SegmentSize is the length segments are preallocated with; default 64 MiB.
	SegmentSize int64
	// SyncInterval 0 syncs before OnCommit; above 0 OnCommit runs after the
	// write, and the sync follows at most this much later.
	SyncInterval time.Duration
	// MaxPending bounds the bytes appended and not yet committed; Append
	// blocks beyond it. Default 64 MiB.
	MaxPending int64
	// OnCommit receives committed records in LSN order, one call at a time.
	// The slice is valid during the call only; Record.Data may be kept. It
	// must not call Append or Commit (they may wait for it); AppendLazy and
	// Kick are fine.
	OnCommit func([]Record)
	// OnDurable, if set, is told that Durable has grown; one call at a time.
	OnDurable func(storage.LSN)
	// OnFail is called once, with the first write or sync error.
	OnFail func(error)
	Log    *slog.Logger // default discards
}

// Stats counts what the log did since Open.
type Stats struct {
	Syncs    uint64        // fdatasync calls for batches
	Batches  uint64        // batches written
	Records  uint64        // records written
	Bytes    uint64        // bytes written, headers and padding included
	LastSync time.Duration // how long the last fdatasync took
	Segments int           // live segments, the active one included
	Spares   int           // recycled segments ready for reuse
}

// Log is an open write-ahead log.
type Log struct{}

var errTODO = errors.New("wal: not there yet")

// Open recovers the log in o.Dir, or starts an empty one.
func Open(o Options) (*Log, error) { return nil, errTODO }

// Replay calls fn for every record from Oldest on, after Open and before the
// first Append.
func (l *Log) Replay(fn func(Record) error) error { return errTODO }

// Append adds one record, the concatenated parts, to the open batch and returns
// its LSN. The parts are copied. It starts no commit.
func (l *Log) Append(g storage.GroupID, tag any, parts ...[]byte) (storage.LSN, error) {
	return 0, errTODO
}

// AppendLazy is Append for records that no one waits for: they ride with the
// next commit, or are committed within 200 ms. It never blocks.
func (l *Log) AppendLazy(g storage.GroupID, parts ...[]byte) (storage.LSN, error) {
	return 0, errTODO
}

// Kick starts committing what has been appended and does not wait.
func (l *Log) Kick() {}

// Commit returns when all that was appended before the call is committed and
// OnCommit has run for it.
func (l *Log) Commit() error { return errTODO }

// Sync returns when all that was appended before the call is durable, also if
// SyncInterval is set.
func (l *Log) Sync() error { return errTODO }

// Durable returns the LSN up to which records are on stable storage.
func (l *Log) Durable() storage.LSN { return 0 }

// Written returns the LSN up to which records have been handed to the
// operating system.
func (l *Log) Written() storage.LSN { return 0 }

// Trim recycles the segments that hold only records below the given LSN.
func (l *Log) Trim(below storage.LSN) error { return errTODO }

// Size returns the bytes held by live segments.
func (l *Log) Size() int64 { return 0 }

// Oldest returns the LSN of the oldest record held, or of the next one if none.
func (l *Log) Oldest() storage.LSN { return 0 }

// Stats returns the counters.
func (l *Log) Stats() Stats { return Stats{} }

// Close commits what is pending, seals the log and releases its files.
func (l *Log) Close() error { return errTODO }
