package broker

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
)

// TestRoutingDoesNotAllocate counts allocations of the whole process while
// messages are routed to a client: on one subject, on subjects used once (as
// replies and acknowledgements are) and to a handler that responds.
func TestRoutingDoesNotAllocate(t *testing.T) {
	s := run(t, Options{})
	acc := s.Account()
	r := rawDial(t, s)
	r.send(quiet + "SUB in.> 1\r\nSUB out.* q 2\r\nPING\r\n")
	r.expect("PONG\r\n")
	_ = r.conn.SetDeadline(noDeadline)
	var read atomic.Uint64
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := r.conn.Read(buf)
			read.Add(uint64(n))
			if err != nil {
				return
			}
		}
	}()
	_, err := acc.Handle("svc", func(m *Msg) { m.Respond(m.Header, m.Data) })
	check(t, err)
	p := acc.NewPublisher()
	hdr, data := []byte("NATS/1.0\r\nA: b\r\n\r\n"), make([]byte, 200)
	once := make([][]byte, 20000)
	for i := range once {
		once[i] = fmt.Appendf(nil, "out.%d", i)
	}
	i, k := 0, 0
	for name, f := range map[string]func(){
		"one subject": func() { p.Publish("in.a", "", hdr, data) },
		"once": func() {
			p.PublishBytes(once[k%len(once)], nil, nil, data)
			k++
		},
		"response": func() { p.Publish("svc", "in.reply", nil, data) },
	} {
		for range 100 { // fills caches and pools
			f()
		}
		p.Flush()
		// A few are permitted: the collector empties pools.
		if n := testing.AllocsPerRun(5000, func() {
			f()
			if i++; i%50 == 0 {
				p.Flush()
				// On a busy machine the reader would fall behind, and more would be
				// queued than pools hold.
				for read.Load() < s.outBytes.Load() {
					runtime.Gosched()
				}
			}
		}); n >= 0.1 {
			t.Errorf("%s: %.2f allocations per message", name, n)
		}
		p.Flush()
	}
}

// TestPublishDoesNotAllocate is about what a client sends: parsed, routed and
// written to two subscribers.
func TestPublishDoesNotAllocate(t *testing.T) {
	s := run(t, Options{})
	var read atomic.Uint64
	for range 2 {
		r := rawDial(t, s)
		r.send(quiet + "SUB in.> 1\r\nPING\r\n")
		r.expect("PONG\r\n")
		_ = r.conn.SetDeadline(noDeadline)
		go func() {
			buf := make([]byte, 64<<10)
			for {
				n, err := r.conn.Read(buf)
				read.Add(uint64(n))
				if err != nil {
					return
				}
			}
		}()
	}
	pub := rawDial(t, s)
	pub.send(`CONNECT {"verbose":false,"headers":true}` + "\r\nPING\r\n")
	pub.expect("PONG\r\n")
	_ = pub.conn.SetDeadline(noDeadline)
	const each = 50
	data := strings.Repeat("x", 200)
	input := bytes.Repeat(fmt.Appendf(nil, "PUB in.a 200\r\n%s\r\nHPUB in.b re.1 12 212\r\nNATS/1.0\r\n\r\n%s\r\n", data, data), each/2)
	output := each / 2 * len("MSG in.a 1 200\r\n"+data+"\r\nHMSG in.b 1 re.1 12 212\r\nNATS/1.0\r\n\r\n"+data+"\r\n") * 2
	publish := func() {
		read.Store(0)
		if _, err := pub.conn.Write(input); err != nil {
			t.Fatal(err)
		}
		for read.Load() < uint64(output) {
			runtime.Gosched()
		}
		if n := read.Load(); n != uint64(output) {
			t.Fatalf("%d octets came, want %d", n, output)
		}
	}
	publish()
	if n := testing.AllocsPerRun(200, publish) / each; n >= 0.1 {
		t.Errorf("%.2f allocations per message", n)
	}
}

// TestLargePayloadIsNotCopiedPerReceiver looks into the queues of several
// subscribers of one large message.
func TestLargePayloadIsNotCopiedPerReceiver(t *testing.T) {
	s := run(t, Options{})
	const n = 5
	for range n {
		r := rawDial(t, s)
		r.send(quiet + "SUB big 1\r\nPING\r\n")
		r.expect("PONG\r\n")
	}
	data := make([]byte, 256<<10)
	p := s.Account().NewPublisher()
	p.Publish("big", "", nil, data)
	var shared *slab
	held := 0
	for _, c := range p.dirty {
		c.out.mu.Lock()
		for _, seg := range c.out.segs {
			if len(seg.b) < len(data) {
				continue
			}
			held++
			if shared == nil {
				shared = seg.own
			}
			if seg.own != shared {
				t.Error("a subscriber has a copy of its own")
			}
		}
		c.out.mu.Unlock()
	}
	if held != n {
		t.Errorf("%d queues hold the message, want %d", held, n)
	}
	p.Flush()
}
