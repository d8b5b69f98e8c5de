//go:build !small_budgets

package jetstream

// Defaults of Options.
const (
	DefaultWALBudget   = 256 << 20
	DefaultTableBudget = 32 << 20

	// defaultSegmentSize is the log's own default.
	defaultSegmentSize = 0
)
