// Peerbench measures petiole's edge and nats-server v2.15.2 side by side: the
// same client (nats.go), the same cases, the same machine and disk, in the same
// run, each server alone in a process of its own with an empty store, in
// alternating order. It prints one table with medians and the ratio of the two.
//
//	go run ./cmd/peerbench -count 5 -check
//	go run ./cmd/peerbench -run 'js-sync|request' -json result.json
//	go run ./cmd/peerbench -run js-publishers
//	go run ./cmd/peerbench -list
//
// A ratio above 1 means that petiole's figure is the larger one; the column
// "better" says which direction is good. With -check the ratios have to be what
// the table in targets.go wants (also: -list), or the exit status is 2; it is 1
// when something could not be measured. Traffic stays on the loopback
// interface. A case that does not end is killed with its server, and the whole
// run ends after -limit with what there is by then.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"petiole/faults/rig"
)

type options struct {
	run        *regexp.Regexp
	count      int
	duration   time.Duration
	dir        string
	edge       string
	natsServer string
	peers      []string
	jsonPath   string
	check      bool
	list       bool
	limit      time.Duration
}

// errMissed says that -check is not content.
var errMissed = errors.New("targets were missed")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := mainErr(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "peerbench:", err)
		if errors.Is(err, errMissed) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

func parse(args []string) (options, error) {
	var o options
	fs := flag.NewFlagSet("peerbench", flag.ContinueOnError)
	run := fs.String("run", ".", "run only the cases whose name matches this regular `expression`")
	fs.IntVar(&o.count, "count", 3, "repetitions of each case; medians are reported")
	fs.DurationVar(&o.duration, "duration", 2*time.Second, "load time of one repetition of one case")
	fs.StringVar(&o.dir, "dir", os.TempDir(), "directory on the disk that is to be measured")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&o.natsServer, "nats-server", "", "nats-server binary (default: built from this module's go.mod)")
	peers := fs.String("peers", "nats-server,petiole", "servers to measure")
	fs.StringVar(&o.jsonPath, "json", "", "also write every sample to this `file` as JSON (- for standard output instead of the table)")
	fs.BoolVar(&o.check, "check", false, "compare the ratios with the targets, and fail if one is missed")
	fs.BoolVar(&o.list, "list", false, "list cases and targets, and run nothing")
	fs.DurationVar(&o.limit, "limit", 40*time.Minute, "time for the whole run")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	var err error
	if o.run, err = regexp.Compile(*run); err != nil {
		return o, fmt.Errorf("-run: %w", err)
	}
	if o.limit <= 0 {
		return o, errors.New("-limit must be above 0")
	}
	if o.count < 1 || o.duration <= 0 || o.duration > time.Minute {
		return o, fmt.Errorf("-count must be at least 1 and -duration between 0 and 1m")
	}
	o.peers = strings.Split(*peers, ",")
	for _, p := range o.peers {
		if p != peerPetiole && p != peerNATS {
			return o, fmt.Errorf("-peers: unknown server %q, use %s and %s", p, peerNATS, peerPetiole)
		}
	}
	return o, nil
}

func mainErr(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.list {
		return list(os.Stdout)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.limit, fmt.Errorf("the run took longer than -limit %v", o.limit))
	defer cancel()
	work, err := os.MkdirTemp(o.dir, "peerbench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	binaries, err := build(ctx, &o, filepath.Join(work, "bin"))
	if err != nil {
		return err
	}
	rep := report{
		Go: runtime.Version(), CPUs: runtime.NumCPU(), Count: o.count, Seconds: o.duration.Seconds(),
	}
	if rep.FdatasyncMicros, err = probeDisk(work); err != nil {
		return err
	}
	started := time.Now()
	for _, c := range cases() {
		if o.run.MatchString(c.name) {
			rep.measure(ctx, &o, c, binaries, work)
		}
	}
	if len(rep.Samples) == 0 && len(rep.Failures) == 0 {
		return fmt.Errorf("-run %q matches none of the cases %s", o.run, strings.Join(names(), ", "))
	}
	fmt.Fprintf(os.Stderr, "measured for %v\n", time.Since(started).Round(time.Second))
	if err := rep.write(o.jsonPath, os.Stdout); err != nil {
		return err
	}
	missed := 0
	if o.check && o.jsonPath != "-" {
		fmt.Println()
	}
	if o.check {
		out := io.Writer(os.Stdout)
		if o.jsonPath == "-" {
			out = os.Stderr
		}
		if missed, err = rep.judge(out, o.run.MatchString); err != nil {
			return err
		}
	}
	if n := len(rep.Failures); n > 0 {
		return fmt.Errorf("%d measurements failed, first: %s", n, rep.Failures[0])
	}
	if missed > 0 {
		return fmt.Errorf("%d %w", missed, errMissed)
	}
	return nil
}

// measure runs the repetitions of one case. What fails is noted.
func (r *report) measure(ctx context.Context, o *options, c benchCase, binaries map[string]string, work string) {
	count := o.count
	if c.most > 0 {
		count = min(count, c.most)
	}
	for i := range count {
		order := slices.Clone(o.peers)
		if i%2 == 1 {
			slices.Reverse(order)
		}
		for _, peer := range order {
			if ctx.Err() != nil {
				r.Failures = append(r.Failures, fmt.Sprintf("%s on %s was not run %d times: %v", c.name, peer, count, context.Cause(ctx)))
				return
			}
			fmt.Fprintf(os.Stderr, "%s %s %d/%d: ", c.name, peer, i+1, count)
			m, err := runOnce(ctx, c, peer, binaries[peer], work, o.duration)
			if err != nil {
				fmt.Fprintln(os.Stderr, "FAILED:", err)
				r.Failures = append(r.Failures, fmt.Sprintf("%s on %s: %v", c.name, peer, err))
				continue
			}
			fmt.Fprintln(os.Stderr, summary(m))
			r.Samples = append(r.Samples, sample{Case: c.name, Peer: peer, Metrics: m})
		}
	}
}

// list prints the cases and what -check wants of them.
func list(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "case\tmetric\ttarget (petiole / nats-server)\t")
	for _, c := range cases() {
		any := false
		for _, t := range targets() {
			if t.name == c.name {
				fmt.Fprintf(tw, "%s\t%s\t%s\t\n", t.name, t.metric, t.want())
				any = true
			}
		}
		if !any {
			fmt.Fprintf(tw, "%s\t-\t-\t\n", c.name)
		}
	}
	return tw.Flush()
}

func names() []string {
	var out []string
	for _, c := range cases() {
		out = append(out, c.name)
	}
	return out
}

// build compiles what the options do not name and returns the paths by peer.
func build(ctx context.Context, o *options, dir string) (map[string]string, error) {
	out := map[string]string{peerPetiole: o.edge, peerNATS: o.natsServer}
	root, err := rig.ModuleRoot()
	if err != nil {
		return nil, err
	}
	for _, p := range o.peers {
		if out[p] != "" {
			continue
		}
		out[p] = filepath.Join(dir, p)
		moduleDir, pkg := root, "./cmd/edge"
		if p == peerNATS {
			moduleDir, pkg = filepath.Join(root, "interop"), "github.com/nats-io/nats-server/v2"
		}
		if err := rig.Build(ctx, moduleDir, pkg, out[p]); err != nil {
			return nil, err
		}
	}
	return out, nil
}
