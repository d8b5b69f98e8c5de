package export

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"petiole/storage"
	"petiole/sync/frame"
)

// fake is a stream in memory.
type fake struct {
	uid   frame.UID
	msgs  map[uint64]storage.Message
	first uint64
	last  uint64
	stamp int
	bad   map[uint64]int // damaged: how many more reads fail
}

func newFake() *fake {
	return &fake{uid: frame.UID{7}, msgs: map[uint64]storage.Message{}, first: 1}
}

func (f *fake) UID() [16]byte { return f.uid }

func (f *fake) DurableState() storage.State {
	return storage.State{Msgs: uint64(len(f.msgs)), First: f.first, Last: f.last}
}

func (f *fake) Range(from uint64, fn func(storage.Message) bool) error {
	for q := from; q <= f.last; q++ {
		if f.bad[q] > 0 {
			f.bad[q]--
			return &storage.CorruptError{File: "msgs.db", Seq: q, Reason: "checksum"}
		}
		if m, ok := f.msgs[q]; ok && !fn(m) {
			return nil
		}
	}
	return nil
}

func (f *fake) Watch(func()) func() { return func() {} }

// add appends a message unlike any before.
func (f *fake) add(size int) {
	f.last++
	f.stamp++
	d := append(fmt.Appendf(nil, "message %d ", f.stamp), make([]byte, size)...)
	f.msgs[f.last] = storage.Message{Seq: f.last, Time: int64(f.stamp), Subject: "s", Data: d}
}

func (f *fake) remove(q uint64) {
	delete(f.msgs, q)
	for f.first <= f.last && f.msgs[f.first].Seq == 0 {
		f.first++
	}
}

func (f *fake) clone() *fake {
	c := *f
	c.msgs = map[uint64]storage.Message{}
	for k, v := range f.msgs {
		c.msgs[k] = v
	}
	return &c
}

// model is a hub with one position, as the contract of the link has it.
type model struct {
	known bool
	pos   frame.Position
	data  []string
}

var errRefused = errors.New("refused")

func (h *model) apply(uid frame.UID, b *frame.Batch) error {
	n := frame.Position{Incarnation: b.Incarnation, Through: b.Through, Chain: b.Chain}
	switch {
	case h.known && b.Incarnation < h.pos.Incarnation:
		return errRefused
	case h.known && b.Incarnation == h.pos.Incarnation:
		if b.Through <= h.pos.Through {
			return nil
		}
		if b.First != h.pos.Through+1 || b.Prev != h.pos.Chain {
			return errRefused
		}
		n.Ladder = append(n.Ladder, h.pos.Ladder[max(0, len(h.pos.Ladder)-7):]...)
	case b.First != b.Base || b.Prev != frame.Seed(uid, b.Incarnation, b.Base):
		return errRefused
	}
	n.Ladder = append(n.Ladder, frame.Rung{Through: b.Through, Chain: b.Chain})
	for _, m := range b.Msgs {
		h.data = append(h.data, string(m.Data))
	}
	h.known, h.pos = true, n
	return nil
}

func (h *model) clone() *model {
	c := *h
	c.data = append([]string(nil), h.data...)
	return &c
}

// decode returns the batches in frames.
func decode(t interface{ Fatal(...any) }, bs []*Batch) []*frame.Batch {
	var out []*frame.Batch
	for _, b := range bs {
		r := frame.NewReader(bytes.NewReader(b.Frames), 1<<24)
		_, content, err := r.Next(nil)
		if err != nil {
			t.Fatal(err)
		}
		var d frame.Decoder
		fb := new(frame.Batch)
		if err := d.Batch(content, fb); err != nil {
			t.Fatal(err)
		}
		if fb.First != b.First || fb.Through != b.Rung.Through || fb.Chain != b.Rung.Chain || uint64(len(fb.Msgs)) != b.Msgs || uint64(len(fb.Gaps)) != b.Gaps {
			t.Fatal("what the batch tells of itself is wrong: ", b, fb)
		}
		out = append(out, fb)
	}
	return out
}

