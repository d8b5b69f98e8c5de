// Package jetstream is the JetStream engine: it opens a store directory, brings
// its streams and consumers back, takes published messages through the
// write-ahead log into the streams' machines, and answers the API on
// $JS.API.> subjects.
//
//	publisher ──► handler ──► Proposer ──► wal ──► onCommit ──► Machine.Apply
//	   ▲          (read loop)            (fdatasync)                 │
//	   └──────────────── PubAck ◄────────────────────────────────────┘
//
// Locks, in the order in which they are taken: Engine.apiMu (one change of the
// set of streams at a time), Stream.apiMu (one change of the set of consumers
// at a time), Stream.mu (the machines of a stream), Engine.mu. Under Stream.mu
// nothing waits for the log: records made there are proposed lazily. What is
// published inside the process, under whatever lock, reaches the engine's
// handlers on a goroutine of its own.
package jetstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/metadb"
	"petiole/storage/msgstore"
	"petiole/storage/vfs"
	"petiole/storage/wal"
)

// DefaultMaxPayload is the default of Options.MaxPayload.
const DefaultMaxPayload = 1 << 20

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

	// WALBudget is how many octets the log may have before publishers have to wait;
	// checkpoints make room from half of that on. Default 128 MiB. TableBudget is
	// how many octets all streams together may hold that are not checkpointed
	// before those are; at six times that publishers wait. Default 8 MiB.
	WALBudget   int64
	TableBudget int64
	// SweepSlice is how many messages of a stream with interest retention are
	// looked at in one go after one of its consumers was deleted. Default 1024.
	SweepSlice  int
	SegmentSize int64 // octets of a log segment; default 32 MiB

	// MaxOpenStores is how many streams may have their files open at a time for
	// long; default 128. IdleClose is how long a stream's file stays open unused,
	// below that number; default 30 s.
	MaxOpenStores int
	IdleClose     time.Duration

	Log *slog.Logger // default discards
	// OnFail is called once when the storage has failed. Nothing is
	// acknowledged any more: the process has to end and recover.
	OnFail func(error)

	scrubFirst time.Duration                                   // how long after the start the first scrub begins; scrubFirst, or a test's
	tidyEvery  time.Duration                                   // how often it is looked for files to compact; tidyEvery, or a test's
	salvage    func(dir string) (msgstore.RepairReport, error) // a test's, instead of repairing
	// openStore is msgstore.Open, or a test's.
	openStore func(dir string, o msgstore.Options) (backing, error)
}

// Defaults of Options.
const (
	DefaultMaxOpenStores = 128
	DefaultIdleClose     = 30 * time.Second
)

// ErrClosed says that the engine does not serve any more.
var ErrClosed = errors.New("JetStream has been closed")

// What the meta machine keeps in the meta database.
const (
	bucketMeta   = "jetstream"
	prefixStream = "stream/" // + group in decimal → JSON of streamRecord
	// The group of the next stream, and after a space those of the streams there
	// are, with commas: "4 2,3". A damaged page that hides a record would else
	// look like a stream that was deleted. Without a space the writer was older.
	keyNextGroup = "next_group"
)

func streamKey(g uint64) string { return prefixStream + strconv.FormatUint(g, 10) }

// streamRecord is what the meta machine knows of a stream.
type streamRecord struct {
	Name    string           `json:"name"`
	Group   uint64           `json:"group"`
	UID     []byte           `json:"uid"`
	Created int64            `json:"created"` // Unix nanoseconds
	Config  api.StreamConfig `json:"config"`
	// Sequences held at the last stop, and the position in the log that they
	// are of: where the stream goes on should its files be lost.
	First  uint64 `json:"first,omitempty"`
	Last   uint64 `json:"last,omitempty"`
	LastAt uint64 `json:"last_at,omitempty"`
}

// consumerRecord is what the meta machine knows of a consumer whose state is in
// its stream's store: what it is created anew with should that be lost.
type consumerRecord struct {
	Config  api.ConsumerConfig `json:"config"`
	Created int64              `json:"created"` // Unix nanoseconds
}

