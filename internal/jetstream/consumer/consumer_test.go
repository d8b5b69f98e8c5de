package consumer

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"petiole/internal/jetstream/api"
)

var explicit = api.ConsumerConfig{Durable: "C", AckPolicy: api.AckExplicit}

// TestFarAway has spans that clients use to say "never": none is over at once.
func TestFarAway(t *testing.T) {
	const never = math.MaxInt64
	cfg := explicit
	cfg.AckWait, cfg.InactiveThreshold = never, never
	r := newRig(t, "a", "b").start(cfg)
	r.next("x", `{"batch":2,"expires":9223372036854775807}`)
	r.want("x:1 x:2")
	r.next("x", `{"batch":1,"expires":9223372036854775807}`)
	if r.pass(time.Hour) {
		t.Error("the consumer is taken for unused")
	}
	r.want("")
	r.wantSaid("")

	cfg = explicit
	far := time.Date(9000, 1, 1, 0, 0, 0, 0, time.UTC)
	cfg.PauseUntil = &far
	r = newRig(t, "a").start(cfg)
	r.next("x", "1")
	r.pass(time.Hour)
	r.want("")
	if !r.m.Info(r.now).Paused {
		t.Error("not paused")
	}
}

func TestPullExplicit(t *testing.T) {
	r := newRig(t, "a", "b", "c", "d").start(explicit)
	r.want("")
	r.wantInfo("delivered 0/0 floor 0/0 ack 0 redelivered 0 waiting 0 pending 4")
	r.next("in", "2")
	r.want("in:1 in:2")
	if d := r.sink.out[1].ref; d.ConsumerSeq != 2 || d.Pending != 2 || d.Time != epoch.Add(time.Second).UnixNano() {
		t.Fatalf("acknowledgement subject: %+v", d)
	}
	r.wantInfo("delivered 2/2 floor 0/0 ack 2 redelivered 0 waiting 0 pending 2")
	r.ack(1, "+ACK", "")
	r.wantInfo("delivered 2/2 floor 0/0 ack 1 redelivered 0 waiting 0 pending 2")
	r.ack(0, "", "done")
	r.wantInfo("delivered 2/2 floor 2/2 ack 0 redelivered 0 waiting 0 pending 2")
	if len(r.sink.replies) != 1 || r.sink.replies[0] != "done" {
		t.Fatalf("replies %q", r.sink.replies)
	}
	r.wantSaid("")
	// Nothing left: a request without expiry waits, and gets what comes.
	r.next("in", `{"batch":5}`)
	r.want("in:3 in:4")
	r.wantInfo("delivered 4/4 floor 2/2 ack 2 redelivered 0 waiting 1 pending 0")
	r.publish("e", "f")
	r.want("in:5 in:6")
}

// A clock that was days ahead before a restart does not put redelivery off.
func TestClockSetBack(t *testing.T) {
	cfg := explicit
	cfg.AckWait = 30 * time.Second
	for _, back := range []time.Duration{0, time.Hour, 100 * time.Hour} {
		r := newRig(t, "a", "b", "c").start(cfg)
		r.next("in", "10")
		r.want("in:1 in:2 in:3")
		r.ack(1, `-NAK {"delay": 60000000000}`, "")
		r.pass(10 * time.Second)
		r.ack(2, "", "")
		snap := r.m.Snapshot()
		r.now = r.now.Add(-back)
		r.restart(snap, cfg)
		r.next("in", "10")
		r.pass(19 * time.Second)
		r.want("")
		r.pass(time.Second)
		r.want("in:1x2")
		r.pass(29 * time.Second)
		r.want("")
		r.pass(time.Second)
		if g := r.got(); !strings.Contains(g, "in:2x2") {
			t.Fatalf("set back by %v: delivered %q", back, g)
		}
	}
}

func TestRedelivery(t *testing.T) {
	cfg := explicit
	cfg.AckWait = time.Second
	cfg.MaxDeliver = 3
	r := newRig(t, "a", "b").start(cfg)
	r.next("in", "10")
	r.want("in:1 in:2")
	r.pass(999 * time.Millisecond)
	r.want("")
	r.pass(time.Millisecond)
	r.want("in:1x2 in:2x2")
	if d := r.sink.out[3].ref; d.ConsumerSeq != 4 || d.Pending != 0 {
		t.Fatalf("second delivery: %+v", d)
	}
	r.wantInfo("delivered 4/2 floor 0/0 ack 2 redelivered 2 waiting 1 pending 0")
	r.ack(1, "", "") // by the subject of the first delivery
	r.wantInfo("delivered 4/2 floor 0/0 ack 1 redelivered 1 waiting 1 pending 0")
	r.pass(time.Second)
	r.want("in:1x3")
	r.pass(time.Second)
	r.want("")
	if len(r.sink.advisories) != 1 || r.sink.advisories[0].Type != api.AdvisoryMaxDeliver || r.sink.advisories[0].Deliveries != 3 {
		t.Fatalf("advisories %+v", r.sink.advisories)
	}
	r.wantInfo("delivered 5/2 floor 0/0 ack 0 redelivered 1 waiting 1 pending 0")
	r.publish("c")
	r.ack(5, "", "")
	r.wantInfo("delivered 6/3 floor 6/3 ack 0 redelivered 1 waiting 1 pending 0")
	if !r.m.NeedsAck(1, "a") || r.m.NeedsAck(2, "b") || !r.m.NeedsAck(4, "c") {
		t.Fatal("given-up message is not kept, or an acknowledged one is")
	}
}

