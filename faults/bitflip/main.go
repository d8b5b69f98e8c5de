//go:build linux

// Bitflip damages the store of a stopped edge at one random place, starts the
// edge on it, and reads everything back. One bit is flipped, a sector or a page
// is overwritten with noise or zeros, or a file is cut, in one kind of place
// after the other: log segments (header, batch, record, footer, unused), message
// files (meta, branch, leaf and overflow pages, freelist, unused), the meta
// database, floor files, the device key, the lock.
//
// Demanded is: the edge serves, or ends once and serves after a restart; no
// message is read back with other bytes, twice or under another sequence; what
// is missing was hit by the damage and is reported; everything else is there;
// publishing goes on; a restart changes nothing any more; and the hub, which
// had everything before, holds every message once.
//
//	go run ./faults/bitflip -flips 2000
//	go run ./faults/bitflip -seed 7 -only 123   # one of them again
//
// It works on copies of two template stores made in the beginning, one of an
// edge that was stopped and one of an edge that was killed, on a file system in
// memory if there is one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"petiole/faults/rig"
)

type options struct {
	flips, only, workers int
	seed                 uint64
	class                string
	edge, hub            string
	tags                 string
	expectFailure, turns bool
	dir                  string
	timeout              time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bitflip:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	var o options
	fs := flag.NewFlagSet("bitflip", flag.ContinueOnError)
	fs.IntVar(&o.flips, "flips", 200, "how many damages are tried")
	fs.IntVar(&o.only, "only", 0, "try the damage with this number alone, of those that -seed determines")
	fs.IntVar(&o.workers, "workers", 2, "edges at the same time")
	fs.Uint64Var(&o.seed, "seed", 0, "determines the damages, within the template stores of a run (default: random)")
	fs.StringVar(&o.class, "class", "", "damage only places whose class has one of these prefixes, with commas: wal,msgs.db leaf")
	fs.BoolVar(&o.turns, "turns", false, "let the classes take turns: as many damages as there are classes damage each once")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository with the tag small_budgets)")
	fs.StringVar(&o.hub, "hub", "", "hub binary (default: built from this repository)")
	fs.StringVar(&o.tags, "tags", "", "further build tags for the edge")
	fs.BoolVar(&o.expectFailure, "expect-failure", false, "succeed as soon as a damage is not handled as demanded, fail if all are")
	fs.StringVar(&o.dir, "dir", "", "directory for stores and logs; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", 0, "bound for the whole run (default: 2 minutes and 5 s for each damage)")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if o.seed == 0 {
		o.seed = rand.Uint64N(1 << 32)
	}
	if o.timeout == 0 {
		o.timeout = 2*time.Minute + time.Duration(o.flips)*5*time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if o.dir == "" {
		if unixFree("/dev/shm") > 1<<30 {
			// os.MkdirTemp, and nothing else in this process, heeds it.
			os.Setenv("TMPDIR", "/dev/shm")
		}
	}
	dir, remove, err := rig.WorkDir(o.dir, "bitflip-")
	if err != nil {
		return err
	}
	os.Unsetenv("TMPDIR")
	defer remove(&err)
	programs := rig.Programs{Edge: o.edge, Hub: o.hub}
	tags := []string{"small_budgets"}
	if o.tags != "" {
		tags = append(tags, o.tags)
	}
	if err := programs.Missing(ctx, dir, true, tags...); err != nil {
		return err
	}
	templates, hubTemplate, err := makeTemplates(ctx, filepath.Join(dir, "template"), programs)
	if err != nil {
		return fmt.Errorf("make template stores: %w", err)
	}
	r := &runner{o: o, dir: dir, programs: programs, templates: templates, hubTemplate: hubTemplate, tally: map[string]*tally{}}
	return r.all(ctx)
}

// tally counts what became of the damages of one class.
type tally struct {
	damages, hit, lost, unreported, refused, failed int
}

type runner struct {
	o           options
	dir         string
	programs    rig.Programs
	templates   []*template
	hubTemplate string

	mu       sync.Mutex
	next     int
	tally    map[string]*tally
	failures []string
	slowest  time.Duration
	found    int // messages read back as they were
}

// errFailed says that a damage was not handled as demanded.
var errFailed = errors.New("damage was not handled as demanded")

