//go:build !unix

package boltfile

import "os"

// unlock lets go of bbolt's lock on a file; closing it does.
func unlock(*os.File) {}
