//go:build !mutant_retryfsync

package vfs

// retryFsync is true in the mutant that tries a failed sync again, and believes it.
const retryFsync = false
