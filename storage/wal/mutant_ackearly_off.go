//go:build !mutant_ackearly

package wal

// ackEarly is true in the mutant that acknowledges before it writes.
const ackEarly = false
