//go:build !mutant_splitposition

package jetstream

import "petiole/internal/jetstream/command"

// splitPosition does nothing but in the mutant that writes what an edge sent
// and the position after it as two records, the second when the first is safe.
func splitPosition(*Stream, *command.Ingest, func(callResult)) bool { return false }
