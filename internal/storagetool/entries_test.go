//go:build unix

package storagetool

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"petiole/storage/msgstore"
)

// What is no file is refused before anybody opens it: the opening of a FIFO
// would not come back.
func TestNoFile(t *testing.T) {
	dir := fill(t, nil)
	stream := filepath.Join("streams", "0000000000000002")
	segments := must(filepath.Glob(filepath.Join(dir, "wal", "*.wal")))
	for _, name := range []string{"meta.db", "LOCK", filepath.Join("wal", filepath.Base(segments[0])), filepath.Join(stream, msgstore.FileName), filepath.Join(stream, msgstore.FloorName)} {
		for kind, put := range map[string]func(path string) error{
			"a FIFO":      func(path string) error { return syscall.Mkfifo(path, 0o600) },
			"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
			"a device":    func(path string) error { return os.Symlink("/dev/zero", path) },
			"a socket": func(path string) error {
				t.Chdir(filepath.Dir(path)) // their paths are short
				l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Base(path), Net: "unix"})
				if err != nil {
					return err
				}
				l.SetUnlinkOnClose(false) // it stays where it is
				return l.Close()
			},
		} {
			path, aside := filepath.Join(dir, name), filepath.Join(t.TempDir(), "aside")
			if err := os.Rename(path, aside); err != nil {
				t.Fatal(err)
			}
			if err := put(path); err != nil {
				t.Fatal(err)
			}
			s, err := Open(dir)
			if err == nil {
				s.Close()
			}
			if !errors.Is(err, ErrNotFile) || !strings.HasPrefix(err.Error(), path+" is "+kind+" where a file of the store should be") {
				t.Errorf("%s in place of %s: %v", kind, name, err)
			}
			if err := errors.Join(os.Remove(path), os.Rename(aside, path)); err != nil {
				t.Fatal(err)
			}
		}
	}
	// A file that is a link to one stays one, and so do directories of others.
	path, aside := filepath.Join(dir, "meta.db"), filepath.Join(t.TempDir(), "aside")
	if err := errors.Join(os.Rename(path, aside), os.Symlink(aside, path), os.Mkdir(filepath.Join(dir, "wal", "lost+found"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := CheckEntries(dir); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(filepath.Join(dir, "wal")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "wal"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CheckEntries(dir); !errors.Is(err, ErrNotFile) || !strings.Contains(err.Error(), "is a file where a directory of the store should be") {
		t.Errorf("a file in place of wal: %v", err)
	}
}
