// Package command is the binary form of what state machines apply: the records
// of the write-ahead log. A record is a kind octet followed by the kind's
// fields: unsigned varints, and octet strings with their length as a varint
// before them. The last field of a record has no length; it goes to the end.
//
// Records are written for the life of a store: fields are never reordered or
// removed; new ones get a new kind.
package command

import (
	"encoding/binary"
	"errors"
	"fmt"

	"petiole/storage"
)

// Kind tells what a record is.
type Kind uint8

// Kinds. Consumer kinds (64 and up) are in consumer.go.
const (
	KindInvalid   Kind = 0
	KindPublish   Kind = 1  // stream: store a message
	KindDeleteMsg Kind = 2  // stream: remove one message
	KindPurge     Kind = 3  // stream: remove many messages
	KindSetConfig Kind = 4  // stream: new configuration
	KindExpire    Kind = 5  // stream: remove what has aged
	KindIngest    Kind = 6  // stream: append what an edge exported
	KindAcked     Kind = 7  // stream: no consumer needs this message
	KindBatch     Kind = 8  // stream: store several messages, or none
	KindLost      Kind = 9  // stream: a message is damaged and given up
	KindSkip      Kind = 10 // stream: leave out sequences that lost records may have had
	KindSweep     Kind = 11 // stream: look for messages that no consumer needs

	KindStreamCreate Kind = 32 // meta: a stream exists
	KindStreamDelete Kind = 33 // meta: a stream is gone

	// ConsumerKinds is the first kind of the consumers' commands.
	ConsumerKinds Kind = 64
)

// ErrMalformed says that a record cannot be decoded.
var ErrMalformed = errors.New("malformed command")

// KindOf returns the kind of an encoded command, KindInvalid for an empty one.
func KindOf(b []byte) Kind {
	if len(b) == 0 {
		return KindInvalid
	}
	return Kind(b[0])
}

// Messages returns how many sequences of its stream a record takes if nothing of
// it is refused. It looks at the beginning of b only: what AppendPublishHead
// appends is enough.
func Messages(b []byte) int {
	switch KindOf(b) {
	case KindPublish:
		return 1
	case KindBatch:
		r := newReader(b, KindBatch)
		return int(r.uint())
	case KindIngest:
		return ingested(b)
	}
	return 0
}

// Unknown is the error for a command of a kind that is not the group's that it
// is of. Checksums have proved it intact: a kind that this version does not have
// at all comes from one that knows more (storage.ErrFormat).
func Unknown(k Kind, group string) error {
	if k > KindSkip && k < KindStreamCreate || k > KindStreamDelete && k < ConsumerKinds || k >= kindConsumerEnd {
		return fmt.Errorf("a command in the log is of kind %d, which is none of %s: %w", k, group, storage.ErrFormat)
	}
	return fmt.Errorf("%w: kind %d is not %s", ErrMalformed, k, group)
}

func malformed(k Kind) error { return fmt.Errorf("%w of kind %d", ErrMalformed, k) }

// reader takes fields off an encoded command. After a failure every further
// field is empty and ok is false.
type reader struct {
	b  []byte
	ok bool
}

func newReader(b []byte, k Kind) reader {
	if KindOf(b) != k {
		return reader{}
	}
	return reader{b: b[1:], ok: true}
}

func (r *reader) uint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

// int reads a signed value that is rarely negative.
func (r *reader) int() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) bytes() []byte { return r.take(r.uint()) }

// take reads n octets.
func (r *reader) take(n uint64) []byte {
	if !r.ok || n > uint64(len(r.b)) {
		r.fail()
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) fixed(dst []byte) {
	if len(r.b) < len(dst) {
		r.fail()
		return
	}
	copy(dst, r.b)
	r.b = r.b[len(dst):]
}

func (r *reader) string() string { return string(r.bytes()) }

func (r *reader) fail() { r.b, r.ok = nil, false }

func appendBytes[T string | []byte](dst []byte, v T) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(v)))
	return append(dst, v...)
}

// Publish stores a message.
type Publish struct {
	Time    int64  // when the server received it, Unix nanoseconds
	Subject string // a copy
	// Steady is the same by a clock of the stream's that does not leap, which
	// tells how long a message id has been known. It is kept with a header only.
	Steady int64
	Header []byte // raw header block; nil if none; aliases the record
	Data   []byte // aliases the record
}

