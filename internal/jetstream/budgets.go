//go:build !small_budgets

package jetstream

// Defaults of Options.
const (
	DefaultWALBudget   = 128 << 20
	DefaultTableBudget = 8 << 20

	// The smaller segments are, the sooner room is made in the log, and the less
	// there is to read again at a start.
	defaultSegmentSize = 32 << 20
)
