//go:build !mutant_orphandelete

package jetstream

// orphanDelete is true in the mutant that deletes directories of messages that the list of streams does not know.
const orphanDelete = false
