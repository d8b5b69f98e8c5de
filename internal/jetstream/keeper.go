package jetstream

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"petiole/storage"
)

func wakeUp(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (e *Engine) wakeCheckpointer() { wakeUp(e.checkpointNow) }
func (e *Engine) wakeKeeper()       { wakeUp(e.keepNow) }

// checkpointer keeps tables and log within their budgets.
func (e *Engine) checkpointer() {
	for {
		select {
		case <-e.done:
			return
		case <-e.checkpointNow:
		}
		if err := e.keepBudgets(); err != nil {
			e.failBehind(err)
			return
		}
	}
}

// atOnce is how many checkpoints run at a time: while one waits for the disk
// another encodes.
const atOnce = 2

// keepBudgets checkpoints the streams with the largest tables while all tables
// together are too large, and, while the log is too long, those that hold back
// its oldest records, whether they are busy or idle.
func (e *Engine) keepBudgets() error {
	done := false
	defer func() {
		e.makeWay()
		if !done { // nothing helps for now: the next commit, or space, sees to it
			e.openGates()
		}
	}()
	if e.space.full.Load() || e.space.logFull.Load() {
		if err := e.whileFull(); err != nil || e.space.full.Load() {
			return err
		}
	}
	for {
		e.regulate()
		list := e.largest()
		// Half of the budget is for what comes in while room is being made.
		long := e.wal.Size() > e.o.WALBudget/2
		if long {
			for _, s := range e.holders(atOnce) {
				if !slices.Contains(list, s) {
					list = slices.Insert(list, 0, s)
				}
			}
		}
		if len(list) == 0 {
			var err error
			if long {
				err = e.trim()
			}
			e.regulate()
			done = e.wal.Size() <= e.o.WALBudget
			return err
		}
		for _, s := range list {
			s.held = s.holds()
		}
		before := e.wal.Oldest()
		if err := e.checkpoints(list); err != nil {
			return err
		}
		if err := e.trim(); err != nil {
			return err
		}
		if e.wal.Oldest() == before {
			e.makeWay() // with others in use all the time this may go on for long
		}
		if e.space.full.Load() || e.closing.Load() {
			return nil // a full disk is tried again soon
		}
		stuck := true
		for _, s := range list {
			if h := s.holds(); h == 0 || h > s.held {
				stuck = false
			}
		}
		if stuck && e.wal.Oldest() == before {
			return nil // nothing gained; the next commit tries again
		}
	}
}

// whileFull tries to checkpoint every stream while the file system is full: what
// one cannot write another may make room for, as its messages have been purged.
func (e *Engine) whileFull() error {
	list := e.holders(math.MaxInt)
	slices.SortStableFunc(list, func(a, b *Stream) int { return cmp.Compare(a.store.TableBytes(), b.store.TableBytes()) })
	var failed error
	for i, s := range list {
		if failed == nil && e.fitAll(list[i:]) {
			e.hasRoom() // publishers need not wait for all of it
		}
		err := e.fits(s)
		if err == nil {
			err = s.checkpoint()
		}
		if noSpace(err) {
			failed = err
			continue
		}
		if err := e.settle(s, err); err != nil {
			return err
		}
	}
	if err := e.trim(); err != nil && !noSpace(err) {
		return err
	}
	if failed != nil {
		e.noRoom(failed)
		return nil
	}
	if e.space.logFull.Load() { // goes on when what is purged or deleted has made room
		e.trySpace()
	}
	if free, err := e.o.FS.Free(e.o.Dir); err == nil && free < lowWater {
		e.low()
	} else {
		e.hasRoom()
	}
	e.wakeKeeper() // the list of streams
	return nil
}

// holders returns up to n streams that hold back the oldest records of the log, and
// can be checkpointed.
func (e *Engine) holders(n int) []*Stream {
	var list []*Stream
	for _, s := range *e.streams.Load() {
		if s.held = s.holds(); s.held != 0 && s.yields.Load() == nil {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(a, b *Stream) int { return cmp.Compare(a.held, b.held) })
	return list[:min(n, len(list))]
}

// checkpoints checkpoints streams, some at a time.
func (e *Engine) checkpoints(list []*Stream) error {
	errs := make([]error, len(list))
	var wg sync.WaitGroup
	next := make(chan int, len(list))
	for i := range list {
		next <- i
	}
	close(next)
	for range min(atOnce, len(list)) {
		wg.Go(func() {
			for i := range next {
				errs[i] = e.kept(list[i])
				e.regulate()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// trim recycles what neither a stream nor the meta machine needs of the log.
func (e *Engine) trim() error {
	e.trimMu.Lock()
	defer e.trimMu.Unlock()
	below := storage.LSN(e.lastLSN.Load()) + 1
	streams, downs := e.everyone()
	for _, s := range streams {
		below = earlier(below, s.holds())
	}
	for _, d := range downs {
		below = earlier(below, storage.LSN(d.from.Load()))
	}
	// After the streams': one that is deleted goes over to it.
	below = earlier(below, e.book.holds())
	return e.wal.Trim(below)
}

// Checkpoint writes everything applied so far to the streams' stores and
// recycles the log.
func (e *Engine) Checkpoint() error {
	if err := e.saveAndDestroy(); err != nil {
		return err
	}
	for _, s := range *e.streams.Load() {
		if err := e.kept(s); err != nil {
			return err
		}
	}
	return e.trim()
}

// keeper does what nobody waits for: it saves the list of streams, removes the
// files of deleted ones, and closes those that are not in use.
func (e *Engine) keeper() {
	tick := time.NewTimer(e.o.IdleClose / idleTicks)
	defer tick.Stop()
	ticking := true
	for {
		select {
		case <-e.done:
			return
		case <-e.keepNow:
		case <-tick.C:
			ticking = false
			e.ticks.Add(1)
		}
		if err := e.keep(); err != nil {
			e.failBehind(err)
			return
		}
		// With nothing open there is nothing to close.
		if !ticking && e.openStores.Load() > 0 {
			ticking = true
			tick.Reset(e.o.IdleClose / idleTicks)
		}
	}
}

// idleTicks is how many ticks of the keeper make Options.IdleClose.
const idleTicks = 6

func (e *Engine) keep() error {
	e.aged(e.o.now(), 0) // takes note of leaps
	e.makeBallast()
	e.settleLater()
	e.takeDownSuspects()
	e.retryRepairs()
	e.giveUpLost()
	if err := e.parkLogs(); err != nil {
		return err
	}
	if err := e.saveWritten(writtenEvery); err != nil {
		return err
	}
	if err := e.saveLeaps(); noSpace(err) {
		e.noRoom(err)
	} else if err != nil {
		return err
	}
	if err := e.saveAndDestroy(); noSpace(err) {
		e.noRoom(err)
	} else if err != nil {
		return err
	}
	return e.closeIdle()
}

// saveAndDestroy saves the list of streams and removes the files of those that
// are not in it any more.
func (e *Engine) saveAndDestroy() error {
	if err := e.saveMeta(); err != nil {
		return err
	}
	e.mu.Lock()
	list := e.doomed
	e.doomed = map[uint64]*Stream{}
	e.mu.Unlock()
	for g, s := range list {
		var err error
		if s != nil {
			err = s.destroy()
		} else {
			err = e.newFileStore(storage.GroupID(g), true).Destroy()
		}
		if err == nil {
			err = e.dropPositions(storage.GroupID(g))
		}
		if errors.Is(err, storage.ErrFailed) {
			return err
		}
		if err != nil {
			e.log.Warn("files of a deleted stream remain until the next start", "group", g, "err", err)
		} else {
			e.book.mu.Lock()
			e.book.dead[g] = struct{}{} // the mark goes with the next save
			e.book.mu.Unlock()
		}
	}
	return nil
}

// closeIdle closes the files of streams that have not been in use for a while,
// and, of more than there should be, those not used for the longest time.
func (e *Engine) closeIdle() error {
	now := e.ticks.Load()
	var open []*Stream
	for _, s := range *e.streams.Load() {
		f, ok := s.store.(*fileStore)
		if !ok || !f.isOpen() || s.yields.Load() != nil {
			continue
		}
		if now-f.used.Load() >= idleTicks {
			closed, err := s.rest()
			if err != nil {
				return fmt.Errorf("closing the files of stream %q: %w", s.name, err)
			}
			if closed {
				continue
			}
		}
		s.usedAt = f.used.Load()
		open = append(open, s)
	}
	over := int(e.openStores.Load()) - e.o.MaxOpenStores
	few := e.fewFiles.Swap(false)
	if few { // somebody waits for one
		e.log.Warn("too many files are open in this process or system, files of streams are closed for others; raise the limit (ulimit -n, LimitNOFILE of systemd)", "streams_open", len(open))
		over = max(over, (len(open)+1)/2)
	}
	if over <= 0 {
		return nil
	}
	slices.SortFunc(open, func(a, b *Stream) int { return cmp.Compare(a.usedAt, b.usedAt) })
	for _, s := range open {
		if over <= 0 || e.closing.Load() {
			break
		}
		// What is used all the time would be opened again at once.
		if now == s.usedAt && over < e.o.MaxOpenStores && !few {
			break
		}
		if err := e.kept(s); err != nil {
			return err
		}
		closed, err := s.rest()
		if err != nil {
			return fmt.Errorf("closing the files of stream %q: %w", s.name, err)
		}
		if closed {
			over--
		}
	}
	return e.trim()
}