func TestBackoff(t *testing.T) {
	cfg := explicit
	cfg.BackOff = []time.Duration{time.Second, 5 * time.Second}
	r := newRig(t, "a").start(cfg)
	r.next("in", "10")
	r.want("in:1")
	r.pass(time.Second)
	r.want("in:1x2")
	r.pass(4 * time.Second)
	r.want("")
	r.pass(time.Second)
	r.want("in:1x3")
	r.pass(5 * time.Second)
	r.want("in:1x4")
}

func TestNakTermProgress(t *testing.T) {
	cfg := explicit
	cfg.AckWait = 10 * time.Second
	r := newRig(t, "a", "b", "c").start(cfg)
	r.next("in", "20")
	r.want("in:1 in:2 in:3")
	r.ack(1, "-NAK", "")
	r.want("in:2x2")
	r.ack(0, `-NAK {"delay": 3000000000}`, "")
	r.want("")
	r.pass(3 * time.Second)
	r.want("in:1x2")
	r.ack(4, "-NAK 500ms", "")
	r.pass(500 * time.Millisecond)
	r.want("in:1x3")
	r.ack(2, "+WPI", "") // at 3.5 s
	r.pass(9 * time.Second)
	r.want("in:2x3")
	r.pass(time.Second)
	r.want("in:1x4 in:3x2")
	r.ack(2, "+TERM  broken", "told")
	r.ack(0, "+ACK", "")
	r.ack(1, "+ACK", "")
	if a := r.sink.advisories[len(r.sink.advisories)-1]; a.Type != api.AdvisoryTerminated || a.Reason != "broken" {
		t.Fatalf("advisory %+v", a)
	}
	r.pass(time.Minute)
	r.want("")
	if len(r.sink.replies) != 1 || r.sink.replies[0] != "told" {
		t.Fatalf("replies %q", r.sink.replies)
	}
	r.wantInfo("delivered 9/3 floor 9/3 ack 0 redelivered 0 waiting 1 pending 0")
}

func TestAckNext(t *testing.T) {
	r := newRig(t, "a", "b", "c", "d").start(explicit)
	r.next("in", "")
	r.ack(0, "+NXT", "in2")
	r.want("in:1 in2:2")
	r.ack(1, `+NXT {"batch":2}`, "in3")
	r.want("in3:3 in3:4")
}

func TestAckAll(t *testing.T) {
	cfg := explicit
	cfg.AckPolicy = api.AckAll
	r := newRig(t, "a", "b", "c", "d").start(cfg)
	r.next("in", "3")
	r.ack(1, "", "")
	r.wantInfo("delivered 3/3 floor 2/2 ack 1 redelivered 0 waiting 0 pending 1")
	r.ack(0, "", "again")
	r.wantInfo("delivered 3/3 floor 2/2 ack 1 redelivered 0 waiting 0 pending 1")
	r.ack(2, "", "")
	r.wantInfo("delivered 3/3 floor 3/3 ack 0 redelivered 0 waiting 0 pending 1")
	// What was never delivered cannot be acknowledged.
	r.m.Ack(r.now, AckRef{Seq: 4, ConsumerSeq: 4, Deliveries: 1}, nil, "")
	r.next("in", "1")
	r.want("in:1 in:2 in:3 in:4")
}

