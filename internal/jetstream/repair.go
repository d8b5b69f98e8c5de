package jetstream

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/storage"
	"petiole/storage/msgstore"
)

// repairs is how often a repair is tried that is found not to have been enough.
const repairs = 3

// repair brings a stream back into service, or quarantines it. If there is no
// room for that it is tried again.
func (e *Engine) repair(d *downStream) {
	d.repairing.Lock()
	defer d.repairing.Unlock()
	e.applyMu.Lock()
	down := e.downs[storage.GroupID(d.rec.Group)] == d
	e.applyMu.Unlock()
	if !down {
		return // deleted, or repaired already
	}
	d.full.Store(nil)
	freed := e.space.freed.Load()
	err := e.tryRepair(d)
	switch {
	case err == nil || errors.Is(err, storage.ErrClosed):
	case errors.Is(err, storage.ErrFailed):
		e.fail(fmt.Errorf("repairing stream %q: %w", d.rec.Name, err))
	case e.closing.Load() || e.failed.Load():
	case noSpace(err):
		e.repairLater(d, err, freed)
	default:
		e.quarantine(d, err)
		e.log.Error("a stream is quarantined: its files cannot be repaired. They stay as they are, with what the log had beside them in "+parkedName+
			"; stop the server and try `storage salvage`, restore the directory from a backup, or delete the stream. The other streams go on",
			"stream", d.rec.Name, "directory", e.streamDir(storage.GroupID(d.rec.Group)), "err", err)
	}
}

func (e *Engine) tryRepair(d *downStream) error {
	if d.old != nil {
		// An older state of the file may be what is intact.
		e.trimMu.Lock()
		d.hold(e.wal.Oldest())
		e.trimMu.Unlock()
	}
	if err := e.parkAhead(d); err != nil {
		return fmt.Errorf("%w: parking the log's records: %w", storage.ErrFailed, err)
	}
	if err := e.mend(d); err != nil {
		return err
	}
	err := d.cause
	for range repairs {
		if e.closing.Load() || e.failed.Load() {
			return nil
		}
		d.last = err
		if !d.mended {
			if err = e.salvage(d); err != nil {
				break
			}
			d.mended = true
		}
		var s *Stream
		if s, err = e.rebuild(d); err == nil {
			err = e.settleDown(s)
		}
		if err == nil {
			if err = e.bringUp(d, s); err == nil {
				return nil
			}
		}
		if s != nil {
			_ = s.store.Close()
		}
		if !isDamage(err) {
			break
		}
		d.mended = false
	}
	return err
}

// mend repairs the file of a stream that served while it is open, for that knows
// what the file does not, and closes it. What that cannot is salvaged from
// outside.
func (e *Engine) mend(d *downStream) (err error) {
	if d.old == nil {
		return nil
	}
	d.old.ckptMu.Lock() // a checkpoint that runs comes to an end
	defer d.old.ckptMu.Unlock()
	old := d.old.store
	d.old = nil
	if f, ok := old.(*fileStore); ok && f.isOpen() && e.o.salvage == nil && !errors.Is(d.cause, msgstore.ErrStale) {
		var rep msgstore.RepairReport
		err = f.peek(func(t tidyable) (err error) {
			rep, err = t.Repair(e.ending, nil)
			return err
		})
		switch {
		case err == nil && rep.File != "":
			d.reports, d.mended = append(d.reports, rep), true
		case errors.Is(err, storage.ErrFailed) || noSpace(err):
		case err != nil:
			e.log.Warn("a damaged file could not be repaired while it was open", "stream", d.rec.Name, "err", err)
			err = nil
		}
	}
	_ = old.Close() // what it had in memory is in the log
	return err
}

const (
	// repairEvery is how long a repair that found no room waits before it is tried
	// again, though nothing tells that there is; repairRoom how much more there has
	// to be for that not to be in vain.
	repairEvery = 30 * time.Second
	repairRoom  = 1 << 20
)

// repairLater has a repair tried again that has found no room.
func (e *Engine) repairLater(d *downStream, err error, freed uint64) {
	why := err.Error()
	if free, ferr := e.o.FS.Free(e.o.Dir); ferr == nil {
		d.freeAt = free
	}
	d.freedAt, d.retryAt = freed, time.Now().Add(repairEvery)
	if d.full.Swap(&why) == nil && !d.told {
		d.told = true
		e.log.Error("there is no room to repair a stream: it does not serve until there is; make room", "stream", d.rec.Name, "err", err)
	}
	e.wakeKeeper() // its records are parked meanwhile, if there is room for them
	e.trySpace()
}

