// Package storage fixes the contracts between Petiole's storage layers.
//
// One write path leads through all of them. A command is appended to the
// shared write-ahead log (package wal), becomes durable together with every
// command that waited for the same fdatasync, and is applied to its group's
// state machine. The machine keeps messages in a [Store]; the store answers
// reads from an in-memory table and, for what has been checkpointed, from
// bbolt (package msgstore). A checkpoint moves the table and the machine's
// keyed state into bbolt, in slices, of which the last makes all of it count at
// once; log segments below every group's checkpoint are then recycled.
//
//	Append ──► wal: one write, one fdatasync ──► Apply ──► Store (table)
//	                                                         │ Checkpoint
//	                      segments recycled ◄── bbolt ◄──────┘
//
// A power cut therefore loses nothing that was acknowledged: what bbolt does
// not hold yet, the log does.
package storage

import (
	"errors"

	"petiole/storage/vfs"
)

// LSN is a log sequence number: the position of one record in the shared
// write-ahead log. The first record has LSN 1; zero means "none". LSNs rise by
// one per record over the life of a store directory and are never reused.
type LSN uint64

// GroupID names the state machine that a record belongs to. Group 1 is the
// meta group (which streams exist); every stream is a group of its own. Zero
// is invalid. Group numbers are never reused within a store directory.
type GroupID uint64

// MetaGroup is the group of the machine that knows which streams exist.
const MetaGroup GroupID = 1

// MaxSubject is the length in octets of the longest subject that a Store takes.
const MaxSubject = 32_768

// Errors shared by all storage layers. They are wrapped with what was being
// done to what; test with errors.Is.
var (
	// ErrNotFound says that no message has the sequence number or subject
	// asked for (any more).
	ErrNotFound = errors.New("message not found")
	// ErrEOF says that no further message matches at or after a position.
	ErrEOF = errors.New("no further message")
	// ErrCorrupt says that bytes read back fail their checksum or structure.
	ErrCorrupt = errors.New("corrupt data")
	// ErrFailed says that an earlier write or fsync failed; nothing may be
	// acknowledged after it. The process has to end and recover from disk.
	ErrFailed = errors.New("storage failed, restart to recover")
	// ErrFormat says that what was read is intact, and written by a version of
	// the program that knows more. It is not damage: nothing is repaired, put
	// aside or left out because of it, and a store that holds it is not opened.
	ErrFormat = errors.New("of a format that this version of the program does not know; start the version that wrote it")
	// ErrClosed says that the store or log has been closed.
	ErrClosed = errors.New("storage closed")
	// ErrLocked says that another process uses the store directory.
	ErrLocked = vfs.ErrLocked
)

// Message is one stored message. The slices are owned by whoever handed the
// Message out and must not be changed; those of a loaded message stay valid
// for as long as they are referenced (they never alias a memory map).
type Message struct {
	Seq     uint64 // position in the stream, from 1
	Time    int64  // Unix time of storing in nanoseconds
	Subject string
	Header  []byte // raw NATS header block, "NATS/1.0\r\n...\r\n\r\n"; nil if none
	Data    []byte
}

// Size returns what the message counts towards a stream's byte limits.
func (m *Message) Size() uint64 {
	// nats-server counts 8 (seq), 8 (time), 2 (subject length), 4 (header
	// length) and 8 (checksum) octets beside the contents.
	n := len(m.Subject) + len(m.Data) + 22 + 8
	if len(m.Header) > 0 {
		n += len(m.Header) + 4
	}
	return uint64(n)
}

// State is the summary of a store. With no message held, First is Last+1.
type State struct {
	Msgs      uint64 // messages held
	Bytes     uint64 // sum of Message.Size over them
	First     uint64 // lowest sequence held
	FirstTime int64  // its time, Unix ns; 0 if none
	Last      uint64 // highest sequence ever assigned (0 before the first)
	LastTime  int64  // its time, Unix ns; 0 if none
	Subjects  int    // distinct subjects held
	Deleted   uint64 // interior sequences between First and Last that are gone
}

