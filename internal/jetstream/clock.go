package jetstream

import (
	"sync"
	"time"
)

// Wall clocks of gateways are wrong at times: a board without a battery begins
// in another year, and is put right minutes later. Messages must not age by that.
const (
	// leapMin is how far the wall clock has to get ahead of the monotonic one
	// to have leapt rather than been slewed.
	leapMin = 10 * time.Second
	// leapHold is for how long at least age is not told by the clock after it
	// has leapt, or after a start at which it is far ahead of what is stored.
	leapHold = 10 * time.Minute
	// startAhead is how far ahead that is.
	startAhead = 24 * time.Hour
)

// ageClock tells by which time messages have aged. It follows the wall clock,
// but for a while after that has leapt ahead: then it goes on as if it had not,
// until what was stored before the leap has really been stored for so long.
type ageClock struct {
	mu    sync.Mutex
	begun bool
	skew  int64 // of the wall clock against the monotonic one
	leaps []leap
}

type leap struct {
	at  time.Duration // by the monotonic clock
	was int64         // what the wall clock would have said
}

// start begins at a wall clock time and a monotonic one; newest is the time of
// the newest message stored, 0 if there is none. It reports whether the clock is
// not believed yet.
func (c *ageClock) start(wall int64, mono time.Duration, newest int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begun, c.skew = true, wall-int64(mono)
	if newest == 0 || wall-newest < int64(startAhead) {
		return false
	}
	c.leaps = append(c.leaps, leap{at: mono, was: newest})
	return true
}

// now returns the time by which messages have aged that are kept for maxAge at
// most (0: each for its own time), and by how much the clock has leapt since the
// last call.
func (c *ageClock) now(wall int64, mono, maxAge time.Duration) (aged int64, leapt time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.begun {
		return wall, 0
	}
	skew := wall - int64(mono)
	if by := skew - c.skew; by > int64(leapMin) || by < -int64(leapMin) {
		if by > 0 {
			c.leaps = append(c.leaps, leap{at: mono, was: wall - by})
			leapt = time.Duration(by)
		}
		c.skew = skew
	}
	aged = wall
	for _, l := range c.leaps {
		if since := mono - l.at; since < max(maxAge, leapHold) {
			aged = min(aged, l.was+int64(since))
		}
	}
	if len(c.leaps) > 16 {
		c.leaps = c.leaps[1:]
	}
	return aged, leapt
}

// startClock begins to tell the age of messages, after recovery.
func (e *Engine) startClock() {
	e.begun = time.Now()
	newest := int64(0)
	for _, s := range *e.streams.Load() {
		newest = max(newest, s.store.State().LastTime)
	}
	if e.ages.start(e.begun.UnixNano(), 0, newest) {
		e.log.Warn("the clock is far ahead of what is stored: messages do not expire by age until it has been so for a while",
			"clock", e.begun.UTC(), "newest_message", timeOf(newest), "for", leapHold)
	}
}

// aged returns the time by which the stream's messages have aged. The caller
// holds the lock.
func (s *Stream) aged(now time.Time) int64 {
	if s.e.begun.IsZero() {
		return now.UnixNano()
	}
	aged, leapt := s.e.ages.now(now.UnixNano(), now.Sub(s.e.begun), s.m.Config().MaxAge)
	if leapt > 0 {
		s.e.log.Warn("the clock has leapt ahead: messages stored before do not expire by that", "by", leapt, "clock", now.UTC())
	}
	return aged
}
