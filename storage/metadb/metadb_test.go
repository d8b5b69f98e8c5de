package metadb

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
)

func openTest(t *testing.T, path string) *DB {
	t.Helper()
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestPutGet(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "meta.db")
	d := openTest(t, path)
	if _, err := d.Get("b", "k"); !errors.Is(err, storage.ErrNotFound) {
		t.Fatalf("Get from an empty file: %v", err)
	}
	if err := d.Put("b", KV{"k", []byte("v")}, KV{"empty", []byte{}}, KV{"gone", []byte("x")}, KV{"k2", []byte("v2")}); err != nil {
		t.Fatal(err)
	}
	if err := d.Put("b", KV{"gone", nil}, KV{"never", nil}); err != nil {
		t.Fatal(err)
	}
	if err := d.Put("other", KV{"k", []byte("w")}); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		for _, c := range []struct{ bucket, key, want string }{{"b", "k", "v"}, {"b", "empty", ""}, {"other", "k", "w"}} {
			if v, err := d.Get(c.bucket, c.key); err != nil || v == nil || string(v) != c.want {
				t.Errorf("Get(%s, %s) = %q, %v", c.bucket, c.key, v, err)
			}
		}
		if v, err := d.Get("b", "gone"); !errors.Is(err, storage.ErrNotFound) {
			t.Errorf("deleted key: %q, %v", v, err)
		}
		var got []string
		if err := d.ForEach("b", "k", func(k string, v []byte) error {
			got = append(got, fmt.Sprintf("%s=%s", k, v))
			return d.Put("seen", KV{k, v}) // fn may write
		}); err != nil || !slices.Equal(got, []string{"k=v", "k2=v2"}) {
			t.Errorf("ForEach: %q, %v", got, err)
		}
	}
	check()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Get("b", "k"); !errors.Is(err, storage.ErrClosed) {
		t.Errorf("Get after Close: %v", err)
	}
	if err := d.Put("b", KV{"k", []byte("v")}); !errors.Is(err, storage.ErrClosed) {
		t.Errorf("Put after Close: %v", err)
	}
	d = openTest(t, path)
	check()
	stop := errors.New("stop")
	if err := d.ForEach("b", "", func(string, []byte) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("ForEach hides fn's error: %v", err)
	}
}

func TestPutIsAtomic(t *testing.T) {
	d := openTest(t, filepath.Join(t.TempDir(), "meta.db"))
	if err := d.Put("b", KV{"k", []byte("v")}, KV{"", []byte("a key is required")}); err == nil {
		t.Fatal("an empty key is accepted")
	}
	if v, err := d.Get("b", "k"); !errors.Is(err, storage.ErrNotFound) {
		t.Fatalf("half a Put: %q, %v", v, err)
	}
}

