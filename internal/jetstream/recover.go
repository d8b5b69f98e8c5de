package jetstream

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/vfs"
	"petiole/storage/wal"
)

// loaders is how many streams are loaded at a time at a start: most of it is
// waiting for the disk.
const loaders = 4

// recover loads the streams that the meta database knows and replays the log.
func (e *Engine) recover() error {
	known, err := e.openMeta()
	if err != nil {
		return err
	}
	e.loadWritten()
	if err := e.adoptStreams(known); err != nil {
		return err
	}
	o := wal.Options{
		FS: e.o.FS, Dir: filepath.Join(e.o.Dir, "wal"), SegmentSize: e.o.SegmentSize,
		// What is under way may come on top of the budget.
		MaxPending:   min(64<<20, e.o.WALBudget/8),
		SyncInterval: e.o.SyncInterval, OnCommit: e.onCommit, OnDurable: e.onDurable, Messages: command.Messages,
		OnSpace: e.onSpace, KeepFree: lowWater, OnFail: e.fail, Log: e.log,
	}
	if err := e.withRoom(func() (err error) { e.wal, err = wal.Open(o); return err }); err != nil {
		return err
	}
	e.prop = newLocalProposer(e.wal)
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	b := e.book
	b.next = max(b.next, known.next)
	b.applied = known.applied
	for i := range known.records {
		r := &known.records[i]
		if r.Config.Storage == api.MemoryStorage {
			r.UID = newUID()
		}
		b.records[r.Group] = r
		b.next = max(b.next, r.Group+1)
	}
	e.nextGroup = b.next
	b.consumers = known.consumers
	// Where the files are gone but the log has all of it, it begins anew.
	created, err := e.creations(known.records)
	if err != nil {
		return err
	}
	newest, err := e.load(known.records, created)
	if err != nil {
		return err
	}
	if known.adopt {
		e.touchPositions()
	}
	replayed := 0
	last := storage.LSN(0)
	err = e.wal.ReplayNotes(func(r wal.Record) error {
		replayed++
		last = r.LSN
		if err := e.boundReplay(&r); err != nil {
			return err
		}
		return e.replay(&r, known.applied)
	}, e.lostRecords, e.noteOf)
	if err != nil {
		return fmt.Errorf("replaying the log: %w", err)
	}
	newest = max(newest, known.applied)
	if w := e.wal.Written(); w < newest {
		if err := e.lostRecords(wal.Lost{First: w + 1, Last: newest, Uncertain: true}); err != nil {
			return fmt.Errorf("taking note of what the log has lost: %w", err)
		}
		e.log.Error("the log ends before what has been checkpointed: it was lost, or is an older copy, and what it alone had is gone",
			"directory", o.Dir, "last_record", w, "checkpointed", newest)
		if err := e.wal.SkipTo(newest + 1); err != nil {
			return err
		}
	}
	end := max(last, e.wal.Written())
	e.lastLSN.Store(uint64(end))
	e.nextGroup = b.next
	for _, d := range e.downs {
		d.upTo, d.records = end, nil // the log has them
	}
	if err := e.parkOrphans(end); err != nil {
		return err
	}
	if err := e.tidy(known); err != nil {
		return err
	}
	for _, s := range *e.streams.Load() {
		if s.store.Applied() == 0 {
			s.begins(storage.LSN(e.lastLSN.Load()))
		}
		if err := e.putAside(s); err != nil {
			return err
		}
		if err := s.restAtStart(); err != nil {
			return err
		}
	}
	if replayed > 0 || len(known.records) > 0 {
		e.log.Info("JetStream recovered", "streams", len(e.groups), "replayed_records", replayed)
	}
	return nil
}

