//go:build linux && (amd64 || arm64)

// Sweep stops the edge at every system call with which it changes its store, one
// call in each cycle: the first, the second and so on of each kind of call and
// file. There it is killed before the call, killed in the middle of it if it is
// a write, or the call fails with EIO or, where a full disk could cause it, with
// ENOSPC. Then the edge is started again without any of that, and everything
// that was acknowledged has to be there byte for byte, and nothing that was
// never sent.
//
// The script in each cycle: start on a store that a killed edge left behind,
// create a stream, publish, consume, delete a message, purge, delete a stream,
// stop (which makes checkpoints), start again, publish, consume. The same again
// beginning with no store at all.
//
//	go run ./faults/sweep                        # every call
//	go run ./faults/sweep -most 50               # some of them, at random
//	go run ./faults/sweep -tags small_budgets    # with checkpoints all the time
//	go run ./faults/sweep -only 'fdatasync wal'  # calls whose kind matches
//	go run ./faults/sweep -part 2/10             # the second of ten runs that try every call
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"petiole/faults/rig"
	"petiole/faults/rig/trap"
)

type options struct {
	sample   int
	most     int
	part     part
	seed     uint64
	tags     string
	only     *regexp.Regexp
	modes    []string
	parallel int
	programs rig.Programs
	dir      string
	timeout  time.Duration
}

// What is done to a call.
const (
	modeKill   = "kill"
	modeTorn   = "torn"
	modeEIO    = "EIO"
	modeENOSPC = "ENOSPC"
)

var allModes = []string{modeKill, modeTorn, modeEIO, modeENOSPC}

// modesOf are the modes that make sense for a system call.
func modesOf(name string) []string {
	switch name {
	case "pwrite64":
		return allModes
	case "write", "pwritev", "openat", "mkdirat", "renameat", "renameat2", "linkat", "fallocate", "ftruncate":
		return []string{modeKill, modeEIO, modeENOSPC}
	}
	return []string{modeKill, modeEIO}
}

// keeps are the calls whose failure must end the edge: what was written before
// may be lost.
var keeps = []string{"write", "pwrite64", "pwritev", "fsync", "fdatasync", "sync_file_range", "msync"}

func main() {
	trap.Child()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "sweep:", err)
		os.Exit(1)
	}
}

