package jetstream

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/vfs"
	"petiole/storage/wal"

	berrors "go.etcd.io/bbolt/errors"
)

// A full disk is a state, not a failure. What it takes to get out of it is set
// aside beforehand: the log keeps segments for acknowledgements and deletions,
// and a file of no use, the ballast, is given up when a checkpoint, without
// which the log could not be shortened, finds no room. It is made again when
// there is room for it several times over.

const (
	ballastName = "ballast"
	maxBallast  = 32 << 20
	minBallast  = 1 << 20
	// lowWater is what publishing leaves free on the file system: without any
	// room nothing could be made anew for what has been purged.
	lowWater = 2 << 20
	// ballastPart is which part of what is free the ballast takes at most.
	ballastPart = 16
	// spaceRetry is how long what found no room waits before it is tried again.
	spaceRetry = time.Second
	// ballastRetry is how often it is looked whether there is room for it again.
	ballastRetry = 15 * time.Second
)

// space is what the engine knows of the room on its file system.
type space struct {
	logFull atomic.Bool // the log has no room for another segment
	full    atomic.Bool // a checkpoint, or the list of streams, found no room
	ballast atomic.Int64
	// unsettled: what the log has lost could not be settled for want of room.
	unsettled atomic.Bool
	freed     atomic.Uint64 // how often it was found that there is room again

	mu    sync.Mutex
	since time.Time // when it became full; zero: it is not
	err   error
	retry *time.Timer
}

// noSpace reports whether err is for want of room on the file system.
func noSpace(err error) bool {
	return err != nil && (vfs.IsNoSpace(err) || errors.Is(err, wal.ErrNoSpace) || errors.Is(err, berrors.ErrMaxSizeReached))
}

// refused returns the error for a publish that the log did not take.
func refused(err error) *api.Error {
	if noSpace(err) {
		return api.ErrInsufficientResources
	}
	return api.ErrStreamStoreFailed.With("err", err)
}

// onSpace is told by the log whether it has room for another segment.
func (e *Engine) onSpace(full bool) {
	e.space.logFull.Store(full)
	if !full {
		e.roomAgain()
	}
	var err error
	if full {
		err = wal.ErrNoSpace
	}
	e.spaceChanged(err)
	e.wakeCheckpointer()
}

// noRoom says that something found no room: the ballast is given up, and
// whatever it was is tried again soon.
func (e *Engine) noRoom(err error) {
	e.space.full.Store(true)
	e.dropBallast()
	e.spaceChanged(err)
	e.trySpace()
}

// low says that no more may be published: what room there is is needed to make
// room.
func (e *Engine) low() {
	e.space.full.Store(true)
	e.spaceChanged(fmt.Errorf("%w: less than %d octets are left", syscall.ENOSPC, lowWater))
	e.trySpace()
}

// trySpace has everything that needs room tried again soon.
func (e *Engine) trySpace() {
	e.space.mu.Lock()
	defer e.space.mu.Unlock()
	if e.space.retry == nil {
		e.space.retry = time.AfterFunc(spaceRetry, func() {
			e.wakeCheckpointer()
			e.wakeKeeper()
		})
		return
	}
	e.space.retry.Reset(spaceRetry)
}

// hasRoom says that what found no room before has found it.
func (e *Engine) hasRoom() {
	if e.space.full.Load() {
		e.space.full.Store(false)
		e.roomAgain()
		e.spaceChanged(nil)
	}
}

// roomAgain has the keeper try again what waits for room.
func (e *Engine) roomAgain() {
	e.space.freed.Add(1)
	e.wakeKeeper()
}

// spaceChanged brings the state up to date, and tells of it in the log.
func (e *Engine) spaceChanged(err error) {
	s := &e.space
	s.mu.Lock()
	defer s.mu.Unlock()
	full := s.logFull.Load() || s.full.Load()
	switch {
	case full && s.since.IsZero():
		s.since, s.err = time.Now(), err
		e.log.Error("the file system of the store is full: messages are refused until there is room, acknowledgements and deletions still work; "+
			"make room, or delete or purge streams. It goes on by itself", "directory", e.o.Dir, "err", err)
	case full && err != nil:
		s.err = err
	case !full && !s.since.IsZero():
		e.log.Info("the file system of the store has room again", "directory", e.o.Dir, "full_for", time.Since(s.since).Round(time.Millisecond))
		s.since, s.err = time.Time{}, nil
	}
}

// SpaceStats describes the room on the store's file system. Sizes are in octets.
type SpaceStats struct {
	Full    bool      // messages are refused for want of room
	Since   time.Time // since when; zero if not
	Reason  string    // what found no room
	Free    int64     // what the file system says, -1 if it does not
	Ballast int64     // of the file that is given up when there is no room; 0 if there is none now
}

// Space describes the room on the store's file system.
func (e *Engine) Space() SpaceStats {
	s := &e.space
	s.mu.Lock()
	st := SpaceStats{Full: !s.since.IsZero(), Since: s.since, Ballast: s.ballast.Load(), Free: -1}
	if s.err != nil {
		st.Reason = s.err.Error()
	}
	s.mu.Unlock()
	if free, err := e.o.FS.Free(e.o.Dir); err == nil {
		st.Free = free
	}
	return st
}

func (e *Engine) ballastPath() string { return filepath.Join(e.o.Dir, ballastName) }

