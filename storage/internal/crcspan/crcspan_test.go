package crcspan

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

func TestUpdate(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int{0, 1, step - 1, step, step + 1, 3 * step, 1000, 70_000, 1 << 18} {
		b := make([]byte, size)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		s := New(b)
		for range 2000 {
			from := r.IntN(size + 1)
			to := from + r.IntN(size-from+1)
			seed := r.Uint32()
			if got, want := s.Update(seed, from, to), crc32.Update(seed, castagnoli, b[from:to]); got != want {
				t.Fatalf("%d octets, [%d:%d], seed %08x: %08x, want %08x", size, from, to, seed, got, want)
			}
		}
		if got, want := s.Update(7, 0, size), crc32.Update(7, castagnoli, b); got != want {
			t.Fatalf("all %d octets: %08x, want %08x", size, got, want)
		}
	}
}

func BenchmarkUpdate(b *testing.B) {
	s := New(make([]byte, 1<<20))
	for i := range b.N {
		s.Update(1, i&0xffff, 1<<20-i&0xffff)
	}
}
