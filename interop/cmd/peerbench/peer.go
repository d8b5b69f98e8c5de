package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go"

	"petiole/faults/rig"
)

const (
	peerNATS    = "nats-server"
	peerPetiole = "petiole"
)

// env is what a case runs against: one fresh server.
type env struct {
	proc     *rig.Process
	url      string
	ready    time.Duration // process creation to first PONG
	duration time.Duration
	conns    []*nats.Conn
}

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
	conf, err := rig.WriteFile(dir, "server.conf", fmt.Sprintf(
		"listen: %q\nserver_name: bench\njetstream {\n  store_dir: %q\n  %s\n}\n", rig.Addr(port), filepath.Join(dir, "js"), syncLine))
	if err != nil {
		return nil, err
	}
	proc, err := rig.Start(peer, filepath.Join(dir, "log"), binary, "-c", conf)
	if err != nil {
		return nil, err
	}
	defer proc.Kill()
	if err := rig.WaitReady(proc, rig.Addr(port), 15*time.Second); err != nil {
		return nil, err
	}
	e := &env{proc: proc, url: "nats://" + rig.Addr(port), ready: time.Since(proc.Started()), duration: d}
	defer func() {
		for _, nc := range e.conns {
			nc.Close()
		}
		err = errors.Join(err, proc.Stop(10*time.Second))
	}()
	ctx, cancel := context.WithTimeout(ctx, 4*d+30*time.Second)
	defer cancel()
	ms, messages, cpu, err := c.run(ctx, e)
	if err != nil {
		return nil, err
	}
	u, err := proc.Usage()
	if err != nil {
		return nil, err
	}
	if messages > 0 {
		ms = append(ms, metric{"server CPU", "us/msg", "less", cpu.Seconds() * 1e6 / float64(messages)})
	}
	return append(ms,
		metric{"server RSS", "MiB", "less", float64(u.RSS) / (1 << 20)},
		metric{"of that anonymous", "MiB", "less", float64(u.Anon) / (1 << 20)}), nil
}