// SubjectState summarises the messages of one subject. First and Last are those of
// messages that exist.
type SubjectState struct {
	Msgs  uint64
	First uint64
	Last  uint64
}

// KV is one entry of a machine's keyed state.
type KV struct {
	Key   string
	Value []byte // nil deletes the key
}

// Filter selects subjects. The zero Filter selects every message. Patterns are
// NATS subjects with wildcards; a message matches if any pattern does.
type Filter struct {
	Patterns []string
}

// Store holds the messages of one stream, with a small keyed state of the
// machine beside them. Message contents handed to Append may alias a WAL batch:
// they are immutable from then on.
//
// A Store is driven by one writer (Append, Skip, Remove, Purge,
// Freeze) under the stream's lock; reads may come from any
// goroutine at any time.
type Store interface {
	// State returns the summary, in constant time.
	State() State
	// Append stores m under State().Last+1 or, if m.Seq is larger, under
	// m.Seq (sequences between are gaps), and returns the sequence used.
	Append(m Message) (uint64, error)
	// Skip assigns sequences up to and including seq without messages.
	Skip(seq uint64) error
	// Load returns the message at seq, or ErrNotFound.
	Load(seq uint64) (Message, error)
	// LoadNext returns the first message at or after seq that f selects, or
	// ErrEOF. A damaged message on the way is a *CorruptError that names its
	// sequence (here and in Load and Range): go on behind it. It does not scan messages that cannot match when the number of
	// matching subjects is small.
	LoadNext(f Filter, seq uint64) (Message, error)
	// LoadLast returns the last message at or below max (0: no bound) that
	// matches the pattern, or ErrNotFound.
	LoadLast(pattern string, max uint64) (Message, error)
	// Range calls fn for the messages from seq on, in order, until fn returns
	// false or the end is reached. It reads ahead: the way to read many.
	Range(seq uint64, fn func(Message) bool) error
	// Subject returns the summary of one literal subject.
	Subject(subject string) (SubjectState, bool)
	// Subjects calls fn for every subject that matches pattern (all if
	// empty), in no particular order, until fn returns false.
	Subjects(pattern string, fn func(subject string, s SubjectState) bool)
	// NumPending counts the messages at or after seq that f selects.
	NumPending(f Filter, seq uint64) uint64
	// SeqAtTime returns the first sequence whose time is at or after t (Unix
	// ns); State().Last+1 if there is none.
	SeqAtTime(t int64) uint64
	// Remove deletes the message at seq and returns its size, or ErrNotFound.
	Remove(seq uint64) (uint64, error)
	// Purge deletes every message with a sequence below upto (0: all) that
	// matches pattern (all if empty), but the last keep of those; it returns
	// how many it deleted, also beside an error. Sequences go on where they were.
	Purge(pattern string, upto, keep uint64) (uint64, error)

	// Applied returns the LSN up to which the durable image (what a restart
	// would find before replaying the log) reflects the group's records.
	Applied() LSN
	// TableBytes returns the memory held by messages not yet checkpointed.
	TableBytes() int64
	// Freeze marks everything applied so far, with lsn as the last record
	// reflected and kvs the keyed state changed since the last Freeze, as the
	// content of the next checkpoint, in constant time and without I/O. At
	// most one frozen set exists; Freeze reports false while one is pending.
	// kvs must not change until the checkpoint is done.
	Freeze(lsn LSN, kvs []KV) bool
	// Checkpoint writes the frozen set to disk, so that a restart finds all of
	// it or nothing. It runs beside readers and the writer. After an error the
	// frozen set is still held unless Applied says that it has arrived, and the
	// durable image is unchanged. ErrFailed is a write or sync that failed; an
	// error without it can be mended: ErrCorrupt by a repair, want of space
	// (syscall.ENOSPC) by space.
	Checkpoint() error
	// KVs calls fn for the durable keyed state with the prefix, in key order.
	KVs(prefix string, fn func(key string, value []byte) error) error
	// Close releases files without a checkpoint; what the log holds comes
	// back by replay.
	Close() error
	// Destroy closes the store and removes its files.
	Destroy() error
}
