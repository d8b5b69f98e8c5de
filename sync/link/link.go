// Package link connects edges with a hub: one QUIC connection (RFC 9000) over
// UDP with TLS 1.3 per edge, on which package frame's protocol runs. The edge
// dials, proves who it is, offers its exports and replays what the hub lacks;
// the hub hands batches to a [Sink] and acknowledges what that made durable.
//
// Credentials are bound to the connection: the edge signs a secret exported
// from its TLS session, so that nobody in between can pass them on.
package link

import (
	"context"

	"petiole/sync/frame"
)

// Identity is an edge whose proof has been verified.
type Identity struct {
	EdgeID  string   // public device nkey
	Name    string   // server name, as told by the edge
	User    string   // user, or public nkey, that it authenticated as
	Streams []string // patterns of hub streams that it may write
	Addr    string   // remote address
}

// MayWrite reports whether the edge may write the hub's stream.
func (id *Identity) MayWrite(stream string) bool {
	for _, p := range id.Streams {
		if match(p, stream) {
			return true
		}
	}
	return false
}

// match reports whether name matches p, in which "*" stands for any run of
// characters (also none).
func match(p, name string) bool {
	star, mark := -1, 0
	i, j := 0, 0
	for j < len(name) {
		switch {
		case i < len(p) && p[i] == '*':
			star, mark = i, j
			i++
		case i < len(p) && p[i] == name[j]:
			i, j = i+1, j+1
		case star >= 0:
			mark++
			i, j = star+1, mark
		default:
			return false
		}
	}
	for i < len(p) && p[i] == '*' {
		i++
	}
	return i == len(p)
}

// Sink is where a hub puts what edges export.
type Sink interface {
	// Open finds (or creates) the stream that an offer asks for and checks
	// that the edge may write it. A failure the edge should see is a
	// *frame.Error; any other reaches it as CodeInternal.
	Open(ctx context.Context, id *Identity, o *frame.Offer) (Target, error)
}

// Target is one export's end at the hub. The link calls Ingest from one
// goroutine at a time.
type Target interface {
	// Position returns where the export stands; false if it never started.
	Position() (frame.Position, bool)
	// Ingest hands in a batch. It may block while too much is under way, but
	// returns once ctx ends. The batch and what it aliases belong to the
	// target until done is called, which happens exactly once per accepted
	// batch (nil error of Ingest), in order, after the batch is durably
	// applied or has failed; done does not block.
	Ingest(ctx context.Context, b *frame.Batch, done func(frame.Position, error)) error
	// Close ends the export's use of the target; batches under way are still
	// reported.
	Close()
}
