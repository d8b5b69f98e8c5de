//go:build linux

// Crash kills the edge with SIGKILL again and again while one publisher waits
// for every acknowledgement and others have many publishes in flight, restarts
// it on the same store, and checks that every acknowledged message is there
// exactly once, with its bytes, under the sequence that was acknowledged.
//
//	go run ./faults/crash -kills 50
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
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
	fs.IntVar(&o.acks, "acks", 1000, "acknowledged publishes before each kill, at least")
	fs.IntVar(&o.window, "window", 256, "publishes in flight of each asynchronous publisher")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository)")
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
	if err := site.Programs.Missing(ctx, dir, false); err != nil {
		return err
	}
	if err := site.Prepare(); err != nil {
		return err
	}
	defer site.Close()
	return killAll(ctx, o, site)
}

const stream = "CRASH"

func killAll(ctx context.Context, o options, site *rig.Site) error {
	if err := site.StartEdge(); err != nil {
		return err
	}
	if err := site.CreateStream(ctx, stream, "crash.>"); err != nil {
		return err
	}
	ledger, rows := rig.NewLedger(), &rig.Endless{Seed: 1}
	crew := &rig.Crew{}
	for i, window := range []int{1, o.window, o.window, o.window} {
		crew.Loads = append(crew.Loads, &rig.Load{
			URL: site.EdgeURL(), Prefix: fmt.Sprintf("crash.%d.", i), Publisher: i, Window: window, Ledger: ledger, Rows: rows,
		})
	}
	var held rig.Copy
	for kill := 1; kill <= o.kills; kill++ {
		before, _ := ledger.Acknowledged()
		stop := crew.Go(ctx)
		err := ledger.WaitAcknowledged(ctx, before+o.acks)
		if err == nil { // somewhere in the middle of what is being written
			time.Sleep(time.Duration(rand.IntN(20_000)) * time.Microsecond)
		}
		site.Edge.Kill()
		if err := errors.Join(err, stop()); err != nil {
			return fmt.Errorf("kill %d: %w; the edge's log ends with:\n%s", kill, err, site.Edge.Log(2000))
		}
		again := time.Now()
		if err := site.StartEdge(); err != nil {
			return fmt.Errorf("after kill %d: %w", kill, err)
		}
		ready := time.Since(again)
		if err := held.Update(ctx, site.EdgeURL(), stream, kill == o.kills); err != nil {
			return fmt.Errorf("after kill %d: %w", kill, err)
		}
		v := ledger.Check(fmt.Sprintf("kill %d", kill), held.Held)
		fmt.Printf("kill %d: %d unacknowledged publishes so far; serving again after %v\n%v\n",
			kill, ledger.Sent()-v.Acknowledged, ready.Round(time.Millisecond), v)
		if !v.OK() {
			return fmt.Errorf("kill %d: acknowledged messages were not kept as they were", kill)
		}
	}
	if err := site.Edge.Stop(20 * time.Second); err != nil {
		return err
	}
	acked, _ := ledger.Acknowledged()
	fmt.Printf("crash: %d kills, acknowledged %d, missing 0, duplicated 0\n", o.kills, acked)
	return nil
}
