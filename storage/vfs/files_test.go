//go:build unix

package vfs_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"petiole/storage/vfs"
)

// Too many open files are no failure of the disk: an opening waits for others to be
// closed.
func TestOpenWaitsForFiles(t *testing.T) {
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	few := was
	few.Cur = 128
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	}()
	for _, c := range []struct {
		what string
		open func() error
	}{
		{"a file", func() error {
			f, err := vfs.OS.Open(filepath.Join(dir, "file"), true)
			if err == nil {
				err = f.Close()
			}
			return err
		}},
		{"a directory", func() error { return vfs.OS.SyncDir(dir) }},
	} {
		var all []*os.File
		for {
			f, err := os.Open(dir)
			if err != nil {
				break
			}
			all = append(all, f)
		}
		if len(all) == 0 {
			t.Fatal("no file can be opened")
		}
		time.AfterFunc(50*time.Millisecond, func() {
			for _, f := range all {
				f.Close()
			}
		})
		if err := c.open(); err != nil {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}
