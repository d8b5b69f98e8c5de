package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"petiole/faults/rig"
)

const (
	peerNATS    = "nats-server"
	peerPetiole = "petiole"
)

// env is what a case runs against: one server on a store that was empty.
type env struct {
	peer     string
	binary   string
	dir      string // configuration, log, and store in "js"
	addr     string
	mu       sync.Mutex
	proc     *rig.Process // under mu; nil before the first start
	expired  bool         // under mu: out of time, nothing is to be started any more
	url      string
	ready    time.Duration // process creation to first PONG
	duration time.Duration
	conns    []*nats.Conn
	raws     []*rawConn
	clients  time.Duration // CPU time of the clients within what was measured
}

// start starts the server and returns when it answers.
func (e *env) start() (err error) {
	e.mu.Lock()
	if e.expired {
		e.mu.Unlock()
		return context.DeadlineExceeded
	}
	proc, err := rig.Start(e.peer, filepath.Join(e.dir, "log"), e.binary, "-c", filepath.Join(e.dir, confName))
	if err == nil {
		e.proc = proc
	}
	e.mu.Unlock()
	if err != nil {
		return err
	}
	if err := rig.WaitReady(e.proc, e.addr, 15*time.Second); err != nil {
		return err
	}
	e.ready = time.Since(e.proc.Started())
	return nil
}

// kill ends the server at once, and with it whatever waits for it.
func (e *env) kill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.expired = true
	if e.proc != nil {
		e.proc.Kill()
	}
}

// stop closes the clients and ends the server in order.
func (e *env) stop() error {
	for _, nc := range e.conns {
		nc.Close()
	}
	for _, r := range e.raws {
		_ = r.Close()
	}
	e.conns, e.raws = nil, nil
	return e.proc.Stop(30 * time.Second)
}

func (e *env) store() string { return filepath.Join(e.dir, "js") }

const confName = "server.conf"

// connect opens a client connection that is closed when the repetition ends.
func (e *env) connect() (*nats.Conn, error) {
	nc, err := nats.Connect(e.url, nats.Timeout(5*time.Second), nats.MaxReconnects(0))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", e.url, err)
	}
	e.conns = append(e.conns, nc)
	return nc, nil
}

func (e *env) connectN(n int) ([]*nats.Conn, error) {
	out := make([]*nats.Conn, n)
	for i := range out {
		var err error
		if out[i], err = e.connect(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// runOnce starts the peer on an empty store, runs the case once and stops it.
// Cases return their own metrics; CPU per message and resident set are added
// here, so that every case reports them the same way.
func runOnce(ctx context.Context, c benchCase, peer, binary, work string, d time.Duration) (ms []metric, err error) {
	dir, err := os.MkdirTemp(work, c.name+"-"+peer+"-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	port, err := rig.FreePort()
	if err != nil {
		return nil, err
	}
	syncLine := ""
	if c.syncAlways || peer == peerPetiole {
		syncLine = "sync_interval: always"
	}
	e := &env{peer: peer, binary: binary, dir: dir, addr: rig.Addr(port), url: "nats://" + rig.Addr(port), duration: d}
	if _, err := rig.WriteFile(dir, confName, fmt.Sprintf(
		"listen: %q\nserver_name: bench\njetstream {\n  store_dir: %q\n  %s\n}\n", e.addr, e.store(), syncLine)); err != nil {
		return nil, err
	}
	defer e.kill()
	// Not everything in a client can be told to give up. Without a server it does.
	ctx, cancel := context.WithTimeout(ctx, 4*d+30*time.Second+c.extra)
	defer cancel()
	defer context.AfterFunc(ctx, e.kill)()
	if err := e.start(); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.stop()) }()
	ms, messages, cpu, err := c.run(ctx, e)
	if err != nil {
		return nil, err
	}
	u, err := e.proc.Usage()
	if err != nil {
		return nil, err
	}
	if messages > 0 {
		ms = append(ms,
			metric{metricCPU, "us/msg", "less", cpu.Seconds() * 1e6 / float64(messages)},
			metric{"clients' CPU", "us/msg", "less", e.clients.Seconds() * 1e6 / float64(messages)})
	}
	return append(ms,
		metric{metricRSS, "MiB", "less", float64(u.RSS) / (1 << 20)},
		metric{metricAnon, "MiB", "less", float64(u.Anon) / (1 << 20)}), nil
}
