//go:build !mutant_sameincarnation

package export

// sameIncarnation is true in the mutant that starts no new incarnation when the streams have parted.
const sameIncarnation = false
