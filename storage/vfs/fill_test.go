package vfs

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestZeroFill(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("abc"); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int64{2 << 20, 100} {
		if err := zeroFill(f, size); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(f.Name())
		if err != nil || len(b) != 2<<20 || !bytes.Equal(b[:4], []byte("abc\x00")) || bytes.Count(b, []byte{0}) != 2<<20-3 {
			t.Fatalf("%d bytes, %v", len(b), err)
		}
	}
}