// TestHistory plays random histories of an edge and a hub: publishing,
// removals, outages, crashes of either, lost tails, restored copies. Whatever
// happened, in the end the hub has every message that the edge holds; and
// nothing twice unless history was really cut. (Where history was cut and the
// messages that would show it are gone as well, the first cannot be promised.)
func TestHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		src, hub := newFake(), &model{}
		state := Begin(src.uid, src.DurableState())
		saved := state.clone() // what a restart finds
		type copied struct {
			src   *fake
			state State
		}
		var backup *copied
		var hubBackup *model
		cut, removed, known := false, false, map[string]bool{}
		tidy := rapid.Bool().Draw(t, "nothing is removed")
		publish := func() {
			for range rapid.IntRange(1, 20).Draw(t, "n") {
				src.add(rapid.IntRange(0, 30).Draw(t, "size"))
			}
		}
		// replay connects and sends up to that many batches of few messages;
		// the last may be applied without its acknowledgement arriving.
		replay := func(batches int, ackLost bool) {
			d, err := Resume(state, src.DurableState(), hub.pos, hub.known, Chain(src))
			if err != nil {
				t.Fatal(err)
			}
			if d.Action == Renew && !cut {
				t.Fatalf("new incarnation though nothing was lost: %s", d.Reason)
			}
			state = d.State
			if d.Persist {
				saved = state.clone()
			}
			whole := src
			c := NewCursor(src, 1, &d, false, 0)
			for batches > 0 && c.Next() <= src.last {
				// A short view makes short batches.
				src = whole.clone()
				src.last = min(src.last, c.Next()+uint64(rapid.IntRange(0, 9).Draw(t, "len")))
				c.src = src
				bs, err := c.Read(nil, 1)
				src = whole
				if err != nil || len(bs) != 1 {
					t.Fatalf("%d batches, %v", len(bs), err)
				}
				for _, b := range decode(t, bs) {
					if err := hub.apply(src.uid, b); err != nil {
						t.Fatalf("batch %d to %d of incarnation %d refused, hub at %+v", b.First, b.Through, b.Incarnation, hub.pos)
					}
				}
				batches--
				if batches > 0 || !ackLost {
					state.Acknowledge(bs[0].Rung)
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"publish": func(*rapid.T) { publish() },
			"remove": func(t *rapid.T) {
				if src.last > 0 && !tidy {
					removed = true
					src.remove(rapid.Uint64Range(1, src.last).Draw(t, "seq"))
				}
			},
			"limit": func(t *rapid.T) {
				for n := rapid.IntRange(1, 10).Draw(t, "n"); n > 0 && src.first <= src.last && !tidy; n-- {
					removed = true
					src.remove(src.first)
				}
			},
			"replay":       func(t *rapid.T) { replay(rapid.IntRange(1, 5).Draw(t, "batches"), rapid.Bool().Draw(t, "lost")) },
			"save":         func(*rapid.T) { saved = state.clone() },
			"edge crashes": func(*rapid.T) { state = saved.clone() },
			"tail lost": func(t *rapid.T) {
				if src.last == 0 {
					return
				}
				cut = true
				to := rapid.Uint64Range(src.last-min(src.last, 20), src.last).Draw(t, "to")
				for ; src.last > to; src.last-- {
					delete(src.msgs, src.last)
				}
				src.first = min(src.first, src.last+1)
				state = saved.clone()
			},
			"back up": func(*rapid.T) { backup = &copied{src.clone(), saved.clone()} },
			"restore": func(*rapid.T) {
				if backup != nil {
					cut = true
					stamp := src.stamp
					src = backup.src.clone()
					src.stamp = stamp
					state, saved = backup.state.clone(), backup.state.clone()
				}
			},
			"back up hub": func(*rapid.T) { hubBackup = hub.clone() },
			"restore hub": func(*rapid.T) {
				if hubBackup != nil {
					hub = hubBackup.clone()
				}
			},
			"": func(*rapid.T) {},
		})
		for range 3 { // the history may end in the middle of anything
			replay(1000, false)
		}
		for _, s := range hub.data {
			if known[s] && !cut {
				t.Fatalf("%q is at the hub twice", s)
			}
			known[s] = true
		}
		for q, m := range src.msgs {
			if !known[string(m.Data)] && !(cut && removed) {
				t.Fatalf("message %d is not at the hub; edge %+v, hub %+v", q, state, hub.pos)
			}
		}
		if hub.known && src.last >= state.Base && hub.pos.Through != src.last {
			t.Fatalf("hub is at %d, the stream at %d", hub.pos.Through, src.last)
		}
	})
}

