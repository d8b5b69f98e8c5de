//go:build unix

package app

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"petiole/internal/config"
)

// What is not a file, such as /dev/null or a pipe, is not moved aside.
func TestNoRotationOfPipes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	l, err := openLog(config.Logging{File: path, SizeLimit: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer l.f.Close()
	line := strings.Repeat("x", 59) + "\n"
	for range 5 {
		if _, err := io.WriteString(l, line); err != nil {
			t.Fatal(err)
		}
	}
	got := make([]byte, 5*len(line))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != strings.Repeat(line, 5) {
		t.Errorf("%q, %v", got, err)
	}
	if old, err := rotated(path); err != nil || len(old) > 0 {
		t.Errorf("moved aside: %q, %v", old, err)
	}
}
