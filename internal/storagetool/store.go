// Package storagetool looks after the store directory of a program that is not
// running. It says how much is where ([Store.Stat]), whether all of it can be
// read back ([Store.Verify]) and what the log says ([Store.Dump]), joining what
// the storage packages find out about their own files; it repairs
// ([Store.Salvage]) and compacts ([Store.Compact]) the files of streams, copies
// the store ([Store.Backup]) and puts a copy in place ([Restore]).
package storagetool

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"petiole/internal/jetstream"
	"petiole/storage"
	"petiole/storage/metadb"
	"petiole/storage/vfs"
)

// ErrNoStore says that a directory is not a store directory.
var ErrNoStore = errors.New("not a store directory")

// Store is a store directory that no program uses while it is open.
type Store struct {
	// Program is the name of the program that remedies tell to run; "edge" if
	// empty.
	Program string

	dir  string
	lock io.Closer                       // nil if there is no lock file, as in a copy
	free func(dir string) (int64, error) // room of the file system
}

// Open takes the lock of the store in dir. It fails with storage.ErrLocked if a
// running program has it and with ErrNoStore if dir holds no store.
func Open(dir string) (*Store, error) {
	s := &Store{dir: dir, free: vfs.OS.Free}
	_, metaErr := os.Stat(s.path("meta.db"))
	_, walErr := os.Stat(s.path("wal"))
	if errors.Is(metaErr, fs.ErrNotExist) && errors.Is(walErr, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w: it has neither wal nor meta.db", dir, ErrNoStore)
	}
	if err := CheckEntries(dir); err != nil {
		return nil, err
	}
	lock := s.path("LOCK")
	if _, err := os.Stat(lock); errors.Is(err, fs.ErrNotExist) {
		return s, nil // to create it would be a change
	}
	var err error
	if s.lock, err = vfs.OS.Lock(lock); err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	return s, nil
}

// forChange takes the lock of a store that has no lock file, as a copy: what
// changes it must not meet a program that starts meanwhile.
func (s *Store) forChange() error {
	if s.lock != nil {
		return nil
	}
	lock, err := vfs.OS.Lock(s.path("LOCK"))
	if err != nil {
		return fmt.Errorf("lock store %s: %w", s.dir, err)
	}
	s.lock = lock
	return nil
}

// Close lets programs use the store again.
func (s *Store) Close() error {
	if s.lock == nil {
		return nil
	}
	return s.lock.Close()
}

// command returns the command line of a storage command, for remedies.
func (s *Store) command(name string) string {
	return "`" + cmp.Or(s.Program, "edge") + " storage " + name + "`"
}

func (s *Store) path(name string) string { return filepath.Join(s.dir, name) }

// walk calls fn for every file and directory in the store, with its name within
// it, with slashes. Symbolic links stand for what they lead to, as they do for
// the program: who moves the log to another disk leaves one in its place. fn
// may return fs.SkipDir for a directory.
func (s *Store) walk(fn func(name string, fi fs.FileInfo) error) error {
	return s.walkDir("", nil, fn)
}

// walkDir is walk below the directory of that name; above are those that it lies
// in.
func (s *Store) walkDir(dir string, above []fs.FileInfo, fn func(name string, fi fs.FileInfo) error) error {
	entries, err := os.ReadDir(s.path(filepath.FromSlash(dir)))
	if err != nil {
		return err
	}
	self, err := os.Stat(s.path(filepath.FromSlash(dir)))
	if err != nil {
		return err
	}
	above = append(above, self)
	for _, e := range entries {
		name := path.Join(dir, e.Name())
		fi, err := os.Stat(s.path(filepath.FromSlash(name)))
		if err != nil {
			return err
		}
		switch err := fn(name, fi); {
		case fi.IsDir() && errors.Is(err, fs.SkipDir):
			continue
		case err != nil:
			return err
		}
		if !fi.IsDir() {
			continue
		}
		if slices.ContainsFunc(above, func(a fs.FileInfo) bool { return os.SameFile(a, fi) }) {
			return fmt.Errorf("%s leads back to a directory that it is in", s.path(filepath.FromSlash(name)))
		}
		if err := s.walkDir(name, above, fn); err != nil {
			return err
		}
	}
	return nil
}

// streams reads which streams the store has.
func (s *Store) streams() ([]jetstream.StreamRecord, error) {
	meta, err := metadb.OpenReadOnly(s.path("meta.db"))
	if err != nil {
		return nil, err
	}
	records, err := jetstream.StreamRecords(meta)
	return records, errors.Join(err, meta.Close())
}

// written returns what the store has written, as far as that was saved.
func (s *Store) written() (jetstream.Written, error) {
	meta, err := metadb.OpenReadOnly(s.path("meta.db"))
	if err != nil {
		return jetstream.Written{}, err
	}
	w, err := jetstream.ReadWritten(meta)
	return w, errors.Join(err, meta.Close())
}

// names returns the streams' names by group.
func names(records []jetstream.StreamRecord) map[storage.GroupID]string {
	m := map[storage.GroupID]string{storage.MetaGroup: "(meta)"}
	for _, r := range records {
		m[r.Group] = r.Name
	}
	return m
}

// Group returns the group of the stream of that name; ErrNoStream if there is
// none.
func (s *Store) Group(stream string) (storage.GroupID, error) {
	records, err := s.streams()
	if err != nil {
		return 0, err
	}
	for _, r := range records {
		if r.Name == stream {
			return r.Group, nil
		}
	}
	return 0, fmt.Errorf("%w: %q", ErrNoStream, stream)
}
