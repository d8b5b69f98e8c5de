package consumer

import (
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/subject"
	"petiole/storage"
)

const (
	// fcLimit and fcStart bound the octets that a flow-controlled client may
	// have outstanding: the window starts small and doubles with each answer.
	fcLimit = 32 << 20
	fcStart = fcLimit / 16

	// A Pump delivers no more than this before it gives the lock back.
	pumpMsgs  = 1024
	pumpBytes = 4 << 20
	// readAhead is how many messages are read from the store at once.
	readAhead = 128
	// congestedEvery is after how many octets a client is asked again whether
	// it keeps up, and congestedWait how long one is left alone that does not.
	congestedEvery = 128 << 10
	congestedWait  = int64(5 * time.Millisecond)

	// resetRevs is how far a reset advances the count of records, so that
	// records made before it was applied are recognised as void in replay. No
	// consumer makes as many records between proposing and applying.
	resetRevs = 1 << 32

	defaultInactive = 5 * time.Second
)

// pending is a message that awaits its acknowledgement.
type pending struct {
	dseq uint64 // consumer sequence of its first delivery
	ts   int64  // when the wait began, Unix ns
	due  int64  // when it is to be redelivered; 0: never
}

// Machine is one consumer. All its methods are called under the stream's lock.
// A Machine is made by [New] when the command that creates the consumer is
// applied, or by [Restore] from a checkpoint; the log is replayed into it with
// [Machine.Apply], [Machine.Update] and the Msg* methods; [Machine.Start] then
// makes it live. Before Start no effect but Sink.Acked is produced.
type Machine struct {
	name    string
	cfg     *api.ConsumerConfig
	created time.Time
	env     Env

	// Derived from the configuration.
	filter    storage.Filter // zero if everything is selected
	durable   bool           // records are made
	retain    bool           // the stream wants to know what is done (Sink.Acked)
	ackPrefix []byte         // "$JS.ACK.<stream>.<consumer>."
	inactive  int64          // threshold with jitter, ns; 0: none

	// Logged state.
	rev     uint64             // records made or applied
	sseq    uint64             // where to look for the next message
	dseq    uint64             // consumer sequence of the next delivery
	lastS   uint64             // highest stream sequence delivered (or start-1)
	floorD  uint64             // acknowledgement floor, consumer sequence
	floorS  uint64             // acknowledgement floor, stream sequence
	pend    map[uint64]pending // by stream sequence
	redeliv map[uint64]uint64  // redeliveries by stream sequence; kept when exhausted
	rdq     rdqueue            // to be redelivered now, a subset of pend
	skip    []uint64           // last-per-subject: what is delivered first, ascending
	resume  uint64             // after skip, look from here
	// What is done with while the record that says so is on its way through
	// the log; only where the stream wants to know. For the stream, it is not
	// done before.
	unsettled map[uint64]struct{}
	lastDlv   int64   // time of the last delivery, Unix ns; 0: never
	lastAck   int64   // time of the last acknowledgement
	dirty     bool    // changed since the last Snapshot
	order     fifo    // sequences in pend by first delivery, and some that left
	dues      dueHeap // pend by due time, and entries out of date

	// Live state.
	live     bool
	npc      int64  // messages not yet delivered for the first time
	npf      uint64 // counted up to here
	active   bool   // push: someone listens
	idle     int64  // push: since when nobody listens; pull: last activity
	paused   bool
	wait     waitQueue
	hbAt     int64 // push: next heartbeat
	hold     int64 // rate limit or original pace: nothing before this time
	maxOut   int   // flow control window; 0: none
	out      int   // octets outstanding
	fcSize   int   // octets that the answer to fcID covers
	fcID     string
	fcCount  uint64
	rate     limiter
	pace     bool // replaying at the original pace
	paceEnd  uint64
	paceLast int64 // time at which the last delivered message was stored
	pinID    string
	pinGroup string
	pinSince time.Time
	pinUntil int64

	// Scratch.
	run     command.ConsumerDelivered
	runs    uint64
	octets  int // delivered in this run
	asked   int // push: octets delivered when Congested was asked last
	ahead   []storage.Message
	aheadAt int
	want    int
	collect func(storage.Message) bool
	buf     []byte // reply subject
	hdr     []byte // header blocks of status messages
	msgHdr  []byte // header block of a message
	cmd     []byte // records
	acked   []uint64
	expired []uint64
}