func TestStatus(t *testing.T) {
	tests := []struct {
		name string
		cfg  func(*api.ConsumerConfig)
		do   func(r *rig)
		want string
	}{
		{"no messages", nil, func(r *rig) { r.next("in", `{"batch":1,"no_wait":true}`) }, "in: NATS/1.0 404 No Messages||"},
		{"timeout", nil, func(r *rig) {
			r.next("in", `{"batch":7,"expires":1000000000,"max_bytes":99}`)
			r.pass(2 * time.Second)
		}, "in: NATS/1.0 408 Request Timeout|Nats-Pending-Messages: 7|Nats-Pending-Bytes: 99||"},
		{"size", nil, func(r *rig) {
			r.next("in", `{"batch":2,"max_bytes":5,"expires":1000000000}`)
			r.publish("a")
		}, "in: NATS/1.0 409 Message Size Exceeds MaxBytes|Nats-Pending-Messages: 2|Nats-Pending-Bytes: 5||"},
		{"waiting", func(c *api.ConsumerConfig) { c.MaxWaiting = 1 }, func(r *rig) {
			r.next("in", "")
			r.next("in2", "")
		}, "in2: NATS/1.0 409 Exceeded MaxWaiting||"},
		{"waiting with heartbeat", func(c *api.ConsumerConfig) { c.MaxWaiting = 1 }, func(r *rig) {
			r.next("in", "")
			r.next("in2", `{"expires":10000000000,"idle_heartbeat":1000000000}`)
		}, ""},
		{"batch", func(c *api.ConsumerConfig) { c.MaxRequestBatch = 3 }, func(r *rig) { r.next("in", "4") }, "in: NATS/1.0 409 Exceeded MaxRequestBatch of 3||"},
		{"expires", func(c *api.ConsumerConfig) { c.MaxRequestExpires = time.Minute }, func(r *rig) {
			r.next("in", `{"expires":60000000001}`)
		}, "in: NATS/1.0 409 Exceeded MaxRequestExpires of 1m0s||"},
		{"bytes", func(c *api.ConsumerConfig) { c.MaxRequestMaxBytes = 3 }, func(r *rig) {
			r.next("in", `{"max_bytes":4}`)
		}, "in: NATS/1.0 409 Exceeded MaxRequestMaxBytes of 3||"},
		{"completed", nil, func(r *rig) {
			r.publish("a")
			r.next("in", `{"batch":1,"max_bytes":1000}`)
		}, "in: NATS/1.0 409 Batch Completed|Nats-Pending-Messages: 0|Nats-Pending-Bytes: 951||"},
		{"heartbeat too large", nil, func(r *rig) {
			r.next("in", `{"expires":1000,"idle_heartbeat":501}`)
		}, "in: NATS/1.0 400 Bad Request - heartbeat value too large||"},
		{"heartbeat", nil, func(r *rig) {
			r.publish("a")
			r.next("in", `{"batch":9,"expires":3500000000,"idle_heartbeat":1000000000}`)
			r.pass(2500 * time.Millisecond)
		}, strings.Repeat("in: NATS/1.0 100 Idle Heartbeat|Nats-Last-Consumer: 1|Nats-Last-Stream: 1||\n", 2)},
		{"deleted", nil, func(r *rig) {
			r.next("in", "")
			r.m.Deleted()
		}, "in: NATS/1.0 409 Consumer Deleted||"},
		{"server stops", nil, func(r *rig) {
			r.next("in", `{"batch":2,"max_bytes":77,"expires":1000000000}`)
			r.m.Leave()
			r.publish("a") // nobody asks for it any more
		}, "in: NATS/1.0 409 Server Shutdown|Nats-Pending-Messages: 2|Nats-Pending-Bytes: 77||"},
		{"no wait, some", nil, func(r *rig) {
			r.publish("a")
			r.next("in", `{"batch":3,"no_wait":true}`)
		}, "in: NATS/1.0 404 No Messages||"},
		{"no wait with expiry", nil, func(r *rig) {
			r.next("in", `{"batch":3,"no_wait":true,"expires":1000000000}`)
			r.publish("a")
		}, "in: NATS/1.0 404 No Messages||"},
		{"group", nil, func(r *rig) {
			r.next("in", `{"batch":3,"min_pending":3}`)
		}, "in: NATS/1.0 400 Bad Request - Not a Overflow Priority consumer||"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := explicit
			if tt.cfg != nil {
				tt.cfg(&cfg)
			}
			r := newRig(t).start(cfg)
			tt.do(r)
			r.wantSaid(strings.TrimSuffix(tt.want, "\n"))
		})
	}
}

func TestRoundRobin(t *testing.T) {
	r := newRig(t).start(explicit)
	r.next("x", "2")
	r.next("y", "2")
	r.sink.deaf["z"] = true
	r.next("z", "5")
	r.publish("1", "2", "3", "4", "5")
	r.want("x:1 y:2 x:3 y:4")
	r.wantInfo("delivered 4/4 floor 0/0 ack 4 redelivered 0 waiting 0 pending 1")
}

