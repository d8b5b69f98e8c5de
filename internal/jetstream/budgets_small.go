//go:build small_budgets

package jetstream

// Defaults of Options in programs for fault rigs: so small that checkpoints,
// new log segments and recycled ones happen all the time.
const (
	DefaultWALBudget   = 3 << 20
	DefaultTableBudget = 192 << 10

	defaultSegmentSize = 512 << 10
)
