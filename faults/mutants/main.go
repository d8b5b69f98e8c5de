//go:build linux

// Mutants checks the fault rigs: it builds the programs with one build tag after
// the other, each of which breaks a promise in one place, and runs the rig that
// has to notice.
//
//	go run ./faults/mutants              # all of them
//	go run ./faults/mutants nofsync      # some
//	go run ./faults/mutants -runs 10     # each ten times
//
// A mutant survives if the rig finds nothing wrong with it; then this program
// fails. The table is in faults/README.md.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"petiole/faults/rig"
)

// mutant is a broken program and the rig that has to find out.
type mutant struct {
	tag     string // without "mutant_"
	program string // edge or hub
	small   bool   // built with small_budgets, too
	rig     string // or goTest
	args    []string
	needs   []string // programs that the rig runs beside it: edge, hub
	// evidence is what the rig has to print: another failure does not count.
	evidence string
}

// goTest in place of a rig is a test with the mutant's tag, of which args are the
// arguments: for what a real file system seldom shows.
const goTest = "go test"

var mutants = []mutant{
	{
		tag: "ackearly", program: "edge", rig: "powercut", args: []string{"-expect-loss", "-cycles", "20"},
		evidence: `missing [1-9]`,
	},
	{
		tag: "nofsync", program: "edge", rig: "powercut", args: []string{"-expect-loss", "-cycles", "20"},
		evidence: `missing [1-9]`,
	},
	{
		// The names of new segments mostly get to the disk with something else
		// that is synced later; the simulated one takes its liberties.
		tag: "nodirsync", rig: goTest, args: []string{"-run", "TestSimulation", "./internal/simtest", "-seeds", "200"},
		evidence: `what was acknowledged is not what is there`,
	},
	{
		tag: "truncatebad", program: "edge", small: true, needs: []string{"hub"}, rig: "bitflip",
		args:     []string{"-expect-failure", "-flips", "60", "-class", "wal newest records"},
		evidence: `which the damage did not touch|and the log says nothing|the last sequence went back|was never published|and acknowledged, is missing`,
	},
	{
		tag: "nocrc", program: "edge", small: true, needs: []string{"hub"}, rig: "bitflip",
		args:     []string{"-expect-failure", "-flips", "60", "-class", "msgs.db leaf,msgs.db overflow"},
		evidence: `has other bytes`,
	},
	{
		tag: "orphandelete", program: "edge", small: true, needs: []string{"hub"}, rig: "bitflip",
		args:     []string{"-expect-failure", "-flips", "4", "-class", "meta.db older"},
		evidence: `are in no file any more`,
	},
	{
		tag: "retryfsync", program: "edge", rig: "sweep", args: []string{"-modes", "EIO", "-only", "fdatasync wal", "-most", "3"},
		evidence: `exit code 0, want one of \[74\]`,
	},
	{
		tag: "sameincarnation", program: "edge", needs: []string{"hub"}, rig: "rollback", args: []string{"-cases", "edge", "-rounds", "1", "-rows", "500", "-timeout", "25s"},
		evidence: `the hub did not get everything: .*Incarnation:1 |how="new incarnation" .* incarnation=1 `,
	},
	{
		tag: "splitposition", program: "hub", needs: []string{"edge"}, rig: "outage", args: []string{"-variants", "drain", "-short"},
		evidence: `at the hub: .*duplicated [1-9]`,
	},
}

