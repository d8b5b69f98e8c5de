//go:build linux

// Scale measures what the edge needs when there is much of something, prints
// each figure beside its limit, and fails if one is beyond it.
//
// Cases:
//
//	backlog  20 GB of messages wait for a hub: time until ready after kill -9, and
//	         memory while starting, reading and exporting; again in a control
//	         group that leaves the process 300 MB, page cache included
//	stored   10 million small messages: time until ready, and what is read for it
//	drain    10 million messages are consumed, or expire: how soon the files
//	         shrink, and how long publishes take meanwhile
//	streams  1,000 streams of which 990 are idle: open files, memory, log
//	idle     an idle client and an idle link: nothing is written to the disk
//
//	go run ./faults/scale -case backlog
//	go run ./faults/scale -case backlog -size 2
//
// It needs root, to empty the page cache before a start and for the control
// group memory. The store needs room: twice the size of the backlog at most.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"petiole/faults/rig"
)

type options struct {
	size     float64
	msgs     int
	streams  int
	minutes  float64
	seconds  int
	phase    time.Duration
	programs rig.Programs
}

const (
	mib = 1 << 20
	gib = 1 << 30
)

var cases = map[string]func(*bench, context.Context) error{
	"backlog": (*bench).backlog,
	"stored":  (*bench).stored,
	"drain":   (*bench).drain,
	"streams": (*bench).streams,
	"idle":    (*bench).idle,
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	var o options
	fs := flag.NewFlagSet("scale", flag.ContinueOnError)
	name := fs.String("case", "", "backlog, stored, drain, streams or idle")
	fs.Float64Var(&o.size, "size", 20, "backlog: GB of messages")
	fs.IntVar(&o.msgs, "msgs", 10_000_000, "stored, drain: how many messages")
	fs.IntVar(&o.streams, "streams", 1000, "streams: how many, of which 10 are written to")
	fs.Float64Var(&o.minutes, "minutes", 10, "streams: how long they are written to")
	fs.IntVar(&o.seconds, "seconds", 300, "idle: how long")
	fs.DurationVar(&o.phase, "phase", 30*time.Second, "backlog: how long it is read, and exported")
	fs.StringVar(&o.programs.Edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&o.programs.Hub, "hub", "", "hub binary (default: built from this repository)")
	given := fs.String("dir", "", "directory for stores and logs; kept (default: a temporary one, removed)")
	timeout := fs.Duration("timeout", 2*time.Hour, "bound for the whole run")
	if err := fs.Parse(args); err != nil {
		return err
	}
	measure := cases[*name]
	if measure == nil {
		return fmt.Errorf("-case: there is no case %q, only backlog, stored, drain, streams, idle", *name)
	}
	if os.Geteuid() != 0 {
		return errors.New("needs root to empty the page cache: run it with sudo")
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	dir, remove, err := rig.WorkDir(*given, "scale-")
	if err != nil {
		return err
	}
	defer func() {
		if *given == "" { // gigabytes are no evidence that one would keep
			os.RemoveAll(filepath.Join(dir, "edge-store"))
			os.RemoveAll(filepath.Join(dir, "hub-store"))
		}
		remove(&err)
	}()
	if err := o.programs.Missing(ctx, dir, true); err != nil {
		return err
	}
	b := &bench{o: o, site: &rig.Site{Dir: dir, Programs: o.programs, Exports: []rig.Export{{Stream: "EXPORTED", To: "EXPORTED"}}}}
	if err := b.site.Prepare(); err != nil {
		return err
	}
	defer b.site.Close()
	begun := time.Now()
	if err := measure(b, ctx); err != nil {
		if b.site.Edge != nil {
			err = fmt.Errorf("%w; the edge's log ends with:\n%s", err, b.site.Edge.Log(1500))
		}
		return err
	}
	if len(b.beyond) > 0 {
		return fmt.Errorf("%s: beyond the limit: %s", *name, strings.Join(b.beyond, "; "))
	}
	fmt.Printf("scale: %s passed in %v\n", *name, time.Since(begun).Round(time.Second))
	return nil
}

// bench is an edge, perhaps with its hub, and what was measured.
type bench struct {
	o      options
	site   *rig.Site
	beyond []string
}

// within prints a figure beside its limit, and notes if it is beyond it.
func within[T int | int64 | float64 | time.Duration](b *bench, what string, got, limit T, show func(T) string) {
	word := "within"
	if got > limit {
		word = "BEYOND"
		b.beyond = append(b.beyond, fmt.Sprintf("%s: %s, limit %s", what, show(got), show(limit)))
	}
	fmt.Printf("scale: %s: %s, %s the limit of %s\n", what, show(got), word, show(limit))
}

func inMB(n int64) string             { return fmt.Sprintf("%.1f MiB", float64(n)/mib) }
func number(n int) string             { return fmt.Sprint(n) }
func duration(d time.Duration) string { return d.Round(100 * time.Microsecond).String() }

// dropCaches writes everything out and empties the page cache, as a reboot does.
func dropCaches() error {
	syscall.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0o200); err != nil {
		return fmt.Errorf("empty the page cache: %w", err)
	}
	return nil
}

// start starts the edge, in the control group if there is one, with an empty
// page cache, and returns how long it took until it answered.
func (b *bench) start(ctx context.Context, group *rig.Cgroup) (time.Duration, *monitor, error) {
	if err := dropCaches(); err != nil {
		return 0, nil, err
	}
	conf := filepath.Join(b.site.Dir, "edge.conf")
	path, args := b.site.Programs.Edge, []string{"-c", conf}
	if group != nil {
		path, args = group.Command(path, args...)
	}
	p, err := rig.Start("edge", filepath.Join(b.site.Dir, "edge.log"), path, args...)
	if err != nil {
		return 0, nil, err
	}
	b.site.Edge = p
	m := watch(p)
	err = rig.WaitReady(p, b.site.EdgeAddr, 2*time.Minute)
	took := time.Since(p.Started())
	return took, m, errors.Join(err, ctx.Err())
}
