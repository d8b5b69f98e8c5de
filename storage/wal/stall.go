package wal

import (
	"log/slog"
	"sync"
	"time"
)

// watched is who writes or syncs; each does one thing at a time.
type watched uint8

const (
	watchWrite watched = iota // writer's role
	watchSync                 // the syncer
	watchTrim
	watchAlloc
	watchers
)

// watchdog reports writes and syncs that do not return for long. It goes by the
// monotonic clock. Its timer runs while something is under way only.
type watchdog struct {
	after time.Duration // below zero: never
	log   *slog.Logger

	mu      sync.Mutex
	calls   [watchers]call
	timer   *time.Timer
	armed   bool
	longest time.Duration
	count   uint64
}

// call is a call that is under way, if start is set.
type call struct {
	op, file string
	start    time.Time
	stalled  bool // has been reported
	depth    int  // of calls within the call
}

func (w *watchdog) init(after time.Duration, log *slog.Logger) {
	w.after, w.log = after, log
	w.timer = time.AfterFunc(time.Hour, w.look)
	w.timer.Stop()
}

func (w *watchdog) stop() { w.timer.Stop() }

// begin notes the beginning of a call; end takes what it returns.
func (w *watchdog) begin(who watched, op, file string) watched {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := &w.calls[who]
	if c.depth++; c.depth > 1 {
		return who
	}
	c.op, c.file, c.start = op, file, time.Now()
	if !w.armed && w.after > 0 {
		w.armed = true
		w.timer.Reset(w.after)
	}
	return who
}

func (w *watchdog) end(who watched) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := &w.calls[who]
	if c.depth--; c.depth > 0 {
		return
	}
	if c.stalled {
		took := time.Since(c.start)
		w.longest = max(w.longest, took)
		w.log.Info("the disk answers again", "call", c.op, "file", c.file, "took", took)
	}
	*c = call{}
}

// look reports calls that have been under way for too long, each once.
func (w *watchdog) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := time.Duration(-1)
	for i := range w.calls {
		c := &w.calls[i]
		if c.start.IsZero() || c.stalled {
			continue
		}
		took := time.Since(c.start)
		if took >= w.after {
			c.stalled = true
			w.count++
			w.log.Warn("the disk does not answer: nothing is acknowledged until it does", "call", c.op, "file", c.file, "since", took)
			continue
		}
		if left := w.after - took; next < 0 || left < next {
			next = left
		}
	}
	if w.armed = next >= 0; w.armed {
		w.timer.Reset(next)
	}
}

// stall returns the counts.
func (w *watchdog) stall() Stall {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Stall{Longest: w.longest, Count: w.count}
	for i := range w.calls {
		c := &w.calls[i]
		if took := time.Since(c.start); c.stalled && took > s.Current {
			s.Op, s.Current = c.op+" "+c.file, took
		}
	}
	s.Longest = max(s.Longest, s.Current)
	return s
}

// Stall counts writes and syncs that took longer than Options.StallAfter.
type Stall struct {
	Op      string        // the call that does not return now, with the file; "" if none
	Current time.Duration // for how long it has not; 0 if none
	Longest time.Duration // of those since Open, the current one included
	Count   uint64        // since Open
}
