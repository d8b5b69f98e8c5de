package simtest

import (
	"io"
	"io/fs"
	"path/filepath"

	"petiole/storage/simbolt"
	"petiole/storage/vfs"
	"petiole/storage/vfs/simfs"
)

// router is the file system that the engine is given. The log and the lock are
// on the disk in memory; the rest, which bbolt maps into memory, are real files
// of the same machine.
type router struct {
	dir  string
	mem  *simfs.FS
	real vfs.FS
	bolt *simbolt.Disk
	// broken names what the file system does not do as it should: what the
	// engine would be with a call missing. See TestBroken.
	broken string
}

func (r *router) of(name string) vfs.FS {
	rel, err := filepath.Rel(r.dir, name)
	if err == nil && (rel == "LOCK" || rel == "wal" || filepath.Dir(rel) == "wal") {
		return r.mem
	}
	return r.real
}

func (r *router) Open(name string, create bool) (vfs.File, error) {
	f, err := r.of(name).Open(name, create)
	if err != nil || r.broken == "" {
		return f, err
	}
	return &brokenFile{f, r.broken}, nil
}
func (r *router) Remove(name string) error              { return r.of(name).Remove(name) }
func (r *router) List(dir string) ([]string, error)     { return r.of(dir).List(dir) }
func (r *router) Stat(name string) (fs.FileInfo, error) { return r.of(name).Stat(name) }
func (r *router) SyncDir(dir string) error {
	if r.broken == "nodirsync" {
		return nil
	}
	return r.of(dir).SyncDir(dir)
}

func (r *router) Lock(name string) (io.Closer, error) { return r.of(name).Lock(name) }

// Free does not tell of all there is: the engine would make its ballast, which is
// a real file, so large that most of the time went into that.
func (r *router) Free(string) (int64, error) {
	n, err := r.mem.Free(r.dir)
	return min(n, 64<<20), err
}

func (r *router) Rename(oldname, newname string) error {
	err := r.of(oldname).Rename(oldname, newname)
	if err == nil && r.of(oldname) == r.real {
		r.bolt.Moved(oldname, newname)
	}
	return err
}

func (r *router) MkdirAll(dir string) error {
	if dir == r.dir {
		if err := r.mem.MkdirAll(dir); err != nil {
			return err
		}
	}
	return r.of(dir).MkdirAll(dir)
}

// brokenFile is a file whose syncs are not what they should be.
type brokenFile struct {
	vfs.File
	broken string
}

func (f *brokenFile) Sync() error     { return f.sync(f.File.Sync) }
func (f *brokenFile) Datasync() error { return f.sync(f.File.Datasync) }

func (f *brokenFile) sync(sync func() error) error {
	switch f.broken {
	case "nofsync":
		return nil
	case "retryfsync":
		if err := sync(); err == nil {
			return nil
		}
	}
	return sync()
}
