// Package crcspan gives checksums (CRC-32C) of any parts of a buffer, each in the
// same short time, however long the part.
//
// Who looks for records in damaged data has to try every octet for a beginning,
// with whatever length seems to stand there. Reading each to that length makes it
// quadratic, and lengths can be chosen so that it is hours.
package crcspan

import (
	"hash/crc32"
	"sync"
)

// step is how far apart the places are up to which checksums are remembered.
const step = 64

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sums is a buffer with the checksums of its beginnings. The buffer must not
// change.
type Sums struct {
	b  []byte
	at []uint32 // of the first i*step octets
}

// New reads b once.
func New(b []byte) *Sums {
	s := &Sums{b: b, at: make([]uint32, len(b)/step+1)}
	for i := 1; i < len(s.at); i++ {
		s.at[i] = crc32.Update(s.at[i-1], castagnoli, b[(i-1)*step:i*step])
	}
	return s
}

// Update is crc32.Update of seed with the octets from from up to to.
func (s *Sums) Update(seed uint32, from, to int) uint32 {
	if to-from <= 2*step {
		return crc32.Update(seed, castagnoli, s.b[from:to])
	}
	// A checksum goes on as if all before had been other octets of the same
	// checksum: that of the beginning up to to is the one up to from, carried
	// over so many octets, and that of the part alone, added up without carry.
	return s.beginning(to) ^ carry(s.beginning(from)^seed, to-from)
}

// beginning returns the checksum of the first n octets.
func (s *Sums) beginning(n int) uint32 {
	return crc32.Update(s.at[n/step], castagnoli, s.b[n/step*step:n])
}

// powers has x to the 8 n modulo the polynomial, for n = v << 8k at [k][v].
// Polynomials are as crc32 has them: the highest bit is x to the 0.
var powers = sync.OnceValue(func() *[8][256]uint32 {
	const one, octet = 1 << 31, 1 << (31 - 8)
	var p [8][256]uint32
	unit := uint32(octet)
	for k := range p {
		p[k][0] = one
		for v := 1; v < len(p[k]); v++ {
			p[k][v] = multiply(p[k][v-1], unit)
		}
		unit = multiply(p[k][255], unit)
	}
	return &p
})

// multiply returns the product of two polynomials modulo that of the checksum.
func multiply(a, b uint32) (r uint32) {
	for ; a != 0; a <<= 1 {
		r ^= b & uint32(int32(a)>>31)
		b = b>>1 ^ crc32.Castagnoli&-(b&1)
	}
	return r
}

// carry returns what becomes of a checksum by n octets of zero bits, but for
// what they add themselves.
func carry(sum uint32, n int) uint32 {
	p := powers()
	for k := 0; n > 0; n, k = n>>8, k+1 {
		if v := n & 255; v != 0 {
			sum = multiply(p[k][v], sum)
		}
	}
	return sum
}
