package boltpages

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/bbolt"
	"pgregory.net/rapid"
)

type content map[string]string // "bucket/key" to value

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// build makes a file with branches of two levels, values on overflow pages,
// free pages, an inline bucket and an empty one; all keys of a bucket have the
// same length. It returns its octets, and what it holds.
func build(t testing.TB, n int) ([]byte, content) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.db")
	db := must(bbolt.Open(path, 0o600, &bbolt.Options{PageSize: 4096, NoSync: true, FreelistType: bbolt.FreelistMapType}))
	want := content{}
	put := func(tx *bbolt.Tx, bucket string, key, value []byte) {
		b := must(tx.CreateBucketIfNotExists([]byte(bucket)))
		b.FillPercent = 1
		if err := b.Put(key, value); err != nil {
			t.Fatal(err)
		}
		want[bucket+"/"+string(key)] = string(value)
	}
	update := func(fn func(tx *bbolt.Tx)) {
		if err := db.Update(func(tx *bbolt.Tx) error { fn(tx); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	value := func(i, size int) []byte {
		return bytes.Repeat(fmt.Appendf(nil, "<%07d>", i), size/9+1)[:size]
	}
	for at := 0; at < n; at += 200 {
		update(func(tx *bbolt.Tx) {
			for i := at; i < min(at+200, n); i++ {
				size := 100 + i%300
				if i%97 == 0 {
					size = 9000 + i%5000
				}
				put(tx, "big", binary.BigEndian.AppendUint64(nil, uint64(i)), value(i, size))
			}
		})
	}
	update(func(tx *bbolt.Tx) {
		for i := range 5 {
			put(tx, "small", fmt.Appendf(nil, "key%d", i), value(i, 20))
		}
		must(tx.CreateBucket([]byte("none")))
	})
	// Leaves that have been replaced, and pages that are free.
	update(func(tx *bbolt.Tx) {
		for i := n / 3; i < n/3+60; i++ {
			key := binary.BigEndian.AppendUint64(nil, uint64(i))
			if err := tx.Bucket([]byte("big")).Delete(key); err != nil {
				t.Fatal(err)
			}
			delete(want, "big/"+string(key))
		}
	})
	update(func(tx *bbolt.Tx) { put(tx, "small", []byte("key0"), value(7, 30)) })
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	return must(os.ReadFile(path)), want
}

// walk returns all that a walk over the newest state yields, and the damage.
func walk(t testing.TB, b []byte) (content, []Damage) {
	t.Helper()
	f := Open(bytes.NewReader(b), int64(len(b)))
	got := content{}
	damage := slices.Clone(f.MetaDamage())
	if len(f.Metas()) == 0 {
		return got, damage
	}
	w := f.NewWalker(func(d Damage) { damage = append(damage, d) })
	err := w.Walk(f.Root(f.Metas()[0]), func(e Entry) error {
		if !e.IsBucket {
			return nil // damage has made it so
		}
		name := string(e.Key)
		b, err := f.Bucket(e)
		if err != nil {
			damage = append(damage, Damage{Kind: KindPage, Reason: err.Error()})
			return nil
		}
		return w.Walk(b, func(e Entry) error {
			v, err := e.Value(nil)
			if err != nil {
				t.Fatal(err)
			}
			// A key whose page is destroyed may read like another, which came first.
			if k := name + "/" + string(e.Key); got[k] == "" {
				got[k] = string(v)
			}
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return got, damage
}

func TestWalkIntact(t *testing.T) {
	b, want := build(t, 3000)
	got, damage := walk(t, b)
	if len(damage) > 0 || !maps.Equal(got, want) {
		t.Fatalf("%d entries of %d, damage %v", len(got), len(want), damage)
	}
	f := Open(bytes.NewReader(b), int64(len(b)))
	if f.PageSize() != 4096 || len(f.Metas()) != 2 || f.Metas()[0].Txid != f.Metas()[1].Txid+1 {
		t.Errorf("page size %d, metas %+v", f.PageSize(), f.Metas())
	}
	free, err := f.Freelist(f.Metas()[0])
	if err != nil || len(free) == 0 {
		t.Errorf("free pages %v, %v", free, err)
	}
	// Every used page has been seen but those of metas and the free list.
	var depth2 bool
	w := f.NewWalker(func(d Damage) { t.Error(d) })
	if err := w.Walk(f.Root(f.Metas()[0]), func(e Entry) error {
		b := must(f.Bucket(e))
		return w.Walk(b, func(Entry) error { return nil })
	}); err != nil {
		t.Fatal(err)
	}
	list := f.Info(f.Metas()[0].Freelist)
	for p := uint64(2); p < f.Metas()[0].HighWater; p++ {
		isList := p >= list.Page && p <= list.Page+uint64(list.Overflow)
		if w.Seen(p) == (isList || slices.Contains(free, p)) {
			t.Errorf("page %d: seen %v, of the list %v", p, w.Seen(p), isList)
		}
		depth2 = depth2 || f.Info(p).Kind == KindBranch
	}
	if !depth2 {
		t.Error("there is no branch page: the test is too small")
	}
}

// hidden reports whether a damage says that key may be missing.
func hidden(damage []Damage, bucket, key string) bool {
	for _, d := range damage {
		k := key
		if d.Low != nil && strings.HasPrefix(string(d.Low), "key") || d.Low != nil && len(d.Low) != 8 {
			k = bucket
		}
		if (d.Low == nil || string(d.Low) <= k) && (d.High == nil || k < string(d.High)) {
			return true
		}
	}
	return false
}

// TestDestroyedPages overwrites each page of the file in turn: what is not on
// it, or below it, must still be found; whatever is missing must lie in a range
// that has been reported; and the raw scan finds all that stands elsewhere.
func TestDestroyedPages(t *testing.T) {
	b, want := build(t, 1000)
	f := Open(bytes.NewReader(b), int64(len(b)))
	m := f.Metas()[0]
	owner := map[uint64][]string{} // keys by the leaf they stand on
	w := f.NewWalker(func(d Damage) { t.Error(d) })
	if err := w.Walk(f.Root(m), func(e Entry) error {
		bucket := string(e.Key)
		return w.Walk(must(f.Bucket(e)), func(e Entry) error {
			last := uint64(e.Offset()+int64(e.Size())-1) / 4096
			for p := e.Page; p <= last; p++ {
				owner[p] = append(owner[p], bucket+"/"+string(e.Key))
			}
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	kinds := map[Kind]int{}
	for _, fill := range []byte{0, 0xA5} {
		for p := uint64(0); p < m.HighWater; p++ {
			kind := f.Info(p).Kind
			kinds[kind]++
			hurt := bytes.Clone(b)
			copy(hurt[p*4096:], bytes.Repeat([]byte{fill}, 4096))
			got, damage := walk(t, hurt)
			switch {
			case p == m.Page || p == 1-m.Page:
				if len(damage) != 1 || damage[0].Kind != KindMeta || damage[0].Page != p {
					t.Errorf("meta %d: %v", p, damage)
				}
				if p == m.Page {
					continue // the state before is another one
				}
			case !w.Seen(p):
				if len(damage) > 0 {
					t.Errorf("free page %d: %v", p, damage)
				}
			}
			for k, v := range want {
				bucket, key, _ := strings.Cut(k, "/")
				switch g, ok := got[k]; {
				case ok && g == v:
				case ok && !slices.Contains(owner[p], k):
					t.Errorf("page %d (%s): %q has another value", p, kind, k)
				case !ok && !hidden(damage, bucket, key):
					t.Errorf("page %d (%s): %q is missing, reported are %v", p, kind, k, damage)
				}
			}
			if fill != 0xA5 || !w.Seen(p) {
				continue
			}
			found := content{}
			h := Open(bytes.NewReader(hurt), int64(len(hurt)))
			if err := h.Scan(t.Context(), nil, func(e Entry) error {
				if v, err := e.Value(nil); err == nil {
					found["big/"+string(e.Key)+string(v)] = ""
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			for k, v := range want {
				if _, ok := found[k+v]; !ok && strings.HasPrefix(k, "big/") && !slices.Contains(owner[p], k) {
					t.Errorf("page %d: a scan does not find %q", p, k)
				}
			}
		}
	}
	if kinds[KindBranch] == 0 || kinds[KindLeaf] == 0 || kinds[KindMeta] == 0 || kinds[KindFreelist] == 0 || kinds[KindPage] == 0 {
		t.Errorf("not all kinds of pages were there: %v", kinds)
	}
}

func TestNoMeta(t *testing.T) {
	b, want := build(t, 500)
	copy(b, make([]byte, 2*4096))
	f := Open(bytes.NewReader(b), int64(len(b)))
	if len(f.Metas()) != 0 || len(f.MetaDamage()) != 2 || f.PageSize() != 4096 {
		t.Fatalf("metas %v, damage %v, page size %d", f.Metas(), f.MetaDamage(), f.PageSize())
	}
	found := content{}
	if err := f.Scan(t.Context(), nil, func(e Entry) error {
		v, _ := e.Value(nil)
		found[string(e.Key)+string(v)] = ""
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for k, v := range want {
		_, key, _ := strings.Cut(k, "/")
		if _, ok := found[key+v]; !ok {
			t.Errorf("%q is not found", k)
		}
	}
}

// failing is a disk of which one page cannot be read.
type failing struct {
	*bytes.Reader
	page int64
}

var errDisk = errors.New("input/output error")

func (f failing) ReadAt(b []byte, off int64) (int, error) {
	if off < (f.page+1)*4096 && off+int64(len(b)) > f.page*4096 {
		return 0, errDisk
	}
	return f.Reader.ReadAt(b, off)
}

func TestUnreadablePage(t *testing.T) {
	b, want := build(t, 500)
	f := Open(bytes.NewReader(b), int64(len(b)))
	overflow := map[uint64]bool{}
	w := f.NewWalker(func(d Damage) { t.Error(d) })
	if err := w.Walk(f.Root(f.Metas()[0]), func(e Entry) error {
		return w.Walk(must(f.Bucket(e)), func(e Entry) error {
			for i := range f.Info(e.Page).Overflow {
				overflow[e.Page+1+uint64(i)] = true
			}
			return nil
		})
	}); err != nil || len(overflow) == 0 {
		t.Fatal(overflow, err)
	}
	for p := range int64(f.Metas()[0].HighWater) {
		r := failing{bytes.NewReader(b), p}
		f := Open(r, int64(len(b)))
		if len(f.Metas()) == 0 {
			t.Fatalf("page %d: no meta", p)
		}
		n := 0
		w := f.NewWalker(func(Damage) {})
		if err := w.Walk(f.Root(f.Metas()[0]), func(e Entry) error {
			bucket := string(e.Key)
			b, err := f.Bucket(e)
			if err != nil {
				return nil
			}
			return w.Walk(b, func(e Entry) error {
				if v, err := e.Value(nil); err == nil && string(v) == want[bucket+"/"+string(e.Key)] {
					n++
				}
				return nil
			})
		}); err != nil {
			t.Fatal(err)
		}
		// Of a leaf that goes on over several pages, one unreadable page
		// takes what is on it.
		if overflow[uint64(p)] && n < len(want)-3 {
			t.Errorf("overflow page %d: %d of %d found", p, n, len(want))
		}
	}
}

func exercise(b []byte) {
	f := Open(bytes.NewReader(b), int64(len(b)))
	budget := 200_000
	value := func(e Entry) error {
		if budget--; budget < 0 {
			return errors.New("enough")
		}
		_, _ = e.Value(nil)
		return nil
	}
	for _, m := range f.Metas() {
		w := f.NewWalker(func(Damage) {})
		_ = w.Walk(f.Root(m), func(e Entry) error {
			if !e.IsBucket {
				return value(e)
			}
			if b, err := f.Bucket(e); err == nil {
				return w.Walk(b, value)
			}
			return nil
		})
		_, _ = f.Freelist(m)
	}
	_ = f.Scan(context.Background(), nil, value)
	for p := range f.Pages() {
		f.Info(p)
	}
}

// TestWild changes arbitrary octets, with right checksums of the meta pages
// half of the time: nothing may panic or go on for ever.
func TestWild(t *testing.T) {
	b, _ := build(t, 400)
	rapid.Check(t, func(t *rapid.T) {
		hurt := bytes.Clone(b)
		for range rapid.IntRange(1, 20).Draw(t, "n") {
			at := rapid.IntRange(0, len(hurt)/8-1).Draw(t, "at") * 8
			if rapid.Bool().Draw(t, "header") {
				at = at &^ 4095
				at += rapid.IntRange(0, 12).Draw(t, "field") * 8
			}
			copy(hurt[at:], rapid.SliceOfN(rapid.Byte(), 1, 12).Draw(t, "v"))
		}
		if rapid.Bool().Draw(t, "cut") {
			hurt = hurt[:rapid.IntRange(0, len(hurt)).Draw(t, "size")]
		}
		exercise(hurt)
	})
}

func FuzzFile(f *testing.F) {
	b, _ := build(f, 60)
	// Without what has never been used: smaller is faster.
	b = b[:Open(bytes.NewReader(b), int64(len(b))).Metas()[0].HighWater*4096]
	f.Add(b)
	f.Add(b[:3*4096])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) { exercise(b) })
}
