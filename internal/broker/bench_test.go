package broker

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// benchPub measures messages of size octets from one publisher to subs
// subscribers, all on raw sockets so that the clients cost little.
func benchPub(b *testing.B, size, subs int) {
	s := run(b, Options{})
	payload := bytes.Repeat([]byte{'x'}, size)
	msg := fmt.Appendf(nil, "PUB bench.subject %d\r\n%s\r\n", size, payload)
	delivered := len(fmt.Appendf(nil, "MSG bench.subject 1 %d\r\n%s\r\n", size, payload))
	var done sync.WaitGroup
	for range subs {
		r := rawDial(b, s)
		r.send("CONNECT {\"verbose\":false}\r\nSUB bench.subject 1\r\nPING\r\n")
		r.expect("PONG\r\n")
		_ = r.conn.SetDeadline(noDeadline)
		done.Add(1)
		go func() {
			defer done.Done()
			buf := make([]byte, 64<<10)
			for left := b.N * delivered; left > 0; {
				n, err := r.conn.Read(buf)
				if err != nil {
					b.Errorf("%d octets missing: %v", left, err)
					return
				}
				left -= n
			}
		}()
	}
	pub := rawDial(b, s)
	pub.send("CONNECT {\"verbose\":false}\r\n")
	_ = pub.conn.SetDeadline(noDeadline)
	per := max(1, (32<<10)/len(msg))
	chunk := bytes.Repeat(msg, per)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	for left := b.N; left > 0; {
		n := min(left, per)
		if _, err := pub.conn.Write(chunk[:n*len(msg)]); err != nil {
			b.Fatal(err)
		}
		left -= n
	}
	pub.send("PING\r\n")
	pub.expect("PONG\r\n")
	done.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
	if subs > 1 {
		b.ReportMetric(float64(b.N*subs)/b.Elapsed().Seconds(), "deliveries/s")
	}
}

func BenchmarkPub(b *testing.B) {
	for _, v := range []struct{ size, subs int }{{128, 0}, {128, 1}, {128, 10}, {16, 1}, {4096, 1}, {64 << 10, 1}, {64 << 10, 10}} {
		b.Run(fmt.Sprintf("%dB_1x%d", v.size, v.subs), func(b *testing.B) { benchPub(b, v.size, v.subs) })
	}
}

// BenchmarkRequest measures the round trip of a request from one raw client to
// another.
func BenchmarkRequest(b *testing.B) {
	s := run(b, Options{})
	svc := rawDial(b, s)
	svc.send("CONNECT {\"verbose\":false}\r\nSUB svc 1\r\nPING\r\n")
	svc.expect("PONG\r\n")
	_ = svc.conn.SetDeadline(noDeadline)
	go func() {
		req := make([]byte, len("MSG svc 1 r.1 2\r\nhi\r\n"))
		for {
			if _, err := io.ReadFull(svc.r, req); err != nil {
				return
			}
			if _, err := io.WriteString(svc.conn, "PUB r.1 2\r\nho\r\n"); err != nil {
				return
			}
		}
	}()
	c := rawDial(b, s)
	_ = c.conn.SetDeadline(noDeadline)
	c.send("CONNECT {\"verbose\":false}\r\nSUB r.1 1\r\n")
	b.ReportAllocs()
	for b.Loop() {
		c.send("PUB svc r.1 2\r\nhi\r\n")
		c.expect("MSG r.1 1 2\r\nho\r\n")
	}
	_ = svc.conn.Close()
}

// BenchmarkTLS measures messages of 128 octets from one client to another, both
// with TLS: in batches, and one at a time with an answer.
func BenchmarkTLS(b *testing.B) {
	ca := newAuthority(b)
	s := run(b, Options{TLS: ca.server(b)})
	secure := nats.Secure(&tls.Config{RootCAs: ca.pool})
	data := make([]byte, 128)
	b.Run("batches", func(b *testing.B) {
		from, to := dial(b, s, secure), dial(b, s, secure)
		got := make(chan struct{})
		n := 0
		_, err := to.Subscribe("t", func(*nats.Msg) {
			if n++; n == b.N {
				close(got)
			}
		})
		check(b, err)
		check(b, to.Flush())
		b.ResetTimer()
		for range b.N {
			check(b, from.Publish("t", data))
		}
		<-got
	})
	b.Run("request", func(b *testing.B) {
		from, to := dial(b, s, secure), dial(b, s, secure)
		_, err := to.Subscribe("svc", func(m *nats.Msg) { _ = m.Respond(nil) })
		check(b, err)
		check(b, to.Flush())
		for b.Loop() {
			_, err := from.Request("svc", data, 10*time.Second)
			check(b, err)
		}
	})
}
