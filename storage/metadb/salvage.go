package metadb

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/vfs"
)

// ForEachIntact is ForEach that passes over damaged values, of which it tells
// bad. It fails with storage.ErrCorrupt if the file itself is damaged, after fn
// has been called for what lies before the damage.
func (d *DB) ForEachIntact(bucket, prefix string, fn func(key string, value []byte) error, bad func(key string, err error)) error {
	type entry struct {
		KV
		err error
	}
	var list []entry
	err := d.view(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte(bucket))
		if b == nil {
			return nil
		}
		c := b.Cursor()
		for k, v := c.Seek([]byte(prefix)); k != nil && bytes.HasPrefix(k, []byte(prefix)); k, v = c.Next() {
			content, err := d.open(bucket, string(k), v)
			list = append(list, entry{KV{string(k), bytes.Clone(content)}, err})
		}
		return nil
	})
	for _, e := range list {
		if e.err != nil {
			bad(e.Key, e.err)
		} else if ferr := fn(e.Key, e.Value); ferr != nil {
			return ferr
		}
	}
	if err != nil {
		return d.wrap("read", bucket, prefix, err)
	}
	return nil
}

// Walk visits everything in the file, and fails with storage.ErrCorrupt if damage
// keeps it from some of that. Values that are damaged are no reason to.
func (d *DB) Walk() error {
	err := d.view(func(tx *bbolt.Tx) error {
		if err := boltfile.CheckLengths(tx); err != nil {
			return err
		}
		return tx.ForEach(func(_ []byte, b *bbolt.Bucket) error {
			return b.ForEach(func(_, _ []byte) error { return nil })
		})
	})
	if err != nil {
		return fmt.Errorf("read %s: %w", d.path, err)
	}
	return nil
}

// SalvageReport says what a Salvage found.
type SalvageReport struct {
	Parked string // where the damaged file is now
	Kept   int    // entries in the new file
	Damage []string
}

// Salvage puts what is intact of the file at path, which is not open, into a new
// file under the same name; the damaged one is kept beside it under another.
// Entries behind damage in the file's structure are lost, and so is everything
// if its beginning is.
func Salvage(path string) (r SalvageReport, err error) {
	tmp := path + ".salvaged"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return r, fmt.Errorf("salvage %s: %w", path, err)
	}
	fresh, err := Open(tmp)
	if err != nil {
		return r, err
	}
	if old, err := boltfile.OpenReadOnly(path, false); err != nil {
		r.Damage = append(r.Damage, err.Error())
	} else {
		err = r.copy(path, old, fresh)
		if cerr := old.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			_ = fresh.Close() // the first error counts
			return r, err
		}
	}
	if err := fresh.Close(); err != nil {
		return r, err
	}
	if r.Parked, err = vfs.FreeName(vfs.OS, path+".damaged-"); err != nil {
		return r, fmt.Errorf("salvage: %w", err)
	}
	// A hard link first: there is a file under the name at any time.
	if err := os.Link(path, r.Parked); err != nil {
		if _, err := os.Stat(path); err == nil {
			if err := os.Rename(path, r.Parked); err != nil {
				return r, fmt.Errorf("salvage: %w", err)
			}
		}
	}
	if err := os.Rename(tmp, path); err != nil {
		return r, fmt.Errorf("salvage: %w", err)
	}
	return r, boltfile.SyncDir(filepath.Dir(path))
}

// copy copies the intact entries. Only the new file's errors end it.
func (r *SalvageReport) copy(path string, old *bbolt.DB, fresh *DB) error {
	d := &DB{path: path, db: old}
	var buckets []string
	err := d.view(func(tx *bbolt.Tx) error {
		return tx.ForEach(func(name []byte, _ *bbolt.Bucket) error {
			buckets = append(buckets, string(name))
			return nil
		})
	})
	if err != nil {
		r.Damage = append(r.Damage, err.Error())
	}
	for _, bucket := range buckets {
		var newer error
		var kvs []KV
		err := d.ForEachIntact(bucket, "", func(key string, value []byte) error {
			kvs = append(kvs, KV{key, value})
			return nil
		}, func(_ string, err error) {
			if errors.Is(err, storage.ErrFormat) {
				newer = err
			}
			r.Damage = append(r.Damage, err.Error())
		})
		if newer != nil {
			return newer // nothing of it is damage, nor for us to leave out
		}
		if err != nil {
			if !errors.Is(err, storage.ErrCorrupt) {
				return err
			}
			r.Damage = append(r.Damage, err.Error())
		}
		if len(kvs) == 0 {
			continue
		}
		if err := fresh.Put(bucket, kvs...); err != nil {
			return err
		}
		r.Kept += len(kvs)
	}
	return nil
}
