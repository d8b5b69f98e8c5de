package vfs_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"petiole/storage/vfs"
	"petiole/storage/vfs/simfs"
)

// TestFS holds the operating system's files and the simulated ones to the same
// contract.
func TestFS(t *testing.T) {
	t.Run("os", func(t *testing.T) { testFS(t, vfs.OS, t.TempDir()) })
	t.Run("sim", func(t *testing.T) { testFS(t, simfs.New(1), "/tmp") })
}

func testFS(t *testing.T, fsys vfs.FS, root string) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// pathError checks that err names the path and is target.
	pathError := func(err error, path string, target error) {
		t.Helper()
		var pe *fs.PathError
		if !errors.As(err, &pe) || pe.Path != path || !errors.Is(err, target) {
			t.Fatalf("got %#v, want a *fs.PathError about %s with %v", err, path, target)
		}
	}
	dir := filepath.Join(root, "a", "b")
	must(fsys.MkdirAll(dir))
	must(fsys.MkdirAll(dir))
	a, b := filepath.Join(dir, "file"), filepath.Join(dir, "other")

	_, err := fsys.Open(a, false)
	pathError(err, a, fs.ErrNotExist)
	pathError(fsys.Remove(a), a, fs.ErrNotExist)
	pathError(fsys.Rename(a, b), b, fs.ErrNotExist)
	_, err = fsys.Stat(a)
	pathError(err, a, fs.ErrNotExist)
	_, err = fsys.List(a)
	pathError(err, a, fs.ErrNotExist)

	f, err := fsys.Open(a, true)
	must(err)
	must(f.Preallocate(10000))
	if n, err := f.Size(); n != 10000 || err != nil {
		t.Fatalf("size %d, %v", n, err)
	}
	must(f.Preallocate(100)) // shortens nothing
	if n, err := f.WriteAt([]byte("hello"), 9998); n != 5 || err != nil {
		t.Fatal(n, err)
	}
	must(f.Datasync())
	must(f.Sync())
	buf := make([]byte, 10)
	if n, err := f.ReadAt(buf, 9996); n != 7 || err != io.EOF || !bytes.Equal(buf[:n], []byte("\x00\x00hello")) {
		t.Fatalf("read %q, %v", buf[:n], err)
	}
	must(f.Truncate(9999))
	if fi, err := fsys.Stat(a); err != nil || fi.Size() != 9999 || fi.Name() != "file" || fi.IsDir() || fi.Mode().Perm() != 0o600 {
		t.Fatal(fi, err)
	}
	must(f.Close())
	if _, err := f.WriteAt(buf, 0); !errors.Is(err, fs.ErrClosed) {
		t.Fatalf("write after close: %v", err)
	}
	if err := f.Datasync(); !errors.Is(err, fs.ErrClosed) {
		t.Fatalf("sync after close: %v", err)
	}

	must(fsys.Rename(a, b))
	must(fsys.SyncDir(dir))
	f, err = fsys.Open(a, true)
	must(err)
	must(f.Close())
	if names, err := fsys.List(dir); err != nil || !slices.Equal(names, []string{"file", "other"}) {
		t.Fatal(names, err)
	}
	must(fsys.Remove(a))

	if n, err := fsys.Free(dir); err != nil || n <= 0 {
		t.Fatalf("%d bytes free, %v", n, err)
	}
	_, err = fsys.Free(a)
	pathError(err, a, fs.ErrNotExist)

	lock := filepath.Join(dir, "LOCK")
	c, err := fsys.Lock(lock)
	must(err)
	_, err = fsys.Lock(lock)
	pathError(err, lock, vfs.ErrLocked)
	must(c.Close())
	c, err = fsys.Lock(lock)
	must(err)
	must(c.Close())
}

func TestMkdirAllOverFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{path, filepath.Join(path, "below")} {
		var pe *fs.PathError
		if err := vfs.OS.MkdirAll(dir); !errors.As(err, &pe) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
