package command

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// Kinds of consumer commands. Each begins with the kind octet and the
// consumer's name (varint length, octets); see [ConsumerName].
const (
	KindConsumerCreate    = 32 // [ConsumerCreate]: create, or change the configuration
	KindConsumerDelete    = 33 // [ConsumerDelete]
	KindConsumerDelivered = 34 // [ConsumerDelivered]
	KindConsumerAck       = 35 // [ConsumerEvent]: Seq is done
	KindConsumerNak       = 36 // [ConsumerEvent]: Seq is to be redelivered at Time (0: at once)
	KindConsumerProgress  = 37 // [ConsumerEvent]: Seq is being worked on, wait from Time
	KindConsumerTerm      = 38 // [ConsumerEvent]: Seq must not be redelivered
	KindConsumerExhausted = 39 // [ConsumerEvent]: Seq had its last attempt
	KindConsumerReset     = 40 // [ConsumerEvent]: start over at Seq

	kindConsumerFirst = KindConsumerCreate
	kindConsumerLast  = KindConsumerReset
)

// ErrConsumerCommand says that octets are not a well-formed consumer command.
var ErrConsumerCommand = errors.New("malformed consumer command")

// IsConsumer reports whether kind is that of a consumer command.
func IsConsumer(kind byte) bool { return kind >= kindConsumerFirst && kind <= kindConsumerLast }

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
	Kind byte
	Name string
	Rev  uint64
	Seq  uint64 // stream sequence
	DSeq uint64 // consumer sequence
	Time int64  // Unix ns
}

func appendString(b []byte, s string) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// Append appends the encoded command to b.
func (c *ConsumerCreate) Append(b []byte) []byte {
	b = append(b, KindConsumerCreate)
	b = appendString(b, c.Name)
	b = binary.AppendVarint(b, c.Created)
	b = binary.AppendUvarint(b, uint64(len(c.Config)))
	return append(b, c.Config...)
}

// Append appends the encoded command to b.
func (c *ConsumerDelete) Append(b []byte) []byte {
	b = append(b, KindConsumerDelete)
	b = appendString(b, c.Name)
	return binary.AppendVarint(b, c.Created)
}

// Append appends the encoded command to b.
func (c *ConsumerDelivered) Append(b []byte) []byte {
	b = append(b, KindConsumerDelivered)
	b = appendString(b, c.Name)
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
	b = append(b, c.Kind)
	b = appendString(b, c.Name)
	b = binary.AppendUvarint(b, c.Rev)
	b = binary.AppendUvarint(b, c.Seq)
	b = binary.AppendUvarint(b, c.DSeq)
	return binary.AppendVarint(b, c.Time)
}

// consumerReader takes a command apart; after an error everything is zero.
type consumerReader struct {
	b   []byte
	err error
}

func (r *consumerReader) fail() {
	if r.err == nil {
		r.err = ErrConsumerCommand
	}
	r.b = nil
}

func (r *consumerReader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *consumerReader) varint() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *consumerReader) bytes() []byte {
	n := r.uvarint()
	if n > uint64(len(r.b)) {
		r.fail()
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *consumerReader) end() error {
	if r.err == nil && len(r.b) != 0 {
		return fmt.Errorf("%w: %d octets too many", ErrConsumerCommand, len(r.b))
	}
	return r.err
}

// begin checks the kind and returns a reader behind it.
func begin(b []byte, kinds ...byte) (consumerReader, error) {
	if len(b) == 0 {
		return consumerReader{}, fmt.Errorf("%w: empty", ErrConsumerCommand)
	}
	for _, k := range kinds {
		if b[0] == k {
			return consumerReader{b: b[1:]}, nil
		}
	}
	return consumerReader{}, fmt.Errorf("%w: unexpected kind %d", ErrConsumerCommand, b[0])
}

// ConsumerName returns the name of the consumer that the command concerns. It
// aliases b.
func ConsumerName(b []byte) ([]byte, error) {
	if len(b) == 0 || !IsConsumer(b[0]) {
		return nil, fmt.Errorf("%w: not a consumer command", ErrConsumerCommand)
	}
	r := consumerReader{b: b[1:]}
	name := r.bytes()
	return name, r.err
}

// Decode sets c to the command in b. Config aliases b.
func (c *ConsumerCreate) Decode(b []byte) error {
	r, err := begin(b, KindConsumerCreate)
	if err != nil {
		return err
	}
	*c = ConsumerCreate{Name: string(r.bytes()), Created: r.varint(), Config: r.bytes()}
	return r.end()
}

// Decode sets c to the command in b.
func (c *ConsumerDelete) Decode(b []byte) error {
	r, err := begin(b, KindConsumerDelete)
	if err != nil {
		return err
	}
	*c = ConsumerDelete{Name: string(r.bytes()), Created: r.varint()}
	return r.end()
}

// Decode sets c to the command in b, reusing Ranges.
func (c *ConsumerDelivered) Decode(b []byte) error {
	r, err := begin(b, KindConsumerDelivered)
	if err != nil {
		return err
	}
	c.Name, c.Rev, c.Time, c.DSeq = string(r.bytes()), r.uvarint(), r.varint(), r.uvarint()
	n := r.uvarint()
	if n > uint64(len(r.b)/3) { // a range takes three octets at least
		r.fail()
		n = 0
	}
	c.Ranges = c.Ranges[:0]
	prev, total := uint64(0), uint64(0)
	for range n {
		g := Range{First: prev + uint64(r.varint()), Count: r.uvarint(), Attempt: r.uvarint()}
		total += g.Count
		if r.err == nil && (g.Count == 0 || g.Attempt == 0 || g.First == 0 ||
			g.Count > math.MaxUint64-g.First || total < g.Count || total > math.MaxUint64-c.DSeq) {
			r.fail()
		}
		c.Ranges = append(c.Ranges, g)
		prev = g.First + g.Count
	}
	return r.end()
}

// Decode sets c to the command in b, which may be of any event's kind.
func (c *ConsumerEvent) Decode(b []byte) error {
	r, err := begin(b, KindConsumerAck, KindConsumerNak, KindConsumerProgress, KindConsumerTerm,
		KindConsumerExhausted, KindConsumerReset)
	if err != nil {
		return err
	}
	*c = ConsumerEvent{
		Kind: b[0], Name: string(r.bytes()), Rev: r.uvarint(),
		Seq: r.uvarint(), DSeq: r.uvarint(), Time: r.varint(),
	}
	return r.end()
}
