package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReadmeListsEveryKey holds README.md's table against the tables here.
func TestReadmeListsEveryKey(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	var table []string
	for line := range strings.SplitSeq(string(text), "\n") {
		if strings.HasPrefix(line, "| ") {
			// Words between anything that is not part of a key.
			table = append(table, strings.FieldsFunc(line, func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') })...)
		}
	}
	words := make(map[string]bool)
	for _, w := range table {
		words[w] = true
	}
	for _, p := range []Program{Edge, Hub} {
		d := &decoder{program: p}
		for _, name := range d.known(topKeys(Default())) {
			if !words[name] {
				t.Errorf("README.md does not list %s", name)
			}
		}
	}
}
