package simtest

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
)

var (
	flagSeeds  = flag.Int("seeds", 50, "how many seeds to simulate")
	flagSeed   = flag.Int64("seed", -1, "the only seed to simulate, with a trace of what happens")
	flagFirst  = flag.Uint64("first", 0, "the first seed")
	flagBroken = flag.String("broken", "", "what the disk's calls do not do: nofsync, nodirsync, retryfsync, boltnosync")
	flagFull   = flag.Bool("full", false, "have the disk full for a while in a third of the lives")
	flagTries  = flag.Int("tries", 1, "how often to simulate each seed")
)

func TestSimulation(t *testing.T) {
	first, n := *flagFirst, uint64(*flagSeeds)
	if *flagSeed >= 0 {
		first, n = uint64(*flagSeed), 1
	}
	if testing.Short() && n > 1 {
		n = max(n/10, 1)
	}
	var total counts
	start := time.Now()
	for seed := first; seed < first+n; seed++ {
		for range *flagTries {
			c, trace, err := simulate(t, seed, *flagBroken)
			total.add(&c)
			if *flagSeed >= 0 {
				t.Log(strings.Join(trace, "\n"))
			}
			if err != nil {
				if *flagSeed < 0 {
					t.Log(strings.Join(trace[max(0, len(trace)-150):], "\n"))
				}
				t.Fatalf("seed %d (after %d seeds in %v): %v", seed, seed-first, time.Since(start).Round(time.Millisecond), err)
			}
		}
	}
	t.Logf("%d seeds in %v: %+v", n, time.Since(start).Round(time.Millisecond), total)
	// A simulation that does nothing finds nothing.
	if min := int(n); n >= 25 && (total.Acked < 50*min || total.Cuts < min/2 || total.Lost < min/4 || total.Read < 15*min || total.InSweep < min/10) {
		t.Errorf("the simulation does too little: %+v", total)
	}
}

// TestBroken checks the simulation: what a missing or wrong call does to the
// store it has to find, and soon.
func TestBroken(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a while")
	}
	for broken, most := range map[string]uint64{"nofsync": 50, "nodirsync": 100, "retryfsync": 300, "boltnosync": 100} {
		t.Run(broken, func(t *testing.T) {
			for seed := range most {
				if _, _, err := simulate(t, seed, broken); err != nil {
					t.Logf("found with seed %d: %.300v", seed, err)
					return
				}
			}
			t.Errorf("not found with %d seeds", most)
		})
	}
}

// counts says what a simulation did.
type counts struct {
	Lives, Cuts, Kills, Clean, Errors int
	Ops, Acked, Refused               int
	Lost                              int // operations not acknowledged that were lost
	Read                              int // messages compared after a start
	Delivered, Acks                   int
	Full                              int // lives in which the disk was full for a while
	Sweeps                            int // deletions of consumers that left much to remove
	InSweep                           int // lives that ended before it was
}

func (c *counts) add(o *counts) {
	c.Lives += o.Lives
	c.Cuts += o.Cuts
	c.Kills += o.Kills
	c.Clean += o.Clean
	c.Errors += o.Errors
	c.Ops += o.Ops
	c.Acked += o.Acked
	c.Refused += o.Refused
	c.Lost += o.Lost
	c.Read += o.Read
	c.Delivered += o.Delivered
	c.Acks += o.Acks
	c.Full += o.Full
	c.Sweeps += o.Sweeps
	c.InSweep += o.InSweep
}

// sim is the simulation of one seed.
type sim struct {
	t       *testing.T
	rng     *rand.Rand
	m       *machine
	counts  counts
	trace   []string
	relaxed time.Duration // SyncInterval
	err     error

	// base is what no power cut can take, tail what has been acknowledged: the
	// same thing unless the log is synced later. ops are the operations since
	// base, of which the first done are in tail.
	base, tail *world
	ops        []*op
	done       int
	sure       int // of ops, so many are known to be there: the process was killed, or ended well

	count   int // for what has to be unique
	life    int // of streams
	now     int64
	started int64           // when the node was, of this life, Unix ns
	sent    map[string]bool // acknowledgements sent, by stream, life, consumer, sequence
	durable map[string]durable
	edges   map[string]*edge

	// Of one life of the node.
	slice    int  // Options.SweepSlice
	midSweep bool // the power is to fail in the midst of a sweep
	srv      *broker.Server
	e        *jetstream.Engine
	pub      *broker.Publisher
	failed   chan error
	broken   bool // the storage has said that it failed
	mu       sync.Mutex
	waiting  map[int]*op // by id
	replies  []reply
	arrived  []delivery
	deliver  []delivery // seen and not yet acknowledged
	inboxes  map[string]*broker.Subscription
	checkErr error // of a checkpoint asked for
	running  sync.WaitGroup
}

