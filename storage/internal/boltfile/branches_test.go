package boltfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// tall makes a file with a tree of three levels beside two small ones, and
// returns it with its size of pages and the tree's root.
func tall(t *testing.T, keys int) (path string, size int64, root uint64) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "db")
	db, err := Open(path, bbolt.Options{NoSync: true, PageSize: 4096, NoStatistics: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, name := range []string{"a", "m", "z"} {
			b, err := tx.CreateBucket([]byte(name))
			if err != nil {
				return err
			}
			n := 3
			if name == "m" {
				n = keys
			}
			b.FillPercent = 1
			for i := range n {
				if err := b.Put(fmt.Appendf(nil, "%0300d", i), make([]byte, 1500)); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err == nil {
		err = db.View(func(tx *bbolt.Tx) error {
			size, root = int64(db.Info().PageSize), uint64(tx.Bucket([]byte("m")).Root())
			return nil
		})
	}
	if err = errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	return path, size, root
}

func check(t *testing.T, path string) (reads int, err error) {
	t.Helper()
	db, err := OpenReadOnly(path, false)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	reads, err = checkBranches(db, f)
	if err := errors.Join(f.Close(), db.Close()); err != nil {
		t.Fatal(err)
	}
	return reads, err
}

// A check reads the branches once, and hardly any leaves: they are most of the
// file, and all over it.
func TestCheckBranchesReadsBranches(t *testing.T) {
	const keys = 1500 // two in a leaf, some 13 leaves in a branch
	path, size, _ := tall(t, keys)
	reads, err := check(t, path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	branches, leaves := 0, 0
	for at := 2 * size; at < int64(len(b)); at += size {
		switch page := b[at:]; {
		case binary.NativeEndian.Uint64(page) != uint64(at/size):
		case binary.NativeEndian.Uint16(page[8:]) == flagBranch:
			branches++
		case binary.NativeEndian.Uint16(page[8:]) == flagLeaf:
			leaves++
		}
	}
	if most := branches + 4*samples; branches < 40 || leaves < 500 || reads < branches || reads > most {
		t.Errorf("%d pages read of a file with %d branches and %d leaves, want %d at most", reads, branches, leaves, most)
	}
}

// A page that leads back to one above it is found on whatever level it is.
func TestCheckBranchesFindsLoops(t *testing.T) {
	for _, where := range []struct {
		name     string
		at, down int // which entry of the root, and of the page below it if down is not negative
	}{
		{"the root leads to itself", 0, -1},
		{"the root leads to itself, at its end", 1, -1},
		{"a page leads to the root", 0, 0},
		{"a page leads to the root, in the middle", 1, 5},
	} {
		t.Run(where.name, func(t *testing.T) {
			path, size, root := tall(t, 1500)
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			at := int64(root)*size + pageHeader + int64(where.at)*element + 8
			b := make([]byte, 8)
			if _, err := f.ReadAt(b, at); err != nil {
				t.Fatal(err)
			}
			if where.down >= 0 {
				at = int64(binary.NativeEndian.Uint64(b))*size + pageHeader + int64(where.down)*element + 8
			}
			binary.NativeEndian.PutUint64(b, root)
			if _, err := f.WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := check(t, path); !errors.Is(err, storage.ErrCorrupt) {
				t.Errorf("the check says: %v", err)
			}
		})
	}
}