func newMachine(name string, cfg *api.ConsumerConfig, created time.Time, env Env) *Machine {
	m := &Machine{
		name: name, cfg: cfg, created: created, env: env,
		pend: map[uint64]pending{}, redeliv: map[uint64]uint64{}, unsettled: map[uint64]struct{}{},
		dseq: 1,
	}
	m.collect = func(msg storage.Message) bool {
		m.ahead = append(m.ahead, msg)
		return len(m.ahead) < m.want
	}
	m.ackPrefix = []byte("$JS.ACK." + env.Stream.Name + "." + name + ".")
	m.run.Name = name
	m.configure()
	return m
}

// configure derives what depends on the configurations of consumer and stream.
func (m *Machine) configure() {
	m.filter = storage.Filter{}
	if fs := m.cfg.Filters(); len(fs) > 0 && !sameSet(fs, m.env.Stream.Subjects) {
		m.filter.Patterns = fs
	}
	// Once logged, always logged: the log's later records build on it.
	m.durable = m.durable || Logged(m.cfg, m.env.Stream)
	if m.retain = m.env.Stream.Retention != api.LimitsPolicy; !m.retain {
		clear(m.unsettled)
	}
	t := m.cfg.InactiveThreshold
	if t <= 0 && m.cfg.Durable == "" {
		t = defaultInactive
		m.cfg.InactiveThreshold = t
	}
	if m.inactive = span(t); t > 0 && !m.cfg.Push() {
		// Spread the removal of many consumers that were left at once.
		h := fnv.New32a()
		h.Write([]byte(m.name))
		m.inactive += int64(100*time.Millisecond) + int64(h.Sum32()%900)*int64(time.Millisecond)
	}
	m.rate.configure(m.cfg.RateLimit, m.maxMsg())
	if m.cfg.FlowControl && m.maxOut == 0 {
		m.maxOut = fcStart
	}
}

func (m *Machine) maxMsg() int {
	switch {
	case m.env.Stream.MaxMsgSize > 0:
		return int(m.env.Stream.MaxMsgSize)
	case m.env.MaxPayload > 0:
		return m.env.MaxPayload
	}
	return 1 << 20
}

func sameSet(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	for _, s := range a {
		if !slices.Contains(b, s) {
			return false
		}
	}
	return true
}

// New makes the machine of a consumer that is being created. cfg is a valid
// configuration with defaults filled in (see [Defaults], [Validate]), owned by
// the machine from now on. Where the consumer begins is decided here, from the
// stream's state.
func New(name string, cfg *api.ConsumerConfig, created time.Time, env Env) *Machine {
	m := newMachine(name, cfg, created, env)
	m.sseq = m.start()
	m.lastS, m.floorS = m.sseq-1, m.sseq-1
	m.dirty = true
	return m
}

