// Package frame is the codec of the leaf link: how an edge and a hub put what
// they say to each other into bytes, and the hash chain that proves that both
// hold the same messages. It does no I/O of its own beyond reading from an
// [io.Reader], holds no state between calls and trusts nothing it decodes.
//
// # Frame
//
// Everything on a link is a frame of at most [MaxFrame] bytes. All fixed-width
// integers are big-endian.
//
//	 0               4      5      6               10
//	┌───────────────┬──────┬──────┬───────────────┬───────────────────┐
//	│ length uint32 │ type │ flags│ crc32c uint32 │ payload           │
//	└───────────────┴──────┴──────┴───────────────┴───────────────────┘
//	  payload bytes   Type   Flag*  Castagnoli, over
//	  on the wire                   bytes 0..5 and the payload
//
// With [FlagS2] the payload is one S2 block that expands to at most
// [MaxPayload] bytes. With [FlagMore] the frame is not the end of its content:
// frames of type [TypeContinue] follow directly, each with at least one byte,
// all but the last with FlagMore; the receiver joins the (expanded) payloads
// under a limit. Types from 0x80 on may be skipped by who does not know them;
// any other unknown type is an error.
//
// # Streams of a connection
//
// The edge opens one bidirectional stream, the control stream, and sends
// Hello and an Offer per export. The hub answers with Welcome and an Accept per
// Offer. For each accepted export the edge opens one unidirectional stream,
// starts it with Open and fills it with Batch frames; the hub acknowledges on
// the control stream with Position frames, once what they tell is durable.
// Ping and Pong run on the control stream, so no batch ever delays them.
//
//	edge                                 hub
//	  │ control: Hello Offer Offer ───────►│
//	  │◄─── control: Welcome Accept Accept │   positions of both exports
//	  │ export 1: Open Batch Batch … ─────►│
//	  │ export 2: Open Batch Batch … ─────►│   durable apply, in order
//	  │◄──────── control: Position … Pong  │
package frame

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/klauspost/compress/s2"
)

// Limits of one frame, in bytes.
const (
	// HeaderSize is the length of the fixed part of a frame.
	HeaderSize = 10
	// MaxFrame is the largest frame on the wire.
	MaxFrame = 64 << 10
	// MaxPayload is the most a frame carries, compressed or not.
	MaxPayload = MaxFrame - HeaderSize
)

// Version is the highest version of the protocol that this package speaks;
// MinVersion is the lowest.
const (
	Version    = 1
	MinVersion = 1
)

// ALPN is the name of the protocol in the TLS handshake.
const ALPN = "petiole/1"

// ExporterLabel is the label under which both ends derive the secret that
// binds credentials to their TLS connection (RFC 8446, section 7.5; RFC 9266
// for the idea).
const ExporterLabel = "EXPORTER-petiole-link-v1"

// Feature bits, exchanged in Hello and Welcome. A feature is used if both ends
// set its bit. Bits that are unknown are ignored.
const (
	// FeatureS2 allows frames compressed with S2.
	FeatureS2 uint64 = 1 << 0
	// FeatureZstd is reserved for frames compressed with Zstandard.
	FeatureZstd uint64 = 1 << 1
	// FeatureLive is reserved for subjects imported and exported live,
	// without a stream; frame types 0x20 to 0x2f belong to it.
	FeatureLive uint64 = 1 << 2
	// FeatureWindow is reserved for windows that the hub sizes while the link
	// runs; frame types 0x30 to 0x37 belong to it.
	FeatureWindow uint64 = 1 << 3
)

// Type says what a frame holds.
type Type uint8

// Frame types. 0x20 to 0x2f are reserved for live subjects, 0x30 to 0x37 for
// window control, 0x38 to 0x3f for other carriers.
const (
	TypeHello    Type = 1  // edge → hub, control: who I am; the first frame
	TypeWelcome  Type = 2  // hub → edge, control: who you reached
	TypeOffer    Type = 3  // edge → hub, control: a stream I would export
	TypeAccept   Type = 4  // hub → edge, control: where that export stands, or why not
	TypeOpen     Type = 5  // edge → hub, export stream: which offer; its first frame
	TypeBatch    Type = 6  // edge → hub, export stream: messages and gaps
	TypeContinue Type = 7  // either: more of the frame before
	TypePosition Type = 8  // hub → edge, control: durable up to here
	TypePing     Type = 9  // either, control: answer with Pong and the same payload
	TypePong     Type = 10 // either, control
	TypeError    Type = 11 // either, control: a typed failure
)

