//go:build unix

package broker

import (
	"bytes"
	"io"
	mrand "math/rand/v2"
	"net"
	"testing"
)

// TestWriteNow writes queues of many pieces to a socket that takes part of
// them at a time.
func TestWriteNow(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	defer func() { _ = ln.Close() }()
	far, err := net.Dial("tcp", ln.Addr().String())
	check(t, err)
	defer func() { _ = far.Close() }()
	near, err := ln.Accept()
	check(t, err)
	defer func() { _ = near.Close() }()
	// Small buffers, and nobody reads before the first short write: the socket
	// can not take everything at once.
	check(t, near.(*net.TCPConn).SetWriteBuffer(64<<10))
	check(t, far.(*net.TCPConn).SetReadBuffer(64<<10))
	c := &client{raw: newDirectWriter(near)}
	var want []byte
	var segs []seg
	for i := range 300 {
		s := newSlab(1 + mrand.IntN(64<<10))
		s.b = s.b[:1+mrand.IntN(cap(s.b))]
		for j := range s.b {
			s.b[j] = byte(i + j)
		}
		want = append(want, s.b...)
		segs = append(segs, seg{s, s.b})
	}
	got := make(chan []byte)
	full := make(chan struct{})
	go func() {
		<-full
		b, _ := io.ReadAll(far)
		got <- b
	}()
	total, short := 0, 0
	for len(segs) > 0 {
		n, rest, err := c.writeNow(segs)
		check(t, err)
		total += n
		if segs = rest; len(segs) > 0 {
			if short++; short == 1 {
				close(full)
			}
			// Waits until the reader has made room.
			n, err := near.Write(segs[0].b[:1])
			check(t, err)
			total += n
			if segs[0].b = segs[0].b[1:]; len(segs[0].b) == 0 {
				segs = segs[1:]
			}
		}
	}
	if short == 0 {
		t.Fatal("the socket took everything at once, which tests nothing")
	}
	check(t, near.Close())
	if b := <-got; total != len(want) || !bytes.Equal(b, want) {
		t.Errorf("%d octets written and %d read of %d", total, len(b), len(want))
	}
}