// durable is the last sequence that a stream showed to exporters.
type durable struct {
	life int
	last uint64
}

// op is an operation that was issued.
type op struct {
	id      int
	text    string
	apply   func(*world) result
	check   func(op *op, got *answer) string // what is wrong with the answer
	refused func()                           // called if it is; may be nil
	void    bool                             // known not to have come to the log
	meta    bool                             // creates or deletes a stream
	ran     bool                             // is in tail
	replied bool
	want    result
}

type reply struct {
	op   *op
	data []byte
	in   *ingested
	at   time.Time
}

type ingested struct {
	pos command.Position
	err error
}

// answer is what any request answers.
type answer struct {
	Error     *api.Error `json:"error"`
	Seq       uint64     `json:"seq"`
	Duplicate bool       `json:"duplicate"`
	Purged    uint64     `json:"purged"`
	in        *ingested
}

type delivery struct {
	stream, consumer, reply string
	msg                     storage.Message
}

// edge is the source of batches.
type edge struct {
	uid     [16]byte
	inc     uint64
	through uint64
	chain   [16]byte
}

func simulate(t *testing.T, seed uint64, broken string) (c counts, trace []string, err error) {
	s := &sim{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), m: newMachine(t, seed),
		sent: map[string]bool{}, durable: map[string]durable{}, edges: map[string]*edge{},
	}
	defer s.m.close()
	s.m.broken = broken
	s.m.bolt.SetNoSync(broken == "boltnosync")
	s.base = newWorld()
	s.tail = s.base
	if s.rng.IntN(4) == 0 {
		s.relaxed = 20 * time.Millisecond
	}
	defer watchdog(seed, time.Minute)()
	defer func() {
		if r := recover(); r != nil { // by synctest, for a deadlock
			if err = s.err; err == nil {
				err = fmt.Errorf("panic: %v", r)
			}
		}
		c, trace = s.counts, s.trace
	}()
	lives := 2 + s.rng.IntN(3)
	for i := range lives {
		s.runLife(i == lives-1)
		if s.err != nil {
			break
		}
	}
	return s.counts, s.trace, s.err
}

func (s *sim) logf(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf(format, args...))
}

func (s *sim) fail(format string, args ...any) {
	if s.err == nil {
		s.err = fmt.Errorf(format, args...)
		s.logf("FAILED: %v", s.err)
	}
}

// over reports whether this life has to end.
func (s *sim) over() bool { return s.err != nil || s.broken || s.m.off.Load() }

