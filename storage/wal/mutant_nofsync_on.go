//go:build mutant_nofsync

package wal

const noFsync = true
