// Package udprelay puts a bad network between two programs that talk over UDP:
// a relay on a loopback port that delays, drops or swallows datagrams, and
// counts them. It is for tests and measuring rigs.
package udprelay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Relay forwards datagrams between clients and one target. Every client gets
// a socket of its own towards the target, as behind a NAT. Its settings may be
// changed at any time.
type Relay struct {
	conn   *net.UDPConn
	target atomic.Pointer[netip.AddrPort]
	delay  atomic.Int64 // ns, each way
	loss   atomic.Int64 // parts per million, each way
	black  atomic.Bool
	closed chan struct{}

	onUp, onDown atomic.Pointer[func(size int)]

	up, down, dropped atomic.Int64 // datagrams

	mu      sync.Mutex
	clients map[netip.AddrPort]*net.UDPConn
	wg      sync.WaitGroup
}

// New starts a relay to target ("host:port") on a system-chosen port of
// 127.0.0.1.
func New(target string) (*Relay, error) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	_ = conn.SetReadBuffer(4 << 20) // a smaller one only loses more
	r := &Relay{conn: conn, closed: make(chan struct{}), clients: map[netip.AddrPort]*net.UDPConn{}}
	if err := r.SetTarget(target); err != nil {
		conn.Close()
		return nil, err
	}
	r.wg.Add(1)
	go r.listen()
	return r, nil
}

// Addr returns the address that clients send to.
func (r *Relay) Addr() string { return r.conn.LocalAddr().String() }

// SetTarget changes where datagrams go.
func (r *Relay) SetTarget(target string) error {
	a, err := net.ResolveUDPAddr("udp4", target)
	if err != nil {
		return fmt.Errorf("relay target: %w", err)
	}
	ap := a.AddrPort()
	ap = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	r.target.Store(&ap)
	return nil
}

// SetDelay holds each datagram back for d, in either direction.
func (r *Relay) SetDelay(d time.Duration) { r.delay.Store(int64(d)) }

// SetLoss drops datagrams at random with that probability, either direction.
func (r *Relay) SetLoss(p float64) { r.loss.Store(int64(p * 1e6)) }

// SetBlackhole swallows every datagram, also those held back, while on.
func (r *Relay) SetBlackhole(on bool) { r.black.Store(on) }

// OnUp has fn called for each datagram that is forwarded to the target, right
// before it is. fn must not block.
func (r *Relay) OnUp(fn func(size int)) { r.onUp.Store(&fn) }

// OnDown is the same for datagrams forwarded back to a client.
func (r *Relay) OnDown(fn func(size int)) { r.onDown.Store(&fn) }

// Counts returns the datagrams forwarded to the target, back, and dropped.
func (r *Relay) Counts() (up, down, dropped int64) {
	return r.up.Load(), r.down.Load(), r.dropped.Load()
}

// Close ends the relay.
func (r *Relay) Close() error {
	close(r.closed)
	err := r.conn.Close()
	r.mu.Lock()
	for _, c := range r.clients {
		c.Close()
	}
	r.mu.Unlock()
	r.wg.Wait()
	return err
}

type held struct {
	due  time.Time
	data []byte
}

// pipe sends what comes through the channel on when it is due.
func (r *Relay) pipe(in <-chan held, count *atomic.Int64, hook *atomic.Pointer[func(int)], send func([]byte)) {
	defer r.wg.Done()
	for {
		select {
		case <-r.closed:
			return
		case h := <-in:
			if wait := time.Until(h.due); wait > 0 {
				select {
				case <-time.After(wait):
				case <-r.closed:
					return
				}
			}
			if r.black.Load() {
				r.dropped.Add(1)
				continue
			}
			count.Add(1)
			if fn := hook.Load(); fn != nil {
				(*fn)(len(h.data))
			}
			send(h.data)
		}
	}
}

// offer queues a datagram, or drops it as a full router would.
func (r *Relay) offer(ch chan<- held, p []byte) {
	if r.black.Load() || r.loss.Load() > 0 && rand.Int64N(1e6) < r.loss.Load() {
		r.dropped.Add(1)
		return
	}
	select {
	case ch <- held{time.Now().Add(time.Duration(r.delay.Load())), append([]byte(nil), p...)}:
	default:
		r.dropped.Add(1)
	}
}

const queue = 16384

func (r *Relay) listen() {
	defer r.wg.Done()
	ups := map[netip.AddrPort]chan held{}
	buf := make([]byte, 64<<10)
	for {
		n, from, err := r.conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error of an earlier datagram
		}
		ch := ups[from]
		if ch == nil {
			if ch, err = r.client(from); err != nil {
				continue
			}
			ups[from] = ch
		}
		r.offer(ch, buf[:n])
	}
}

func (r *Relay) client(from netip.AddrPort) (chan held, error) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	_ = c.SetReadBuffer(4 << 20)
	r.mu.Lock()
	r.clients[from] = c
	r.mu.Unlock()
	select {
	case <-r.closed:
		c.Close()
	default:
	}
	up, down := make(chan held, queue), make(chan held, queue)
	r.wg.Add(3)
	go r.pipe(up, &r.up, &r.onUp, func(p []byte) { _, _ = c.WriteToUDPAddrPort(p, *r.target.Load()) })
	go r.pipe(down, &r.down, &r.onDown, func(p []byte) { _, _ = r.conn.WriteToUDPAddrPort(p, from) })
	go func() {
		defer r.wg.Done()
		buf := make([]byte, 64<<10)
		for {
			n, _, err := c.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				r.offer(down, buf[:n])
			}
		}
	}()
	return up, nil
}
