package boltfile

import (
	"errors"
	"reflect"
	"sync"
	"unsafe"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// bbolt panics when neither meta page makes sense, and faults when they cannot be
// read, as it begins a transaction: with locks held that it lets go of only at the
// end of one. Nobody would ever begin another, or close the database. So those locks,
// which are variables of bbolt's own, are let go of here; a test says if another
// version of it has others.

// View is db.View of the file at path, guarded (see Guard).
func View(path string, db *bbolt.DB, fn func(*bbolt.Tx) error) error {
	began := false
	err := Guard(path, func() error {
		return db.View(func(tx *bbolt.Tx) error {
			began = true
			return fn(tx)
		})
	})
	if !began && panicked(err) {
		(*sync.RWMutex)(variable(db, "mmaplock")).RUnlock()
		(*sync.Mutex)(variable(db, "metalock")).Unlock()
	}
	return err
}

// Change is Update of the file at path, guarded (see Guard). stuck says that the
// transaction could not be taken back: what bbolt has in memory is not to be relied
// on, and no other can begin, nor the database be closed.
func Change(path string, db *bbolt.DB, fn func(*bbolt.Tx) error) (stuck bool, err error) {
	var tx *bbolt.Tx
	err = Guard(path, func() error {
		return Update(db, func(t *bbolt.Tx) error {
			tx = t
			return fn(t)
		})
	})
	switch {
	case !panicked(err):
	case tx == nil:
		(*sync.Mutex)(variable(db, "rwlock")).Unlock()
	default:
		stuck = tx.DB() != nil
	}
	return stuck, err
}

// panicked reports whether err may be that of a panic.
func panicked(err error) bool {
	var ce *storage.CorruptError
	return errors.As(err, &ce)
}

// variable returns the address of one of bbolt's variables.
func variable(db *bbolt.DB, name string) unsafe.Pointer {
	return unsafe.Pointer(reflect.ValueOf(db).Elem().FieldByName(name).UnsafeAddr())
}
