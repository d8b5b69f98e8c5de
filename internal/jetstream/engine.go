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
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"petiole/internal/broker"
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
	mendLong   int64                                           // mendLong, or a test's
	// openStore is msgstore.Open, or a test's.
	openStore func(dir string, o msgstore.Options) (backing, error)
	now       func() time.Time // time.Now, or a test's clock that leaps
}

// Defaults of Options.
const (
	DefaultMaxOpenStores = 128
	DefaultIdleClose     = 30 * time.Second
)

// ErrClosed says that the engine does not serve any more.
var ErrClosed = errors.New("JetStream has been closed")

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
	if o.now == nil {
		o.now = time.Now
	}
	if o.mendLong <= 0 {
		o.mendLong = mendLong
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
