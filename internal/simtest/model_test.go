package simtest

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/storage"
)

// world is what the engine should hold after a number of operations: written
// down as plainly as possible, and without knowing how the engine works.
type world struct {
	streams map[string]*mstream
}

type mstream struct {
	cfg       api.StreamConfig
	life      int // which of the streams that had the name
	msgs      []storage.Message
	last      uint64
	lastTime  int64
	ids       map[string]idEntry
	window    clocks                      // when ids were looked at last
	began     clocks                      // of this life of the node
	positions map[string]command.Position // by edge
	consumers map[string]map[uint64]bool  // by name; what was acknowledged
}

type idEntry struct {
	seq  uint64
	time int64 // by the steady clock
}

// clocks is a moment: what the clock that ids age by says, and what the wall
// clock does.
type clocks struct{ steady, wall int64 }

// begin sets the clocks that ids age by at a start of the node: they go on from
// where they were, by what has passed since by the wall clock. If that was set
// back nothing has, and if it is a day ahead of what is stored anywhere no more
// than up to that.
func (w *world) begin(wall int64) {
	newest := int64(0)
	for _, s := range w.streams {
		newest = max(newest, s.lastTime)
	}
	for _, s := range w.streams {
		if s.window.steady == 0 {
			s.began = clocks{wall, wall}
			continue
		}
		passed := wall - s.window.wall
		if newest != 0 && wall-newest >= int64(24*time.Hour) {
			passed = min(passed, newest-s.window.wall)
		}
		s.began = clocks{s.window.steady + max(passed, 0), wall}
	}
}

// result is what an operation answers.
type result struct {
	seq     uint64
	dup     bool
	code    uint16 // of the error, 0 if none
	removed uint64 // by a purge
	pos     command.Position
	posErr  error
}

func newWorld() *world { return &world{streams: map[string]*mstream{}} }

func (w *world) clone() *world {
	c := newWorld()
	for name, s := range w.streams {
		n := *s
		n.msgs = slices.Clone(s.msgs)
		n.ids = maps.Clone(s.ids)
		n.positions = maps.Clone(s.positions)
		n.consumers = map[string]map[uint64]bool{}
		for k, v := range s.consumers {
			n.consumers[k] = maps.Clone(v)
		}
		c.streams[name] = &n
	}
	return c
}

// create makes a stream. life tells it from earlier ones of the name.
func (w *world) create(cfg api.StreamConfig, life int) result {
	if w.streams[cfg.Name] == nil {
		w.streams[cfg.Name] = &mstream{
			cfg: cfg, life: life, ids: map[string]idEntry{},
			positions: map[string]command.Position{}, consumers: map[string]map[uint64]bool{},
		}
	}
	return result{}
}

// pub is a publish.
type pub struct {
	stream, subject string
	id              string
	expLast         int64 // Nats-Expected-Last-Sequence; -1: none
	expSubj         int64 // Nats-Expected-Last-Subject-Sequence; -1: none
	rollup          bool
	time            int64
	header, data    []byte
}

// block makes the header block.
func (p *pub) block() []byte {
	var b []byte
	add := func(key, format string, v any) {
		if b == nil {
			b = []byte("NATS/1.0\r\n")
		}
		b = fmt.Appendf(b, "%s: "+format+"\r\n", key, v)
	}
	if p.id != "" {
		add(stream.HeaderMsgID, "%s", p.id)
	}
	if p.expLast >= 0 {
		add(stream.HeaderExpectedLastSeq, "%d", p.expLast)
	}
	if p.expSubj >= 0 {
		add(stream.HeaderExpectedSubjSeq, "%d", p.expSubj)
	}
	if p.rollup {
		add(stream.HeaderRollup, "%s", "sub")
	}
	if b != nil {
		b = append(b, "\r\n"...)
	}
	return b
}

func (w *world) publish(p *pub) result {
	s := w.streams[p.stream]
	if s == nil {
		return result{code: api.ErrStreamNotFound.ErrCode}
	}
	m := storage.Message{Time: max(p.time, s.lastTime), Subject: p.subject, Header: p.header, Data: p.data}
	switch {
	case p.expSubj >= 0 && s.lastOf(p.subject) != uint64(p.expSubj), p.expLast >= 0 && s.last != uint64(p.expLast):
		return result{code: api.ErrStreamWrongLastSequence.ErrCode}
	}
	if p.id != "" {
		if now := s.began.steady + p.time - s.began.wall; now > s.window.steady {
			s.window = clocks{now, p.time}
		}
		maps.DeleteFunc(s.ids, func(_ string, e idEntry) bool { return e.time <= s.window.steady-int64(s.cfg.Duplicates) })
		if e, ok := s.ids[p.id]; ok {
			return result{seq: e.seq, dup: true}
		}
	}
	if s.cfg.Discard == api.DiscardNew && s.cfg.MaxMsgs > 0 && len(s.msgs) >= int(s.cfg.MaxMsgs) {
		return result{code: api.ErrStreamStoreFailed.ErrCode}
	}
	s.append(m)
	defer s.unwanted()
	if p.id != "" {
		s.ids[p.id] = idEntry{s.last, s.window.steady}
	}
	if p.rollup {
		seq := s.last
		s.remove(func(m *storage.Message) bool { return m.Subject == p.subject && m.Seq < seq })
	}
	s.enforce()
	return result{seq: s.last}
}

