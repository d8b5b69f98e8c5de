//go:build mutant_truncatebad

package wal

const truncateBad = true