// replay applies a record that the log has kept; the meta database reflects
// those of the meta group up to metaApplied.
func (e *Engine) replay(r *wal.Record, metaApplied storage.LSN) error {
	if r.Group == storage.MetaGroup {
		if r.LSN > metaApplied {
			return e.applyMeta(r)
		}
		return e.recreate(r)
	}
	s := e.groups[r.Group]
	if d := e.downs[r.Group]; d != nil {
		d.hold(r.LSN) // it is read again when the stream's files are repaired
		return nil
	}
	if s == nil && e.metaLost {
		e.orphans[r.Group] = earlier(e.orphans[r.Group], r.LSN)
	}
	if s == nil || s.memory || r.LSN <= s.applied {
		return nil // gone, empty after every start, or checkpointed
	}
	s.mu.Lock()
	err := s.replay(r)
	s.measure()
	s.mu.Unlock()
	if err != nil && isDamage(err) {
		e.takeDown(s, err, []wal.Record{*r})
		return nil
	}
	return err
}

// recreate has a stream that was never checkpointed begin with what it was
// created with, if r is the creation: its record in the meta database may be of
// later, and what is replayed has to meet what it met the first time.
func (e *Engine) recreate(r *wal.Record) error {
	rec, err := createdBy(r)
	if rec == nil || err != nil {
		return err
	}
	s := e.groups[storage.GroupID(rec.Group)]
	if s == nil || s.memory || s.applied >= r.LSN {
		return nil
	}
	again, err := e.newStream(rec, s.store)
	if err != nil {
		return err
	}
	again.begins(r.LSN)
	e.addStream(again)
	return nil
}

// createdBy returns what a record of the meta group has created; nil if that is no
// stream.
func createdBy(r *wal.Record) (*streamRecord, error) {
	var c command.StreamCreate
	if command.KindOf(r.Data) != command.KindStreamCreate || c.Decode(r.Data) != nil {
		return nil, nil
	}
	rec := &streamRecord{Name: c.Name, Group: c.Group, UID: c.UID[:], Created: c.Created}
	return rec, rec.decodeConfig(c.Config)
}

// creationOf returns what a stream was created with, and by which record; nil if
// the log has that no more.
func (e *Engine) creationOf(g storage.GroupID) (rec *streamRecord, at storage.LSN, err error) {
	err = e.scanGroup(storage.MetaGroup, 1, e.wal.Written(), func(*wal.Lost) {}, func(r *wal.Record) error {
		made, err := createdBy(r)
		if made != nil && storage.GroupID(made.Group) == g {
			rec, at = made, r.LSN
			return err
		}
		return nil
	}, func(*wal.Note) {})
	return rec, at, err
}

// creations returns which streams the log has the creation of, if files of any
// are missing; it is for those only that this matters.
func (e *Engine) creations(records []streamRecord) (map[uint64]bool, error) {
	missing := false
	for i := range records {
		r := &records[i]
		if r.Config.Storage == api.MemoryStorage {
			continue
		}
		_, err := os.Stat(e.storePath(storage.GroupID(r.Group)))
		if errors.Is(err, os.ErrNotExist) {
			missing = true
		} else if err != nil {
			return nil, fmt.Errorf("stream %q: %w", r.Name, err)
		}
	}
	created := map[uint64]bool{}
	if !missing {
		return created, nil
	}
	err := e.wal.ReplayLossy(func(r wal.Record) error {
		var c command.StreamCreate
		if r.Group == storage.MetaGroup && command.KindOf(r.Data) == command.KindStreamCreate && c.Decode(r.Data) == nil {
			created[c.Group] = true
		}
		return nil
	}, func(wal.Lost) error { return nil })
	if err != nil {
		return nil, fmt.Errorf("reading the log: %w", err)
	}
	return created, nil
}

