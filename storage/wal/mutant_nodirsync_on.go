//go:build mutant_nodirsync

package wal

const noDirSync = true