// skippable is the first type that may be skipped if unknown.
const skippable Type = 0x80

func (t Type) known() bool { return t >= TypeHello && t <= TypeError }

var typeNames = [...]string{
	"", "hello", "welcome", "offer", "accept", "open", "batch", "continue",
	"position", "ping", "pong", "error",
}

func (t Type) String() string {
	if t.known() {
		return typeNames[t]
	}
	return fmt.Sprintf("type %#02x", uint8(t))
}

// Flags of a frame. Unknown flags are an error.
const (
	// FlagS2 says that the payload is an S2 block.
	FlagS2 uint8 = 1 << 0
	// FlagZstd is reserved.
	FlagZstd uint8 = 1 << 1
	// FlagMore says that TypeContinue frames follow.
	FlagMore uint8 = 1 << 2

	knownFlags = FlagS2 | FlagMore
)

// Errors of decoding. They are wrapped with what was being decoded; test with
// errors.Is. After any of them the byte stream has no meaning any more.
var (
	// ErrChecksum says that a frame's CRC does not match its bytes.
	ErrChecksum = errors.New("frame checksum does not match")
	// ErrTooLarge says that a frame or what frames add up to exceeds a limit.
	ErrTooLarge = errors.New("frame exceeds the size limit")
	// ErrMalformed says that bytes do not follow the format.
	ErrMalformed = errors.New("malformed frame")
	// ErrUnknownType says that a frame has a type that must be understood and
	// is not.
	ErrUnknownType = errors.New("unknown frame type")
	// ErrChain says that a batch's chain does not follow from its contents.
	ErrChain = errors.New("batch chain does not match its contents")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(head, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(head, castagnoli), castagnoli, payload)
}

// minCompress is the payload size below which compression is not tried.
const minCompress = 512

// Append appends content as one frame of type t, or as many as it takes, to
// dst and returns the result. With compress set, payloads are compressed where
// that makes them smaller.
func Append(dst []byte, t Type, content []byte, compress bool) []byte {
	for {
		n := min(len(content), MaxPayload)
		var flags uint8
		if n < len(content) {
			flags |= FlagMore
		}
		dst = appendOne(dst, t, flags, content[:n], compress)
		content = content[n:]
		if len(content) == 0 {
			return dst
		}
		t = TypeContinue
	}
}

func appendOne(dst []byte, t Type, flags uint8, payload []byte, compress bool) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, HeaderSize)...)
	if compress && len(payload) >= minCompress {
		if need := s2.MaxEncodedLen(len(payload)); cap(dst)-len(dst) < need {
			grown := make([]byte, len(dst), len(dst)+need+len(payload))
			copy(grown, dst)
			dst = grown
		}
		room := dst[len(dst):cap(dst)]
		enc := s2.Encode(room, payload)
		// Less than one part in sixteen is not worth expanding at the hub.
		if len(enc) < len(payload)-len(payload)/16 {
			dst = dst[:len(dst)+len(enc)]
			flags |= FlagS2
		}
	}
	if flags&FlagS2 == 0 {
		dst = append(dst, payload...)
	}
	head := dst[at : at+HeaderSize]
	body := dst[at+HeaderSize:]
	binary.BigEndian.PutUint32(head, uint32(len(body)))
	head[4] = byte(t)
	head[5] = flags
	binary.BigEndian.PutUint32(head[6:], checksum(head[:6], body))
	return dst
}

// Reader reads frames from a byte stream. It is not for concurrent use.
type Reader struct {
	// More, if set, is called before each further frame of content that needs
	// more than one; its error ends the reading.
	More func() error

	r     *bufio.Reader
	limit int
	wire  []byte // a compressed payload
	head  [HeaderSize]byte
}

// NewReader returns a reader of r that refuses content of more than limit
// bytes (0: [MaxPayload], that is no continuation). It never holds more than
// limit and two frames.
func NewReader(r io.Reader, limit int) *Reader {
	if limit <= 0 {
		limit = MaxPayload
	}
	return &Reader{r: bufio.NewReaderSize(r, 32<<10), limit: limit}
}

