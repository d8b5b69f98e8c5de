package boltfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// A file cut anywhere is a damaged one, to those who open it or those who read it.
func TestOpenCut(t *testing.T) {
	for _, pageSize := range []int{4096, 16384} {
		t.Run(fmt.Sprint(pageSize), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "a.db")
			db, err := Open(path, bbolt.Options{PageSize: pageSize}, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i := range 50 {
				if err := Update(db, func(tx *bbolt.Tx) error {
					b, err := tx.CreateBucketIfNotExists([]byte("b"))
					if err != nil {
						return err
					}
					return b.Put(fmt.Append(nil, i), make([]byte, 1000))
				}); err != nil {
					t.Fatal(err)
				}
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for to := 0; to < 5*pageSize; to += 500 {
				if err := os.WriteFile(path, whole[:to], 0o600); err != nil {
					t.Fatal(err)
				}
				db, err := Open(path, bbolt.Options{}, nil)
				if err == nil {
					err = Guard(path, func() error {
						return db.View(func(tx *bbolt.Tx) error {
							return tx.ForEach(func(_ []byte, b *bbolt.Bucket) error {
								return b.ForEach(func(_, _ []byte) error { return nil })
							})
						})
					})
					if cerr := db.Close(); err == nil {
						err = cerr
					}
				}
				if !errors.Is(err, storage.ErrCorrupt) {
					t.Errorf("cut to %d of %d octets: %v", to, len(whole), err)
				}
			}
		})
	}
}

func TestOpenRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none", "a.db")
	if _, err := Open(path, bbolt.Options{}, nil); err == nil || errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("a directory that is not there: %v", err)
	}
}
