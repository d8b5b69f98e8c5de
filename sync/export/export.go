// Package export is the edge's view of a stream that it exports: where the
// export stands (State), where to go on when a hub answers (Resume) and the
// cursor that turns stored messages into encoded batches (Cursor).
//
// Only what a power cut cannot take is exported: a [Source] shows its durable
// state, so that a hub never knows of a message that the edge may forget.
package export

import (
	"petiole/storage"
	"petiole/sync/frame"
)

// Source is a local stream as the link reads it. Methods may be called from
// any goroutine.
type Source interface {
	// UID names this life of the stream; a stream created anew has another.
	UID() [16]byte
	// DurableState summarises what would survive a power cut right now.
	DurableState() storage.State
	// Range calls fn for the stored messages from seq on, in order, up to
	// DurableState().Last as it was when Range was called or later, until fn
	// returns false. fn does not block.
	Range(from uint64, fn func(storage.Message) bool) error
	// Watch calls fn, which does not block, whenever the durable state has
	// grown, until cancel is called.
	Watch(fn func()) (cancel func())
}

// Syncer is a Source in which messages may be gone before that is durable: with
// the log synced at intervals, a power cut brings back what had been removed.
type Syncer interface {
	// Sync returns when what the source shows now is durable.
	Sync() error
}

// Loser is a Source that knows which of its messages damage has taken, so that
// the hub is told why they are missing.
type Loser interface {
	// Lost returns the sequences at or after from that are lost, ascending.
	Lost(from uint64) []storage.Span
}

// Sources finds local streams by name.
type Sources interface {
	// Stream returns the stream, or false if there is none (now).
	Stream(name string) (Source, bool)
	// WatchStreams calls fn, which does not block, whenever a stream has been
	// created or deleted, until cancel is called.
	WatchStreams(fn func()) (cancel func())
}

// Repairer is Sources of which some may be out of service for a while.
type Repairer interface {
	// Repairing reports whether there is a stream of that name, of which the files
	// are being repaired, or wait for that.
	Repairing(name string) bool
}

// StateStore keeps the states of exports over restarts.
type StateStore interface {
	// Get returns a copy of the value stored under key; nil if there is none.
	Get(key string) ([]byte, error)
	// Put stores value under key and returns when it is durable.
	Put(key string, value []byte) error
}

// State is what an edge remembers of one export: of one life of a stream to
// one stream of the hub.
type State struct {
	UID         frame.UID
	Incarnation uint64 // from 1; 0: never started
	Base        uint64 // first sequence of the incarnation
	Origin      uint64 // first sequence that was ever to be exported
	// Adopted says that the hub knew the incarnation first: Base is then where
	// it was taken over, not where its chain begins.
	Adopted     bool
	Ladder      []frame.Rung // ends of batches acknowledged, rising
	Regressions uint64       // how often a new incarnation had to be started
	// Prior is the hub's position against which Base was chosen; the zero
	// value if the hub had none. As long as the hub has not seen the
	// incarnation, Base holds against that position only.
	Prior Prior
	// Floor is the batch that proved, when Base was chosen, that the hub had
	// the same messages up to Base-1: its start and its end in the chain of an
	// earlier incarnation. The zero value if nothing could prove it.
	Floor [2]frame.Rung
}

// Prior is a hub's position without what does not identify it.
type Prior struct {
	Incarnation uint64
	Rung        frame.Rung
}

// MaxLadder is how many rungs an edge keeps.
const MaxLadder = 64

// Key returns the key of an export's state in a StateStore.
func Key(uid frame.UID, to string) string { return uid.String() + "/" + to }
