package jetstream

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/consumer"
	"petiole/internal/jetstream/stream"
	"petiole/storage"
	"petiole/storage/memstore"
)

// prefixConsumer begins the keys of consumers in a store's keyed state.
const prefixConsumer = "c/"

// Stream is one stream.
type Stream struct {
	e       *Engine
	name    string
	group   storage.GroupID
	uid     [16]byte
	created time.Time
	store   storage.Store
	memory  bool // records do not go through the log

	cfg     atomic.Pointer[api.StreamConfig] // a copy of the machine's
	apiMu   sync.Mutex                       // one change of consumers at a time
	ckptMu  sync.Mutex                       // one checkpoint at a time; held while destroying
	durable atomic.Pointer[storage.State]
	// unsettled: records of the log are lost, and what follows is not in the log yet.
	unsettled atomic.Bool
	steady0   int64                  // what the steady clock said when the engine began
	postponed atomic.Pointer[string] // why the file is not compacted, which is worth it

	// mending: its file is being repaired while it serves, and the log has to keep
	// the records from keep on (0: none).
	mending atomic.Bool
	keep    atomic.Uint64
	// yields ends that repair, if it takes long; nobody waits for that.
	yields atomic.Pointer[context.CancelFunc]

	mu        sync.Mutex
	m         *stream.Machine
	republish *stream.Transform // nil if messages are not republished
	consumers map[string]*consumerEntry
	subs      []*broker.Subscription
	pub       *broker.Publisher
	live      bool // started: what is applied has effects
	stopped   bool
	gone      bool        // store destroyed
	applied   storage.LSN // last record applied
	dirtyFrom storage.LSN // first record that no frozen set reflects; 0 if none
	frozen    storage.LSN // likewise of the frozen set that is being written
	// frozenAt is the last record that set reflects, frozenPos the positions in it.
	frozenAt  storage.LSN
	frozenPos []storage.KV
	// unreadable is keyed state that makes no sense, though its checksum is
	// right; to be put aside.
	unreadable []storage.KV
	lostSpans  []lostSpan  // sequences whose messages damage has taken, ascending
	lostFresh  bool        // some of them are in no checkpoint
	lostGone   []string    // keys of those dropped that a checkpoint may have
	skip       uint64      // sequences that lost records of the log may have had, not left out yet
	missed     bool        // records may be lost before the next one; of recovery
	missedFrom storage.LSN // the first of them
	parked     bool        // there is a file with records that were parked, all of which have been applied
	parkedLost bool        // not all of it could be read
	sweep      sweep
	lost       map[string]struct{} // consumers deleted since the last checkpoint
	acked      []uint64            // messages acknowledged by the command being applied
	unlogged   []uint64            // messages that consumers without durable state are done with
	timer      *time.Timer
	timerAt    time.Time // when timer fires; zero: not set
	expiring   bool      // an Expire command is on its way
	bytes      uint64    // what the engine's total has of this stream
	uncounted  bool      // tableBytes stays 0: the stream is gone
	wake       chan struct{}
	pumping    bool
	scratch    []byte

	// Of the goroutine that applies.
	touched  bool
	runBytes int64

	tableBytes atomic.Int64 // what the engine's total of tables has of this stream; changed under mu

	held   storage.LSN // of the checkpointer: what holds said last
	usedAt int64       // of the keeper: when the file was used last

	batchMu sync.Mutex
	batches map[string]*stagedBatch // by id
	batched int                     // octets in them
	reaping bool                    // reapBatches is going to run

	durMu   sync.Mutex
	pending []pendingState // applied and not durable yet, oldest first
	ingests []pendingIngest
	watchMu sync.Mutex
	watch   map[int]func()
	watchID int
}

type consumerEntry struct {
	m       *consumer.Machine
	sink    *sink
	cancel  func() // ends watching interest in watched; nil if not watched
	watched string
	gone    bool // deleted
	// waiting are records for which the log had no room, octets of them.
	waiting []waitingRecord
	octets  int
}

func newUID() []byte {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return b[:]
}

// newStore returns the store of a group, whose file is opened when it is used
// for the first time. With create it may have none yet.
func (e *Engine) newStore(g storage.GroupID, t api.StorageType, create bool) storage.Store {
	if t == api.MemoryStorage {
		return memstore.New()
	}
	return e.newFileStore(g, create)
}