// fill sends everything in batches of five and returns hub and state.
func fill(t *testing.T, src *fake) (*model, State) {
	t.Helper()
	hub, state := &model{}, Begin(src.uid, src.DurableState())
	d := Decision{State: state, Next: state.Base, Chain: frame.Seed(src.uid, 1, state.Base)}
	c := NewCursor(src, 1, &d, false, 0)
	for c.Next() <= src.last {
		view := src.clone()
		view.last = min(src.last, c.Next()+4)
		c.src = view
		bs, err := c.Read(nil, 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range decode(t, bs) {
			if err := hub.apply(src.uid, b); err != nil {
				t.Fatal(err)
			}
		}
		state.Acknowledge(bs[0].Rung)
	}
	return hub, state
}

func TestResume(t *testing.T) {
	for _, c := range []struct {
		name     string
		change   func(src *fake, st *State, hub *model)
		action   Action
		next     uint64
		inc      uint64
		verified bool
	}{
		{"in step", func(*fake, *State, *model) {}, Continue, 51, 1, true},
		{"hub new", func(_ *fake, _ *State, h *model) { *h = model{} }, Start, 1, 1, true},
		{"edge forgot its ladder", func(_ *fake, st *State, _ *model) { st.Ladder = nil }, Continue, 51, 1, true},
		{"ladder and last messages gone", func(src *fake, st *State, _ *model) { st.Ladder = nil; src.remove(50) }, Continue, 51, 1, false},
		{"last messages gone", func(src *fake, st *State, _ *model) { src.remove(50) }, Continue, 51, 1, true},
		{"grown again past a lost tail", func(src *fake, _ *State, _ *model) {
			for ; src.last > 43; src.last-- {
				delete(src.msgs, src.last)
			}
			for range 20 {
				src.add(1)
			}
		}, Renew, 41, 2, true},
		{"all messages gone", func(src *fake, st *State, _ *model) {
			st.Ladder = nil
			for q := uint64(1); q <= 50; q++ {
				src.remove(q)
			}
		}, Continue, 51, 1, false},
		{"hub went back", func(_ *fake, _ *State, h *model) {
			h.pos.Ladder = h.pos.Ladder[:len(h.pos.Ladder)-2]
			r := h.pos.Ladder[len(h.pos.Ladder)-1]
			h.pos.Through, h.pos.Chain = r.Through, r.Chain
		}, Continue, 41, 1, true},
		{"tail lost", func(src *fake, _ *State, _ *model) {
			for ; src.last > 47; src.last-- {
				delete(src.msgs, src.last)
			}
		}, Renew, 46, 2, true},
		{"other messages", func(src *fake, st *State, _ *model) {
			st.Acknowledge(frame.Rung{Through: 40, Chain: st.Ladder[7].Chain})
			for q := uint64(43); q <= 50; q++ {
				src.msgs[q] = storage.Message{Seq: q, Subject: "s", Data: []byte("other")}
			}
		}, Renew, 41, 2, true},
		{"incarnation not seen", func(_ *fake, st *State, _ *model) { st.Incarnation, st.Base, st.Ladder = 2, 31, nil }, Renew, 51, 3, true},
		{"incarnation not seen yet", func(_ *fake, st *State, h *model) {
			st.Incarnation, st.Base, st.Ladder = 2, 31, nil
			st.Prior = Prior{1, frame.Rung{Through: 50, Chain: h.pos.Chain}}
		}, Start, 31, 2, true},
		{"hub new, later incarnation", func(_ *fake, st *State, h *model) {
			*h = model{}
			st.Incarnation, st.Base = 2, 31
			st.Prior = Prior{1, frame.Rung{Through: 50}}
		}, Renew, 1, 3, true},
		{"later incarnation, same messages", func(_ *fake, _ *State, h *model) { h.pos.Incarnation = 5 }, Continue, 51, 5, true},
		{"later incarnation, other messages", func(src *fake, _ *State, h *model) {
			h.pos.Incarnation = 5
			for q := uint64(31); q <= 50; q++ {
				src.msgs[q] = storage.Message{Seq: q, Subject: "s", Data: []byte("other")}
			}
		}, Renew, 31, 6, true},
		{"hub new and stream behind base", func(src *fake, st *State, h *model) {
			*h = model{}
			st.Base, st.Origin, st.Incarnation = 100, 100, 3
		}, Renew, 51, 4, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			src := newFake()
			for range 50 {
				src.add(10)
			}
			hub, st := fill(t, src)
			c.change(src, &st, hub)
			d, err := Resume(st, src.DurableState(), hub.pos, hub.known, Chain(src))
			if err != nil {
				t.Fatal(err)
			}
			if d.Action != c.action || d.Next != c.next || d.State.Incarnation != c.inc || d.Verified != c.verified || d.Reason == "" {
				t.Errorf("%v at %d, incarnation %d, verified %v: %s", d.Action, d.Next, d.State.Incarnation, d.Verified, d.Reason)
			}
			if d.Persist != (d.State.Incarnation != st.Incarnation) {
				t.Errorf("persist is %v", d.Persist)
			}
		})
	}
}