// runLife runs the node from its start to its end, in a bubble of its own: the
// clock of each is set anew.
func (s *sim) runLife(last bool) {
	s.counts.Lives++
	end := []string{"", "", "cut", "cut", "cut", "cut", "bolt", "bolt", "bolt", "eio", "sync", "bolteio", "sweep", "sweep", "sweep"}[s.rng.IntN(15)]
	power := s.rng.IntN(4) > 0 // or the process is killed
	// A sync that fails is rare, and the next checkpoint has what it lost: one seed
	// in some hundreds would show it.
	if s.m.broken == "retryfsync" {
		end, power = "sync", true
	}
	if last {
		end = ""
	}
	s.midSweep = end == "sweep"
	clean, opened := false, false
	synctest.Test(s.t, func(*testing.T) {
		s.m.boot()
		if s.rng.IntN(4) == 0 {
			time.Sleep(time.Duration(s.rng.Int64N(int64(200 * time.Hour)))) // the clock may be behind
		} else {
			time.Sleep(time.Until(time.Unix(0, s.now)) + time.Duration(s.rng.Int64N(int64(time.Hour))))
		}
		early := end != "" && end != "sweep" && s.rng.IntN(3) == 0
		if early {
			s.m.plan(end) // may happen during recovery
		}
		s.logf("life %d at %s, ends by %q, power cut: %v, sync interval %v", s.counts.Lives, time.Now().UTC().Format(time.DateTime), end, power, s.relaxed)
		if s.open() {
			opened = s.recovered(last)
			if !s.over() {
				if !early && end != "" {
					s.m.plan(end)
				}
				s.work(10 + s.rng.IntN(60))
				if s.m.wasFull.Load() && !s.over() {
					s.counts.Full++
					s.resumes()
				}
				if last && !s.over() {
					s.drain()
				}
			}
			clean = s.stop(end == "" && (last || s.rng.IntN(2) == 0))
		}
		s.now = max(s.now, time.Now().UnixNano())
	})
	if s.err != nil {
		return
	}
	switch {
	case clean:
		s.counts.Clean++
		s.takeAll()
		power = s.rng.IntN(2) == 0 // makes no difference
		s.sure = 0
	case !power:
		s.counts.Kills++
		if opened { // or it is as sure as it was
			s.sure = s.done
		}
	default:
		s.counts.Cuts++
		s.sure = 0
	}
	s.m.mu.Lock()
	s.logf("end: %s; power cut: %v", s.m.what, power)
	s.m.mu.Unlock()
	if err := s.m.next(power); err != nil {
		s.fail("%v", err)
	}
}

// takeAcked makes base what was acknowledged.
func (s *sim) takeAcked() {
	if s.base != s.tail {
		s.base = s.tail.clone()
	}
	s.ops, s.done = slices.Clone(s.ops[s.done:]), 0
}

// takeAll makes base everything that was issued, all of which is known to be
// safe.
func (s *sim) takeAll() {
	for _, o := range s.ops {
		if !o.void {
			s.run(o)
		}
	}
	s.done = len(s.ops)
	s.takeAcked()
}

// run applies an operation to tail.
func (s *sim) run(o *op) {
	if !o.ran {
		o.ran = true
		o.want = o.apply(s.tail)
	}
}

func (s *sim) open() bool {
	srv, err := broker.New(broker.Options{JetStream: true})
	if err != nil {
		s.fail("%v", err)
		return false
	}
	s.failed = make(chan error, 1)
	failed := s.failed
	s.broken = false
	s.slice = 1 + s.rng.IntN(3)
	s.e, err = jetstream.Open(jetstream.Options{
		Account: srv.Account(), Dir: s.m.dir, FS: s.m.fs(), SyncInterval: s.relaxed,
		SegmentSize: 16 << 10 << s.rng.IntN(3), WALBudget: 32 << 10, TableBudget: 16 << 10, SweepSlice: s.slice,
		OnFail: func(err error) { failed <- err },
	})
	if err != nil {
		s.logf("open: %v", err)
		if !s.m.off.Load() && !s.m.faulty() {
			s.fail("the store cannot be opened: %w", err)
		}
		s.counts.Errors++
		return false
	}
	s.started = time.Now().UnixNano()
	s.srv, s.pub = srv, srv.Account().NewPublisher()
	s.replies, s.arrived, s.deliver, s.waiting = nil, nil, nil, map[int]*op{}
	s.inboxes = map[string]*broker.Subscription{}
	sub, err := srv.Account().Handle("_SIM.R.*", s.onReply)
	if err != nil {
		s.fail("%v", err)
	}
	s.inboxes[""] = sub
	return true
}

// onReply runs on the engine's goroutines. What comes when the power is off was
// never sent.
func (s *sim) onReply(m *broker.Msg) {
	id, _ := strconv.Atoi(string(m.Subject[len("_SIM.R."):]))
	if s.m.off.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.waiting[id]
	if o == nil {
		o = &op{id: id, text: "answered twice"}
	}
	delete(s.waiting, id)
	s.replies = append(s.replies, reply{op: o, data: slices.Clone(m.Data), at: time.Now()})
}

