package demo

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// gauge shows how a backlog shrinks: a bar that is drawn over on a terminal,
// a line now and then elsewhere.
type gauge struct {
	out   io.Writer
	bar   bool
	most  uint64    // the largest backlog seen
	last  time.Time // of the last drawing
	left  uint64    // shown then
	drawn bool
}

// Pace of drawing.
const (
	barEvery  = 40 * time.Millisecond
	lineEvery = 250 * time.Millisecond
	barWidth  = 40
)

func newGauge(out io.Writer, bar bool) *gauge { return &gauge{out: out, bar: bar} }

// draw shows the state at now: left messages to go, done ones replayed so far
// at the rate of so many a second. It leaves most calls out; the last state,
// none left, is always shown.
func (g *gauge) draw(now time.Time, left, done uint64, rate float64) {
	g.most = max(g.most, left+done)
	every := lineEvery
	if g.bar {
		every = barEvery
	}
	finished := left == 0 && done > 0
	if g.drawn && (now.Sub(g.last) < every && !finished || finished && g.left == 0) {
		return
	}
	g.drawn, g.last, g.left = true, now, left
	part := 0.0
	if g.most > 0 {
		part = float64(g.most-left) / float64(g.most)
	}
	if !g.bar {
		fmt.Fprintf(g.out, "  backlog: %d to go, %d replayed (%.0f %%), %.0f a second\n", left, done, 100*part, rate)
		return
	}
	full := int(part * barWidth)
	fmt.Fprintf(g.out, "\r  backlog [%s%s] %3.0f %%  %d to go, %.0f a second \x1b[K", strings.Repeat("█", full), strings.Repeat("·", barWidth-full), 100*part, left, rate)
}

// end leaves the line of the bar.
func (g *gauge) end() {
	if g.bar && g.drawn {
		fmt.Fprintln(g.out)
	}
}
