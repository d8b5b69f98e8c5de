package link

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"petiole/storage"
	"petiole/sync/export"
	"petiole/sync/frame"
	"petiole/sync/replay"
)

// exporter is one configured export, over all connections.
type exporter struct {
	e    *Edge
	conf Export

	saveMu sync.Mutex // orders writes of the state
	runMu  sync.Mutex // held by a run, and to load the state: not one beside the other

	mu     sync.Mutex
	src    export.Source
	state  export.State
	loaded bool // state belongs to src
	dirty  bool // state has to be saved
	// need counts states that have to be durable before anything is sent under
	// them, safe how many are.
	need, safe uint64
	win        *replay.Window
	active     bool
	meter      replay.Meter
	sent       uint64
	gaps       uint64
	gapped     uint64
	// damaged counts the sequences in gaps whose messages are damaged.
	damaged uint64
	// through is how far the hub is known to be.
	through  uint64
	err      string // the last failure
	errTime  time.Time
	failing  bool // err still stands: neither has the export resumed since, nor has the connection ended
	lastLog  string
	lastLogT time.Time
}

// errGone says that the stream was deleted, or created anew.
var errGone = errors.New("the stream was deleted or created anew")

// fail notes a failure in the status, and in the log if it is a new one.
func (x *exporter) fail(err error) {
	text := err.Error()
	now := time.Now()
	x.mu.Lock()
	x.err, x.errTime, x.failing = text, now, true
	level := slog.LevelWarn
	if text == x.lastLog && now.Sub(x.lastLogT) < repeatLog {
		level = slog.LevelDebug
	} else {
		x.lastLog, x.lastLogT = text, now
	}
	x.mu.Unlock()
	x.e.log.Log(context.Background(), level, "export does not proceed", "stream", x.conf.Stream, "to", x.conf.To, "error", text)
}

// load, with runMu held, finds the stream and what is remembered of its export. It returns nil
// if there is no such stream.
func (x *exporter) load() (export.Source, error) {
	src, ok := x.e.sources.Stream(x.conf.Stream)
	x.mu.Lock()
	old := x.src
	x.mu.Unlock()
	if repairer, may := x.e.sources.(export.Repairer); old != nil && (!ok || src.UID() != old.UID()) &&
		(ok || !may || !repairer.Repairing(x.conf.Stream)) {
		x.gone(old)
	}
	if !ok {
		x.mu.Lock()
		x.src, x.loaded = nil, false
		x.mu.Unlock()
		return nil, nil
	}
	uid := frame.UID(src.UID())
	x.mu.Lock()
	same := x.loaded && x.state.UID == uid
	x.src = src
	x.mu.Unlock()
	if same {
		return src, x.secure()
	}
	st, fresh, err := x.remembered(uid)
	if err != nil {
		return nil, err
	}
	if fresh {
		st = export.Begin(uid, src.DurableState())
	}
	x.mu.Lock()
	x.state, x.loaded = st, true
	x.through = max(st.Base, 1) - 1
	if n := len(st.Ladder); n > 0 {
		x.through = st.Ladder[n-1].Through
	}
	x.dirty = fresh
	if fresh {
		x.need++
	} else {
		x.safe = x.need
	}
	x.mu.Unlock()
	return src, x.secure()
}

// remembered returns what is remembered of the export of a stream; fresh if that
// is nothing. What is damaged counts as nothing: what the hub has is compared with
// the stream itself, and where that proves nothing it is sent twice rather than
// never.
func (x *exporter) remembered(uid frame.UID) (st export.State, fresh bool, err error) {
	b, err := x.e.states.Get(export.Key(uid, x.conf.To))
	switch {
	case err != nil && !errors.Is(err, storage.ErrCorrupt):
		return st, false, fmt.Errorf("read export state: %w", err)
	case err == nil && b == nil:
		return st, true, nil
	case err == nil:
		if st, err = export.DecodeState(b); err == nil && st.UID != uid {
			err = fmt.Errorf("it belongs to stream %s", st.UID)
		}
	}
	if err != nil {
		x.e.log.Error("what is remembered of an export is damaged; it goes on from what the hub has, compared with the stream",
			"stream", x.conf.Stream, "to", x.conf.To, "err", err)
		return export.State{}, true, nil
	}
	return st, false, nil
}

// secure saves the state if what is sent under it might otherwise be
// forgotten, also when an earlier attempt has failed.
func (x *exporter) secure() error {
	x.mu.Lock()
	safe := x.safe >= x.need
	x.mu.Unlock()
	if safe {
		return nil
	}
	return x.save(true)
}