// Engine serves the streams of one store directory.
type Engine struct {
	o       Options
	log     *slog.Logger
	account *broker.Account
	lock    io.Closer
	meta    *metadb.DB
	wal     *wal.Log
	prop    proposer

	streams atomic.Pointer[map[string]*Stream] // replaced, never changed
	apiMu   sync.Mutex
	// downNames are the streams that do not serve; replaced, never changed.
	downNames atomic.Pointer[map[string]*downStream]
	damage    damageCounters
	// applyMu is held by recovery, by onCommit and by whoever takes a stream out
	// of service or back into it; what follows is under it.
	applyMu sync.Mutex
	groups  map[storage.GroupID]*Stream
	touched []*Stream
	acks    *broker.Publisher
	scratch []byte

	downs map[storage.GroupID]*downStream
	// Of recovery: records of the meta group may be lost, and the log has records
	// of groups that belong to no stream, from these on.
	metaLost bool
	orphans  map[storage.GroupID]storage.LSN
	lost     []wal.Lost // by recovery in the log, in its order; not changed after that

	book      *metaBook
	nextGroup uint64 // under mu; ahead of book.next by a creation on its way through the log
	lastLSN   atomic.Uint64
	live      bool // recovery is over
	closing   atomic.Bool
	failed    atomic.Bool
	failOnce  sync.Once
	failure   error // set before broken is closed

	mu       sync.Mutex
	prepared map[storage.GroupID]storage.Store // opened for a creation under way
	doomed   map[uint64]*Stream                // deleted, and not in the meta database any more: their files go
	losing   map[lostMsg]struct{}              // messages found damaged, to be given up
	suspects []suspect                         // whose readers have met damage
	watchers map[int]func()
	watchID  int

	memUsed, storeUsed  atomic.Int64
	maxMemory, maxStore atomic.Int64 // as in Options; see SetLimits
	apiTotal, apiErrors atomic.Uint64
	apiInflight         atomic.Int64
	subs                []*broker.Subscription
	async               asyncQueue     // messages published inside
	interest            asyncQueue     // listeners of push consumers; waits for streams' locks only
	wg                  sync.WaitGroup // goroutines that end with the engine, see spawn
	spawnMu             sync.Mutex
	ended               bool            // no more of them
	ending              context.Context // done when the engine is being closed
	end                 context.CancelFunc
	checkpointNow       chan struct{}
	apiSlots            chan struct{} // one element for each request that waits for the log
	done                chan struct{} // closed with the engine
	broken              chan struct{} // closed when the storage has failed
	sinceCheck          int64         // octets committed since the checkpointer was woken
	keepNow             chan struct{} // wakes the keeper
	ticks               atomic.Int64  // the keeper's, of which 6 make IdleClose
	openStores          atomic.Int64
	fewFiles            atomic.Bool  // somebody could not open a file: others are to be closed
	tableLimit          atomic.Int64 // of the tables of all streams, octets
	space               space
	begun               time.Time // when the streams began to serve
	ages                ageClock
	writes              writes
	trimMu              sync.Mutex // one trim at a time
	moveMu              sync.Mutex // see everyone; nothing is done under it but that
	logGate, tableGate  gate       // where publishers wait, see regulate
	tableBytes          atomic.Int64
	ackCount            atomic.Uint32 // acknowledgements: after every 64th of them it is looked at the log
	durMu               sync.Mutex
	awaitingSync        map[*Stream]struct{} // have applied what is not durable yet
}

// Open opens the store directory, recovers what it holds and begins to serve.
func Open(o Options) (_ *Engine, err error) {
	if o.Account == nil || o.Dir == "" {
		return nil, errors.New("opening JetStream: Account and Dir are required")
	}
	e := newEngine(o)
	o = e.o
	defer func() {
		if err != nil {
			err = fmt.Errorf("opening JetStream store %s: %w", o.Dir, err)
			_ = e.release() // the first error is the one to report
		}
	}()
	if err := o.FS.MkdirAll(o.Dir); err != nil {
		return nil, err
	}
	if e.lock, err = o.FS.Lock(filepath.Join(o.Dir, "LOCK")); err != nil {
		if errors.Is(err, vfs.ErrLocked) {
			err = fmt.Errorf("%w; stop that process or choose another store_dir: %w", storage.ErrLocked, err)
		}
		return nil, err
	}
	if err := e.recover(); err != nil {
		return nil, err
	}
	if err := e.settleLost(); err != nil {
		return nil, err
	}
	if err := e.start(); err != nil {
		return nil, err
	}
	return e, nil
}

