//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"petiole/faults/rig"
)

// monitor looks at a process again and again.
type monitor struct {
	p    *rig.Process
	stop chan struct{}
	done chan struct{}

	mu   sync.Mutex
	anon int64
	rss  int64
	fds  int
}

func watch(p *rig.Process) *monitor {
	m := &monitor{p: p, stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(m.done)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			m.look()
			select {
			case <-tick.C:
			case <-m.stop:
				return
			case <-p.Done():
				return
			}
		}
	}()
	return m
}

func (m *monitor) look() {
	u, err := m.p.Usage()
	if err != nil {
		return // it is ending
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.p.PID()))
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.anon, m.rss, m.fds = max(m.anon, u.Anon), max(m.rss, u.RSS), max(m.fds, len(fds))
}

// peak is the most that was seen of each since the last call.
type peak struct {
	anon, rss int64
	fds       int
}

func (m *monitor) take() peak {
	m.look()
	m.mu.Lock()
	defer m.mu.Unlock()
	p := peak{m.anon, m.rss, m.fds}
	m.anon, m.rss, m.fds = 0, 0, 0
	return p
}

func (m *monitor) close() {
	close(m.stop)
	<-m.done
}

// processIO reads a counter of /proc/PID/io (proc_pid_io(5)).
func processIO(p *rig.Process, counter string) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", p.PID()))
	if err != nil {
		return 0, fmt.Errorf("read what %s has read and written: %w", p.Name(), err)
	}
	for line := range strings.Lines(string(b)) {
		if name, value, _ := strings.Cut(strings.TrimSpace(line), ": "); name == counter {
			var n int64
			_, err := fmt.Sscan(value, &n)
			return n, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/io has no %s", p.PID(), counter)
}

// onDisk is what the files under dir take on the disk, in bytes.
func onDisk(dir string) (n int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return skipGone(err)
		}
		info, err := d.Info()
		if err == nil {
			n += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return skipGone(err)
	})
	return n, err
}

// skipGone forgets that a file was removed while it was looked at.
func skipGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// flood publishes to a stream as fast as the edge acknowledges.
type flood struct {
	url      string
	subjects []string
	min, max int // bytes of a message
	acked    atomic.Int64
	bytes    atomic.Int64
}

// floodConns are the connections, each with floodWindow publishes in flight.
const (
	floodConns  = 4
	floodWindow = 256
)

// run publishes until more says no, and waits for all answers.
func (f *flood) run(ctx context.Context, more func() bool) error {
	var wg sync.WaitGroup
	errs := make([]error, floodConns)
	for i := range floodConns {
		wg.Go(func() { errs[i] = f.one(ctx, i, more) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (f *flood) one(ctx context.Context, i int, more func() bool) error {
	nc, err := nats.Connect(f.url, nats.NoReconnect(), nats.Timeout(rig.StartTimeout))
	if err != nil {
		return err
	}
	defer nc.Close()
	r := rand.New(rand.NewPCG(uint64(i), 5))
	noise := make([]byte, 1<<20)
	for j := range noise {
		noise[j] = byte(r.Uint32())
	}
	var refused atomic.Pointer[string]
	slots := make(chan int, floodWindow) // holds the length of each publish under way
	inbox := nats.NewInbox()
	if _, err := nc.Subscribe(inbox, func(m *nats.Msg) {
		if bytes.Contains(m.Data, []byte(`"error"`)) {
			s := string(m.Data)
			refused.Store(&s)
		}
		f.acked.Add(1)
		f.bytes.Add(int64(<-slots))
	}); err != nil {
		return err
	}
	lost := nc.StatusChanged(nats.CLOSED)
	for n := 0; more(); n++ {
		size := f.min + r.IntN(f.max-f.min+1)
		select {
		case slots <- size:
		default: // full: what is buffered has to go out before an answer comes
			if err := nc.Flush(); err != nil {
				return fmt.Errorf("publish: %w", err)
			}
			select {
			case slots <- size:
			case <-lost:
				return fmt.Errorf("publish: %w", nats.ErrConnectionClosed)
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if s := refused.Load(); s != nil {
			return fmt.Errorf("publish: the edge answers %s", *s)
		}
		at := r.IntN(len(noise) - size)
		if err := nc.PublishRequest(f.subjects[(n+i)%len(f.subjects)], inbox, noise[at:at+size]); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
	}
	if err := nc.Flush(); err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	for range floodWindow { // every slot free again: everything is answered
		select {
		case slots <- 0:
		case <-lost:
			return fmt.Errorf("publish: %w", nats.ErrConnectionClosed)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// count lets n publishes through, over all connections.
func count(n int) func() bool {
	var used atomic.Int64
	return func() bool { return used.Add(1) <= int64(n) }
}

// prober publishes one message after the other, at rest for a while in between,
// and remembers how long each took to be acknowledged.
type prober struct {
	mu   sync.Mutex
	took []time.Duration
	stop func() error
}

func probe(ctx context.Context, url, subject string) (*prober, error) {
	nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(rig.StartTimeout))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	p := &prober{}
	done := make(chan error, 1)
	go func() {
		defer nc.Close()
		data := make([]byte, 256)
		for ctx.Err() == nil {
			begun := time.Now()
			m, err := nc.Request(subject, data, 30*time.Second)
			if err == nil && bytes.Contains(m.Data, []byte(`"error"`)) {
				err = fmt.Errorf("the edge answers %s", m.Data)
			}
			if err != nil {
				done <- fmt.Errorf("publish: %w", err)
				return
			}
			p.mu.Lock()
			p.took = append(p.took, time.Since(begun))
			p.mu.Unlock()
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
		done <- nil
	}()
	p.stop = func() error {
		cancel()
		return <-done
	}
	return p, nil
}

// take returns what the publishes since the last call took, sorted.
func (p *prober) take() []time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	took := p.took
	p.took = nil
	slices.Sort(took)
	return took
}

// quantile of sorted durations.
func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	return d[min(len(d)-1, int(q*float64(len(d))))]
}
