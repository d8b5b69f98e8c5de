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
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
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

	WALBudget   int64 // octets of log beyond which checkpoints are made; default 256 MiB
	TableBudget int64 // octets of a stream not checkpointed beyond which one is made; default 32 MiB
	SegmentSize int64 // octets of a log segment; default 64 MiB

	Log *slog.Logger // default discards
	// OnFail is called once when the storage has failed. Nothing is
	// acknowledged any more: the process has to end and recover.
	OnFail func(error)
}

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
	Config  api.StreamConfig `json:"config"`  // at creation, and for memory streams since
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

	// Owned by recovery, then by onCommit, which is never called concurrently.
	groups  map[storage.GroupID]*Stream
	touched []*Stream
	acks    *broker.Publisher
	scratch []byte
	// keptNext is what the meta database has as the next group. nextGroup may
	// be ahead of it by a creation that is on its way through the log.
	keptNext uint64

	nextGroup uint64 // under mu
	lastLSN   atomic.Uint64
	live      bool // recovery is over
	closing   atomic.Bool
	failed    atomic.Bool
	failOnce  sync.Once

	mu       sync.Mutex
	prepared map[storage.GroupID]storage.Store // opened for a creation under way
	watchers map[int]func()
	watchID  int

	memUsed, storeUsed  atomic.Int64
	apiTotal, apiErrors atomic.Uint64
	apiInflight         atomic.Int64
	subs                []*broker.Subscription
	async               asyncQueue     // messages published inside
	interest            asyncQueue     // listeners of push consumers; waits for streams' locks only
	wg                  sync.WaitGroup // goroutines that end with the engine
	checkpointNow       chan struct{}
	apiSlots            chan struct{} // one element for each request that waits for the log
	done                chan struct{} // closed with the engine
	broken              chan struct{} // closed when the storage has failed
	sinceCheck          int64         // octets committed since the checkpointer was woken
	durMu               sync.Mutex
	awaitingSync        map[*Stream]struct{} // have applied what is not durable yet
}

// Open opens the store directory, recovers what it holds and begins to serve.
func Open(o Options) (_ *Engine, err error) {
	if o.Account == nil || o.Dir == "" {
		return nil, errors.New("opening JetStream: Account and Dir are required")
	}
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
	if o.MaxPayload <= 0 {
		o.MaxPayload = DefaultMaxPayload
	}
	e := &Engine{
		o: o, log: o.Log, account: o.Account,
		groups:        map[storage.GroupID]*Stream{},
		prepared:      map[storage.GroupID]storage.Store{},
		watchers:      map[int]func(){},
		awaitingSync:  map[*Stream]struct{}{},
		acks:          o.Account.NewPublisher(),
		checkpointNow: make(chan struct{}, 1),
		apiSlots:      make(chan struct{}, maxInflight),
		done:          make(chan struct{}),
		broken:        make(chan struct{}),
		nextGroup:     uint64(storage.MetaGroup) + 1,
	}
	e.streams.Store(&map[string]*Stream{})
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
	if e.meta, err = metadb.Open(filepath.Join(o.Dir, "meta.db")); err != nil {
		return nil, err
	}
	if err := e.recover(); err != nil {
		return nil, err
	}
	if err := e.start(); err != nil {
		return nil, err
	}
	return e, nil
}

