//go:build mutant_nodirsync

package vfs

const noDirSync = true