// recovered compares what the store holds after a start with the model.
func (s *sim) recovered(last bool) bool {
	// Acknowledgements that only a checkpoint has kept are logged again.
	time.Sleep(time.Second)
	if s.settle(); s.over() {
		return false
	}
	o := s.observe()
	if s.settle(); o == nil || s.over() {
		return false
	}
	if !s.match(o) {
		return false
	}
	for name, d := range s.durable {
		st := s.base.streams[name]
		if st != nil && st.life == d.life && st.last < d.last {
			s.fail("stream %s: sequence %d was durable, the last one is %d", name, d.last, st.last)
		}
	}
	clear(s.durable)
	for _, st := range o.streams {
		s.counts.Read += len(st.msgs)
	}
	for _, st := range s.tail.streams {
		for name := range st.consumers {
			s.inbox(st.cfg.Name, name)
		}
	}
	for name, e := range s.edges {
		if st := s.tail.streams["HUB"]; st != nil {
			p := st.positions[name]
			e.inc, e.through, e.chain = max(p.Incarnation, 1), p.Through, p.Chain
		} else {
			e.inc, e.through = 1, 0
		}
		if e.through == 0 {
			e.chain = command.Seed(e.uid, e.inc, 1)
		}
	}
	return s.err == nil
}

// match finds the prefix of the operations since base that leaves what was
// observed, and makes that base and tail.
func (s *sim) match(o *observed) bool {
	w, first := s.base, ""
	for i := 0; ; i++ {
		at, d := w, w.differs(o, s.slack(), false)
		if i < s.sure {
			d = "too little is there, though the power did not fail"
		}
		if first == "" {
			first = d
		}
		if d != "" && s.relaxed > 0 {
			at = s.ahead(w, o, s.ops[i:])
		}
		if i < s.sure {
			at = nil
		}
		if d == "" || at != nil && at != w {
			at.differs(o, s.slack(), true)
			s.logf("recovered: %d of %d operations that were not sure to be there", i, len(s.ops))
			s.counts.Lost += len(s.ops) - i
			s.base, s.tail, s.ops, s.done, s.sure = at, at, nil, 0, 0
			at.begin(s.started)
			if s.relaxed > 0 {
				s.tail = at.clone()
			}
			return true
		}
		if i == len(s.ops) {
			s.fail("what was acknowledged is not what is there: %s; with everything that was tried: %s", first, d)
			return false
		}
		if o := s.ops[i]; !o.void {
			o.apply(w)
		}
	}
}

// ahead returns w with as many of the creations and deletions of streams in ops
// as o needs, nil if that does not help. With a sync interval, what streams
// there are may be known to the disk before the log is, which knows the rest.
func (s *sim) ahead(w *world, o *observed, ops []*op) *world {
	w = w.clone()
	for _, m := range ops {
		if m.meta && !m.void {
			m.apply(w)
			if w.differs(o, s.slack(), false) == "" {
				return w
			}
		}
	}
	return nil
}

func (s *sim) slack() *slack {
	return &slack{
		now: max(s.now, time.Now().UnixNano()),
		maybe: func(stream string, life int, consumer string, seq uint64) bool {
			return s.sent[ackKey(stream, life, consumer, seq)]
		},
	}
}

func ackKey(stream string, life int, consumer string, seq uint64) string {
	return fmt.Sprint(stream, "/", life, "/", consumer, "/", seq)
}

// observe reads everything that the engine holds.
func (s *sim) observe() *observed {
	o := &observed{streams: map[string]*ostream{}}
	for _, st := range s.e.Streams() {
		os := &ostream{cfg: st.Config(), state: st.State(), positions: map[string]command.Position{}, consumers: map[string]uint64{}}
		err := st.Range(0, func(m storage.Message) bool {
			os.msgs = append(os.msgs, m)
			return true
		})
		if err != nil && !s.over() {
			s.fail("reading stream %s: %v", st.Name(), err)
			return nil
		}
		for key, p := range st.Positions() {
			edge, _, _ := strings.Cut(key, "/")
			os.positions[edge] = p
		}
		for _, info := range st.ConsumerInfos() {
			os.consumers[info.Name] = info.NumPending + uint64(info.NumAckPending)
		}
		o.streams[st.Name()] = os
	}
	return o
}