// newEngine returns an engine that has done nothing yet.
func newEngine(o Options) *Engine {
	if o.FS == nil {
		o.FS = vfs.OS
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.WALBudget <= 0 {
		o.WALBudget = DefaultWALBudget
	}
	if o.SegmentSize <= 0 {
		o.SegmentSize = defaultSegmentSize
	}
	if o.TableBudget <= 0 {
		o.TableBudget = DefaultTableBudget
	}
	if o.SweepSlice <= 0 {
		o.SweepSlice = DefaultSweepSlice
	}
	if o.MaxPayload <= 0 {
		o.MaxPayload = DefaultMaxPayload
	}
	if o.MaxOpenStores <= 0 {
		o.MaxOpenStores = DefaultMaxOpenStores
	}
	if o.IdleClose <= 0 {
		o.IdleClose = DefaultIdleClose
	}
	if o.tidyEvery <= 0 {
		o.tidyEvery = tidyEvery
	}
	if o.scrubFirst <= 0 {
		o.scrubFirst = scrubFirst
	}
	if o.openStore == nil {
		o.openStore = func(dir string, o msgstore.Options) (backing, error) { return msgstore.Open(dir, o) }
	}
	e := &Engine{
		o: o, log: o.Log, account: o.Account,
		groups:        map[storage.GroupID]*Stream{},
		orphans:       map[storage.GroupID]storage.LSN{},
		downs:         map[storage.GroupID]*downStream{},
		prepared:      map[storage.GroupID]storage.Store{},
		losing:        map[lostMsg]struct{}{},
		watchers:      map[int]func(){},
		awaitingSync:  map[*Stream]struct{}{},
		acks:          o.Account.NewPublisher(),
		book:          newMetaBook(),
		doomed:        map[uint64]*Stream{},
		checkpointNow: make(chan struct{}, 1),
		keepNow:       make(chan struct{}, 1),
		apiSlots:      make(chan struct{}, maxInflight),
		done:          make(chan struct{}),
		broken:        make(chan struct{}),
		nextGroup:     uint64(storage.MetaGroup) + 1,
	}
	e.SetLimits(o.MaxMemory, o.MaxStore)
	e.ending, e.end = context.WithCancel(context.Background())
	e.tableLimit.Store(o.TableBudget)
	e.streams.Store(&map[string]*Stream{})
	e.downNames.Store(&map[string]*downStream{})
	return e
}

// start makes the recovered streams live and registers the handlers.
func (e *Engine) start() error {
	e.startClock()
	e.live = true
	e.writes.counting.Store(true)
	e.wg.Go(e.checkpointer)
	// What came back out of the log may exceed the tables' budget, and nobody
	// may publish for a long time.
	e.wakeCheckpointer()
	e.wg.Go(e.keeper)
	e.wg.Go(e.tidier)
	e.wg.Go(e.async.run)
	e.wg.Go(e.interest.run)
	for _, s := range *e.streams.Load() {
		if err := s.start(); err != nil {
			return err
		}
	}
	e.startRepairs()
	for subject, h := range map[string]broker.Handler{
		"$JS.API.>": e.onAPI,
		"$JS.ACK.>": e.onAck,
		"$JS.FC.>":  e.onFlow,
	} {
		sub, err := e.account.Handle(subject, h)
		if err != nil {
			return err
		}
		e.subs = append(e.subs, sub)
	}
	return nil
}

// Leave tells clients whose pull requests wait that the server is about to
// stop, so that they ask elsewhere or later. They have to be connected still.
func (e *Engine) Leave() {
	for _, s := range e.Streams() {
		s.mu.Lock()
		for _, c := range s.consumers {
			s.input(c, func(time.Time) { c.m.Leave() })
		}
		s.mu.Unlock()
	}
}

// Close stops serving, checkpoints every stream and releases the directory. A
// failure of the storage, which Options.OnFail is told of, is its error too.
// Clients should be gone: what they publish now is not acknowledged.
func (e *Engine) Close() error { return e.close(true) }

func (e *Engine) close(checkpoint bool) error {
	if e.closing.Swap(true) {
		return nil
	}
	for _, s := range e.subs {
		s.Close()
	}
	for _, s := range *e.streams.Load() {
		s.stop()
	}
	e.async.close()
	e.interest.close()
	close(e.done)
	var errs []error
	e.end()
	if checkpoint && !e.failed.Load() {
		errs = append(errs, e.wal.Sync())
	}
	e.spawnMu.Lock()
	e.ended = true
	e.spawnMu.Unlock()
	e.wg.Wait()
	if checkpoint && !e.failed.Load() {
		for _, s := range *e.streams.Load() {
			err := e.kept(s)
			errs = append(errs, err)
			if errors.Is(err, storage.ErrFailed) { // the others have the log
				return errors.Join(append(errs, e.release())...)
			}
			s.remember()
		}
		if err := e.saveAndDestroy(); !noSpace(err) { // the log has it
			errs = append(errs, err)
		}
		errs = append(errs, e.parkLogs())
		if len(slices.DeleteFunc(slices.Clone(errs), func(err error) bool { return err == nil })) == 0 {
			errs = append(errs, e.trim())
		}
	}
	if checkpoint && !e.failed.Load() {
		errs = append(errs, e.saveWritten(0))
	}
	errs = append(errs, e.release())
	select {
	case <-e.broken: // it may have been since the closing began, with nobody left to hear of it
		errs = append(errs, e.failure)
	default:
	}
	return errors.Join(errs...)
}

// spawn runs fn on a goroutine that Close waits for; it reports false if that
// has begun to.
func (e *Engine) spawn(fn func()) bool {
	e.spawnMu.Lock()
	defer e.spawnMu.Unlock()
	if e.ended {
		return false
	}
	e.wg.Go(fn)
	return true
}

// release closes what is open.
func (e *Engine) release() error {
	e.end()
	var errs []error
	if e.wal != nil {
		errs = append(errs, e.wal.Close())
	}
	for _, s := range *e.streams.Load() {
		errs = append(errs, s.store.Close())
	}
	e.mu.Lock()
	for _, store := range e.prepared { // of a creation that was cut short
		errs = append(errs, store.Close())
	}
	clear(e.prepared)
	e.mu.Unlock()
	errs = append(errs, e.book.close())
	if e.meta != nil {
		errs = append(errs, e.meta.Close())
	}
	if e.lock != nil {
		errs = append(errs, e.lock.Close())
	}
	return errors.Join(errs...)
}

// fail ends acknowledging for good.
func (e *Engine) fail(err error) {
	e.failed.Store(true)
	e.failOnce.Do(func() {
		e.failure = err
		close(e.broken)
		if e.o.OnFail != nil {
			e.o.OnFail(err)
		}
	})
}

// failBehind is fail with an error that nobody waits for. While the engine is
// being closed, what was cut short by that is no failure.
func (e *Engine) failBehind(err error) {
	if e.closing.Load() && (errors.Is(err, context.Canceled) || errors.Is(err, storage.ErrClosed) || errors.Is(err, ErrClosed)) {
		return
	}
	e.fail(err)
}

// AfterRead is for broker.Options.AfterRead: it starts committing what the
// read handed in. What a publisher sends alone is committed on its own read
// loop: it is waiting for the acknowledgement.
func (e *Engine) AfterRead() { e.prop.KickOrCommit() }

// Kick starts committing what was handed in.
func (e *Engine) Kick() { e.prop.Kick() }

// Meta returns the store directory's small facts.
func (e *Engine) Meta() *metadb.DB { return e.meta }

// Stream returns the stream of that name.
func (e *Engine) Stream(name string) (*Stream, bool) {
	s, ok := (*e.streams.Load())[name]
	return s, ok
}

// Streams returns all streams, by name.
func (e *Engine) Streams() []*Stream {
	m := *e.streams.Load()
	list := make([]*Stream, 0, len(m))
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, m[name])
	}
	return list
}

