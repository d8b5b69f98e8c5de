package jetstream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"go.etcd.io/bbolt"

	"petiole/internal/broker"
	"petiole/storage"
	"petiole/storage/vfs"
	"petiole/storage/wal"
)

// TestNewerFormats: what a version of the program that knows more has written is
// refused, whichever file it is in, and nothing is changed. It is not damage.
func TestNewerFormats(t *testing.T) {
	ctx := testContext(t)
	filled := t.TempDir()
	n := startNode(t, filled)
	_, js := n.connect()
	must(js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}))
	for range 10 {
		must(js.Publish(ctx, "s.x", []byte("kept")))
	}
	n.stop()

	srv, err := broker.New(broker.Options{NoListen: true})
	if err != nil {
		t.Fatal(err)
	}
	account := srv.Account()

	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	sum := func(from uint32, parts ...string) uint32 {
		for _, p := range parts {
			from = crc32.Update(from, castagnoli, []byte(p))
		}
		return from
	}
	// value makes the value of a database one of another version.
	value := func(path, bucket, key string, version byte, sum func(content string) uint32) error {
		db, err := bbolt.Open(path, 0o600, nil)
		if err != nil {
			return err
		}
		err = db.Update(func(tx *bbolt.Tx) error {
			b := tx.Bucket([]byte(bucket))
			v := bytes.Clone(b.Get([]byte(key)))
			v[0] = version
			binary.LittleEndian.PutUint32(v[1:], sum(string(v[5:])))
			return b.Put([]byte(key), v)
		})
		return errors.Join(err, db.Close())
	}
	record := func(dir string, group storage.GroupID) error {
		l, err := wal.Open(wal.Options{FS: vfs.OS, Dir: filepath.Join(dir, "wal"), OnCommit: func([]wal.Record) {}})
		if err != nil {
			return err
		}
		if err := l.Replay(func(wal.Record) error { return nil }); err != nil {
			return err
		}
		_, err = l.Append(group, nil, []byte{20, 1, 2, 3})
		return errors.Join(err, l.Close())
	}
	streamFile := func(dir, name string) string { return filepath.Join(dir, "streams", groupDir(2), name) }
	for name, change := range map[string]func(dir string) error{
		"meta.db": func(dir string) error {
			key := streamKey(2)
			return value(filepath.Join(dir, "meta.db"), bucketMeta, key, 2, func(c string) uint32 {
				return sum(1, bucketMeta, "\x00", key, "\x00", c)
			})
		},
		"msgs.db": func(dir string) error {
			return value(streamFile(dir, "msgs.db"), "store", "identity", 3, func(c string) uint32 {
				return sum(sum(0, strings.Repeat("\x00", 16), "store")^(3^2), "identity", c)
			})
		},
		"floor": func(dir string) error {
			b, err := os.ReadFile(streamFile(dir, "floor"))
			if err != nil {
				return err
			}
			slot := b[:len(b)/2]
			binary.LittleEndian.PutUint32(slot[4:], binary.LittleEndian.Uint32(slot[4:])+1)
			end := len(slot) - 4
			binary.LittleEndian.PutUint32(slot[end:], sum(0, string(slot[:end])))
			return os.WriteFile(streamFile(dir, "floor"), b, 0o600)
		},
		"log segment": func(dir string) error {
			names, err := filepath.Glob(filepath.Join(dir, "wal", "*.wal"))
			if err != nil {
				return err
			}
			path := names[len(names)-1]
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, at := range []int{0, 512} { // both headers
				if h := b[at : at+512]; bytes.HasPrefix(h, b[:8]) {
					h[8]++
					binary.LittleEndian.PutUint32(h[508:], sum(0, string(h[:508])))
				}
			}
			return os.WriteFile(path, b, 0o600)
		},
		"command of a stream":       func(dir string) error { return record(dir, 2) },
		"command of the meta group": func(dir string) error { return record(dir, storage.MetaGroup) },
		"parked.log": func(dir string) error {
			return os.WriteFile(streamFile(dir, "parked.log"), append(parkedBegin(parkedVersion+1), "and more"...), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			if err := os.CopyFS(dir, os.DirFS(filled)); err != nil {
				t.Fatal(err)
			}
			if err := change(dir); err != nil {
				t.Fatal(err)
			}
			before := contentsOf(t, dir)
			for range 2 { // it stays so
				e, err := Open(Options{Account: account, Dir: dir, SegmentSize: 1 << 20})
				if err == nil {
					_ = e.Close()
					t.Fatal("it is opened")
				}
				if !errors.Is(err, storage.ErrFormat) || errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), "start the version that wrote it") {
					t.Errorf("the error is %v", err)
				}
			}
			after := contentsOf(t, dir)
			for path, b := range before {
				if after[path] != b {
					t.Errorf("%s has been changed", path)
				}
			}
			for path := range after {
				if _, ok := before[path]; !ok && (strings.Contains(path, "damaged") || strings.Contains(path, "parked/")) {
					t.Errorf("%s has been made", path)
				}
			}
		})
	}
}

// contentsOf returns what is in the files of a store, but for those of which
// nothing is needed: the log begins a new segment whenever it is opened, beside
// those that it has, and the lock is taken.
func contentsOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	m := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if name == "LOCK" || name == "ballast" || filepath.Dir(name) == "wal" {
			return nil
		}
		b, err := os.ReadFile(path)
		m[filepath.ToSlash(name)] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}
