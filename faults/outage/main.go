//go:build linux

// Outage checks what reaches the hub through everything that can go wrong on
// the way: hub and edge run as processes of their own, linked by QUIC over UDP,
// and clients publish rows to the edge, through JetStream on one stream and as
// plain publishes on another.
//
// Variants:
//
//	drain      the hub is killed; the edge is killed in the middle of the stream;
//	           the hub comes back and is killed twice while it is catching up
//	blackhole  the network swallows every datagram for a while during catching up
//	reconnect  the hub is restarted again and again: how long from its listening
//	           to the first replayed message
//	rtt        the same at a round trip of 150 ms, from the hub's first answer on
//
// The hub's streams then have to hold every acknowledged row, and of the plain
// publishes every row that the edge's stream held, exactly once, byte for byte,
// in the edge's order.
//
//	go run ./faults/outage
//	go run ./faults/outage -variants drain -data DIR
//	go run ./faults/outage -short
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"petiole/faults/rig"
)

type options struct {
	variants  []string
	data      string
	rows      int
	restarts  int
	rttRuns   int
	blackhole time.Duration
	edge, hub string
	dir       string
	timeout   time.Duration
}

// leastRows make a drain long enough to be interrupted twice, and keep what is
// in flight at a kill (3 windows) a small part of the whole.
const leastRows = 50_000

var allVariants = []string{"drain", "blackhole", "reconnect", "rtt"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "outage:", err)
		os.Exit(1)
	}
}

func parse(args []string) (options, error) {
	var o options
	fs := flag.NewFlagSet("outage", flag.ContinueOnError)
	variants := fs.String("variants", strings.Join(allVariants, ","), "which variants to run")
	short := fs.Bool("short", false, "short form: fewer rows and restarts, a shorter black hole, unless given")
	fs.StringVar(&o.data, "data", "", "publish every line of the files under this `directory` (default: the rows of testdata)")
	fs.IntVar(&o.rows, "rows", 200_000, "publish at least this many rows, repeating the data if need be")
	fs.IntVar(&o.restarts, "restarts", 100, "hub restarts of the variant reconnect")
	fs.IntVar(&o.rttRuns, "rtt-runs", 10, "hub restarts of the variant rtt")
	fs.DurationVar(&o.blackhole, "blackhole", 20*time.Second, "how long the variant blackhole swallows datagrams")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&o.hub, "hub", "", "hub binary (default: built from this repository)")
	fs.StringVar(&o.dir, "dir", "", "directory for stores and logs; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", 30*time.Minute, "bound for the whole run")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if *short {
		given := map[string]bool{}
		fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
		for name, set := range map[string]func(){
			"rows":      func() { o.rows = 60_000 },
			"restarts":  func() { o.restarts = 5 },
			"rtt-runs":  func() { o.rttRuns = 3 },
			"blackhole": func() { o.blackhole = 8 * time.Second },
			"timeout":   func() { o.timeout = 4 * time.Minute },
		} {
			if !given[name] {
				set()
			}
		}
	}
	o.variants = strings.Split(*variants, ",")
	for _, v := range o.variants {
		if !slices.Contains(allVariants, v) {
			return o, fmt.Errorf("-variants: there is no variant %q, only %s", v, strings.Join(allVariants, ", "))
		}
	}
	if o.rows < leastRows || o.restarts < 1 || o.rttRuns < 1 {
		return o, fmt.Errorf("-rows must be at least %d, -restarts and -rtt-runs at least 1", leastRows)
	}
	return o, nil
}

func run(ctx context.Context, args []string) (err error) {
	o, err := parse(args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	dir, remove, err := rig.WorkDir(o.dir, "outage-")
	if err != nil {
		return err
	}
	defer remove(&err)
	programs := rig.Programs{Edge: o.edge, Hub: o.hub}
	if err := programs.Missing(ctx, dir, true); err != nil {
		return err
	}
	rows, err := o.readRows()
	if err != nil {
		return err
	}
	for _, v := range o.variants {
		s := &rig.Site{
			Dir: filepath.Join(dir, v), Programs: programs,
			Exports: []rig.Export{{Stream: rowsStream, To: hubRowsStream}, {Stream: plainStream, To: plainStream}},
		}
		if err := os.MkdirAll(s.Dir, 0o755); err != nil {
			return err
		}
		start := time.Now()
		switch v {
		case "drain":
			err = o.drain(ctx, s, rows)
		case "blackhole":
			err = o.blackHole(ctx, s, rows)
		case "reconnect":
			err = o.reconnect(ctx, s)
		case "rtt":
			err = o.roundTrips(ctx, s)
		}
		s.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", v, errors.Join(err, logs(s)))
		}
		fmt.Printf("outage: %s passed in %v\n", v, time.Since(start).Round(100*time.Millisecond))
	}
	return nil
}

// logs is the end of what the programs said, for the report of a failure.
func logs(s *rig.Site) error {
	var b strings.Builder
	for _, p := range []*rig.Process{s.Edge, s.Hub} {
		if p != nil {
			fmt.Fprintf(&b, "%s's log ends with:\n%s\n", p.Name(), p.Log(1500))
		}
	}
	return errors.New(b.String())
}

// readRows returns at least o.rows rows.
func (o options) readRows() ([]rig.Row, error) {
	read := rig.Samples
	if o.data != "" {
		read = func() ([]rig.Row, error) { return rig.ReadRows(o.data) }
	}
	rows, err := read()
	if err != nil {
		return nil, err
	}
	all := rig.Repeat(rows, o.rows)
	fmt.Printf("outage: %d rows, published until there are %d\n", len(rows), len(all))
	return all, nil
}
