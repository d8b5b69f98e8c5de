package msgstore

import (
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/storetest"
)

func TestStore(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	var n, opened atomic.Int64
	storetest.Run(t, storetest.Harness{
		Open: func(dir string) (storage.Store, error) {
			// Every other time subjects are looked up when they are used.
			return Open(dir, Options{noSync: true, lazy: opened.Add(1)%2 == 0, slice: []int{0, 100}[opened.Load()/2%2]})
		},
		Dir:     func() string { return filepath.Join(root, strconv.FormatInt(n.Add(1), 10)) },
		Durable: true,
	})
}

func (s *Store) dir() string { return filepath.Dir(s.image.path) }

// used returns the octets of the file up to the last page ever used.
func used(tb testing.TB, s *Store) int64 {
	tb.Helper()
	st, err := os.Stat(s.image.path)
	if err != nil {
		tb.Fatal(err)
	}
	var n int64
	if err := s.image.view(func(tx *bbolt.Tx) error {
		n = min(st.Size(), tx.Size())
		return nil
	}); err != nil {
		tb.Fatal(err)
	}
	return n
}