// AppendPublishHead appends everything of a Publish record but the header
// block and the data, which follow it as they are.
func AppendPublishHead[S string | []byte](dst []byte, time, steady int64, subject S, headerLen int) []byte {
	dst = append(dst, byte(KindPublish))
	dst = binary.AppendVarint(dst, time)
	dst = appendBytes(dst, subject)
	dst = binary.AppendUvarint(dst, uint64(headerLen))
	if headerLen > 0 {
		dst = binary.AppendVarint(dst, steady-time)
	}
	return dst
}

// AppendTo appends the whole record to dst.
func (c *Publish) AppendTo(dst []byte) []byte {
	dst = AppendPublishHead(dst, c.Time, c.Steady, c.Subject, len(c.Header))
	dst = append(dst, c.Header...)
	return append(dst, c.Data...)
}

// Decode reads a record; Header and Data alias b.
func (c *Publish) Decode(b []byte) error {
	r := newReader(b, KindPublish)
	c.Time = r.int()
	c.Subject = r.string()
	c.Steady, c.Header = 0, nil
	if n := r.uint(); n > 0 {
		c.Steady = c.Time + r.int()
		c.Header = r.take(n)
	}
	c.Data = r.b
	if !r.ok {
		return malformed(KindPublish)
	}
	return nil
}

// Batch stores several messages, or none of them.
type Batch struct {
	Msgs []Publish
}

// AppendTo appends the record to dst.
func (c *Batch) AppendTo(dst []byte) []byte {
	dst = append(dst, byte(KindBatch))
	dst = binary.AppendUvarint(dst, uint64(len(c.Msgs)))
	for i := range c.Msgs {
		dst = appendBytes(dst, c.Msgs[i].AppendTo(nil))
	}
	return dst
}

// Decode reads a record; headers and data alias b.
func (c *Batch) Decode(b []byte) error {
	r := newReader(b, KindBatch)
	n := r.uint()
	if !r.ok || n > uint64(len(r.b))/4 {
		return malformed(KindBatch)
	}
	c.Msgs = make([]Publish, n)
	for i := range c.Msgs {
		rec := r.bytes()
		if !r.ok {
			return malformed(KindBatch)
		}
		if err := c.Msgs[i].Decode(rec); err != nil {
			return err
		}
	}
	if len(r.b) != 0 {
		return malformed(KindBatch)
	}
	return nil
}

// DeleteMsg removes one message.
type DeleteMsg struct {
	Seq uint64
}

// AppendTo appends the record to dst.
func (c *DeleteMsg) AppendTo(dst []byte) []byte {
	return binary.AppendUvarint(append(dst, byte(KindDeleteMsg)), c.Seq)
}

// Decode reads a record.
func (c *DeleteMsg) Decode(b []byte) error {
	r := newReader(b, KindDeleteMsg)
	c.Seq = r.uint()
	if !r.ok {
		return malformed(KindDeleteMsg)
	}
	return nil
}

// Purge removes the messages that match Subject (all if empty) with sequences
// below Seq (all if 0), but the last Keep.
type Purge struct {
	Subject   string
	Seq, Keep uint64
}

// AppendTo appends the record to dst.
func (c *Purge) AppendTo(dst []byte) []byte {
	dst = append(dst, byte(KindPurge))
	dst = binary.AppendUvarint(dst, c.Seq)
	dst = binary.AppendUvarint(dst, c.Keep)
	return append(dst, c.Subject...)
}

// Decode reads a record.
func (c *Purge) Decode(b []byte) error {
	r := newReader(b, KindPurge)
	c.Seq = r.uint()
	c.Keep = r.uint()
	c.Subject = string(r.b)
	if !r.ok {
		return malformed(KindPurge)
	}
	return nil
}

// SetConfig replaces a stream's configuration.
type SetConfig struct {
	JSON []byte // api.StreamConfig; aliases the record after Decode
}

// AppendTo appends the record to dst.
func (c *SetConfig) AppendTo(dst []byte) []byte {
	return append(append(dst, byte(KindSetConfig)), c.JSON...)
}

// Decode reads a record.
func (c *SetConfig) Decode(b []byte) error {
	r := newReader(b, KindSetConfig)
	c.JSON = r.b
	if !r.ok {
		return malformed(KindSetConfig)
	}
	return nil
}

// Lost gives up a message that is damaged on disk: its sequence becomes a gap.
type Lost struct {
	Seq  uint64
	Time int64 // when it was found, Unix nanoseconds
}

// AppendTo appends the encoded command.
func (c *Lost) AppendTo(dst []byte) []byte {
	return binary.AppendVarint(binary.AppendUvarint(append(dst, byte(KindLost)), c.Seq), c.Time)
}