// WatchStreams calls fn, which must not block, after a stream was created or
// deleted, until cancel is called.
func (e *Engine) WatchStreams(fn func()) (cancel func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.watchID++
	id := e.watchID
	e.watchers[id] = fn
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.watchers, id)
	}
}

func (e *Engine) streamsChanged() {
	e.mu.Lock()
	fns := slices.Collect(maps.Values(e.watchers))
	e.mu.Unlock()
	for _, fn := range fns {
		fn()
	}
}

// addStream and removeStream replace the map of streams. They run on the
// goroutine that applies, one at a time.
func (e *Engine) addStream(s *Stream) {
	m := maps.Clone(*e.streams.Load())
	m[s.name] = s
	e.streams.Store(&m)
	e.groups[s.group] = s
}

func (e *Engine) removeStream(s *Stream) {
	m := maps.Clone(*e.streams.Load())
	delete(m, s.name)
	e.streams.Store(&m)
	delete(e.groups, s.group)
	s.uncount()
	e.wal.ForgetLast(s.group)
}

// onCommit applies committed records. The log calls it, one call at a time.
func (e *Engine) onCommit(records []wal.Record) {
	if e.failed.Load() || len(records) == 0 {
		return
	}
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	touched := e.touched[:0]
	for i := 0; i < len(records); {
		j := i + 1
		for j < len(records) && records[j].Group == records[i].Group {
			j++
		}
		run := records[i:j]
		i = j
		if run[0].Group == storage.MetaGroup {
			for k := range run {
				if err := e.applyMeta(&run[k]); err != nil && !isDamage(err) {
					e.fail(fmt.Errorf("applying record %d: %w", run[k].LSN, err))
					return
				}
			}
			continue
		}
		s := e.groups[run[0].Group]
		if s == nil {
			d, refused := e.downs[run[0].Group], api.ErrStreamNotFound
			for k := range run {
				if d != nil {
					d.late(&run[k])
					refused = e.offline(d.rec.Name)
				}
				e.refuse(&run[k], refused)
			}
			continue
		}
		if n, err := s.applyRun(run); err != nil {
			if !isDamage(err) {
				e.fail(err)
				return
			}
			e.takeDown(s, err, run[n:])
			continue
		}
		if !s.touched {
			s.touched = true
			touched = append(touched, s)
		}
	}
	last := records[len(records)-1].LSN
	e.lastLSN.Store(uint64(last))
	for _, s := range touched {
		s.touched = false
		s.committed(last)
		e.sinceCheck += s.runBytes
		s.runBytes = 0
	}
	e.acks.Flush() // what is acknowledged is in DurableState
	clear(touched)
	e.touched = touched
	if e.sinceCheck >= e.checkEvery() {
		e.sinceCheck = 0
		e.regulate()
		e.wakeCheckpointer()
	}
}

