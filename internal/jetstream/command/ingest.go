package command

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
)

// Errors of [Ingest], as the hub's stream answers them. None changes anything.
var (
	// ErrStaleIncarnation says that the batch belongs to an incarnation of the
	// edge's stream that a later one has replaced.
	ErrStaleIncarnation = errors.New("stale incarnation of the exported stream")
	// ErrOutOfOrder says that the batch does not follow the position.
	ErrOutOfOrder = errors.New("batch does not follow the position")
	// ErrDiverged says that the history before the batch is not what the hub
	// holds.
	ErrDiverged = errors.New("history of the exported stream differs")
)

// LadderSize is how many batch ends a [Position] remembers.
const LadderSize = 32

// Reasons of a [Gap].
const (
	// GapDeleted: the messages were removed (limits, expiry, purge, delete)
	// before they were exported.
	GapDeleted uint8 = 1
)

// Ingest appends what an edge exported, in one step with the new position.
type Ingest struct {
	Edge        string   // the edge's identity
	UID         [16]byte // of the edge's stream
	Incarnation uint64   // rises when the edge's history was cut
	Base        uint64   // first sequence of the incarnation
	First       uint64   // first sequence covered by the batch
	Through     uint64   // last sequence covered
	PrevChain   [16]byte // chain before First
	Chain       [16]byte // chain after Through
	Gaps        []Gap    // sequences covered that have no message, ascending
	Msgs        []IngestMsg
}

// Gap is a run of sequences without messages.
type Gap struct {
	First, Last uint64
	Reason      uint8
}

// IngestMsg is one exported message.
type IngestMsg struct {
	Seq     uint64 // in the edge's stream
	Time    int64  // of storing at the edge, Unix nanoseconds
	Subject string
	Header  []byte // aliases the record after Decode
	Data    []byte // aliases the record after Decode
}

// Position is how far the hub has an edge's stream.
type Position struct {
	Incarnation uint64
	Through     uint64
	Chain       [16]byte
	Ladder      []Rung // the last LadderSize batch ends, oldest first
	Gaps        uint64 // sequences reported as gaps so far
	Msgs        uint64 // messages appended so far
	Updated     int64  // time of the last message appended, Unix nanoseconds
}

// Rung is a batch end.
type Rung struct {
	Through uint64
	Chain   [16]byte
}

// Seed returns the chain before the first message of an incarnation.
func Seed(uid [16]byte, incarnation, base uint64) [16]byte {
	b := append([]byte("petiole chain v1"), uid[:]...)
	b = binary.BigEndian.AppendUint64(b, incarnation)
	b = binary.BigEndian.AppendUint64(b, base)
	h := sha256.Sum256(b)
	return [16]byte(h[:16])
}

// AppendTo appends the record to dst.
func (c *Ingest) AppendTo(dst []byte) []byte {
	dst = append(dst, byte(KindIngest))
	dst = appendBytes(dst, c.Edge)
	dst = append(dst, c.UID[:]...)
	dst = binary.AppendUvarint(dst, c.Incarnation)
	dst = binary.AppendUvarint(dst, c.Base)
	dst = binary.AppendUvarint(dst, c.First)
	dst = binary.AppendUvarint(dst, c.Through)
	dst = append(dst, c.PrevChain[:]...)
	dst = append(dst, c.Chain[:]...)
	dst = binary.AppendUvarint(dst, uint64(len(c.Gaps)))
	for _, g := range c.Gaps {
		dst = binary.AppendUvarint(dst, g.First)
		dst = binary.AppendUvarint(dst, g.Last)
		dst = append(dst, g.Reason)
	}
	dst = binary.AppendUvarint(dst, uint64(len(c.Msgs)))
	for i := range c.Msgs {
		m := &c.Msgs[i]
		dst = binary.AppendUvarint(dst, m.Seq)
		dst = binary.AppendVarint(dst, m.Time)
		dst = appendBytes(dst, m.Subject)
		dst = appendBytes(dst, m.Header)
		dst = appendBytes(dst, m.Data)
	}
	return dst
}

// head reads what is before the gaps, and returns how many of them there are.
func (c *Ingest) head(r *reader) uint64 {
	c.Edge = r.string()
	r.fixed(c.UID[:])
	c.Incarnation = r.uint()
	c.Base = r.uint()
	c.First = r.uint()
	c.Through = r.uint()
	r.fixed(c.PrevChain[:])
	r.fixed(c.Chain[:])
	return r.uint()
}

// ingested returns how many messages a record has.
func ingested(b []byte) int {
	var c Ingest
	var reason [1]byte
	r := newReader(b, KindIngest)
	for n := c.head(&r); n > 0 && r.ok; n-- {
		r.uint()
		r.uint()
		r.fixed(reason[:])
	}
	return int(r.uint())
}

// Decode reads a record; headers and data alias b.
func (c *Ingest) Decode(b []byte) error {
	r := newReader(b, KindIngest)
	n := c.head(&r)
	if !r.ok || n > uint64(len(r.b))/3 {
		return malformed(KindIngest)
	}
	c.Gaps = nil
	if n > 0 {
		c.Gaps = make([]Gap, n)
	}
	for i := range c.Gaps {
		var reason [1]byte
		c.Gaps[i].First = r.uint()
		c.Gaps[i].Last = r.uint()
		r.fixed(reason[:])
		c.Gaps[i].Reason = reason[0]
	}
	n = r.uint()
	if !r.ok || n > uint64(len(r.b))/5 {
		return malformed(KindIngest)
	}
	c.Msgs = nil
	if n > 0 {
		c.Msgs = make([]IngestMsg, n)
	}
	for i := range c.Msgs {
		m := &c.Msgs[i]
		m.Seq = r.uint()
		m.Time = r.int()
		m.Subject = r.string()
		if m.Header = r.bytes(); len(m.Header) == 0 {
			m.Header = nil
		}
		m.Data = r.bytes()
	}
	if !r.ok || len(r.b) != 0 {
		return malformed(KindIngest)
	}
	return nil
}

// AppendTo appends the position's binary form, as kept in a store's keyed
// state, to dst.
func (p *Position) AppendTo(dst []byte) []byte {
	dst = append(dst, 1)
	dst = binary.AppendUvarint(dst, p.Incarnation)
	dst = binary.AppendUvarint(dst, p.Through)
	dst = append(dst, p.Chain[:]...)
	dst = binary.AppendUvarint(dst, p.Gaps)
	dst = binary.AppendUvarint(dst, p.Msgs)
	dst = binary.AppendVarint(dst, p.Updated)
	for _, g := range p.Ladder {
		dst = binary.AppendUvarint(dst, g.Through)
		dst = append(dst, g.Chain[:]...)
	}
	return dst
}

// Decode reads what AppendTo wrote.
func (p *Position) Decode(b []byte) error {
	if len(b) == 0 || b[0] != 1 {
		return ErrMalformed
	}
	r := reader{b: b[1:], ok: true}
	p.Incarnation = r.uint()
	p.Through = r.uint()
	r.fixed(p.Chain[:])
	p.Gaps = r.uint()
	p.Msgs = r.uint()
	p.Updated = r.int()
	p.Ladder = nil
	for r.ok && len(r.b) > 0 {
		var g Rung
		g.Through = r.uint()
		r.fixed(g.Chain[:])
		p.Ladder = append(p.Ladder, g)
	}
	if !r.ok {
		return ErrMalformed
	}
	return nil
}