// begins says that the record at lsn created the stream: until a checkpoint has
// its identity and configuration, the log does.
func (s *Stream) begins(lsn storage.LSN) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.memory || s.applied >= lsn {
		return
	}
	s.applied = lsn
	if s.dirtyFrom == 0 {
		s.dirtyFrom = lsn
	}
}

// newStream makes a stream over an open store.
func (e *Engine) newStream(r *streamRecord, store storage.Store) (*Stream, error) {
	m, err := stream.New(r.Config, [16]byte(r.UID), store)
	if err != nil {
		return nil, err
	}
	s := &Stream{
		e: e, name: r.Name, group: storage.GroupID(r.Group), uid: m.UID(),
		created: time.Unix(0, r.Created).UTC(), store: store,
		memory: r.Config.Storage == api.MemoryStorage,
		m:      m, consumers: map[string]*consumerEntry{},
		pub:     e.account.NewPublisher(),
		applied: store.Applied(),
		lost:    map[string]struct{}{},
		wake:    make(chan struct{}, 1),
		watch:   map[int]func(){},
		batches: map[string]*stagedBatch{},
	}
	s.setConfig()
	st := store.State()
	s.durable.Store(&st)
	err = store.KVs(prefixConsumer, func(key string, value []byte) error {
		entry := s.newEntry()
		c, err := consumer.Restore(value, s.env(entry.sink))
		if err != nil { // one consumer does not keep the stream from serving
			e.log.Error("the state of a consumer cannot be read and is put aside", "stream", s.name, "consumer", key[len(prefixConsumer):], "err", err)
			s.unreadable = append(s.unreadable, storage.KV{Key: key, Value: value})
			return nil
		}
		entry.m = c
		s.consumers[c.Name()] = entry
		return nil
	})
	if err == nil {
		err = store.KVs(keySweep, func(key string, value []byte) error {
			if err := s.sweep.restore(value); err != nil {
				s.unreadable = append(s.unreadable, storage.KV{Key: key, Value: value})
			}
			return nil
		})
	}
	if err == nil {
		err = store.KVs(prefixLost, func(_ string, value []byte) error { return s.restoreLost(value) })
	}
	if err != nil {
		return nil, err
	}
	s.observe()
	return s, nil
}

// remember notes in the stream's record where it is, for the case that its files
// are lost.
func (s *Stream) remember() {
	st := s.store.State()
	s.mu.Lock()
	at, clean := uint64(s.applied), s.dirtyFrom == 0 && s.frozen == 0
	s.mu.Unlock()
	old, ok := s.e.book.record(uint64(s.group))
	if s.memory || !ok || !clean || old.First == st.First && old.Last == st.Last && old.LastAt == at {
		return
	}
	rec := *old
	rec.First, rec.Last, rec.LastAt = st.First, st.Last, at
	s.e.book.put(&rec, 0)
}

func (s *Stream) newEntry() *consumerEntry {
	entry := &consumerEntry{}
	entry.sink = &sink{s: s, entry: entry}
	return entry
}

func (s *Stream) env(k *sink) consumer.Env {
	return consumer.Env{Sink: k, Messages: s.store, Stream: s.m.Config(), MaxPayload: s.e.o.MaxPayload, Skew: s.e.skew}
}

// setConfig publishes the machine's configuration.
func (s *Stream) setConfig() {
	cfg := *s.m.Config()
	s.cfg.Store(&cfg)
	s.republish = nil
	if r := cfg.RePublish; r != nil {
		t, err := stream.NewTransform(r.Source, r.Destination)
		if err != nil { // it was checked when it was accepted
			s.e.log.Error("messages are not republished", "stream", s.name, "err", err)
		}
		s.republish = t
	}
}

// observe tells the machine to report on messages if there are consumers.
func (s *Stream) observe() {
	if len(s.consumers) == 0 {
		s.m.Observe(nil)
		return
	}
	s.m.Observe(s)
}

// Appended, Removed and Purged pass on to the consumers what happens.
// They are for the machine only.
func (s *Stream) Appended(seq uint64, subject string) {
	for _, c := range s.consumers {
		c.m.MsgAppended(seq, subject)
	}
}

// Removed is for the machine only.
func (s *Stream) Removed(seq uint64, subject string) {
	for _, c := range s.consumers {
		c.m.MsgRemoved(seq, subject)
	}
}

// Purged is for the machine only.
func (s *Stream) Purged() {
	for _, c := range s.consumers {
		c.m.MsgsPurged()
	}
}

