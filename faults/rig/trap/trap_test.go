//go:build linux && (amd64 || arm64)

package trap

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestMain(m *testing.M) {
	Child()
	if path := os.Getenv("TRAP_TEST_WRITES"); path != "" {
		writes(path)
	}
	os.Exit(m.Run())
}

// writes creates a file, writes to it three times and syncs it, and reports the
// first error by its exit status.
func writes(path string) {
	f, err := os.Create(path)
	for i := 0; i < 3 && err == nil; i++ {
		_, err = f.WriteAt([]byte{'a' + byte(i), '.'}, int64(2*i))
	}
	if err == nil {
		err = f.Sync()
	}
	switch {
	case errors.Is(err, syscall.EIO):
		os.Exit(5)
	case errors.Is(err, syscall.ENOSPC):
		os.Exit(28)
	case err != nil:
		os.Exit(1)
	}
	os.Exit(0)
}

func TestTrap(t *testing.T) {
	for _, tt := range []struct {
		name  string
		at    string
		nth   int
		do    Answer
		exit  int
		holds string
	}{
		{"nothing", "", 0, Answer{}, 0, "a.b.c."},
		{"error at a write", "pwrite64", 2, Answer{Errno: syscall.EIO}, 5, "a."},
		{"error at creation", "openat", 1, Answer{Errno: syscall.ENOSPC}, 28, ""},
		{"killed at a write", "pwrite64", 3, Answer{Kill: true}, -1, "a.b."},
		{"killed within a write", "pwrite64", 3, Answer{Kill: true, Torn: true}, -1, "a.b.c"},
		{"killed at the sync", "fsync", 1, Answer{Kill: true}, -1, "a.b.c."},
		{"held", "fsync", 1, Answer{Errno: syscall.EIO, Before: func() {}}, 5, "a.b.c."},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			counts := map[string]int{}
			var wrong []string
			cmd, tr, err := Command(dir, func(c Call) Answer {
				if c.Path != path {
					wrong = append(wrong, c.Name+" "+c.Path)
				}
				counts[c.Name]++
				if c.Name == tt.at && counts[c.Name] == tt.nth {
					return tt.do
				}
				return Answer{}
			}, os.Args[0])
			if err != nil {
				t.Fatal(err)
			}
			cmd.Env = append(cmd.Env, "TRAP_TEST_WRITES="+path)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if err := tr.Serve(); err != nil {
				t.Fatal(err)
			}
			err = cmd.Wait()
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if err := tr.Wait(); err != nil {
				t.Fatal(err)
			}
			if code := cmd.ProcessState.ExitCode(); code != tt.exit {
				t.Errorf("exit %d, want %d", code, tt.exit)
			}
			if held, _ := os.ReadFile(path); string(held) != tt.holds {
				t.Errorf("the file holds %q, want %q", held, tt.holds)
			}
			if wrong != nil {
				t.Errorf("calls of other files: %s", strings.Join(wrong, ", "))
			}
			if tt.at == "" && (counts["openat"] != 1 || counts["pwrite64"] != 3 || counts["fsync"] != 1) {
				t.Errorf("counts %v", counts)
			}
		})
	}
}
