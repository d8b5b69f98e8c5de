// Package metadb keeps small facts about a server in one bbolt file: the meta
// machine's checkpoint, the node's identity, the state of exports.
//
// Every Put is one transaction that is on disk when Put returns. A Put for which
// there is no room fails with an error that vfs.IsNoSpace knows, and may be tried
// again; any other failed write wraps storage.ErrFailed, and so does one that damage
// has broken off in a way that cannot be taken back. Values carry a
// CRC32C over bucket, key and content, so that a flipped bit is an error and
// never a wrong fact:
//
//	bucket / key ──► ┌─────────┬──────────────┬─────────┐
//	                 │ version │ crc32c (LE)  │ content │
//	                 │ 1 octet │ 4 octets     │ n       │
//	                 └─────────┴──────────────┴─────────┘
//	                   begins at version - 1
package metadb

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/vfs"
)

const (
	version  = 1
	overhead = 5
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// KV is one entry to put. A nil Value deletes the key; an empty one does not.
type KV struct {
	Key   string
	Value []byte
}

// DB is an open file. All methods may be called from any goroutine.
type DB struct {
	path   string
	db     *bbolt.DB
	failed atomic.Pointer[func(error)]
	// stuck says that a transaction could not be taken back; writing is held by who
	// writes, so that nobody waits for the lock that it keeps.
	writing sync.Mutex
	stuck   atomic.Bool
}

var errStuck = errors.New("a change before broke off and could not be taken back")

// OnFail sets what is called with an error of Put's that wraps
// storage.ErrFailed, in the goroutine that called Put.
func (d *DB) OnFail(fn func(error)) { d.failed.Store(&fn) }

// Open opens or creates the file at path (mode 0600) and its directory. It
// fails with storage.ErrLocked if another process holds the file, with
// storage.ErrCorrupt if it is not a database, and with storage.ErrFormat if
// another version of the program has written to it.
func Open(path string) (*DB, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	// What the log need not have because this file does is what a power cut
	// leaves of it, not what a process that died has put into the page cache.
	if err := boltfile.Refresh(path); err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	db, err := boltfile.Open(path, bbolt.Options{FreelistType: bbolt.FreelistMapType, NoStatistics: true}, nil)
	if err != nil {
		return nil, err
	}
	return known(&DB{path: path, db: db})
}

// known closes a database again in which there is a value of another version,
// with storage.ErrFormat. What damage hides is for those who read it to find.
func known(d *DB) (*DB, error) {
	var newer error
	_ = d.view(func(tx *bbolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
			c := b.Cursor()
			for k, v := c.First(); k != nil; k, v = c.Next() {
				if len(v) > 0 && v[0] != version {
					if _, err := d.open(string(name), string(k), v); errors.Is(err, storage.ErrFormat) {
						newer = err
						return err
					}
				}
			}
			return nil
		})
	})
	if newer != nil {
		_ = d.Close() // nothing has been written
		return nil, newer
	}
	return d, nil
}

// Path returns the file's path.
func (d *DB) Path() string { return d.path }

// Get returns a copy of the value under key, or storage.ErrNotFound.
func (d *DB) Get(bucket, key string) ([]byte, error) {
	var out []byte
	err := d.view(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte(bucket))
		if b == nil {
			return storage.ErrNotFound
		}
		v := b.Get([]byte(key))
		if v == nil {
			return storage.ErrNotFound
		}
		c, err := d.open(bucket, key, v)
		out = append([]byte{}, c...) // empty, not nil, if it is empty
		return err
	})
	if err != nil {
		return nil, d.wrap("get", bucket, key, err)
	}
	return out, nil
}

// Put writes all entries in one transaction, which is on disk when Put
// returns; either all of them are or, after an error, none.
func (d *DB) Put(bucket string, kvs ...KV) error {
	err := d.update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists([]byte(bucket))
		if err != nil {
			return err
		}
		for _, kv := range kvs {
			if kv.Value == nil {
				err = b.Delete([]byte(kv.Key))
			} else {
				err = b.Put([]byte(kv.Key), seal(bucket, kv.Key, kv.Value))
			}
			if err != nil {
				return fmt.Errorf("key %q: %w", kv.Key, err)
			}
		}
		return nil
	})
	if err == nil {
		return nil
	}
	err = d.wrap("put", bucket, "", err)
	// What the kernel could not write or sync may be lost although another try
	// succeeds. Want of space is another matter: it may come back.
	var errno syscall.Errno
	if !errors.Is(err, storage.ErrFailed) && !errors.As(err, &errno) || vfs.IsNoSpace(err) {
		return err
	}
	if !errors.Is(err, storage.ErrFailed) {
		err = fmt.Errorf("%w: %w", storage.ErrFailed, err)
	}
	if fn := d.failed.Load(); fn != nil {
		(*fn)(err)
	}
	return err
}

