//go:build !linux

package boltfile

import "os"

// dropCache has no call to make: the sync has to do.
func dropCache(*os.File) error { return nil }
