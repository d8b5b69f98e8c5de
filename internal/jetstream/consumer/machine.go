package consumer

import (
	"hash/fnv"
	"maps"
	"slices"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
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
	// readAhead is how many messages are read from the store at once, unless they
	// are more octets than the Pump still delivers.
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
	// pauseLook is when to look whether the pause is over.
	pauseLook int64
	pinUntil  int64

	// Scratch.
	run     command.ConsumerDelivered
	runs    uint64
	octets  int // delivered in this run
	asked   int // push: octets delivered when Congested was asked last
	ahead   []storage.Message
	aheadAt int
	// aheadSize is how many octets a run has read ahead.
	aheadSize int
	want      int
	collect   func(storage.Message) bool
	buf       []byte // reply subject
	hdr       []byte // header blocks of status messages
	msgHdr    []byte // header block of a message
	cmd       []byte // records
	acked     []uint64
	expired   []uint64
}

func newMachine(name string, cfg *api.ConsumerConfig, created time.Time, env Env) *Machine {
	m := &Machine{
		name: name, cfg: cfg, created: created, env: env,
		pend: map[uint64]pending{}, redeliv: map[uint64]uint64{}, unsettled: map[uint64]struct{}{},
		dseq: 1,
	}
	m.collect = func(msg storage.Message) bool {
		m.ahead = append(m.ahead, msg)
		m.aheadSize += int(msg.Size())
		return len(m.ahead) < m.want && m.octets+m.aheadSize < pumpBytes
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
	m.paused = m.cfg.PauseUntil != nil && m.wall(now).Before(*m.cfg.PauseUntil)
	if m.paused {
		// The wall clock may leap, and nobody tells of it.
		end := api.UnixNano(m.cfg.PauseUntil.Add(-m.skew()))
		m.pauseLook = min(end, now.UnixNano()+int64(time.Minute))
	}
}

// wall returns what the wall clock says.
func (m *Machine) wall(now time.Time) time.Time { return now.Add(m.skew()) }

func (m *Machine) skew() time.Duration {
	if m.env.Skew == nil {
		return 0
	}
	return m.env.Skew()
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