func (s *mstream) append(m storage.Message) {
	s.last++
	m.Seq = s.last
	s.lastTime = m.Time
	s.msgs = append(s.msgs, m)
}

func (s *mstream) lastOf(subject string) uint64 {
	for _, m := range slices.Backward(s.msgs) {
		if m.Subject == subject {
			return m.Seq
		}
	}
	return 0
}

// remove deletes what f selects and returns how much that was.
func (s *mstream) remove(f func(*storage.Message) bool) uint64 {
	n := len(s.msgs)
	s.msgs = slices.DeleteFunc(s.msgs, func(m storage.Message) bool { return f(&m) })
	return uint64(n - len(s.msgs))
}

func (s *mstream) find(seq uint64) *storage.Message {
	i, ok := slices.BinarySearchFunc(s.msgs, seq, func(m storage.Message, seq uint64) int {
		return int(int64(m.Seq) - int64(seq))
	})
	if !ok {
		return nil
	}
	return &s.msgs[i]
}

func (s *mstream) bytes() (n uint64) {
	for i := range s.msgs {
		n += s.msgs[i].Size()
	}
	return n
}

// enforce removes what is beyond the limits.
func (s *mstream) enforce() {
	if limit := s.cfg.MaxMsgsPer; limit > 0 {
		per := map[string]int64{}
		for _, m := range s.msgs {
			per[m.Subject]++
		}
		s.remove(func(m *storage.Message) bool {
			if per[m.Subject] <= limit {
				return false
			}
			per[m.Subject]--
			return true
		})
	}
	drop := 0
	if limit := int(s.cfg.MaxMsgs); limit > 0 && len(s.msgs) > limit {
		drop = len(s.msgs) - limit
	}
	if limit := s.cfg.MaxBytes; limit > 0 {
		n := s.bytes()
		for i := range s.msgs {
			if i >= drop && n <= uint64(limit) {
				break
			}
			n -= s.msgs[i].Size()
			drop = max(drop, i+1)
		}
	}
	s.msgs = slices.Delete(s.msgs, 0, drop)
}

func (w *world) update(cfg api.StreamConfig) result {
	s := w.streams[cfg.Name]
	if s == nil {
		return result{code: api.ErrStreamNotFound.ErrCode}
	}
	s.cfg = cfg
	s.enforce()
	return result{}
}

func (w *world) deleteStream(name string) result {
	if w.streams[name] == nil {
		return result{code: api.ErrStreamNotFound.ErrCode}
	}
	delete(w.streams, name)
	return result{}
}

func (w *world) deleteMsg(name string, seq uint64) result {
	s := w.streams[name]
	if s == nil {
		return result{code: api.ErrStreamNotFound.ErrCode}
	}
	if s.remove(func(m *storage.Message) bool { return m.Seq == seq }) == 0 {
		return result{code: api.ErrSequenceNotFound.ErrCode}
	}
	return result{}
}

func (w *world) purge(name string, req *api.StreamPurgeRequest) result {
	s := w.streams[name]
	if s == nil {
		return result{code: api.ErrStreamNotFound.ErrCode}
	}
	hit := func(m *storage.Message) bool {
		return (req.Sequence == 0 || m.Seq < req.Sequence) && (req.Subject == "" || m.Subject == req.Subject)
	}
	n := uint64(0)
	for i := range s.msgs {
		if hit(&s.msgs[i]) {
			n++
		}
	}
	n -= min(n, req.Keep)
	left := n
	s.remove(func(m *storage.Message) bool {
		if left == 0 || !hit(m) {
			return false
		}
		left--
		return true
	})
	return result{removed: n}
}

