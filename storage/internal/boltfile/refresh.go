package boltfile

import (
	"errors"
	"io/fs"
	"os"
)

// Refresh makes sure that what is read of the file at path from now on is what
// the medium holds, for a file that another process may have left: one that was
// killed has not synced what it wrote last, and where a sync has failed, the
// kernel shows what was written for as long as it is in the page cache, and
// holds it to be clean. So the file is synced, and its pages are dropped from
// the cache where the system has a call for that. Nobody may have it mapped. A
// file that does not exist is left alone.
func Refresh(path string) error {
	return do(OpRefresh, path, "", func() error {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if err = f.Sync(); err == nil {
			err = dropCache(f)
		}
		return errors.Join(err, f.Close())
	})
}