// start selects the first sequence according to the deliver policy.
func (m *Machine) start() uint64 {
	st := m.env.Messages.State()
	// An empty stream's First is Last+1, so that nothing below needs to care.
	seq := st.First
	if seq == 0 {
		seq = st.Last + 1
	}
	first := seq
	switch m.cfg.DeliverPolicy {
	case api.DeliverLast:
		seq = st.Last
		if len(m.filter.Patterns) > 0 {
			seq = 0
			for _, p := range m.filter.Patterns {
				if msg, err := m.env.Messages.LoadLast(p, 0); err == nil {
					seq = max(seq, msg.Seq)
				}
			}
		}
	case api.DeliverLastPerSubject:
		if m.env.Stream.MaxMsgsPer == 1 {
			break // everything stored is the last of its subject
		}
		patterns := m.filter.Patterns
		if len(patterns) == 0 {
			patterns = []string{""}
		}
		for _, p := range patterns {
			m.env.Messages.Subjects(p, func(_ string, s storage.SubjectState) bool {
				m.skip = append(m.skip, s.Last)
				return true
			})
		}
		slices.Sort(m.skip)
		m.skip = slices.Compact(m.skip)
		m.resume = st.Last + 1
		if len(m.skip) == 0 {
			return m.resume
		}
		return m.skip[0]
	case api.DeliverNew:
		seq = st.Last + 1
	case api.DeliverByStartTime:
		if m.cfg.OptStartTime != nil {
			seq = m.env.Messages.SeqAtTime(api.UnixNano(*m.cfg.OptStartTime))
		}
	case api.DeliverByStartSequence:
		// A start beyond the end is kept: what comes before is not wanted.
		return max(m.cfg.OptStartSeq, first)
	}
	return max(min(seq, st.Last+1), first)
}

// Start makes the machine live: what replay may have left untrue about the
// stream's contents is put right, messages are counted, clocks are set. Call it
// once, after replay, or right after New for a consumer created live; then
// Pump, and Tick no later than Deadline.
func (m *Machine) Start(now time.Time) {
	m.live = true
	m.idle = now.UnixNano()
	m.setBack(now.UnixNano())
	m.reconcile()
	m.recount()
	m.schedule()
	m.pause(now)
	// The log has lost the records that a checkpoint was ahead of.
	for _, seq := range slices.Sorted(maps.Keys(m.unsettled)) {
		m.record(command.KindConsumerAck, seq, 1, now.UnixNano(), "")
	}
	if m.cfg.Push() {
		m.active = m.env.Sink.Interest(m.cfg.DeliverSubject)
		m.hbAt = now.UnixNano() + span(m.cfg.Heartbeat)
	}
	m.pace = m.cfg.ReplayPolicy == api.ReplayOriginal
	m.paceEnd = m.env.Messages.State().Last
}

// setBack moves the consumer's times to where the clock is, if it is behind the
// last event: it was set back, or was wrong before. Else what is to be
// redelivered would wait until the clock has caught up, days perhaps.
func (m *Machine) setBack(now int64) {
	ahead := max(m.lastDlv, m.lastAck) - now
	if ahead <= 0 {
		return
	}
	for seq, p := range m.pend {
		if p.ts > 0 {
			p.ts = max(p.ts-ahead, 1)
			m.pend[seq] = p
		}
	}
	m.lastDlv, m.lastAck = min(m.lastDlv, now), min(m.lastAck, now)
	m.dirty = true
}

// recount counts what has not been delivered yet.
func (m *Machine) recount() {
	st := m.env.Messages.State()
	m.npf = st.Last
	from := m.sseq
	if len(m.skip) > 0 {
		from = m.resume
	}
	m.npc = int64(len(m.skip))
	if from <= st.Last {
		m.npc += int64(m.env.Messages.NumPending(m.filter, from))
	}
}

// schedule computes anew when each pending message is to be redelivered.
func (m *Machine) schedule() {
	m.dues = m.dues[:0]
	m.order.reset()
	for seq := range m.pend {
		m.order.push(seq)
	}
	slices.Sort(m.order.q)
	for _, seq := range m.order.q {
		p := m.pend[seq]
		if p.due = 0; m.rdq.has(seq) {
			m.pend[seq] = p
			continue
		}
		m.rearm(seq, p)
	}
}

// span returns d in nanoseconds; a span so long that a time plus it might not
// be representable, as a client asks for that means "never", is shortened.
func span(d time.Duration) int64 {
	const century = 100 * 365 * 24 * time.Hour
	return int64(min(d, century))
}

