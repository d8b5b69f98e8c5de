package rig

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

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