// recover opens the streams that the meta database knows and replays the log.
func (e *Engine) recover() error {
	records, next, err := readRecords(e.meta)
	if err != nil {
		return err
	}
	if next != 0 {
		e.nextGroup = next
	}
	e.keptNext = e.nextGroup
	knownGroups := e.nextGroup // of those below it the meta database knows what became of them
	e.wal, err = wal.Open(wal.Options{
		FS: e.o.FS, Dir: filepath.Join(e.o.Dir, "wal"), SegmentSize: e.o.SegmentSize,
		SyncInterval: e.o.SyncInterval, OnCommit: e.onCommit, OnDurable: e.onDurable,
		OnFail: e.fail, Log: e.log,
	})
	if err != nil {
		return err
	}
	e.prop = newLocalProposer(e.wal)
	if err := e.checkStores(records); err != nil {
		return err
	}
	known := map[string]bool{}
	newest := storage.LSN(0)
	for i := range records {
		r := &records[i]
		group := storage.GroupID(r.Group)
		known[groupDir(group)] = true
		if r.Config.Storage == api.MemoryStorage {
			r.UID = newUID()
		}
		store, err := e.openStore(group, r.Config.Storage)
		if err != nil {
			return fmt.Errorf("stream %q: %w", r.Name, err)
		}
		s, err := e.newStream(r, store)
		if err != nil {
			_ = store.Close() // the first error counts
			return err
		}
		newest = max(newest, store.Applied())
		e.addStream(s)
	}
	// What a creation that did not come to be, or a deletion, left behind.
	dirs, err := os.ReadDir(filepath.Join(e.o.Dir, "streams"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}

	replayed := 0
	last := storage.LSN(0)
	created := map[storage.GroupID]bool{} // in what is left of the log
	err = e.wal.Replay(func(r wal.Record) error {
		replayed++
		last = r.LSN
		if r.Group == storage.MetaGroup {
			var c command.StreamCreate
			if command.KindOf(r.Data) == command.KindStreamCreate && c.Decode(r.Data) == nil {
				created[storage.GroupID(c.Group)] = true
			}
			return e.applyMeta(&r)
		}
		s := e.groups[r.Group]
		if s == nil && uint64(r.Group) >= knownGroups && !created[r.Group] {
			return metaLost(e.meta.Path(), fmt.Sprintf("record %d of the log belongs to the stream of group %d", r.LSN, r.Group))
		}
		if s == nil || s.memory || r.LSN <= s.store.Applied() {
			return nil // gone, empty after every start, or checkpointed
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.apply(&r)
	})
	if err != nil {
		return fmt.Errorf("replaying the log: %w", err)
	}
	if w := e.wal.Written(); w < newest {
		return fmt.Errorf("%w: the log ends at record %d, but a stream has been checkpointed at %d; "+
			"the directory wal does not belong to this store, restore the one that does", storage.ErrCorrupt, w, newest)
	}
	e.lastLSN.Store(uint64(max(last, e.wal.Written())))
	for _, d := range dirs {
		group := parseGroupDir(d.Name())
		if e.groups[group] != nil || known[d.Name()] {
			continue
		}
		// Deleted, or made for a creation that never became a record: then
		// nothing was ever checkpointed into it. Anything else is a stream
		// that only a lost meta database knew of.
		if uint64(group) >= knownGroups && !created[group] {
			if err := e.unused(group); err != nil {
				return err
			}
		}
		if err := os.RemoveAll(filepath.Join(e.o.Dir, "streams", d.Name())); err != nil {
			return err
		}
	}
	if replayed > 0 || len(records) > 0 {
		e.log.Info("JetStream recovered", "streams", len(e.groups), "replayed_records", replayed)
	}
	return nil
}

// checkStores returns an error if a known stream's messages are gone from the
// disk: opening would begin an empty store, and what had been checkpointed would
// be missed by nobody. A log that still has the creation gives all of it back.
func (e *Engine) checkStores(records []streamRecord) error {
	missing := map[storage.GroupID]*streamRecord{}
	for i := range records {
		r := &records[i]
		if r.Config.Storage == api.MemoryStorage {
			continue
		}
		_, err := os.Stat(e.storePath(storage.GroupID(r.Group)))
		if errors.Is(err, os.ErrNotExist) {
			missing[storage.GroupID(r.Group)] = r
		} else if err != nil {
			return fmt.Errorf("stream %q: %w", r.Name, err)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	err := e.wal.Replay(func(r wal.Record) error {
		var c command.StreamCreate
		if r.Group == storage.MetaGroup && command.KindOf(r.Data) == command.KindStreamCreate && c.Decode(r.Data) == nil {
			delete(missing, storage.GroupID(c.Group))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the log: %w", err)
	}
	for group, r := range missing {
		return fmt.Errorf("%w: stream %q: its file %s is gone, and the log does not reach back to the stream's creation: restore the file, "+
			"with what else belongs to this store", storage.ErrCorrupt, r.Name, e.storePath(group))
	}
	return nil
}

// storePath is where msgstore keeps the messages of a group.
func (e *Engine) storePath(g storage.GroupID) string {
	return filepath.Join(e.o.Dir, "streams", groupDir(g), msgstore.FileName)
}

// unused returns an error if the directory of a group that nothing else tells of
// has been a stream's.
func (e *Engine) unused(group storage.GroupID) error {
	store, err := e.openStore(group, api.FileStorage)
	if err != nil {
		return metaLost(e.meta.Path(), fmt.Sprintf("nothing is known of directory %s: %v", groupDir(group), err))
	}
	applied := store.Applied()
	if err := store.Close(); err != nil {
		return err
	}
	if applied > 0 {
		return metaLost(e.meta.Path(), fmt.Sprintf("directory %s holds a stream, checkpointed at record %d of the log", groupDir(group), applied))
	}
	return nil
}

// metaLost is the error for traces of a stream that the meta database, which
// would have to know of it, has nothing about.
func metaLost(path, trace string) error {
	return fmt.Errorf("%w: %s, but %s does not know it: that file was lost or is an older copy, restore the one that belongs to this store",
		storage.ErrCorrupt, trace, path)
}

// start makes the recovered streams live and registers the handlers.
func (e *Engine) start() error {
	e.live = true
	e.wg.Go(e.checkpointer)
	e.wg.Go(e.async.run)
	e.wg.Go(e.interest.run)
	for _, s := range *e.streams.Load() {
		if err := s.start(); err != nil {
			return err
		}
	}
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

// Close stops serving, checkpoints every stream and releases the directory.
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
	if checkpoint && !e.failed.Load() {
		errs = append(errs, e.wal.Sync())
	}
	e.wg.Wait()
	if checkpoint && !e.failed.Load() {
		for _, s := range *e.streams.Load() {
			errs = append(errs, s.checkpoint())
		}
		if len(slices.DeleteFunc(slices.Clone(errs), func(err error) bool { return err == nil })) == 0 {
			errs = append(errs, e.trim())
		}
	}
	errs = append(errs, e.release())
	return errors.Join(errs...)
}

// release closes what is open.
func (e *Engine) release() error {
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
		close(e.broken)
		if e.o.OnFail != nil {
			e.o.OnFail(err)
		}
	})
}

// AfterRead is for broker.Options.AfterRead: it starts committing what the
// read handed in.
func (e *Engine) AfterRead() { e.prop.Kick() }

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
}

// onCommit applies committed records. The log calls it, one call at a time.
func (e *Engine) onCommit(records []wal.Record) {
	if e.failed.Load() || len(records) == 0 {
		return
	}
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
				if err := e.applyMeta(&run[k]); err != nil {
					e.fail(fmt.Errorf("applying record %d: %w", run[k].LSN, err))
					return
				}
			}
			continue
		}
		s := e.groups[run[0].Group]
		if s == nil {
			for k := range run {
				e.refuse(&run[k])
			}
			continue
		}
		if err := s.applyRun(run); err != nil {
			e.fail(err)
			return
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
	if e.sinceCheck >= 1<<20 {
		e.sinceCheck = 0
		e.wakeCheckpointer()
	}
}

// refuse answers a record of a stream that is gone.
func (e *Engine) refuse(r *wal.Record) {
	switch tag := e.prop.tag(r).(type) {
	case *pubReq:
		if len(tag.reply) > 0 {
			e.scratch = api.AppendPubErr(e.scratch[:0], "", api.ErrStreamNotFound)
			e.acks.PublishBytes(tag.reply, nil, nil, e.scratch)
		}
		tag.release()
	case *batchReq:
		if len(tag.reply) > 0 {
			e.scratch = api.AppendPubErr(e.scratch[:0], "", api.ErrStreamNotFound)
			e.acks.PublishBytes(tag.reply, nil, nil, e.scratch)
		}
	case *call:
		tag.fn(callResult{err: api.ErrStreamNotFound})
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

// applyMeta applies a command of the meta group. It is idempotent: what it does
// is written to the meta database at once, with no position of the log.
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
		return e.applyDelete(&c, r)
	}
	return fmt.Errorf("%w: kind %d is not the meta group's", command.ErrMalformed, command.KindOf(r.Data))
}

func (e *Engine) applyCreate(c *command.StreamCreate, r *wal.Record) error {
	group := storage.GroupID(c.Group)
	e.mu.Lock()
	done := !e.live && c.Group < e.nextGroup // carried out before; perhaps deleted since
	e.mu.Unlock()
	if done {
		return nil
	}
	rec := streamRecord{Name: c.Name, Group: c.Group, UID: c.UID[:], Created: c.Created}
	if err := json.Unmarshal(c.Config, &rec.Config); err != nil {
		return fmt.Errorf("%w: configuration of stream %q: %v", command.ErrMalformed, c.Name, err)
	}
	e.mu.Lock()
	store := e.prepared[group]
	delete(e.prepared, group)
	e.nextGroup = max(e.nextGroup, c.Group+1)
	e.mu.Unlock()
	var err error
	if store == nil {
		if store, err = e.openStore(group, rec.Config.Storage); err != nil {
			return fmt.Errorf("creating stream %q: %w", c.Name, err)
		}
	}
	s, err := e.newStream(&rec, store)
	if err != nil {
		return err
	}
	b, err := json.Marshal(&rec)
	if err != nil {
		return fmt.Errorf("creating stream %q: %w", c.Name, err)
	}
	err = e.meta.Put(bucketMeta,
		metadb.KV{Key: streamKey(c.Group), Value: b},
		metadb.KV{Key: keyNextGroup, Value: e.appendGroups(c.Group+1, c.Group)})
	if err != nil {
		return fmt.Errorf("creating stream %q: %w", c.Name, err)
	}
	e.keptNext = c.Group + 1
	e.addStream(s)
	if !e.live {
		return nil
	}
	if err := s.start(); err != nil {
		return err
	}
	if t, ok := e.prop.tag(r).(*call); ok {
		t.fn(callResult{stream: s})
	}
	e.streamsChanged()
	return nil
}

func (e *Engine) applyDelete(c *command.StreamDelete, r *wal.Record) error {
	s := e.groups[storage.GroupID(c.Group)]
	if s != nil {
		e.removeStream(s)
		err := e.meta.Put(bucketMeta,
			metadb.KV{Key: streamKey(c.Group)},
			metadb.KV{Key: keyNextGroup, Value: e.appendGroups(e.keptNext, 0)})
		if err != nil {
			return fmt.Errorf("deleting stream %q: %w", s.name, err)
		}
		s.stop()
		s.deleted()
		if err := s.destroy(); err != nil {
			e.log.Warn("files of a deleted stream remain until the next start", "stream", s.name, "err", err)
		}
		if e.live {
			e.streamsChanged()
		}
	}
	if t, ok := e.prop.tag(r).(*call); ok {
		t.fn(callResult{})
	}
	return nil
}

// appendGroups returns the value under keyNextGroup; with, unless 0, is a group
// not yet among the engine's.
func (e *Engine) appendGroups(next, with uint64) []byte {
	groups := make([]uint64, 0, len(e.groups)+1)
	for g := range e.groups {
		groups = append(groups, uint64(g))
	}
	if with != 0 {
		groups = append(groups, with)
	}
	slices.Sort(groups)
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
