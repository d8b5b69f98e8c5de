//go:build !linux

package vfs

import "os"

// datasync is a full fsync where there is no fdatasync (on darwin os.File.Sync
// is F_FULLFSYNC, the only call there that reaches the medium).
func datasync(f *os.File) error { return f.Sync() }

// preallocate only extends the file: running out of space shows at the write.
func preallocate(f *os.File, size int64) error { return extend(f, size) }
