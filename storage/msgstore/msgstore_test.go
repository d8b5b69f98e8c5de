package msgstore

import (
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"

	"petiole/storage"
	"petiole/storage/storetest"
)

func TestStore(t *testing.T) {
	root := t.TempDir()
	var n atomic.Int64
	storetest.Run(t, storetest.Harness{
		Open:    func(dir string) (storage.Store, error) { return Open(dir, Options{noSync: true}) },
		Dir:     func() string { return filepath.Join(root, strconv.FormatInt(n.Add(1), 10)) },
		Durable: true,
	})
}

func tempStore(tb testing.TB) *Store {
	tb.Helper()
	s, err := Open(tb.TempDir(), Options{})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = s.Close() })
	return s
}

func fileSize(tb testing.TB, s *Store) int64 {
	tb.Helper()
	st, err := os.Stat(s.image.path)
	if err != nil {
		tb.Fatal(err)
	}
	return st.Size()
}
