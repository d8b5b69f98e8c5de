package boltfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage/vfs"
)

func TestWithErrno(t *testing.T) {
	pathError := func(errno syscall.Errno) error {
		return fmt.Errorf("file resize error: %s", &os.PathError{Op: "truncate", Path: "/x/meta.db", Err: errno})
	}
	for _, c := range []struct {
		err  error
		want syscall.Errno // 0: the error as it is
	}{
		{pathError(syscall.ENOSPC), syscall.ENOSPC},
		{pathError(syscall.EDQUOT), syscall.EDQUOT},
		{pathError(syscall.EIO), syscall.EIO},
		{errors.New("file sync error: fsync /x/meta.db: input/output error"), syscall.EIO},
		{errors.New("file resize error: something else"), syscall.EIO},
		{errors.New("no space left on device"), 0}, // not bbolt's growing
		{&os.PathError{Op: "pwrite64", Path: "/x", Err: syscall.ENOSPC}, 0},
	} {
		err := withErrno(c.err)
		if c.want == 0 {
			if err != c.err {
				t.Errorf("%v has become %v", c.err, err)
			}
			continue
		}
		if !errors.Is(err, c.want) || !errors.Is(err, c.err) || err.Error() != c.err.Error() {
			t.Errorf("%v has become %#v, want it to wrap %v", c.err, err, c.want)
		}
		if vfs.IsNoSpace(err) != (c.want != syscall.EIO) {
			t.Errorf("%v: for want of space: %v", err, vfs.IsNoSpace(err))
		}
	}
	if err := withErrno(nil); err != nil {
		t.Error(err)
	}
}

// What bbolt really says of a file that cannot grow is one of those texts: this
// one cannot because its descriptor is for reading only.
func TestUpdateThatCannotGrow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meta.db")
	db, err := Open(path, bbolt.Options{OpenFile: func(name string, flag int, perm os.FileMode) (*os.File, error) {
		if name == path {
			flag = os.O_RDONLY
		}
		return os.OpenFile(name, flag, perm)
	}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	err = Update(db, func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucket([]byte("b"))
		if err != nil {
			return err
		}
		return b.Put([]byte("k"), make([]byte, 1<<20))
	})
	if !errors.Is(err, syscall.EIO) {
		t.Fatalf("got %v, want an error that says %v", err, syscall.EIO)
	}
}
