package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"petiole/storage"
	"petiole/storage/metadb"
)

// Wall clocks of gateways are wrong at times: a board without a battery begins
// in another year, and is put right minutes later. Messages must not age by that.
// The rule:
//
//   - No message expires before it has really been stored for its maximum age or
//     time to live, wherever the clock goes meanwhile; it may expire later.
//   - A clock that is set back makes messages expire later by as much; the times
//     of messages never go back, so that those stored until it has caught up get
//     that of the one before.
//   - A clock that leaps ahead is believed for messages stored after that. Those
//     stored before go on aging as if it had not, until the longest of their ages
//     has passed since. Leaps are kept in the meta database, so that a restart
//     does not forget them.
//   - While the process does not run nothing tells a leap from time that has
//     passed. If that was more than a day, by the newest message, it is taken for
//     a leap, with which what was stored before goes on aging from there, for ten
//     minutes at least: long enough for the clock to be set.
//   - The window of message ids has a clock of its own, the steady one, which each
//     publish carries into the log: it goes with the monotonic clock, so that no
//     leap makes an id known for a shorter or longer time. A start has it go on
//     from the latest time in the window: by what the wall clock says has passed
//     since, less the leaps that are known, and by nothing if it was set back.
//   - Timers have the monotonic clock too: what is waited for (acknowledgements,
//     requests, heartbeats, consumers without use) comes neither earlier nor later
//     wherever the wall clock goes. A pause ends when the wall clock says so,
//     within a minute after a leap.
const (
	// leapMin is how far the wall clock has to get ahead of the monotonic one
	// to have leapt rather than been slewed.
	leapMin = 10 * time.Second
	// leapHold is for how long at least age is not told by the clock after it
	// has leapt, or after a start at which it is far ahead of what is stored.
	leapHold = 10 * time.Minute
	// maxLeaps is how many leaps are remembered; of more the oldest become one.
	maxLeaps = 16
	// startAhead is how far ahead that is.
	startAhead = 24 * time.Hour
)

// ageClock tells by which time messages have aged. It follows the wall clock,
// but for a while after that has leapt ahead: then it goes on as if it had not,
// until what was stored before the leap has really been stored for so long.
type ageClock struct {
	mu    sync.Mutex
	begun bool
	skew  atomic.Int64 // of the wall clock against the monotonic one; changed under mu
	leaps []leap
	fresh bool // some are not in the meta database
}

type leap struct {
	at  time.Duration // by the monotonic clock
	was int64         // what the wall clock would have said
	// wall is what it did say, 0 for one that concerns this run only.
	wall int64
}

// savedLeap is a leap in the meta database, JSON under keyLeaps.
type savedLeap struct {
	Was  int64 `json:"was"`  // what the clock would have said, Unix ns
	Wall int64 `json:"wall"` // what it did say
}

const (
	bucketClock = "clock"
	keyLeaps    = "leaps"
)

// start begins at a wall clock time and a monotonic one; newest is the time of
// the newest message stored, 0 if there is none. It reports whether the clock is
// not believed yet.
func (c *ageClock) start(wall int64, mono time.Duration, newest int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begun = true
	c.skew.Store(wall - int64(mono))
	if newest == 0 || wall-newest < int64(startAhead) {
		return false
	}
	c.leaps = append(c.leaps, leap{at: mono, was: newest})
	return true
}

// restore takes over the leaps of earlier runs, after start.
func (c *ageClock) restore(list []savedLeap, wall int64, mono time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range list {
		if l.Was < l.Wall { // set back since then, it begins anew
			c.leaps = append(c.leaps, leap{at: mono - time.Duration(max(wall-l.Wall, 0)), was: l.Was, wall: l.Wall})
		}
	}
}

// unsaved returns the leaps to be saved, if some are not.
func (c *ageClock) unsaved() ([]savedLeap, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.fresh {
		return nil, false
	}
	c.fresh = false
	list := []savedLeap{}
	for _, l := range c.leaps {
		if l.wall != 0 {
			list = append(list, savedLeap{l.was, l.wall})
		}
	}
	return list, true
}

// now returns the time by which messages have aged that are kept for maxAge at
// most, and by how much the clock has leapt since the last call.
func (c *ageClock) now(wall int64, mono, maxAge time.Duration) (aged int64, leapt time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.begun {
		return wall, 0
	}
	skew := wall - int64(mono)
	if by := skew - c.skew.Load(); by > int64(leapMin) || by < -int64(leapMin) {
		if by > 0 {
			c.leaps = append(c.leaps, leap{at: mono, was: wall - by, wall: wall})
			c.fresh = true
			leapt = time.Duration(by)
		}
		c.skew.Store(skew)
	}
	aged = wall
	for _, l := range c.leaps {
		if since := mono - l.at; since < max(maxAge, leapHold) {
			aged = min(aged, l.was+int64(since))
		}
	}
	if len(c.leaps) > maxLeaps {
		a, b := c.leaps[0], &c.leaps[1]
		if aged := a.was + int64(b.at-a.at); aged < b.was {
			b.was = aged
		}
		c.leaps = c.leaps[1:]
	}
	return aged, leapt
}