func TestOpenFailures(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meta.db")
	d := openTest(t, path)
	if _, err := Open(path); !errors.Is(err, storage.ErrLocked) || !strings.Contains(err.Error(), path) {
		t.Errorf("second Open: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, bytes.Repeat([]byte("not bolt "), 4000), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); !errors.Is(err, storage.ErrCorrupt) || !strings.Contains(err.Error(), path) {
		t.Errorf("Open of a foreign file: %v", err)
	}
	if _, err := Open(filepath.Join(path, "below", "a", "file")); err == nil {
		t.Error("Open below a file succeeds")
	}
}

// A crash while the file was being made must not be in the way of making it.
func TestHalfMadeFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meta.db")
	if err := os.WriteFile(path+".new", make([]byte, 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	d := openTest(t, path)
	if err := d.Put("b", KV{"k", []byte("v")}); err != nil {
		t.Fatal(err)
	}
}

func TestFlippedBit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meta.db")
	d := openTest(t, path)
	if err := d.Put("b", KV{"good", []byte("0123456789")}, KV{"bad", []byte("find this value")}); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	flipped := 0
	for i := 0; ; flipped++ {
		j := bytes.Index(raw[i:], []byte("find this value"))
		if j < 0 {
			break
		}
		i += j + 1
		raw[i] ^= 4
	}
	if flipped == 0 {
		t.Fatal("the value is not in the file")
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	d = openTest(t, path)
	if v, err := d.Get("b", "bad"); !errors.Is(err, storage.ErrCorrupt) || v != nil {
		t.Errorf("damaged value: %q, %v", v, err)
	}
	if v, err := d.Get("b", "good"); err != nil || string(v) != "0123456789" {
		t.Errorf("value beside it: %q, %v", v, err)
	}
	if err := d.ForEach("b", "", func(string, []byte) error { return nil }); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("ForEach over a damaged value: %v", err)
	}
	// Writing it anew heals it.
	if err := d.Put("b", KV{"bad", []byte("new")}); err != nil {
		t.Fatal(err)
	}
	if v, err := d.Get("b", "bad"); err != nil || string(v) != "new" {
		t.Errorf("rewritten value: %q, %v", v, err)
	}
}

// What is intact of a damaged file is kept, the file itself too.
func TestSalvage(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(b []byte) []byte
		want   []string // keys left, at least
		bad    bool     // some are lost
	}{
		{"a value", func(b []byte) []byte {
			i := bytes.Index(b, []byte("value of k3"))
			for ; i >= 0; i = bytes.Index(b, []byte("value of k3")) { // in every copy of the page
				b[i] ^= 1
			}
			return b
		}, []string{"k1", "k2", "k4"}, true},
		{"nothing", func(b []byte) []byte { return b }, []string{"k1", "k2", "k3", "k4"}, false},
		{"all of it", func(b []byte) []byte { clear(b); return b }, nil, true},
		{"cut", func(b []byte) []byte { return b[:100] }, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "meta.db")
			db, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range []string{"k1", "k2", "k3", "k4"} {
				if err := db.Put("b", KV{k, []byte("value of " + k)}); err != nil {
					t.Fatal(err)
				}
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			b = c.damage(b)
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			r, err := Salvage(path)
			if err != nil {
				t.Fatal(err)
			}
			if parked, err := os.ReadFile(r.Parked); err != nil || !bytes.Equal(parked, b) {
				t.Fatalf("the damaged file is not kept: %v", err)
			}
			if (len(r.Damage) > 0) != c.bad || r.Kept != len(c.want) {
				t.Fatalf("%+v", r)
			}
			// Another in the same second does not replace what this one has kept.
			again, err := Salvage(path)
			if err != nil {
				t.Fatal(err)
			}
			if parked, err := os.ReadFile(r.Parked); err != nil || again.Parked == r.Parked || !bytes.Equal(parked, b) {
				t.Fatalf("%s is not kept beside %s: %v", r.Parked, again.Parked, err)
			}
			if db, err = Open(path); err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			for _, k := range c.want {
				if v, err := db.Get("b", k); err != nil || string(v) != "value of "+k {
					t.Fatalf("%s: %q, %v", k, v, err)
				}
			}
		})
	}
}

// Damage to an open file that bbolt meets as it begins a transaction, or takes one
// back, hangs nobody: it is told, and a change that cannot be taken back is a
// storage failure, as is every later one.
func TestDamageHangsNobody(t *testing.T) {
	page := int64(os.Getpagesize())
	for _, c := range []struct {
		name   string
		pages  func(root, list int64) []int64
		failed bool
	}{
		{"both meta pages", func(int64, int64) []int64 { return []int64{0, 1} }, false},
		{"the root and the list of free pages", func(root, list int64) []int64 { return []int64{root, list} }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "meta.db")
			d := openTest(t, path)
			for i := range 3 {
				if err := d.Put("b", KV{"key", []byte{byte(i)}}); err != nil {
					t.Fatal(err)
				}
			}
			told := 0
			d.OnFail(func(error) { told++ })
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			meta := boltpages.Open(bytes.NewReader(raw), int64(len(raw))).Metas()[0]
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range c.pages(int64(meta.Root), int64(meta.Freelist)) {
				if _, err := f.WriteAt(bytes.Repeat([]byte{0x5a}, 64), p*page); err != nil {
					t.Fatal(err)
				}
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				for range 3 {
					err := d.Put("b", KV{"key", []byte("v")})
					if err == nil || errors.Is(err, storage.ErrFailed) != c.failed || !c.failed && !errors.Is(err, storage.ErrCorrupt) {
						t.Errorf("put: %v", err)
					}
					if _, err := d.Get("b", "key"); !errors.Is(err, storage.ErrCorrupt) {
						t.Errorf("get: %v", err)
					}
				}
				_ = d.Close()
			}()
			select {
			case <-done:
			case <-time.After(time.Minute):
				t.Fatal("an access hangs")
			}
			if c.failed != (told > 0) {
				t.Errorf("a failure is told %d times", told)
			}
		})
	}
}