// ackWait returns how long the message's acknowledgement is waited for.
func (m *Machine) ackWait(seq uint64) int64 {
	if l := len(m.cfg.BackOff); l > 0 {
		return span(m.cfg.BackOff[min(m.redeliv[seq], uint64(l-1))])
	}
	return span(m.cfg.AckWait)
}

// rearm stores p with the due time that its ts asks for.
func (m *Machine) rearm(seq uint64, p pending) {
	p.due = 0
	if w := m.ackWait(seq); w > 0 {
		p.due = max(p.ts+w, 1)
		m.dues.push(due{p.due, seq})
	}
	m.pend[seq] = p
	if len(m.dues) > 2*len(m.pend)+1024 {
		m.dues.filter(func(d due) bool { q, ok := m.pend[d.seq]; return ok && q.due == d.at })
	}
}

// Name returns the consumer's name.
func (m *Machine) Name() string { return m.name }

// Created returns the consumer's time of creation.
func (m *Machine) Created() time.Time { return m.created }

// Config returns the current configuration, which must not be changed.
func (m *Machine) Config() *api.ConsumerConfig { return m.cfg }

// Logged reports whether a consumer's state is kept in the log. Not if it, or
// its stream, is in memory; but what consumers have acknowledged decides what a
// stream with interest retention holds, and that must be found again by replay:
// there, a consumer asked to be in memory is kept like any other.
func Logged(cfg *api.ConsumerConfig, stream *api.StreamConfig) bool {
	return stream.Storage == api.FileStorage && (!cfg.MemoryStorage || stream.Retention == api.InterestPolicy)
}

// Durable reports whether the machine's state is logged and checkpointed. If
// not, Record is never called, Snapshot is of no use, and the consumer is gone
// after a restart; its creation need not be logged.
func (m *Machine) Durable() bool { return m.durable }

// record hands an event to the log, or answers at once if there is none.
func (m *Machine) record(kind command.Kind, seq, dseq uint64, t int64, ackReply string) {
	m.dirty = true
	if !m.durable {
		if ackReply != "" {
			m.env.Sink.Status(ackReply, "", nil)
		}
		return
	}
	m.rev++
	e := command.ConsumerEvent{Kind: kind, Name: m.name, Rev: m.rev, Seq: seq, DSeq: dseq, Time: t}
	m.cmd = e.Append(m.cmd[:0])
	m.env.Sink.Record(m.cmd, ackReply)
}

// Apply carries out a logged command of the kinds Delivered, Ack, Nak,
// Progress, Term, Exhausted and Reset, when it becomes durable and when it is
// replayed. (Create and Delete are the owner's business: [New],
// [Machine.Update], [Machine.Deleted].) cmd is not retained. The error says
// that cmd is malformed.
func (m *Machine) Apply(cmd []byte) error {
	if rev := command.ConsumerRev(cmd); rev != 0 && rev <= m.rev && !m.retain {
		return nil // the usual case while live
	}
	if command.KindOf(cmd) == command.KindConsumerDelivered {
		var c command.ConsumerDelivered
		if err := c.Decode(cmd); err != nil {
			return fmt.Errorf("consumer %q: %w", m.name, err)
		}
		m.applyDelivered(&c)
		return nil
	}
	var e command.ConsumerEvent
	if err := e.Decode(cmd); err != nil {
		return fmt.Errorf("consumer %q: %w", m.name, err)
	}
	if e.Kind == command.KindConsumerReset {
		m.applyReset(e.Seq)
		return nil
	}
	if e.Rev > m.rev {
		m.rev = e.Rev
		m.dirty = true
		switch e.Kind {
		case command.KindConsumerAck, command.KindConsumerTerm:
			if e.DSeq > 0 {
				m.setAcked(e.Seq, e.Time)
			}
		case command.KindConsumerNak:
			m.setNak(e.Seq, e.Time)
		case command.KindConsumerProgress:
			m.setProgress(e.Seq, e.Time)
		case command.KindConsumerExhausted:
			m.setExhausted(e.Seq)
		}
	}
	if m.retain && e.DSeq > 0 && (e.Kind == command.KindConsumerAck || e.Kind == command.KindConsumerTerm) {
		m.settled(e.Seq)
		m.env.Sink.Acked(e.Seq, true)
	}
	return nil
}