// follow loads the state when the stream comes, with or without a hub: what the
// stream loses from then on is a gap, and the status tells how far behind the
// hub is. It works until ctx ends.
func (x *exporter) follow(ctx context.Context) {
	for {
		changed := x.e.streamsChanged()
		x.runMu.Lock()
		var err error
		if ctx.Err() == nil {
			_, err = x.load()
		}
		x.runMu.Unlock()
		if err != nil {
			x.fail(err)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// save stores the state if it changed, or in any case.
func (x *exporter) save(always bool) error {
	x.saveMu.Lock()
	defer x.saveMu.Unlock()
	x.mu.Lock()
	if !x.loaded || !x.dirty && !always {
		x.mu.Unlock()
		return nil
	}
	x.dirty = false
	need := x.need
	key, b := export.Key(x.state.UID, x.conf.To), x.state.Encode()
	x.mu.Unlock()
	if err := x.e.states.Put(key, b); err != nil {
		x.mu.Lock()
		x.dirty = true
		x.mu.Unlock()
		return fmt.Errorf("store export state: %w", err)
	}
	x.mu.Lock()
	x.safe = max(x.safe, need)
	x.mu.Unlock()
	return nil
}

// run is one offer of an export on a connection.
type run struct {
	x      *exporter
	s      *session
	id     uint32
	accept chan frame.Accept
	room   chan struct{} // an acknowledgement came: for the sender
	acked  chan struct{} // the same, for the encoder
	ctx    context.Context
	cancel context.CancelCauseFunc
}

// drive offers the export to the hub and replays it, until the session ends.
func (x *exporter) drive(s *session) error {
	var backoff time.Duration
	defer func() {
		// What the hub of this connection refused may be no trouble to the
		// next one.
		x.mu.Lock()
		x.failing = false
		x.mu.Unlock()
	}()
	for s.ctx.Err() == nil {
		changed := x.e.streamsChanged()
		progress := false
		x.runMu.Lock()
		src, err := x.load()
		if err == nil && src != nil {
			progress, err = x.once(s, src)
		}
		x.runMu.Unlock()
		if err == nil && src == nil {
			select {
			case <-s.ctx.Done():
			case <-changed:
			}
			continue
		}
		if s.ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, errGone) {
			continue
		}
		if progress {
			backoff = 0
			x.mu.Lock()
			x.lastLog = ""
			x.mu.Unlock()
		}
		x.fail(err)
		backoff = x.wait(err, backoff)
		timer := time.NewTimer(backoff)
		select {
		case <-s.ctx.Done():
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
	return nil
}

// gone tells what a deleted stream takes with it, whether there is a hub or not.
func (x *exporter) gone(src export.Source) {
	x.mu.Lock()
	through := x.through
	x.mu.Unlock()
	if last := src.DurableState().Last; last > through {
		x.e.log.Warn("exported stream was deleted before the hub had all of it",
			"stream", x.conf.Stream, "to", x.conf.To, "hub_has", through, "last", last)
	}
}

// wait returns how long to wait after a failure, given how long it was before.
func (x *exporter) wait(err error, last time.Duration) time.Duration {
	t := &x.e.conf.Timing
	least := t.RetryMin
	var fe *frame.Error
	if errors.Is(err, replay.ErrAck) {
		least = t.RetryMin / 100
	}
	if errors.As(err, &fe) {
		switch fe.Code {
		case frame.CodeOrder, frame.CodeDiverged, frame.CodeStale, frame.CodeNone:
			// Asking the hub anew where it stands is all that it takes.
			least = t.RetryMin / 100
		}
		least = max(least, time.Duration(fe.RetryAfter)*time.Second)
		if fe.Code == frame.CodeStorage && fe.RetryAfter > 0 {
			// The hub is as it should be but for room, and says when to look again.
			return time.Duration(fe.RetryAfter) * time.Second
		}
	}
	return max(least, min(2*last, t.RetryMax))
}

// once makes one offer and replays until something ends it. It reports whether
// the hub acknowledged anything.
func (x *exporter) once(s *session, src export.Source) (progress bool, err error) {
	x.mu.Lock()
	st := x.state
	x.mu.Unlock()
	have := src.DurableState()
	r := &run{x: x, s: s, accept: make(chan frame.Accept, 1), room: make(chan struct{}, 1), acked: make(chan struct{}, 1)}
	r.ctx, r.cancel = context.WithCancelCause(s.ctx)
	defer r.cancel(nil)
	s.mu.Lock()
	s.nextID++
	r.id = s.nextID
	s.runs[r.id] = r
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.runs, r.id)
		s.mu.Unlock()
		x.mu.Lock()
		x.win, x.active = nil, false
		x.mu.Unlock()
	}()
	o := frame.Offer{
		ID: r.id, Stream: x.conf.Stream, To: x.conf.To, UID: st.UID,
		Incarnation: st.Incarnation, Base: st.Base, First: have.First, Last: have.Last,
	}
	s.out.add(o.Append)
	var a frame.Accept
	select {
	case <-r.ctx.Done():
		return false, context.Cause(r.ctx)
	case a = <-r.accept:
	}
	if a.Error.Code != frame.CodeNone {
		return false, &a.Error
	}
	d, err := export.Resume(st, src.DurableState(), a.Position, a.Known, export.Chain(src))
	if err != nil {
		return false, fmt.Errorf("decide where to resume: %w", err)
	}
	x.mu.Lock()
	x.state, x.dirty = d.State, true
	if d.Persist {
		x.need++
	}
	x.through = d.Next - 1
	x.mu.Unlock()
	if err := x.secure(); err != nil {
		return false, err
	}
	level := slog.LevelInfo
	if d.Action == export.Renew {
		level = slog.LevelWarn
	}
	x.e.log.Log(context.Background(), level, "export resumes", "stream", x.conf.Stream, "to", x.conf.To, "how", d.Action.String(),
		"from", d.Next, "last", have.Last, "incarnation", d.State.Incarnation, "verified", d.Verified, "reason", d.Reason)
	return r.replay(src, &d)
}

// chunk is about how many bytes the encoder reads ahead in one go.
const chunk = 512 << 10

func (r *run) replay(src export.Source, d *export.Decision) (progress bool, err error) {
	x := r.x
	stream, err := r.s.d.conn.OpenUniStreamSync(r.ctx)
	if err != nil {
		return false, fmt.Errorf("open export stream: %w", err)
	}
	x.mu.Lock()
	limit := x.e.limiter()
	if w := r.s.welcome.Window; w > 0 {
		limit = replay.Capped{Limiter: limit, Bound: int64(min(w, 1<<40))}
	}
	win := replay.NewWindow(d.Next-1, limit)
	x.win, x.active, x.failing = win, true, false
	sentBefore := x.sent + x.gapped
	x.mu.Unlock()

	if _, err := stream.Write(frame.AppendOpen(nil, r.id)); err != nil {
		return false, fmt.Errorf("write export stream: %w", err)
	}
	batches := make(chan []*export.Batch, 1)
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		if err := r.encode(src, d, batches); err != nil {
			r.cancel(err)
		}
	}()
	err = r.send(stream, win, batches)
	if err != nil {
		var se *quic.StreamError
		if errors.As(err, &se) && se.Remote {
			// The hub's reason is on its way on the control stream.
			select {
			case <-r.ctx.Done():
			case <-time.After(time.Second):
			}
		}
		r.cancel(err)
	}
	stream.CancelWrite(quic.StreamErrorCode(frame.CodeNone))
	wg.Wait()
	x.mu.Lock()
	progress = x.sent+x.gapped != sentBefore
	x.mu.Unlock()
	return progress, context.Cause(r.ctx)
}

// encode builds batches ahead of the sender, until the run ends.
func (r *run) encode(src export.Source, d *export.Decision, out chan<- []*export.Batch) error {
	grew := make(chan struct{}, 1)
	unwatch := src.Watch(func() {
		select {
		case grew <- struct{}{}:
		default:
		}
	})
	defer unwatch()
	w := &r.s.welcome
	c := export.NewCursor(src, r.id, d, w.Features&frame.FeatureS2 != 0 && !r.x.e.conf.NoCompression, int(min(w.MaxMessage, 1<<40)))
	for {
		changed := r.x.e.streamsChanged()
		if now, ok := r.x.e.sources.Stream(r.x.conf.Stream); !ok || now.UID() != src.UID() {
			return errGone
		}
		bs, err := c.Read(nil, chunk)
		if len(bs) > 0 {
			select {
			case out <- bs:
			case <-r.ctx.Done():
				return nil
			}
		}
		if err != nil {
			// What was read before the failure goes out all the same.
			return r.drain(c.Next()-1, err)
		}
		if len(bs) > 0 {
			continue
		}
		select {
		case <-grew:
		case <-changed:
		case <-r.ctx.Done():
			return nil
		}
	}
}

// drain waits until the hub has acknowledged what was sent, then returns err.
func (r *run) drain(through uint64, err error) error {
	for {
		r.x.mu.Lock()
		done := r.x.through >= through
		r.x.mu.Unlock()
		if done {
			return err
		}
		select {
		case <-r.ctx.Done():
			return nil
		case <-r.acked:
		}
	}
}

// send writes batches as the window allows, until the run ends.
func (r *run) send(stream *quic.SendStream, win *replay.Window, in <-chan []*export.Batch) error {
	stop := context.AfterFunc(r.ctx, func() { stream.CancelWrite(quic.StreamErrorCode(frame.CodeNone)) })
	defer stop()
	for {
		var bs []*export.Batch
		select {
		case <-r.ctx.Done():
			return nil
		case bs = <-in:
		}
		for _, b := range bs {
			it := replay.Item{
				Rung: b.Rung, Wire: int64(len(b.Frames)), Bytes: b.Bytes, Msgs: b.Msgs,
				Gaps: b.Gaps, Missing: b.Missing, Damaged: b.Damaged,
			}
			for {
				r.x.mu.Lock()
				room := win.Room() > 0
				if room {
					it.Sent = time.Now()
					win.Sent(it)
				}
				r.x.mu.Unlock()
				if room {
					break
				}
				select {
				case <-r.ctx.Done():
					return nil
				case <-r.room:
				}
			}
			if _, err := stream.Write(b.Frames); err != nil {
				return fmt.Errorf("write export stream: %w", err)
			}
			b.Release()
		}
	}
}

// ack takes the hub's position.
func (r *run) ack(p frame.Position) {
	x := r.x
	now := time.Now()
	x.mu.Lock()
	var err error
	var damaged []uint64
	if x.win != nil && r.ctx.Err() == nil {
		err = x.win.Ack(p.Through, p.Chain, now, func(it replay.Item) {
			x.state.Acknowledge(it.Rung)
			x.sent += it.Msgs
			x.gaps += it.Gaps
			x.gapped += it.Missing
			x.damaged += uint64(len(it.Damaged))
			damaged = append(damaged, it.Damaged...)
			x.meter.Add(now, it.Msgs, uint64(it.Bytes))
			x.through = it.Rung.Through
			x.dirty = true
		})
	}
	x.mu.Unlock()
	if n := len(damaged); n > 0 {
		x.e.log.Error("messages are damaged on disk and were not exported, the hub has been told of a gap; check the disk, and delete them to be rid of them",
			"stream", x.conf.Stream, "to", x.conf.To, "messages", n, "first_seq", damaged[0], "last_seq", damaged[n-1])
	}
	if err != nil {
		r.cancel(err)
		return
	}
	for _, ch := range []chan struct{}{r.room, r.acked, x.e.saver} {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// status returns a snapshot.
func (x *exporter) status() ExportStatus {
	now := time.Now()
	x.mu.Lock()
	src := x.src
	st := ExportStatus{
		Stream: x.conf.Stream, To: x.conf.To, Active: x.active, Through: x.through,
		Incarnation: x.state.Incarnation, Base: x.state.Base, Regressions: x.state.Regressions,
		Sent: x.sent, Gaps: x.gaps, GapMsgs: x.gapped, DamagedMsgs: x.damaged, Failing: x.failing, LastError: x.err, LastErrorTime: x.errTime,
	}
	if x.win != nil {
		st.InFlight, _ = x.win.InFlight()
	}
	st.MsgRate, st.ByteRate = x.meter.Rate(now)
	x.mu.Unlock()
	if src == nil {
		return st
	}
	have := src.DurableState()
	st.First, st.Last = have.First, have.Last
	if have.Last <= st.Through {
		return st
	}
	st.LagMsgs = have.Last - st.Through
	if held := have.Last - max(st.Through, have.First-1); have.Msgs > 0 && have.Last >= have.First {
		st.LagBytes = uint64(float64(have.Bytes) * min(1, float64(held)/float64(have.Last-have.First+1)))
	}
	// Without an answer the age stays unknown; the export itself reports errors.
	_ = storage.RangeIntact(src, st.Through+1, func(m storage.Message) bool {
		st.LagAge = max(0, now.Sub(time.Unix(0, m.Time)))
		return false
	})
	return st
}