// refuse answers a record of a stream that is gone, or does not serve.
func (e *Engine) refuse(r *wal.Record, refused *api.Error) {
	switch tag := e.prop.tag(r).(type) {
	case *pubReq:
		if len(tag.reply) > 0 {
			e.scratch = api.AppendPubErr(e.scratch[:0], "", refused)
			e.acks.PublishBytes(tag.reply, nil, nil, e.scratch)
		}
		tag.release()
	case *batchReq:
		if len(tag.reply) > 0 {
			e.scratch = api.AppendPubErr(e.scratch[:0], "", refused)
			e.acks.PublishBytes(tag.reply, nil, nil, e.scratch)
		}
	case *call:
		tag.fn(callResult{err: refused})
	}
}

// onDurable tells streams that the log's durable end has moved.
func (e *Engine) onDurable(lsn storage.LSN) {
	if e.o.SyncInterval <= 0 {
		return // applied means durable
	}
	e.durMu.Lock()
	list := slices.Collect(maps.Keys(e.awaitingSync))
	clear(e.awaitingSync)
	e.durMu.Unlock()
	for _, s := range list {
		if s.advance(lsn) {
			e.durMu.Lock()
			e.awaitingSync[s] = struct{}{}
			e.durMu.Unlock()
		}
	}
}

