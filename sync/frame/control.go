package frame

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// AuthKind says how an edge proves that it may use the hub, beside the proof
// that it owns its device key.
type AuthKind uint8

// Kinds of authentication.
const (
	AuthDevice   AuthKind = 0 // by the device key alone
	AuthPassword AuthKind = 1 // user and password
	AuthNKey     AuthKind = 2 // a user nkey that signs the connection's secret
)

// Hello is the edge's first frame.
type Hello struct {
	MinVersion, MaxVersion uint64
	Features               uint64
	EdgeID                 string // public device nkey ("U…")
	Name                   string // server name
	Software               string // version of the program, for display
	Auth                   AuthKind
	User, Password         string // AuthPassword
	NKey                   string // AuthNKey: public user nkey

	// Signed is the encoded form of all the fields above, which the signatures
	// cover; set by decoding, aliasing the content.
	Signed []byte
	// DeviceSig and NKeySig are signatures of SigningInput by the device key
	// and by NKey.
	DeviceSig, NKeySig []byte
}

// AppendSigned appends the part of h that signatures cover.
func (h *Hello) AppendSigned(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, h.MinVersion)
	dst = binary.AppendUvarint(dst, h.MaxVersion)
	dst = binary.AppendUvarint(dst, h.Features)
	dst = appendString(dst, h.EdgeID)
	dst = appendString(dst, h.Name)
	dst = appendString(dst, h.Software)
	dst = append(dst, byte(h.Auth))
	dst = appendString(dst, h.User)
	dst = appendString(dst, h.Password)
	return appendString(dst, h.NKey)
}

// SigningInput returns what an edge signs: the secret exported from the TLS
// connection and a digest of the hello's fields. A signature is thus worth
// nothing on any other connection, nor with any other field.
func SigningInput(exporter, signed []byte) []byte {
	sum := sha256.Sum256(signed)
	b := append([]byte("petiole link v1 hello\x00"), exporter...)
	return append(b, sum[:]...)
}

// Append appends h as a frame. Signed is computed, not used.
func (h *Hello) Append(dst []byte) []byte {
	signed := h.AppendSigned(nil)
	c := binary.AppendUvarint(nil, uint64(len(signed)))
	c = append(c, signed...)
	c = appendString(c, string(h.DeviceSig))
	c = appendString(c, string(h.NKeySig))
	return Append(dst, TypeHello, c, false)
}

// DecodeHello decodes a hello's content. Fields of later versions at the end
// of the signed part are ignored, as they are in every control frame.
func DecodeHello(content []byte) (Hello, error) {
	out := input{b: content}
	h := Hello{Signed: out.bytes()}
	h.DeviceSig, h.NKeySig = out.bytes(), out.bytes()
	in := input{b: h.Signed}
	h.MinVersion, h.MaxVersion, h.Features = in.uvarint(), in.uvarint(), in.uvarint()
	h.EdgeID, h.Name, h.Software = in.string(), in.string(), in.string()
	h.Auth = AuthKind(in.byte())
	h.User, h.Password, h.NKey = in.string(), in.string(), in.string()
	if in.bad || out.bad {
		return Hello{}, fmt.Errorf("hello: %w", ErrMalformed)
	}
	return h, nil
}

// Welcome is the hub's answer to Hello.
type Welcome struct {
	Version    uint64 // the version both speak from here on
	Features   uint64 // features both have
	HubID      string
	Name       string
	Software   string
	MaxMessage uint64 // largest message taken, in bytes
	Window     uint64 // bytes an export should have in flight at most; 0: as the edge likes
}

// Append appends w as a frame.
func (w *Welcome) Append(dst []byte) []byte {
	c := binary.AppendUvarint(nil, w.Version)
	c = binary.AppendUvarint(c, w.Features)
	c = appendString(c, w.HubID)
	c = appendString(c, w.Name)
	c = appendString(c, w.Software)
	c = binary.AppendUvarint(c, w.MaxMessage)
	c = binary.AppendUvarint(c, w.Window)
	return Append(dst, TypeWelcome, c, false)
}

// DecodeWelcome decodes a welcome's content.
func DecodeWelcome(content []byte) (Welcome, error) {
	in := input{b: content}
	w := Welcome{
		Version: in.uvarint(), Features: in.uvarint(),
		HubID: in.string(), Name: in.string(), Software: in.string(),
		MaxMessage: in.uvarint(), Window: in.uvarint(),
	}
	if in.bad {
		return Welcome{}, fmt.Errorf("welcome: %w", ErrMalformed)
	}
	return w, nil
}

// Offer proposes an export. IDs are chosen by the edge, from 1, and never used
// twice on a connection; an export that has to start over is offered anew.
type Offer struct {
	ID          uint32
	Stream      string // the edge's stream, at most MaxName octets
	To          string // the hub's stream, likewise
	UID         UID
	Incarnation uint64
	Base        uint64
	First, Last uint64 // what the edge holds, for display
}

