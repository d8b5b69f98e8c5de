//go:build mutant_ackearly

package wal

const ackEarly = true