// start makes a recovered or new stream live.
func (s *Stream) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live = true
	st := s.store.State()
	s.durable.Store(&st)
	s.account(st.Bytes)
	s.e.wal.SetLast(s.group, st.Last) // no record is under way
	s.startSteady(s.e.o.now())
	for _, c := range s.consumers {
		s.startConsumer(c, s.e.moment())
	}
	if err := s.subscribe(); err != nil {
		return err
	}
	s.armExpiry()
	s.startSweeper()
	return nil
}

// subscribe makes the handlers agree with the configured subjects.
func (s *Stream) subscribe() error {
	want := s.m.Config().Subjects
	keep := s.subs[:0]
	for _, sub := range s.subs {
		if slices.Contains(want, sub.Subject()) {
			keep = append(keep, sub)
		} else {
			sub.Close()
		}
	}
	s.subs = keep
	for _, subject := range want {
		if slices.ContainsFunc(s.subs, func(sub *broker.Subscription) bool { return sub.Subject() == subject }) {
			continue
		}
		sub, err := s.e.account.Handle(subject, s.onPublish)
		if err != nil {
			return fmt.Errorf("stream %q: subject %q: %w", s.name, subject, err)
		}
		s.subs = append(s.subs, sub)
	}
	return nil
}

// stop ends taking messages and delivering.
func (s *Stream) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	s.stopped = true
	for _, sub := range s.subs {
		sub.Close()
	}
	s.subs = nil
	if s.timer != nil {
		s.timer.Stop()
	}
	for _, c := range s.consumers {
		if c.cancel != nil {
			c.cancel()
			c.cancel = nil
		}
	}
	close(s.wake)
}

// deleted tells the consumers' clients that the stream is gone.
func (s *Stream) deleted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.consumers {
		c.m.Deleted()
	}
	clear(s.consumers)
	s.pub.Flush()
	s.account(0)
}

// destroy removes the files of a deleted stream. It waits for a checkpoint.
func (s *Stream) destroy() error {
	s.yield()
	s.ckptMu.Lock()
	defer s.ckptMu.Unlock()
	s.mu.Lock()
	s.gone = true
	s.mu.Unlock()
	return s.store.Destroy()
}

// rest closes the stream's file if the durable image is all there is and nobody
// uses it; it reports whether it has.
func (s *Stream) rest() (bool, error) {
	f, ok := s.store.(*fileStore)
	if !ok {
		return false, nil
	}
	s.ckptMu.Lock()
	defer s.ckptMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone || s.dirtyFrom != 0 || s.frozen != 0 {
		return false, nil
	}
	return f.rest()
}

// restAtStart is rest for a start. It leaves the files of a few streams open, for
// opening a large one takes its time, and where there are few they are going to
// be used; the keeper closes those that are not.
func (s *Stream) restAtStart() error {
	if s.e.openStores.Load() <= int64(s.e.o.MaxOpenStores)/4 {
		return nil
	}
	_, err := s.rest()
	return err
}

// account updates the engine's totals with the octets this stream holds.
func (s *Stream) account(bytes uint64) {
	total := &s.e.storeUsed
	if s.memory {
		total = &s.e.memUsed
	}
	total.Add(int64(bytes) - int64(s.bytes))
	s.bytes = bytes
}

// Name returns the stream's name.
func (s *Stream) Name() string { return s.name }

// UID returns the stream's identity: a stream deleted and created again has
// another one, and so has a stream in memory after a restart.
func (s *Stream) UID() [16]byte { return s.uid }

// Config returns the configuration in force; it must not be changed.
func (s *Stream) Config() api.StreamConfig { return *s.cfg.Load() }

// Created returns when the stream was created.
func (s *Stream) Created() time.Time { return s.created }

// State returns the summary of what the stream holds.
func (s *Stream) State() storage.State { return s.store.State() }

// NumConsumers returns how many consumers the stream has.
func (s *Stream) NumConsumers() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.consumers)
}

// Range calls fn for the messages from a sequence on, in order, up to
// DurableState().Last, until fn returns false.
func (s *Stream) Range(from uint64, fn func(storage.Message) bool) error {
	last := s.DurableState().Last
	if from > last {
		return nil
	}
	return s.store.Range(from, func(m storage.Message) bool { return m.Seq <= last && fn(m) })
}

// String names the stream in logs.
func (s *Stream) String() string { return s.name + "#" + strconv.FormatUint(uint64(s.group), 10) }
