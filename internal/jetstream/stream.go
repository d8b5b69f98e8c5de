package jetstream

import (
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/consumer"
	"petiole/internal/jetstream/stream"
	"petiole/internal/subject"
	"petiole/internal/wire"
	"petiole/storage"
	"petiole/storage/memstore"
	"petiole/storage/wal"
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

type pendingState struct {
	lsn   storage.LSN
	state storage.State
}

type pendingIngest struct {
	lsn  storage.LSN
	done func()
}

type consumerEntry struct {
	m       *consumer.Machine
	sink    *sink
	cancel  func() // ends watching interest in watched; nil if not watched
	watched string
	gone    bool // deleted
}

// call is the tag of a command that an API request waits for. fn is called when
// it was applied, under the stream's lock: it must not block.
type call struct {
	fn func(callResult)
}

type callResult struct {
	stream.Result
	stream *Stream
	lsn    storage.LSN
	err    *api.Error
}

// ackTag is the tag of a lazy record; an empty message is sent to reply when
// it was applied.
type ackTag struct{ reply string }

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
	return consumer.Env{Sink: k, Messages: s.store, Stream: s.m.Config(), MaxPayload: s.e.o.MaxPayload}
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

// sendAgain republishes the message that a publish stored. The caller holds the
// lock.
func (s *Stream) sendAgain(pub *broker.Publisher, r *stream.Result) {
	if r.Seq == 0 || r.Duplicate {
		return
	}
	m, err := s.store.Load(r.Seq)
	if err != nil {
		return // a limit has removed it
	}
	to, ok := s.republish.Apply(m.Subject)
	if !ok {
		return
	}
	kv := []string{
		headerStream, s.name,
		headerSubject, m.Subject,
		headerSequence, strconv.FormatUint(m.Seq, 10),
		headerTime, timeOf(m.Time).Format(time.RFC3339Nano),
		headerLastSeq, strconv.FormatUint(r.Prev, 10),
	}
	data := m.Data
	if s.m.Config().RePublish.HeadersOnly {
		kv = append(kv, "Nats-Msg-Size", strconv.Itoa(len(data)))
		data = nil
	}
	pub.Publish(to, "", wire.WithHeader(nil, m.Header, kv...), data)
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
	now := time.Now()
	s.startSteady(now)
	for _, c := range s.consumers {
		s.startConsumer(c, now)
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

// onPublish takes a message on one of the stream's subjects.
func (s *Stream) onPublish(m *broker.Msg) {
	if m.Client == nil { // published inside: maybe under a lock, maybe within onCommit
		c := cloneMsg(m)
		s.e.async.add(msgSize(m), func() {
			s.publish(c.Subject, c.Reply, c.Header, c.Data)
			s.e.prop.Kick()
		})
		return
	}
	s.publish(m.Subject, m.Reply, m.Header, m.Data)
}

// msgSize returns the octets that a message takes while it is queued.
func msgSize(m *broker.Msg) int {
	return len(m.Subject) + len(m.Reply) + len(m.Header) + len(m.Data) + 256
}

func cloneMsg(m *broker.Msg) *broker.Msg {
	return &broker.Msg{
		Subject: slices.Clone(m.Subject), Reply: slices.Clone(m.Reply),
		Header: slices.Clone(m.Header), Data: slices.Clone(m.Data),
	}
}

// publish hands a message to the log. The slices are not retained.
func (s *Stream) publish(subj, reply, header, data []byte) {
	e := s.e
	cfg := s.cfg.Load()
	if cfg.NoAck {
		reply = nil
	}
	if subject.HasWildcard(subj) { // nobody could ask for it by subject
		s.answer(reply, api.ErrBadRequest)
		return
	}
	if refused := e.room(s, len(subj)+len(header)+len(data)); refused != nil {
		s.answer(reply, refused)
		return
	}
	if !s.memory {
		e.pass(s)
		s.warm()
	}
	if cfg.AllowAtomicPublish && len(header) > 0 && s.publishBatched(subj, reply, header, data) {
		return
	}
	if s.memory {
		s.publishMemory(subj, reply, header, data)
		return
	}
	p := pubPool.Get().(*pubReq)
	p.reply = append(p.reply[:0], reply...)
	now := time.Now()
	p.head = command.AppendPublishHead(p.head[:0], now.UnixNano(), s.steady(now), subj, len(header))
	p.parts = [3][]byte{p.head, header, data}
	if err := e.prop.Propose(s.group, p, p.parts[:]...); err != nil {
		p.release()
		s.answer(reply, refused(err))
	}
}

// warm opens the stream's file, if it is closed, here rather than where records
// of all streams are applied. What goes wrong is met again there.
func (s *Stream) warm() {
	if f, ok := s.store.(*fileStore); ok && !f.isOpen() {
		if _, err := f.acquire(); err == nil {
			f.release()
		}
	}
}

// room answers whether the server's limits leave room for n octets more.
func (e *Engine) room(s *Stream, n int) *api.Error {
	limit, used := e.maxStore.Load(), &e.storeUsed
	if s.memory {
		limit, used = e.maxMemory.Load(), &e.memUsed
	}
	if limit > 0 && used.Load()+int64(n) > limit {
		return api.ErrInsufficientResources
	}
	if s.unsettled.Load() {
		return api.ErrInsufficientResources
	}
	if !s.memory && e.space.full.Load() { // what the log would take could not leave it again
		return api.ErrInsufficientResources
	}
	return nil
}

// answer refuses a publish.
func (s *Stream) answer(reply []byte, refused *api.Error) {
	if len(reply) > 0 {
		s.e.account.PublishBytes(reply, nil, nil, api.AppendPubErr(nil, s.name, refused))
	}
}

func (s *Stream) publishMemory(subject, reply, header, data []byte) {
	now := time.Now()
	rec := command.AppendPublishHead(make([]byte, 0, len(subject)+len(header)+len(data)+32), now.UnixNano(), s.steady(now), subject, len(header))
	rec = append(append(rec, header...), data...)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	r, err := s.applyMemory(rec)
	if err != nil {
		s.e.fail(err)
		return
	}
	if s.republish != nil {
		s.sendAgain(s.pub, &r)
	}
	if len(reply) > 0 {
		s.scratch = s.appendAck(s.scratch[:0], &r)
		s.pub.PublishBytes(reply, nil, nil, s.scratch)
	}
	s.pub.Flush()
}

// appendAck appends the answer to a publish.
func (s *Stream) appendAck(dst []byte, r *stream.Result) []byte {
	if r.Refused != nil {
		return api.AppendPubErr(dst, s.name, r.Refused)
	}
	return api.AppendPubAck(dst, s.name, r.Seq, r.Duplicate)
}

// applyMemory applies a record of a memory stream at once. The caller holds
// the lock.
func (s *Stream) applyMemory(rec []byte) (stream.Result, error) {
	r, err := s.applyStream(rec)
	if err != nil {
		return r, err
	}
	s.afterApply()
	st := s.store.State()
	s.durable.Store(&st)
	s.notify()
	return r, nil
}

// applyRun applies committed records of this stream; it returns how many, if
// not all.
func (s *Stream) applyRun(run []wal.Record) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range run {
		if err := s.apply(&run[i]); err != nil {
			return i, fmt.Errorf("applying record %d: %w", run[i].LSN, err)
		}
		s.runBytes += int64(len(run[i].Data))
	}
	s.afterApply()
	return len(run), nil
}

// apply applies one record, live or in replay. The caller holds the lock.
func (s *Stream) apply(r *wal.Record) error {
	s.applied = r.LSN
	if s.dirtyFrom == 0 {
		s.dirtyFrom = r.LSN
	}
	var tag any
	if s.live {
		tag = s.e.prop.tag(r)
	}
	if command.IsConsumer(command.KindOf(r.Data)) {
		return s.applyConsumer(r.Data, tag)
	}
	res, err := s.applyStream(r.Data)
	if err != nil {
		return err
	}
	if s.live && uint32(res.Seq) != r.Last && command.Messages(r.Data) > 0 {
		s.e.wal.CorrectLast(r, s.store.State().Last)
	}
	if s.republish != nil && res.Kind == command.KindPublish && s.live {
		s.sendAgain(s.e.acks, &res)
	}
	switch tag := tag.(type) {
	case *pubReq:
		if len(tag.reply) > 0 {
			s.e.scratch = s.appendAck(s.e.scratch[:0], &res)
			s.e.acks.PublishBytes(tag.reply, nil, nil, s.e.scratch)
		}
		tag.release()
	case *batchReq:
		if len(tag.reply) > 0 {
			s.e.scratch = tag.appendAck(s.e.scratch[:0], s, &res)
			s.e.acks.PublishBytes(tag.reply, nil, nil, s.e.scratch)
		}
	case *call:
		tag.fn(callResult{Result: res, stream: s, lsn: r.LSN})
	}
	return nil
}

// applyStream applies a record to the stream's machine.
func (s *Stream) applyStream(rec []byte) (stream.Result, error) {
	r := s.m.Apply(rec)
	if r.Fatal != nil {
		return r, r.Fatal
	}
	switch r.Kind {
	case command.KindPublish, command.KindBatch:
		if r.Seq != 0 && !r.Duplicate && s.m.Config().Retention == api.InterestPolicy {
			for seq := r.Seq - r.Before; seq <= r.Seq; seq++ {
				if err := s.dropUnwanted(seq); err != nil {
					return r, err
				}
			}
		}
	case command.KindIngest:
		if r.Seq != 0 && s.m.Config().Retention == api.InterestPolicy {
			for seq, last := r.Seq, s.store.State().Last; seq <= last; seq++ {
				if err := s.dropUnwanted(seq); err != nil {
					return r, err
				}
			}
		}
	case command.KindSetConfig:
		was := s.cfg.Load().Retention
		s.setConfig()
		for _, c := range s.consumers {
			c.m.StreamUpdated()
		}
		if was != s.m.Config().Retention { // to interest, or nothing is swept
			if err := s.beginSweep(); err != nil {
				return r, err
			}
		}
		if s.live {
			if err := s.subscribe(); err != nil {
				return r, err
			}
		}
		if old, ok := s.e.book.record(uint64(s.group)); ok {
			rec := *old
			rec.Config = *s.m.Config()
			s.e.book.put(&rec, 0)
			s.e.wakeKeeper()
		}
	case command.KindLost:
		var c command.Lost
		if r.Removed > 0 && c.Decode(rec) == nil {
			s.addLost(storage.Span{First: c.Seq, Last: c.Seq}, time.Unix(0, c.Time))
		}
	case command.KindSkip:
		s.skip, s.missed = 0, false
		s.unsettled.Store(false)
		var c command.Skip
		if r.Skipped.First <= r.Skipped.Last && c.Decode(rec) == nil {
			s.leftOut(r.Skipped, time.Unix(0, c.Time))
		}
	case command.KindSweep:
		var c command.Sweep
		if c.Decode(rec) == nil {
			if err := s.sweepSlice(c.Max); err != nil {
				return r, err
			}
		}
	case command.KindExpire:
		s.expiring = false
	}
	return r, nil
}

// unwanted reports whether no consumer needs a message (any more). One that is
// gone already is not unwanted.
func (s *Stream) unwanted(seq uint64) bool {
	if s.m.Config().Retention == api.WorkQueuePolicy {
		return true // it was the only consumer that may have it
	}
	msg, err := s.store.Load(seq)
	if err != nil {
		return false
	}
	return s.m.Config().Retention != api.InterestPolicy || !s.needed(seq, msg.Subject)
}

// dropUnwanted removes a message if no consumer needs it.
func (s *Stream) dropUnwanted(seq uint64) error {
	if !s.unwanted(seq) {
		return nil
	}
	return s.m.Acked(seq)
}

// afterApply wakes what follows from applied records. The caller holds the
// lock.
func (s *Stream) afterApply() {
	s.account(s.store.State().Bytes)
	s.measure()
	s.wakePump()
	s.armExpiry()
}

// committed makes the state applied up to lsn the durable one, or remembers it
// until it is.
func (s *Stream) committed(lsn storage.LSN) {
	st := s.store.State()
	if s.e.o.SyncInterval <= 0 {
		s.durable.Store(&st)
		s.notify()
		return
	}
	s.durMu.Lock()
	s.pending = append(s.pending, pendingState{lsn: lsn, state: st})
	s.durMu.Unlock()
	s.e.durMu.Lock()
	s.e.awaitingSync[s] = struct{}{}
	s.e.durMu.Unlock()
	if d := s.e.wal.Durable(); d >= lsn {
		s.e.onDurable(d)
	}
}

// advance takes over what has become durable; it reports whether some has not.
func (s *Stream) advance(lsn storage.LSN) (more bool) {
	s.durMu.Lock()
	var grown bool
	for len(s.pending) > 0 && s.pending[0].lsn <= lsn {
		st := s.pending[0].state
		s.durable.Store(&st)
		s.pending = s.pending[1:]
		grown = true
	}
	for len(s.ingests) > 0 && s.ingests[0].lsn <= lsn {
		s.ingests[0].done()
		s.ingests = s.ingests[1:]
	}
	more = len(s.pending) > 0 || len(s.ingests) > 0
	s.durMu.Unlock()
	if grown {
		s.notify()
	}
	return more
}

func (s *Stream) notify() {
	s.watchMu.Lock()
	defer s.watchMu.Unlock()
	for _, fn := range s.watch {
		fn()
	}
}

// armExpiry sets the timer for the next message to expire. The caller holds
// the lock.
func (s *Stream) armExpiry() {
	if s.expiring || !s.live {
		return
	}
	if at, ok := s.m.NextExpiry(); ok {
		// One record for all that expire within a slack, not one for each.
		slack := 100 * time.Millisecond
		if age := s.m.Config().MaxAge; age > 0 {
			slack = min(max(age/20, 5*time.Millisecond), slack)
		}
		now := time.Now()
		s.arm(now.Add(time.Duration(at-s.aged(now)) + slack))
	}
}

// arm makes the timer fire at t or before. The caller holds the lock.
func (s *Stream) arm(t time.Time) {
	if t.IsZero() || s.stopped || !s.timerAt.IsZero() && !t.Before(s.timerAt) {
		return
	}
	s.timerAt = t
	if s.timer == nil {
		s.timer = time.AfterFunc(time.Until(t), s.onTimer)
		return
	}
	s.timer.Reset(time.Until(t))
}

// onTimer does what has become due: expiry of messages, and the consumers'
// deadlines.
func (s *Stream) onTimer() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || s.e.failed.Load() || s.e.closing.Load() {
		return
	}
	s.timerAt = time.Time{}
	now := time.Now()
	for name, c := range s.consumers {
		next := c.m.Deadline()
		if !next.IsZero() && !next.After(now) {
			if _, dead := c.m.Tick(now); dead {
				created := c.m.Created()
				s.e.async.add(0, func() { _ = s.e.removeConsumer(s, name, created) })
			} else if c.m.Pump(now) {
				s.wakePump()
			}
			next = c.m.Deadline()
		}
		s.arm(next)
	}
	if at, ok := s.m.NextExpiry(); ok && !s.expiring {
		if aged := s.aged(now); at <= aged {
			s.expire(aged)
		} else {
			s.armExpiry()
		}
	}
	s.settleUnlogged()
	s.pub.Flush()
}

// expire has messages removed that are due. The caller holds the lock.
func (s *Stream) expire(now int64) {
	rec := (&command.Expire{Now: now}).AppendTo(nil)
	s.expiring = true
	if s.memory {
		if _, err := s.applyMemory(rec); err != nil {
			s.e.fail(err)
		}
		return
	}
	if err := s.e.prop.ProposeLazy(s.group, nil, rec); err != nil {
		// There is no room, and perhaps nobody publishes who would bring the
		// timer back.
		s.expiring = false
		s.arm(time.Now().Add(spaceRetry))
		return
	}
	s.e.prop.Kick()
}

// propose hands in a command and waits until it was applied.
func (s *Stream) propose(rec []byte) (callResult, error) {
	if s.memory {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.stopped {
			return callResult{err: api.ErrStreamNotFound}, nil
		}
		r, err := s.applyMemory(rec)
		return callResult{Result: r, stream: s}, err
	}
	return s.e.propose(s.group, rec)
}

// propose hands in a command and waits until it was applied.
func (e *Engine) propose(g storage.GroupID, rec []byte) (callResult, error) {
	ch := make(chan callResult, 1)
	propose := e.prop.ProposeUrgent // of all requests, creating a stream alone does not help one whose disk is full
	if command.KindOf(rec) == command.KindStreamCreate {
		propose = e.prop.Propose
	}
	if err := propose(g, &call{fn: func(r callResult) { ch <- r }}, rec); err != nil {
		if noSpace(err) {
			return callResult{}, api.ErrInsufficientResources
		}
		return callResult{}, err
	}
	e.prop.Kick()
	select {
	case r := <-ch:
		return r, nil
	case <-e.broken:
		return callResult{}, storage.ErrFailed
	case <-e.done:
		return callResult{}, ErrClosed
	}
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

// DurableState returns the summary of what a power cut cannot take.
func (s *Stream) DurableState() storage.State { return *s.durable.Load() }

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

// Watch calls fn, which must not block or call the stream, after the durable
// state grew, until cancel is called.
func (s *Stream) Watch(fn func()) (cancel func()) {
	s.watchMu.Lock()
	defer s.watchMu.Unlock()
	s.watchID++
	id := s.watchID
	s.watch[id] = fn
	return func() {
		s.watchMu.Lock()
		defer s.watchMu.Unlock()
		delete(s.watch, id)
	}
}

// Ingest appends what an edge exported. It hands the batch in (call
// [Engine.Kick] after the last one at hand) and returns; done is called when
// the batch is durable and applied, or was refused (command.ErrStaleIncarnation,
// ErrOutOfOrder, ErrDiverged, stream.ErrFull), with the position then held. Calls
// of done are in the order of Ingest; done must not block or call the stream.
// The batch may be reused when Ingest has returned.
func (s *Stream) Ingest(in *command.Ingest, done func(command.Position, error)) {
	finish := func(r callResult) {
		var pos command.Position
		if r.Position != nil {
			pos = *r.Position
		}
		err := r.Err
		if r.err != nil {
			err = r.err
		}
		if s.e.o.SyncInterval <= 0 || s.memory || r.stream == nil {
			done(pos, err)
			return
		}
		to := r.stream // s, or what it was made anew as
		to.durMu.Lock()
		to.ingests = append(to.ingests, pendingIngest{lsn: r.lsn, done: func() { done(pos, err) }})
		to.durMu.Unlock()
	}
	if refused := s.e.room(s, 0); refused != nil {
		done(command.Position{}, refused)
		return
	}
	if !s.memory {
		s.e.pass(s)
		s.warm()
	}
	if splitPosition(s, in, finish) {
		return
	}
	buf := ingestPool.Get().(*[]byte)
	defer ingestPool.Put(buf)
	*buf = in.AppendTo((*buf)[:0])
	if s.memory {
		r, err := s.propose(slices.Clone(*buf))
		if err != nil {
			done(command.Position{}, err)
			return
		}
		finish(r)
		return
	}
	if err := s.e.prop.Propose(s.group, &call{fn: finish}, *buf); noSpace(err) {
		done(command.Position{}, fmt.Errorf("%w: %w", api.ErrInsufficientResources, err))
	} else if err != nil {
		done(command.Position{}, fmt.Errorf("stream %q: %w", s.name, err))
	}
}

var ingestPool = sync.Pool{New: func() any { return new([]byte) }}

// Position returns how far the stream has what an edge's stream holds. With
// Options.SyncInterval set it may be ahead of the disk.
func (s *Stream) Position(edge string, uid [16]byte) (command.Position, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.m.Position(edge, uid)
	if !ok {
		return command.Position{}, false
	}
	return *p, true
}

// DurablePosition is [Stream.Position], returned when a power cut cannot take
// it any more.
func (s *Stream) DurablePosition(edge string, uid [16]byte) (command.Position, bool, error) {
	p, ok := s.Position(edge, uid)
	if err := s.Sync(); err != nil {
		return command.Position{}, false, err
	}
	return p, ok, nil
}

// Sync returns when everything applied so far is durable. That is at once
// unless Options.SyncInterval is set.
func (s *Stream) Sync() error {
	if s.memory {
		return nil
	}
	if err := s.e.wal.SyncWritten(); err != nil {
		return fmt.Errorf("stream %q: %w", s.name, err)
	}
	return nil
}

// Positions returns how far the stream has what edges export, by edge and
// stream ("edge/uid in hex").
func (s *Stream) Positions() map[string]command.Position {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := map[string]command.Position{}
	s.m.Positions(func(edge string, uid [16]byte, p *command.Position) {
		list[edge+"/"+fmt.Sprintf("%x", uid)] = *p
	})
	return list
}

// changes collects the keyed state that changed since the last checkpoint. The
// caller holds the lock. undo takes back what taking snapshots marked as done.
func (s *Stream) changes() (kvs []storage.KV, undo func()) {
	kvs = s.sweep.changes(append(s.m.Changes(), s.lostChanges()...))
	var taken []*consumer.Machine
	for _, name := range slices.Sorted(maps.Keys(s.consumers)) {
		c := s.consumers[name].m
		if c.Durable() && c.Dirty() {
			kvs = append(kvs, storage.KV{Key: prefixConsumer + name, Value: c.Snapshot()})
			taken = append(taken, c)
		}
	}
	for name := range s.lost {
		if c, again := s.consumers[name]; !again || !c.m.Durable() {
			kvs = append(kvs, storage.KV{Key: prefixConsumer + name})
		}
	}
	return kvs, func() {
		for _, c := range taken {
			c.MarkDirty()
		}
	}
}

// checkpoint writes what was applied to the stream's store.
func (s *Stream) checkpoint() error {
	if s.memory {
		return nil
	}
	s.ckptMu.Lock()
	defer s.ckptMu.Unlock()
	s.mu.Lock()
	if s.gone || s.skip > 0 { // the next start would not know any more that there is something to settle
		s.mu.Unlock()
		return nil
	}
	if s.frozen == 0 && s.dirtyFrom != 0 {
		kvs, undo := s.changes()
		if s.store.Freeze(s.applied, kvs) {
			s.m.Saved()
			clear(s.lost)
			s.lostFresh, s.lostGone, s.sweep.fresh = false, nil, false
			s.frozen, s.dirtyFrom = s.dirtyFrom, 0
			s.frozenAt = s.applied
			s.frozenPos = positionsOf(kvs)
		} else {
			undo()
			s.mu.Unlock()
			if f, ok := s.store.(*fileStore); ok {
				// It was closed, as the stream was taken down, or cannot be opened.
				if _, err := f.acquire(); err != nil {
					return fmt.Errorf("checkpoint of stream %q: %w", s.name, err)
				}
				f.release()
			}
			return fmt.Errorf("checkpoint of stream %q: a set is frozen already", s.name)
		}
	}
	frozen, at, positions := s.frozen, s.frozenAt, s.frozenPos
	s.mu.Unlock()
	if frozen == 0 {
		return nil
	}
	// The store must not be ahead of the log: after a power cut the log would
	// give out the numbers of lost records again. No waiting for onCommit here:
	// deleting the stream waits there for ckptMu.
	if err := s.e.wal.SyncWritten(); err != nil {
		return err
	}
	if len(positions) > 0 {
		if err := s.e.copyPositions(s.group, at, s.store.Applied(), positions); err != nil {
			return fmt.Errorf("checkpoint of stream %q: %w", s.name, err)
		}
	}
	if err := s.store.Checkpoint(); err != nil {
		return fmt.Errorf("checkpoint of stream %q: %w", s.name, err)
	}
	s.mu.Lock()
	s.frozen, s.frozenPos = 0, nil
	s.measure()
	parked, lost := s.parked, s.parkedLost
	s.parked = false
	s.mu.Unlock()
	if parked {
		return s.e.loseParked(s, lost)
	}
	return nil
}

// holds returns the first record that the log has to keep for the stream; 0 if
// it needs none.
func (s *Stream) holds() storage.LSN {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.memory || s.gone:
		return 0
	case s.frozen != 0:
		return earlier(s.frozen, storage.LSN(s.keep.Load()))
	}
	return earlier(s.dirtyFrom, storage.LSN(s.keep.Load()))
}

// String names the stream in logs.
func (s *Stream) String() string { return s.name + "#" + strconv.FormatUint(uint64(s.group), 10) }