func TestCursorBatches(t *testing.T) {
	src := newFake()
	for range 1000 {
		src.add(500)
	}
	src.add(3 * frame.MaxFrame)
	src.add(1)
	for _, q := range []uint64{1, 2, 10, 999, 1002} {
		src.remove(q)
	}
	d := Decision{State: State{Incarnation: 1, Base: 1}, Next: 1, Chain: frame.Seed(src.uid, 1, 1)}
	c := NewCursor(src, 3, &d, false, 0)
	var all []*Batch
	for rounds := 0; c.Next() <= src.last; rounds++ {
		if rounds > 100 {
			t.Fatal("no end")
		}
		bs, err := c.Read(nil, 100_000)
		if err != nil || len(bs) == 0 || len(bs) > 4 {
			t.Fatalf("%d batches, %v", len(bs), err)
		}
		all = append(all, bs...)
	}
	var msgs int
	var gaps []frame.Gap
	for i, b := range decode(t, all) {
		msgs += len(b.Msgs)
		gaps = append(gaps, b.Gaps...)
		if len(all[i].Frames) > frame.MaxFrame && len(b.Msgs) != 1 {
			t.Errorf("batch of %d messages has %d bytes", len(b.Msgs), len(all[i].Frames))
		}
		if i > 0 && b.First != all[i-1].Rung.Through+1 {
			t.Errorf("batch starts at %d after %d", b.First, all[i-1].Rung.Through)
		}
	}
	want := []frame.Gap{
		{First: 1, Last: 2, Reason: frame.GapRemoved},
		{First: 10, Last: 10, Reason: frame.GapDeleted},
		{First: 999, Last: 999, Reason: frame.GapDeleted},
		{First: 1002, Last: 1002, Reason: frame.GapDeleted},
	}
	if msgs != 997 || !reflect.DeepEqual(gaps, want) {
		t.Errorf("%d messages, gaps %v", msgs, gaps)
	}
	if bs, err := c.Read(nil, 1); len(bs) != 0 || err != nil {
		t.Errorf("at the end: %d batches, %v", len(bs), err)
	}
}

// A message that the edge's disk has lost leaves a gap, and all others go out.
func TestCursorPassesDamaged(t *testing.T) {
	src := newFake()
	for range 12 {
		src.add(5000)
	}
	src.remove(3)
	src.bad = map[uint64]int{1: 99, 4: 99, 8: 99, 9: 99, 12: 99}
	d := Decision{State: State{Incarnation: 1, Base: 1}, Next: 1, Chain: frame.Seed(src.uid, 1, 1)}
	c := NewCursor(src, 3, &d, false, 0)
	var all []*Batch
	for c.Next() <= src.last {
		bs, err := c.Read(nil, 10_000)
		if err != nil || len(bs) == 0 {
			t.Fatalf("%d batches, %v", len(bs), err)
		}
		all = append(all, bs...)
	}
	var seqs []uint64
	var gaps []frame.Gap
	for _, b := range decode(t, all) {
		for _, m := range b.Msgs {
			seqs = append(seqs, m.Seq)
		}
		gaps = append(gaps, b.Gaps...)
	}
	want := []frame.Gap{
		{First: 1, Last: 1, Reason: frame.GapDamaged},
		{First: 3, Last: 3, Reason: frame.GapDeleted},
		{First: 4, Last: 4, Reason: frame.GapDamaged},
		{First: 8, Last: 8, Reason: frame.GapDamaged},
		{First: 9, Last: 9, Reason: frame.GapDamaged},
		{First: 12, Last: 12, Reason: frame.GapDamaged},
	}
	if fmt.Sprint(seqs) != "[2 5 6 7 10 11]" || !reflect.DeepEqual(gaps, want) {
		t.Errorf("messages %v, gaps %v", seqs, gaps)
	}
	if _, whole, err := Chain(src)(frame.Rung{Through: 1}, 5); whole || err != nil {
		t.Errorf("a chain over damage: %v, %v", whole, err)
	}
}

