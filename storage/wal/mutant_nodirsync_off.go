//go:build !mutant_nodirsync

package wal

// noDirSync is true in the mutant that does not make the names of segments
// durable.
const noDirSync = false
