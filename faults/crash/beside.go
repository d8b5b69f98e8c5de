//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// state is what a stream beside the publishers' may look like.
type state struct {
	exists bool
	msgs   uint64
	last   uint64
}

// beside are streams that are created, filled, purged and deleted, one request
// at a time, each of which is answered before the next.
type beside struct {
	streams map[string]state // as the last answered request left them
	// The request that is under way, if any, and what it may have done.
	busy string
	then state
	done int // requests answered
}

const besides = 6

func newBeside() *beside { return &beside{streams: map[string]state{}} }

// shake sends requests until the returned function is called or the server is
// gone.
func (b *beside) shake(ctx context.Context, url string) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var failed error
	wg.Go(func() {
		nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(30*time.Second))
		if err != nil {
			return // killed by then
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			failed = err
			return
		}
		for ctx.Err() == nil && nc.IsConnected() {
			if err := b.request(ctx, js); err != nil {
				var api *jetstream.APIError
				if errors.As(err, &api) {
					failed = fmt.Errorf("a request to stream %s: %w", b.busy, err)
				}
				return
			}
		}
	})
	return func() error {
		cancel()
		wg.Wait()
		return failed
	}
}

// request does the next thing to one of the streams.
func (b *beside) request(ctx context.Context, js jetstream.JetStream) (err error) {
	name := fmt.Sprintf("BESIDE%d", rand.IntN(besides))
	now := b.streams[name]
	b.busy, b.then = name, now
	switch k := rand.IntN(10); {
	case !now.exists:
		b.then = state{exists: true}
		_, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name}, Storage: jetstream.FileStorage})
	case k < 7:
		b.then.msgs, b.then.last = now.msgs+1, now.last+1
		_, err = js.Publish(ctx, name, make([]byte, 100+rand.IntN(4000)))
	case k < 8:
		b.then.msgs = 0
		var s jetstream.Stream
		if s, err = js.Stream(ctx, name); err == nil {
			err = s.Purge(ctx)
		}
	default:
		b.then = state{}
		err = js.DeleteStream(ctx, name)
	}
	if err != nil {
		return err // it may have been done or not
	}
	b.streams[name] = b.then
	b.busy = ""
	b.done++
	return nil
}

// check compares the streams with what they may look like, and takes over what
// the request that was not answered has done.
func (b *beside) check(ctx context.Context, url string) error {
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	for i := range besides {
		name := fmt.Sprintf("BESIDE%d", i)
		var got state
		s, err := js.Stream(ctx, name)
		switch {
		case err == nil:
			st := s.CachedInfo().State
			got = state{true, st.Msgs, st.LastSeq}
		case !errors.Is(err, jetstream.ErrStreamNotFound):
			return fmt.Errorf("stream %s: %w", name, err)
		}
		want := b.streams[name]
		if got != want && (name != b.busy || got != b.then) {
			return fmt.Errorf("stream %s is %+v; the last answered request left %+v, under way was one (of %q) that leaves %+v", name, got, want, b.busy, b.then)
		}
		b.streams[name] = got
	}
	b.busy = ""
	return nil
}

func deleteStream(ctx context.Context, url, name string) error {
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	if err := js.DeleteStream(ctx, name); err != nil {
		return fmt.Errorf("delete stream %s: %w", name, err)
	}
	return nil
}
