package frame

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
	"pgregory.net/rapid"
)

// genBatch draws a batch and its builder.
func genBatch(t *rapid.T) (*Batch, *Builder) {
	var b Builder
	want := &Batch{
		Offer:       rapid.Uint32Range(1, math.MaxUint32).Draw(t, "offer"),
		Incarnation: rapid.Uint64Range(1, 1<<40).Draw(t, "incarnation"),
		Base:        rapid.Uint64Range(1, 1<<40).Draw(t, "base"),
	}
	want.First = want.Base + rapid.Uint64Range(0, 1<<40).Draw(t, "skip")
	copy(want.Prev[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "prev"))
	b.Reset(want.Offer, want.Incarnation, want.Base, want.First, want.Prev)
	bytesOf := rapid.SliceOfN(rapid.Byte(), 0, 200)
	n := rapid.IntRange(1, 30).Draw(t, "records")
	for range n {
		if rapid.IntRange(0, 4).Draw(t, "kind") == 0 {
			g := Gap{First: b.Through() + 1, Reason: GapReason(rapid.Byte().Draw(t, "reason"))}
			g.Last = g.First + rapid.Uint64Range(0, 1<<30).Draw(t, "run")
			b.Gap(g.Last, g.Reason)
			want.Gaps = append(want.Gaps, g)
			continue
		}
		m := Msg{
			Seq: b.Through() + 1, Time: rapid.Int64().Draw(t, "time"),
			Subject: rapid.SampledFrom([]string{"a", "a.b", "plant.line1.temperature", strings.Repeat("x", 300)}).Draw(t, "subject"),
			Header:  bytesOf.Draw(t, "header"), Data: bytesOf.Draw(t, "data"),
		}
		if len(m.Header) == 0 {
			m.Header = nil
		}
		if len(m.Data) == 0 {
			m.Data = nil
		}
		b.Msg(m.Time, m.Subject, m.Header, m.Data)
		want.Msgs = append(want.Msgs, m)
	}
	want.Through, want.Chain = b.Rung().Through, b.Rung().Chain
	return want, &b
}