func parse(args []string) (o options, err error) {
	fs := flag.NewFlagSet("sweep", flag.ContinueOnError)
	fs.IntVar(&o.sample, "sample", 0, "so many calls of each kind and mode, chosen at random (default: all)")
	fs.IntVar(&o.most, "most", 0, "at most so many calls in all, chosen at random")
	fs.StringVar(&o.tags, "tags", "", "build tags for the edge; with small_budgets it makes checkpoints all the time")
	fs.Uint64Var(&o.seed, "seed", 0, "of the random choice (default: the clock)")
	fs.TextVar(&o.part, "part", part{n: 1, of: 1}, "with 3/10 the third of ten parts: ten short runs instead of a long one")
	only := fs.String("only", "", "only calls whose kind, such as \"fsync wal/\", matches this `expression`")
	modes := fs.String("modes", strings.Join(allModes, ","), "what is done")
	fs.IntVar(&o.parallel, "parallel", runtime.NumCPU(), "cycles at the same time")
	fs.StringVar(&o.programs.Edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&o.dir, "dir", "", "directory for stores and logs; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", time.Hour, "bound for the whole run")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if o.only, err = regexp.Compile(*only); err != nil {
		return o, err
	}
	o.modes = strings.Split(*modes, ",")
	for _, m := range o.modes {
		if !slices.Contains(allModes, m) {
			return o, fmt.Errorf("-modes: there is no mode %q, only %s", m, strings.Join(allModes, ", "))
		}
	}
	if o.seed == 0 {
		o.seed = uint64(time.Now().UnixNano())
	}
	if o.tags != "" && o.programs.Edge != "" {
		return o, errors.New("-tags builds an edge of its own: leave -edge out")
	}
	if o.parallel < 1 {
		return o, errors.New("-parallel must be at least 1")
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
	dir, remove, err := rig.WorkDir(o.dir, "sweep-")
	if err != nil {
		return err
	}
	defer remove(&err)
	var tags []string
	if o.tags != "" {
		tags = append(tags, o.tags)
	}
	if err := o.programs.Missing(ctx, dir, false, tags...); err != nil {
		return err
	}
	old, err := makeBase(ctx, dir, o.programs)
	if err != nil {
		return fmt.Errorf("make the store to begin with: %w", err)
	}
	bases := []*start{old, {name: "no store", truth: newTruth()}}
	var points []point
	for _, b := range bases {
		p, err := o.points(ctx, dir, b)
		if err != nil {
			return fmt.Errorf("count the calls, beginning with %s: %w", b.name, err)
		}
		points = append(points, p...)
	}
	if len(points) == 0 {
		return errors.New("no call matches")
	}
	r := rand.New(rand.NewPCG(o.seed, 1))
	r.Shuffle(len(points), func(i, j int) { points[i], points[j] = points[j], points[i] })
	if o.most > 0 && len(points) > o.most {
		points = points[:o.most]
	}
	return o.sweep(ctx, dir, o.part.take(points))
}

// start is what a cycle begins with.
type start struct {
	name  string
	store string // a directory to copy; empty: nothing
	truth *truth
}

// makeBase makes a store with checkpoints and with a log behind them, as a
// killed edge leaves it.
func makeBase(ctx context.Context, dir string, programs rig.Programs) (*start, error) {
	b := &start{name: "a killed edge's store", store: filepath.Join(dir, "base"), truth: newTruth()}
	s, err := newSite(filepath.Join(dir, "base-site"), programs)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	s.EdgeStore = b.store
	if err := s.WriteEdgeConfig(""); err != nil {
		return nil, err
	}
	consume := func(n int) error {
		c, err := connect(s.EdgeURL(), b.truth)
		if err != nil {
			return err
		}
		defer c.nc.Close()
		return errors.Join(c.publish(ctx, keepStream, 20), c.consume(ctx, n))
	}
	if err := s.StartEdge(); err != nil {
		return nil, err
	}
	if err := errors.Join(fill(ctx, s.EdgeURL(), b.truth), consume(12), s.Edge.Stop(patience)); err != nil {
		return nil, err
	}
	if err := s.StartEdge(); err != nil {
		return nil, err
	}
	return b, consume(8)
}

func newSite(dir string, programs rig.Programs) (*rig.Site, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	// The hub never answers, but an edge that has one keeps a key for it.
	s := &rig.Site{Dir: dir, Programs: programs, Exports: []rig.Export{{Stream: keepStream, To: keepStream}}}
	return s, s.Prepare()
}

// point is one call of a run: the nth of its kind.
type point struct {
	start *start
	kind  string // system call and file
	n     int
	mode  string
}

func (p point) String() string {
	return fmt.Sprintf("%s at %s, number %d, beginning with %s", p.mode, p.kind, p.n, p.start.name)
}

// identifier is what is another one in each run: a group, a random part.
var identifier = regexp.MustCompile(`[0-9a-f]{16}|[0-9]{4,}`)

// kind names a call's system call and file within the store.
func kind(store string, c trap.Call) string {
	rel, err := filepath.Rel(store, c.Path)
	if err != nil {
		rel = c.Path
	}
	rel = identifier.ReplaceAllString(rel, "*")
	if filepath.Ext(rel) == "" && c.Name == "fsync" {
		rel += "/"
	}
	return c.Name + " " + rel
}

// points runs the script once undisturbed, counts, and chooses.
func (o options) points(ctx context.Context, dir string, b *start) ([]point, error) {
	site, err := newSite(filepath.Join(dir, "count"), o.programs)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(site.Dir)
	c := &cycle{site: site, point: point{start: b}, counts: map[string]int{}}
	defer site.Close()
	if err := c.run(ctx); err != nil {
		return nil, err
	}
	fmt.Printf("sweep: beginning with %s: %d calls of %d kinds change the store; %d acknowledged, found %d\n",
		b.name, c.total(), len(c.counts), c.tally.acknowledged, c.tally.found)
	r := rand.New(rand.NewPCG(o.seed, 0))
	var out []point
	for _, k := range slices.Sorted(mapKeys(c.counts)) {
		name, _, _ := strings.Cut(k, " ")
		if !o.only.MatchString(k) {
			continue
		}
		for _, mode := range modesOf(name) {
			if !slices.Contains(o.modes, mode) {
				continue
			}
			ns := r.Perm(c.counts[k])
			if o.sample > 0 && len(ns) > o.sample {
				ns = ns[:o.sample]
			}
			slices.Sort(ns)
			for _, n := range ns {
				out = append(out, point{start: b, kind: k, n: n + 1, mode: mode})
			}
		}
	}
	return out, nil
}

// result sums up the cycles of one kind and mode.
type result struct {
	points, reached, acknowledged, found int
	codes                                map[int]int // exit codes; still running: running
	slowest                              time.Duration
}

const running = -2

// sweep runs a cycle for each point.
func (o options) sweep(ctx context.Context, dir string, points []point) error {
	begun := time.Now()
	results := map[string]*result{}
	refusals := map[string]int{}
	var mu sync.Mutex
	var failures []error
	queue := make(chan point)
	var wg sync.WaitGroup
	for w := range o.parallel {
		wg.Go(func() {
			for p := range queue {
				sub := filepath.Join(dir, fmt.Sprintf("worker-%d", w))
				c, err := o.cycle(ctx, sub, p)
				for n := 1; errors.Is(err, errLate) && n < tries; n++ {
					fmt.Printf("sweep: again: %v: %v\n", p, errLine(err))
					os.RemoveAll(sub)
					c, err = o.cycle(ctx, sub, p)
				}
				mu.Lock()
				if err != nil {
					kept := filepath.Join(dir, fmt.Sprintf("failure-%d", len(failures)+1))
					if e := os.Rename(sub, kept); e != nil {
						kept = sub
					}
					err = fmt.Errorf("%v: %w (store and log are in %s)", p, err, kept)
					fmt.Println("sweep: FAILED:", err)
					failures = append(failures, err)
				}
				if c != nil {
					key := p.mode + " " + p.kind
					if results[key] == nil {
						results[key] = &result{codes: map[int]int{}}
					}
					results[key].add(c)
					for what, n := range c.truth.refused {
						what, _, _ = strings.Cut(identifier.ReplaceAllString(strings.ReplaceAll(what, sub, ""), "*"), "/edge-store")
						refusals[what] += n
					}
				}
				mu.Unlock()
				os.RemoveAll(sub)
			}
		})
	}
feed:
	for _, p := range points {
		mu.Lock()
		enough := len(failures) >= 60
		mu.Unlock()
		if enough {
			break
		}
		select {
		case queue <- p:
		case <-ctx.Done():
			break feed
		}
	}
	close(queue)
	wg.Wait()
	return errors.Join(report(points, results, refusals, time.Since(begun), o.seed), ctx.Err(), errors.Join(failures...))
}

// errLine is the first line of an error, without the edge's log.
func errLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

func (r *result) add(c *cycle) {
	r.points++
	if c.reached {
		r.reached++
		r.codes[c.code]++
		r.slowest = max(r.slowest, c.ended)
	}
	if c.tally != nil {
		r.acknowledged += c.tally.acknowledged
		r.found += c.tally.found
	}
}

// report prints a line for each kind, and the sum.
func report(points []point, results map[string]*result, refusals map[string]int, took time.Duration, seed uint64) error {
	var sum result
	for _, key := range slices.Sorted(mapKeys(results)) {
		r := results[key]
		var ends []string
		for _, code := range slices.Sorted(mapKeys(r.codes)) {
			switch what := fmt.Sprintf("exit %d: %d", code, r.codes[code]); code {
			case running:
				ends = append(ends, fmt.Sprintf("went on: %d", r.codes[code]))
			case -1:
				ends = append(ends, fmt.Sprintf("killed: %d", r.codes[code]))
			default:
				ends = append(ends, what)
			}
		}
		slow := ""
		if r.slowest > 0 {
			slow = fmt.Sprintf(", the slowest after %v", r.slowest.Round(time.Millisecond))
		}
		fmt.Printf("  %-46s %3d points, %3d reached; %s%s\n", key, r.points, r.reached, strings.Join(ends, ", "), slow)
		sum.points += r.points
		sum.reached += r.reached
		sum.acknowledged += r.acknowledged
		sum.found += r.found
	}
	for _, what := range slices.Sorted(mapKeys(refusals)) {
		fmt.Printf("  refused %d times: %s\n", refusals[what], what)
	}
	fmt.Printf("sweep: %d of %d points, %d reached, in %v (seed %d); acknowledged %d, found %d\n",
		sum.points, len(points), sum.reached, took.Round(time.Second), seed, sum.acknowledged, sum.found)
	if 10*sum.reached < 9*len(points) {
		return fmt.Errorf("only %d of %d points were reached: the script does not make the same calls each time", sum.reached, len(points))
	}
	if sum.acknowledged != sum.found {
		return fmt.Errorf("%d acknowledged, %d found", sum.acknowledged, sum.found)
	}
	return nil
}

func mapKeys[K cmp.Ordered, V any](m map[K]V) func(func(K) bool) {
	return func(yield func(K) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}