// TestCongested delivers around clients that do not keep up, and to them later.
func TestCongested(t *testing.T) {
	r := newRig(t).start(explicit)
	r.next("x", `{"batch":3,"no_wait":false}`)
	r.next("y", "2")
	r.sink.busy["x"] = true
	r.publish("a", "b", "c", "d")
	r.want("y:1 y:2")
	r.wantSaid("")
	r.wantInfo("delivered 2/2 floor 0/0 ack 2 redelivered 0 waiting 1 pending 2")
	r.pass(20 * time.Millisecond)
	r.want("")
	r.sink.busy["x"] = false
	r.pass(5 * time.Millisecond)
	r.want("x:3 x:4")

	r = newRig(t, "a", "b")
	r.sink.busy["d"] = true
	r.start(api.ConsumerConfig{DeliverSubject: "d"})
	r.want("")
	r.sink.busy["d"] = false
	r.pass(5 * time.Millisecond)
	r.want("d:1 d:2")
}

func TestMaxAckPending(t *testing.T) {
	cfg := explicit
	cfg.MaxAckPending = 2
	r := newRig(t, "a", "b", "c", "d").start(cfg)
	r.next("in", `{"batch":10,"no_wait":true}`)
	r.want("in:1 in:2")
	r.wantSaid("") // does not wait for messages, but for acknowledgements
	r.ack(0, "", "")
	r.want("in:3")
	r.ack(1, "-NAK", "")
	r.want("in:2x2")
	r.ack(1, "", "")
	r.want("in:4")
}

func TestDeliverPolicies(t *testing.T) {
	when := epoch.Add(2500 * time.Millisecond)
	tests := []struct {
		name string
		cfg  api.ConsumerConfig
		want string
		last string // with what is published next
	}{
		{"all", api.ConsumerConfig{}, "in:1 in:2 in:3 in:4 in:5", "in:6 in:7"},
		{"filter", api.ConsumerConfig{FilterSubject: "a.*"}, "in:1 in:2 in:4", "in:7"},
		{"filters", api.ConsumerConfig{FilterSubjects: []string{"a.y", "b.>"}}, "in:2 in:3 in:5", "in:6"},
		{"last", api.ConsumerConfig{DeliverPolicy: api.DeliverLast}, "in:5", "in:6 in:7"},
		{"last of filter", api.ConsumerConfig{DeliverPolicy: api.DeliverLast, FilterSubject: "a.*"}, "in:4", "in:7"},
		{"new", api.ConsumerConfig{DeliverPolicy: api.DeliverNew}, "", "in:6 in:7"},
		{"sequence", api.ConsumerConfig{DeliverPolicy: api.DeliverByStartSequence, OptStartSeq: 3}, "in:3 in:4 in:5", "in:6 in:7"},
		{"sequence ahead", api.ConsumerConfig{DeliverPolicy: api.DeliverByStartSequence, OptStartSeq: 7}, "", "in:7"},
		{"time", api.ConsumerConfig{DeliverPolicy: api.DeliverByStartTime, OptStartTime: &when}, "in:4 in:5", "in:6 in:7"},
		{"last per subject", api.ConsumerConfig{DeliverPolicy: api.DeliverLastPerSubject, FilterSubject: ">"}, "in:2 in:4 in:5", "in:6 in:7"},
		{"last per subject of filter", api.ConsumerConfig{DeliverPolicy: api.DeliverLastPerSubject, FilterSubjects: []string{"a.x", "b"}}, "in:4 in:5", "in:6 in:7"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, "a.x", "a.y", "b.c", "a.x", "b.c")
			if tt.name == "last per subject of filter" {
				tt.cfg.FilterSubjects[1] = "b.c"
			}
			tt.cfg.AckPolicy = api.AckExplicit
			tt.cfg.Durable = "C"
			r.start(tt.cfg)
			n := uint64(len(strings.Fields(tt.want)))
			if in := r.m.Info(r.now); in.NumPending != n {
				t.Fatalf("pending %d, want %d", in.NumPending, n)
			}
			r.next("in", "50")
			r.want(tt.want)
			r.publish("b.c", "a.x")
			r.want(tt.last)
			if in := r.m.Info(r.now); in.NumPending != 0 {
				t.Fatalf("pending %d at the end", in.NumPending)
			}
		})
	}
}