func (w *world) ingest(name string, in *command.Ingest) result {
	s := w.streams[name]
	if s == nil {
		return result{posErr: api.ErrStreamNotFound}
	}
	pos, ok := s.positions[in.Edge]
	switch {
	case ok && in.Incarnation < pos.Incarnation:
		return result{pos: pos, posErr: command.ErrStaleIncarnation}
	case ok && in.Incarnation == pos.Incarnation && in.Through <= pos.Through:
		return result{pos: pos}
	case ok && in.Incarnation == pos.Incarnation && in.First != pos.Through+1:
		return result{pos: pos, posErr: command.ErrOutOfOrder}
	case ok && in.Incarnation == pos.Incarnation && in.PrevChain != pos.Chain:
		return result{pos: pos, posErr: command.ErrDiverged}
	case !ok && in.First != in.Base: // what came before has been refused
		return result{pos: pos, posErr: command.ErrOutOfOrder}
	}
	for _, m := range in.Msgs {
		s.append(storage.Message{Time: max(m.Time, s.lastTime), Subject: m.Subject, Header: m.Header, Data: m.Data})
		s.enforce()
	}
	pos.Incarnation, pos.Through, pos.Chain = in.Incarnation, in.Through, in.Chain
	pos.Msgs += uint64(len(in.Msgs))
	for _, g := range in.Gaps {
		pos.Gaps += g.Last - g.First + 1
	}
	s.positions[in.Edge] = pos
	return result{pos: pos}
}

func (w *world) createConsumer(name, consumer string) result {
	s := w.streams[name]
	if s == nil {
		return result{code: api.ErrStreamNotFound.ErrCode}
	}
	if s.consumers[consumer] == nil {
		s.consumers[consumer] = map[uint64]bool{}
	}
	return result{}
}

func (w *world) deleteConsumer(name, consumer string) result {
	s := w.streams[name]
	if s == nil || s.consumers[consumer] == nil {
		return result{code: api.ErrConsumerNotFound.ErrCode}
	}
	delete(s.consumers, consumer)
	s.unwanted()
	return result{}
}

func (w *world) ack(name, consumer string, seq uint64) result {
	s := w.streams[name]
	if s == nil || s.consumers[consumer] == nil {
		return result{}
	}
	s.consumers[consumer][seq] = true
	if s.cfg.Retention == api.WorkQueuePolicy {
		s.remove(func(m *storage.Message) bool { return m.Seq == seq })
	}
	s.unwanted()
	return result{}
}

// unwanted removes what no consumer of a stream by interest waits for.
func (s *mstream) unwanted() {
	if s.cfg.Retention == api.InterestPolicy {
		s.remove(func(m *storage.Message) bool {
			for name, acked := range s.consumers {
				if s.wants(name, m.Subject) && !acked[m.Seq] {
					return false
				}
			}
			return true
		})
	}
}

// wants reports whether a consumer has messages of a subject. All have, but for
// C2 of WANT: there is much that only C1 keeps.
func (s *mstream) wants(consumer, subject string) bool {
	return s.cfg.Name != "WANT" || consumer != "C2" || subject == "want.a" || subject == "want.b"
}

// observed is what the engine holds.
type observed struct {
	streams map[string]*ostream
}

type ostream struct {
	cfg       api.StreamConfig
	state     storage.State
	msgs      []storage.Message
	positions map[string]command.Position // by edge
	consumers map[string]uint64           // by name; what is still to be acknowledged
}

// slack is what may differ from the model.
type slack struct {
	// maybe tells of acknowledgements that were sent and not confirmed: a
	// checkpoint may know them though the log has lost them.
	maybe func(stream string, life int, consumer string, seq uint64) bool
	now   int64 // no clock has been later, Unix ns: what may have expired
}

// differs says what of o is not as in w; "" if nothing. What it is entitled to
// differ in is taken over by w if adopt is set.
func (w *world) differs(o *observed, sl *slack, adopt bool) string {
	for name := range o.streams {
		if w.streams[name] == nil {
			return fmt.Sprintf("stream %s is there, and should not be", name)
		}
	}
	for name, s := range w.streams {
		os := o.streams[name]
		if os == nil {
			return fmt.Sprintf("stream %s is missing", name)
		}
		if d := s.differs(os, sl, adopt); d != "" {
			return fmt.Sprintf("stream %s: %s", name, d)
		}
	}
	return ""
}