// since returns how much time has passed at least since the wall clock said then.
// What leapt between is left out; where it went back it is nothing.
func (c *ageClock) since(then, wall int64, mono time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	passed := wall - then
	for _, l := range c.leaps {
		if l.wall == 0 || l.wall > then {
			passed = min(passed, l.was+int64(mono-l.at)-then)
		}
	}
	return time.Duration(max(passed, 0))
}

// leapt reports whether the wall clock has leapt since anything has asked.
func (c *ageClock) leapt(wall int64, mono time.Duration) bool {
	by := wall - int64(mono) - c.skew.Load()
	return by > int64(leapMin) || by < -int64(leapMin)
}

// startClock begins to tell the age of messages, after recovery.
func (e *Engine) startClock() {
	e.begun = e.o.now()
	newest := int64(0)
	for _, s := range *e.streams.Load() {
		newest = max(newest, s.store.State().LastTime)
	}
	if e.ages.start(e.begun.UnixNano(), 0, newest) {
		e.log.Warn("the clock is far ahead of what is stored: messages do not expire by age until it has been so for a while",
			"clock", e.begun.UTC(), "newest_message", timeOf(newest), "for", leapHold)
	}
	var list []savedLeap
	b, err := e.meta.Get(bucketClock, keyLeaps)
	if err == nil {
		err = json.Unmarshal(b, &list)
	}
	if err != nil && !errors.Is(err, storage.ErrNotFound) {
		e.log.Error("what the clock has leapt by earlier cannot be read; messages stored before that may expire", "err", err)
	}
	e.ages.restore(list, e.begun.UnixNano(), 0)
}

// saveLeaps saves by how much the clock has leapt.
func (e *Engine) saveLeaps() error {
	list, fresh := e.ages.unsaved()
	if !fresh {
		return nil
	}
	b, err := json.Marshal(list)
	if err == nil {
		err = e.meta.Put(bucketClock, metadb.KV{Key: keyLeaps, Value: b})
	}
	if err != nil {
		e.ages.mu.Lock()
		e.ages.fresh = true
		e.ages.mu.Unlock()
		return fmt.Errorf("saving by how much the clock has leapt: %w", err)
	}
	return nil
}

// aged returns the time by which the stream's messages have aged. The caller
// holds the lock.
func (s *Stream) aged(now time.Time) int64 {
	if s.e.begun.IsZero() {
		return now.UnixNano()
	}
	return s.e.aged(now, max(s.m.Config().MaxAge, s.m.LongestTTL()))
}

// aged returns the time by which messages have aged that are kept for maxAge at
// most.
func (e *Engine) aged(now time.Time, maxAge time.Duration) int64 {
	aged, leapt := e.ages.now(now.UnixNano(), now.Sub(e.begun), maxAge)
	if leapt > 0 {
		e.wakeKeeper() // to save it
		e.log.Warn("the clock has leapt ahead: messages stored before do not expire by that", "by", leapt, "clock", now.UTC())
	}
	return aged
}

// moment returns the time by the clock of timers and consumers: what the wall
// clock said when the streams began to serve, and what has passed since.
func (e *Engine) moment() time.Time {
	now := e.o.now()
	if e.begun.IsZero() {
		return now
	}
	return e.begun.Add(now.Sub(e.begun))
}

// skew returns how far the wall clock is ahead of moment. Less than a second is
// nothing: both clocks are not read in the same instant.
func (e *Engine) skew() time.Duration {
	if e.begun.IsZero() {
		return 0
	}
	now := e.o.now()
	by := now.Round(0).Sub(e.begun.Round(0)) - now.Sub(e.begun)
	if by.Abs() < time.Second {
		return 0
	}
	return by.Round(time.Millisecond)
}

// startSteady begins the clock of the window of message ids, where that of the
// machine's state has ended.
func (s *Stream) startSteady(now time.Time) {
	wall, mono := now.UnixNano(), now.Sub(s.e.begun)
	at, then := s.m.Window()
	if at == 0 {
		at, then = wall, wall
	}
	s.steady0 = at + int64(s.e.ages.since(then, wall, mono)-mono)
}

// steady returns the time of the window of message ids.
func (s *Stream) steady(now time.Time) int64 {
	mono := now.Sub(s.e.begun)
	if s.e.ages.leapt(now.UnixNano(), mono) {
		s.e.aged(now, 0) // takes note of it, for the next start
	}
	return s.steady0 + int64(mono)
}
