//go:build !mutant_nocrc

package msgstore

// noCRC is true in the mutant that does not look at the checksums of messages.
const noCRC = false
