package wal_test

import (
	"io"
	"io/fs"
	"sync/atomic"

	"petiole/storage/vfs"
)

// discard is a disk that takes no time and keeps nothing, for measurements of
// what the log itself costs.
type discard struct{}

func (discard) Open(string, bool) (vfs.File, error)  { return &discardFile{}, nil }
func (discard) Remove(string) error                  { return nil }
func (discard) Rename(string, string) error          { return nil }
func (discard) MkdirAll(string) error                { return nil }
func (discard) List(string) ([]string, error)        { return nil, nil }
func (discard) Stat(string) (fs.FileInfo, error)     { return nil, fs.ErrNotExist }
func (discard) SyncDir(string) error                 { return nil }
func (discard) Free(string) (int64, error)           { return 1 << 40, nil }
func (discard) Lock(string) (c io.Closer, err error) { return nil, nil }

type discardFile struct{ size atomic.Int64 }

func (*discardFile) ReadAt([]byte, int64) (int, error)      { return 0, io.EOF }
func (*discardFile) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (*discardFile) Close() error                           { return nil }
func (f *discardFile) Size() (int64, error)                 { return f.size.Load(), nil }
func (f *discardFile) Truncate(n int64) error               { f.size.Store(n); return nil }
func (*discardFile) Sync() error                            { return nil }
func (*discardFile) Datasync() error                        { return nil }
func (f *discardFile) Preallocate(n int64) error            { f.size.Store(n); return nil }
