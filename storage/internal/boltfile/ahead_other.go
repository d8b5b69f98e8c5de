//go:build !linux

package boltfile

import "os"

func willNeed(*os.File, int64, int64) {}
