//go:build mutant_retryfsync

package vfs

const retryFsync = true
