// Package petiole_test checks the shape of the whole module: which package may
// import which, that every package says what it is for, and that no dependency
// joins the product unnoticed.
package petiole_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "petiole"

// layers orders the packages from the bottom up. A package may import those of
// its own layer and of the layers below it. The longest entry that is the
// package or one of its parents counts, so a new sub-package inherits its
// parent's place.
var layers = [][]string{
	{"storage/vfs", "internal/subject"},
	{"storage", "internal/wire"},
	{"storage/wal", "storage/msgstore", "storage/memstore", "storage/metadb"},
	{"internal/broker", "internal/config", "sync/frame", "testdata"},
	{"internal/jetstream/api", "internal/jetstream/command", "internal/jetstream/stream", "internal/jetstream/consumer"},
	{"internal/jetstream"},
	{"sync"},
	{"hub", "internal/admin"},
	{"internal"},
	{"leaf"},
	{"cmd", "faults", "testdata/gen"},
}

// never lists imports that would be downwards and still wrong: who, what, why.
var never = []struct{ from, to, why string }{
	{"internal/broker", "storage", "the broker carries messages and stores none"},
	{"internal/config", "storage", "configuration is text, it opens nothing"},
	{"internal/wire", "storage", "the protocol does not depend on how messages are kept"},
	{"storage", "internal/broker", "storage knows no clients"},
	{"sync", "hub", "the edge links sync and must not carry the hub along"},
	{"leaf", "hub", "what embeds an edge must not carry the hub along"},
	{"internal", "hub", "shared wiring must not carry the hub into the edge"},
}

// direct lists the modules that go.mod may require directly. Adding one is a
// decision: it belongs here and in the commit message.
var direct = []string{
	"github.com/klauspost/compress",
	"github.com/nats-io/nats-server/v2", // the configuration language only
	"github.com/nats-io/nats.go",        // edge demo and tests
	"github.com/nats-io/nkeys",
	"github.com/quic-go/quic-go",
	"github.com/rogpeppe/go-internal", // tests
	"github.com/spf13/cobra",
	"go.etcd.io/bbolt",
	"golang.org/x/crypto",
	"golang.org/x/sys",
	"golang.org/x/term",
	"golang.org/x/time",
	"pgregory.net/rapid", // tests
}

type pkg struct {
	ImportPath, Dir, Name, Doc         string
	Imports, TestImports, XTestImports []string
	GoFiles, TestGoFiles, XTestGoFiles []string
	Deps                               []string
}

// packages lists every package of the module.
func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps=false", "-json", "./...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 2 {
		t.Fatalf("go list found only %d packages", len(all))
	}
	return all
}

// local returns the module-relative path of a package of this module.
func local(path string) (string, bool) { return strings.CutPrefix(path, module+"/") }

// under says whether rel is dir or below it.
func under(rel, dir string) bool { return rel == dir || strings.HasPrefix(rel, dir+"/") }

// layer returns the index in layers, or -1.
func layer(rel string) int {
	best, at := -1, -1
	for i, names := range layers {
		for _, name := range names {
			if under(rel, name) && len(name) > best {
				best, at = len(name), i
			}
		}
	}
	return at
}

func TestImportsPointDown(t *testing.T) {
	for _, p := range packages(t) {
		from, ok := local(p.ImportPath)
		if !ok {
			continue // this test's own package
		}
		at := layer(from)
		if at < 0 {
			t.Errorf("%s has no place in the layers of arch_test.go: decide where it belongs and add it", p.ImportPath)
			continue
		}
		for _, imp := range p.Imports {
			to, ok := local(imp)
			if !ok {
				continue
			}
			if layer(to) > at {
				t.Errorf("%s imports %s, which is above it", p.ImportPath, imp)
			}
			for _, n := range never {
				if under(from, n.from) && under(to, n.to) {
					t.Errorf("%s imports %s: %s", p.ImportPath, imp, n.why)
				}
			}
		}
	}
}

func TestEdgeNeverLinksHub(t *testing.T) {
	for _, p := range packages(t) {
		if p.ImportPath != module+"/cmd/edge" {
			continue
		}
		for _, dep := range p.Deps {
			if rel, ok := local(dep); ok && under(rel, "hub") {
				t.Errorf("cmd/edge links %s", dep)
			}
			if dep == "github.com/nats-io/nats-server/v2/server" {
				t.Error("cmd/edge links nats-server itself; only its configuration language is wanted")
			}
		}
	}
}

// A program in which a template can run, or that calls methods by name in other
// ways, has to keep every exported method of every type: a fifth more to load,
// and to hold in memory. Cobra has templates for those who set their own only.
func TestProgramsHaveNoTemplates(t *testing.T) {
	for _, p := range packages(t) {
		if rel, _ := local(p.ImportPath); !under(rel, "cmd") && !under(rel, "internal") && !under(rel, "leaf") {
			continue
		}
		for _, imp := range p.Imports {
			if imp == "text/template" || imp == "html/template" {
				t.Errorf("%s imports %s", p.ImportPath, imp)
			}
		}
		for _, name := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			for _, call := range []string{".SetUsageTemplate(", ".SetHelpTemplate(", ".SetVersionTemplate(", ".MethodByName("} {
				if bytes.Contains(text, []byte(call)) {
					t.Errorf("%s of %s calls %s...)", name, p.ImportPath, call)
				}
			}
		}
	}
}

func TestEveryPackageHasADocComment(t *testing.T) {
	for _, p := range packages(t) {
		if p.Doc != "" {
			continue
		}
		// A package of tests alone documents itself in a test file.
		documented := false
		for _, name := range slices.Concat(p.GoFiles, p.TestGoFiles, p.XTestGoFiles) {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Error(err)
			} else if f.Doc != nil {
				documented = true
			}
		}
		if !documented {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
}

func TestNoFilesDirectlyInSync(t *testing.T) {
	// A package named sync of this module would be confused with the standard
	// library's in every file that needs both.
	found, err := filepath.Glob("sync/*.go")
	if err != nil || len(found) > 0 {
		t.Errorf("Go files directly in sync/: %v (%v)", found, err)
	}
}

func TestDirectDependencies(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json").Output()
	if err != nil {
		t.Fatalf("go mod edit: %v", err)
	}
	var mod struct {
		Require []struct {
			Path     string
			Indirect bool
		}
		Replace, Tool []any
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}
	for _, r := range mod.Require {
		if !r.Indirect && !slices.Contains(direct, r.Path) {
			t.Errorf("go.mod requires %s directly, which arch_test.go does not list", r.Path)
		}
	}
	if len(mod.Replace) > 0 || len(mod.Tool) > 0 {
		t.Error("go.mod has replace or tool directives; tools belong into nested modules")
	}
}
