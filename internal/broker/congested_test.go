package broker

import (
	"io"
	"runtime"
	"testing"
	"time"
)

// TestCongested delivers until a client that reads nothing is congested, and
// has it read then.
func TestCongested(t *testing.T) {
	s := run(t, Options{MaxPending: 4 << 20})
	r := rawDial(t, s)
	r.send(quiet + "SUB inbox 1\r\nSUB inbox.queue q 2\r\nPING\r\n")
	r.expect("PONG\r\n")
	p := s.Account().NewPublisher()
	for _, subj := range []string{"inbox", "inbox.queue", "nobody"} {
		if p.Congested(subj) {
			t.Fatalf("%s is congested at the start", subj)
		}
	}
	data := make([]byte, 64<<10)
	n := 0
	for !p.Congested("inbox") {
		if n++; n > 1000 {
			t.Fatal("never congested")
		}
		p.Deliver("inbox", "seen", nil, nil, data)
		p.Flush()
	}
	if !p.Congested("inbox.queue") || p.Congested("nobody") {
		t.Error("congestion is a client's, whatever it subscribes to")
	}
	want := n * (len("MSG seen 1 65536\r\n\r\n") + len(data))
	if _, err := io.CopyN(io.Discard, r.r, int64(want)); err != nil {
		t.Fatal(err)
	}
	until(t, "what was read is no longer pending", func() bool { return !p.Congested("inbox") })
	if st := s.Stats(); st.SlowConsumers != 0 {
		t.Errorf("%+v", st)
	}
}

// TestHeldBackFromTheStart: a publisher is held back for a client although the
// goroutine that is to write to it has not had a processor yet.
func TestHeldBackFromTheStart(t *testing.T) {
	s := run(t, Options{MaxPending: 4 << 20}, func(s *Server) { s.stallMax, s.stuckAfter = time.Millisecond, time.Minute })
	r := rawDial(t, s)
	r.send(quiet + "SUB inbox 1\r\nPING\r\n")
	r.expect("PONG\r\n")
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	heldBack(t, s)
}

// TestHeldBackWhileWriting: likewise if it is another publisher that writes to
// the client, and has not had a processor for long.
func TestHeldBackWhileWriting(t *testing.T) {
	s := run(t, Options{MaxPending: 4 << 20}, func(s *Server) { s.stallMax = time.Millisecond })
	r := rawDial(t, s)
	r.send(quiet + "SUB inbox 1\r\nPING\r\n")
	r.expect("PONG\r\n")
	s.mu.Lock()
	var c *client
	for _, c = range s.clients {
	}
	s.mu.Unlock()
	flusher := func(is bool) (was bool) {
		c.out.mu.Lock()
		defer c.out.mu.Unlock()
		was, c.out.flushing = c.out.flushing, is
		return was
	}
	until(t, "PONG is sent", func() bool { return !flusher(true) })
	heldBack(t, s)
	flusher(false)
	c.flush()
	r.expect("MSG inbox 1 65536\r\n")
}

// heldBack publishes until the publisher is held back for the only client.
func heldBack(t *testing.T, s *Server) {
	t.Helper()
	p := s.Account().NewPublisher()
	data := make([]byte, 64<<10)
	for s.Stats().Stalls == 0 {
		p.Publish("inbox", "", nil, data)
		p.flush(true)
		if c := s.Conns(); len(c) != 1 || c[0].Pending > 2<<20 {
			t.Fatalf("nothing held the publisher back: %+v", c)
		}
	}
}
