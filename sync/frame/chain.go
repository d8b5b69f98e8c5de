package frame

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
)

// UID names one life of a stream: it is drawn at random when the stream is
// created, so that a stream deleted and created anew is another one.
type UID [16]byte

func (u UID) String() string { return hex.EncodeToString(u[:]) }

// Chain is a link of the hash chain over all that an export has sent: two
// exports with the same chain at the same sequence have sent the same.
type Chain [16]byte

func (c Chain) String() string { return hex.EncodeToString(c[:]) }

// Rung is the chain at the end of a batch: a place where edge and hub can
// compare what they hold.
type Rung struct {
	Through uint64 // sequence of the last message or gap in the batch
	Chain   Chain
}

// Seed returns the chain before the first message of an incarnation:
//
//	sha256("petiole chain v1" | uid | incarnation uint64 | base uint64)[:16]
func Seed(uid UID, incarnation, base uint64) Chain {
	b := make([]byte, 0, 64)
	b = append(b, "petiole chain v1"...)
	b = append(b, uid[:]...)
	b = binary.BigEndian.AppendUint64(b, incarnation)
	b = binary.BigEndian.AppendUint64(b, base)
	s := sha256.Sum256(b)
	return Chain(s[:16])
}

// Kinds of record, in the chain and in a batch.
const (
	recordGap = 0
	recordMsg = 1
)

// Chainer computes links of the chain. The zero value is ready; it keeps
// scratch space and is not for concurrent use.
type Chainer struct {
	scratch []byte
	h       hash.Hash
}

// small is the message size up to which one copy is cheaper than several
// writes to the hash.
const small = 4 << 10

// Msg returns the link after prev for a message:
//
//	sha256(prev | 1 | seq uint64 | len(subject) uint32 | subject |
//	       len(header) uint32 | header | len(data) uint32 | data)[:16]
//
// The time is left out: a hub may have to raise it to keep a stream monotonic.
func (c *Chainer) Msg(prev Chain, seq uint64, subject string, header, data []byte) Chain {
	b := append(c.scratch[:0], prev[:]...)
	b = append(b, recordMsg)
	b = binary.BigEndian.AppendUint64(b, seq)
	b = binary.BigEndian.AppendUint32(b, uint32(len(subject)))
	b = append(b, subject...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(header)))
	var sum [sha256.Size]byte
	if len(header)+len(data) <= small {
		b = append(b, header...)
		b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
		b = append(b, data...)
		sum = sha256.Sum256(b)
	} else {
		if c.h == nil {
			c.h = sha256.New()
		}
		c.h.Reset()
		c.h.Write(b)
		c.h.Write(header)
		b = binary.BigEndian.AppendUint32(b[:0], uint32(len(data)))
		c.h.Write(b)
		c.h.Write(data)
		c.h.Sum(sum[:0])
	}
	c.scratch = b
	return Chain(sum[:16])
}

// Gap returns the link after prev for sequences first to last without
// messages:
//
//	sha256(prev | 0 | first uint64 | last uint64 | reason uint8)[:16]
func (c *Chainer) Gap(prev Chain, g Gap) Chain {
	b := append(c.scratch[:0], prev[:]...)
	b = append(b, recordGap)
	b = binary.BigEndian.AppendUint64(b, g.First)
	b = binary.BigEndian.AppendUint64(b, g.Last)
	b = append(b, byte(g.Reason))
	sum := sha256.Sum256(b)
	c.scratch = b
	return Chain(sum[:16])
}