func (m *Machine) applyDelivered(c *command.ConsumerDelivered) {
	if c.Rev > m.rev {
		m.rev = c.Rev
		m.dirty = true
		d := c.DSeq
		for _, r := range c.Ranges {
			for i := range r.Count {
				m.setDelivered(r.First+i, d, r.Attempt, c.Time)
				d++
			}
		}
	}
	if m.retain && m.cfg.AckPolicy == api.AckNone {
		for _, r := range c.Ranges {
			for i := range r.Count {
				m.settled(r.First + i)
				m.env.Sink.Acked(r.First+i, true)
			}
		}
	}
}

// unsettle notes that the stream will be told through the log that the message
// is done with.
func (m *Machine) unsettle(seq uint64) {
	if m.retain && m.durable {
		m.unsettled[seq] = struct{}{}
	}
}

func (m *Machine) settled(seq uint64) {
	if _, ok := m.unsettled[seq]; ok {
		delete(m.unsettled, seq)
		m.dirty = true
	}
}

// setDelivered notes a delivery, the attempt-th of the message.
func (m *Machine) setDelivered(seq, dseq, attempt uint64, t int64) {
	m.dseq = dseq + 1
	m.lastDlv = t
	if len(m.skip) > 0 && attempt == 1 {
		// Messages of the list that are gone were passed over.
		i, _ := slices.BinarySearch(m.skip, seq+1)
		if m.skip = m.skip[i:]; len(m.skip) == 0 {
			m.skip, m.sseq = nil, max(m.resume, seq+1)
		} else {
			m.sseq = seq + 1
		}
	} else {
		m.sseq = max(m.sseq, seq+1)
	}
	m.lastS = max(m.lastS, seq)
	if m.cfg.AckPolicy == api.AckNone {
		m.floorD, m.floorS = dseq, seq
		return
	}
	p, known := m.pend[seq]
	if attempt > 1 {
		m.rdq.remove(seq)
		m.redeliv[seq] = attempt - 1
	}
	if !known {
		p.dseq = dseq
		m.order.push(seq)
		if m.order.len() > 2*len(m.pend)+1024 {
			m.order.filter(func(s uint64) bool { _, ok := m.pend[s]; return ok || s == seq })
		}
	}
	p.ts = t
	m.rearm(seq, p)
}

// forget takes a message out of pend and moves the floor if it was the lowest.
func (m *Machine) forget(seq uint64) bool {
	m.rdq.remove(seq)
	if _, ok := m.pend[seq]; !ok {
		return false
	}
	low := m.lowest()
	delete(m.pend, seq)
	if len(m.pend) == 0 {
		m.settle()
	} else if low == seq {
		low = m.lowest()
		m.floorD, m.floorS = m.pend[low].dseq-1, low-1
	}
	return true
}

// settle puts the floor where nothing is pending.
func (m *Machine) settle() {
	m.order.reset()
	m.dues = m.dues[:0]
	m.floorD, m.floorS = m.dseq-1, m.lastS
}

// lowest returns the lowest pending sequence, or 0.
func (m *Machine) lowest() uint64 {
	for m.order.len() > 0 {
		seq := m.order.peek()
		if _, ok := m.pend[seq]; ok {
			return seq
		}
		m.order.pop()
	}
	return 0
}

// setAcked notes an acknowledgement according to the policy.
func (m *Machine) setAcked(seq uint64, t int64) {
	m.lastAck = t
	if m.cfg.AckPolicy != api.AckAll {
		m.forget(seq)
		delete(m.redeliv, seq)
		return
	}
	if seq <= m.floorS {
		return
	}
	d := uint64(0)
	for m.order.len() > 0 {
		s := m.order.peek()
		if p, ok := m.pend[s]; ok {
			if s > seq {
				break
			}
			d = p.dseq
			delete(m.pend, s)
			delete(m.redeliv, s)
			m.rdq.remove(s)
		}
		m.order.pop()
	}
	switch {
	case len(m.pend) == 0:
		m.settle()
	case d > 0:
		m.floorD, m.floorS = d, seq
	}
}

