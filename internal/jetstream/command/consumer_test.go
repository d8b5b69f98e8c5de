package command

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"testing"
)

// consumerCommand is any of the consumer commands.
type consumerCommand interface {
	Append([]byte) []byte
	Decode([]byte) error
}

func consumerCommands() []consumerCommand {
	return []consumerCommand{
		&ConsumerCreate{Name: "C", Created: 1767323045000000000, Config: []byte(`{"ack_policy":"explicit"}`)},
		&ConsumerCreate{Name: "", Created: -1, Config: []byte{}},
		&ConsumerDelete{Name: "consumer", Created: 5},
		&ConsumerDelivered{Name: "C", Rev: 7, Time: 1, DSeq: 1, Ranges: []Range{{1, 1, 1}}},
		&ConsumerDelivered{Name: "C", Rev: 1 << 40, Time: math.MaxInt64, DSeq: 3, Ranges: []Range{
			{100, 20, 1}, {5, 1, 2}, {math.MaxUint64 - 1, 1, 9}, {1, 2, 3},
		}},
		&ConsumerEvent{Kind: KindConsumerAck, Name: "C", Rev: 8, Seq: 9, DSeq: 10, Time: 11},
		&ConsumerEvent{Kind: KindConsumerNak, Name: "C", Seq: 9},
		&ConsumerEvent{Kind: KindConsumerProgress, Name: "C", Time: math.MinInt64},
		&ConsumerEvent{Kind: KindConsumerTerm, Name: "C", Rev: math.MaxUint64},
		&ConsumerEvent{Kind: KindConsumerExhausted, Name: "a b", Seq: math.MaxUint64},
		&ConsumerEvent{Kind: KindConsumerReset, Name: "C", Seq: 1},
	}
}

func emptyConsumerCommand(k Kind) consumerCommand {
	switch k {
	case KindConsumerCreate:
		return new(ConsumerCreate)
	case KindConsumerDelete:
		return new(ConsumerDelete)
	case KindConsumerDelivered:
		return new(ConsumerDelivered)
	default:
		return new(ConsumerEvent)
	}
}

func TestConsumerCommands(t *testing.T) {
	for _, c := range consumerCommands() {
		b := c.Append([]byte("before"))[len("before"):]
		if !IsConsumer(KindOf(b)) {
			t.Errorf("%+v has kind %d", c, KindOf(b))
		}
		name, err := ConsumerName(b)
		if want := reflect.ValueOf(c).Elem().FieldByName("Name").String(); err != nil || string(name) != want {
			t.Errorf("name of %+v: %q, %v", c, name, err)
		}
		if v := reflect.ValueOf(c).Elem().FieldByName("Rev"); v.IsValid() && v.Uint() != ConsumerRev(b) || !v.IsValid() && ConsumerRev(b) != 0 {
			t.Errorf("rev of %+v: %d", c, ConsumerRev(b))
		}
		got := emptyConsumerCommand(KindOf(b))
		if err := got.Decode(b); err != nil || !reflect.DeepEqual(got, c) {
			t.Errorf("%+v came back as %+v, %v", c, got, err)
		}
		for i := range b {
			if _, ok := c.(*ConsumerCreate); ok && i > 8 {
				break // the configuration goes to the end, whatever it is
			}
			if err := emptyConsumerCommand(KindOf(b)).Decode(b[:i]); !errors.Is(err, ErrMalformed) {
				t.Errorf("%+v cut to %d of %d octets: %v", c, i, len(b), err)
			}
		}
	}
	if IsConsumer(KindPublish) || IsConsumer(kindConsumerEnd) {
		t.Error("IsConsumer accepts other kinds")
	}
}

func FuzzConsumerCommand(f *testing.F) {
	for _, c := range consumerCommands() {
		f.Add(c.Append(nil))
	}
	f.Add([]byte{byte(KindConsumerDelivered), 1, 'C', 1, 0, 1, 200, 1})
	f.Add([]byte{byte(KindConsumerDelivered), 0, 1, 0, 1, 1, 2, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		if !IsConsumer(KindOf(b)) {
			return
		}
		c := emptyConsumerCommand(KindOf(b))
		if err := c.Decode(b); err != nil {
			return
		}
		if _, err := ConsumerName(b); err != nil {
			t.Fatalf("decoded, but without name: %v", err)
		}
		again := c.Append(nil)
		d := emptyConsumerCommand(KindOf(again))
		if err := d.Decode(again); err != nil || !bytes.Equal(d.Append(nil), again) {
			t.Fatalf("%x decodes to %+v, which encodes to %x: %v", b, c, again, err)
		}
	})
}
