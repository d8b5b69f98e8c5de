//go:build !mutant_nofsync

package wal

// noFsync is true in the mutant that acknowledges without fdatasync.
const noFsync = false
