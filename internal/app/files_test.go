package app

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// A pid file is removed by whom it names, if it is a file at all.
func TestRemovePID(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pid")
	there := func(path string) bool {
		_, err := os.Lstat(path)
		return err == nil
	}
	if err := writePID(path); err != nil {
		t.Fatal(err)
	}
	if removePID(path); there(path) {
		t.Error("it is still there")
	}
	removePID(path) // it is gone already
	if err := os.WriteFile(path, []byte(strconv.Itoa(os.Getpid()+1)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if removePID(path); !there(path) {
		t.Error("another process's is gone")
	}
	// As /dev/stdout is, and whatever else is not a file.
	link := filepath.Join(dir, "link")
	if err := os.Symlink(path, link); err != nil {
		t.Skipf("no symbolic links: %v", err)
	}
	if err := writePID(link); err != nil {
		t.Fatal(err)
	}
	if removePID(link); !there(link) {
		t.Error("a symbolic link is gone")
	}
}
