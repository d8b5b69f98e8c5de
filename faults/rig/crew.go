//go:build linux

package rig

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Crew is a set of publishers that work at the same time.
type Crew struct {
	Loads []*Load
}

// Go starts every publisher. The returned function ends them, waits, and
// returns what went wrong beyond a lost connection, which a rig that kills
// servers expects.
func (c *Crew) Go(ctx context.Context) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	errs := make([]error, len(c.Loads))
	for i, l := range c.Loads {
		wg.Go(func() {
			if err := l.Run(ctx); !errors.Is(err, ErrConnection) {
				errs[i] = err
			}
		})
	}
	return func() error {
		cancel()
		wg.Wait()
		return errors.Join(errs...)
	}
}

// Through runs every publisher to the end of its rows, over lost connections:
// each connects again as soon as the server is back. It returns when all are
// done or ctx ends.
func (c *Crew) Through(ctx context.Context) error {
	var wg sync.WaitGroup
	errs := make([]error, len(c.Loads))
	for i, l := range c.Loads {
		wg.Go(func() {
			for {
				errs[i] = l.Run(ctx)
				if !errors.Is(errs[i], ErrConnection) {
					return
				}
				select {
				case <-ctx.Done():
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(append(errs, ctx.Err())...)
}

// Gate lets publishers through until a limit is reached. The zero value is
// closed.
type Gate struct {
	mu          sync.Mutex
	used, limit int
	raised      chan struct{}
}

// Open raises or lowers the number of publishes that may have passed in all.
func (g *Gate) Open(limit int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limit = limit
	if g.raised != nil {
		close(g.raised)
		g.raised = nil
	}
}

// Close lets nobody through until the next Open.
func (g *Gate) Close() { g.Open(0) }

// Pass waits until one more publish may pass, or until ctx ends.
func (g *Gate) Pass(ctx context.Context) error {
	for {
		g.mu.Lock()
		if g.used < g.limit {
			g.used++
			g.mu.Unlock()
			return nil
		}
		if g.raised == nil {
			g.raised = make(chan struct{})
		}
		raised := g.raised
		g.mu.Unlock()
		select {
		case <-raised:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Copy is what a rig has read of one stream so far, extended as the stream
// grows.
type Copy struct {
	Held []Held
}

// Update reads what the stream at url holds beyond the copy, or all of it again
// if afresh is set or if the stream is shorter than the copy. A stream that
// does not exist holds nothing.
func (c *Copy) Update(ctx context.Context, url, stream string, afresh bool) error {
	return on(url, func(nc *nats.Conn) error {
		msgs, last, err := StreamLast(ctx, nc, stream)
		if err != nil {
			return err
		}
		from := uint64(1)
		if n := len(c.Held); n > 0 && !afresh && last >= c.Held[n-1].Seq && msgs >= uint64(n) {
			from = c.Held[n-1].Seq + 1
		} else {
			c.Held = nil
		}
		more, err := ReadStream(ctx, nc, stream, from)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			err = nil
		}
		if err != nil {
			return fmt.Errorf("%w (have %d messages)", err, len(c.Held)+len(more))
		}
		c.Held = slices.Concat(c.Held, more)
		return nil
	})
}