func TestBatchRoundTrip(t *testing.T) {
	var d Decoder
	rapid.Check(t, func(t *rapid.T) {
		want, b := genBatch(t)
		wire := b.AppendFrames(nil, rapid.Bool().Draw(t, "compress"))
		r := NewReader(bytes.NewReader(wire), 0)
		typ, content, err := r.Next(nil)
		if err != nil || typ != TypeBatch {
			t.Fatalf("%v, %v", typ, err)
		}
		var got Batch
		if err := d.Batch(content, &got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(&got, want) {
			t.Fatalf("got %+v\nwant %+v", got, want)
		}
		if _, _, err := r.Next(nil); err != io.EOF {
			t.Fatalf("after the batch: %v", err)
		}
	})
}

// Whatever byte of a batch's content is changed, it is not taken for another
// batch of the same chain.
func TestBatchChangedIsRefused(t *testing.T) {
	var d Decoder
	rapid.Check(t, func(t *rapid.T) {
		want, b := genBatch(t)
		_, content, err := NewReader(bytes.NewReader(b.AppendFrames(nil, false)), 0).Next(nil)
		if err != nil {
			t.Fatal(err)
		}
		at := rapid.IntRange(0, len(content)-1).Draw(t, "at")
		content[at] ^= byte(rapid.IntRange(1, 255).Draw(t, "xor"))
		var got Batch
		if d.Batch(content, &got) != nil {
			return
		}
		// Only what the chain does not cover may differ.
		got.Offer, got.Incarnation, got.Base = want.Offer, want.Incarnation, want.Base
		for i := range got.Msgs {
			got.Msgs[i].Time = want.Msgs[i].Time
		}
		if !reflect.DeepEqual(&got, want) {
			t.Fatalf("changed batch passes: %+v\nwas %+v", got, want)
		}
	})
}

// Records take many times the memory of their bytes. A batch as large as the
// largest message must not be made of the smallest ones.
func TestBatchOfTooManyRecords(t *testing.T) {
	for _, c := range []struct {
		name string
		add  func(b *Builder)
	}{
		{"messages", func(b *Builder) { b.Msg(1, "s", nil, nil) }},
		{"gaps", func(b *Builder) { b.Gap(b.Through()+1, GapDeleted) }},
	} {
		var b Builder
		b.Reset(1, 1, 1, 1, Chain{})
		decode := func() error {
			_, content, err := NewReader(bytes.NewReader(b.AppendFrames(nil, true)), 1<<20).Next(nil)
			if err != nil {
				t.Fatal(err)
			}
			return new(Decoder).Batch(content, new(Batch))
		}
		for range MaxRecords {
			c.add(&b)
		}
		if err := decode(); err != nil {
			t.Errorf("%d %s: %v", MaxRecords, c.name, err)
		}
		c.add(&b)
		if err := decode(); !errors.Is(err, ErrMalformed) {
			t.Errorf("%d %s: %v", MaxRecords+1, c.name, err)
		}
	}
}

func TestFragments(t *testing.T) {
	content := make([]byte, 3*MaxPayload+17)
	for i := range content {
		content[i] = byte(i * i >> 3)
	}
	for _, compress := range []bool{false, true} {
		wire := Append(nil, TypeBatch, content, compress)
		for off := 0; off < len(wire); {
			n := int(binary.BigEndian.Uint32(wire[off:])) + HeaderSize
			if n > MaxFrame {
				t.Fatalf("frame of %d bytes", n)
			}
			off += n
		}
		typ, got, err := NewReader(bytes.NewReader(wire), len(content)).Next(nil)
		if err != nil || typ != TypeBatch || !bytes.Equal(got, content) {
			t.Fatalf("compress %v: %v, %d bytes, %v", compress, typ, len(got), err)
		}
		if _, _, err := NewReader(bytes.NewReader(wire), len(content)-1).Next(nil); !errors.Is(err, ErrTooLarge) {
			t.Errorf("beyond the limit: %v", err)
		}
		if _, _, err := NewReader(bytes.NewReader(wire[:len(wire)-1]), 1<<20).Next(nil); err != io.ErrUnexpectedEOF {
			t.Errorf("cut short: %v", err)
		}
	}
}

func TestReaderRefuses(t *testing.T) {
	head := func(n uint32, typ Type, flags byte, payload []byte) []byte {
		b := binary.BigEndian.AppendUint32(nil, n)
		b = append(b, byte(typ), flags)
		b = binary.BigEndian.AppendUint32(b, checksum(b, payload))
		return append(b, payload...)
	}
	bomb := s2.Encode(nil, make([]byte, 1<<20))
	ping := AppendPing(nil, 7)
	flipped := bytes.Clone(ping)
	flipped[len(flipped)-1] ^= 1
	for _, c := range []struct {
		name string
		wire []byte
		want error
	}{
		{"huge length", head(1<<32-1, TypeBatch, 0, nil), ErrTooLarge},
		{"length just beyond", head(MaxPayload+1, TypeBatch, 0, make([]byte, MaxPayload+1)), ErrTooLarge},
		{"checksum", flipped, ErrChecksum},
		{"unknown flags", head(1, TypePing, 0x80, []byte{1}), ErrMalformed},
		{"reserved compression", head(1, TypePing, FlagZstd, []byte{1}), ErrMalformed},
		{"unknown type", head(1, 0x21, 0, []byte{1}), ErrUnknownType},
		{"type zero", head(1, 0, 0, []byte{1}), ErrUnknownType},
		{"continuation of nothing", head(1, TypeContinue, 0, []byte{1}), ErrMalformed},
		{"other type in between", append(head(1, TypeBatch, FlagMore, []byte{1}), ping...), ErrMalformed},
		{"empty continuation", append(head(1, TypeBatch, FlagMore, []byte{1}), head(0, TypeContinue, FlagMore, nil)...), ErrMalformed},
		{"bomb", head(uint32(len(bomb)), TypeBatch, FlagS2, bomb), ErrTooLarge},
		{"not S2", head(3, TypeBatch, FlagS2, []byte{9, 9, 9}), ErrMalformed},
		{"end inside the head", ping[:5], io.ErrUnexpectedEOF},
		{"end after the head", ping[:HeaderSize], io.ErrUnexpectedEOF},
		{"nothing", nil, io.EOF},
	} {
		if _, _, err := NewReader(bytes.NewReader(c.wire), 1<<20).Next(nil); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	// What may be skipped is.
	wire := append(head(2, 0x90, FlagMore, []byte{1, 2}), head(1, TypeContinue, 0, []byte{3})...)
	typ, _, err := NewReader(bytes.NewReader(append(wire, ping...)), 100).Next(nil)
	if typ != TypePing || err != nil {
		t.Errorf("after an optional frame: %v, %v", typ, err)
	}
}

// endless is a stream of fragments without end.
type endless struct{ frame, left []byte }

func (e *endless) Read(p []byte) (int, error) {
	if len(e.left) == 0 {
		e.left = e.frame
	}
	n := copy(p, e.left)
	e.left = e.left[n:]
	return n, nil
}

func TestFragmentsWithoutEnd(t *testing.T) {
	first := Append(nil, TypeBatch, make([]byte, MaxPayload+1), false)
	cont := appendOne(nil, TypeContinue, FlagMore, make([]byte, 1000), false)
	r := NewReader(io.MultiReader(bytes.NewReader(first[:MaxFrame]), &endless{frame: cont}), 1<<20)
	_, buf, err := r.Next(nil)
	if !errors.Is(err, ErrTooLarge) || cap(buf) > 3<<20 {
		t.Errorf("%v with %d bytes held", err, cap(buf))
	}
}

func genString(t *rapid.T, name string) string {
	return rapid.StringN(0, 40, 100).Draw(t, name)
}

func genPosition(t *rapid.T) Position {
	p := Position{
		Incarnation: rapid.Uint64().Draw(t, "inc"), Through: rapid.Uint64().Draw(t, "through"),
		Gaps: rapid.Uint64().Draw(t, "gaps"), Msgs: rapid.Uint64().Draw(t, "msgs"),
	}
	copy(p.Chain[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "chain"))
	for range rapid.IntRange(0, MaxLadder).Draw(t, "rungs") {
		r := Rung{Through: rapid.Uint64().Draw(t, "rung")}
		r.Chain[rapid.IntRange(0, 15).Draw(t, "i")] = rapid.Byte().Draw(t, "c")
		p.Ladder = append(p.Ladder, r)
	}
	return p
}

func TestControlRoundTrips(t *testing.T) {
	next := func(t *rapid.T, wire []byte, want Type) []byte {
		typ, content, err := NewReader(bytes.NewReader(wire), 0).Next(nil)
		if err != nil || typ != want {
			t.Fatalf("%v instead of %v, %v", typ, want, err)
		}
		return content
	}
	same := func(t *rapid.T, got, want any, err error) {
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, %v\nwant %+v", got, err, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		h := Hello{
			MinVersion: rapid.Uint64().Draw(t, "min"), MaxVersion: rapid.Uint64().Draw(t, "max"), Features: rapid.Uint64().Draw(t, "f"),
			EdgeID: genString(t, "id"), Name: genString(t, "name"), Software: genString(t, "sw"),
			Auth: AuthKind(rapid.IntRange(0, 9).Draw(t, "auth")), User: genString(t, "user"), Password: genString(t, "pw"), NKey: genString(t, "nkey"),
			DeviceSig: []byte("signature"),
		}
		gh, err := DecodeHello(next(t, h.Append(nil), TypeHello))
		if !bytes.Equal(gh.Signed, h.AppendSigned(nil)) {
			t.Fatal("what is signed differs")
		}
		gh.Signed = nil
		same(t, gh, h, err)

		w := Welcome{Version: 1, Features: h.Features, HubID: genString(t, "hub"), Name: genString(t, "n"), Software: genString(t, "s"), MaxMessage: rapid.Uint64().Draw(t, "mm"), Window: 5}
		gw, err := DecodeWelcome(next(t, w.Append(nil), TypeWelcome))
		same(t, gw, w, err)

		o := Offer{ID: rapid.Uint32Range(1, math.MaxUint32).Draw(t, "oid"), Stream: genString(t, "st"), To: "T" + genString(t, "to"), UID: UID{1, 2}, Incarnation: 3, Base: 4, First: 5, Last: 6}
		g, err := DecodeOffer(next(t, o.Append(nil), TypeOffer))
		same(t, g, o, err)

		e := Error{Code: Code(rapid.Uint64().Draw(t, "code")), Offer: rapid.Uint32().Draw(t, "eo"), RetryAfter: rapid.Uint32().Draw(t, "ra"), Text: genString(t, "text")}
		ge, err := DecodeError(next(t, e.Append(nil), TypeError))
		same(t, ge, &e, err)

		a := Accept{Offer: o.ID, Known: rapid.Bool().Draw(t, "known"), Position: genPosition(t), Error: e}
		ga, err := DecodeAccept(next(t, a.Append(nil), TypeAccept))
		same(t, ga, a, err)

		id, p, err := DecodePosition(next(t, AppendPosition(nil, o.ID, &a.Position), TypePosition))
		same(t, p, a.Position, err)
		same(t, id, o.ID, nil)

		oid, err := DecodeOpen(next(t, AppendOpen(nil, o.ID), TypeOpen))
		same(t, oid, o.ID, err)

		ping := next(t, AppendPing(nil, h.Features), TypePing)
		same(t, next(t, AppendPong(nil, ping), TypePong), ping, nil)
	})
}

