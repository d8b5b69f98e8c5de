package jetstream

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// A stream whose store turns out to be damaged is taken out of service, alone:
//
//	serves ──damage──► repaired ──► replayed from the log ──► serves again
//	                      │ cannot be
//	                      ▼
//	                 quarantined: files stay, log records are parked beside them
//
// Everything it had in memory is dropped and made anew from its files and the
// log, as by a restart, so that no step needs to be taken back.

// downStream is a stream out of service. It is guarded by Engine.applyMu, but
// for what is published through Engine.downNames.
type downStream struct {
	rec   *streamRecord
	cause error
	last  error // of repair: what is to be repaired
	since time.Time
	// quarantined says why it cannot be repaired; nil: that is under way.
	quarantined atomic.Pointer[error]
	// full says why its repair found no room, nil if it did not: it is tried again.
	full    atomic.Pointer[string]
	freeAt  int64     // octets that the file system had then
	freedAt uint64    // space.freed then
	retryAt time.Time // when it is tried again if nothing tells that there is room
	// repairing is held by its repair, and by who parks its records.
	repairing sync.Mutex
	told      bool // that there is no room
	mended    bool // what is intact of the file is a whole again
	deleted   bool
	old       *Stream // what served; nil if nothing has since the start
	create    bool    // the log has all of it, or it begins anew: there may be no file
	accept    bool    // its file is older than it has been, and there is no other
	// The log has to keep its records from from on (0: none). Of those, records
	// has what was committed since it went down, the log what is before.
	from    atomic.Uint64
	upTo    storage.LSN // of the last record not in records
	records []wal.Record
	subs    []*broker.Subscription
	reports []msgstore.RepairReport
}

func (d *downStream) reason() string {
	if why := d.full.Load(); why != nil {
		return fmt.Sprintf("its files are damaged, and there is no room to repair them (%s); make room: it is tried again", *why)
	}
	if why := d.quarantined.Load(); why != nil {
		return fmt.Sprintf("its files are damaged and could not be repaired (%v); see the server's log", *why)
	}
	return fmt.Sprintf("its files are damaged and are being repaired (%v)", d.cause)
}

// DownStream describes a stream that does not serve.
type DownStream struct {
	Name        string
	Group       storage.GroupID
	Quarantined bool // it cannot be repaired; otherwise it will serve again soon
	Waiting     bool // for room to repair it
	Reason      string
	Since       time.Time
}

// DownStreams returns the streams that do not serve because their files are
// damaged, by name.
func (e *Engine) DownStreams() []DownStream {
	var list []DownStream
	m := *e.downNames.Load()
	for _, name := range slices.Sorted(maps.Keys(m)) {
		d := m[name]
		list = append(list, DownStream{
			Name: name, Group: storage.GroupID(d.rec.Group), Quarantined: d.quarantined.Load() != nil, Waiting: d.full.Load() != nil, Reason: d.reason(), Since: d.since,
		})
	}
	return list
}

// offline returns the error for requests to a stream that does not serve, nil
// if there is none of that name.
func (e *Engine) offline(name string) *api.Error {
	if d := (*e.downNames.Load())[name]; d != nil {
		return d.refusal()
	}
	return nil
}

// refusal is what requests and publishes are answered.
func (d *downStream) refusal() *api.Error {
	if d.full.Load() != nil {
		return api.ErrInsufficientResources
	}
	return api.ErrStreamOfflineReason.With("err", d.reason())
}

// setDown adds a stream to those that do not serve, or takes it out. The caller
// holds applyMu.
func (e *Engine) setDown(d *downStream, down bool) {
	m := maps.Clone(*e.downNames.Load())
	if down {
		m[d.rec.Name] = d
		e.downs[storage.GroupID(d.rec.Group)] = d
	} else {
		delete(m, d.rec.Name)
		delete(e.downs, storage.GroupID(d.rec.Group))
		for _, sub := range d.subs {
			sub.Close()
		}
		d.subs = nil
	}
	e.downNames.Store(&m)
}

// refuseSubjects answers those who publish to a stream that does not serve.
func (e *Engine) refuseSubjects(d *downStream) {
	for _, subj := range d.rec.Config.Subjects {
		sub, err := e.account.Handle(subj, func(m *broker.Msg) {
			if len(m.Reply) > 0 {
				refused := api.AppendPubErr(nil, d.rec.Name, d.refusal())
				if m.Client != nil {
					m.Respond(nil, refused)
				}
			}
		})
		if err == nil { // it was good when the stream was created
			d.subs = append(d.subs, sub)
		}
	}
}

