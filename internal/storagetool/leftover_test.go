package storagetool

import (
	"os"
	"path/filepath"
	"testing"
)

func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"store", "store.restoring-0a", "store.partial-0b", "store2.restoring-0c", "store.restored", "other.partial-0d"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink("store", link); err != nil {
		t.Skip(err)
	}
	real := must(filepath.EvalSymlinks(dir))
	for _, of := range []string{filepath.Join(dir, "store"), link, filepath.Join(dir, "store") + "/"} {
		var found []string
		for _, l := range Leftovers(of) {
			found = append(found, l.Path)
		}
		if len(found) != 2 || found[0] != filepath.Join(real, "store.partial-0b") || found[1] != filepath.Join(real, "store.restoring-0a") {
			t.Errorf("beside %s: %v", of, found)
		}
	}
	if left := Leftovers(filepath.Join(dir, "nothing", "store")); len(left) > 0 {
		t.Error(left)
	}
}