func TestPush(t *testing.T) {
	cfg := api.ConsumerConfig{DeliverSubject: "d", Heartbeat: time.Second, FlowControl: true, InactiveThreshold: 5 * time.Second}
	r := newRig(t, "a", "b")
	r.sink.deaf["d"] = true
	r.start(cfg)
	r.want("")
	if r.m.Info(r.now).PushBound {
		t.Fatal("bound without anyone listening")
	}
	r.sink.deaf["d"] = false
	r.m.InterestChanged(r.now, true)
	r.pump()
	r.want("d:1 d:2")
	r.wantInfo("delivered 2/2 floor 2/2 ack 0 redelivered 0 waiting 0 pending 0")
	r.pass(2500 * time.Millisecond)
	r.wantSaid(strings.Repeat("d: NATS/1.0 100 Idle Heartbeat|Nats-Last-Consumer: 2|Nats-Last-Stream: 2||\n", 2)[:2*75-1])
	r.m.InterestChanged(r.now, false)
	r.publish("c")
	r.want("")
	if r.pass(4 * time.Second) {
		t.Fatal("dead too early")
	}
	if !r.pass(2 * time.Second) {
		t.Fatal("not dead")
	}
}

func TestFlowControl(t *testing.T) {
	r := newRig(t).start(api.ConsumerConfig{DeliverSubject: "d", Heartbeat: time.Second, FlowControl: true})
	r.m.maxOut = 200
	r.publish("a")
	r.wantSaid("")
	r.publish("b", "c", "d", "e", "f")
	r.want("d:1 d:2 d:3 d:4 d:5")
	r.wantSaid("d: NATS/1.0 100 FlowControl Request|| reply=$JS.FC.S.C.1")
	r.pass(1100 * time.Millisecond)
	r.wantSaid("d: NATS/1.0 100 Idle Heartbeat|Nats-Last-Consumer: 5|Nats-Last-Stream: 5|Nats-Consumer-Stalled: $JS.FC.S.C.1||")
	r.m.FlowReply(r.now, "$JS.FC.S.C.0")
	r.pump()
	r.want("")
	r.m.FlowReply(r.now, "$JS.FC.S.C.1")
	r.pump()
	r.want("d:6")
	if r.m.maxOut != 400 {
		t.Fatalf("window %d", r.m.maxOut)
	}
}

func TestHeadersOnly(t *testing.T) {
	cfg := explicit
	cfg.HeadersOnly = true
	r := newRig(t, "a")
	r.st.msgs[0].Header = []byte("NATS/1.0\r\nX: y\r\n\r\n")
	r.start(cfg)
	r.publish("b")
	r.next("in", "2")
	for i, want := range []string{"NATS/1.0\r\nX: y\r\nNats-Msg-Size: 9\r\n\r\n", "NATS/1.0\r\nNats-Msg-Size: 9\r\n\r\n"} {
		if m := r.sink.out[i].msg; string(m.Header) != want || len(m.Data) != 0 {
			t.Errorf("message %d: %q %q", i, m.Header, m.Data)
		}
	}
}

func TestRateLimit(t *testing.T) {
	r := newRig(t)
	r.cfg.MaxMsgSize = 60
	r.start(api.ConsumerConfig{DeliverSubject: "d", RateLimit: 8 * 60})
	r.publish("a", "b", "c")
	if n := len(r.sink.out); n != 1 {
		t.Fatalf("%d sent at once", n)
	}
	r.pass(10 * time.Second)
	if n := len(r.sink.out); n != 3 {
		t.Fatalf("%d sent", n)
	}
}

func TestReplayOriginal(t *testing.T) {
	r := newRig(t, "a", "b", "c") // a second apart
	r.start(api.ConsumerConfig{DeliverSubject: "d", ReplayPolicy: api.ReplayOriginal})
	r.want("d:1")
	r.pass(999 * time.Millisecond)
	r.want("")
	r.pass(time.Millisecond)
	r.want("d:2")
	r.pass(time.Second)
	r.want("d:3")
	r.pass(10 * time.Second)
	r.publish("d", "e")
	r.want("d:4 d:5")
}

func TestPause(t *testing.T) {
	until := epoch.Add(time.Minute)
	cfg := explicit
	cfg.PauseUntil = &until
	r := newRig(t, "a").start(cfg)
	r.next("in", "5")
	r.want("")
	if in := r.m.Info(r.now); !in.Paused || in.PauseRemaining != 59*time.Second {
		t.Fatalf("%+v", in)
	}
	r.pass(time.Minute)
	r.want("in:1")
}

// A pause ends by the wall clock, also if that leaps: up to a minute later.
func TestPauseAndLeap(t *testing.T) {
	until := epoch.Add(1000 * time.Hour)
	cfg := explicit
	cfg.PauseUntil = &until
	var skew time.Duration
	r := newRig(t, "a")
	r.skew = func() time.Duration { return skew }
	r.start(cfg)
	r.next("in", "5")
	r.pass(5 * time.Minute)
	r.want("")
	skew = 999*time.Hour + 30*time.Minute
	if in := r.m.Info(r.now); !in.Paused || in.PauseRemaining > 25*time.Minute {
		t.Fatalf("%+v", in)
	}
	r.pass(20 * time.Minute)
	r.want("")
	skew += time.Hour
	r.pass(time.Minute)
	r.want("in:1")
}

