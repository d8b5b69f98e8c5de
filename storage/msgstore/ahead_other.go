//go:build !linux

package msgstore

import "os"

// readAhead would ask for a part of f to be brought into memory.
func readAhead(*os.File, int64, int64) {}