// load makes the streams of the meta database's records, and returns the newest
// record of the log that any of them is known to have been checkpointed at.
func (e *Engine) load(records []streamRecord, created map[uint64]bool) (newest storage.LSN, err error) {
	streams := make([]*Stream, len(records))
	errs := make([]error, len(records))
	next := make(chan int, len(records))
	for i := range records {
		next <- i
	}
	close(next)
	var wg sync.WaitGroup
	for range loaders {
		wg.Go(func() {
			for i := range next {
				r := &records[i]
				streams[i], errs[i] = e.loadStream(r, created[r.Group])
			}
		})
	}
	wg.Wait()
	m := make(map[string]*Stream, len(records))
	for i, s := range streams {
		if s == nil && isDamage(errs[i]) {
			r := &records[i]
			e.log.Error("a stream's files are damaged and are going to be repaired", "stream", r.Name,
				"directory", e.streamDir(storage.GroupID(r.Group)), "err", errs[i])
			e.setDown(&downStream{rec: r, cause: errs[i], since: time.Now(), create: created[r.Group]}, true)
			// It goes on from there once it is repaired; the log must not begin before.
			newest = max(newest, storage.LSN(r.LastAt))
			if floor, err := msgstore.ReadFloor(e.streamDir(storage.GroupID(r.Group))); err == nil {
				newest = max(newest, floor.Applied)
			}
			continue
		}
		if s == nil {
			err = errors.Join(err, fmt.Errorf("stream %q: %w", records[i].Name, errs[i]))
			continue
		}
		m[s.name] = s
		e.groups[s.group] = s
		newest = max(newest, s.store.Applied())
	}
	e.streams.Store(&m)
	return newest, err
}

