//go:build linux

// Metamorph asks an edge for random JetStream operations of all kinds, each of
// which is answered, takes down everything that clients can see, kills or stops
// the edge, starts it again, and demands to see the same: every message with its
// bytes, header, sequence and time, the state and the configuration of every
// stream, every consumer's positions. A message has to be what was published,
// too.
//
// With -rot it also overwrites places in the streams' files while the edge runs,
// among the operations and once more when there are none. That messages are damaged
// and that streams are being repaired it takes for answers for a while, which have to
// pass. Then messages may be lost before everything is taken down, if that is told,
// but none may have other bytes than were published, none may be lost afterwards,
// and sums have to be those of the messages.
//
//	go run ./faults/metamorph -rounds 200
//	go run ./faults/metamorph -rounds 50 -rot 5
//	go run ./faults/metamorph -seed 7        # the same operations again
//
// The edge that it builds has small budgets, so that checkpoints, new segments
// of the log and recycled ones happen all the time. The operations of a seed are
// the same each time, but for what depends on when messages arrive.
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
	rounds, ops, rot int
	seed             uint64
	edge, hub, dir   string
	timeout          time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "metamorph:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	var o options
	fs := flag.NewFlagSet("metamorph", flag.ContinueOnError)
	fs.IntVar(&o.rounds, "rounds", 20, "how often everything is taken down, and the edge killed or stopped")
	fs.IntVar(&o.ops, "ops", 150, "operations in each round")
	fs.IntVar(&o.rot, "rot", 0, "places in the streams' files that are overwritten in each round")
	fs.Uint64Var(&o.seed, "seed", 0, "determines the operations (default: random)")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository with the tag small_budgets)")
	fs.StringVar(&o.hub, "hub", "", "hub binary; then the hub is asked in place of the edge")
	fs.StringVar(&o.dir, "dir", "", "directory for store and log; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", 0, "bound for the whole run (default: 1 minute and 30 s for each round)")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if o.rounds < 1 || o.ops < 1 || o.rot < 0 || o.rot > o.ops {
		return errors.New("accepted: -rounds and -ops from 1 on, -rot from 0 to -ops")
	}
	if o.seed == 0 {
		o.seed = rand.Uint64N(1 << 32)
	}
	if o.timeout == 0 {
		o.timeout = time.Minute + time.Duration(o.rounds)*30*time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	dir, remove, err := rig.WorkDir(o.dir, "metamorph-")
	if err != nil {
		return err
	}
	defer remove(&err)
	site := &rig.Site{Dir: dir, Programs: rig.Programs{Edge: o.edge, Hub: o.hub}}
	if o.hub == "" {
		if err := site.Programs.Missing(ctx, dir, false, "small_budgets"); err != nil {
			return err
		}
	}
	if err := site.Prepare(); err != nil {
		return err
	}
	defer site.Close()
	if err := o.all(ctx, site); err != nil {
		return fmt.Errorf("seed %d: %w", o.seed, err)
	}
	return nil
}

// all goes through the rounds.
func (o options) all(ctx context.Context, site *rig.Site) error {
	t := &target{site: site, hub: o.hub != ""}
	w := &work{r: rand.New(rand.NewPCG(o.seed, 1)), published: map[string]rig.Sum{}}
	begin := time.Now()
	if err := w.start(ctx, t); err != nil {
		return err
	}
	kills, found := 0, 0
	for round := 1; round <= o.rounds; round++ {
		killed := w.r.IntN(4) > 0
		n, err := o.round(ctx, t, w, killed)
		if err != nil {
			return fmt.Errorf("round %d (%s): %w\nlast done:\n%s", round, how(killed), err, w.recent(100))
		}
		if killed {
			kills++
		}
		found += n
		if round%10 == 0 || o.rounds < 50 {
			fmt.Printf("round %d: %s; %d operations so far, acknowledged %d; found again %d messages\n", round, how(killed), w.done, w.acked, n)
		}
	}
	w.nc.Close()
	if err := t.process().Stop(rig.StopTimeout); err != nil {
		return err
	}
	fmt.Printf("metamorph: seed %d: %d cycles, %d of them kills, in %v; %d operations, %d places overwritten, %d messages lost by that and told of; acknowledged %d, found %d, missing 0, different 0\n",
		o.seed, o.rounds, kills, time.Since(begin).Round(time.Second), w.done, w.flips, w.missing, w.acked, found)
	return nil
}

func how(killed bool) string {
	if killed {
		return "killed"
	}
	return "stopped"
}

// round returns how many messages were the same before and after.
func (o options) round(ctx context.Context, t *target, w *work, killed bool) (int, error) {
	acked := w.acked
	for i := range o.ops {
		if err := w.operate(ctx); err != nil {
			return 0, err
		}
		if o.rot > 0 && i%(o.ops/o.rot) == 0 {
			if err := w.flip(t.store()); err != nil {
				return 0, err
			}
		}
	}
	if n := w.acked - acked; n < o.ops/2 {
		return 0, fmt.Errorf("only %d publishes were acknowledged in %d operations, want %d", n, o.ops, o.ops/2)
	}
	before, err := w.settled(ctx)
	if err != nil {
		return 0, err
	}
	if o.rot > 0 {
		if before, err = w.rot(ctx, t.store(), o.rot, before); err != nil {
			return 0, err
		}
	}
	w.nc.Close()
	if killed {
		t.process().Kill()
	} else if err := t.process().Stop(rig.StopTimeout); err != nil {
		return 0, err
	}
	if err := w.start(ctx, t); err != nil {
		return 0, err
	}
	look := w.look
	if o.rot > 0 {
		look = w.settled // what has been found damaged is repaired first
	}
	after, err := look(ctx)
	if err != nil {
		return 0, err
	}
	if d := before.differences(after); len(d) > 0 {
		return 0, fmt.Errorf("%d things are not as they were:\n%s", len(d), some(d, 12))
	}
	return after.messages, nil
}

// target is the program that is asked.
type target struct {
	site *rig.Site
	hub  bool
}

func (t *target) process() *rig.Process {
	if t.hub {
		return t.site.Hub
	}
	return t.site.Edge
}

func (t *target) store() string {
	if t.hub {
		return t.site.HubStore
	}
	return t.site.EdgeStore
}

// start starts the program and returns where its clients connect.
func (t *target) start() (url string, err error) {
	if t.hub {
		return t.site.HubURL(), t.site.StartHub()
	}
	return t.site.EdgeURL(), t.site.StartEdge()
}
