package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// TestDemo runs the demonstration as a user does, with both programs built
// from this source and standing side by side.
func TestDemo(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("stops programs with signals")
	}
	if testing.Short() {
		t.Skip("looks at programs from outside, which are built without the race detector")
	}
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", dir, "petiole/cmd/edge", "petiole/cmd/hub")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// Longer than the demonstration gives itself, and both programs to stop.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "edge"), "demo")
	cmd.Dir = t.TempDir() // the program needs nothing of the source
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir())
	// Let it stop its own programs.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 50 * time.Second
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`hub killed \(SIGKILL\) while messages were under way`,
		`backlog: 0 to go, \d+ replayed \(100 %\)`,
		`(?m)^  edge READINGS +9000 +0 +0 +0 +0$`,
		`(?m)^  hub PLANT_READINGS +9000 +0 +0 +0 +0$`,
		`(?m)^  hub PLANT_SALES +4500 +0 +0 +0 +0$`,
		`first replayed message \S+ after the hub was back; \d+ replayed`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("the demonstration does not say %s", want)
		}
	}
	if left, err := os.ReadDir(cmd.Env[len(cmd.Env)-1][len("TMPDIR="):]); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if bytes.Contains(out, []byte("\x1b[")) {
		t.Error("draws a bar where there is no terminal")
	}
}
