package command

import (
	"bytes"
	"reflect"
	"testing"
)

// decoder is a command of any kind.
type decoder interface {
	AppendTo([]byte) []byte
	Decode([]byte) error
}

var samples = []decoder{
	&Publish{Time: 1700000000000000000, Steady: 1700000000000000042, Subject: "orders.new", Header: []byte("NATS/1.0\r\nA: b\r\n\r\n"), Data: []byte("x")},
	&Publish{Time: -1, Subject: "a", Data: []byte{}},
	&Batch{Msgs: []Publish{{Time: 1, Subject: "a", Data: []byte("x")}, {Time: 2, Subject: "b", Header: []byte("h"), Data: []byte{}}}},
	&DeleteMsg{Seq: 1 << 40},
	&Purge{Subject: "a.*", Seq: 7, Keep: 1},
	&SetConfig{JSON: []byte(`{"name":"S"}`)},
	&Expire{Now: 1700000000000000000},
	&Lost{Seq: 1 << 40, Time: 1700000000000000000},
	&Skip{To: 1 << 40, More: 1000, Time: 1700000000000000000},
	&Acked{Seq: 9},
	&Sweep{Max: 1000},
	&StreamCreate{Group: 2, UID: [16]byte{1, 2}, Created: 5, Name: "S", Config: []byte("{}")},
	&StreamDelete{Group: 2},
	&Ingest{
		Edge: "E", UID: [16]byte{3}, Incarnation: 1, Base: 1, First: 2, Through: 5, PrevChain: [16]byte{4}, Chain: [16]byte{5},
		Gaps: []Gap{{First: 3, Last: 4, Reason: GapDeleted}},
		Msgs: []IngestMsg{{Seq: 2, Time: 1, Subject: "a", Data: []byte("x")}, {Seq: 5, Time: 2, Subject: "b", Header: []byte("h"), Data: []byte{}}},
	},
}

// empty returns a command of the kind of b; nil if there is none.
func empty(b []byte) decoder {
	for _, s := range samples {
		if KindOf(s.AppendTo(nil)) == KindOf(b) {
			return reflect.New(reflect.TypeOf(s).Elem()).Interface().(decoder)
		}
	}
	return nil
}

func TestRoundTrip(t *testing.T) {
	for _, want := range samples {
		b := want.AppendTo(nil)
		got := empty(b)
		if err := got.Decode(b); err != nil {
			t.Errorf("%#v: %v", want, err)
		} else if !reflect.DeepEqual(got, want) {
			t.Errorf("got %#v, want %#v", got, want)
		}
		if err := got.Decode(append([]byte{255}, b[1:]...)); err == nil {
			t.Errorf("%T decodes a record of another kind", want)
		}
		if err := got.Decode(nil); err == nil {
			t.Errorf("%T decodes nothing", want)
		}
	}
}

func TestTruncated(t *testing.T) {
	b := samples[len(samples)-1].AppendTo(nil)
	for n := range b {
		if err := new(Ingest).Decode(b[:n]); err == nil {
			t.Fatalf("%d of %d octets decode", n, len(b))
		}
	}
}

func TestPublishHead(t *testing.T) {
	p := samples[0].(*Publish)
	b := AppendPublishHead(nil, p.Time, p.Steady, []byte(p.Subject), len(p.Header))
	b = append(append(b, p.Header...), p.Data...)
	if !bytes.Equal(b, p.AppendTo(nil)) {
		t.Error("head, header and data are not the record")
	}
}

func TestMessages(t *testing.T) {
	for _, s := range samples {
		b := s.AppendTo(nil)
		want := 0
		switch c := s.(type) {
		case *Publish:
			want = 1
			if got := Messages(AppendPublishHead(nil, c.Time, c.Steady, c.Subject, len(c.Header))); got != 1 {
				t.Errorf("head of a message: %d", got)
			}
		case *Batch:
			want = len(c.Msgs)
		case *Ingest:
			want = len(c.Msgs)
		}
		if got := Messages(b); got != want {
			t.Errorf("%T: %d, want %d", s, got, want)
		}
		Messages(b[:1])
	}
	if got := Messages(nil); got != 0 {
		t.Errorf("nothing: %d", got)
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range samples {
		f.Add(s.AppendTo(nil))
	}
	f.Add([]byte{byte(KindIngest), 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := empty(b)
		if c == nil || c.Decode(b) != nil {
			return
		}
		// What decodes has one encoding that means the same.
		again := empty(b)
		if err := again.Decode(c.AppendTo(nil)); err != nil {
			t.Fatalf("%#v does not decode after encoding: %v", c, err)
		}
		if !reflect.DeepEqual(c, again) {
			t.Fatalf("%#v became %#v", c, again)
		}
	})
}

func FuzzPosition(f *testing.F) {
	p := Position{Incarnation: 1, Through: 9, Chain: [16]byte{1}, Ladder: []Rung{{5, [16]byte{2}}, {9, [16]byte{1}}}, Gaps: 1, Msgs: 8, Updated: 77}
	f.Add(p.AppendTo(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p, q Position
		if p.Decode(b) != nil {
			return
		}
		if err := q.Decode(p.AppendTo(nil)); err != nil || !reflect.DeepEqual(p, q) {
			t.Fatalf("%+v became %+v: %v", p, q, err)
		}
	})
}