// The first batch of a connection is small and the next ones double, so that
// the hub has something to store after the first flight of packets.
func TestCursorStartsSmall(t *testing.T) {
	src := newFake()
	for range 400 {
		src.add(500)
	}
	d := Decision{State: State{Incarnation: 1, Base: 1}, Next: 1, Chain: frame.Seed(src.uid, 1, 1)}
	bs, err := NewCursor(src, 3, &d, false, 0).Read(nil, 1<<20)
	if err != nil || len(bs) < 5 {
		t.Fatalf("%d batches, %v", len(bs), err)
	}
	limit := firstBatch
	for i, b := range bs[:5] {
		if n := len(b.Frames); n > min(limit*5/4, frame.MaxFrame) || n < limit*3/4 {
			t.Errorf("batch %d has %d bytes, want about %d", i, n, limit)
		}
		limit = min(2*limit, frame.MaxFrame)
	}
}

func TestCursorRefusesTooLarge(t *testing.T) {
	src := newFake()
	src.add(10)
	src.add(2000)
	src.add(10)
	d := Decision{State: State{Incarnation: 1, Base: 1}, Next: 1}
	c := NewCursor(src, 1, &d, false, 1000)
	bs, err := c.Read(nil, 1<<20)
	var large *TooLargeError
	if !errors.As(err, &large) || large.Seq != 2 || len(bs) != 1 || bs[0].Rung.Through != 1 {
		t.Fatalf("%d batches, %v", len(bs), err)
	}
	src.remove(2)
	if bs, err = c.Read(nil, 1<<20); err != nil || len(bs) != 1 || bs[0].Rung.Through != 3 || bs[0].Missing != 1 {
		t.Fatalf("after its removal: %d batches, %v", len(bs), err)
	}
}

// A damaged message does not stop an export: the hub is told of a gap. It has
// to fail twice, though.
func TestCursorDamaged(t *testing.T) {
	src := newFake()
	for range 12 {
		src.add(10)
	}
	src.remove(7)
	const always = 1 << 30
	src.bad = map[uint64]int{1: always, 3: 1, 5: always, 6: always, 8: always, 12: always}
	d := Decision{State: State{Incarnation: 1, Base: 1}, Next: 1, Chain: frame.Seed(src.uid, 1, 1)}
	bs, err := NewCursor(src, 1, &d, false, 0).Read(nil, 1<<20)
	if err != nil || len(bs) != 1 || !reflect.DeepEqual(bs[0].Damaged, []uint64{1, 5, 6, 8, 12}) || bs[0].Missing != 6 {
		t.Fatalf("%d batches, %v", len(bs), err)
	}
	b := decode(t, bs)[0]
	var got []uint64
	for _, m := range b.Msgs {
		got = append(got, m.Seq)
	}
	if want := []uint64{2, 3, 4, 9, 10, 11}; !reflect.DeepEqual(got, want) {
		t.Errorf("messages %v, want %v", got, want)
	}
	if want := "[{1 1 damaged} {5 5 damaged} {6 6 damaged} {7 7 deleted} {8 8 damaged} {12 12 damaged}]"; fmt.Sprint(b.Gaps) != want {
		t.Errorf("gaps %v, want %v", b.Gaps, want)
	}
}

// syncing is a stream whose removals are durable only after Sync.
type syncing struct {
	*fake
	syncs int
	fail  error
}

func (s *syncing) Sync() error { s.syncs++; return s.fail }

// A gap leaves only when what was removed cannot come back.
func TestCursorSyncsGaps(t *testing.T) {
	src := &syncing{fake: newFake()}
	for range 5 {
		src.add(10)
	}
	d := Decision{State: State{Incarnation: 1, Base: 1}, Next: 1, Chain: frame.Seed(src.uid, 1, 1)}
	c := NewCursor(src, 1, &d, false, 0)
	if bs, err := c.Read(nil, 1<<20); err != nil || len(bs) != 1 || src.syncs != 0 {
		t.Fatalf("%d batches, %v, synced %d times without a gap", len(bs), err, src.syncs)
	}
	for range 5 {
		src.add(10)
	}
	src.remove(8)
	src.fail = storage.ErrFailed
	if bs, err := c.Read(nil, 1<<20); !errors.Is(err, storage.ErrFailed) || len(bs) != 0 || c.Next() != 6 {
		t.Fatalf("%d batches up to %d, %v", len(bs), c.Next(), err)
	}
	src.fail = nil
	if bs, err := c.Read(nil, 1<<20); err != nil || len(bs) != 1 || bs[0].Gaps != 1 || c.Next() != 11 {
		t.Fatalf("%d batches up to %d, %v", len(bs), c.Next(), err)
	}
}

