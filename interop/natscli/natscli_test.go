package natscli

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"

	"petiole/faults/rig"
)

var (
	cliFlag    = flag.String("nats", "", "nats CLI binary (default: built from this module's go.mod)")
	serverFlag = flag.String("nats-server", "", "nats-server binary (default: built from this module's go.mod)")
	edgeFlag   = flag.String("edge", "", "edge binary (default: built from this repository)")
	stepsFlag  = flag.String("steps", ".", "run only steps whose name matches this expression; the list of failures is not judged then")
	baseFlag   = flag.Bool("baseline-only", false, "run against nats-server only")
)

// leastShare is the part of what passes on nats-server that has to pass on edge.
const leastShare = 0.90

// TestCLI runs every step against nats-server and against edge. A step that
// passes on nats-server must pass on edge unless expected-failures.txt lists
// it; a listed step that passes must leave the list.
func TestCLI(t *testing.T) {
	pick, err := regexp.Compile(*stepsFlag)
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	root, err := rig.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	interop := filepath.Join(root, "interop")
	built := func(given, moduleDir, pkg, name string) string {
		if given != "" {
			return given
		}
		path := filepath.Join(bin, name)
		if err := rig.Build(t.Context(), moduleDir, pkg, path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cli := built(*cliFlag, interop, "github.com/nats-io/natscli/nats", "nats")
	server := built(*serverFlag, interop, "github.com/nats-io/nats-server/v2", "nats-server")

	edge := ""
	if !*baseFlag {
		edge = built(*edgeFlag, root, "./cmd/edge", "edge")
	}
	// Both at the same time: much of a step is waiting.
	var baseline, got []outcome
	var baseErr, edgeErr error
	var wg sync.WaitGroup
	wg.Go(func() { baseline, baseErr = runAll(t.TempDir(), "nats-server", server, cli, pick) })
	if !*baseFlag {
		wg.Go(func() { got, edgeErr = runAll(t.TempDir(), "edge", edge, cli, pick) })
	}
	wg.Wait()
	if err := errors.Join(baseErr, edgeErr); err != nil {
		t.Fatal(err)
	}
	for _, o := range baseline {
		if o.err != nil {
			t.Errorf("baseline: %s fails on nats-server: %v", o.name, o.err)
		}
	}
	if *baseFlag {
		return
	}
	expected := readExpected(t)
	passed, of := 0, 0
	for i, o := range got {
		if baseline[i].err != nil || o.anyway {
			continue
		}
		of++
		listed := slices.Contains(expected, o.name)
		switch {
		case o.err == nil:
			passed++
			if listed {
				t.Errorf("%s passes now: remove it from testdata/expected-failures.txt", o.name)
			}
		case listed:
			t.Logf("%s fails, as listed: %v", o.name, o.err)
		default:
			t.Errorf("%s: %v", o.name, o.err)
		}
	}
	if of == 0 {
		t.Fatalf("no step was judged (-steps %q)", *stepsFlag)
	}
	share := float64(passed) / float64(of)
	t.Logf("edge passes %d of %d steps that pass on nats-server: %.1f %%", passed, of, 100*share)
	if share < leastShare {
		t.Errorf("%.1f %% is under %.0f %%", 100*share, 100*leastShare)
	}
}

type outcome struct {
	name string
	err  error
	// anyway: only prepares the ground, does not count.
	anyway bool
}

// runAll starts the server binary on an empty store and runs the steps on it.
func runAll(dir, peer, binary, cli string, pick *regexp.Regexp) (out []outcome, err error) {
	data, err := filepath.Abs("testdata")
	if err != nil {
		return nil, err
	}
	vars := map[string]string{"DIR": filepath.Join(dir, "files"), "DATA": data}
	steps, err := parseFile(filepath.Join(data, "commands.txt"), func(k string) string { return vars[k] })
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(vars["DIR"], 0o755); err != nil {
		return nil, err
	}
	port, err := rig.FreePort()
	if err != nil {
		return nil, err
	}
	conf, err := rig.WriteFile(dir, "server.conf", fmt.Sprintf(
		"listen: %q\nserver_name: cli\njetstream {\n  store_dir: %q\n}\n", rig.Addr(port), filepath.Join(dir, "js")))
	if err != nil {
		return nil, err
	}
	proc, err := rig.Start(peer, filepath.Join(dir, "log"), binary, "-c", conf)
	if err != nil {
		return nil, err
	}
	defer proc.Kill()
	if err := rig.WaitReady(proc, rig.Addr(port), rig.StartTimeout); err != nil {
		return nil, err
	}
	url := "nats://" + rig.Addr(port)
	nc, err := nats.Connect(url)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	r := &runner{cli: cli, url: url, home: filepath.Join(dir, "home"), nc: nc}
	for _, s := range steps {
		if !pick.MatchString(s.name) {
			continue
		}
		err := r.run(s)
		if err == nil && !proc.Alive() {
			err = fmt.Errorf("%s ended with status %d", peer, proc.ExitCode())
		}
		out = append(out, outcome{s.name, err, s.anyway})
	}
	return out, proc.Stop(rig.StopTimeout)
}

// readExpected returns the names listed in expected-failures.txt; what follows
// a name is the reason.
func readExpected(t *testing.T) []string {
	t.Helper()
	f, err := os.Open("testdata/expected-failures.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var names []string
	for scanner := bufio.NewScanner(f); scanner.Scan(); {
		line := strings.TrimSpace(scanner.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, reason, ok := strings.Cut(line, ": ")
		if !ok || reason == "" {
			t.Errorf("expected-failures.txt: %q gives no reason", line)
		}
		names = append(names, name)
	}
	return names
}

func TestParseRejects(t *testing.T) {
	for _, text := range []string{
		"a: pub x\na: pub y\n", "\twant x\n", "a: pub x\n\tfrown\n", "a: pub x\n\twant (\n", "no colon\n",
		"a: pub x\n\tbackground-on x\n", "a: pub 'x\n", "a: pub x\n\tsame one\n",
	} {
		if steps, err := parse(strings.NewReader(text), os.Getenv); err == nil {
			t.Errorf("parse(%q) = %v, want an error", text, steps)
		}
	}
}

// TestJudge proves that a step can fail: `true` and `false` stand in for the CLI.
func TestJudge(t *testing.T) {
	one := func(text string) step {
		steps, err := parse(strings.NewReader(text), os.Getenv)
		if err != nil {
			t.Fatal(err)
		}
		return steps[0]
	}
	for _, tt := range []struct {
		cli, text string
		pass      bool
	}{
		{"true", "a: x\n", true},
		{"false", "a: x\n", false},
		{"false", "a: x\n\texit 1\n", true},
		{"true", "a: x\n\texit 1\n", false},
		{"echo", "a: hello\n\twant hello\\n$\n", true},
		{"echo", "a: hello\n\ttty\n\tuntil hello\n", true},
		{"echo", "a: hello\n\ttty\n\tuntil goodbye\n", false},
		{"echo", "a: hello\n\twant goodbye\n", false},
		{"echo", "a: hello\n\tuntil goodbye\n", false},
		{"echo", "a: hello\n\tuntil hello\n", true},
		{"false", "a: x\n\tbefore y\n\texit 1\n", false},
		{"true", "a: x\n\tsame /dev/null testdata/stream.json\n", false},
	} {
		r := &runner{cli: tt.cli, url: "nats://127.0.0.1:1", home: t.TempDir()}
		if err := r.run(one(tt.text)); (err == nil) != tt.pass {
			t.Errorf("%s %q: %v, want pass %v", tt.cli, tt.text, err, tt.pass)
		}
	}
}
