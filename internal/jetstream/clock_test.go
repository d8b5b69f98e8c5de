package jetstream

import (
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/jetstream/command"
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
	n.e.ages.skew.Add(-int64(25 * time.Hour))
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

// How much has passed since a time of the wall clock leaves out what it leapt.
func TestSince(t *testing.T) {
	const hour = int64(time.Hour)
	start := func(wall, newest int64, saved ...savedLeap) *ageClock {
		c := new(ageClock)
		c.start(wall, 0, newest)
		c.restore(saved, wall, 0)
		return c
	}
	for _, tc := range []struct {
		name string
		c    *ageClock
		then int64
		wall int64 // a minute after the start, but for what it leaps
		want time.Duration
	}{
		{"a restart", start(100*hour, 99*hour), 99 * hour, 100*hour + hour/60, time.Hour + time.Minute},
		{"set back over the restart", start(100*hour, 200*hour), 200 * hour, 100*hour + hour/60, 0},
		{"a start far ahead of what is stored", start(100*hour, hour), hour / 2, 100*hour + hour/60, 30*time.Minute + time.Minute},
		{"leapt before the restart", start(100*hour, 99*hour, savedLeap{Was: 9 * hour, Wall: 99 * hour}), 8 * hour, 100*hour + hour/60, 2*time.Hour + time.Minute},
		{"stored since that leap", start(100*hour, 99*hour, savedLeap{Was: 9 * hour, Wall: 98 * hour}), 99 * hour, 100*hour + hour/60, time.Hour + time.Minute},
		{"leaps now", start(100*hour, 100*hour), 100 * hour, 120*hour + hour/60, time.Minute},
		{"is set back now", start(100*hour, 100*hour), 100 * hour, 90*hour + hour/60, 0},
	} {
		tc.c.now(tc.wall, time.Minute, 0)
		if got := tc.c.since(tc.then, tc.wall, time.Minute); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
}

// The window of message ids lasts over a restart, also if the clock was wrong
// before.
func TestWindowAfterRestart(t *testing.T) {
	now := time.Now()
	for _, was := range []time.Time{now.Add(-time.Minute), time.Unix(60, 0), now.Add(30 * 365 * 24 * time.Hour)} {
		dir := t.TempDir()
		n := startNode(t, dir)
		_, js := n.connect()
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		must(must2(n.e.Stream("S")).propose((&command.Publish{
			Time: was.UnixNano(), Steady: was.UnixNano(), Subject: "s", Header: []byte("NATS/1.0\r\nNats-Msg-Id: i\r\n\r\n"),
		}).AppendTo(nil)))
		n.crash()
		n = startNode(t, dir)
		_, js = n.connect()
		m := &nats.Msg{Subject: "s", Header: nats.Header{"Nats-Msg-Id": {"i"}}}
		if ack, err := js.PublishMsg(testContext(t), m); err != nil || !ack.Duplicate {
			t.Errorf("stored at %v: %+v, %v", was.UTC(), ack, err)
		}
		n.stop()
	}
}

// leaping is a clock whose wall can be set.
type leaping struct{ by atomic.Int64 }

// now returns a time whose wall clock reading differs from the right one as told,
// and whose monotonic reading does not: what time.Now returns after the system's
// clock was set. Package time has no way to make one.
func (l *leaping) now() time.Time {
	now := time.Now()
	leapt := now.Add(time.Duration(l.by.Load()))
	// In a time with a monotonic reading the first word is the wall clock's, the
	// second the monotonic one.
	*(*uint64)(unsafe.Pointer(&now)) = *(*uint64)(unsafe.Pointer(&leapt))
	return now
}

// Where the wall clock goes, the consumers' timers do not: what is not
// acknowledged is delivered again when its time has come, neither earlier nor
// later, and no consumer in use is given up.
func TestTimersAndLeaps(t *testing.T) {
	for _, tc := range []struct {
		name string
		by   time.Duration
	}{{"ahead", 400 * 24 * time.Hour}, {"back", -400 * 24 * time.Hour}} {
		t.Run(tc.name, func(t *testing.T) {
			clock := new(leaping)
			n := startNode(t, t.TempDir(), func(o *Options) { o.now = clock.now })
			_, js := n.connect()
			ctx := testContext(t)
			createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
			for range 2 {
				must(js.Publish(ctx, "s", nil))
			}
			again := must(js.CreateConsumer(ctx, "S", jetstream.ConsumerConfig{Durable: "AGAIN", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Second}))
			later := must(js.CreateConsumer(ctx, "S", jetstream.ConsumerConfig{Durable: "LATER", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Hour}))
			used := must(js.CreateConsumer(ctx, "S", jetstream.ConsumerConfig{AckPolicy: jetstream.AckNonePolicy, InactiveThreshold: time.Hour}))
			take := func(c jetstream.Consumer, wait time.Duration) uint64 {
				t.Helper()
				m, err := c.Next(jetstream.FetchMaxWait(wait))
				if err != nil {
					t.Fatal(err)
				}
				return must(m.Metadata()).NumDelivered
			}
			take(again, 5*time.Second)
			take(later, 5*time.Second)
			clock.by.Store(int64(tc.by))
			// The first message again, after the second one was taken for the first time.
			if n := take(again, 5*time.Second); n != 1 {
				t.Fatalf("the second message was delivered %d times", n)
			}
			if n := take(again, 10*time.Second); n != 2 {
				t.Fatalf("the first message was delivered %d times", n)
			}
			if n := take(later, 5*time.Second); n != 1 {
				t.Fatal("a message was delivered again before its time")
			}
			if _, err := later.Next(jetstream.FetchMaxWait(300 * time.Millisecond)); err == nil {
				t.Fatal("a message was delivered again before its time")
			}
			info := must(used.Info(ctx))
			if d := time.Since(info.TimeStamp.Add(-tc.by)).Abs(); d > time.Minute {
				t.Errorf("the answer is of %v", info.TimeStamp)
			}
			last := must(later.Info(ctx)).Delivered.Last
			if d := time.Since(last.Add(-tc.by)).Abs(); d > time.Minute {
				t.Errorf("last delivered at %v", last)
			}
		})
	}
}
