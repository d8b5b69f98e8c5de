//go:build mutant_sameincarnation

package export

const sameIncarnation = true
