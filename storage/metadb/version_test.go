package metadb

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// TestOtherVersion: a value of another version is one that another version of the
// program has written, if its checksum says so, and damage if not.
func TestOtherVersion(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(v []byte)
		newer  bool
	}{
		{"newer", func(v []byte) {
			v[0] = version + 1
			binary.LittleEndian.PutUint32(v[1:], sum(v[0], "b", "k", v[overhead:]))
		}, true},
		{"flipped", func(v []byte) { v[0] ^= 2 }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "meta.db")
			d, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			err = errors.Join(d.Put("b", KV{"k", []byte("value")}), d.db.Update(func(tx *bbolt.Tx) error {
				v := seal("b", "k", []byte("value"))
				c.change(v)
				return tx.Bucket([]byte("b")).Put([]byte("k"), v)
			}), d.Close())
			if err != nil {
				t.Fatal(err)
			}
			for _, open := range []func(string) (*DB, error){Open, OpenReadOnly} {
				d, err := open(path)
				if errors.Is(err, storage.ErrFormat) != c.newer {
					t.Errorf("open: %v", err)
				}
				if err != nil {
					continue
				}
				if _, err := d.Get("b", "k"); !errors.Is(err, storage.ErrCorrupt) {
					t.Errorf("get: %v", err)
				}
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			}
			if !c.newer {
				return
			}
			if r, err := Salvage(path); !errors.Is(err, storage.ErrFormat) {
				t.Errorf("salvage: %+v, %v", r, err)
			}
			if left, err := filepath.Glob(path + ".damaged-*"); err != nil || len(left) > 0 {
				t.Errorf("put aside: %v, %v", left, err)
			}
			if _, err := os.Stat(path); err != nil {
				t.Error(err)
			}
		})
	}
}