// settle takes in what has been answered.
func (s *sim) settle() {
	synctest.Wait()
	select {
	case err := <-s.failed:
		s.broken = true
		s.logf("the storage failed: %v", err)
		if !s.m.off.Load() && !s.m.faulty() {
			s.fail("the storage failed: %w", err)
		}
	default:
	}
	s.mu.Lock()
	err := s.checkErr
	s.checkErr = nil
	s.mu.Unlock()
	if err != nil && !s.broken {
		s.broken = true // as the engine does when it makes one by itself
		s.logf("checkpoint: %v", err)
		if !s.m.off.Load() && !s.m.faulty() {
			s.fail("checkpoint: %w", err)
		}
	}
	for {
		s.mu.Lock()
		if len(s.replies) == 0 {
			s.mu.Unlock()
			break
		}
		r := s.replies[0]
		s.replies = s.replies[1:]
		s.mu.Unlock()
		s.answered(&r)
	}
	s.mu.Lock()
	arrived := s.arrived
	s.arrived = nil
	s.mu.Unlock()
	if n := len(arrived); n > 0 {
		seqs := make([]uint64, n)
		for i := range arrived {
			seqs[i] = arrived[i].msg.Seq
		}
		s.logf("delivered to %s/%s, ...: %v", arrived[0].stream, arrived[0].consumer, seqs)
	}
	for i := range arrived {
		s.delivered(&arrived[i])
	}
	if s.base == s.tail {
		s.ops, s.done = s.ops[s.done:], 0
	}
}

// delivered takes in a message that a consumer got.
func (s *sim) delivered(d *delivery) {
	st := s.tail.streams[d.stream]
	if st == nil {
		return
	}
	s.counts.Delivered++
	m := st.find(d.msg.Seq)
	switch {
	case d.msg.Seq > st.last:
		s.fail("consumer %s of %s got message %d, but %d is the last one", d.consumer, d.stream, d.msg.Seq, st.last)
	case m != nil && (string(m.Data) != string(d.msg.Data) || m.Subject != d.msg.Subject || string(m.Header) != string(d.msg.Header)):
		s.fail("consumer %s of %s got message %d as %s, want %s", d.consumer, d.stream, d.msg.Seq, show(&d.msg), show(m))
	case st.consumers[d.consumer] != nil && st.consumers[d.consumer][d.msg.Seq]:
		s.fail("consumer %s of %s got message %d again, which it has acknowledged", d.consumer, d.stream, d.msg.Seq)
	}
	s.deliver = append(s.deliver, *d)
}

// answered takes in one answer.
func (s *sim) answered(r *reply) {
	o := r.op
	o.replied = true
	if s.err != nil || o.apply == nil && o.check == nil {
		return
	}
	var a answer
	a.in = r.in
	if r.in == nil && len(r.data) > 0 {
		if err := json.Unmarshal(r.data, &a); err != nil {
			s.fail("op %d (%s): answer %q: %v", o.id, o.text, r.data, err)
			return
		}
	}
	i := slices.Index(s.ops, o)
	if kind := s.refusal(&a); kind != applied {
		o.void = kind == refused && !o.ran
		s.counts.Refused++
		if o.refused != nil {
			o.refused()
		}
		s.logf("op %d refused: %s %+v", o.id, r.data, r.in)
		if kind == refused && s.m.wasFull.Load() && !s.m.full.Load() && r.at.Sub(s.m.roomSince) > resumeWithin {
			s.fail("op %d (%s) is refused %v after there was room: %s %+v", o.id, o.text, r.at.Sub(s.m.roomSince), r.data, r.in)
		}
		if kind == unknown && !s.over() {
			s.fail("op %d (%s) is refused for no reason: %s %+v", o.id, o.text, r.data, r.in)
		}
		return
	}
	if i >= 0 {
		// It is in the log, and so is everything before it.
		for _, before := range s.ops[s.done:max(i+1, s.done)] {
			if !before.void {
				s.run(before)
			}
		}
		s.done = max(s.done, i+1)
	}
	s.counts.Acked++
	if o.check != nil && o.ran {
		if d := o.check(o, &a); d != "" {
			s.fail("op %d (%s): answer %s %+v: %s", o.id, o.text, r.data, r.in, d)
		}
	}
}

