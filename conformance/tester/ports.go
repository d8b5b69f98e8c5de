package tester

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
)

// ports hands out ports for servers. A server that is stopped and started again
// has to find its port free, so the ports lie below those that the system gives
// to whoever does not care.
type ports struct {
	mu        sync.Mutex
	low, high int
	next      int
	taken     map[int]bool
}

func newPorts() (*ports, error) {
	const most = 12000
	high := 32768
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		if _, err := fmt.Sscan(strings.TrimSpace(string(text)), &high); err != nil {
			return nil, fmt.Errorf("the system's range of ports: %w", err)
		}
	}
	low := max(high-most, 1024)
	if high-low < 100 {
		return nil, fmt.Errorf("no ports below the system's own range, which begins at %d", high)
	}
	return &ports{low: low, high: high, next: low, taken: map[int]bool{}}, nil
}

// take returns a port of 127.0.0.1 that nobody has.
func (p *ports) take() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range p.high - p.low {
		port := p.next
		if p.next++; p.next == p.high {
			p.next = p.low
		}
		if p.taken[port] {
			continue
		}
		l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			return 0, err
		}
		p.taken[port] = true
		return port, nil
	}
	return 0, errors.New("no free port")
}

func (p *ports) give(port int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.taken, port)
}