func (r *runner) all(ctx context.Context) error {
	start := time.Now()
	if r.o.only > 0 {
		r.next, r.o.flips, r.o.workers = r.o.only-1, r.o.only, 1
	}
	first := r.next
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, r.o.workers)
	var wg sync.WaitGroup
	for w := range r.o.workers {
		wg.Go(func() {
			if errs[w] = r.worker(ctx, filepath.Join(r.dir, fmt.Sprintf("worker-%d", w))); errs[w] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	r.report(time.Since(start), r.next-first)
	err := errors.Join(errs...)
	switch {
	case r.o.expectFailure && len(r.failures) > 0:
		fmt.Printf("bitflip: a failure of %q was found, as expected\n", r.o.tags)
		return nil
	case err != nil:
		return err
	case r.o.expectFailure:
		return fmt.Errorf("no failure was found in %d damages although the edge was built with %q", r.o.flips, r.o.tags)
	case len(r.failures) > 0:
		return fmt.Errorf("%d of %d: %w", len(r.failures), r.next-first, errFailed)
	}
	return nil
}

func (r *runner) report(took time.Duration, n int) {
	sum := tally{}
	fmt.Printf("%-22s %8s %8s %8s %8s %8s %8s\n", "class", "damages", "msgs hit", "lost", "unreport", "refused", "failed")
	for _, class := range slices.Sorted(maps.Keys(r.tally)) {
		t := r.tally[class]
		fmt.Printf("%-22s %8d %8d %8d %8d %8d %8d\n", class, t.damages, t.hit, t.lost, t.unreported, t.refused, t.failed)
		sum.damages += t.damages
		sum.hit += t.hit
		sum.lost += t.lost
		sum.unreported += t.unreported
		sum.refused += t.refused
		sum.failed += t.failed
	}
	fmt.Printf("bitflip: %d damages in %v (seed %d); messages acknowledged in each store %d, found as they were in all %d, hit %d, lost %d, lost without report %d; refused stores %d; failed %d\n",
		n, took.Round(time.Second), r.o.seed, r.templates[0].total(), r.found, sum.hit, sum.lost, sum.unreported, sum.refused, sum.failed)
}

// worker tries one damage after the other at a site of its own.
func (r *runner) worker(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	site := &rig.Site{Dir: dir, Programs: r.programs, Exports: []rig.Export{{Stream: exported, To: exported}}}
	if err := site.Prepare(); err != nil {
		return err
	}
	defer site.Close()
	for {
		r.mu.Lock()
		n := r.next
		enough := n >= r.o.flips || r.o.expectFailure && len(r.failures) > 0
		if !enough {
			r.next++
		}
		r.mu.Unlock()
		if enough {
			return nil
		}
		if err := r.one(ctx, site, n+1); err != nil {
			return fmt.Errorf("damage %d (seed %d): %w", n+1, r.o.seed, err)
		}
	}
}

// one tries damage n.
func (r *runner) one(ctx context.Context, site *rig.Site, n int) error {
	rng := rand.New(rand.NewPCG(r.o.seed, uint64(n)))
	list := classes(r.templates, r.o.class)
	if len(list) == 0 {
		return fmt.Errorf("no store has a place of class %q", r.o.class)
	}
	turn := -1
	if r.o.turns {
		turn = n - 1
	}
	var t *template
	var d *damage
	for d == nil {
		t = r.templates[rng.IntN(len(r.templates))] // it may have no such place
		d = t.choose(rng, list, turn)
	}
	site.Close()
	if err := errors.Join(copyTree(t.dir, site.EdgeStore), copyTree(r.hubTemplate, site.HubStore), d.do(site.EdgeStore)); err != nil {
		return err
	}
	j := &judge{site: site, template: t, damage: d, rng: rng}
	start := time.Now()
	if err := j.run(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	took := time.Since(start)
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.tally[d.class]
	if c == nil {
		c = &tally{}
		r.tally[d.class] = c
	}
	c.damages++
	c.hit += len(d.hit)
	c.lost += j.lost
	c.unreported += j.unreported
	if j.refused {
		c.refused++
	}
	r.found += j.found
	r.slowest = max(r.slowest, took)
	if len(j.failures) == 0 {
		return nil
	}
	c.failed++
	text := fmt.Sprintf("damage %d, store %s, %s: %s:\n  %s", n, t.name, d.class, d, strings.Join(j.failures, "\n  "))
	r.failures = append(r.failures, text)
	fmt.Println(text)
	if len(r.failures) <= keepFailures {
		keep := filepath.Join(r.dir, fmt.Sprintf("failed-%d", n))
		err := errors.Join(copyTree(t.dir, filepath.Join(keep, "store")), d.do(filepath.Join(keep, "store")),
			os.WriteFile(filepath.Join(keep, "edge.log"), []byte(j.log.String()), 0o644))
		if err != nil {
			return err
		}
		fmt.Printf("  the damaged store, as it was before the start, and the edge's log are in %s\n", keep)
	}
	return nil
}

// keepFailures bounds the stores that are kept.
const keepFailures = 40

func unixFree(dir string) uint64 {
	var st syscall.Statfs_t
	if syscall.Statfs(dir, &st) != nil {
		return 0
	}
	return st.Bavail * uint64(st.Bsize)
}