func (m *Machine) setNak(seq uint64, ts int64) {
	p, ok := m.pend[seq]
	if !ok {
		return
	}
	if ts == 0 {
		p.due = 0
		m.pend[seq] = p
		m.rdq.push(seq)
		return
	}
	m.rdq.remove(seq)
	p.ts = ts
	m.rearm(seq, p)
}

func (m *Machine) setProgress(seq uint64, ts int64) {
	if p, ok := m.pend[seq]; ok {
		p.ts = ts
		m.rearm(seq, p)
	}
}

// setExhausted ends the attempts to deliver a message, but remembers it: the
// stream keeps it (see NeedsAck). The floor stays until the next
// acknowledgement, since this was none.
func (m *Machine) setExhausted(seq uint64) {
	m.redeliv[seq]++
	delete(m.pend, seq)
	m.rdq.remove(seq)
}

func (m *Machine) applyReset(seq uint64) {
	m.rev += resetRevs
	m.dirty = true
	clear(m.pend)
	clear(m.redeliv)
	m.rdq.reset()
	m.order.reset()
	m.dues = m.dues[:0]
	m.skip, m.resume = nil, 0
	m.sseq, m.dseq, m.lastS = seq, 1, seq-1
	m.floorD, m.floorS = 0, seq-1
	m.lastDlv, m.lastAck = 0, 0
	if m.live {
		m.recount()
	}
}

// Reset makes the command that moves the consumer to the sequence, or (0) back
// to its acknowledgement floor, for the owner to propose and wait for; Pump
// after it was applied. The error is the API's.
func (m *Machine) Reset(seq uint64) (cmd []byte, resetSeq uint64, err *api.Error) {
	refuse := func(why string) ([]byte, uint64, *api.Error) {
		return nil, 0, api.ErrConsumerInvalidReset.With("err", why)
	}
	if seq == 0 {
		seq = m.floorS + 1
	} else {
		switch m.cfg.DeliverPolicy {
		case api.DeliverAll:
		case api.DeliverByStartSequence:
			if seq < m.cfg.OptStartSeq {
				return refuse("below start seq")
			}
		case api.DeliverByStartTime:
			if seq < m.env.Messages.SeqAtTime(api.UnixNano(*m.cfg.OptStartTime)) {
				return refuse("below start time")
			}
		default:
			return refuse("not allowed")
		}
	}
	e := command.ConsumerEvent{Kind: command.KindConsumerReset, Name: m.name, Seq: max(seq, 1)}
	return e.Append(nil), e.Seq, nil
}

// Update gives the consumer a new configuration, which [ValidateUpdate] let
// pass; owned by the machine from now on. Called when the command is applied,
// live or in replay. Pump afterwards.
func (m *Machine) Update(now time.Time, cfg *api.ConsumerConfig) {
	old := m.cfg
	m.cfg = cfg
	m.dirty = true
	m.configure()
	m.schedule()
	refiltered := !sameSet(cfg.Filters(), old.Filters())
	if refiltered && len(m.skip) == 0 {
		// What the old filter has passed over is no part of the logged state: the
		// new one begins behind the last delivery, now and after a restart.
		m.sseq = m.lastS + 1
	}
	if cfg.DeliverSubject != old.DeliverSubject {
		// The old subscriber will not answer for what it got.
		m.expired = m.expired[:0]
		for seq := range m.pend {
			m.expired = append(m.expired, seq)
		}
		m.requeue(now.UnixNano())
	}
	if !m.live {
		return
	}
	if cfg.DeliverSubject != old.DeliverSubject {
		m.InterestChanged(now, m.env.Sink.Interest(cfg.DeliverSubject))
	}
	if cfg.InactiveThreshold != old.InactiveThreshold {
		m.idle = now.UnixNano()
	}
	m.pause(now)
	if refiltered {
		m.recount()
	}
}

