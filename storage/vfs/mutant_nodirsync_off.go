//go:build !mutant_nodirsync

package vfs

// noDirSync is true in the mutant that does not sync directories.
const noDirSync = false
