package msgstore

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
)

func TestFloorRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := func(name string) uint64 { return rapid.Uint64().Draw(t, name) }
		f := Floor{
			Generation: n("generation"), File: n("file"), Applied: storage.LSN(n("applied")), Txid: n("txid"),
			First: n("first"), Last: n("last"), FreeSum: rapid.Uint32().Draw(t, "sum"), LastTime: rapid.Int64().Draw(t, "time"),
		}
		copy(f.Store[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "store"))
		b := f.encode()
		if got, err := decodeFloor(b); err != nil || got != f || len(b) != floorSlot {
			t.Fatalf("%+v became %+v, %v", f, got, err)
		}
		b[rapid.IntRange(0, floorSlot-1).Draw(t, "octet")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		if _, err := decodeFloor(b); err == nil {
			t.Fatal("a flipped bit goes unnoticed")
		}
	})
}

// aged makes a store of 200 messages, checkpointed at 1 and 2, whose file is
// the one of 1 again, with 100.
func aged(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "stream")
	s := openFast(t, dir)
	fillMessages(t, s, 100, 10, "old")
	checkpoint(t, s, 1)
	old := snapshot(t, dir)
	fillMessages(t, s, 100, 10, "old")
	if _, err := s.Remove(1); err != nil {
		t.Fatal(err)
	}
	checkpoint(t, s, 2)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(old, FileName), filepath.Join(dir, FileName)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A store that is older than it has been is not opened, unless the log makes up
// for that, or its owner says so; and then no sequence is given away twice.
func TestStale(t *testing.T) {
	open := func(dir string, o Options) (*Store, *StaleError) {
		t.Helper()
		o.Log = quiet()
		s, err := Open(dir, o)
		if err == nil {
			t.Cleanup(func() { _ = s.Close() })
			return s, nil
		}
		var e *StaleError
		if !errors.As(err, &e) || !errors.Is(err, ErrStale) || !errors.Is(err, storage.ErrCorrupt) {
			t.Fatalf("open: %v", err)
		}
		return nil, e
	}
	accepted := func(dir string, first, msgs uint64) {
		t.Helper()
		for i := range 2 { // the second time it is not stale any more
			s, e := open(dir, Options{AcceptStale: true})
			if e != nil {
				t.Fatal(e)
			}
			if (s.Stale() != nil) != (i == 0) {
				t.Fatalf("opening %d: stale is %v", i, s.Stale())
			}
			if st := s.State(); st.Last != 200 || st.Msgs != msgs || st.First != first {
				t.Fatalf("opening %d: %+v", i, st)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		s, e := open(dir, Options{})
		if e != nil {
			t.Fatal(e)
		}
		checkedOnDisk(t, s)
	}
	t.Run("older", func(t *testing.T) {
		dir := aged(t)
		for _, oldest := range []storage.LSN{0, 3, 100} {
			_, e := open(dir, Options{WALOldest: oldest})
			if e == nil || e.Applied != 1 || e.Floor.Applied != 2 || e.Lost != (storage.Span{First: 101, Last: 200}) {
				t.Fatalf("the log begins at %d: %+v", oldest, e)
			}
		}
		for _, oldest := range []storage.LSN{1, 2} {
			s, e := open(dir, Options{WALOldest: oldest})
			if e != nil || s.Applied() != 1 || s.Stale() != nil {
				t.Fatal(e)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		accepted(dir, 1, 100)
	})
	t.Run("gone", func(t *testing.T) {
		dir := aged(t)
		if err := os.Remove(filepath.Join(dir, FileName)); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			_, e := open(dir, Options{WALOldest: 2})
			if e == nil || !e.Missing || e.Lost != (storage.Span{First: 2, Last: 200}) {
				t.Fatalf("%+v", e)
			}
			if _, err := os.Stat(filepath.Join(dir, FileName)); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("a file has been made: %v", err)
			}
		}
		accepted(dir, 201, 0)
	})
	t.Run("gone, with the floor damaged", func(t *testing.T) {
		dir := aged(t)
		if err := os.Remove(filepath.Join(dir, FileName)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, FloorName), bytes.Repeat([]byte{1}, 2*floorSlot), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir, Options{WALOldest: 2, Log: quiet()}); !errors.Is(err, storage.ErrCorrupt) {
			t.Fatalf("open: %v", err)
		}
		if _, err := os.Stat(filepath.Join(dir, FileName)); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("a file has been made: %v", err)
		}
	})
	t.Run("another's", func(t *testing.T) {
		dir := aged(t)
		other := written(t, 300)
		if err := os.Rename(filepath.Join(other, FileName), filepath.Join(dir, FileName)); err != nil {
			t.Fatal(err)
		}
		if _, e := open(dir, Options{WALOldest: 1}); e == nil || !e.Foreign {
			t.Fatalf("%+v", e)
		}
	})
	t.Run("one slot", func(t *testing.T) {
		dir := aged(t)
		path := filepath.Join(dir, FloorName)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		f, err := ReadFloor(dir)
		if err != nil {
			t.Fatal(err)
		}
		b[(f.Generation%2)*floorSlot+100] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, e := open(dir, Options{}) // as far as is known, nothing is lost
		if e != nil || s.Applied() != 1 {
			t.Fatal(e)
		}
	})
}

