//go:build linux

// Crash kills the edge with SIGKILL again and again while one publisher waits
// for every acknowledgement, others have many publishes in flight, and streams
// beside theirs are created, filled, purged and deleted. It restarts the edge on
// the same store, every third time after killing it once more or twice while it
// starts, and checks that every acknowledged message is there exactly once, with
// its bytes, under the sequence that was acknowledged, and that the streams
// beside are as the last acknowledged request left them.
//
// The edge that it builds has small budgets, so that checkpoints, new segments
// of the log and recycled ones happen all the time.
//
//	go run ./faults/crash -kills 1000
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"petiole/faults/rig"
)

type options struct {
	kills, acks, window int
	edge, dir           string
	timeout             time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crash:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	var o options
	fs := flag.NewFlagSet("crash", flag.ContinueOnError)
	fs.IntVar(&o.kills, "kills", 20, "how often the edge is killed")
	fs.IntVar(&o.acks, "acks", 300, "acknowledged publishes before each kill, at least")
	fs.IntVar(&o.window, "window", 256, "publishes in flight of each asynchronous publisher")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository with the tag small_budgets)")
	fs.StringVar(&o.dir, "dir", "", "directory for stores and logs; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", 0, "bound for the whole run (default: 1 minute and 20 s for each kill)")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if o.timeout == 0 {
		o.timeout = time.Minute + time.Duration(o.kills)*20*time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	dir, remove, err := rig.WorkDir(o.dir, "crash-")
	if err != nil {
		return err
	}
	defer remove(&err)
	site := &rig.Site{Dir: dir, Programs: rig.Programs{Edge: o.edge}}
	if err := site.Programs.Missing(ctx, dir, false, "small_budgets"); err != nil {
		return err
	}
	if err := site.Prepare(); err != nil {
		return err
	}
	defer site.Close()
	return killAll(ctx, o, site)
}

// round is how many kills a stream lives through: what has been read has to be
// compared with all of the ledger after each.
const round = 25

// minAcked is how many acknowledged publishes make a kill count.
const minAcked = 100

func killAll(ctx context.Context, o options, site *rig.Site) error {
	if err := site.StartEdge(); err != nil {
		return err
	}
	begin := time.Now()
	rows, beside := &rig.Endless{Seed: 1}, newBeside()
	acknowledged, found, starts := 0, 0, 0
	for kill := 1; kill <= o.kills; {
		r := &roundOf{stream: fmt.Sprintf("CRASH%d", kill), ledger: rig.NewLedger(), beside: beside}
		if err := site.CreateStream(ctx, r.stream, r.stream+".>"); err != nil {
			return err
		}
		for i, window := range []int{1, o.window, o.window, o.window} {
			r.crew.Loads = append(r.crew.Loads, &rig.Load{
				URL: site.EdgeURL(), Prefix: fmt.Sprintf("%s.%d.", r.stream, i), Publisher: i, Window: window, Ledger: r.ledger, Rows: rows,
			})
		}
		last := min(kill+round-1, o.kills)
		for ; kill <= last; kill++ {
			if err := r.kill(ctx, o, site, kill, kill == last); err != nil {
				return fmt.Errorf("kill %d: %w", kill, err)
			}
		}
		acknowledged += r.acknowledged
		found += r.found
		starts += r.starts
		if err := deleteStream(ctx, site.EdgeURL(), r.stream); err != nil {
			return err
		}
	}
	if err := site.Edge.Stop(rig.StopTimeout); err != nil {
		return err
	}
	fmt.Printf("crash: %d kills, %d of them while it was starting, in %v; %d requests to other streams; acknowledged %d, found %d, missing 0, duplicated 0\n",
		o.kills+starts, starts, time.Since(begin).Round(time.Second), beside.done, acknowledged, found)
	return nil
}

// roundOf is what one stream lives through.
type roundOf struct {
	stream string
	ledger *rig.Ledger
	crew   rig.Crew
	held   rig.Copy
	beside *beside

	acknowledged, found, starts int
}

func (r *roundOf) kill(ctx context.Context, o options, site *rig.Site, n int, last bool) error {
	before, _ := r.ledger.Acknowledged()
	stop := r.crew.Go(ctx)
	stopBeside := r.beside.shake(ctx, site.EdgeURL())
	err := r.ledger.WaitAcknowledged(ctx, before+o.acks)
	if err == nil { // somewhere in the middle of what is being written
		time.Sleep(time.Duration(rand.IntN(30_000)) * time.Microsecond)
	}
	site.Edge.Kill()
	if err := errors.Join(err, stop(), stopBeside()); err != nil {
		return fmt.Errorf("%w; the edge's log ends with:\n%s", err, site.Edge.Log(2000))
	}
	if acked, _ := r.ledger.Acknowledged(); acked-before < minAcked {
		return fmt.Errorf("only %d publishes were acknowledged before it, want %d", acked-before, minAcked)
	}
	if n%3 == 0 {
		for range 1 + rand.IntN(2) {
			p, err := rig.Start("edge", filepath.Join(site.Dir, "edge.log"), site.Programs.Edge, "-c", filepath.Join(site.Dir, "edge.conf"))
			if err != nil {
				return err
			}
			// It takes some 50 to 300 ms until it serves.
			select {
			case <-p.Done():
				return fmt.Errorf("the edge ended by itself with status %d while it was starting; its log ends with:\n%s", p.ExitCode(), p.Log(2000))
			case <-time.After(time.Duration(rand.IntN(150_000)) * time.Microsecond):
			}
			p.Kill()
			r.starts++
		}
	}
	again := time.Now()
	if err := site.StartEdge(); err != nil {
		return err
	}
	ready := time.Since(again)
	if err := r.held.Update(ctx, site.EdgeURL(), r.stream, last); err != nil {
		return err
	}
	v := r.ledger.Check(fmt.Sprintf("kill %d", n), r.held.Held)
	if !v.OK() || n%10 == 0 || o.kills < 50 {
		fmt.Printf("kill %d: %d unacknowledged publishes so far; serving again after %v\n%v\n",
			n, r.ledger.Sent()-v.Acknowledged, ready.Round(time.Millisecond), v)
	}
	if !v.OK() {
		return errors.New("acknowledged messages were not kept as they were")
	}
	r.acknowledged, r.found = v.Acknowledged, v.Found
	return r.beside.check(ctx, site.EdgeURL())
}
