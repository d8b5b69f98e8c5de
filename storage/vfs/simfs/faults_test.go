package simfs

import (
	"bytes"
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"petiole/storage/vfs"
)

func TestInject(t *testing.T) {
	d := New(1)
	f, err := d.Open("/f.wal", true)
	must(t, err)
	g, err := d.Open("/g", true)
	must(t, err)
	_, err = f.WriteAt(make([]byte, 4*Sector), 0)
	must(t, err)

	remove := d.Inject(Fault{Op: OpWrite, Suffix: ".wal", After: 1, Times: 2, Err: syscall.EIO})
	var got []bool
	for range 4 {
		_, err := f.WriteAt([]byte("x"), 0)
		got = append(got, errors.Is(err, syscall.EIO))
		_, err = g.WriteAt([]byte("x"), 0)
		must(t, err)
	}
	if got[0] || !got[1] || !got[2] || got[3] {
		t.Errorf("writes that failed: %v, want the second and third", got)
	}
	remove()

	remove = d.Inject(Fault{Op: OpRead, Times: -1, Off: Sector, Len: Sector, Err: syscall.EIO})
	for off, bad := range map[int64]bool{0: false, Sector - 1: true, 2*Sector - 1: true, 2 * Sector: false} {
		if _, err := f.ReadAt(make([]byte, 2), off); errors.Is(err, syscall.EIO) != bad {
			t.Errorf("read at %d: %v", off, err)
		}
	}
	remove()
	if _, err := f.ReadAt(make([]byte, 2), Sector); err != nil {
		t.Errorf("read after the fault was removed: %v", err)
	}
	d.Inject(Fault{Op: OpAny, Times: -1, Err: syscall.EIO})
	for name, err := range map[string]error{"sync": f.Sync(), "syncdir": d.SyncDir("/"), "remove": d.Remove("/g"), "truncate": f.Truncate(1)} {
		if !errors.Is(err, syscall.EIO) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := f.ReadAt(make([]byte, 2), 0); err != nil {
		t.Errorf("read: %v", err)
	}
}

func TestDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := New(1)
		f, err := d.Open("/f", true)
		must(t, err)
		d.Inject(Fault{Op: OpSync, Delay: time.Minute})
		start := time.Now()
		must(t, f.Sync())
		must(t, f.Sync())
		if took := time.Since(start); took != time.Minute {
			t.Errorf("two syncs took %v", took)
		}
	})
}

func TestCapacity(t *testing.T) {
	d := New(1)
	d.SetCapacity(1000)
	f, err := d.Open("/f", true)
	must(t, err)
	if err := f.Preallocate(1001); !vfs.IsNoSpace(err) {
		t.Fatalf("preallocating too much: %v", err)
	}
	must(t, f.Preallocate(800))
	if n, err := d.Free("/"); n != 200 || err != nil {
		t.Fatal(n, err)
	}
	if n, err := f.WriteAt(make([]byte, 800), 0); n != 800 || err != nil {
		t.Fatalf("a write into what is reserved: %d, %v", n, err)
	}
	if n, err := f.WriteAt(make([]byte, 500), 600); n != 400 || !vfs.IsNoSpace(err) {
		t.Fatalf("a write beyond the room: %d, %v", n, err)
	}
	if n, err := f.WriteAt(make([]byte, 5), 2000); n != 0 || !vfs.IsNoSpace(err) {
		t.Fatalf("a write far beyond: %d, %v", n, err)
	}
	if err := f.Truncate(1001); !vfs.IsNoSpace(err) {
		t.Fatal(err)
	}
	d = d.PowerCut()
	if d.Used() != 0 { // nothing was synced
		f, err = d.Open("/f", false)
		must(t, err)
	} else {
		f, err = d.Open("/f", true)
		must(t, err)
	}
	if err := f.Preallocate(1001); !vfs.IsNoSpace(err) {
		t.Fatalf("after a power cut: %v", err)
	}
	must(t, f.Preallocate(1000))
	must(t, d.Remove("/f"))
	if n, err := d.Free("/"); n != 1000 || err != nil {
		t.Fatal(n, err)
	}
}

func TestTearSectors(t *testing.T) {
	torn := 0
	for seed := range uint64(50) {
		d := New(seed)
		d.TearSectors(0.5)
		f, err := d.Open("/f", true)
		must(t, err)
		must(t, f.Preallocate(Sector))
		must(t, f.Sync())
		must(t, d.SyncDir("/"))
		_, err = f.WriteAt(bytes.Repeat([]byte{1}, Sector), 0)
		must(t, err)
		n := bytes.Count(d.PowerCut().Contents("/f"), []byte{1})
		if n != 0 && n != Sector {
			torn++
		}
	}
	if torn < 5 {
		t.Errorf("%d of 50 cuts tore a sector", torn)
	}
}

func TestDamage(t *testing.T) {
	d := New(1)
	zeros := make([]byte, 100)
	d.SetContents("/a", zeros)
	d.SetContents("/b", zeros)
	for range 50 {
		name, bit := d.FlipAny("b")
		if name != "/b" || d.Contents("/b")[bit/8] != 1<<(bit%8) {
			t.Fatalf("%s, bit %d", name, bit)
		}
		d.Flip(name, bit)
	}
	if name, _ := d.FlipAny("c"); name != "" {
		t.Errorf("flipped a bit of %q", name)
	}
	d.Scramble("/a", 90, 20)
	if b := d.Contents("/a"); len(b) != 100 || !bytes.Equal(b[:90], zeros[:90]) || bytes.Equal(b[90:], zeros[90:]) {
		t.Errorf("scrambled: %v", b)
	}
	must(t, d.Rename("/a", "/c"))
	d.Lose("/b")
	d.Lose("/c")
	if names := d.Names(""); len(names) != 0 {
		t.Errorf("files %v", names)
	}
	if names := d.PowerCut().Names(""); len(names) > 1 || len(names) == 1 && names[0] != "/a" {
		t.Errorf("files %v after a power cut", names)
	}
}
