package boltfile

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// TestBeginOverDamage: when no transaction can begin, as both meta pages are
// damaged, each access says so, none hangs, and all is well when they are whole.
func TestBeginOverDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f.db")
	db, err := Open(path, bbolt.Options{}, func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucket([]byte("b"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	metas := make([]byte, 2*db.Info().PageSize)
	if _, err := f.ReadAt(metas, 0); err != nil {
		t.Fatal(err)
	}
	put := func(tx *bbolt.Tx) error { return tx.Bucket([]byte("b")).Put([]byte("k"), []byte("v")) }
	get := func(tx *bbolt.Tx) error {
		if v := tx.Bucket([]byte("b")).Get([]byte("k")); string(v) != "v" {
			t.Errorf("the value is %q", v)
		}
		return nil
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := f.WriteAt(make([]byte, len(metas)), 0); err != nil {
			t.Error(err)
		}
		for range 3 {
			if err := View(path, db, get); !errors.Is(err, storage.ErrCorrupt) {
				t.Errorf("reading: %v", err)
			}
			if stuck, err := Change(path, db, put); stuck || !errors.Is(err, storage.ErrCorrupt) {
				t.Errorf("writing: %v, %v", stuck, err)
			}
		}
		if _, err := f.WriteAt(metas, 0); err != nil {
			t.Error(err)
		}
		if stuck, err := Change(path, db, put); stuck || err != nil {
			t.Errorf("writing to what is whole again: %v, %v", stuck, err)
		}
		if err := View(path, db, get); err != nil {
			t.Errorf("reading what is whole again: %v", err)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("an access hangs")
	}
}
