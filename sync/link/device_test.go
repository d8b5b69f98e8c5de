package link

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nkeys"

	"petiole/storage"
)

func TestDeviceKey(t *testing.T) {
	dir := t.TempDir()
	a, err := LoadDevice(dir, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, DeviceFile)
	st, err := os.Stat(name)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", st.Mode(), err)
	}
	if err := os.Chmod(name, 0o644); err != nil {
		t.Fatal(err)
	}
	b, err := LoadDevice(dir, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	pa, _ := a.PublicKey()
	pb, _ := b.PublicKey()
	if pa != pb || !nkeys.IsValidPublicUserKey(pa) {
		t.Errorf("keys %s and %s", pa, pb)
	}
	if st, _ := os.Stat(name); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v after loading", st.Mode())
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "."+DeviceFile+"*")); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
	if err := os.WriteFile(name, []byte("SUnonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadDevice(dir, nil, nil); !errors.Is(err, ErrDeviceKey) || !strings.Contains(err.Error(), "restore the file") {
		t.Errorf("a broken key gives %v", err)
	}
}

func noStates() *memStates { return &memStates{m: map[string][]byte{}} }

// idOf loads the key in dir and returns its id.
func idOf(t *testing.T, dir string, kept *memStates) string {
	t.Helper()
	kp, err := LoadDevice(dir, kept, nil)
	if err != nil {
		t.Fatal(err)
	}
	id, err := kp.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestDeviceKeyRepaired(t *testing.T) {
	dir, kept := t.TempDir(), noStates()
	name := filepath.Join(dir, DeviceFile)
	id := idOf(t, dir, kept)
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for bit := range len(good) * 8 {
		bad := append([]byte(nil), good...)
		bad[bit/8] ^= 1 << (bit % 8)
		if err := os.WriteFile(name, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := idOf(t, dir, kept); got != id {
			t.Fatalf("bit %d of octet %d flipped: another identity", bit%8, bit/8)
		}
		if got := idOf(t, dir, noStates()); got != id {
			t.Fatalf("bit %d of octet %d flipped: another identity at the second start", bit%8, bit/8)
		}
	}
	for n := range len(good) {
		if err := os.WriteFile(name, good[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		if got := idOf(t, dir, kept); got != id {
			t.Fatalf("cut to %d octets: another identity", n)
		}
		if now, err := os.ReadFile(name); err != nil || string(now) != string(good) && n < len(good)-1 {
			t.Fatalf("cut to %d octets: the file is not made anew (%v)", n, err)
		}
	}
	if st, err := os.Stat(name); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the file made anew: %v, %v", st.Mode(), err)
	}

	// The copy follows the file: a key that was put there, and a new one.
	other := t.TempDir()
	want := idOf(t, other, noStates())
	b, err := os.ReadFile(filepath.Join(other, DeviceFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := idOf(t, dir, kept); got != want {
		t.Error("the copy counts more than the file")
	}
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	fresh := idOf(t, dir, kept)
	if fresh == want {
		t.Error("a key that was moved away is back")
	}
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := idOf(t, dir, kept); got != fresh {
		t.Error("the copy is not of the new key")
	}
}

func TestDeviceKeyWithoutCopy(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, DeviceFile)
	kept := noStates()
	damage := func() {
		t.Helper()
		if err := os.WriteFile(name, []byte("SUnonsense"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	damage()
	if _, err := LoadDevice(dir, kept, nil); !errors.Is(err, ErrDeviceKey) {
		t.Errorf("no copy: %v", err)
	}
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	// A full disk, and a database that is damaged, do without a copy.
	for _, fail := range []error{syscall.ENOSPC, storage.ErrCorrupt} {
		kept.fail = fail
		idOf(t, dir, kept)
	}
	kept.fail = storage.ErrFailed
	if _, err := LoadDevice(dir, kept, nil); !errors.Is(err, storage.ErrFailed) {
		t.Errorf("a write that failed: %v", err)
	}
	kept.fail = nil
	idOf(t, dir, kept)
	for k := range kept.m {
		kept.m[k] = []byte("SUnonsense")
	}
	damage()
	if _, err := LoadDevice(dir, kept, nil); !errors.Is(err, ErrDeviceKey) {
		t.Errorf("both are damaged: %v", err)
	}
	if left, err := os.ReadFile(name); err != nil || string(left) != "SUnonsense" {
		t.Errorf("the damaged file is not left alone: %q, %v", left, err)
	}
}