// StreamUpdated says that the configuration that Env.Stream points to has
// changed.
func (m *Machine) StreamUpdated() {
	was := m.durable
	m.configure()
	m.dirty = m.dirty || m.durable != was
	if m.live {
		m.recount()
	}
}

func (m *Machine) pause(now time.Time) {
	m.paused = m.cfg.PauseUntil != nil && now.Before(*m.cfg.PauseUntil)
}

// MsgAppended says that a message was stored. Pump delivers it.
func (m *Machine) MsgAppended(seq uint64, subject string) {
	if m.live && seq > m.npf && m.Wants(subject) {
		if seq >= m.sseq {
			m.npc++
		}
		m.npf = seq
	}
}

// MsgRemoved says that a message was removed from the stream, by a limit, by
// age, by a client, or because everybody acknowledged it. What awaited an
// acknowledgement of it counts as acknowledged.
func (m *Machine) MsgRemoved(seq uint64, subject string) {
	if i, ok := slices.BinarySearch(m.skip, seq); ok {
		m.skip = slices.Delete(m.skip, i, i+1)
		m.npc--
		if len(m.skip) == 0 {
			m.sseq = max(m.sseq, m.resume)
		}
		m.dirty = true
	} else if m.live && seq >= m.sseq && (len(m.skip) == 0 || seq >= m.resume) && m.Wants(subject) {
		m.npc--
	}
	if p, ok := m.pend[seq]; ok {
		m.lost(seq, p)
	} else if _, ok := m.redeliv[seq]; ok {
		delete(m.redeliv, seq)
		m.dirty = true
	}
}

// lost drops a pending message that the stream no longer has.
func (m *Machine) lost(seq uint64, p pending) {
	n := m.redeliv[seq] + 1
	m.forget(seq)
	delete(m.redeliv, seq)
	m.dirty = true
	if m.live {
		m.advise(api.AdvisoryTerminated, api.AdvisoryTerminatedSubject, api.ConsumerAdvisory{
			ConsumerSeq: p.dseq, StreamSeq: seq, Deliveries: n, Reason: "Unacknowledged message was deleted",
		})
	}
}

// MsgsPurged says that any number of messages were removed at once; it
// inspects the stream instead of being told which.
func (m *Machine) MsgsPurged() {
	m.reconcile()
	if st := m.env.Messages.State(); len(m.pend) == 0 && st.First > 0 && m.floorS < st.First-1 {
		// Nothing below the first message will ever be delivered.
		m.lastS = max(m.lastS, st.First-1)
		m.floorS = max(m.floorS, st.First-1)
	}
	if m.live {
		m.recount()
	}
}

// reconcile drops what refers to messages that the stream no longer has.
func (m *Machine) reconcile() {
	st := m.env.Messages.State()
	gone := func(seq uint64) bool {
		if seq < st.First {
			return true
		}
		_, err := m.env.Messages.Load(seq)
		return err != nil
	}
	m.expired = m.expired[:0]
	for seq := range m.pend {
		if gone(seq) {
			m.expired = append(m.expired, seq)
		}
	}
	slices.Sort(m.expired)
	for _, seq := range m.expired {
		m.forget(seq)
		delete(m.redeliv, seq)
	}
	for seq := range m.redeliv {
		if gone(seq) {
			delete(m.redeliv, seq)
		}
	}
	for seq := range m.unsettled {
		if gone(seq) {
			delete(m.unsettled, seq)
		}
	}
	if len(m.skip) > 0 {
		m.skip = slices.DeleteFunc(m.skip, gone)
		if len(m.skip) == 0 {
			m.sseq = max(m.sseq, m.resume)
		}
	}
	if m.sseq < st.First && len(m.skip) == 0 {
		m.sseq = st.First
	}
	m.dirty = true
}