func (s *mstream) differs(o *ostream, sl *slack, adopt bool) string {
	c, oc := &s.cfg, &o.cfg
	if c.Description != oc.Description || c.MaxMsgs != oc.MaxMsgs || c.MaxBytes != oc.MaxBytes || c.MaxMsgsPer != oc.MaxMsgsPer ||
		c.MaxAge != oc.MaxAge || c.Retention != oc.Retention || c.Discard != oc.Discard || !slices.Equal(c.Subjects, oc.Subjects) {
		return fmt.Sprintf("configuration is %+v, want %+v", oc, c)
	}
	if o.state.Last != s.last {
		return fmt.Sprintf("last sequence is %d, want %d", o.state.Last, s.last)
	}
	var gone []uint64
	i := 0
	for k := range s.msgs {
		want := &s.msgs[k]
		if i < len(o.msgs) && o.msgs[i].Seq == want.Seq {
			got := &o.msgs[i]
			i++
			if got.Subject != want.Subject || got.Time != want.Time || !bytes.Equal(got.Header, want.Header) || !bytes.Equal(got.Data, want.Data) {
				return fmt.Sprintf("message %d is %s, want %s", got.Seq, show(got), show(want))
			}
			continue
		}
		if i < len(o.msgs) && o.msgs[i].Seq < want.Seq {
			break // that one is reported, not those after it
		}
		if !s.mayBeGone(want, i == 0, sl) {
			return fmt.Sprintf("message %d (%s) is missing", want.Seq, show(want))
		}
		gone = append(gone, want.Seq)
	}
	if i < len(o.msgs) {
		return fmt.Sprintf("message %d (%s) should not be there", o.msgs[i].Seq, show(&o.msgs[i]))
	}
	first := s.last + 1
	var size uint64
	subjects := map[string]bool{}
	for k := range o.msgs {
		if k == 0 {
			first = o.msgs[0].Seq
		}
		size += o.msgs[k].Size()
		subjects[o.msgs[k].Subject] = true
	}
	st := &o.state
	if n := uint64(len(o.msgs)); st.Msgs != n || st.Bytes != size || st.First != first || st.Subjects != len(subjects) ||
		n > 0 && st.Deleted != st.Last-st.First+1-n {
		return fmt.Sprintf("state is %+v with %d messages from %d on, %d octets, %d subjects", *st, n, first, size, len(subjects))
	}
	if len(o.positions) != len(s.positions) {
		return fmt.Sprintf("%d positions, want %d", len(o.positions), len(s.positions))
	}
	for edge, want := range s.positions {
		got := o.positions[edge]
		if got.Incarnation != want.Incarnation || got.Through != want.Through || got.Chain != want.Chain || got.Msgs != want.Msgs || got.Gaps != want.Gaps {
			return fmt.Sprintf("position of %s is %+v, want %+v", edge, got, want)
		}
	}
	if len(o.consumers) != len(s.consumers) {
		return fmt.Sprintf("consumers %v, want %v", slices.Sorted(maps.Keys(o.consumers)), slices.Sorted(maps.Keys(s.consumers)))
	}
	for name, acked := range s.consumers {
		left, ok := o.consumers[name]
		if !ok {
			return fmt.Sprintf("consumer %s is missing", name)
		}
		var least, most uint64
		for k := range o.msgs {
			if seq := o.msgs[k].Seq; !acked[seq] && s.wants(name, o.msgs[k].Subject) {
				most++
				if !sl.maybe(s.cfg.Name, s.life, name, seq) {
					least++
				}
			}
		}
		if left < least || left > most {
			return fmt.Sprintf("consumer %s has %d messages left, want %d to %d of %d", name, left, least, most, len(o.msgs))
		}
	}
	if adopt && len(gone) > 0 {
		s.remove(func(m *storage.Message) bool { return slices.Contains(gone, m.Seq) })
	}
	return ""
}

// mayBeGone reports whether a message may be missing: it is the oldest and has
// expired, or was acknowledged in a work queue, or by all consumers where they
// decide.
func (s *mstream) mayBeGone(m *storage.Message, oldest bool, sl *slack) bool {
	if s.cfg.MaxAge > 0 && oldest && m.Time+int64(s.cfg.MaxAge) <= sl.now {
		return true
	}
	if s.cfg.Retention == api.WorkQueuePolicy {
		for name := range s.consumers {
			if sl.maybe(s.cfg.Name, s.life, name, m.Seq) {
				return true
			}
		}
	}
	if s.cfg.Retention == api.InterestPolicy {
		for name, acked := range s.consumers {
			if s.wants(name, m.Subject) && !acked[m.Seq] && !sl.maybe(s.cfg.Name, s.life, name, m.Seq) {
				return false
			}
		}
		return true
	}
	return false
}

// show describes a message in a line.
func show(m *storage.Message) string {
	d := m.Data
	if len(d) > 24 {
		d = d[:24]
	}
	return fmt.Sprintf("%s at %d %q %q, %d octets", m.Subject, m.Time, strings.ReplaceAll(string(m.Header), "\r\n", "|"), d, len(m.Data))
}