// isDamage reports whether an error is about what a stream's files hold, so
// that it concerns that stream alone. A write or sync that failed is not: it
// ends the process.
func isDamage(err error) bool {
	if errors.Is(err, storage.ErrFailed) {
		return false
	}
	return errors.Is(err, storage.ErrCorrupt) || errors.Is(err, syscall.EIO) || errors.Is(err, command.ErrMalformed)
}

// takeDown takes a stream out of service because of damage; rest are records
// committed for it and not applied. The caller holds applyMu, and no stream's
// lock.
func (e *Engine) takeDown(s *Stream, cause error, rest []wal.Record) {
	rec, ok := e.book.record(uint64(s.group))
	if !ok {
		return // deleted
	}
	d := &downStream{rec: rec, cause: cause, since: time.Now(), old: s, upTo: storage.LSN(e.lastLSN.Load())}
	from := s.holds()
	if len(rest) > 0 {
		d.records = slices.Clone(rest)
		d.upTo = rest[0].LSN - 1
		from = earlier(from, rest[0].LSN)
	}
	d.from.Store(uint64(from))
	e.log.Error("a stream's files are damaged; it is taken out of service and repaired, the others go on",
		"stream", s.name, "directory", e.streamDir(s.group), "err", cause)
	e.setDown(d, true) // before it is taken out: trim asks the streams first
	e.removeStream(s)
	s.stop()
	s.mu.Lock()
	s.account(0)
	s.mu.Unlock()
	for i := range rest {
		e.refuse(&rest[i], e.offline(s.name))
	}
	if e.live {
		e.refuseSubjects(d)
	}
	if e.live && !e.closing.Load() {
		e.streamsChanged()
		e.spawn(func() { e.repair(d) })
	}
}

// late takes a record of a stream that does not serve. The caller holds applyMu.
func (d *downStream) late(r *wal.Record) {
	d.records = append(d.records, wal.Record{LSN: r.LSN, Group: r.Group, Last: r.Last, Data: r.Data})
	if d.from.Load() == 0 {
		d.from.Store(uint64(r.LSN))
		d.upTo = r.LSN - 1
	}
}

// hold has the log keep what a stream out of service needs of it from lsn on.
func (d *downStream) hold(lsn storage.LSN) {
	d.from.Store(uint64(earlier(storage.LSN(d.from.Load()), lsn)))
}

// firstRepairs is how long a start waits at most for the repairs of streams found
// damaged: most take no time, and clients need not see them.
const firstRepairs = 3 * time.Second

// startRepairs begins the repairs of streams found damaged by recovery.
func (e *Engine) startRepairs() {
	m := *e.downNames.Load()
	if len(m) == 0 {
		return
	}
	var wg sync.WaitGroup
	for _, d := range m {
		e.refuseSubjects(d)
		wg.Add(1)
		if !e.spawn(func() {
			defer wg.Done()
			e.repair(d)
		}) {
			wg.Done()
		}
	}
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(firstRepairs):
	}
}

// noteDamage has a stream taken down, soon: the damage was met while reading.
func (e *Engine) noteDamage(f *fileStore, err error) {
	e.mu.Lock()
	if !slices.ContainsFunc(e.suspects, func(x suspect) bool { return x.store == f }) {
		e.suspects = append(e.suspects, suspect{f, err})
	}
	e.mu.Unlock()
	e.wakeKeeper()
}

type suspect struct {
	store *fileStore
	err   error
}

// takeDownSuspects takes down the streams whose readers have met damage.
func (e *Engine) takeDownSuspects() {
	e.mu.Lock()
	list := e.suspects
	e.suspects = nil
	e.mu.Unlock()
	if len(list) == 0 {
		return
	}
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	for _, x := range list {
		for _, s := range e.groups {
			if s.store == storage.Store(x.store) {
				if !e.mendServing(s, x.store, x.err) {
					e.takeDown(s, x.err, nil)
				}
				break
			}
		}
	}
}

func (e *Engine) streamDir(g storage.GroupID) string {
	return filepath.Join(e.o.Dir, "streams", groupDir(g))
}