// retryRepairs tries the repairs again for which there may be room now.
func (e *Engine) retryRepairs() {
	for _, d := range *e.downNames.Load() {
		if d.full.Load() == nil || !d.repairing.TryLock() {
			continue
		}
		free, err := e.o.FS.Free(e.o.Dir)
		due := d.freedAt != e.space.freed.Load() || err == nil && free >= d.freeAt+repairRoom || time.Now().After(d.retryAt)
		d.repairing.Unlock()
		if !due {
			e.trySpace()
			continue
		}
		e.spawn(func() { e.repair(d) })
	}
}

// salvageFile salvages the files in a stream's directory, which are not open.
func (e *Engine) salvageFile(dir string) (msgstore.RepairReport, error) {
	if e.o.salvage != nil {
		return e.o.salvage(dir)
	}
	o := msgstore.SalvageOptions{Log: e.log}
	if e.wal != nil {
		o.LogFrom = e.wal.Oldest()
		if floor, err := msgstore.ReadFloor(dir); err == nil && floor.Applied > e.wal.Written() {
			o.LogFrom = 0 // it ends before: it is a new one, or an older copy
		}
	}
	return msgstore.Salvage(dir, o)
}

// salvage has the store make what is intact of its files a whole again.
func (e *Engine) salvage(d *downStream) error {
	group := storage.GroupID(d.rec.Group)
	dir := e.streamDir(group)
	if stale := (*msgstore.StaleError)(nil); errors.As(d.last, &stale) && !d.accept {
		// It is whole, but an older copy, or another's, or there is none.
		d.accept = true
		rep := msgstore.RepairReport{File: stale.File, KeysDoubtful: true, Damage: []string{stale.Error()}}
		if stale.Lost.First <= stale.Lost.Last {
			rep.Lost = []storage.Span{stale.Lost}
		}
		if stale.Foreign {
			var err error
			if rep.Parked, err = e.park(stale.File); err != nil {
				return err
			}
			e.damage.Parked.Add(1)
		}
		d.reports = append(d.reports, rep)
		return nil
	}
	rep, err := e.salvageFile(dir)
	if err == nil {
		d.reports = append(d.reports, rep)
		return nil
	}
	if !errors.Is(err, storage.ErrCorrupt) && !errors.Is(err, fs.ErrNotExist) {
		return err // it may be intact, and the disk is not
	}
	// Nothing is left to begin with. The stream goes on, empty, behind the last
	// sequence known.
	fresh := msgstore.RepairReport{File: e.storePath(group), KeysDoubtful: true, Damage: []string{err.Error()}}
	if _, serr := os.Stat(e.storePath(group)); serr == nil {
		if fresh.Parked, err = e.park(e.storePath(group)); err != nil {
			return err
		}
		e.damage.Parked.Add(1)
	}
	if err := e.o.FS.MkdirAll(dir); err != nil {
		return err
	}
	d.create = true
	if last := d.rec.Last; last > 0 && d.rec.First <= last {
		fresh.Lost = []storage.Span{{First: max(d.rec.First, 1), Last: last}}
	}
	d.reports = append(d.reports, fresh)
	return nil
}

// rebuild makes the stream anew from its repaired files, what was parked, and
// the log up to when it went down.
func (e *Engine) rebuild(d *downStream) (*Stream, error) {
	group := storage.GroupID(d.rec.Group)
	rec, at := d.rec, storage.LSN(0)
	if d.create && rec.Last == 0 {
		// It was never checkpointed: what is replayed has to meet what it met the first
		// time, not what the stream has become since.
		made, lsn, err := e.creationOf(group)
		if err != nil {
			return nil, err
		}
		if made != nil {
			rec, at = made, lsn
		}
	}
	store := e.newFileStore(group, d.create)
	store.accept = d.accept
	s, err := e.newStream(rec, store)
	if err != nil {
		_ = store.Close()
		return nil, err
	}
	if at > s.applied {
		s.begins(at)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := store.with(func(st backing) error {
		if m, ok := st.(*msgstore.Store); ok && m.Stale() != nil {
			// What the log has of before was counted when the floor was written.
			s.applied = max(s.applied, m.Stale().Floor.Applied)
		}
		return nil
	}); err != nil {
		return s, err
	}
	if d.create && d.rec.Last > 0 && s.applied == 0 {
		if err := store.Skip(d.rec.Last); err != nil {
			return s, err
		}
		s.applied = storage.LSN(d.rec.LastAt)
	}
	if s.dirtyFrom == 0 { // all of the keyed state is to be written again
		s.dirtyFrom = s.applied + 1
	}
	s.m.Touch()
	for _, c := range s.consumers {
		c.m.MarkDirty()
	}
	if err := e.restorePositions(s); err != nil {
		return s, err
	}
	if err := e.readParked(s); err != nil {
		return s, err
	}
	if d.upTo <= s.applied {
		return s, nil
	}
	return s, e.scanGroup(group, s.applied+1, d.upTo, s.miss, s.replay, s.heed)
}

// bringUp puts a repaired stream into service.
func (e *Engine) bringUp(d *downStream, s *Stream) error {
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	if d.deleted {
		return s.store.Close()
	}
	err := func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		for i := range d.records {
			if r := &d.records[i]; r.LSN > s.applied {
				if err := s.replay(r); err != nil {
					return err
				}
			}
		}
		e.missingConsumers(d, s)
		for _, rep := range d.reports {
			for _, span := range rep.Lost {
				s.addLost(span, d.since)
			}
		}
		return nil
	}()
	if err != nil {
		return err
	}
	e.serveAgain(d, s)
	e.report(d, s)
	if e.live {
		if err := s.start(); err != nil {
			return err
		}
		e.streamsChanged()
		e.spawn(func() { // so that the repaired files do without the log
			if err := e.settle(s, s.checkpoint()); err != nil {
				e.failBehind(fmt.Errorf("checkpoint of the repaired stream %q: %w", s.name, err))
			}
		})
	}
	return nil
}

