package suite

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Baseline is what nats-server makes of a suite, by the names of its tests.
type Baseline map[string]Outcome

// ReadBaseline reads baseline/SUITE.txt: an outcome and a test on each line.
func ReadBaseline(dir, suite string) (Baseline, error) {
	b := Baseline{}
	err := readLines(filepath.Join(dir, "baseline", suite+".txt"), func(outcome, name string) error {
		if !slices.Contains([]Outcome{Pass, Fail, Skip, Flaky}, Outcome(outcome)) {
			return fmt.Errorf("unknown outcome %q", outcome)
		}
		if _, twice := b[name]; twice {
			return fmt.Errorf("%s is there twice", name)
		}
		b[name] = Outcome(outcome)
		return nil
	})
	return b, err
}

// Write writes the baseline of several runs: a test passes if it passed in each.
func (b Baseline) Write(dir, suite, about string) error {
	var text strings.Builder
	fmt.Fprintf(&text, "# %s\n", about)
	for _, name := range slices.Sorted(maps.Keys(b)) {
		fmt.Fprintf(&text, "%s %s\n", b[name], name)
	}
	return os.WriteFile(filepath.Join(dir, "baseline", suite+".txt"), []byte(text.String()), 0o644)
}

// Merge puts another run's results into the baseline.
func (b Baseline) Merge(suite string, r Results) {
	for _, res := range r {
		if res.Suite != suite {
			continue
		}
		if before, known := b[res.Name]; known && before != res.Outcome {
			b[res.Name] = Flaky
		} else if !known {
			b[res.Name] = res.Outcome
		}
	}
}

// Later are the tests that need what is not there yet, with what that is.
type Later map[string]string

// ReadLater reads later.txt: a test and its reason on each line.
func ReadLater(dir string) (Later, error) {
	l := Later{}
	err := readLines(filepath.Join(dir, "later.txt"), func(name, reason string) error {
		if _, twice := l[name]; twice {
			return fmt.Errorf("%s is there twice", name)
		}
		l[name] = reason
		return nil
	})
	return l, err
}

// readLines reads lines of a word and what follows it; # begins a comment.
func readLines(path string, each func(word, rest string) error) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		word, rest, _ := strings.Cut(line, " ")
		rest = strings.TrimSpace(rest)
		if rest == "" {
			return fmt.Errorf("%s:%d: %q alone says too little", path, n, word)
		}
		if err := each(word, rest); err != nil {
			return fmt.Errorf("%s:%d: %w", path, n, err)
		}
	}
	return nil
}

// Verdict is how a server did in a suite.
type Verdict struct {
	Suite  string
	Passed int // of what counts
	Counts int // what passes on nats-server and is not listed
	Listed int // what passes on nats-server and is listed
	// Failed are the results that should have been passes; Leave are tests
	// that pass and have to leave the list.
	Failed Results
	Leave  []string
}

// Percent is the part of what counts that passed.
func (v *Verdict) Percent() float64 {
	if v.Counts == 0 {
		return 0
	}
	return 100 * float64(v.Passed) / float64(v.Counts)
}

// Judge holds the results of a suite against baseline and list.
func Judge(suite string, r Results, b Baseline, l Later) (*Verdict, error) {
	v := &Verdict{Suite: suite}
	for _, res := range r {
		if res.Suite != suite {
			continue
		}
		want, known := b[res.Name]
		if !known {
			return nil, fmt.Errorf("%s is not in the baseline: measure it anew with -server nats-server -write", res.Name)
		}
		_, listed := l[res.Name]
		switch {
		case listed && res.Outcome == Pass:
			v.Leave = append(v.Leave, res.Name)
		case listed && want == Pass:
			v.Listed++
		case want == Pass:
			v.Counts++
			if res.Outcome == Pass {
				v.Passed++
			} else {
				v.Failed = append(v.Failed, res)
			}
		}
	}
	return v, nil
}

// Check is the verdict in one error, nil if it is good.
func (v *Verdict) Check(least float64) error {
	var errs []error
	if p := v.Percent(); p < least {
		errs = append(errs, fmt.Errorf("%s: %.1f %% passed, wanted at least %.1f %%", v.Suite, p, least))
	}
	for _, name := range v.Leave {
		errs = append(errs, fmt.Errorf("%s passes: take it off the list (later.txt)", name))
	}
	return errors.Join(errs...)
}

// Print prints the verdict.
func (v *Verdict) Print(w io.Writer, verbose bool) {
	for _, res := range v.Failed {
		fmt.Fprintf(w, "FAILED %s (%s): %s\n", res.Name, res.Outcome, firstComplaint(res.Output))
		if verbose {
			fmt.Fprintln(w, "    "+strings.ReplaceAll(res.Output, "\n", "\n    "))
		}
	}
	fmt.Fprintf(w, "%s: %.1f %%: %d of %d passed; %d listed as later\n", v.Suite, v.Percent(), v.Passed, v.Counts, v.Listed)
}

// firstComplaint finds the line of a test's output that says what is wrong.
func firstComplaint(output string) string {
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if strings.Contains(line, "_test.go:") || strings.HasPrefix(line, "panic:") {
			return line
		}
	}
	first, _, _ := strings.Cut(output, "\n")
	return first
}

// RunAndJudge runs suites and judges each.
func RunAndJudge(ctx context.Context, o Options) ([]*Verdict, error) {
	dir, err := root(ctx)
	if err != nil {
		return nil, err
	}
	later, err := ReadLater(dir)
	if err != nil {
		return nil, err
	}
	results, err := Run(ctx, o)
	if err != nil {
		return nil, err
	}
	var out []*Verdict
	for _, name := range o.Suites {
		base, err := ReadBaseline(dir, name)
		if err != nil {
			return nil, err
		}
		v, err := Judge(name, results, base, later)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// WriteBaseline runs suites several times and keeps what they come to.
func WriteBaseline(ctx context.Context, o Options, times int) error {
	dir, err := root(ctx)
	if err != nil {
		return err
	}
	bases := map[string]Baseline{}
	for n := range times {
		results, err := Run(ctx, o)
		if err != nil {
			return err
		}
		for _, name := range o.Suites {
			if bases[name] == nil {
				bases[name] = Baseline{}
			}
			bases[name].Merge(name, results)
			about := fmt.Sprintf("Outcomes of the suite %s of %s v1.55.0 on nats-server v2.15.2, %d runs: pass means each time.", name, Module, n+1)
			if err := bases[name].Write(dir, name, about); err != nil {
				return err
			}
		}
	}
	return nil
}