// makeBallast makes the ballast, if there is none and room enough.
func (e *Engine) makeBallast() {
	if e.space.ballast.Load() > 0 || e.space.full.Load() || e.space.logFull.Load() {
		return
	}
	if fi, err := e.o.FS.Stat(e.ballastPath()); err == nil && fi.Size() >= minBallast {
		e.space.ballast.Store(fi.Size())
		return
	}
	free, err := e.o.FS.Free(e.o.Dir)
	size := min(free/ballastPart, maxBallast) &^ 4095
	if err != nil || size < minBallast {
		return
	}
	if err := e.preallocate(e.ballastPath(), size); err != nil {
		e.log.Debug("no ballast", "err", err)
		_ = e.o.FS.Remove(e.ballastPath())
		return
	}
	e.space.ballast.Store(size)
}

func (e *Engine) preallocate(path string, size int64) error {
	f, err := e.o.FS.Open(path, true)
	if err != nil {
		return err
	}
	return errors.Join(f.Preallocate(size), f.Close())
}

// dropBallast gives the ballast up.
func (e *Engine) dropBallast() {
	size := e.space.ballast.Swap(0)
	if err := e.o.FS.Remove(e.ballastPath()); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			e.log.Warn("the ballast cannot be removed", "err", err)
		}
		return
	}
	if err := e.o.FS.SyncDir(e.o.Dir); err != nil && !noSpace(err) { // which makes the room available
		e.fail(fmt.Errorf("giving up the ballast: %w", err)) // the directory's other entries may be lost
		return
	}
	e.log.Warn("the ballast was given up, so that the store can go on without room", "file", e.ballastPath(), "octets", size)
	time.AfterFunc(ballastRetry, e.wakeKeeper)
}

const (
	// filesWait is how long it is waited for others to close files if no more may be
	// open; then the store has failed.
	filesWait  = 10 * time.Second
	filesRetry = 5 * time.Millisecond
)

// withRoom runs fn, and once more without the ballast if there was no room. If too
// many files are open it is run again when others have been closed.
func (e *Engine) withRoom(fn func() error) error {
	err := fn()
	for begun := time.Now(); vfs.IsNoFiles(err) && !e.closing.Load() && time.Since(begun) < filesWait; err = fn() {
		e.fewFiles.Store(true)
		e.wakeKeeper()
		time.Sleep(filesRetry)
	}
	if noSpace(err) {
		if _, serr := e.o.FS.Stat(e.ballastPath()); serr == nil {
			e.dropBallast()
			err = fn()
		}
	}
	return err
}

// fits returns an error if a stream's next checkpoint is not going to find room:
// it would take what is left, in vain, from one that makes room.
func (e *Engine) fits(s *Stream) error {
	f, ok := s.store.(*fileStore)
	table := s.store.TableBytes()
	if !ok || table < minBallast {
		return nil
	}
	need := table + table/4 + minBallast
	free, err := e.o.FS.Free(e.o.Dir)
	if err != nil || free >= need {
		return nil // it is for the checkpoint to find out
	}
	_ = f.with(func(st backing) error {
		if m, ok := st.(*msgstore.Store); ok {
			if w, err := m.Waste(); err == nil {
				free += w.Free
			}
		}
		return nil
	})
	if free >= need {
		return nil
	}
	return fmt.Errorf("checkpoint of stream %q: %w: about %d octets are needed, there are %d", s.name, syscall.ENOSPC, need, free)
}

// fitAll reports whether there is room for the checkpoints of all streams of a
// list.
func (e *Engine) fitAll(list []*Stream) bool {
	need := int64(lowWater)
	for _, s := range list {
		table := s.store.TableBytes()
		need += table + table/4 + 64<<10
	}
	free, err := e.o.FS.Free(e.o.Dir)
	return err == nil && free >= need
}

// settle deals with the error of a checkpoint, as far as it does not concern all
// of the store: damage is that stream's alone, and a full disk a state.
func (e *Engine) settle(s *Stream, err error) error {
	switch {
	case err == nil:
		return nil
	case noSpace(err):
		e.noRoom(err)
		return nil
	case vfs.IsNoFiles(err) && !errors.Is(err, storage.ErrFailed):
		e.fewFiles.Store(true) // it is tried again; meanwhile others are closed
		e.wakeKeeper()
		time.Sleep(filesRetry)
		return nil
	case errors.Is(err, storage.ErrClosed) && !e.serves(s):
		return nil // taken down meanwhile
	case errors.Is(err, storage.ErrFailed) || !errors.Is(err, storage.ErrCorrupt):
		return err
	}
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	if e.groups[s.group] == s {
		if f, ok := s.store.(*fileStore); !ok || !e.mendServing(s, f, err) {
			e.takeDown(s, err, nil)
		}
	}
	return nil
}

func (e *Engine) serves(s *Stream) bool {
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	return e.groups[s.group] == s
}

// kept is checkpoint that tries again without the ballast.
func (e *Engine) kept(s *Stream) error {
	err := e.fits(s)
	if err == nil {
		err = s.checkpoint()
	}
	if noSpace(err) {
		e.noRoom(err)
		if err = e.fits(s); err == nil {
			err = s.checkpoint()
		}
	}
	if err := e.settle(s, err); err != nil {
		return fmt.Errorf("stream %q: %w", s.name, err)
	}
	return nil
}
