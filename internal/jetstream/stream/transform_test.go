package stream

import (
	"slices"
	"testing"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
)

func TestTransform(t *testing.T) {
	for _, tc := range []struct {
		source, destination, subject, want string // want "": no match
	}{
		{"", "x.>", "a.b", "x.a.b"},
		{"a.>", "b.>", "a.c.d", "b.c.d"},
		{"a.>", "b.>", "c", ""},
		{"a.*.*", "$2.$1", "a.x.y", "y.x"},
		{"a.*", "b.{{wildcard(1)}}.c", "a.x", "b.x.c"},
		{"a.*", "b.{{ Wildcard( 1 ) }}", "a.x", "b.x"},
		{"a.*.>", "b.*.>", "a.x.y.z", "b.x.y.z"},
		{"a", "b", "a", "b"},
		// Numbers of partitions are those of NATS: FNV-1a over the tokens.
		{"a.*", "a.{{partition(10,1)}}", "a.foo", "a.3"},
	} {
		tr, err := NewTransform(tc.source, tc.destination)
		if err != nil {
			t.Errorf("%q to %q: %v", tc.source, tc.destination, err)
			continue
		}
		if got, ok := tr.Apply(tc.subject); got != tc.want || ok != (tc.want != "") {
			t.Errorf("%q to %q: %q becomes %q, want %q", tc.source, tc.destination, tc.subject, got, tc.want)
		}
	}
	for _, tc := range [][2]string{
		{"a..b", "x"},
		{"a.>", "x"},
		{"a", "x.>"},
		{"a.*", "$2"},
		{"a", "*"},
		{"a.*", "{{wildcard(1"},
		{"a.*", "{{unknown(1)}}"},
		{"a.*", "{{partition(0,1)}}"},
		{"a", "x..y"},
		{"a", ""},
	} {
		if _, err := NewTransform(tc[0], tc[1]); err == nil {
			t.Errorf("%q to %q is accepted", tc[0], tc[1])
		}
	}
}

func TestTransformBeforeStoring(t *testing.T) {
	m := newMachine(t, func(c *api.StreamConfig) {
		c.SubjectTransform = &api.SubjectTransform{Source: "in.*", Destination: "out.$1"}
		c.MaxMsgsPer = 1
	})
	apply(t, m, pub(1, "in.a", "1"))
	apply(t, m, pub(1, "other", "2"))
	apply(t, m, pub(1, "in.a", "3"))
	if got := seqs(t, m); !slices.Equal(got, []uint64{2, 3}) {
		t.Errorf("holds %v", got)
	}
	if _, ok := m.store.Subject("out.a"); !ok {
		t.Error("not stored under the new subject")
	}
}

func TestMarkers(t *testing.T) {
	m := newMachine(t, func(c *api.StreamConfig) {
		c.MaxAge, c.SubjectDeleteMarkerTTL, c.AllowMsgTTL, c.AllowRollup = 10*time.Second, 5*time.Second, true, true
	})
	apply(t, m, pub(1*sec, "a", "")) // 1
	apply(t, m, pub(2*sec, "a", "")) // 2: the last of its subject
	apply(t, m, pub(2*sec, "b", "", "Nats-TTL", "1s"))
	apply(t, m, (&command.Expire{Now: 4 * sec}).AppendTo(nil)) // b goes: marker 4
	apply(t, m, (&command.Expire{Now: 12 * sec}).AppendTo(nil))
	var subjects []string
	for _, seq := range seqs(t, m) {
		msg, err := m.store.Load(seq)
		if err != nil {
			t.Fatal(err)
		}
		subjects = append(subjects, msg.Subject)
		if want := "NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\nNats-TTL: 5s\r\nNats-Rollup: sub\r\n\r\n"; string(msg.Header) != want {
			t.Errorf("marker %d: %q", seq, msg.Header)
		}
	}
	if !slices.Equal(subjects, []string{"a"}) { // the marker of b has gone, without one of its own
		t.Errorf("left: %v", subjects)
	}
	apply(t, m, (&command.Expire{Now: 17 * sec}).AppendTo(nil))
	if got := seqs(t, m); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
}
