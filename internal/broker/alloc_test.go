package broker

import (
	"fmt"
	"runtime"
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
