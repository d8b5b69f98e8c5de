package frame

import (
	"encoding/binary"
	"fmt"
)

// GapReason says why messages are missing.
type GapReason uint8

// Reasons of a gap.
const (
	// GapRemoved: the edge's stream dropped them, by its limits or a purge,
	// before they could be replayed.
	GapRemoved GapReason = 1
	// GapDeleted: they were deleted one by one inside the stream (consumed
	// from a work queue, replaced as the last of a subject, deleted by hand).
	GapDeleted GapReason = 2
	// GapDamaged: what the edge's disk gives back for them is not what was
	// stored.
	GapDamaged GapReason = 3
)

func (r GapReason) String() string {
	switch r {
	case GapRemoved:
		return "removed"
	case GapDeleted:
		return "deleted"
	case GapDamaged:
		return "damaged"
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// Gap is a run of sequences, First to Last inclusive, without messages.
type Gap struct {
	First, Last uint64
	Reason      GapReason
}

// Msg is one message of a batch.
type Msg struct {
	Seq     uint64 // sequence in the edge's stream
	Time    int64  // time of storing at the edge, Unix ns
	Subject string
	Header  []byte // nil if none
	Data    []byte
}

// Batch is a run of an export, First to Through without a hole: every sequence
// is either a message or part of a gap.
//
//	payload = offer incarnation base first through   uvarint each
//	          prev chain                             16 bytes each
//	          records                                uvarint, count, up to MaxRecords
//	          record…
//	record  = 0 reason(1 byte) sequences(uvarint)    gap
//	        | 1 time(zigzag varint, minus the one before)
//	            subject header data                  uvarint length + bytes;
//	                                                 length 0: subject as before
type Batch struct {
	Offer       uint32 // which offer of the connection, see [Offer]
	Incarnation uint64
	Base        uint64 // first sequence of the incarnation
	First       uint64
	Through     uint64
	Prev        Chain // chain before First
	Chain       Chain // chain after Through
	Gaps        []Gap
	Msgs        []Msg
}

// MaxRecords is the most records that a batch has. They take many times as much
// memory as they have bytes on the wire: that of a batch, which may be as large as
// the largest message, is not to decide how much. Those that share one frame are
// fewer; what comes on top are gaps before a message that does not fit into it.
const MaxRecords = 1 << 16

// maxBatchHead bounds the part of a batch's payload before its records.
const maxBatchHead = 6*binary.MaxVarintLen64 + 2*16

// maxRecordHead bounds what a record takes beside its contents.
const maxRecordHead = 1 + 4*binary.MaxVarintLen64

// Builder builds the encoded form of a batch, record by record. The zero value
// is ready for Reset; buffers are reused from batch to batch.
type Builder struct {
	head    Batch
	records []byte
	count   uint64
	msgs    uint64
	gaps    uint64
	missing uint64
	raw     int64
	subject string
	time    int64
	content []byte
	chainer Chainer
}

// Reset starts a batch that goes on after first-1, where the chain is prev.
func (b *Builder) Reset(offer uint32, incarnation, base, first uint64, prev Chain) {
	b.head = Batch{
		Offer: offer, Incarnation: incarnation, Base: base,
		First: first, Through: first - 1, Prev: prev, Chain: prev,
	}
	b.records = b.records[:0]
	b.count, b.msgs, b.gaps, b.missing, b.raw = 0, 0, 0, 0, 0
	b.subject, b.time = "", 0
}

// Empty reports whether nothing has been added.
func (b *Builder) Empty() bool { return b.count == 0 }

// Fits reports whether a message of that many bytes (subject, header and data)
// still fits into a single frame.
func (b *Builder) Fits(size int) bool {
	return maxBatchHead+len(b.records)+maxRecordHead+size <= MaxPayload
}

// Msg adds the message with sequence Through()+1. The contents are copied.
func (b *Builder) Msg(time int64, subject string, header, data []byte) {
	seq := b.head.Through + 1
	r := append(b.records, recordMsg)
	r = binary.AppendVarint(r, time-b.time)
	if subject == b.subject {
		r = append(r, 0)
	} else {
		r = binary.AppendUvarint(r, uint64(len(subject)))
		r = append(r, subject...)
	}
	r = binary.AppendUvarint(r, uint64(len(header)))
	r = append(r, header...)
	r = binary.AppendUvarint(r, uint64(len(data)))
	b.records = append(r, data...)
	b.time, b.subject = time, subject
	b.head.Chain = b.chainer.Msg(b.head.Chain, seq, subject, header, data)
	b.head.Through = seq
	b.count++
	b.msgs++
	b.raw += int64(len(subject) + len(header) + len(data))
}

// Gap adds the sequences from Through()+1 to last as missing.
func (b *Builder) Gap(last uint64, reason GapReason) {
	g := Gap{First: b.head.Through + 1, Last: last, Reason: reason}
	if g.Last < g.First {
		return
	}
	r := append(b.records, recordGap, byte(reason))
	b.records = binary.AppendUvarint(r, g.Last-g.First+1)
	b.head.Chain = b.chainer.Gap(b.head.Chain, g)
	b.head.Through = last
	b.count++
	b.gaps++
	b.missing += g.Last - g.First + 1
}

// Through returns the last sequence covered, First-1 if the batch is empty.
func (b *Builder) Through() uint64 { return b.head.Through }

// Rung returns the end of the batch as it stands.
func (b *Builder) Rung() Rung { return Rung{b.head.Through, b.head.Chain} }

// Counts returns how many messages and gaps have been added, how many
// sequences the gaps span, and the messages' bytes.
func (b *Builder) Counts() (msgs, gaps, missing uint64, bytes int64) {
	return b.msgs, b.gaps, b.missing, b.raw
}

// AppendFrames appends the batch as frames, ready to be written.
func (b *Builder) AppendFrames(dst []byte, compress bool) []byte {
	b.content = appendBatchHead(b.content[:0], &b.head, b.count)
	b.content = append(b.content, b.records...)
	return Append(dst, TypeBatch, b.content, compress)
}

func appendBatchHead(c []byte, h *Batch, count uint64) []byte {
	c = binary.AppendUvarint(c, uint64(h.Offer))
	c = binary.AppendUvarint(c, h.Incarnation)
	c = binary.AppendUvarint(c, h.Base)
	c = binary.AppendUvarint(c, h.First)
	c = binary.AppendUvarint(c, h.Through)
	c = append(c, h.Prev[:]...)
	c = append(c, h.Chain[:]...)
	return binary.AppendUvarint(c, count)
}

// Decoder decodes batches. It keeps subjects seen, so that a stream with few
// subjects does not allocate one per message. Not for concurrent use.
type Decoder struct {
	subjects map[string]string
	chainer  Chainer
}

// maxSubjects bounds the subjects that a Decoder keeps.
const maxSubjects = 4096

func (d *Decoder) subject(b []byte) string {
	if s, ok := d.subjects[string(b)]; ok {
		return s
	}
	if d.subjects == nil || len(d.subjects) >= maxSubjects {
		d.subjects = make(map[string]string)
	}
	s := string(b)
	if len(s) <= 256 {
		d.subjects[s] = s
	}
	return s
}

// Batch decodes a batch's content into b, reusing its slices, and verifies
// that its records cover First to Through and that its chain follows from
// Prev. Headers and data alias content.
func (d *Decoder) Batch(content []byte, b *Batch) error {
	in := input{b: content}
	offer := in.uvarint()
	b.Offer = uint32(offer)
	b.Incarnation, b.Base = in.uvarint(), in.uvarint()
	b.First, b.Through = in.uvarint(), in.uvarint()
	copy(b.Prev[:], in.take(16))
	copy(b.Chain[:], in.take(16))
	count := in.uvarint()
	b.Gaps, b.Msgs = b.Gaps[:0], b.Msgs[:0]
	switch {
	case in.bad, offer > 1<<32-1, b.Incarnation == 0, b.Base == 0, b.First < b.Base,
		b.Through < b.First, b.Through == 1<<64-1, count > MaxRecords:
		return fmt.Errorf("batch head: %w", ErrMalformed)
	}
	seq, chain := b.First-1, b.Prev
	var time int64
	var subject string
	for ; count > 0; count-- {
		switch kind := in.byte(); {
		case in.bad:
			return fmt.Errorf("batch cut short: %w", ErrMalformed)
		case kind == recordGap:
			g := Gap{First: seq + 1, Reason: GapReason(in.byte())}
			n := in.uvarint()
			if in.bad || n == 0 || n > b.Through-seq {
				return fmt.Errorf("gap in batch: %w", ErrMalformed)
			}
			g.Last = seq + n
			seq = g.Last
			chain = d.chainer.Gap(chain, g)
			b.Gaps = append(b.Gaps, g)
		case kind == recordMsg:
			m := Msg{Seq: seq + 1}
			time += in.varint()
			m.Time = time
			if s := in.bytes(); len(s) > 0 {
				subject = d.subject(s)
			}
			m.Subject = subject
			m.Header, m.Data = in.bytes(), in.bytes()
			if in.bad || subject == "" || seq == b.Through {
				return fmt.Errorf("message in batch: %w", ErrMalformed)
			}
			seq++
			chain = d.chainer.Msg(chain, seq, m.Subject, m.Header, m.Data)
			b.Msgs = append(b.Msgs, m)
		default:
			return fmt.Errorf("record kind %d in batch: %w", kind, ErrMalformed)
		}
	}
	if len(in.b) != 0 || seq != b.Through {
		return fmt.Errorf("batch of %d to %d ends at %d with %d bytes left: %w",
			b.First, b.Through, seq, len(in.b), ErrMalformed)
	}
	if chain != b.Chain {
		return fmt.Errorf("batch of %d to %d: %w", b.First, b.Through, ErrChain)
	}
	return nil
}

// input is what is left to decode; bad latches the first failure.
type input struct {
	b   []byte
	bad bool
}

func (in *input) fail() { in.bad, in.b = true, nil }

func (in *input) uvarint() uint64 {
	v, n := binary.Uvarint(in.b)
	if n <= 0 {
		in.fail()
		return 0
	}
	in.b = in.b[n:]
	return v
}

func (in *input) varint() int64 {
	v, n := binary.Varint(in.b)
	if n <= 0 {
		in.fail()
		return 0
	}
	in.b = in.b[n:]
	return v
}

func (in *input) byte() byte {
	if len(in.b) == 0 {
		in.fail()
		return 0
	}
	v := in.b[0]
	in.b = in.b[1:]
	return v
}

func (in *input) take(n int) []byte {
	if n > len(in.b) {
		in.fail()
		return nil
	}
	v := in.b[:n:n]
	in.b = in.b[n:]
	return v
}

// bytes returns a length-prefixed run, nil if it is empty.
func (in *input) bytes() []byte {
	n := in.uvarint()
	if n > uint64(len(in.b)) {
		in.fail()
		return nil
	}
	if n == 0 {
		return nil
	}
	return in.take(int(n))
}

func (in *input) string() string { return string(in.bytes()) }
