//go:build unix

package broker

import (
	"bytes"
	"io"
	mrand "math/rand/v2"
	"net"
	"testing"
	"time"
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
	go func() {
		b, _ := io.ReadAll(far)
		got <- b
	}()
	total, short := 0, 0
	for len(segs) > 0 {
		n, rest, err := c.writeNow(segs)
		check(t, err)
		total += n
		if segs = rest; len(segs) > 0 {
			short++
			time.Sleep(100 * time.Microsecond) // the reader makes room
		}
	}
	check(t, near.Close())
	if b := <-got; total != len(want) || !bytes.Equal(b, want) {
		t.Errorf("%d octets written and %d read of %d", total, len(b), len(want))
	}
	if short == 0 {
		t.Error("the socket took everything at once, which tests nothing")
	}
}