// ForEach calls fn for the entries of bucket whose key begins with prefix, in
// key order, until fn returns an error, which it returns. value is fn's to
// keep, and fn may call any method: it sees what was there when ForEach began.
func (d *DB) ForEach(bucket, prefix string, fn func(key string, value []byte) error) error {
	var kvs []KV
	err := d.view(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte(bucket))
		if b == nil {
			return nil
		}
		c := b.Cursor()
		for k, v := c.Seek([]byte(prefix)); k != nil && bytes.HasPrefix(k, []byte(prefix)); k, v = c.Next() {
			content, err := d.open(bucket, string(k), v)
			if err != nil {
				return err
			}
			kvs = append(kvs, KV{string(k), bytes.Clone(content)})
		}
		return nil
	})
	if err != nil {
		return d.wrap("read", bucket, prefix, err)
	}
	for _, kv := range kvs {
		if err := fn(kv.Key, kv.Value); err != nil {
			return err
		}
	}
	return nil
}

// Close releases the file. Later calls fail with storage.ErrClosed.
func (d *DB) Close() error {
	if d.stuck.Load() {
		return nil // the end of the process closes it
	}
	if err := d.db.Close(); err != nil {
		return fmt.Errorf("close %s: %w", d.path, err)
	}
	return nil
}

func (d *DB) view(fn func(*bbolt.Tx) error) error {
	return boltfile.View(d.path, d.db, fn)
}

func (d *DB) update(fn func(*bbolt.Tx) error) error {
	d.writing.Lock()
	defer d.writing.Unlock()
	if d.stuck.Load() {
		return fmt.Errorf("%w: %w", storage.ErrFailed, errStuck)
	}
	stuck, err := boltfile.Change(d.path, d.db, fn)
	if stuck {
		d.stuck.Store(true)
		err = fmt.Errorf("%w: %w", storage.ErrFailed, err)
	}
	return err
}

func (d *DB) wrap(op, bucket, key string, err error) error {
	if key != "" {
		bucket += "/" + key
	}
	return fmt.Errorf("%s %s in %s: %w", op, bucket, d.path, err)
}

// sum depends on the version, so that a flipped bit there is damage, and another
// version than ours one that wrote the value.
func sum(version byte, bucket, key string, content []byte) uint32 {
	c := crc32.Update(uint32(version-1), castagnoli, []byte(bucket))
	c = crc32.Update(c, castagnoli, []byte{0})
	c = crc32.Update(c, castagnoli, []byte(key))
	c = crc32.Update(c, castagnoli, []byte{0})
	return crc32.Update(c, castagnoli, content)
}

func seal(bucket, key string, content []byte) []byte {
	v := make([]byte, overhead, overhead+len(content))
	v[0] = version
	binary.LittleEndian.PutUint32(v[1:], sum(version, bucket, key, content))
	return append(v, content...)
}

func (d *DB) open(bucket, key string, v []byte) ([]byte, error) {
	switch {
	case len(v) < overhead:
		return nil, &storage.CorruptError{File: d.path, Reason: fmt.Sprintf("%s/%s is cut short", bucket, key)}
	case binary.LittleEndian.Uint32(v[1:]) != sum(v[0], bucket, key, v[overhead:]):
		return nil, &storage.CorruptError{File: d.path, Reason: fmt.Sprintf("%s/%s fails its checksum", bucket, key)}
	case v[0] != version:
		return nil, fmt.Errorf("%s: %s/%s has version %d, this program knows version %d: %w", d.path, bucket, key, v[0], version, storage.ErrFormat)
	}
	return v[overhead:], nil
}

// OpenReadOnly opens the file at path, which must exist, for reading only; Put
// fails. Errors are those of Open.
func OpenReadOnly(path string) (*DB, error) {
	db, err := boltfile.OpenReadOnly(path, false)
	if err != nil {
		return nil, err
	}
	return known(&DB{path: path, db: db})
}

// Verify reads everything in a database opened by OpenReadOnly and calls found
// for each damage. It returns the number of intact entries.
func (d *DB) Verify(found func(error)) int {
	n := 0
	err := d.view(func(tx *bbolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
			c := b.Cursor()
			for k, v := c.First(); k != nil; k, v = c.Next() {
				if _, err := d.open(string(name), string(k), v); err != nil {
					found(err)
				} else {
					n++
				}
			}
			return nil
		})
	})
	if err != nil {
		found(err)
	}
	boltfile.Check(d.db, found)
	return n
}
