// Package suite runs the test suites of nats.go against a server of ours and
// holds the outcome against what nats-server passes.
package suite

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"petiole/conformance/sandbox"
	"petiole/conformance/tester"
)

// Module is where the suites come from. What its tests need stands in its own
// go_test.mod.
const Module = "github.com/nats-io/nats.go"

// part is the tests of one package that belong to a suite.
type part struct {
	dir   string         // in the module
	files *regexp.Regexp // of the package
}

// suites are the suites by name. The package test holds core and, for the older
// of the two JetStream interfaces, half of jetstream.
var suites = map[string][]part{
	"core":      {{"test", regexp.MustCompile(`^(auth|basic|cluster|conn|context|drain|enc|gob|headers|json|nats|nats_iter|netchan|protobuf|reconnect|sub|ws)_test\.go$`)}},
	"micro":     {{"micro/test", regexp.MustCompile(``)}},
	"jetstream": {{"jetstream/test", regexp.MustCompile(``)}, {"test", regexp.MustCompile(`^(js|js_internal|kv|object|norace)_test\.go$`)}},
}

// Names are the names of the suites.
func Names() []string { return []string{"core", "micro", "jetstream"} }

// Options say what to run.
type Options struct {
	Kind     tester.Kind
	Suites   []string
	Run      *regexp.Regexp // tests, "test/TestName"; nil for all
	Parallel int            // tests at a time; those that fail are tried again alone
	Bin      string         // built suites and nats-server are kept and found here; empty: built each time
	Verbose  bool           // print what failing tests print
	Keep     bool           // leave the working directory
	Out      io.Writer      // progress
}

// job is what the process in the sandbox has to do.
type job struct {
	Kind     tester.Kind
	Server   string // binary
	Tests    []test
	Parallel int
}

// test is one test of a package.
type test struct {
	Name   string // "test/TestName"
	Suite  string
	Func   string
	Binary string
	Dir    string // the package's files, to be copied
}

// Run prepares the suites and runs them in a sandbox.
func Run(ctx context.Context, o Options) (_ Results, err error) {
	// Not below TMPDIR: others have to be able to pass.
	work, err := os.MkdirTemp("", "petiole-conformance-")
	if err != nil {
		return nil, err
	}
	if !o.Keep {
		defer func() { err = errors.Join(err, removeAll(work)) }()
	}
	if err := os.Chmod(work, 0o755); err != nil {
		return nil, err
	}
	bin, own := filepath.Join(work, "bin"), filepath.Join(work, "run")
	if o.Bin != "" {
		if bin, err = filepath.Abs(o.Bin); err != nil {
			return nil, err
		}
	}
	for _, dir := range []string{bin, own} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	j := job{Kind: o.Kind, Server: filepath.Join(bin, string(o.Kind)), Parallel: o.Parallel}
	if o.Kind != tester.NATSServer || !there(o.Bin, j.Server) {
		if err := buildServer(ctx, o.Kind, j.Server); err != nil {
			return nil, err
		}
	}
	src := filepath.Join(work, "nats.go")
	if err := fetch(ctx, src); err != nil {
		return nil, err
	}
	built := map[string]bool{}
	for _, name := range o.Suites {
		for _, p := range suites[name] {
			binary := filepath.Join(bin, strings.ReplaceAll(p.dir, "/", "-"))
			if !built[binary] && !there(o.Bin, binary) {
				if err := command(ctx, src, "go", "test", "-c", "-modfile="+standalone+".mod", "-tags=internal_testing", "-vet=off", "-trimpath", "-o", binary, "./"+p.dir); err != nil {
					return nil, err
				}
			}
			built[binary] = true
			tests, err := p.tests(src)
			if err != nil {
				return nil, err
			}
			for _, t := range tests {
				t.Suite, t.Binary = name, binary
				if o.Run == nil || o.Run.MatchString(t.Name) {
					j.Tests = append(j.Tests, t)
				}
			}
		}
	}
	if len(j.Tests) == 0 {
		return nil, errors.New("no test has such a name")
	}
	self := filepath.Join(work, "self")
	if err := copySelf(self); err != nil {
		return nil, err
	}
	text, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(own, jobFile), text, 0o644); err != nil {
		return nil, err
	}
	if err := sandbox.Run(ctx, sandbox.Spec{Self: self, Dir: own, Args: []string{own}, Stdout: o.Out, Stderr: o.Out}); err != nil {
		return nil, fmt.Errorf("running the suites: %w", err)
	}
	return readResults(filepath.Join(own, resultFile))
}

