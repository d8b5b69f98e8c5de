//go:build linux && (amd64 || arm64)

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"petiole/faults/rig"
	"petiole/faults/rig/trap"
)

const (
	// exitWithin is how soon the edge has to end after a failed write or sync.
	exitWithin = time.Second
	// leastAcks have to be acknowledged in a cycle that begins with a store.
	leastAcks = 100
	// readyWithin bounds each start, patience whatever else has no limit of its
	// own: the machine may be busy.
	readyWithin = time.Minute
	patience    = time.Minute
)

// The exit codes that README.md documents for a store that fails, and for
// anything else: the socket in the store directory holds nothing.
const (
	exitFailure     = 1
	exitCannotStore = 73
	exitStorage     = 74

	socket    = "admin.sock"
	deviceKey = "device.nk"
)

// errLate says that the edge took too long to end. A machine that was busy with
// something else at that moment is not the edge's fault: such a cycle is run again.
var errLate = errors.New("the edge ended so long after the failure")

// tries is how often at most.
const tries = 3

// cycle is one run of the script, disturbed at one point.
type cycle struct {
	site  *rig.Site
	point point
	truth *truth
	tally *tally

	mu      sync.Mutex
	counts  map[string]int
	reached bool
	at      time.Time     // when the call failed
	code    int           // how the edge ended at the point, or running
	ended   time.Duration // how long after the point, if it failed
	life    int           // which start of the edge it was
}

func (c *cycle) total() (n int) {
	for _, k := range c.counts {
		n += k
	}
	return n
}

// cycle prepares and runs one.
func (o options) cycle(ctx context.Context, dir string, p point) (*cycle, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*patience)
	defer cancel()
	site, err := newSite(dir, o.programs)
	if err != nil {
		return nil, err
	}
	defer site.Close()
	c := &cycle{site: site, point: p, counts: map[string]int{}}
	return c, c.run(ctx)
}

func (c *cycle) run(ctx context.Context) error {
	b := c.point.start
	c.truth = b.truth.clone()
	if b.store != "" {
		if err := rig.Tool("cp", "-a", "--sparse=always", b.store, c.site.EdgeStore); err != nil {
			return err
		}
	}
	if err := c.lives(ctx); err != nil {
		return fmt.Errorf("%w; the edge's log ends with:\n%s", err, c.log())
	}
	if c.point.mode != "" && !c.reached {
		return nil // counted; the undisturbed run is checked once
	}
	if err := c.verify(ctx); err != nil {
		return fmt.Errorf("afterwards: %w; the edge's log ends with:\n%s", err, c.log())
	}
	if b.store != "" && c.tally.acknowledged < leastAcks {
		return fmt.Errorf("only %d messages were acknowledged: that proves too little", c.tally.acknowledged)
	}
	return nil
}

func (c *cycle) log() string {
	b, err := os.ReadFile(filepath.Join(c.site.Dir, "edge.log"))
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-1500):])
}

// decide counts a call, and disturbs it if it is the one.
func (c *cycle) decide(call trap.Call) trap.Answer {
	k := kind(c.site.EdgeStore, call)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[k]++
	p := c.point
	if c.reached || k != p.kind || c.counts[k] != p.n {
		return trap.Answer{}
	}
	c.reached = true
	switch p.mode {
	case modeKill:
		return trap.Answer{Kill: true}
	case modeTorn:
		return trap.Answer{Kill: true, Torn: true}
	case modeENOSPC:
		return trap.Answer{Errno: syscall.ENOSPC, Before: c.fails}
	}
	if c.fatal() && strings.Contains(k, " wal/") {
		// Nothing that the log did not take may be acknowledged.
		return trap.Answer{Errno: syscall.EIO, Before: func() { c.truth.whenQuiet(); c.fails() }}
	}
	return trap.Answer{Errno: syscall.EIO, Before: c.fails}
}

func (c *cycle) fails() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = time.Now()
}

// fatal reports whether the edge has to end at the point.
func (c *cycle) fatal() bool {
	name, _, _ := strings.Cut(c.point.kind, " ")
	return c.point.mode == modeEIO && slices.Contains(keeps, name)
}

// setAside reports whether the point is a write into a segment of the log, whose
// room is reserved before. A full disk does not refuse it; what does is a disk
// that does not keep its promise, and then ending is right.
func (c *cycle) setAside() bool { return strings.HasPrefix(c.point.kind, "pwrite64 wal/") }

// lives runs the script over two starts of the edge, until the point ends it.
func (c *cycle) lives(ctx context.Context) error {
	c.code = running
	for c.life = 1; c.life <= 2; c.life++ {
		p, tr, err := c.start()
		if err != nil {
			return err
		}
		err = c.live(ctx, p)
		if p.Alive() && c.life == 2 {
			p.Kill()
		}
		if !p.Alive() {
			err = errors.Join(err, tr.Wait())
		} else {
			p.Kill()
		}
		if err != nil {
			return fmt.Errorf("life %d: %w", c.life, err)
		}
		if c.code != running {
			return nil
		}
	}
	return nil
}

func (c *cycle) start() (*rig.Process, *trap.Trap, error) {
	cmd, tr, err := trap.Command(c.site.EdgeStore, c.decide, c.site.Programs.Edge, "-c", filepath.Join(c.site.Dir, "edge.conf"))
	if err != nil {
		return nil, nil, err
	}
	p, err := rig.StartCmd("edge", filepath.Join(c.site.Dir, "edge.log"), cmd)
	if err != nil {
		return nil, nil, err
	}
	c.site.Edge = p
	if err := tr.Serve(); err != nil {
		p.Kill()
		return nil, nil, err
	}
	return p, tr, nil
}