// A hub keeps the names of what it is offered.
func TestLongNames(t *testing.T) {
	for _, n := range []int{MaxName, MaxName + 1} {
		for _, o := range []Offer{{ID: 1, Stream: strings.Repeat("s", n), To: "T"}, {ID: 1, Stream: "S", To: strings.Repeat("t", n)}} {
			_, content, err := NewReader(bytes.NewReader(o.Append(nil)), 0).Next(nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := DecodeOffer(content); (err == nil) != (n <= MaxName) || err != nil && !errors.Is(err, ErrMalformed) {
				t.Errorf("names of %d octets: %v", n, err)
			}
		}
	}
}

// The chain is part of the protocol: it must never change.
func TestChainIsFixed(t *testing.T) {
	var c Chainer
	uid := UID{0: 0xaa, 15: 0x55}
	seed := Seed(uid, 3, 1000)
	msg := c.Msg(seed, 1000, "plant.line1", []byte("NATS/1.0\r\n\r\n"), []byte("21.5"))
	gap := c.Gap(msg, Gap{First: 1001, Last: 1005, Reason: GapRemoved})
	large := c.Msg(gap, 1006, "plant.line1", nil, make([]byte, 10_000))
	for _, v := range []struct {
		name string
		got  Chain
		want string
	}{
		{"seed", seed, "1c69753798dfd0160b0cc0c7143066db"}, {"message", msg, "d4dc890922a42afe314ad584a147bcbb"}, {"gap", gap, "91b9eacbbe39233a08c8169d5d987283"}, {"large", large, "ee5ac030d81eae40095b477cfbcf5b37"},
	} {
		if v.got.String() != v.want {
			t.Errorf("%s is %v, want %v", v.name, v.got, v.want)
		}
	}
	// Both ways of hashing are the same one.
	data := make([]byte, small)
	one := c.Msg(seed, 1, "s", nil, data)
	data = append(data, 0)
	two := c.Msg(seed, 1, "s", data[:1], data[1:])
	if one == two {
		t.Error("moving a byte between header and data does not show")
	}
}

func FuzzReader(f *testing.F) {
	var b Builder
	b.Reset(1, 1, 1, 1, Chain{})
	b.Msg(5, "a.b", []byte("NATS/1.0\r\n\r\n"), []byte("data"))
	b.Gap(9, GapDeleted)
	b.Msg(6, "a.b", nil, bytes.Repeat([]byte("z"), 2000))
	f.Add(b.AppendFrames(nil, true))
	f.Add(b.AppendFrames(nil, false))
	f.Add(Append(nil, TypeBatch, make([]byte, 2*MaxPayload), true))
	h := Hello{MaxVersion: 1, EdgeID: "U1", Auth: AuthPassword, User: "u", Password: "p", DeviceSig: []byte("s")}
	f.Add(h.Append(nil))
	p := Position{Incarnation: 1, Through: 2, Ladder: []Rung{{Through: 2}}}
	f.Add(AppendPosition(AppendPing(nil, 1), 1, &p))
	a := Accept{Offer: 1, Known: true, Position: p}
	f.Add(a.Append((&Error{Code: 1, Text: "x"}).Append(nil)))
	const limit = 1 << 18
	f.Fuzz(func(t *testing.T, wire []byte) {
		r := NewReader(bytes.NewReader(wire), limit)
		var d Decoder
		var batch Batch
		for {
			typ, content, err := r.Next(nil)
			if err != nil {
				return
			}
			if len(content) > limit || cap(content) > 3*limit {
				t.Fatalf("%d bytes in %d", len(content), cap(content))
			}
			switch typ {
			case TypeHello:
				DecodeHello(content)
			case TypeWelcome:
				DecodeWelcome(content)
			case TypeOffer:
				DecodeOffer(content)
			case TypeAccept:
				DecodeAccept(content)
			case TypeOpen:
				DecodeOpen(content)
			case TypeBatch:
				if d.Batch(content, &batch) == nil {
					checkBatch(t, &batch)
				}
			case TypePosition:
				DecodePosition(content)
			case TypeError:
				DecodeError(content)
			}
		}
	})
}

// FuzzBatch gets past the checksum.
func FuzzBatch(f *testing.F) {
	var b Builder
	b.Reset(1, 1, 1, 1, Chain{})
	b.Msg(5, "a.b", []byte("NATS/1.0\r\n\r\n"), []byte("data"))
	b.Gap(9, GapDeleted)
	_, content, _ := NewReader(bytes.NewReader(b.AppendFrames(nil, false)), 0).Next(nil)
	f.Add(content)
	f.Fuzz(func(t *testing.T, content []byte) {
		var d Decoder
		var batch Batch
		if d.Batch(content, &batch) == nil {
			checkBatch(t, &batch)
		}
	})
}

// checkBatch verifies what a decoded batch promises.
func checkBatch(t *testing.T, b *Batch) {
	t.Helper()
	next, g := b.First, 0
	for _, m := range b.Msgs {
		for g < len(b.Gaps) && b.Gaps[g].First == next {
			next = b.Gaps[g].Last + 1
			g++
		}
		if m.Seq != next || m.Subject == "" {
			t.Fatalf("message %d where %d has to be", m.Seq, next)
		}
		next++
	}
	for ; g < len(b.Gaps) && b.Gaps[g].First == next; g++ {
		next = b.Gaps[g].Last + 1
	}
	if g != len(b.Gaps) || next != b.Through+1 {
		t.Fatalf("covers up to %d of %d", next-1, b.Through)
	}
}

func BenchmarkBatch(b *testing.B) {
	data := bytes.Repeat([]byte("0123456789abcdef"), 8)
	var bld Builder
	var d Decoder
	var batch Batch
	var wire, content []byte
	msgs := 0
	for b.Loop() {
		bld.Reset(1, 1, 1, 1, Chain{})
		for bld.Fits(len(data) + 20) {
			bld.Msg(int64(msgs), "plant.line1.temperatur", nil, data)
			msgs++
		}
		wire = bld.AppendFrames(wire[:0], true)
		var err error
		if _, content, err = NewReader(bytes.NewReader(wire), 0).Next(content); err != nil {
			b.Fatal(err)
		}
		if err := d.Batch(content, &batch); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(msgs)/b.Elapsed().Seconds(), "msgs/s")
}