// Decode parses a record.
func (c *Lost) Decode(b []byte) error {
	r := newReader(b, KindLost)
	c.Seq = r.uint()
	c.Time = r.int()
	if !r.ok {
		return malformed(KindLost)
	}
	return nil
}

// Skip leaves out sequences that records lost out of the log may have had. It
// settles what is lost before it: whoever replays the log decides about that no
// more, but does as this says.
type Skip struct {
	To   uint64 // the last sequence, given out or left out
	More uint64 // beside To: how many are left out behind the last
	Time int64  // when that was decided, Unix nanoseconds
}

// AppendTo appends the record to dst.
func (c *Skip) AppendTo(dst []byte) []byte {
	dst = binary.AppendUvarint(append(dst, byte(KindSkip)), c.To)
	return binary.AppendVarint(binary.AppendUvarint(dst, c.More), c.Time)
}

// Decode reads a record.
func (c *Skip) Decode(b []byte) error {
	r := newReader(b, KindSkip)
	c.To = r.uint()
	c.More = r.uint()
	c.Time = r.int()
	if !r.ok {
		return malformed(KindSkip)
	}
	return nil
}

// Expire removes what has aged by Now: messages stored at or before Now minus
// the stream's maximum age, and messages whose own time to live has passed.
type Expire struct {
	Now int64 // Unix nanoseconds
}

// AppendTo appends the record to dst.
func (c *Expire) AppendTo(dst []byte) []byte {
	return binary.AppendVarint(append(dst, byte(KindExpire)), c.Now)
}

// Decode reads a record.
func (c *Expire) Decode(b []byte) error {
	r := newReader(b, KindExpire)
	c.Now = r.int()
	if !r.ok {
		return malformed(KindExpire)
	}
	return nil
}

// Acked removes a message that no consumer of a stream with interest or
// work-queue retention needs, where no logged acknowledgement says so.
type Acked struct {
	Seq uint64
}

// AppendTo appends the record to dst.
func (c *Acked) AppendTo(dst []byte) []byte {
	return binary.AppendUvarint(append(dst, byte(KindAcked)), c.Seq)
}

// Decode reads a record.
func (c *Acked) Decode(b []byte) error {
	r := newReader(b, KindAcked)
	c.Seq = r.uint()
	if !r.ok {
		return malformed(KindAcked)
	}
	return nil
}

// Sweep looks at the next messages of a stream, from where the sweep before has
// ended, and removes those that no consumer needs.
type Sweep struct {
	Max uint64 // how many messages it looks at
}

// AppendTo appends the record to dst.
func (c *Sweep) AppendTo(dst []byte) []byte {
	return binary.AppendUvarint(append(dst, byte(KindSweep)), c.Max)
}

// Decode reads a record.
func (c *Sweep) Decode(b []byte) error {
	r := newReader(b, KindSweep)
	c.Max = r.uint()
	if !r.ok {
		return malformed(KindSweep)
	}
	return nil
}

// StreamCreate brings a stream into being.
type StreamCreate struct {
	Group   uint64 // its group, never used before
	UID     [16]byte
	Created int64 // Unix nanoseconds
	Name    string
	Config  []byte // JSON of api.StreamConfig; aliases the record after Decode
}

// AppendTo appends the record to dst.
func (c *StreamCreate) AppendTo(dst []byte) []byte {
	dst = append(dst, byte(KindStreamCreate))
	dst = binary.AppendUvarint(dst, c.Group)
	dst = append(dst, c.UID[:]...)
	dst = binary.AppendVarint(dst, c.Created)
	dst = appendBytes(dst, c.Name)
	return append(dst, c.Config...)
}

// Decode reads a record.
func (c *StreamCreate) Decode(b []byte) error {
	r := newReader(b, KindStreamCreate)
	c.Group = r.uint()
	r.fixed(c.UID[:])
	c.Created = r.int()
	c.Name = r.string()
	c.Config = r.b
	if !r.ok {
		return malformed(KindStreamCreate)
	}
	return nil
}

// StreamDelete ends a stream.
type StreamDelete struct {
	Group uint64
}

// AppendTo appends the record to dst.
func (c *StreamDelete) AppendTo(dst []byte) []byte {
	return binary.AppendUvarint(append(dst, byte(KindStreamDelete)), c.Group)
}

// Decode reads a record.
func (c *StreamDelete) Decode(b []byte) error {
	r := newReader(b, KindStreamDelete)
	c.Group = r.uint()
	if !r.ok {
		return malformed(KindStreamDelete)
	}
	return nil
}