// Wants reports whether the consumer's filter selects the subject.
func (m *Machine) Wants(subj string) bool {
	if len(m.filter.Patterns) == 0 {
		return true
	}
	for _, p := range m.filter.Patterns {
		if subject.Matches(p, subj) {
			return true
		}
	}
	return false
}

// NeedsAck reports whether the message is still wanted by this consumer: not
// yet delivered, or delivered and not acknowledged as far as the log goes, or
// given up after too many attempts. A stream with interest retention removes a message that no consumer
// needs.
func (m *Machine) NeedsAck(seq uint64, subj string) bool {
	if !m.Wants(subj) {
		return false
	}
	if _, ok := m.redeliv[seq]; ok {
		return true
	}
	if _, ok := m.unsettled[seq]; ok {
		return true
	}
	if m.cfg.AckPolicy == api.AckExplicit {
		if _, ok := m.pend[seq]; ok {
			return true
		}
		if len(m.skip) > 0 {
			_, ok := slices.BinarySearch(m.skip, seq)
			return ok || seq >= m.resume
		}
		return seq >= m.sseq
	}
	return seq > m.floorS
}

func (m *Machine) advise(typ, subj string, a api.ConsumerAdvisory) {
	a.Type, a.Stream, a.Consumer = typ, m.env.Stream.Name, m.name
	m.env.Sink.Advisory(subj+"."+a.Stream+"."+a.Consumer, &a)
}

// Deleted tells waiting clients that the consumer is gone. The machine must
// not be used afterwards.
func (m *Machine) Deleted() {
	if !m.live {
		return
	}
	for _, r := range m.wait.all() {
		m.status(r.reply, "409 Consumer Deleted", noCounts, 0)
	}
	m.wait.reset()
	m.live = false
}

// Leave tells waiting clients that the server is about to stop: nothing comes
// of their requests.
func (m *Machine) Leave() {
	for _, r := range m.wait.all() {
		m.status(r.reply, "409 Server Shutdown", r.n, r.bytes)
	}
	m.wait.reset()
}

// MarkDirty takes the clearing of Dirty by Snapshot back, if the checkpoint did
// not take place.
func (m *Machine) MarkDirty() { m.dirty = true }

// Dirty reports whether the state differs from the last Snapshot (or Restore).
func (m *Machine) Dirty() bool { return m.dirty }

// ParseAck takes a subject $JS.ACK.<stream>.<consumer>.<deliveries>.<stream
// seq>.<consumer seq>.<ns>.<pending> apart, or the longer form with domain and
// account hash before the stream. The names alias subject.
func ParseAck(subj string) (stream, consumer string, ref AckRef, ok bool) {
	rest, ok := strings.CutPrefix(subj, "$JS.ACK.")
	if !ok {
		return "", "", AckRef{}, false
	}
	var tok [10]string
	n := 0
	for n < len(tok) {
		t, r, more := strings.Cut(rest, ".")
		tok[n] = t
		n++
		rest = r
		if !more {
			break
		}
	}
	t := tok[:n]
	switch {
	case n == 7 && rest == "":
	case n >= 9:
		t = t[2:]
	default:
		return "", "", AckRef{}, false
	}
	ref.Deliveries, _ = parseUint(t[2])
	ref.Seq, ok = parseUint(t[3])
	if !ok {
		return "", "", AckRef{}, false
	}
	ref.ConsumerSeq, ok = parseUint(t[4])
	ts, _ := parseUint(t[5])
	ref.Time = int64(ts)
	ref.Pending, _ = parseUint(t[6])
	return t[0], t[1], ref, ok
}

func parseUint(s string) (uint64, bool) {
	if len(s) == 0 || len(s) > 20 {
		return 0, false
	}
	var v uint64
	for i := 0; i < len(s); i++ {
		c := s[i] - '0'
		if c > 9 {
			return 0, false
		}
		v = v*10 + uint64(c)
	}
	return v, true
}
