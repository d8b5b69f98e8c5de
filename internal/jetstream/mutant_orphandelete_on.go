//go:build mutant_orphandelete

package jetstream

const orphanDelete = true
