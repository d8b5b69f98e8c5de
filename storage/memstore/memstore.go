// Package memstore is a message store without a disk: the contract of
// storage.Store for streams whose messages may end with the process.
package memstore

import (
	"bytes"
	"slices"
	"strings"
	"sync"

	"petiole/storage"
	"petiole/storage/internal/table"
)

// Store is a storage.Store wholly in memory. Freeze takes effect at once and
// Checkpoint has nothing to do: as nothing outlives the process, no log record
// has to be kept for it either, and Applied says so.
type Store struct {
	*table.Table

	mu      sync.Mutex
	applied storage.LSN
	kvs     map[string][]byte
}

var _ storage.Store = (*Store)(nil)

// New returns an empty store.
func New() *Store {
	return &Store{Table: table.New(nil, "memory"), kvs: make(map[string][]byte)}
}

// Applied returns the LSN given to the last Freeze.
func (s *Store) Applied() storage.LSN {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.applied
}

// Freeze takes over the keyed state; it always succeeds while the store is open.
func (s *Store) Freeze(lsn storage.LSN, kvs []storage.KV) bool {
	if s.Closed() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.applied = lsn
	for _, kv := range kvs {
		if kv.Value == nil {
			delete(s.kvs, kv.Key)
		} else {
			s.kvs[kv.Key] = bytes.Clone(kv.Value)
		}
	}
	return true
}

// TableBytes returns 0: nothing waits for a checkpoint.
func (s *Store) TableBytes() int64 { return 0 }

// Checkpoint does nothing.
func (s *Store) Checkpoint() error {
	if s.Closed() {
		return storage.ErrClosed
	}
	return nil
}

// KVs calls fn for the keyed state with the prefix, in key order.
func (s *Store) KVs(prefix string, fn func(key string, value []byte) error) error {
	if s.Closed() {
		return storage.ErrClosed
	}
	s.mu.Lock()
	var kvs []storage.KV
	for k, v := range s.kvs {
		if strings.HasPrefix(k, prefix) {
			kvs = append(kvs, storage.KV{Key: k, Value: v})
		}
	}
	s.mu.Unlock()
	slices.SortFunc(kvs, func(a, b storage.KV) int { return strings.Compare(a.Key, b.Key) })
	for _, kv := range kvs {
		if err := fn(kv.Key, bytes.Clone(kv.Value)); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the store; its messages are gone.
func (s *Store) Close() error {
	s.Table.Close()
	return nil
}

// Destroy is Close: there are no files.
func (s *Store) Destroy() error { return s.Close() }