// What an answer says about whether the operation came to the log.
const (
	applied = iota // it did, whatever became of it
	refused        // it did not
	unknown        // the storage has failed
)

func (s *sim) refusal(a *answer) int {
	if a.in != nil {
		switch err := a.in.err; {
		case err == nil, errors.Is(err, command.ErrOutOfOrder), errors.Is(err, command.ErrStaleIncarnation), errors.Is(err, command.ErrDiverged):
			return applied
		case errors.Is(err, api.ErrInsufficientResources):
			return refused
		}
		return unknown
	}
	if a.Error == nil {
		return applied
	}
	switch a.Error.ErrCode {
	case api.ErrStreamWrongLastSequence.ErrCode, api.ErrSequenceNotFound.ErrCode:
		return applied
	case api.ErrInsufficientResources.ErrCode:
		return refused
	case api.ErrStreamCreate.ErrCode:
		if s.m.faulty() || s.m.wasFull.Load() {
			return refused // its file could not be made
		}
	case api.ErrStreamStoreFailed.ErrCode:
		if strings.HasPrefix(a.Error.Description, "maximum ") {
			return applied
		}
	}
	return unknown
}

// faulty reports whether this life has been given an error of the disk.
func (m *machine) faulty() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fault
}

// resumeWithin is how soon everything has to work again once a disk that was
// full has room.
const resumeWithin = 5 * time.Second

// resumes makes room on a disk that was full and waits until messages have to be
// taken again; what is refused after that is a failure.
func (s *sim) resumes() {
	if s.m.full.Load() {
		s.settle()
		s.m.makeRoom()
		s.logf("the disk is full: false")
	}
	time.Sleep(resumeWithin + time.Second)
	s.settle()
	for range 5 {
		if !s.over() && s.pick(takes) != nil {
			s.publish()
		}
	}
	s.settle()
}

// stop ends the life; clean says whether the node is to stop by itself. It
// reports whether it did.
func (s *sim) stop(clean bool) bool {
	if clean {
		s.quiesce()
	}
	s.running.Wait()
	s.settle()
	clean = clean && !s.over()
	if !clean {
		s.m.powerOff()
		if s.sweeping() {
			s.counts.InSweep++
			s.logf("in the midst of a sweep")
		}
	}
	err := s.e.Close()
	if err != nil && clean {
		s.fail("closing: %w", err)
	}
	s.settle()
	s.broken = false
	return clean
}

// sweeping reports whether the engine holds messages that no consumer is left
// for.
func (s *sim) sweeping() (yes bool) {
	es, ok := s.e.Stream("WANT")
	if !ok {
		return false
	}
	m := &mstream{cfg: es.Config()}
	infos := es.ConsumerInfos()
	_ = es.Range(0, func(msg storage.Message) bool { // what can still be read after the end
		yes = !slices.ContainsFunc(infos, func(c *api.ConsumerInfo) bool { return m.wants(c.Name, msg.Subject) })
		return !yes
	})
	return yes
}

// quiesce waits until everything issued has been answered.
func (s *sim) quiesce() {
	for range 600 {
		s.settle()
		if s.over() || !slices.ContainsFunc(s.ops, func(o *op) bool { return !o.replied }) {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	for _, o := range s.ops {
		if !o.replied {
			s.fail("op %d (%s) is not answered within a minute", o.id, o.text)
		}
	}
}

// inbox takes what is delivered to a consumer's pull requests.
func (s *sim) inbox(stream, consumer string) string {
	subject := "_SIM.D." + stream + "." + consumer
	if s.inboxes[subject] == nil {
		sub, err := s.srv.Account().Handle(subject, func(m *broker.Msg) {
			if len(m.Reply) == 0 || s.m.off.Load() {
				return // a status
			}
			d := delivery{stream: stream, consumer: consumer, reply: string(m.Reply)}
			d.msg = storage.Message{Subject: string(m.Subject), Header: slices.Clone(m.Header), Data: slices.Clone(m.Data)}
			d.msg.Seq, _ = strconv.ParseUint(strings.Split(d.reply, ".")[5], 10, 64)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.arrived = append(s.arrived, d)
		})
		if err != nil {
			s.fail("%v", err)
		}
		s.inboxes[subject] = sub
	}
	return subject
}
