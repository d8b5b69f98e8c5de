package udprelay

import (
	"net"
	"testing"
	"time"
)

// patience is how long the test waits for what is to happen anyway.
const patience = time.Minute

// echo answers every datagram with itself.
func echo(t *testing.T) *net.UDPConn {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 2000)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	return c
}

func TestRelay(t *testing.T) {
	one, two := echo(t), echo(t)
	r, err := New(one.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	passed := make(chan int, 100)
	r.OnUp(func(n int) { passed <- n })
	c, err := net.Dial("udp4", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, 100)
	ask := func(wait time.Duration) (string, time.Duration) {
		start := time.Now()
		c.Write([]byte("hello"))
		c.SetReadDeadline(start.Add(wait))
		n, _ := c.Read(buf)
		return string(buf[:n]), time.Since(start)
	}
	if s, _ := ask(patience); s != "hello" || <-passed != 5 {
		t.Fatalf("answer %q", s)
	}
	r.SetDelay(50 * time.Millisecond)
	if s, d := ask(patience); s != "hello" || d < 100*time.Millisecond {
		t.Errorf("answer %q after %v with 50 ms each way", s, d)
	}
	// dropped waits until so many have been.
	dropped := func(want int64) {
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			if _, _, n := r.Counts(); n == want {
				return
			} else if time.Now().After(end) {
				t.Fatalf("%d were dropped, want %d", n, want)
			}
		}
	}
	r.SetDelay(0)
	r.SetBlackhole(true)
	if s, _ := ask(100 * time.Millisecond); s != "" {
		t.Errorf("answer %q out of a black hole", s)
	}
	dropped(1)
	r.SetBlackhole(false)
	r.SetLoss(1)
	if s, _ := ask(100 * time.Millisecond); s != "" {
		t.Errorf("answer %q though all is lost", s)
	}
	dropped(2)
	r.SetLoss(0)
	one.Close()
	if err := r.SetTarget(two.LocalAddr().String()); err != nil {
		t.Fatal(err)
	}
	if s, _ := ask(patience); s != "hello" {
		t.Errorf("answer %q of another target", s)
	}
	if up, down, dropped := r.Counts(); up != 3 || down != 3 || dropped != 2 {
		t.Errorf("counted %d up, %d down, %d dropped", up, down, dropped)
	}
}
