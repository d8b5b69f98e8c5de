package broker

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// slab is a pooled buffer. Outbound queues refer to pieces of slabs; a slab
// returns to its pool when the last reference is gone. A large payload is put
// into one slab that the queues of all its receivers refer to.
type slab struct {
	b    []byte
	refs atomic.Int32
}

const (
	minSlabBits = 11 // 2 KiB
	maxSlabBits = 21 // 2 MiB: a message of the default maximum payload fits twice
	maxTail     = 64 << 10
)

var slabPools [maxSlabBits - minSlabBits + 1]sync.Pool

// newSlab returns an empty slab with room for n octets and one reference.
func newSlab(n int) *slab {
	class := max(bits.Len(uint(max(n, 1)-1)), minSlabBits)
	if class > maxSlabBits {
		s := &slab{b: make([]byte, 0, n)}
		s.refs.Store(1)
		return s
	}
	s, _ := slabPools[class-minSlabBits].Get().(*slab)
	if s == nil {
		s = &slab{b: make([]byte, 0, 1<<class)}
	}
	s.refs.Store(1)
	return s
}

// release gives one reference up.
func (s *slab) release() {
	if s.refs.Add(-1) > 0 {
		return
	}
	class := bits.Len(uint(cap(s.b) - 1))
	if class < minSlabBits || class > maxSlabBits || cap(s.b) != 1<<class {
		return
	}
	s.b = s.b[:0]
	slabPools[class-minSlabBits].Put(s)
}

// seg is a piece of a slab that waits to be written.
type seg struct {
	own *slab
	b   []byte
}