// applyMeta applies a command of the meta group.
func (e *Engine) applyMeta(r *wal.Record) error {
	switch command.KindOf(r.Data) {
	case command.KindStreamCreate:
		var c command.StreamCreate
		if err := c.Decode(r.Data); err != nil {
			return err
		}
		return e.applyCreate(&c, r)
	case command.KindStreamDelete:
		var c command.StreamDelete
		if err := c.Decode(r.Data); err != nil {
			return err
		}
		e.applyDelete(&c, r)
		return nil
	}
	return command.Unknown(command.KindOf(r.Data), "the meta group's")
}

func (e *Engine) applyCreate(c *command.StreamCreate, r *wal.Record) error {
	group := storage.GroupID(c.Group)
	if e.groups[group] != nil || e.downs[group] != nil { // its directory was found without the list of streams
		return e.recreate(r)
	}
	rec := &streamRecord{Name: c.Name, Group: c.Group, UID: c.UID[:], Created: c.Created}
	if err := rec.decodeConfig(c.Config); err != nil {
		return err
	}
	e.mu.Lock()
	store := e.prepared[group]
	delete(e.prepared, group)
	e.nextGroup = max(e.nextGroup, c.Group+1)
	e.mu.Unlock()
	if store == nil {
		store = e.newStore(group, rec.Config.Storage, true)
	}
	s, err := e.newStream(rec, store)
	if err != nil && isDamage(err) {
		_ = store.Close() // the first error counts
		d := &downStream{rec: rec, cause: err, since: time.Now(), create: true}
		e.book.put(rec, r.LSN)
		e.setDown(d, true)
		e.refuseSubjects(d)
		if t, ok := e.tag(r).(*call); ok {
			t.fn(callResult{err: e.offline(rec.Name)})
		}
		if e.live {
			e.spawn(func() { e.repair(d) })
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("creating stream %q: %w", c.Name, err)
	}
	s.begins(r.LSN)
	e.book.put(rec, r.LSN)
	e.addStream(s)
	if !e.live {
		return nil
	}
	e.wakeKeeper()
	if err := s.start(); err != nil {
		return err
	}
	if t, ok := e.tag(r).(*call); ok {
		t.fn(callResult{stream: s})
	}
	e.streamsChanged()
	return nil
}

func (e *Engine) applyDelete(c *command.StreamDelete, r *wal.Record) {
	s := e.groups[storage.GroupID(c.Group)]
	if s != nil {
		e.book.remove(c.Group, s, r.LSN, s.holds()) // first: trim asks the streams, then the book
		e.removeStream(s)
		s.stop()
		s.deleted()
		if e.live {
			e.wakeKeeper()
			e.streamsChanged()
		}
	} else {
		held := storage.LSN(0)
		if d := e.downs[storage.GroupID(c.Group)]; d != nil {
			held = storage.LSN(d.from.Load())
			d.deleted = true
			defer e.setDown(d, false)
		}
		e.book.remove(c.Group, nil, r.LSN, held)
		e.wakeKeeper()
	}
	if t, ok := e.tag(r).(*call); ok {
		t.fn(callResult{})
	}
}

// tag returns what a record was proposed with; nil in replay.
func (e *Engine) tag(r *wal.Record) any {
	if !e.live {
		return nil
	}
	return e.prop.tag(r)
}

// appendGroups returns the value under keyNextGroup.
func appendGroups(next uint64, groups []uint64) []byte {
	b := append(strconv.AppendUint(nil, next, 10), ' ')
	for i, g := range groups {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, g, 10)
	}
	return b
}

// parseGroups reads what appendGroups wrote; listed is false for a value
// without a list.
func parseGroups(v string) (next uint64, groups map[uint64]bool, listed bool, err error) {
	head, list, listed := strings.Cut(v, " ")
	if next, err = strconv.ParseUint(head, 10, 64); err != nil {
		return 0, nil, false, err
	}
	groups = map[uint64]bool{}
	if list == "" {
		return next, groups, listed, nil
	}
	for _, f := range strings.Split(list, ",") {
		g, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, nil, false, err
		}
		groups[g] = true
	}
	return next, groups, listed, nil
}

func groupDir(g storage.GroupID) string { return fmt.Sprintf("%016x", uint64(g)) }

func parseGroupDir(name string) storage.GroupID {
	v, err := strconv.ParseUint(name, 16, 64)
	if err != nil || len(name) != 16 {
		return 0
	}
	return storage.GroupID(v)
}
