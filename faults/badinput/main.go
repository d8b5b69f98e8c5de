//go:build linux

// Badinput gives the programs what they should refuse: noise on the client port
// and on the QUIC port, clients that never end what they begin or read nothing,
// wrong passwords, a hub with another certificate, store
// directories that cannot be written, configurations with mistakes. Each
// refusal has to say what is wrong, where, and what to do, and end the program
// with the documented status, or leave the running programs unharmed: a healthy
// client's requests go on during the whole test and none of them may fail.
//
//	go run ./faults/badinput
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"petiole/faults/rig"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "badinput:", err)
		os.Exit(1)
	}
}

// bench is what the checks work with.
type bench struct {
	dir  string
	site *rig.Site // a healthy edge with its hub, serving all the time
	load time.Duration
	// conns is how many connections are half open at once.
	conns int
}

// check is one thing done wrong.
type check struct {
	name string
	run  func(context.Context, *bench) error
}

func run(ctx context.Context, args []string) (err error) {
	var programs rig.Programs
	fs := flag.NewFlagSet("badinput", flag.ContinueOnError)
	fs.StringVar(&programs.Edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&programs.Hub, "hub", "", "hub binary (default: built from this repository)")
	given := fs.String("dir", "", "directory for stores and logs; kept (default: a temporary one, removed)")
	only := fs.String("run", ".", "run only the checks whose name matches this `expression`")
	load := fs.Duration("noise", 2*time.Second, "how long each kind of noise lasts")
	conns := fs.Int("conns", 3000, "how many connections are half open at once, over TCP, then over TLS")
	if err := fs.Parse(args); err != nil {
		return err
	}
	pick, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 8*time.Minute+10**load)
	defer cancel()
	dir, remove, err := rig.WorkDir(*given, "badinput-")
	if err != nil {
		return err
	}
	defer remove(&err)
	if err := os.Chmod(dir, 0o755); err != nil { // another user runs a program in it
		return err
	}
	if err := programs.Missing(ctx, dir, true); err != nil {
		return err
	}
	b := &bench{dir: dir, load: *load, conns: *conns, site: &rig.Site{
		Dir: filepath.Join(dir, "healthy"), Programs: programs, Exports: []rig.Export{{Stream: "ROWS", To: "ROWS"}},
	}}
	if err := os.MkdirAll(b.site.Dir, 0o755); err != nil {
		return err
	}
	if err := b.site.Prepare(); err != nil {
		return err
	}
	defer b.site.Close()
	if err := errors.Join(b.site.StartHub(), b.site.StartEdge()); err != nil {
		return err
	}
	healthy, err := startHealthy(ctx, b.site)
	if err != nil {
		return err
	}
	failed := 0
	for _, c := range checks() {
		if !pick.MatchString(c.name) {
			continue
		}
		err := c.run(ctx, b)
		if err == nil && !b.site.Edge.Alive() {
			err = fmt.Errorf("the edge ended with status %d:\n%s", b.site.Edge.ExitCode(), b.site.Edge.Log(2000))
		}
		if err == nil && !b.site.Hub.Alive() {
			err = fmt.Errorf("the hub ended with status %d:\n%s", b.site.Hub.ExitCode(), b.site.Hub.Log(2000))
		}
		if err != nil {
			failed++
			fmt.Printf("FAIL %s: %v\n", c.name, err)
			continue
		}
		fmt.Printf("ok   %s\n", c.name)
	}
	requests, stored, err := healthy.stop(ctx)
	fmt.Printf("badinput: %d checks failed; meanwhile %d requests and %d stored messages of a healthy client, failures: %v\n", failed, requests, stored, err)
	if failed > 0 {
		err = errors.Join(err, fmt.Errorf("%d checks failed", failed))
	}
	return err
}

// healthy is a client that must not notice anything.
type healthy struct {
	site     *rig.Site
	conns    []*nats.Conn
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	requests int
	stored   int
	err      error
}

func startHealthy(ctx context.Context, s *rig.Site) (*healthy, error) {
	ctx, cancel := context.WithCancel(ctx)
	h := &healthy{site: s, cancel: cancel}
	if err := s.CreateStream(ctx, "ROWS", "rows.>"); err != nil {
		return nil, err
	}
	for range 2 {
		nc, err := nats.Connect(s.EdgeURL(), nats.MaxReconnects(0), nats.Timeout(rig.StartTimeout))
		if err != nil {
			return nil, err
		}
		h.conns = append(h.conns, nc)
	}
	if _, err := h.conns[0].Subscribe("healthy", func(m *nats.Msg) { _ = m.Respond(m.Data) }); err != nil {
		return nil, err
	}
	if err := h.conns[0].Flush(); err != nil {
		return nil, err
	}
	h.wg.Go(func() {
		for ctx.Err() == nil {
			text := fmt.Sprint("request ", h.requests)
			m, err := h.conns[1].Request("healthy", []byte(text), 5*time.Second)
			if err != nil || string(m.Data) != text {
				h.err = fmt.Errorf("request %d of a healthy client failed: %w", h.requests, err)
				return
			}
			h.requests++
			if m, err = h.conns[1].Request("rows.healthy", []byte(text), 5*time.Second); err != nil || !strings.Contains(string(m.Data), `"stream":"ROWS"`) {
				h.err = fmt.Errorf("publish %d of a healthy client was not acknowledged: %w", h.stored, err)
				return
			}
			h.stored++
			time.Sleep(time.Millisecond) // the machine is small: leave it to the noise
		}
	})
	return h, nil
}

// stop ends the client and returns how many requests and publishes succeeded,
// after checking that all the latter reached the hub.
func (h *healthy) stop(ctx context.Context) (requests, stored int, err error) {
	h.cancel()
	h.wg.Wait()
	for _, nc := range h.conns {
		nc.Close()
	}
	if h.err == nil {
		wait, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		h.err = h.site.WaitHub(wait, "ROWS", uint64(h.stored))
	}
	return h.requests, h.stored, h.err
}
