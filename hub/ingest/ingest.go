// Package ingest stores at the hub what edges export: it is the link's Sink on
// top of the JetStream engine. A stream that does not exist yet is created; a
// batch becomes one record of the stream's log, so that its messages and the
// export's new position are stored in the same step, or not at all.
//
//	link: batch ──► budget ──► Stream.Ingest ──► log, fdatasync ──► Apply
//	  ▲                                                              │
//	  └───────────── position (acknowledgement) ◄────────────────────┘
package ingest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"petiole/internal/jetstream"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/storage"
	"petiole/sync/frame"
	"petiole/sync/link"
)

// Defaults of Options, in bytes.
const (
	DefaultPerExport = 16 << 20
	DefaultTotal     = 256 << 20
)

// Options configure a Sink.
type Options struct {
	Engine *jetstream.Engine
	// Template is the configuration of streams that are created for exports;
	// Name and Subjects are set for each. The zero value is a file stream
	// without limits.
	Template api.StreamConfig
	// NoCreate makes exports to streams that do not exist fail.
	NoCreate bool
	// PerExport and Total bound the bytes handed to the log and not applied
	// yet, of one export and of all (0: the defaults).
	PerExport, Total int64
	Log              *slog.Logger
}

// Sink implements link.Sink.
type Sink struct {
	o     Options
	log   *slog.Logger
	total *budget
}

var _ link.Sink = (*Sink)(nil)

// New returns a sink on the engine.
func New(o Options) *Sink {
	if o.PerExport <= 0 {
		o.PerExport = DefaultPerExport
	}
	if o.Total <= 0 {
		o.Total = DefaultTotal
	}
	s := &Sink{o: o, log: o.Log, total: newBudget(o.Total)}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s
}

// Open implements link.Sink. Which streams an edge may write is in its
// identity.
func (s *Sink) Open(_ context.Context, id *link.Identity, o *frame.Offer) (link.Target, error) {
	if !id.MayWrite(o.To) {
		return nil, &frame.Error{Code: frame.CodeDenied, Text: fmt.Sprintf(
			"user %q may not write stream %q of the hub: add it to the streams of this user at the hub", id.User, o.To)}
	}
	st, ok := s.o.Engine.Stream(o.To)
	if !ok {
		if s.o.NoCreate {
			return nil, &frame.Error{Code: frame.CodeTarget, Text: fmt.Sprintf(
				"the hub has no stream %q and does not create any: create it with metadata %s=true", o.To, jetstream.MetaIngest)}
		}
		var err error
		if st, err = s.create(o.To); err != nil {
			return nil, failure(o.To, err)
		}
		s.log.Info("stream created for an export", "stream", o.To, "edge", id.EdgeID, "name", id.Name)
	}
	switch cfg := st.Config(); {
	case cfg.Mirror != nil || len(cfg.Sources) > 0:
		return nil, &frame.Error{Code: frame.CodeTarget, Text: fmt.Sprintf(
			"stream %q of the hub mirrors others and cannot take an export: export to another one", o.To)}
	case cfg.Sealed:
		return nil, &frame.Error{Code: frame.CodeTarget, Text: fmt.Sprintf(
			"stream %q of the hub is sealed: export to another one", o.To)}
	}
	t := &target{
		sink: s, stream: st, edge: id.EdgeID, name: id.Name, uid: o.UID, own: newBudget(s.o.PerExport),
	}
	p, known, err := st.DurablePosition(t.edge, t.uid)
	if err != nil {
		return nil, failure(o.To, err)
	}
	if known {
		t.pos, t.known = position(p), true
		for _, r := range p.Ladder {
			t.pos.Ladder = append(t.pos.Ladder, frame.Rung{Through: r.Through, Chain: r.Chain})
		}
	}
	return t, nil
}

func (s *Sink) create(name string) (*jetstream.Stream, error) {
	cfg := s.o.Template
	cfg.Name, cfg.Subjects = name, nil
	meta := map[string]string{jetstream.MetaIngest: "true"}
	for k, v := range s.o.Template.Metadata {
		meta[k] = v
	}
	cfg.Metadata = meta
	if cfg.Replicas == 0 {
		cfg.Replicas = 1
	}
	return s.o.Engine.EnsureStream(cfg)
}

// fullRetry is after how many seconds an edge tries again whose messages the hub
// cannot store now.
const fullRetry = 2

// failure is what an edge is told of an error of the engine.
func failure(name string, err error) *frame.Error {
	fe := &frame.Error{Code: frame.CodeInternal, Text: fmt.Sprintf("stream %q of the hub: %v", name, err)}
	var ae *api.Error
	switch {
	case errors.Is(err, command.ErrStaleIncarnation):
		fe.Code = frame.CodeStale
	case errors.Is(err, command.ErrOutOfOrder):
		fe.Code = frame.CodeOrder // asking anew settles it
	case errors.Is(err, api.ErrStreamNotFound):
		fe.Code = frame.CodeOrder // likewise: the next offer makes the stream
		fe.Text = fmt.Sprintf("stream %q was removed at the hub; it is made anew and filled from the first message here", name)
	case errors.Is(err, command.ErrDiverged):
		fe.Code = frame.CodeDiverged
	case errors.Is(err, command.ErrMalformed):
		fe.Code = frame.CodeProtocol
	case errors.Is(err, stream.ErrFull):
		fe.Code = frame.CodeStorage
		fe.Text = fmt.Sprintf("stream %q of the hub is full: raise its limits, or remove messages from it", name)
	case errors.Is(err, api.ErrInsufficientResources):
		fe.Code = frame.CodeStorage
		fe.RetryAfter = fullRetry
		fe.Text = fmt.Sprintf("the hub's store or its disk is full, stream %q takes no more: make room on the disk, raise max_file_store, or remove messages", name)
	case errors.Is(err, api.ErrStreamOfflineReason):
		fe.Code = frame.CodeStorage
		fe.RetryAfter = fullRetry
	case errors.Is(err, storage.ErrFailed):
		fe.Code = frame.CodeStorage
	case errors.Is(err, jetstream.ErrClosed):
		fe.Code = frame.CodeShutdown
	case errors.As(err, &ae):
		fe.Code = frame.CodeTarget
	}
	return fe
}