func TestInactive(t *testing.T) {
	r := newRig(t, "a").start(api.ConsumerConfig{AckPolicy: api.AckExplicit, InactiveThreshold: 10 * time.Second, AckWait: 20 * time.Second})
	r.next("in", `{"batch":2,"expires":30000000000}`)
	if r.pass(29 * time.Second) {
		t.Fatal("dead while a request waits")
	}
	if r.pass(10 * time.Second) {
		t.Fatal("dead before the threshold passed")
	}
	if !r.pass(time.Minute) {
		t.Fatal("not dead")
	}
}

func TestRemovedMessages(t *testing.T) {
	cfg := explicit
	cfg.AckWait = time.Second
	r := newRig(t, "a", "b", "c", "d", "e").start(cfg)
	r.remove(2)
	r.next("in", "2")
	r.want("in:1 in:3")
	r.remove(1)
	r.wantInfo("delivered 2/3 floor 1/2 ack 1 redelivered 0 waiting 0 pending 2")
	r.remove(4)
	r.wantInfo("delivered 2/3 floor 1/2 ack 1 redelivered 0 waiting 0 pending 1")
	r.pass(time.Second)
	r.remove(3) // while it waits to be redelivered
	r.next("in", "5")
	r.want("in:5")
	r.wantInfo("delivered 3/5 floor 2/3 ack 1 redelivered 0 waiting 1 pending 0")
	r.st.msgs = nil
	r.m.MsgsPurged()
	r.wantInfo("delivered 3/5 floor 3/5 ack 0 redelivered 0 waiting 1 pending 0")
}

func TestWorkQueue(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cfg.Retention = api.WorkQueuePolicy
	r.start(explicit)
	r.next("in", "3")
	r.ack(1, "", "")
	r.ack(1, "", "again")
	r.ack(0, "+TERM", "")
	if len(r.sink.acked) != 0 {
		t.Fatalf("told before it was logged: %v", r.sink.acked)
	}
	for _, c := range r.sink.records {
		if err := r.m.Apply(c); err != nil {
			t.Fatal(err)
		}
	}
	if g := strings.Join(r.sink.acked, " "); g != "2/true 1/true" {
		t.Fatal(g)
	}
	r.wantInfo("delivered 3/3 floor 2/2 ack 1 redelivered 0 waiting 0 pending 0")
}

func TestInterestRetentionAckAll(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cfg.Retention = api.InterestPolicy
	cfg := explicit
	cfg.AckPolicy = api.AckAll
	r.start(cfg)
	r.next("in", "3")
	r.ack(1, "", "")
	for _, c := range r.sink.records {
		if err := r.m.Apply(c); err != nil {
			t.Fatal(err)
		}
	}
	if g := strings.Join(r.sink.acked, " "); g != "1/true 2/true" {
		t.Fatal(g)
	}
	if r.m.NeedsAck(2, "b") || !r.m.NeedsAck(4, "c") || !r.m.NeedsAck(4, "d") {
		t.Fatal("NeedsAck")
	}
}

func TestMemoryConsumer(t *testing.T) {
	r := newRig(t, "a", "b")
	r.cfg.Retention = api.WorkQueuePolicy
	r.start(api.ConsumerConfig{AckPolicy: api.AckExplicit, MemoryStorage: true})
	r.next("in", "1")
	r.ack(0, "", "")
	if len(r.sink.records) != 0 || r.m.Durable() {
		t.Fatal("records of a consumer in memory")
	}
	if g := strings.Join(r.sink.acked, " "); g != "1/false" {
		t.Fatal(g)
	}
}

