//go:build !linux

package vfs

import "os"

// datasync is a full fsync where there is no fdatasync (on darwin os.File.Sync
// is F_FULLFSYNC, the only call there that reaches the medium).
func datasync(f *os.File) error { return f.Sync() }

// preallocate writes zeros: running out of room must show now, not when a batch
// is written.
func preallocate(f *os.File, size int64) error { return zeroFill(f, size) }
