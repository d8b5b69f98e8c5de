package metadb

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"petiole/storage"
)

// Damage to the pages of one bucket is nothing to those who read another, and
// found by a walk.
func TestWalk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meta.db")
	db := openTest(t, path)
	for _, bucket := range []string{"a", "b"} {
		for i := range 200 {
			if err := db.Put(bucket, KV{fmt.Sprintf("%s%04d", bucket, i), bytes.Repeat([]byte(bucket), 100)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := db.Walk(); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for at := 2 * 4096; at < len(raw); at += 4096 { // every page with its entries
		if page := raw[at : at+4096]; bytes.Contains(page, []byte("b0100")) {
			page[8] = 0xff // flags
		}
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path)
	n := 0
	if err := db.ForEach("a", "", func(string, []byte) error { n++; return nil }); err != nil || n != 200 {
		t.Errorf("%d entries of the other bucket, %v", n, err)
	}
	if err := db.Walk(); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("walk: %v", err)
	}
}

// A page that says it goes on over others is no matter to readers, but would be to
// the next change.
func TestWalkOverflow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meta.db")
	db := openTest(t, path)
	for i := range 50 {
		if err := db.Put("b", KV{fmt.Sprint(i % 7), bytes.Repeat([]byte("x"), 100*i)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Walk(); err != nil { // some really do
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for at := 2 * 4096; at < len(raw); at += 4096 {
		if raw[at+8] == 2 { // a leaf
			raw[at+14] ^= 8
		}
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path)
	if err := db.Walk(); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("walk: %v", err)
	}
}