// Whatever the power leaves of the first slot written, it is not damage; once
// there has been a checkpoint, there are two.
func TestFirstFloor(t *testing.T) {
	dir := t.TempDir()
	s := openFast(t, dir)
	path := filepath.Join(dir, FloorName)
	for cut := 0; cut < floorSlot; cut += 16 {
		b := make([]byte, 2*floorSlot)
		f := Floor{Generation: 1, Applied: 1}
		copy(b[floorSlot:], f.encode()[:cut])
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadFloor(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("cut to %d: %v", cut, err)
		}
	}
	if err := os.WriteFile(path, make([]byte, 2*floorSlot), 0o600); err != nil {
		t.Fatal(err)
	}
	checkpoint(t, s, 1)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if f, err := decodeFloor(b[i*floorSlot:]); err != nil || f.Applied != 1 {
			t.Fatalf("slot %d: %+v, %v", i, f, err)
		}
	}
}

// Of the two meta pages bbolt takes the one that is intact, whichever it is:
// either leads to all that was checkpointed.
func TestDamagedMetaPage(t *testing.T) {
	dir := written(t, 500)
	path := filepath.Join(dir, FileName)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for page := range 2 {
		to := snapshot(t, dir)
		c := append([]byte(nil), b...)
		c[page*pageSize+60] ^= 4
		if err := os.WriteFile(filepath.Join(to, FileName), c, 0o600); err != nil {
			t.Fatal(err)
		}
		s := openFast(t, to)
		n := 0
		if err := s.Range(0, func(storage.Message) bool { n++; return true }); err != nil || n != 500 || s.Applied() != 1 {
			t.Fatalf("without meta page %d: %d messages at %d, %v", page, n, s.Applied(), err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A page that a flipped bit makes look free is not written to.
func TestDamagedFreeList(t *testing.T) {
	dir := t.TempDir()
	s := openFast(t, dir)
	for i := range 5 {
		fillMessages(t, s, 100, 300, "x")
		checkpoint(t, s, storage.LSN(i+1))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, FileName)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	p := boltpages.Open(f, fi.Size())
	free, err := p.Freelist(p.Metas()[0])
	if err != nil || len(free) == 0 {
		t.Fatalf("%d free pages, %v", len(free), err)
	}
	at := int64(p.Metas()[0].Freelist)*pageSize + 16
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Options{Log: quiet()}); !errors.Is(err, storage.ErrCorrupt) {
		t.Fatalf("open: %v", err)
	}
	found := false
	if _, err := Verify(dir, func(err error) { found = found || errors.Is(err, storage.ErrCorrupt) }); err != nil || !found {
		t.Fatalf("verify finds it: %v, %v", found, err)
	}
}
