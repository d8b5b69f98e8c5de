// Package jetstream is the JetStream engine: it opens a store directory, brings
// its streams and consumers back, takes published messages through the
// write-ahead log into the streams' machines, and answers the API on
// $JS.API.> subjects.
package jetstream

import (
	"log/slog"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/metadb"
	"petiole/storage/vfs"
)

// Options configures an engine. Account and Dir are required.
type Options struct {
	Account *broker.Account
	Dir     string // the store directory; created if need be
	FS      vfs.FS // file system of the log; default vfs.OS

	// SyncInterval 0 acknowledges after the disk has it; above 0 it
	// acknowledges after the operating system has it, and syncs at most this
	// much later.
	SyncInterval time.Duration
	MaxMemory    int64 // octets in memory streams; 0 or less: no limit
	MaxStore     int64 // octets in file streams; 0 or less: no limit
	MaxPayload   int   // the broker's, in octets; default 1 MiB

	ServerName, ServerID, Version string

	WALBudget   int64 // octets of log beyond which checkpoints are made; default 256 MiB
	TableBudget int64 // octets of a stream not checkpointed beyond which one is made; default 32 MiB
	SegmentSize int64 // octets of a log segment; default 64 MiB

	Log *slog.Logger // default discards
	// OnFail is called once when the storage has failed. Nothing is
	// acknowledged any more: the process has to end and recover.
	OnFail func(error)
}

// Engine serves the streams of one store directory.
type Engine struct{}

// Open opens the store directory, recovers what it holds and begins to serve.
func Open(o Options) (*Engine, error) { return nil, nil }

// Close stops serving, checkpoints every stream and releases the directory.
func (e *Engine) Close() error { return nil }

// AfterRead is for broker.Options.AfterRead: it starts committing what the
// read handed in.
func (e *Engine) AfterRead() {}

// Kick starts committing what was handed in.
func (e *Engine) Kick() {}

// Meta returns the store directory's small facts.
func (e *Engine) Meta() *metadb.DB { return nil }

// Stream returns the stream of that name.
func (e *Engine) Stream(name string) (*Stream, bool) { return nil, false }

// Streams returns all streams, by name.
func (e *Engine) Streams() []*Stream { return nil }

// WatchStreams calls fn, which must not block, after a stream was created or
// deleted, until cancel is called.
func (e *Engine) WatchStreams(fn func()) (cancel func()) { return nil }

// EnsureStream returns the stream of cfg's name, created by cfg if it does not
// exist. An existing one is returned as it is.
func (e *Engine) EnsureStream(cfg api.StreamConfig) (*Stream, error) { return nil, nil }

// Stream is one stream.
type Stream struct{}

// Name returns the stream's name.
func (s *Stream) Name() string { return "" }

// UID returns the stream's identity: a stream deleted and created again has
// another one, and so has a stream in memory after a restart.
func (s *Stream) UID() [16]byte { return [16]byte{} }

// Config returns the configuration in force; it must not be changed.
func (s *Stream) Config() api.StreamConfig { return api.StreamConfig{} }

// DurableState returns the summary of what a power cut cannot take.
func (s *Stream) DurableState() storage.State { return storage.State{} }

// Range calls fn for the messages from a sequence on, in order, up to
// DurableState().Last, until fn returns false.
func (s *Stream) Range(from uint64, fn func(storage.Message) bool) error { return nil }

// Watch calls fn, which must not block, after the durable state grew, until
// cancel is called.
func (s *Stream) Watch(fn func()) (cancel func()) { return nil }

// Ingest appends what an edge exported. It hands the batch in (call
// [Engine.Kick] after the last one at hand) and returns; done is called when
// the batch is durable and applied, or was refused (command.ErrStaleIncarnation,
// ErrOutOfOrder, ErrDiverged, stream.ErrFull), with the position then held. Calls
// of done are in the order of Ingest; done must not block. The batch may be
// reused when Ingest has returned.
func (s *Stream) Ingest(in *command.Ingest, done func(command.Position, error)) {}

// Position returns how far the stream has what an edge's stream holds.
func (s *Stream) Position(edge string, uid [16]byte) (command.Position, bool) {
	return command.Position{}, false
}
