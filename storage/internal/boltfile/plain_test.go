package boltfile

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"petiole/storage"
)

// What a user reads of a damaged file is no panic of a library.
func TestPlain(t *testing.T) {
	for _, c := range [][2]string{
		{"assertion failed: page 1: has unexpected type/flags: ffff", "page 1 is not what it should be"},
		{"panic: assertion failed: page 1: has unexpected type/flags: ffff", "page 1 is not what it should be"},
		{"assertion failed: Page expected to be: 5, but self identifies as 6", "page 5 is not what it should be"},
		{"assertion failed: the node is empty", "the node is empty"},
		{"runtime error: slice bounds out of range [:9] with capacity 5", "a page says that it holds more than there is room for"},
		{"runtime error: invalid memory address or nil pointer dereference", "a page lies behind the end of the file, or the disk does not give it"},
		{"page 7: unreachable unfreed", "page 7: unreachable unfreed"},
	} {
		if got, want := plain(c[0]), storage.StructurePrefix+c[1]; got != want {
			t.Errorf("%q: got %q, want %q", c[0], got, want)
		}
	}
	path := filepath.Join(t.TempDir(), "file")
	for _, fn := range []func(){func() { panic("assertion failed: page 3: has unexpected type/flags: 0") }, func() {
		var b []byte
		_ = b[len(path)]
	}} {
		err := Guard(path, func() error { fn(); return nil })
		if err == nil || !strings.Contains(err.Error(), storage.StructurePrefix) || strings.Contains(err.Error(), "runtime error") || strings.Contains(err.Error(), "assertion") {
			t.Errorf("got %v", errors.Unwrap(err))
		}
	}
}