type options struct {
	bin      string
	rigs     string
	runs     int
	parallel int
	timeout  time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	var o options
	fs := flag.NewFlagSet("mutants", flag.ContinueOnError)
	fs.StringVar(&o.rigs, "rigs", "", "directory with the rigs and the healthy programs, built (default: they are built)")
	fs.StringVar(&o.bin, "bin", "", "directory for what is built; kept, and what is there already is not built again (default: a temporary one)")
	fs.IntVar(&o.runs, "runs", 1, "how often each mutant has to be caught")
	fs.IntVar(&o.parallel, "parallel", 2, "rigs at the same time")
	fs.DurationVar(&o.timeout, "timeout", 2*time.Minute, "bound for one run of a rig")
	if err := fs.Parse(args); err != nil {
		return err
	}
	chosen := slices.Clone(mutants)
	if names := fs.Args(); len(names) > 0 {
		chosen = slices.DeleteFunc(chosen, func(m mutant) bool { return !slices.Contains(names, m.tag) })
		if len(chosen) != len(names) {
			return fmt.Errorf("there are no such mutants: %s", strings.Join(names, ", "))
		}
	}
	dir, remove, err := rig.WorkDir(o.bin, "mutants-")
	if err != nil {
		return err
	}
	defer remove(&err)
	o.bin = dir
	if o.rigs == "" {
		o.rigs = filepath.Join(dir, "healthy")
		if err := os.MkdirAll(o.rigs, 0o755); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, "go", "build", "-o", o.rigs+string(filepath.Separator), "./cmd/edge", "./cmd/hub", "./faults/...")
		if cmd.Dir, err = rig.ModuleRoot(); err != nil {
			return err
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build the rigs: %w: %s", err, out)
		}
	}
	return o.all(ctx, chosen)
}

// all builds one mutant after the other, and runs rigs meanwhile.
func (o options) all(ctx context.Context, chosen []mutant) error {
	root, err := rig.ModuleRoot()
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var survived []string
	fail := func(m mutant, format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		survived = append(survived, m.tag)
		fmt.Printf("mutants: %s: "+format+"\n", append([]any{m.tag}, args...)...)
	}
	slots := make(chan struct{}, o.parallel)
	var wg sync.WaitGroup
	start := func(m mutant, binary string) {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			for n := 1; n <= o.runs; n++ {
				began := time.Now()
				line, err := o.catch(ctx, m, binary)
				if err != nil {
					fail(m, "run %d: %v", n, err)
					return
				}
				fmt.Printf("mutants: %s: caught by %s in %v: %s\n", m.tag, m.rig, time.Since(began).Round(100*time.Millisecond), line)
			}
		})
	}
	for _, m := range chosen {
		if m.rig == goTest { // builds what it runs
			start(m, "")
			continue
		}
		binary := filepath.Join(o.bin, m.program+"-"+m.tag)
		if _, err := os.Stat(binary); err != nil {
			tags := []string{"mutant_" + m.tag}
			if m.small {
				tags = append(tags, "small_budgets")
			}
			if err := rig.Build(ctx, root, "./cmd/"+m.program, binary, tags...); err != nil {
				fail(m, "%v", err)
				continue
			}
		}
		start(m, binary)
	}
	wg.Wait()
	if len(survived) > 0 {
		return fmt.Errorf("not caught: %s", strings.Join(survived, ", "))
	}
	fmt.Printf("mutants: %d mutants, %d runs of each, all caught\n", len(chosen), o.runs)
	return nil
}

// catch runs the rig and returns the line that shows that it has noticed.
func (o options) catch(ctx context.Context, m mutant, binary string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	dir, err := os.MkdirTemp("", "mutant-"+m.tag+"-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	var cmd *exec.Cmd
	if m.rig == goTest {
		cmd = exec.CommandContext(ctx, "go", slices.Concat([]string{"test", "-tags", "mutant_" + m.tag}, m.args)...)
		if cmd.Dir, err = rig.ModuleRoot(); err != nil {
			return "", err
		}
	} else {
		args := append(slices.Clone(m.args), "-dir", dir, "-"+m.program, binary)
		for _, p := range m.needs {
			args = append(args, "-"+p, filepath.Join(o.rigs, p))
		}
		cmd = exec.CommandContext(ctx, filepath.Join(o.rigs, m.rig), args...)
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	// What the rig says counts: some succeed when they find a loss, some fail.
	runErr := cmd.Run()
	evidence := regexp.MustCompile(m.evidence)
	for line := range strings.Lines(out.String()) {
		if evidence.MatchString(line) {
			line = strings.TrimSpace(line)
			return line[:min(len(line), 160)], nil
		}
	}
	text := out.String()
	return "", errors.Join(fmt.Errorf("survived %s %s; the rig's output ends with:\n%s", m.rig, strings.Join(m.args, " "), text[max(0, len(text)-1500):]), runErr, ctx.Err())
}