// SetLimit changes the limit for what is read next.
func (r *Reader) SetLimit(limit int) { r.limit = limit }

// Next returns the next frame's type and its whole content, appended to
// buf[:0]; the content is the caller's. It returns io.EOF at a clean end and
// io.ErrUnexpectedEOF in the middle of content.
func (r *Reader) Next(buf []byte) (Type, []byte, error) {
	for {
		t, flags, buf, err := r.one(buf[:0], true)
		if err != nil {
			return 0, buf, err
		}
		if t == TypeContinue {
			return 0, buf, fmt.Errorf("continuation of nothing: %w", ErrMalformed)
		}
		skip := !t.known()
		if skip && t < skippable {
			return 0, buf, fmt.Errorf("%v: %w", t, ErrUnknownType)
		}
		for flags&FlagMore != 0 {
			if r.More != nil {
				if err := r.More(); err != nil {
					return 0, buf, err
				}
			}
			if skip {
				buf = buf[:0]
			}
			var ct Type
			before := len(buf)
			ct, flags, buf, err = r.one(buf, false)
			if err != nil {
				return 0, buf, err
			}
			if ct != TypeContinue || len(buf) == before {
				return 0, buf, fmt.Errorf("%v where more of %v has to follow: %w", ct, t, ErrMalformed)
			}
		}
		if !skip {
			return t, buf, nil
		}
	}
}

// one reads one frame and appends its expanded payload to buf.
func (r *Reader) one(buf []byte, first bool) (Type, uint8, []byte, error) {
	head := r.head[:]
	if _, err := io.ReadFull(r.r, head); err != nil {
		if err == io.EOF && !first {
			err = io.ErrUnexpectedEOF
		}
		return 0, 0, buf, err
	}
	n := int64(binary.BigEndian.Uint32(head))
	t, flags, sum := Type(head[4]), head[5], binary.BigEndian.Uint32(head[6:])
	if n > MaxPayload {
		return 0, 0, buf, fmt.Errorf("%v of %d bytes: %w", t, n, ErrTooLarge)
	}
	if flags&^knownFlags != 0 {
		return 0, 0, buf, fmt.Errorf("%v with flags %#02x: %w", t, flags, ErrMalformed)
	}
	if flags&FlagS2 == 0 {
		if len(buf)+int(n) > r.limit {
			return 0, 0, buf, fmt.Errorf("%v of more than %d bytes: %w", t, r.limit, ErrTooLarge)
		}
		at := len(buf)
		buf = grow(buf, int(n))
		if err := r.fill(buf[at:]); err != nil {
			return 0, 0, buf, err
		}
		if checksum(head[:6], buf[at:]) != sum {
			return 0, 0, buf, fmt.Errorf("%v: %w", t, ErrChecksum)
		}
		return t, flags, buf, nil
	}
	r.wire = grow(r.wire[:0], int(n))
	if err := r.fill(r.wire); err != nil {
		return 0, 0, buf, err
	}
	if checksum(head[:6], r.wire) != sum {
		return 0, 0, buf, fmt.Errorf("%v: %w", t, ErrChecksum)
	}
	raw, err := s2.DecodedLen(r.wire)
	if err != nil {
		return 0, 0, buf, fmt.Errorf("%v: compressed payload: %w", t, ErrMalformed)
	}
	if raw > MaxPayload || len(buf)+raw > r.limit {
		return 0, 0, buf, fmt.Errorf("%v expands to %d bytes: %w", t, len(buf)+raw, ErrTooLarge)
	}
	at := len(buf)
	buf = grow(buf, raw)
	if _, err := s2.Decode(buf[at:], r.wire); err != nil {
		return 0, 0, buf, fmt.Errorf("%v: compressed payload: %w", t, ErrMalformed)
	}
	return t, flags, buf, nil
}

func (r *Reader) fill(p []byte) error {
	_, err := io.ReadFull(r.r, p)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// grow returns b longer by n bytes.
func grow(b []byte, n int) []byte {
	need := len(b) + n
	if need <= cap(b) {
		return b[:need]
	}
	c := max(need, min(2*cap(b), need+(1<<20)))
	nb := make([]byte, need, c)
	copy(nb, b)
	return nb
}
