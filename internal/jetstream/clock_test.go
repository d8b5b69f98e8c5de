package jetstream

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Age follows the wall clock, but not where it leaps.
func TestAgeClock(t *testing.T) {
	const maxAge = time.Hour
	y2000 := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano()
	real := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC).UnixNano()
	at := func(base int64, d time.Duration) int64 { return base + int64(d) }

	var c ageClock
	if c.start(y2000, 0, 0) {
		t.Fatal("not believed, though nothing is stored")
	}
	steps := []struct {
		name  string
		wall  int64
		mono  time.Duration
		want  int64
		leapt bool
	}{
		{"as it began", at(y2000, time.Minute), time.Minute, at(y2000, time.Minute), false},
		{"slewed", at(y2000, 2*time.Minute+time.Second), 2 * time.Minute, at(y2000, 2*time.Minute+time.Second), false},
		{"put right", at(real, 0), 3 * time.Minute, at(y2000, 3*time.Minute), true},
		{"what was stored before has aged half an hour", at(real, 30*time.Minute), 33 * time.Minute, at(y2000, 33*time.Minute), false},
		{"what was stored before has aged an hour", at(real, time.Hour), 63 * time.Minute, at(real, time.Hour), false},
		{"set back", at(real, -time.Hour), 64 * time.Minute, at(real, -time.Hour), false},
		{"and goes on", at(real, -59*time.Minute), 65 * time.Minute, at(real, -59*time.Minute), false},
	}
	for _, s := range steps {
		got, leapt := c.now(s.wall, s.mono, maxAge)
		if d := time.Duration(got - s.want); d < -2*time.Second || d > 2*time.Second || (leapt > 0) != s.leapt {
			t.Errorf("%s: %v, want %v; leapt %v", s.name, time.Unix(0, got).UTC(), time.Unix(0, s.want).UTC(), leapt)
		}
	}

	// A start years ahead of what is stored is not believed at once.
	c = ageClock{}
	if !c.start(real, 0, y2000) {
		t.Fatal("believed")
	}
	if got, _ := c.now(at(real, time.Minute), time.Minute, 0); got != at(y2000, time.Minute) {
		t.Errorf("after a minute %v", time.Unix(0, got).UTC())
	}
	if got, _ := c.now(at(real, leapHold), leapHold, 0); got != at(real, leapHold) {
		t.Errorf("after the hold %v", time.Unix(0, got).UTC())
	}
}

// Where the clock leaps, a message with a time to live of its own has it all, and
// a restart does not forget that.
func TestLeapAndTTL(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, AllowMsgTTL: true})
	m := &nats.Msg{Subject: "s", Header: nats.Header{}}
	m.Header.Set("Nats-TTL", "1h")
	must(nc.RequestMsgWithContext(testContext(t), m))
	// The clock was behind by 25 hours up to now.
	n.e.ages.mu.Lock()
	n.e.ages.skew -= int64(25 * time.Hour)
	n.e.ages.mu.Unlock()
	behind := func(n *node) time.Duration {
		s := must2(n.e.Stream("S"))
		s.mu.Lock()
		defer s.mu.Unlock()
		now := time.Now()
		return time.Duration(now.UnixNano() - s.aged(now)).Round(time.Hour)
	}
	if d := behind(n); d != 25*time.Hour {
		t.Fatalf("messages have aged %v less than the clock says", d)
	}
	eventually(t, "the leap is saved", func() bool { _, err := n.e.meta.Get(bucketClock, keyLeaps); return err == nil })
	// Half an hour later.
	n.e.ages.mu.Lock()
	n.e.ages.leaps[0].at -= 30 * time.Minute
	n.e.ages.leaps[0].was -= int64(30 * time.Minute)
	n.e.ages.mu.Unlock()
	if d := behind(n); d != 25*time.Hour {
		t.Fatalf("half an hour later they have aged %v less", d)
	}
	n.stop()
	n = startNode(t, dir)
	if d := behind(n); d != 25*time.Hour {
		t.Fatalf("after a restart they have aged %v less", d)
	}
}

// However often the clock leaps, what was stored before the first leap has not
// aged more than it was stored.
func TestManyLeaps(t *testing.T) {
	var c ageClock
	c.start(0, 0, 0)
	wall, mono := int64(0), time.Duration(0)
	for range 3 * maxLeaps {
		mono += time.Minute
		wall += int64(time.Minute + time.Hour)
		if aged, _ := c.now(wall, mono, 24*time.Hour); aged > int64(mono) {
			t.Fatalf("after %v messages have aged %v", mono, time.Duration(aged))
		}
	}
	if len(c.leaps) > maxLeaps {
		t.Errorf("%d leaps are remembered", len(c.leaps))
	}
}
