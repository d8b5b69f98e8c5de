package replay

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"petiole/sync/frame"
)

func rung(n uint64) frame.Rung { return frame.Rung{Through: n, Chain: frame.Chain{byte(n)}} }

// The window agrees with a list of what is under way, whatever is sent and
// acknowledged.
func TestWindowModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const limit = 1000
		w := NewWindow(10, Fixed(limit))
		var model []Item
		last := uint64(10)
		now := time.Unix(1000, 0)
		t.Repeat(map[string]func(*rapid.T){
			"send": func(t *rapid.T) {
				if w.Room() <= 0 {
					return
				}
				last += rapid.Uint64Range(1, 5).Draw(t, "n")
				it := Item{Rung: rung(last), Wire: rapid.Int64Range(1, 3000).Draw(t, "wire"), Sent: now}
				w.Sent(it)
				model = append(model, it)
			},
			"ack": func(t *rapid.T) {
				if len(model) == 0 {
					return
				}
				n := rapid.IntRange(1, len(model)).Draw(t, "batches")
				var got []Item
				if err := w.Ack(model[n-1].Rung.Through, model[n-1].Rung.Chain, now, func(it Item) { got = append(got, it) }); err != nil {
					t.Fatal(err)
				}
				if !reflect.DeepEqual(got, model[:n]) {
					t.Fatalf("settled %v, want %v", got, model[:n])
				}
				model = model[n:]
			},
			"again": func(t *rapid.T) {
				if err := w.Ack(w.Through(), frame.Chain{}, now, func(Item) { t.Fatal("settled twice") }); err != nil {
					t.Fatal(err)
				}
			},
			"wrong": func(t *rapid.T) {
				before := w.Through()
				c := rung(last).Chain
				c[15] = 1
				if err := w.Ack(last+1, c, now, nil); !errors.Is(err, ErrAck) {
					t.Fatal("beyond what was sent: ", err)
				}
				if len(model) > 0 {
					if err := w.Ack(last, c, now, nil); !errors.Is(err, ErrAck) {
						t.Fatal("other chain: ", err)
					}
				}
				if w.Through() != before {
					t.Fatal("a wrong acknowledgement moved the window")
				}
			},
			"": func(t *rapid.T) {
				var sum int64
				for _, it := range model {
					sum += it.Wire
				}
				bytes, batches := w.InFlight()
				if bytes != sum || batches != len(model) {
					t.Fatalf("%d bytes in %d batches, want %d in %d", bytes, batches, sum, len(model))
				}
				if room := w.Room(); len(model) == 0 && room != limit || len(model) > 0 && room != limit-sum {
					t.Fatalf("room %d with %d under way", room, sum)
				}
			},
		})
	})
}

func TestMeter(t *testing.T) {
	var m Meter
	at := func(s float64) time.Time { return time.Unix(1000, 0).Add(time.Duration(s * float64(time.Second))) }
	if msgs, _ := m.Rate(at(0)); msgs != 0 {
		t.Errorf("rate %v before anything", msgs)
	}
	for i := range 40 { // 100 per second, for 4 s
		m.Add(at(float64(i)/10), 10, 1000)
	}
	for _, c := range []struct{ at, msgs float64 }{{3.999, 100}, {9.99, 40}, {11.5, 20}, {13.5, 0}, {100, 0}} {
		msgs, bytes := m.Rate(at(c.at))
		if msgs < c.msgs*0.995 || msgs > c.msgs*1.005 || bytes != msgs*100 {
			t.Errorf("after %v s: %v messages, %v bytes per second, want %v", c.at, msgs, bytes, c.msgs)
		}
	}
}