// live is one start of the edge with its part of the script. It returns when
// the edge has ended at the point, or still runs.
func (c *cycle) live(ctx context.Context, p *rig.Process) error {
	err := rig.WaitReady(p, c.site.EdgeAddr, readyWithin)
	if errors.Is(err, rig.ErrEnded) {
		return c.judge(p, true)
	}
	if err != nil {
		return err
	}
	url := c.site.EdgeURL()
	script, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if c.life == 1 {
		if err = fill(script, url, c.truth); err == nil {
			err = work(script, url, c.truth)
		}
	} else {
		err = again(script, url, c.truth)
	}
	stop := err == nil && c.life == 1
	switch {
	case errors.Is(err, errGone):
		// It should be ending, unless what failed was only this request.
		select {
		case <-p.Done():
		case <-time.After(c.ends()):
			return fmt.Errorf("%w; and yet the edge runs on", err)
		}
	case err != nil:
		return err
	case stop:
		if err := p.Signal(syscall.SIGTERM); err != nil && p.Alive() {
			return err
		}
		select {
		case <-p.Done():
		case <-time.After(patience):
			return fmt.Errorf("the edge did not end within %v of SIGTERM", patience)
		}
	default: // in the middle of whatever it does behind the clients' backs
		c.mu.Lock()
		waits := c.reached && c.fatal()
		c.mu.Unlock()
		if !waits {
			return nil
		}
		select {
		case <-p.Done():
		case <-time.After(c.ends()):
		}
	}
	if p.Alive() {
		return c.judge(p, false)
	}
	c.mu.Lock()
	reached := c.reached
	c.mu.Unlock()
	if stop && p.ExitCode() == 0 && !(reached && c.fatal()) {
		return nil // on to the next life
	}
	return c.judge(p, false)
}

// ends is how long it is waited for an edge that should be ending: longer than it
// may take, which is judged afterwards, but not for one that does not end at all.
func (c *cycle) ends() time.Duration {
	return rig.Allow(exitWithin, c.site.Programs.Edge) + 5*time.Second
}

// judge says whether the edge ended as it should have, at the point.
func (c *cycle) judge(p *rig.Process, starting bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.reached {
		return fmt.Errorf("the edge ended with status %d although nothing was done to it", p.ExitCode())
	}
	if p.Alive() {
		return fmt.Errorf("the edge runs on after %v", c.point)
	}
	c.code = p.ExitCode()
	if c.point.mode == modeKill || c.point.mode == modeTorn {
		if c.code != -1 {
			return fmt.Errorf("the edge ended with status %d before it was killed", c.code)
		}
		return nil
	}
	c.ended = time.Since(c.at) // at most: the rig may have been looking elsewhere
	if !c.at.IsZero() && !p.Ended().IsZero() {
		c.ended = p.Ended().Sub(c.at)
	}
	allowed := []int{exitStorage}
	// The key for the hub is made when clients are served already.
	if starting || strings.Contains(c.point.kind, deviceKey) {
		allowed = append(allowed, exitCannotStore)
	}
	if strings.HasSuffix(c.point.kind, " "+socket) {
		allowed = append(allowed, exitFailure, exitCannotStore)
	}
	switch {
	case !slices.Contains(allowed, c.code):
		return fmt.Errorf("exit code %d, want one of %v", c.code, allowed)
	case c.point.mode == modeENOSPC && !starting && !c.setAside() && c.code != exitCannotStore:
		return fmt.Errorf("a full disk ended the edge with status %d", c.code)
	case c.fatal() && c.ended > exitWithin && c.ended > rig.Allow(exitWithin, c.site.Programs.Edge):
		return fmt.Errorf("%w: %v, want %v", errLate, c.ended.Round(time.Millisecond), exitWithin)
	}
	c.truth.mu.Lock()
	defer c.truth.mu.Unlock()
	if len(c.truth.late) > 0 {
		return fmt.Errorf("%d acknowledgements after the failure: %s", len(c.truth.late), c.truth.late[0])
	}
	return nil
}

// verify starts the edge undisturbed, compares, works on, and does it again.
func (c *cycle) verify(ctx context.Context) error {
	conf := filepath.Join(c.site.Dir, "edge.conf")
	for round := 1; round <= 2; round++ {
		if err := c.site.StartEdge(); err != nil {
			return fmt.Errorf("start %d: %w", round, err)
		}
		y, err := check(ctx, c.site.EdgeURL(), c.truth)
		if err != nil {
			return fmt.Errorf("start %d: %w", round, err)
		}
		if c.tally == nil {
			c.tally = y
		}
		if err := y.err(); err != nil {
			return fmt.Errorf("start %d: %w", round, err)
		}
		if round == 1 {
			if err := fill(ctx, c.site.EdgeURL(), c.truth); err != nil {
				return fmt.Errorf("publishing on: %w", err)
			}
			if err := again(ctx, c.site.EdgeURL(), c.truth); err != nil {
				return fmt.Errorf("publishing on: %w", err)
			}
		}
		if err := c.site.Edge.Stop(patience); err != nil {
			return err
		}
	}
	if out, err := exec.CommandContext(ctx, c.site.Programs.Edge, "storage", "verify", "-c", conf).CombinedOutput(); err != nil {
		return fmt.Errorf("edge storage verify: %w: %s", err, out)
	}
	return nil
}