// What the stream holds follows the log: until the record of an acknowledgement
// has come back, the stream is told that the message is needed, whatever the
// consumer knows, before and after a restart.
func TestNeededUntilLogged(t *testing.T) {
	for _, tc := range []struct {
		policy api.AckPolicy
		take   func(*rig)
	}{
		{api.AckExplicit, func(r *rig) { r.next("in", "2"); r.ack(0, "", ""); r.ack(1, "+TERM", "") }},
		{api.AckAll, func(r *rig) { r.next("in", "2"); r.ack(1, "", "") }},
		{api.AckNone, func(r *rig) { r.next("in", "2") }},
	} {
		t.Run(fmt.Sprint(tc.policy), func(t *testing.T) {
			r := newRig(t, "a", "b")
			r.cfg.Retention = api.InterestPolicy
			r.start(api.ConsumerConfig{Durable: "C", AckPolicy: tc.policy})
			needed := func(m *Machine, what string, want bool) {
				t.Helper()
				if a, b := m.NeedsAck(1, "a"), m.NeedsAck(2, "b"); a != want || b != want {
					t.Errorf("%s: needed %v and %v, want %v", what, a, b, want)
				}
			}
			tc.take(r)
			needed(r.m, "records on their way", true)
			snap := r.m.Snapshot()
			records := slices.Clone(r.sink.records)
			back := func(m *Machine, records [][]byte) {
				t.Helper()
				for _, rec := range records {
					if err := m.Apply(rec); err != nil {
						t.Fatal(err)
					}
				}
			}
			back(r.m, records)
			needed(r.m, "records are back", false)

			// The log holds what the checkpoint was ahead of.
			m, err := Restore(snap, r.env())
			if err != nil {
				t.Fatal(err)
			}
			needed(m, "restored", true)
			back(m, records)
			needed(m, "replayed", false)

			// The log has lost it.
			if m, err = Restore(snap, r.env()); err != nil {
				t.Fatal(err)
			}
			r.sink.records, r.sink.acked = nil, nil
			m.Start(r.now)
			needed(m, "started", true)
			back(m, r.sink.records)
			needed(m, "recorded again", false)
			if g := strings.Join(r.sink.acked, " "); g != "1/true 2/true" {
				t.Errorf("acknowledged %s", g)
			}
		})
	}
}

func TestRestart(t *testing.T) {
	for _, withSnapshot := range []bool{false, true} {
		cfg := explicit
		cfg.AckWait = 10 * time.Second
		r := newRig(t, "a", "b", "c", "d", "e", "f").start(cfg)
		orig := *r.m.Config()
		r.next("in", "5")
		r.ack(0, "", "")
		r.ack(2, "", "")
		r.ack(1, "-NAK", "")
		var snap []byte
		if withSnapshot {
			snap = r.m.Snapshot()
			if r.m.Dirty() {
				t.Fatal("dirty after a snapshot")
			}
		}
		r.next("in", "1")
		r.ack(3, `-NAK {"delay":60000000000}`, "")
		r.want("in:1 in:2 in:3 in:4 in:5 in:2x2")
		want := "delivered 6/5 floor 1/1 ack 3 redelivered 1 waiting 0 pending 1"
		r.wantInfo(want)
		r.restart(snap, orig)
		r.wantInfo(want)
		r.next("in", "99")
		r.want("in:6")
		r.pass(10 * time.Second)
		r.want("in:2x3 in:5x2 in:6x2")
		r.pass(49 * time.Second)
		r.ack(1, "", "")
		r.ack(4, "", "")
		r.got()
		r.pass(2 * time.Second)
		if g := r.got(); !strings.Contains(g, "in:4x2") {
			t.Fatalf("delayed redelivery: %q", g)
		}
	}
}

func TestUpdate(t *testing.T) {
	cfg := explicit
	r := newRig(t, "a.1", "b.1", "a.2", "b.2").start(cfg)
	n := *r.m.Config().Clone()
	n.FilterSubject = "b.*"
	n.AckWait = time.Second
	if err := ValidateUpdate(r.m.Config(), &n, false); err != nil {
		t.Fatal(err)
	}
	r.next("in", "1")
	r.m.Update(r.now, &n)
	r.wantInfo("delivered 1/1 floor 0/0 ack 1 redelivered 0 waiting 0 pending 2")
	r.next("in", "5")
	r.want("in:1 in:2 in:4")
	r.pass(time.Second)
	r.want("in:1x2 in:2x2 in:4x2")
}

// What an old filter has passed over comes with the new one, whether or not the
// machine has looked that far.
func TestUpdateOfFilter(t *testing.T) {
	for _, looked := range []bool{false, true} {
		cfg := explicit
		cfg.FilterSubject = "a.*"
		r := newRig(t, "a.1", "b.1", "b.2").start(cfg)
		r.next("in", "1")
		if looked {
			r.next("in", "1") // waits for one
		}
		n := *r.m.Config().Clone()
		n.FilterSubject = "b.*"
		r.m.Update(r.now, &n)
		if in := r.m.Info(r.now); in.NumPending != 2 {
			t.Errorf("%d messages pending, want 2", in.NumPending)
		}
		r.next("in", "5")
		r.want("in:1 in:2 in:3")
	}
}

