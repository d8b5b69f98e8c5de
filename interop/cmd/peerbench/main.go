// Peerbench measures petiole's edge and nats-server v2.15.2 side by side: the
// same client (nats.go), the same cases, the same machine and disk, in the same
// run, each server alone in a process of its own with an empty store, in
// alternating order. It prints one table with medians and the ratio of the two.
//
//	go run ./cmd/peerbench -count 5
//	go run ./cmd/peerbench -run 'js-sync|request' -json result.json
//
// A ratio above 1 means that petiole's figure is the larger one; the column
// "better" says which direction is good. Traffic stays on the loopback
// interface and every case is bounded in time.
package main

import (
	"context"
	"encoding/json"
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
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := mainErr(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "peerbench:", err)
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
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	var err error
	if o.run, err = regexp.Compile(*run); err != nil {
		return o, fmt.Errorf("-run: %w", err)
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
	for _, c := range cases() {
		if !o.run.MatchString(c.name) {
			continue
		}
		for i := range o.count {
			order := slices.Clone(o.peers)
			if i%2 == 1 {
				slices.Reverse(order)
			}
			for _, peer := range order {
				if err := ctx.Err(); err != nil {
					return err
				}
				fmt.Fprintf(os.Stderr, "%s %s %d/%d: ", c.name, peer, i+1, o.count)
				m, err := runOnce(ctx, c, peer, binaries[peer], work, o.duration)
				if err != nil {
					fmt.Fprintln(os.Stderr, "FAILED:", err)
					rep.Failures = append(rep.Failures, fmt.Sprintf("%s on %s: %v", c.name, peer, err))
					continue
				}
				fmt.Fprintln(os.Stderr, summary(m))
				rep.Samples = append(rep.Samples, sample{Case: c.name, Peer: peer, Metrics: m})
			}
		}
	}
	if len(rep.Samples) == 0 && len(rep.Failures) == 0 {
		return fmt.Errorf("-run %q matches none of the cases %s", o.run, strings.Join(names(), ", "))
	}
	if err := rep.write(o.jsonPath, os.Stdout); err != nil {
		return err
	}
	if n := len(rep.Failures); n > 0 {
		return fmt.Errorf("%d measurements failed, first: %s", n, rep.Failures[0])
	}
	return nil
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

// metric is one figure of one repetition.
type metric struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Better string  `json:"better"` // "more" or "less"
	Value  float64 `json:"value"`
}

type sample struct {
	Case    string   `json:"case"`
	Peer    string   `json:"peer"`
	Metrics []metric `json:"metrics"`
}

type report struct {
	Go              string   `json:"go"`
	CPUs            int      `json:"cpus"`
	Count           int      `json:"count"`
	Seconds         float64  `json:"seconds"`
	FdatasyncMicros float64  `json:"fdatasync_us_p50"`
	Samples         []sample `json:"samples"`
	Failures        []string `json:"failures,omitempty"`
}

func (r *report) write(jsonPath string, stdout io.Writer) error {
	if jsonPath != "" {
		b, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		b = append(b, '\n')
		if jsonPath == "-" {
			_, err = stdout.Write(b)
			return err
		}
		if err := os.WriteFile(jsonPath, b, 0o644); err != nil {
			return fmt.Errorf("write -json: %w", err)
		}
	}
	return r.table(stdout)
}

// table prints medians, one line for each case and metric.
func (r *report) table(w io.Writer) error {
	fmt.Fprintf(w, "%s, %d CPUs, median of %d, %.3g s of load each; fdatasync of 4 KiB here: p50 %.0f us\n",
		r.Go, r.CPUs, r.Count, r.Seconds, r.FdatasyncMicros)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "case\tmetric\tunit\tbetter\tnats-server\tpetiole\tratio\t")
	type key struct{ c, m string }
	var order []key
	def := map[key]metric{}
	values := map[key]map[string][]float64{}
	for _, s := range r.Samples {
		for _, m := range s.Metrics {
			k := key{s.Case, m.Name}
			if values[k] == nil {
				values[k] = map[string][]float64{}
				order = append(order, k)
				def[k] = m
			}
			values[k][s.Peer] = append(values[k][s.Peer], m.Value)
		}
	}
	for _, k := range order {
		n, p := median(values[k][peerNATS]), median(values[k][peerPetiole])
		ratio := "-"
		if len(values[k][peerNATS]) > 0 && len(values[k][peerPetiole]) > 0 && n != 0 {
			ratio = fmt.Sprintf("%.2f", p/n)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", k.c, k.m, def[k].Unit, def[k].Better,
			figure(values[k][peerNATS], n), figure(values[k][peerPetiole], p), ratio)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, f := range r.Failures {
		fmt.Fprintln(w, "FAILED:", f)
	}
	return nil
}

func figure(samples []float64, v float64) string {
	switch {
	case len(samples) == 0:
		return "-"
	case v >= 1000:
		return fmt.Sprintf("%.0f", v)
	default:
		return fmt.Sprintf("%.3g", v)
	}
}

func summary(ms []metric) string {
	var b strings.Builder
	for _, m := range ms {
		fmt.Fprintf(&b, "%s %s %s  ", m.Name, figure([]float64{m.Value}, m.Value), m.Unit)
	}
	return strings.TrimSpace(b.String())
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// probeDisk measures what one small durable write costs in dir, the context in
// which the js-*-always figures are to be read.
func probeDisk(dir string) (float64, error) {
	f, err := os.Create(filepath.Join(dir, "probe"))
	if err != nil {
		return 0, err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	block := make([]byte, 4096)
	if _, err := f.Write(make([]byte, 256*4096)); err != nil {
		return 0, err
	}
	var took []float64
	for i := range 200 {
		start := time.Now()
		if _, err := f.WriteAt(block, int64(i)*4096); err != nil {
			return 0, err
		}
		if err := syscall.Fdatasync(int(f.Fd())); err != nil {
			return 0, err
		}
		took = append(took, float64(time.Since(start))/1e3)
	}
	return median(took), nil
}