func (e *Engine) loadStream(r *streamRecord, created bool) (*Stream, error) {
	store := e.newStore(storage.GroupID(r.Group), r.Config.Storage, created)
	s, err := e.newStream(r, store)
	if err != nil {
		_ = store.Close() // the first error counts
		return nil, err
	}
	s.mu.Lock()
	if err = e.restorePositions(s); err == nil {
		err = e.readParked(s)
	}
	s.mu.Unlock()
	if err == nil && s.holds() != 0 {
		if err = s.checkpoint(); noSpace(err) {
			err = nil // they are read again next time
		}
	}
	if err != nil {
		_ = store.Close() // the first error counts
		return nil, err
	}
	// What was never checkpointed may have to skip sequences first.
	if store.Applied() > 0 {
		if err := s.restAtStart(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// putAside keeps what could not be read of a stream's keyed state in a file of
// its own, and creates its consumers anew.
func (e *Engine) putAside(s *Stream) error {
	if s.memory {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, kv := range s.unreadable {
		path, err := vfs.FreeName(e.o.FS, filepath.Join(e.streamDir(s.group), "unreadable."))
		if err != nil {
			return err
		}
		if err := e.writeFile(path, append(append([]byte(kv.Key), '\n'), kv.Value...)); err != nil {
			return err
		}
		e.damage.Parked.Add(1)
	}
	if len(s.unreadable) > 0 {
		s.unreadable = nil
		e.recreateConsumers(s)
	}
	if keys := s.m.Unreadable(); len(keys) > 0 {
		e.log.Error("parts of a stream's state cannot be read and were left out", "stream", s.name, "keys", keys)
	}
	known := e.book.consumersOf(uint64(s.group))
	for name, c := range s.consumers {
		if known[name] == nil && c.m.Durable() {
			s.noteConsumer(name)
		}
	}
	return nil
}

// writeFile writes a new file, durably.
func (e *Engine) writeFile(path string, b []byte) error {
	f, err := e.o.FS.Open(path, true)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(b, 0); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close(), e.o.FS.SyncDir(filepath.Dir(path)))
}

// storePath is where msgstore keeps the messages of a group.
func (e *Engine) storePath(g storage.GroupID) string {
	return filepath.Join(e.o.Dir, "streams", groupDir(g), msgstore.FileName)
}

// tidy removes what deleted streams have left behind, and parks directories
// that nothing tells of.
func (e *Engine) tidy(known *metaContents) error {
	root := filepath.Join(e.o.Dir, "streams")
	for _, g := range known.deleted {
		if err := removeDir(e.o.FS, filepath.Join(root, groupDir(storage.GroupID(g)))); err != nil {
			return err
		}
		if err := e.dropPositions(storage.GroupID(g)); err != nil {
			return err
		}
		e.book.dead[g] = struct{}{}
	}
	dirs, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, d := range dirs {
		if d.Name() == parkedDir {
			continue
		}
		group := parseGroupDir(d.Name())
		if _, known := e.book.records[uint64(group)]; known {
			continue
		}
		if _, dying := e.book.dying[uint64(group)]; dying {
			continue // as soon as the meta database does not know it any more
		}
		dir := filepath.Join(root, d.Name())
		if group != 0 && (orphanDelete || neverUsed(dir)) { // made for a creation that did not come to be
			if err := removeDir(e.o.FS, dir); err != nil {
				return err
			}
			continue
		}
		to, err := e.park(dir)
		if err != nil {
			return err
		}
		e.damage.Parked.Add(1)
		e.log.Error("a directory of messages that the list of streams does not know has been put aside; if it is missed, "+
			"the list in meta.db is an older copy: restore the one that belongs to it, and move the directory back",
			"directory", dir, "parked", to)
	}
	return nil
}

// neverUsed reports whether a directory has been made for a stream and never
// been checkpointed into, so that there is nothing in it.
func neverUsed(dir string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	// A file that was being made does not have its name yet.
	entries = slices.DeleteFunc(entries, func(f fs.DirEntry) bool { return f.Name() == msgstore.FileName+".new" })
	// So is the floor before a first checkpoint.
	if _, err := msgstore.ReadFloor(dir); errors.Is(err, fs.ErrNotExist) {
		entries = slices.DeleteFunc(entries, func(f fs.DirEntry) bool { return f.Name() == msgstore.FloorName })
	}
	for _, f := range entries {
		if f.Name() != msgstore.FileName && f.Name() != msgstore.FloorName {
			return false // what was parked there, say
		}
	}
	if _, err := os.Stat(filepath.Join(dir, msgstore.FileName)); errors.Is(err, fs.ErrNotExist) {
		return len(entries) == 0
	}
	s, err := msgstore.Open(dir, msgstore.Options{})
	if err != nil {
		return false
	}
	empty := s.Applied() == 0 && s.State().Last == 0
	return s.Close() == nil && empty
}

// parkedDir is the directory for what is put aside: in the store, or beside it,
// among the streams, if those lie on another file system.
const parkedDir = "parked"

// park moves a file or directory of the store to where nothing looks for it,
// and returns where that is.
func (e *Engine) park(path string) (string, error) {
	to, err := e.parkIn(filepath.Join(e.o.Dir, parkedDir), path)
	if errors.Is(err, syscall.EXDEV) { // who has moved the streams to another disk has left a link in their place
		return e.parkIn(filepath.Join(e.o.Dir, "streams", parkedDir), path)
	}
	return to, err
}

func (e *Engine) parkIn(parked, path string) (string, error) {
	if err := e.o.FS.MkdirAll(parked); err != nil {
		return "", err
	}
	to := filepath.Join(parked, filepath.Base(path)+"."+strconv.FormatInt(time.Now().Unix(), 10))
	for i := 1; ; i++ {
		if _, err := os.Lstat(to); errors.Is(err, fs.ErrNotExist) {
			break
		}
		to = fmt.Sprintf("%s.%d", to, i)
	}
	if err := e.o.FS.Rename(path, to); err != nil {
		return "", err
	}
	return to, errors.Join(e.o.FS.SyncDir(parked), e.o.FS.SyncDir(filepath.Dir(path)))
}

// removeDir removes a directory with the files in it, durably; one that is not
// there is no error.
func removeDir(fsys vfs.FS, dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	// What is read last goes first: without it nothing is a store any more.
	slices.SortFunc(entries, func(a, b fs.DirEntry) int {
		switch {
		case a.Name() == msgstore.FileName:
			return -1
		case b.Name() == msgstore.FileName:
			return 1
		}
		return 0
	})
	for _, f := range entries {
		path := filepath.Join(dir, f.Name())
		if f.IsDir() {
			err = removeDir(fsys, path)
		} else {
			err = fsys.Remove(path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := fsys.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := fsys.SyncDir(filepath.Dir(dir)); err != nil {
		return fmt.Errorf("%w: %w", storage.ErrFailed, err) // as any sync
	}
	return nil
}
