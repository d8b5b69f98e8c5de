// Package memstore is a message store without a disk: the contract of
// storage.Store for streams whose messages may end with the process.
package memstore

import "petiole/storage"

// Store is a storage.Store wholly in memory. Freeze and Checkpoint have
// nothing to do and succeed.
type Store struct{ storage.Store }

var _ storage.Store = (*Store)(nil)

// New returns an empty store.
func New() *Store { return &Store{} }