// Damage to what the hub has already does not keep an export from going on.
func TestResumeOverDamaged(t *testing.T) {
	src := newFake()
	for range 20 {
		src.add(10)
	}
	hub, st := fill(t, src)
	src.bad = map[uint64]int{18: 1 << 30}
	d, err := Resume(st, src.DurableState(), hub.pos, true, Chain(src))
	if err != nil || d.Action != Continue || d.Next != 21 {
		t.Fatalf("%+v, %v", d, err)
	}
}

func TestStateRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := State{
			UID: frame.UID{1, 2}, Incarnation: rapid.Uint64().Draw(t, "inc"), Base: rapid.Uint64().Draw(t, "base"),
			Regressions: rapid.Uint64().Draw(t, "reg"), Origin: rapid.Uint64().Draw(t, "origin"), Adopted: rapid.Bool().Draw(t, "adopted"),
			Prior: Prior{rapid.Uint64().Draw(t, "pinc"), frame.Rung{Through: rapid.Uint64().Draw(t, "pthrough"), Chain: frame.Chain{3}}},
			Floor: [2]frame.Rung{{Through: 5}, {Through: rapid.Uint64().Draw(t, "floor")}},
		}
		through := uint64(0)
		for range rapid.IntRange(0, 2*MaxLadder).Draw(t, "rungs") {
			through += rapid.Uint64Range(1, 1<<50).Draw(t, "step")
			s.Acknowledge(frame.Rung{Through: through, Chain: frame.Chain{rapid.Byte().Draw(t, "c")}})
		}
		b := s.Encode()
		got, err := DecodeState(b)
		if err != nil || !reflect.DeepEqual(got, s) {
			t.Fatalf("%+v, %v\nwant %+v", got, err, s)
		}
		if _, err := DecodeState(b[:rapid.IntRange(0, len(b)-1).Draw(t, "cut")]); err == nil {
			t.Fatal("cut short, and not noticed")
		}
	})
}

// loser is a fake that knows what damage has taken.
type loser struct {
	*fake
	spans []storage.Span
}

func (l *loser) Lost(from uint64) (spans []storage.Span) {
	for _, s := range l.spans {
		if s.Last >= from {
			spans = append(spans, storage.Span{First: max(s.First, from), Last: s.Last})
		}
	}
	return spans
}

// Messages that a repair of the stream has given up are told apart from those
// that were removed or deleted.
func TestCursorTellsLost(t *testing.T) {
	src := &loser{fake: newFake(), spans: []storage.Span{{First: 2, Last: 3}, {First: 6, Last: 8}, {First: 11, Last: 12}}}
	for range 12 {
		src.add(10)
	}
	for _, q := range []uint64{1, 2, 3, 5, 6, 7, 8, 11, 12} {
		src.remove(q)
	}
	d := Decision{State: State{Incarnation: 1, Base: 1}, Next: 1, Chain: frame.Seed(src.uid, 1, 1)}
	bs, err := NewCursor(src, 3, &d, false, 0).Read(nil, 1<<20)
	if err != nil || len(bs) != 1 {
		t.Fatalf("%d batches, %v", len(bs), err)
	}
	if !reflect.DeepEqual(bs[0].Damaged, []uint64{2, 3, 6, 7, 8, 11, 12}) {
		t.Errorf("damaged are %v", bs[0].Damaged)
	}
	want := []frame.Gap{
		{First: 1, Last: 1, Reason: frame.GapRemoved},
		{First: 2, Last: 3, Reason: frame.GapDamaged},
		{First: 5, Last: 5, Reason: frame.GapDeleted},
		{First: 6, Last: 8, Reason: frame.GapDamaged},
		{First: 11, Last: 12, Reason: frame.GapDamaged},
	}
	if got := decode(t, bs)[0].Gaps; !reflect.DeepEqual(got, want) {
		t.Errorf("gaps %v, want %v", got, want)
	}
}