// target is an export's end in a stream.
type target struct {
	sink   *Sink
	stream *jetstream.Stream
	edge   string
	name   string
	uid    frame.UID
	own    *budget
	pos    frame.Position // when the export was taken up
	known  bool
	ahead  bool // the edge's clock was found to be ahead
}

// commands are on their way into the engine, which copies them. What they were made
// of is not kept: there may be thousands of exports, and large messages.
var commands = sync.Pool{New: func() any { return new(command.Ingest) }}

// maxCommand is how many messages, or gaps, a command has room for that is kept.
const maxCommand = 4096

func release(in *command.Ingest) {
	clear(in.Msgs)
	if cap(in.Msgs) > maxCommand || cap(in.Gaps) > maxCommand {
		*in = command.Ingest{}
	}
	commands.Put(in)
}

// maxAhead is how far an edge's clock may be ahead of the hub's. Times in a
// stream never go back: what a wrong clock says would stay with the messages of
// every other edge.
const maxAhead = 10 * time.Second

// Position implements link.Target.
func (t *target) Position() (frame.Position, bool) {
	return t.pos, t.known
}

// position leaves the ladder out: acknowledgements do without.
func position(p command.Position) frame.Position {
	return frame.Position{Incarnation: p.Incarnation, Through: p.Through, Chain: p.Chain, Gaps: p.Gaps, Msgs: p.Msgs}
}

// Ingest implements link.Target.
func (t *target) Ingest(ctx context.Context, b *frame.Batch, done func(frame.Position, error)) error {
	var size int64
	for i := range b.Msgs {
		m := &b.Msgs[i]
		size += int64(len(m.Subject) + len(m.Header) + len(m.Data) + 32)
	}
	size += int64(len(b.Gaps))*32 + 128
	if err := t.own.take(ctx, size); err != nil {
		return err
	}
	if err := t.sink.total.take(ctx, size); err != nil {
		t.own.give(size)
		return err
	}
	in := commands.Get().(*command.Ingest)
	defer release(in)
	*in = command.Ingest{
		Edge: t.edge, UID: t.uid, Incarnation: b.Incarnation, Base: b.Base, First: b.First, Through: b.Through,
		PrevChain: b.Prev, Chain: b.Chain, Gaps: in.Gaps[:0], Msgs: in.Msgs[:0],
	}
	for _, g := range b.Gaps {
		in.Gaps = append(in.Gaps, command.Gap{First: g.First, Last: g.Last, Reason: uint8(g.Reason)})
	}
	latest := time.Now().Add(maxAhead).UnixNano()
	for i := range b.Msgs {
		m := &b.Msgs[i]
		if m.Time > latest && !t.ahead {
			t.ahead = true
			t.sink.log.Warn("the clock of an edge is ahead of the hub's: its messages get the hub's time; set the clocks",
				"edge", t.edge, "name", t.name, "stream", t.stream.Name(), "message_time", time.Unix(0, m.Time).UTC())
		}
		if m.Time > latest {
			m.Time = latest - int64(maxAhead)
		}
		in.Msgs = append(in.Msgs, command.IngestMsg{Seq: m.Seq, Time: m.Time, Subject: m.Subject, Header: m.Header, Data: m.Data})
	}
	t.stream.Ingest(in, func(p command.Position, err error) {
		t.own.give(size)
		t.sink.total.give(size)
		if err != nil {
			done(position(p), failure(t.stream.Name(), err))
			return
		}
		done(position(p), nil)
	})
	t.sink.o.Engine.Kick()
	return nil
}

// Close implements link.Target.
func (t *target) Close() {}

// budget is a number of bytes that may be in use at a time.
type budget struct {
	mu    sync.Mutex
	free  int64
	whole int64
	freed chan struct{} // closed, and replaced, when bytes are given back
}

func newBudget(n int64) *budget {
	return &budget{free: n, whole: n, freed: make(chan struct{})}
}

// take waits until n bytes are free. More than the whole is let through alone.
func (b *budget) take(ctx context.Context, n int64) error {
	n = min(n, b.whole)
	for {
		b.mu.Lock()
		if b.free >= n {
			b.free -= n
			b.mu.Unlock()
			return nil
		}
		freed := b.freed
		b.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (b *budget) give(n int64) {
	n = min(n, b.whole)
	b.mu.Lock()
	b.free += n
	close(b.freed)
	b.freed = make(chan struct{})
	b.mu.Unlock()
}