func TestReset(t *testing.T) {
	r := newRig(t, "a", "b", "c").start(explicit)
	orig := *r.m.Config()
	r.next("in", "3")
	r.ack(0, "", "")
	cmd, seq, err := r.m.Reset(2)
	if err != nil || seq != 2 {
		t.Fatal(seq, err)
	}
	r.ack(1, "", "") // recorded before the reset is applied, but void
	before := len(r.sink.records)
	r.sink.records = append(r.sink.records, cmd)
	if err := r.m.Apply(cmd); err != nil {
		t.Fatal(err)
	}
	r.wantInfo("delivered 0/1 floor 0/1 ack 0 redelivered 0 waiting 0 pending 2")
	r.got()
	r.next("in", "1")
	r.want("in:2")
	// In the log the reset may come before the record made earlier.
	rec := r.sink.records
	rec[before-1], rec[before] = rec[before], rec[before-1]
	r.restart(nil, orig)
	r.wantInfo("delivered 1/2 floor 0/1 ack 1 redelivered 0 waiting 0 pending 1")
}

func TestOverflowAndPriority(t *testing.T) {
	cfg := explicit
	cfg.PriorityPolicy = api.PriorityOverflow
	cfg.PriorityGroups = []string{"g"}
	r := newRig(t).start(cfg)
	r.next("x", `{"batch":5,"group":"g","min_pending":3}`)
	r.publish("a")
	r.want("")
	r.publish("b", "c")
	r.want("x:1")
	r.next("y", `{"batch":5,"group":"g"}`)
	r.want("y:2 y:3")
	r.next("z", `{"batch":5}`)
	r.wantSaid("z: NATS/1.0 400 Bad Request - Priority Group missing||")

	cfg.PriorityPolicy = api.PriorityPrioritized
	r = newRig(t).start(cfg)
	r.next("low", `{"batch":2,"group":"g","priority":5}`)
	r.next("high", `{"batch":2,"group":"g","priority":1}`)
	r.publish("a", "b", "c")
	r.want("high:1 high:2 low:3")
}

func TestPinned(t *testing.T) {
	cfg := explicit
	cfg.PriorityPolicy = api.PriorityPinnedClient
	cfg.AckWait = time.Hour
	cfg.PriorityGroups = []string{"g"}
	r := newRig(t).start(cfg)
	r.next("x", `{"batch":2,"group":"g"}`)
	r.next("y", `{"batch":2,"group":"g"}`)
	r.publish("a", "b", "c")
	r.want("x:1 x:2")
	h := string(r.sink.out[0].msg.Header)
	id, ok := strings.CutPrefix(h, "NATS/1.0\r\nNats-Pin-Id: ")
	id, ok2 := strings.CutSuffix(id, "\r\n\r\n")
	if !ok || !ok2 || len(id) != pinIDLen {
		t.Fatalf("header %q", h)
	}
	r.next("x", `{"batch":1,"group":"g","id":"`+id+`"}`)
	r.want("x:3")
	r.next("q", `{"batch":1,"group":"g","id":"other"}`)
	r.wantSaid("q: NATS/1.0 423 Nats-Pin-Id mismatch||")
	r.pass(DefaultPinnedTTL)
	r.publish("d")
	r.want("y:4")
	if err := r.m.Unpin(r.now, "g"); err != nil {
		t.Fatal(err)
	}
}

func TestParseAck(t *testing.T) {
	for in, want := range map[string]AckRef{
		"$JS.ACK.S.C.1.2.3.4.5":               {1, 2, 3, 4, 5},
		"$JS.ACK._.hash.S.C.1.2.3.4.5":        {1, 2, 3, 4, 5},
		"$JS.ACK._.hash.S.C.1.2.3.4.5.random": {1, 2, 3, 4, 5},
	} {
		s, c, ref, ok := ParseAck(in)
		if !ok || s != "S" || c != "C" || ref != want {
			t.Errorf("%s: %q %q %+v %v", in, s, c, ref, ok)
		}
	}
	for _, in := range []string{"", "$JS.ACK.S.C.1.2.3.4", "$JS.ACK.S.C.1.x.3.4.5", "$JS.ACK.S.C.1.2.3.4.5.6", "a.b"} {
		if _, _, _, ok := ParseAck(in); ok {
			t.Errorf("%q accepted", in)
		}
	}
}

// Of large messages no more is read ahead than is delivered: the rest would be read
// again, and all of it be in memory.
func TestLargeMessagesReadAhead(t *testing.T) {
	r := newRig(t)
	large := string(make([]byte, pumpBytes/4))
	for range 40 {
		r.st.append(r.now.UnixNano(), "a", large)
	}
	r.start(api.ConsumerConfig{DeliverSubject: "d"})
	if n := len(r.sink.out); n != 40 {
		t.Fatalf("%d messages", n)
	}
	if r.st.ranged > 50 {
		t.Errorf("%d messages were read to deliver 40", r.st.ranged)
	}
}
