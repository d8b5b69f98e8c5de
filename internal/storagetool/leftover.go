package storagetool

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// What a backup or a restore writes has one of these in its name until it is
// complete and takes the name that it is to have.
const (
	partialMark   = ".partial-"
	restoringMark = ".restoring-"
)

// Leftover is what a backup or restore that was killed has left beside what it
// was to make. Nothing takes it for a backup or a store. A backup or restore
// that still runs has one, too, and cannot be told from a killed one, so that
// nothing removes it by itself.
type Leftover struct {
	Path string
	Of   string // what was to be made
}

func (l Leftover) String() string {
	return fmt.Sprintf("%s is what a command that was killed while it made %s has left; remove it, unless the command still runs", l.Path, l.Of)
}

// Leftovers returns what killed backups to, and restores of, path have left
// beside it.
func Leftovers(path string) (found []Leftover) {
	path = abs(path)
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // as Restore does
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return nil // then nothing can be said, which is no failure of whoever asks
	}
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), filepath.Base(path))
		if ok && (strings.HasPrefix(rest, partialMark) || strings.HasPrefix(rest, restoringMark)) {
			found = append(found, Leftover{Path: filepath.Join(filepath.Dir(path), e.Name()), Of: path})
		}
	}
	return found
}
