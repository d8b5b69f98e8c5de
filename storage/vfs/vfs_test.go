package vfs_test

import (
	"testing"

	"petiole/storage/vfs"
	"petiole/storage/vfs/simfs"
)

func TestFreeName(t *testing.T) {
	disk := simfs.New(1)
	seen := map[string]bool{}
	for range 5 { // within a second, or few
		name, err := vfs.FreeName(disk, "/file.damaged-")
		if err != nil {
			t.Fatal(err)
		}
		if seen[name] {
			t.Fatalf("%s is taken", name)
		}
		seen[name] = true
		f, err := disk.Open(name, true)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