// there says whether an earlier run has left the file in the directory for it.
func there(bin, path string) bool {
	_, err := os.Stat(path)
	return bin != "" && err == nil
}

// testFunc finds tests in a source file.
var testFunc = regexp.MustCompile(`(?m)^func (Test\w*)\(\w+ \*testing\.T\)`)

// compat marks files that are left out: they want a server of somebody's own.
var compat = regexp.MustCompile(`(?m)^//go:build .*\bcompat\b`)

// tests lists the part's tests, in the order of their files.
func (p part) tests(src string) ([]test, error) {
	dir := filepath.Join(src, p.dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []test
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), "_test.go") || !p.files.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		if compat.Match(text) {
			continue
		}
		for _, m := range testFunc.FindAllSubmatch(text, -1) {
			out = append(out, test{Name: p.dir + "/" + string(m[1]), Func: string(m[1]), Dir: dir})
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no tests in %s", dir)
	}
	return out, nil
}

// root is the directory of this module.
func root(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	dir := filepath.Dir(strings.TrimSpace(string(out)))
	if filepath.Base(dir) != "conformance" {
		return "", fmt.Errorf("%s is not the module conformance: start it there", dir)
	}
	return dir, nil
}

// buildServer builds the program that is to be tested.
func buildServer(ctx context.Context, kind tester.Kind, to string) error {
	dir, err := root(ctx)
	if err != nil {
		return err
	}
	pkg := "github.com/nats-io/nats-server/v2"
	if kind != tester.NATSServer {
		dir, pkg = filepath.Dir(dir), "./cmd/"+string(kind)
	}
	return command(ctx, dir, "go", "build", "-o", to, pkg)
}

// fetch copies the module, whose place in the module cache is read-only.
func fetch(ctx context.Context, to string) error {
	dir, err := root(ctx)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", Module)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go mod download %s: %w", Module, err)
	}
	var m struct{ Dir string }
	if err := json.Unmarshal(out, &m); err != nil {
		return fmt.Errorf("go mod download %s: %w", Module, err)
	}
	if err := copyTree(m.Dir, to); err != nil {
		return err
	}
	return standAlone(to)
}

// standalone names the module file that the suites are built with.
const standalone = "go_standalone"

// fallback stands for the module that the suites' TestMain would start a tester
// of its own from if it were told of none. That has all of nats-server in it,
// which takes longest to build, and starts with every test.
const fallback = `package ntf

import (
	"context"
	"errors"
)

type Options struct{ AdvertiseHost string }

type Service struct{}

func New(context.Context, Options) (*Service, error) { return nil, errors.New("there is no tester") }
func (*Service) Port() int                           { return 0 }
func (*Service) Close() error                        { return nil }
`

// standAlone makes the module file: that of the tests, with fallback.
func standAlone(src string) error {
	const module = "github.com/synadia-io/orbit.go/ntf"
	mod, err := os.ReadFile(filepath.Join(src, "go_test.mod"))
	if err != nil {
		return err
	}
	sum, err := os.ReadFile(filepath.Join(src, "go_test.sum"))
	if err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(src, "ntf"), 0o755); err != nil {
		return err
	}
	for name, text := range map[string][]byte{
		standalone + ".mod": append(mod, "\nreplace "+module+" => ./ntf\n"...),
		standalone + ".sum": sum,
		"ntf/go.mod":        []byte("module " + module + "\n"),
		"ntf/ntf.go":        []byte(fallback),
	} {
		if err := os.WriteFile(filepath.Join(src, filepath.FromSlash(name)), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// copyTree copies a directory; everybody may read the copy, and the owner write.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		dst := filepath.Join(to, rel)
		if d.IsDir() {
			return os.MkdirAll(dst, 0o755)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(dst, text, 0o644)
	})
}

// copySelf copies the running executable.
func copySelf(to string) error {
	path, err := os.Executable()
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o755)
}

// command runs a command of the Go toolchain.
func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// removeAll also removes what was left without permission to write.
func removeAll(dir string) error {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			return os.Chmod(path, 0o755)
		}
		return err
	})
	return errors.Join(err, os.RemoveAll(dir))
}

// Known says whether there is a suite of the name.
func Known(name string) bool { return slices.Contains(Names(), name) }
