package msgstore

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// TestOrphanedChunk: of a chunk whose key and head are destroyed together all is
// found whose own octets are intact.
func TestOrphanedChunk(t *testing.T) {
	for _, with := range []byte{0, 0xA5} { // a key of noise is beyond the last sequence
		dir := written(t, 1000)
		path := filepath.Join(dir, FileName)
		db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		var head []byte // of the second chunk, with its key
		var first, table int
		if err := db.View(func(tx *bbolt.Tx) error {
			cur := tx.Bucket(bucketMsgs).Cursor()
			cur.First()
			k, v := cur.Next()
			head = append(bytes.Clone(k), v[:chunkHeader]...)
			im := newImage(path, db)
			if err := im.identify(tx); err != nil {
				return err
			}
			c, err := parseChunk(im.msgs, k, v)
			first, table = int(c.seq(0)), c.n*chunkEntry
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		at := bytes.Index(b, head)
		if at < 0 || bytes.Count(b, head) != 1 {
			t.Fatalf("%d times in the file", bytes.Count(b, head))
		}
		// Key, head, table, and some of the first record.
		n := copy(b[at:], bytes.Repeat([]byte{with}, len(head)+table+20))
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Salvage(dir, SalvageOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Lost) != 1 || r.Lost[0] != (storage.Span{First: uint64(first), Last: uint64(first)}) || r.Kept != 999 {
			t.Errorf("%d octets of %#x: lost %v, kept %d", n, with, r.Lost, r.Kept)
		}
	}
}
