package simfs

import (
	"bytes"
	"errors"
	"slices"
	"syscall"
	"testing"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// scenario writes 8 sectors of 1s and syncs all, then writes 2s over the last
// four without a sync, and makes and renames files without syncing the directory.
func scenario(t *testing.T, seed uint64) *FS {
	d := New(seed)
	must(t, d.MkdirAll("/d"))
	f, err := d.Open("/d/f", true)
	must(t, err)
	_, err = f.WriteAt(bytes.Repeat([]byte{1}, 8*Sector), 0)
	must(t, err)
	must(t, f.Datasync())
	must(t, d.SyncDir("/d"))
	_, err = f.WriteAt(bytes.Repeat([]byte{2}, 4*Sector), 4*Sector)
	must(t, err)
	for _, name := range []string{"/d/g", "/d/h"} {
		g, err := d.Open(name, true)
		must(t, err)
		must(t, g.Sync())
	}
	must(t, d.Rename("/d/h", "/d/i"))
	return d
}

// TestPowerCut looks at many cuts: what was synced always stays, and of the
// rest every outcome comes up.
func TestPowerCut(t *testing.T) {
	outcomes := map[string]int{}
	names := map[string]int{}
	for seed := range uint64(500) {
		d := scenario(t, seed)
		n := d.PowerCut()
		b := n.Contents("/d/f")
		if len(b) != 8*Sector || !bytes.Equal(b[:4*Sector], bytes.Repeat([]byte{1}, 4*Sector)) {
			t.Fatalf("seed %d: synced sectors are gone", seed)
		}
		kept := ""
		for s := 4; s < 8; s++ {
			sector := b[s*Sector : (s+1)*Sector]
			if !bytes.Equal(sector, bytes.Repeat(sector[:1], Sector)) {
				t.Fatalf("seed %d: sector %d is half written", seed, s)
			}
			kept += string('0' + sector[0])
		}
		outcomes[kept]++
		list, err := n.List("/d")
		must(t, err)
		for _, name := range list {
			names[name]++
		}
		again := scenario(t, seed).PowerCut()
		if !bytes.Equal(again.Contents("/d/f"), b) {
			t.Fatalf("seed %d: not repeatable", seed)
		}
		if _, err := d.Open("/d/f", false); !errors.Is(err, ErrPowerOff) {
			t.Fatalf("the old disk is still on: %v", err)
		}
	}
	if len(outcomes) != 16 {
		t.Errorf("%d of 16 outcomes: %v", len(outcomes), outcomes)
	}
	for _, name := range []string{"g", "h", "i"} {
		if n := names[name]; n == 0 || n == 500 {
			t.Errorf("%s is there after %d of 500 cuts", name, n)
		}
	}
}

func TestKillLosesNothing(t *testing.T) {
	d := scenario(t, 1)
	want := d.Contents("/d/f")
	n := d.Kill()
	if !bytes.Equal(n.Contents("/d/f"), want) || !slices.Equal(n.Names(""), []string{"/d/f", "/d/g", "/d/i"}) {
		t.Fatalf("files %v", n.Names(""))
	}
	// Nor does it make anything durable.
	lost := false
	for seed := range uint64(20) {
		lost = lost || !bytes.Equal(scenario(t, seed).Kill().PowerCut().Contents("/d/f"), want)
	}
	if !lost {
		t.Error("20 power cuts after a kill took nothing")
	}
}

// TestFailedSyncIsFinal: what a failed sync did not write is not written by
// the next one either, unless it is written again.
func TestFailedSyncIsFinal(t *testing.T) {
	lost := 0
	for seed := range uint64(50) {
		d := New(seed)
		f, err := d.Open("/f", true)
		must(t, err)
		must(t, d.SyncDir("/"))
		data := bytes.Repeat([]byte{7}, 4*Sector)
		_, err = f.WriteAt(data, 0)
		must(t, err)
		d.SetHook(FailNth(OpSync, 1, syscall.EIO))
		if err := f.Sync(); !errors.Is(err, syscall.EIO) {
			t.Fatal(err)
		}
		must(t, f.Sync())
		if !bytes.Equal(d.Contents("/f"), data) {
			t.Fatal("the page cache lost it")
		}
		if !bytes.Equal(d.PowerCut().Contents("/f"), data) {
			lost++
		}
	}
	if lost < 25 {
		t.Errorf("only %d of 50 lost anything", lost)
	}
}

func TestFailedWriteIsPartial(t *testing.T) {
	lengths := map[int]bool{}
	for seed := range uint64(20) {
		d := New(seed)
		f, err := d.Open("/f", true)
		must(t, err)
		d.SetHook(FailNth(OpWrite, 2, syscall.ENOSPC))
		if n, err := f.WriteAt([]byte("a"), 0); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		n, err := f.WriteAt(make([]byte, 10), 1)
		if !errors.Is(err, syscall.ENOSPC) || len(d.Contents("/f")) != 1+n {
			t.Fatalf("%d written, %v, length %d", n, err, len(d.Contents("/f")))
		}
		lengths[n] = true
	}
	if len(lengths) < 4 {
		t.Errorf("lengths %v", lengths)
	}
}

func TestFlip(t *testing.T) {
	d := New(1)
	d.SetContents("/d/f", []byte{0, 0})
	d.Flip("/d/f", 9)
	if b := d.PowerCut().Contents("/d/f"); !bytes.Equal(b, []byte{0, 2}) {
		t.Fatalf("got %v", b)
	}
}
