//go:build mutant_nocrc

package msgstore

const noCRC = true