// MaxName is the longest name of a stream, in octets.
const MaxName = 255

// Append appends o as a frame.
func (o *Offer) Append(dst []byte) []byte {
	c := binary.AppendUvarint(nil, uint64(o.ID))
	c = appendString(c, o.Stream)
	c = appendString(c, o.To)
	c = append(c, o.UID[:]...)
	c = binary.AppendUvarint(c, o.Incarnation)
	c = binary.AppendUvarint(c, o.Base)
	c = binary.AppendUvarint(c, o.First)
	c = binary.AppendUvarint(c, o.Last)
	return Append(dst, TypeOffer, c, false)
}

// DecodeOffer decodes an offer's content.
func DecodeOffer(content []byte) (Offer, error) {
	in := input{b: content}
	id := in.uvarint()
	o := Offer{ID: uint32(id), Stream: in.string(), To: in.string()}
	copy(o.UID[:], in.take(16))
	o.Incarnation, o.Base, o.First, o.Last = in.uvarint(), in.uvarint(), in.uvarint(), in.uvarint()
	if in.bad || id == 0 || id > 1<<32-1 || o.To == "" || len(o.To) > MaxName || len(o.Stream) > MaxName {
		return Offer{}, fmt.Errorf("offer: %w", ErrMalformed)
	}
	return o, nil
}

// Position is how far an export has come at the hub. The hub stores it in one
// apply with the messages.
type Position struct {
	Incarnation uint64
	Through     uint64 // every sequence up to here is stored, or known as a gap
	Chain       Chain  // at Through
	Ladder      []Rung // the last batch ends, oldest first, Through last
	Gaps        uint64 // sequences that arrived as gaps so far
	Msgs        uint64 // messages that arrived so far
}

// MaxLadder is the most rungs that a position carries.
const MaxLadder = 64

func appendPosition(c []byte, p *Position) []byte {
	c = binary.AppendUvarint(c, p.Incarnation)
	c = binary.AppendUvarint(c, p.Through)
	c = append(c, p.Chain[:]...)
	c = binary.AppendUvarint(c, p.Gaps)
	c = binary.AppendUvarint(c, p.Msgs)
	ladder := p.Ladder[max(0, len(p.Ladder)-MaxLadder):]
	c = binary.AppendUvarint(c, uint64(len(ladder)))
	for _, r := range ladder {
		c = binary.AppendUvarint(c, r.Through)
		c = append(c, r.Chain[:]...)
	}
	return c
}

func (in *input) position() Position {
	p := Position{Incarnation: in.uvarint(), Through: in.uvarint()}
	copy(p.Chain[:], in.take(16))
	p.Gaps, p.Msgs = in.uvarint(), in.uvarint()
	n := in.uvarint()
	if n > MaxLadder {
		in.fail()
		return p
	}
	for ; n > 0 && !in.bad; n-- {
		r := Rung{Through: in.uvarint()}
		copy(r.Chain[:], in.take(16))
		p.Ladder = append(p.Ladder, r)
	}
	return p
}

// Accept answers an offer: the export may start, from Position if the hub has
// one; or Error.Code says why not.
type Accept struct {
	Offer    uint32
	Known    bool // the hub has a position
	Position Position
	Error    Error // Code is CodeNone if accepted
}

// Append appends a as a frame.
func (a *Accept) Append(dst []byte) []byte {
	c := binary.AppendUvarint(nil, uint64(a.Offer))
	c = appendBool(c, a.Known)
	c = appendPosition(c, &a.Position)
	c = appendError(c, &a.Error)
	return Append(dst, TypeAccept, c, false)
}

// DecodeAccept decodes an accept's content.
func DecodeAccept(content []byte) (Accept, error) {
	in := input{b: content}
	id := in.uvarint()
	a := Accept{Offer: uint32(id), Known: in.byte() != 0, Position: in.position(), Error: in.error()}
	if in.bad || id == 0 || id > 1<<32-1 {
		return Accept{}, fmt.Errorf("accept: %w", ErrMalformed)
	}
	return a, nil
}

// AppendOpen appends the first frame of an export stream.
func AppendOpen(dst []byte, offer uint32) []byte {
	return Append(dst, TypeOpen, binary.AppendUvarint(nil, uint64(offer)), false)
}

// DecodeOpen returns the offer that an export stream belongs to.
func DecodeOpen(content []byte) (uint32, error) {
	in := input{b: content}
	id := in.uvarint()
	if in.bad || id == 0 || id > 1<<32-1 {
		return 0, fmt.Errorf("open: %w", ErrMalformed)
	}
	return uint32(id), nil
}

