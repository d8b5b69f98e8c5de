//go:build !mutant_truncatebad

package wal

// truncateBad is true in the mutant that ends a log at its first bad record.
const truncateBad = false
