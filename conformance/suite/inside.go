package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"petiole/conformance/tester"
)

// Files of the sandbox.
const (
	jobFile    = "job.json"
	resultFile = "results.json"
)

// Outcome is what became of a test.
type Outcome string

// The outcomes.
const (
	Pass  Outcome = "pass"
	Fail  Outcome = "fail"
	Skip  Outcome = "skip"
	Flaky Outcome = "flaky" // only in a baseline: passed at times
)

// Result is the outcome of one test, with what it printed if it failed.
type Result struct {
	Name, Suite string
	Outcome     Outcome
	Took        time.Duration
	Output      string
}

// Results are those of a run.
type Results []Result

// Inside is what runs in the sandbox; see sandbox.Main.
func Inside(args []string) int {
	if err := inside(args[0]); err != nil {
		fmt.Fprintln(os.Stderr, "in the sandbox:", err)
		return 1
	}
	return 0
}

func inside(dir string) (err error) {
	text, err := os.ReadFile(filepath.Join(dir, jobFile))
	if err != nil {
		return err
	}
	var j job
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	servers := filepath.Join(dir, "servers")
	if err := os.Mkdir(servers, 0o755); err != nil {
		return err
	}
	t, err := tester.Start(tester.Options{Kind: j.Kind, Binary: j.Server, Dir: servers})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()

	results := make(Results, len(j.Tests))
	next := make(chan int)
	var wg sync.WaitGroup
	for range max(j.Parallel, 1) {
		wg.Go(func() {
			for i := range next {
				results[i] = runTest(j.Tests[i], t.URL(), filepath.Join(dir, fmt.Sprintf("test-%d", i)))
			}
		})
	}
	for i := range j.Tests {
		next <- i
	}
	close(next)
	wg.Wait()
	// The suites measure times. What failed beside others may have failed
	// because of them.
	for i := range results {
		if results[i].Outcome == Fail && j.Parallel > 1 {
			fmt.Printf("again, alone: %s\n", results[i].Name)
			results[i] = runTest(j.Tests[i], t.URL(), filepath.Join(dir, fmt.Sprintf("again-%d", i)))
		}
	}
	text, err = json.Marshal(results)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, resultFile), text, 0o644)
}

// limit is how long a test may take; the longest takes some 40 s.
const limit = 3 * time.Minute

var skipped = regexp.MustCompile(`(?m)^--- SKIP: `)

// runTest runs a test in a process and a directory of its own.
func runTest(t test, url, dir string) Result {
	r := Result{Name: t.Name, Suite: t.Suite, Outcome: Fail}
	began := time.Now()
	out, err := func() ([]byte, error) {
		pkg, tmp := filepath.Join(dir, "package"), filepath.Join(dir, "tmp")
		if err := copyTree(t.Dir, pkg); err != nil {
			return nil, err
		}
		if err := os.Mkdir(tmp, 0o755); err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(context.Background(), limit+10*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, t.Binary, "-test.v", "-test.run", "^"+t.Func+"$", "-test.timeout", limit.String())
		cmd.Dir = pkg
		cmd.Env = append(os.Environ(), "TESTER_NATS_URL="+url, "HOME="+dir, "TMPDIR="+tmp)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, 5*time.Second
		err := cmd.Run()
		return out.Bytes(), errors.Join(err, removeAll(dir))
	}()
	r.Took = time.Since(began).Round(time.Millisecond)
	switch {
	case err != nil:
		r.Output = strings.TrimSpace(string(out) + "\n" + err.Error())
	case skipped.Match(out):
		r.Outcome = Skip
	case !bytes.Contains(out, []byte("--- PASS: "+t.Func+" ")):
		r.Output = "it did not run:\n" + string(out)
	default:
		r.Outcome = Pass
	}
	fmt.Printf("%-5s %7.2fs %s", r.Outcome, r.Took.Seconds(), r.Name)
	if r.Outcome == Fail {
		fmt.Print(": ", firstComplaint(r.Output))
	}
	fmt.Println()
	return r
}

func readResults(path string) (Results, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r Results
	return r, json.Unmarshal(text, &r)
}