// AppendPosition appends an acknowledgement of the offer up to p.
func AppendPosition(dst []byte, offer uint32, p *Position) []byte {
	c := binary.AppendUvarint(nil, uint64(offer))
	return Append(dst, TypePosition, appendPosition(c, p), false)
}

// DecodePosition decodes an acknowledgement.
func DecodePosition(content []byte) (uint32, Position, error) {
	in := input{b: content}
	id := in.uvarint()
	p := in.position()
	if in.bad || id == 0 || id > 1<<32-1 {
		return 0, Position{}, fmt.Errorf("position: %w", ErrMalformed)
	}
	return uint32(id), p, nil
}

// Code classifies failures. It is also the QUIC application error code with
// which a connection is closed.
type Code uint64

// Codes of failures.
const (
	CodeNone       Code = 0  // no failure: closed in peace
	CodeProtocol   Code = 1  // frames that break the format or their order
	CodeTooLarge   Code = 2  // a frame, message or hello beyond the limits
	CodeVersion    Code = 3  // no common protocol version
	CodeAuth       Code = 4  // unknown user, wrong password, unknown or unproven nkey
	CodeDenied     Code = 5  // the edge may not write this stream
	CodeSuperseded Code = 6  // a newer connection of the same edge id took over
	CodeShutdown   Code = 7  // the peer is going away
	CodeStale      Code = 8  // the hub has seen a later incarnation
	CodeOrder      Code = 9  // a batch that does not follow on the position
	CodeDiverged   Code = 10 // a batch whose chain does not follow on the position
	CodeStorage    Code = 11 // the hub cannot store: full, or failed
	CodeBusy       Code = 12 // the hub has too much to do
	CodeInternal   Code = 13 // the peer failed otherwise
	CodeTarget     Code = 14 // the hub's stream cannot take an export
	CodeTimeout    Code = 15 // the peer did not speak in time
)

var codeNames = [...]string{
	"none", "protocol", "too-large", "version", "auth", "denied", "superseded",
	"shutdown", "stale", "order", "diverged", "storage", "busy", "internal",
	"target", "timeout",
}

func (c Code) String() string {
	if c < Code(len(codeNames)) {
		return codeNames[c]
	}
	return fmt.Sprintf("code %d", uint64(c))
}

// Error is a failure told to the peer. Text names the cause, and the remedy if
// there is one; it is shown to users.
type Error struct {
	Code       Code
	Offer      uint32 // the offer that failed; 0: the connection
	RetryAfter uint32 // seconds after which to try again at the earliest; 0: as usual
	Text       string
}

func (e *Error) Error() string {
	if e.Code == CodeShutdown || e.Code == CodeOrder { // the text says it, and what comes of it
		return e.Text
	}
	return fmt.Sprintf("%s (%v)", e.Text, e.Code)
}

// maxText bounds an error's text on the wire.
const maxText = 1024

func appendError(c []byte, e *Error) []byte {
	c = binary.AppendUvarint(c, uint64(e.Code))
	c = binary.AppendUvarint(c, uint64(e.Offer))
	c = binary.AppendUvarint(c, uint64(e.RetryAfter))
	return appendString(c, e.Text[:min(len(e.Text), maxText)])
}

func (in *input) error() Error {
	code, offer, retry := in.uvarint(), in.uvarint(), in.uvarint()
	text := in.bytes()
	if offer > 1<<32-1 || retry > 1<<32-1 || len(text) > maxText {
		in.fail()
	}
	return Error{Code: Code(code), Offer: uint32(offer), RetryAfter: uint32(retry), Text: string(text)}
}

// Append appends e as a frame.
func (e *Error) Append(dst []byte) []byte {
	return Append(dst, TypeError, appendError(nil, e), false)
}

// DecodeError decodes an error's content.
func DecodeError(content []byte) (*Error, error) {
	in := input{b: content}
	e := in.error()
	if in.bad {
		return nil, fmt.Errorf("error frame: %w", ErrMalformed)
	}
	return &e, nil
}

// PingSize is the payload of a ping. It makes the packet that carries it large
// enough for a restarted hub to answer with a stateless reset (RFC 9000,
// section 10.3), so that the edge learns of the restart at once.
const PingSize = 40

// AppendPing appends a ping that carries a number of the sender's choice.
func AppendPing(dst []byte, n uint64) []byte {
	var p [PingSize]byte
	binary.BigEndian.PutUint64(p[:], n)
	return Append(dst, TypePing, p[:], false)
}

// AppendPong appends the answer to a ping with that content.
func AppendPong(dst []byte, content []byte) []byte {
	return Append(dst, TypePong, content[:min(len(content), PingSize)], false)
}

func appendString(c []byte, s string) []byte {
	return append(binary.AppendUvarint(c, uint64(len(s))), s...)
}

func appendBool(c []byte, v bool) []byte {
	if v {
		return append(c, 1)
	}
	return append(c, 0)
}
