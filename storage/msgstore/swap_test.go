package msgstore

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// copyFile writes what the store's file holds to path.
func copyFile(t *testing.T, s *Store, path string) {
	t.Helper()
	if err := s.image.view(func(tx *bbolt.Tx) error { return tx.CopyFile(path, 0o600) }); err != nil {
		t.Fatal(err)
	}
}

// The file is replaced under readers, which notice nothing of it.
func TestSwapFile(t *testing.T) {
	const n = 5000
	dir := written(t, n)
	s := mustOpen(t, dir)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				last := uint64(0)
				if err := s.Range(0, func(m storage.Message) bool { last++; return m.Seq == last }); err != nil || last < n {
					t.Errorf("Range ends at %d, %v", last, err)
					return
				}
			}
		})
	}
	path, parked := filepath.Join(dir, "copy"), filepath.Join(dir, "parked")
	for i := range 5 {
		copyFile(t, s, path)
		park := ""
		if i == 2 {
			park = parked
		}
		if err := s.swapFile(path, park); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("the new file still has its old name: %v", err)
		}
		if _, err := s.Append(storage.Message{Subject: "more", Time: 1 << 40}); err != nil {
			t.Fatal(err)
		}
		checkpoint(t, s, storage.LSN(i+2))
	}
	close(stop)
	wg.Wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s = mustOpen(t, dir); s.Applied() != 6 || s.State().Msgs != n+5 {
		t.Fatalf("at %d: %+v", s.Applied(), s.State())
	}
	old := t.TempDir()
	if err := os.Rename(parked, filepath.Join(old, FileName)); err != nil {
		t.Fatal(err)
	}
	if p := mustOpen(t, old); p.Applied() != 3 || p.State().Msgs != n+2 {
		t.Fatalf("the parked file is at %d: %+v", p.Applied(), p.State())
	}
	// Not what is another's, nor nothing.
	other := filepath.Join(written(t, 10), FileName)
	if err := s.swapFile(other, ""); !errors.Is(err, storage.ErrCorrupt) {
		t.Fatalf("another store's file: %v", err)
	}
	if err := s.swapFile(path, ""); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("no file: %v", err)
	}
	if err := s.Range(0, func(storage.Message) bool { return true }); err != nil {
		t.Fatal(err)
	}
}