// serveAgain puts a stream in the place of what it was while it was down. The
// caller holds applyMu.
func (e *Engine) serveAgain(d *downStream, s *Stream) {
	e.moveMu.Lock()
	defer e.moveMu.Unlock()
	e.setDown(d, false)
	e.addStream(s)
}

// everyone returns the streams that serve and those that do not. One that is
// being moved is among them, as one of the two.
func (e *Engine) everyone() (map[string]*Stream, map[string]*downStream) {
	e.moveMu.Lock()
	defer e.moveMu.Unlock()
	return *e.streams.Load(), *e.downNames.Load()
}

// missingConsumers creates anew the consumers whose state the damage took, with
// what the meta database knows of them. The caller holds the stream's lock.
func (e *Engine) missingConsumers(d *downStream, s *Stream) {
	doubtful := len(s.unreadable) > 0
	for i := range d.reports {
		r := &d.reports[i]
		doubtful = doubtful || r.KeysDoubtful || slices.ContainsFunc(r.LostKeys, func(k string) bool { return strings.HasPrefix(k, prefixConsumer) })
	}
	if doubtful {
		e.recreateConsumers(s)
	}
}

// recreateConsumers creates the consumers that the meta database knows and the
// stream has not. The caller holds the stream's lock.
func (e *Engine) recreateConsumers(s *Stream) {
	for name, c := range e.book.consumersOf(uint64(s.group)) {
		if s.consumers[name] != nil {
			continue
		}
		s.putConsumer(name, &c.Config, time.Unix(0, c.Created).UTC())
		if s.dirtyFrom == 0 {
			s.dirtyFrom = s.applied + 1
		}
		e.damage.Consumers.Add(1)
		e.log.Error("the state of a consumer was damaged; it is created anew with its configuration and delivers again what it had delivered",
			"stream", s.name, "consumer", name)
	}
}

// report tells of a repair.
func (e *Engine) report(d *downStream, s *Stream) {
	e.damage.Repairs.Add(1)
	adv := api.StreamDamagedAdvisory{
		Type: api.AdvisoryStreamDamaged, ID: rand.Text()[:22], Time: time.Now().UTC(), Stream: s.name, Reason: d.cause.Error(),
	}
	var parked []string
	for i := range d.reports {
		r := &d.reports[i]
		adv.LostMsgs += r.LostMsgs()
		for _, span := range r.Lost {
			adv.Lost = append(adv.Lost, api.SeqSpan{First: span.First, Last: span.Last})
		}
		adv.LostKeys = append(adv.LostKeys, r.LostKeys...)
		if r.Parked != "" {
			parked = append(parked, r.Parked)
		}
	}
	adv.Parked = parked
	e.damage.LostMsgs.Add(adv.LostMsgs)
	e.log.Error("a damaged stream has been repaired and serves again; messages lost are gaps, sequences have not changed. Check the disk; "+
		"the damaged file is kept, remove it when it is not needed any more",
		"stream", s.name, "lost_messages", adv.LostMsgs, "lost", adv.Lost, "lost_keys", adv.LostKeys, "parked", parked, "took", time.Since(d.since))
	if b, err := json.Marshal(&adv); err == nil && e.live {
		e.account.Publish(api.AdvisoryStreamDamagedSubject+"."+s.name, "", nil, b)
	}
}

// quarantine leaves a stream out of service for good.
func (e *Engine) quarantine(d *downStream, err error) {
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	d.quarantined.Store(&err)
	e.damage.Quarantines.Add(1)
	adv := api.StreamDamagedAdvisory{
		Type: api.AdvisoryStreamDamaged, ID: rand.Text()[:22], Time: time.Now().UTC(), Stream: d.rec.Name,
		Reason: err.Error(), Quarantined: true,
	}
	if b, err := json.Marshal(&adv); err == nil {
		e.account.Publish(api.AdvisoryStreamDamagedSubject+"."+d.rec.Name, "", nil, b)
	}
	e.wakeKeeper()
}
