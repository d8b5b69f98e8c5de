package boltfile

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestRefresh looks at the page cache: nothing of the file is in it afterwards.
func TestRefresh(t *testing.T) {
	if err := Refresh(filepath.Join(t.TempDir(), "none")); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "file")
	want := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	if err := os.WriteFile(path, want, 0o600); err != nil { // dirty pages
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		t.Fatal(err)
	}
	const overlay = 0x794c7630 // its pages are in the cache of another file system
	if fs.Type == unix.TMPFS_MAGIC || fs.Type == overlay {
		t.Skip("the temporary directory has no page cache of its own to look at")
	}
	if n := cached(t, f); n == 0 {
		t.Skip("the page cache is not to be seen")
	}
	if err := Refresh(path); err != nil {
		t.Fatal(err)
	}
	if n := cached(t, f); n > 0 {
		t.Fatalf("%d pages are still in the page cache", n)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("the file has changed, %v", err)
	}
}

func mincore(m, vec []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&vec[0])))
	if errno != 0 {
		return errno
	}
	return nil
}

// cached returns how many pages of a file are in the page cache.
func cached(t *testing.T, f *os.File) (n int) {
	t.Helper()
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(fi.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(m) }()
	page := os.Getpagesize()
	vec := make([]byte, (len(m)+page-1)/page)
	if err := mincore(m, vec); err != nil {
		t.Fatal(err)
	}
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}
