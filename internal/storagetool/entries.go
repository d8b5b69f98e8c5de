package storagetool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"petiole/storage/msgstore"
)

// ErrNotFile says that something else stands where a file of the store, or a
// directory of it, should be.
var ErrNotFile = errors.New("nothing has been changed; move it away, and put back from a backup what it has replaced if that is missed")

// CheckEntries reports what stands in place of a file in the store directory
// dir and is none, before anybody opens it: to open a FIFO may wait for ever,
// and a device may never end. The error wraps ErrNotFile. What cannot be looked
// at is left to those who open it.
func CheckEntries(dir string) error {
	for _, name := range []string{"LOCK", "meta.db", "ballast", "device.nk"} {
		if err := checkFile(filepath.Join(dir, name), true); err != nil {
			return err
		}
	}
	wal, streams := filepath.Join(dir, "wal"), filepath.Join(dir, "streams")
	for _, name := range []string{wal, streams} {
		if fi, err := os.Stat(name); err == nil && !fi.IsDir() {
			return notFile(name, "directory", fi.Mode())
		}
	}
	if err := checkFiles(wal, func(name string) bool {
		return strings.HasSuffix(name, ".wal") || strings.HasSuffix(name, ".spare")
	}); err != nil {
		return err
	}
	groups, _ := os.ReadDir(streams) // if that fails, others say why
	for _, g := range groups {
		if g.Type().IsRegular() || g.Name() == "parked" {
			continue
		}
		if err := checkFiles(filepath.Join(streams, g.Name()), func(name string) bool {
			return slices.Contains([]string{msgstore.FileName, msgstore.FloorName, "parked.log"}, name)
		}); err != nil {
			return err
		}
	}
	return nil
}

// checkFiles checks all that is in a directory of files; those whose names ours
// knows may not be directories either.
func checkFiles(dir string, ours func(name string) bool) error {
	if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
		return nil
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.Type().IsRegular() {
			continue
		}
		if err := checkFile(filepath.Join(dir, e.Name()), ours(e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// checkFile reports what is neither a file nor leads to one. With strict it may
// not be a directory.
func checkFile(path string, strict bool) error {
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().IsRegular() || fi.IsDir() && !strict {
		return nil
	}
	return notFile(path, "file", fi.Mode())
}

func notFile(path, want string, is fs.FileMode) error {
	kind := "something else"
	switch {
	case is.IsDir():
		kind = "a directory"
	case is.IsRegular():
		kind = "a file"
	case is&fs.ModeNamedPipe != 0:
		kind = "a FIFO"
	case is&fs.ModeSocket != 0:
		kind = "a socket"
	case is&fs.ModeDevice != 0:
		kind = "a device"
	}
	return fmt.Errorf("%s is %s where a %s of the store should be: %w", path, kind, want, ErrNotFile)
}
