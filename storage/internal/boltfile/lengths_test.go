package boltfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// reachable returns the pages that all trees of a state begin on.
func reachable(t *testing.T, db *bbolt.DB) map[uint64]bool {
	t.Helper()
	var c *lengths
	if err := db.View(func(tx *bbolt.Tx) error {
		c = newLengths(tx)
		c.checked = map[uint64]bool{}
		if err := c.tree(uint64(tx.Cursor().Bucket().Root())); err != nil {
			return err
		}
		return tx.ForEach(func(_ []byte, b *bbolt.Bucket) error {
			if b.Root() == 0 {
				return nil
			}
			return c.tree(uint64(b.Root()))
		})
	}); err != nil {
		t.Fatal(err)
	}
	return c.checked
}

// Every page that a commit gives free has been checked before, whatever the
// transaction did, and all have the length that their content says.
func TestLengthsBeforeCommit(t *testing.T) {
	freed, merged := 0, 0
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 1))
		db, err := Open(filepath.Join(t.TempDir(), "db"), bbolt.Options{NoSync: true, NoGrowSync: true, PageSize: 1024, FreelistType: bbolt.FreelistMapType}, nil)
		if err != nil {
			t.Fatal(err)
		}
		names := []string{"a", "b", "c"}
		fill := []float64{0.5, 1, 0.3}[seed%3]
		longest := []int{8, 200, 900}[rng.IntN(3)]
		key := func(i int) []byte {
			k := binary.BigEndian.AppendUint64(nil, uint64(i))
			return append(k, make([]byte, i*7919%longest)...)
		}
		for round := range 80 {
			before := reachable(t, db)
			var c *lengths
			var dropped map[uint64]bool
			if err := db.Update(func(tx *bbolt.Tx) error {
				c = newLengths(tx)
				c.checked = map[uint64]bool{}
				dropped = map[uint64]bool{}
				name := []byte(names[rng.IntN(3)])
				if rng.IntN(25) == 0 && tx.Bucket(name) != nil {
					if root := uint64(tx.Bucket(name).Root()); root != 0 {
						d := newLengths(tx)
						d.checked = dropped
						if err := d.tree(root); err != nil {
							return err
						}
					}
					if err := DeleteBucket(tx, name); err != nil {
						return err
					}
				}
				for range 1 + rng.IntN(2) {
					b, err := tx.CreateBucketIfNotExists([]byte(names[rng.IntN(3)]))
					if err != nil {
						return err
					}
					b.FillPercent = fill
					at, n := rng.IntN(6000), rng.IntN(600)
					if rng.IntN(3) == 0 {
						n = rng.IntN(4)
					}
					how := rng.IntN(4)
					if round < 10 {
						how, n = 0, 1000
					}
					for i := at; i < at+n; i++ {
						var err error
						switch {
						case how == 0 || how == 1 && i%3 == 0:
							size := rng.IntN(100)
							if rng.IntN(50) == 0 {
								size = rng.IntN(6000)
							}
							err = b.Put(key(i), make([]byte, size))
						case how == 2 && i%5 != 0 || how == 3:
							err = b.Delete(key(i))
						}
						if err != nil {
							return err
						}
					}
				}
				return c.commit(tx)
			}); err != nil {
				t.Fatalf("seed %d, round %d: %v", seed, round, err)
			}
			after := reachable(t, db)
			for no := range before {
				if after[no] || dropped[no] {
					continue
				}
				freed++
				if !c.checked[no] {
					t.Errorf("seed %d, round %d: page %d has been given free unchecked", seed, round, no)
				}
			}
			if len(after) < len(before) {
				merged++
			}
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if freed < 3000 || merged < 50 {
		t.Errorf("%d pages given free, fewer pages %d times: not much of a test", freed, merged)
	}
}

// The list of free pages always has a length that its number of pages allows, up to
// where that number needs an entry of its own.
func TestLengthOfFreelist(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	db, err := Open(path, bbolt.Options{NoSync: true, NoGrowSync: true, PageSize: 1024, FreelistType: bbolt.FreelistMapType}, nil)
	if err != nil {
		t.Fatal(err)
	}
	update := func(fn func(b *bbolt.Bucket) error) {
		t.Helper()
		if err := Update(db, func(tx *bbolt.Tx) error {
			b, err := tx.CreateBucketIfNotExists([]byte("b"))
			if err != nil {
				return err
			}
			return fn(b)
		}); err != nil {
			t.Fatal(err)
		}
	}
	key := func(i int) []byte { return fmt.Appendf(nil, "%09d", i) }
	const keys, pages = 700, 100
	for i := range keys {
		update(func(b *bbolt.Bucket) error { return b.Put(key(i), make([]byte, 1024*pages)) })
	}
	for i := 0; i < keys; i += 7 {
		update(func(b *bbolt.Bucket) error {
			for j := range 7 {
				if err := b.Delete(key(i + j)); err != nil {
					return err
				}
			}
			return nil
		})
		update(func(b *bbolt.Bucket) error { return b.Put([]byte("x"), key(i)) })
	}
	if free := db.Stats().FreePageN; free < 0xFFFF {
		t.Errorf("%d free pages at the end", free)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// A page that says another length than its content keeps all from being changed.
func TestWrongLength(t *testing.T) {
	path, size, _ := tall(t, 120)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	change := func(drop bool) error {
		db, err := Open(path, bbolt.Options{NoSync: true}, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		return Guard(path, func() error {
			return Update(db, func(tx *bbolt.Tx) error {
				for _, name := range []string{"a", "m", "z"} {
					if drop {
						if err := DeleteBucket(tx, []byte(name)); err != nil {
							return err
						}
						continue
					}
					b := tx.Bucket([]byte(name))
					c := b.Cursor()
					var keys [][]byte
					for k, _ := c.First(); k != nil; k, _ = c.Next() {
						keys = append(keys, k)
					}
					for _, k := range keys {
						if err := b.Put(k, []byte("x")); err != nil {
							return err
						}
					}
				}
				return nil
			})
		})
	}
	hit := 0
	for at := 2 * size; at < int64(len(raw)); at += size {
		flags := binary.NativeEndian.Uint16(raw[at+8:])
		if binary.NativeEndian.Uint64(raw[at:]) != uint64(at/size) || flags != flagBranch && flags != flagLeaf && flags != flagFreelist {
			continue
		}
		for _, add := range []uint32{1, 1 << 30} {
			b := append([]byte(nil), raw...)
			binary.NativeEndian.PutUint32(b[at+12:], binary.NativeEndian.Uint32(b[at+12:])+add)
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			db, err := OpenReadOnly(path, true)
			if err != nil {
				t.Fatal(err)
			}
			used := inUse(db, uint64(at/size))
			db.Close()
			if !used {
				break
			}
			hit++
			for _, drop := range []bool{false, true} {
				if err := change(drop); !errors.Is(err, storage.ErrCorrupt) {
					t.Errorf("page %d, %d more, dropped %v: %v", at/size, add, drop, err)
				}
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got[:len(b)], b) {
				t.Errorf("page %d, %d more: the file has changed, %v", at/size, add, err)
			}
		}
	}
	if hit < 100 {
		t.Errorf("only %d pages", hit)
	}
}

// inUse reports whether a page is not a free one.
func inUse(db *bbolt.DB, no uint64) (used bool) {
	_ = db.View(func(tx *bbolt.Tx) error {
		p, err := tx.Page(int(no))
		used = err == nil && p != nil && p.Type != "free"
		return err
	})
	return used
}
