package command

import (
	"encoding/binary"
	"math"
)

// Kinds of consumer commands. Each begins with the kind octet and the
// consumer's name; see [ConsumerName].
const (
	KindConsumerCreate    = ConsumerKinds + iota // ConsumerCreate: create, or change the configuration
	KindConsumerDelete                           // ConsumerDelete
	KindConsumerDelivered                        // ConsumerDelivered
	KindConsumerAck                              // ConsumerEvent: Seq is done
	KindConsumerNak                              // ConsumerEvent: Seq is to be redelivered at Time (0: at once)
	KindConsumerProgress                         // ConsumerEvent: Seq is being worked on, wait from Time
	KindConsumerTerm                             // ConsumerEvent: Seq must not be redelivered
	KindConsumerExhausted                        // ConsumerEvent: Seq had its last attempt
	KindConsumerReset                            // ConsumerEvent: start over at Seq
	kindConsumerEnd
)

// IsConsumer reports whether kind is that of a consumer command.
func IsConsumer(kind Kind) bool { return kind >= ConsumerKinds && kind < kindConsumerEnd }

// ConsumerCreate creates a consumer, or gives an existing one a new
// configuration.
type ConsumerCreate struct {
	Name    string
	Created int64  // Unix ns
	Config  []byte // JSON of api.ConsumerConfig with defaults filled in
}

// ConsumerDelete removes a consumer, if it is the one created at Created (0:
// whichever).
type ConsumerDelete struct {
	Name    string
	Created int64
}

// Range is a run of messages delivered one after the other: Count consecutive
// stream sequences from First, each for the Attempt-th time (1: first time).
type Range struct {
	First   uint64
	Count   uint64
	Attempt uint64
}

// ConsumerDelivered says which messages were sent, in order. The first of them
// got consumer sequence DSeq, the next one DSeq+1 and so on.
type ConsumerDelivered struct {
	Name   string
	Rev    uint64 // the consumer's own count of records; see package consumer
	Time   int64  // Unix ns
	DSeq   uint64
	Ranges []Range
}

// ConsumerEvent is what happened to one message, or (reset) to the consumer.
type ConsumerEvent struct {
	Kind Kind
	Name string
	Rev  uint64
	Seq  uint64 // stream sequence
	DSeq uint64 // consumer sequence
	Time int64  // Unix ns
}

// Append appends the encoded command to b.
func (c *ConsumerCreate) Append(b []byte) []byte {
	b = append(b, byte(KindConsumerCreate))
	b = appendBytes(b, c.Name)
	b = binary.AppendVarint(b, c.Created)
	return append(b, c.Config...)
}

// Append appends the encoded command to b.
func (c *ConsumerDelete) Append(b []byte) []byte {
	b = append(b, byte(KindConsumerDelete))
	b = appendBytes(b, c.Name)
	return binary.AppendVarint(b, c.Created)
}

// Append appends the encoded command to b.
func (c *ConsumerDelivered) Append(b []byte) []byte {
	b = append(b, byte(KindConsumerDelivered))
	b = appendBytes(b, c.Name)
	b = binary.AppendUvarint(b, c.Rev)
	b = binary.AppendVarint(b, c.Time)
	b = binary.AppendUvarint(b, c.DSeq)
	b = binary.AppendUvarint(b, uint64(len(c.Ranges)))
	prev := uint64(0)
	for _, r := range c.Ranges {
		// The next range mostly lies a little ahead; unsigned wrap-around keeps
		// the difference exact for any pair.
		b = binary.AppendVarint(b, int64(r.First-prev))
		b = binary.AppendUvarint(b, r.Count)
		b = binary.AppendUvarint(b, r.Attempt)
		prev = r.First + r.Count
	}
	return b
}

// Append appends the encoded command to b.
func (c *ConsumerEvent) Append(b []byte) []byte {
	b = append(b, byte(c.Kind))
	b = appendBytes(b, c.Name)
	b = binary.AppendUvarint(b, c.Rev)
	b = binary.AppendUvarint(b, c.Seq)
	b = binary.AppendUvarint(b, c.DSeq)
	return binary.AppendVarint(b, c.Time)
}

// ConsumerName returns the name of the consumer that the command concerns. It
// aliases b.
func ConsumerName(b []byte) ([]byte, error) {
	if !IsConsumer(KindOf(b)) {
		return nil, malformed(KindOf(b))
	}
	r := reader{b: b[1:], ok: true}
	name := r.bytes()
	if !r.ok {
		return nil, malformed(KindOf(b))
	}
	return name, nil
}

// ConsumerRev returns Rev of a command that has one, 0 of others. It does not
// check the rest of the command.
func ConsumerRev(b []byte) uint64 {
	if k := KindOf(b); k < KindConsumerDelivered || k >= kindConsumerEnd {
		return 0
	}
	r := reader{b: b[1:], ok: true}
	r.bytes()
	return r.uint()
}

// done returns an error unless everything was read, and nothing more was there.
func (r *reader) done(k Kind) error {
	if !r.ok || len(r.b) != 0 {
		return malformed(k)
	}
	return nil
}

// Decode sets c to the command in b. Config aliases b.
func (c *ConsumerCreate) Decode(b []byte) error {
	r := newReader(b, KindConsumerCreate)
	*c = ConsumerCreate{Name: r.string(), Created: r.int(), Config: r.b}
	if !r.ok {
		return malformed(KindConsumerCreate)
	}
	return nil
}

// Decode sets c to the command in b.
func (c *ConsumerDelete) Decode(b []byte) error {
	r := newReader(b, KindConsumerDelete)
	*c = ConsumerDelete{Name: r.string(), Created: r.int()}
	return r.done(KindConsumerDelete)
}

// Decode sets c to the command in b, reusing Ranges.
func (c *ConsumerDelivered) Decode(b []byte) error {
	r := newReader(b, KindConsumerDelivered)
	c.Name, c.Rev, c.Time, c.DSeq = r.string(), r.uint(), r.int(), r.uint()
	n := r.uint()
	if n > uint64(len(r.b)/3) { // a range takes three octets at least
		r.fail()
		n = 0
	}
	c.Ranges = c.Ranges[:0]
	prev, total := uint64(0), uint64(0)
	for range n {
		g := Range{First: prev + uint64(r.int()), Count: r.uint(), Attempt: r.uint()}
		total += g.Count
		if r.ok && (g.Count == 0 || g.Attempt == 0 || g.First == 0 ||
			g.Count > math.MaxUint64-g.First || total < g.Count || total > math.MaxUint64-c.DSeq) {
			r.fail()
		}
		if !r.ok {
			break
		}
		c.Ranges = append(c.Ranges, g)
		prev = g.First + g.Count
	}
	return r.done(KindConsumerDelivered)
}

// Decode sets c to the command in b, which may be of any event's kind.
func (c *ConsumerEvent) Decode(b []byte) error {
	k := KindOf(b)
	if k < KindConsumerAck || k > KindConsumerReset {
		return malformed(k)
	}
	r := newReader(b, k)
	*c = ConsumerEvent{
		Kind: k, Name: r.string(), Rev: r.uint(),
		Seq: r.uint(), DSeq: r.uint(), Time: r.int(),
	}
	return r.done(k)
}
