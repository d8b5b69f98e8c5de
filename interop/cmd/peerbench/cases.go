package main

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// benchCase is one kind of load. run returns the figures of the case, the
// number of messages it counts and the server's CPU time spent on them.
type benchCase struct {
	name string
	// syncAlways asks nats-server to fsync before it acknowledges, which
	// petiole always does here.
	syncAlways bool
	// extra is how long the case may take beyond what follows from -duration.
	extra time.Duration
	// most is how often the case is repeated at most, if its figures hardly
	// differ; 0: as often as asked for.
	most int
	run  func(context.Context, *env) (ms []metric, messages int, cpu time.Duration, err error)
}

func cases() []benchCase {
	return []benchCase{
		{name: "start", run: benchStart},
		{name: "core-pubonly", run: benchRaw(shape{pubs: 1, size: 128})},
		{name: "core-1x1", run: benchRaw(shape{pubs: 1, subs: 1, size: 128})},
		{name: "core-1x1-8KiB", run: benchRaw(shape{pubs: 1, subs: 1, size: 8 << 10})},
		{name: "core-4x4", run: benchRaw(shape{pubs: 4, subs: 4, size: 128})},
		{name: "core-1x10", run: benchRaw(shape{pubs: 1, subs: 10, size: 128})},
		{name: "nats.go-pubonly", run: benchCore(shape{pubs: 1, size: 128})},
		{name: "nats.go-1x1", run: benchCore(shape{pubs: 1, subs: 1, size: 128})},
		{name: "nats.go-1x1-8KiB", run: benchCore(shape{pubs: 1, subs: 1, size: 8 << 10})},
		{name: "nats.go-4x4", run: benchCore(shape{pubs: 4, subs: 4, size: 128})},
		{name: "nats.go-1x10", run: benchCore(shape{pubs: 1, subs: 10, size: 128})},
		{name: "core-request", run: benchRequest},
		{name: "core-subs", run: benchSubs},
		{name: "js-sync-always", syncAlways: true, run: benchSyncPublish},
		{name: "js-async-always", syncAlways: true, run: benchAsyncPublish},
		{name: "js-async-default", run: benchAsyncPublish},
		{name: "js-consume", run: benchConsume},
		{name: casePublishers, syncAlways: true, extra: 2 * time.Minute, run: benchPublishers},
		{name: "js-disk", extra: 5 * time.Minute, most: 2, run: benchDisk},
	}
}

// benchStart reports how long the server takes to answer its first PING with
// JetStream enabled on an empty store, and what it holds in memory when idle.
func benchStart(ctx context.Context, e *env) ([]metric, int, time.Duration, error) {
	select { // the resident set of an idle server is looked at a second later
	case <-ctx.Done():
		return nil, 0, 0, ctx.Err()
	case <-time.After(time.Second):
	}
	return []metric{{"ready after", "ms", "less", float64(e.ready) / 1e6}}, 0, 0, nil
}

// meter measures wall-clock and CPU time of a stretch of load: the server's, and
// in e.clients that of this process, which is all of its clients.
type meter struct {
	e       *env
	start   time.Time
	cpu     time.Duration
	clients time.Duration
}

func (e *env) meter() (meter, error) {
	own, err := ownCPU()
	if err != nil {
		return meter{}, err
	}
	u, err := e.proc.Usage()
	return meter{e: e, start: time.Now(), cpu: u.CPU, clients: own}, err
}

func (m meter) stop() (wall, cpu time.Duration, err error) {
	wall = time.Since(m.start)
	u, err := m.e.proc.Usage()
	if err != nil {
		return 0, 0, err
	}
	own, err := ownCPU()
	m.e.clients = own - m.clients
	return wall, u.CPU - m.cpu, err
}

// ownCPU is the CPU time that this process has used.
func ownCPU() (time.Duration, error) {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		return 0, fmt.Errorf("own CPU time: %w", err)
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano()), nil
}

func rate(name string, n int, wall time.Duration) metric {
	return metric{name, "msg/s", "more", float64(n) / wall.Seconds()}
}

type shape struct {
	pubs, subs, size int
}

// benchCore publishes from sh.pubs connections on one subject for the load
// time; each of sh.subs connections receives every message. The rate counts
// deliveries (publishes when nobody subscribes) until the last one arrived.
func benchCore(sh shape) func(context.Context, *env) ([]metric, int, time.Duration, error) {
	return func(ctx context.Context, e *env) ([]metric, int, time.Duration, error) {
		const subject = "bench.core"
		var got atomic.Int64
		var want atomic.Int64 // deliveries to wait for; known after publishing
		want.Store(-1)
		arrived := make(chan struct{}, 1)
		subConns, err := e.connectN(sh.subs)
		if err != nil {
			return nil, 0, 0, err
		}
		for _, nc := range subConns {
			sub, err := nc.Subscribe(subject, func(*nats.Msg) {
				if got.Add(1) == want.Load() {
					arrived <- struct{}{}
				}
			})
			if err != nil {
				return nil, 0, 0, err
			}
			if err := sub.SetPendingLimits(-1, -1); err != nil {
				return nil, 0, 0, err
			}
			if err := nc.Flush(); err != nil {
				return nil, 0, 0, err
			}
		}
		pubConns, err := e.connectN(sh.pubs)
		if err != nil {
			return nil, 0, 0, err
		}
		payload := make([]byte, sh.size)
		m, err := e.meter()
		if err != nil {
			return nil, 0, 0, err
		}
		var wg sync.WaitGroup
		sent := make([]int, sh.pubs)
		errs := make([]error, sh.pubs)
		for i, nc := range pubConns {
			wg.Go(func() {
				for time.Since(m.start) < e.duration {
					for range 64 {
						if errs[i] = nc.Publish(subject, payload); errs[i] != nil {
							return
						}
						sent[i]++
					}
				}
				errs[i] = nc.FlushTimeout(20 * time.Second)
			})
		}
		wg.Wait()
		published := 0
		for i := range sent {
			published += sent[i]
			if errs[i] != nil {
				return nil, 0, 0, fmt.Errorf("publish: %w", errs[i])
			}
		}
		count := published
		if sh.subs > 0 {
			count = published * sh.subs
			want.Store(int64(count))
			if got.Load() < int64(count) {
				select {
				case <-arrived:
				case <-ctx.Done():
					return nil, 0, 0, fmt.Errorf("%d of %d deliveries are missing", int64(count)-got.Load(), count)
				}
			}
		}
		wall, cpu, err := m.stop()
		return []metric{rate("rate", count, wall)}, count, cpu, err
	}
}

// benchSubs reports what a subscription costs the server in memory: those of a
// few clients, each to a subject of its own.
func benchSubs(ctx context.Context, e *env) ([]metric, int, time.Duration, error) {
	const clients, each = 4, 50_000
	conns, err := e.connectN(clients)
	if err != nil {
		return nil, 0, 0, err
	}
	idle, err := e.proc.Usage()
	if err != nil {
		return nil, 0, 0, err
	}
	m, err := e.meter()
	if err != nil {
		return nil, 0, 0, err
	}
	for i, nc := range conns {
		for k := range each {
			if _, err := nc.Subscribe(fmt.Sprintf("bench.subs.%d.%d", i, k), func(*nats.Msg) {}); err != nil {
				return nil, 0, 0, err
			}
		}
		if err := nc.FlushWithContext(ctx); err != nil {
			return nil, 0, 0, err
		}
	}
	wall, cpu, err := m.stop()
	if err != nil {
		return nil, 0, 0, err
	}
	full, err := e.proc.Usage()
	if err != nil {
		return nil, 0, 0, err
	}
	const n = clients * each
	return []metric{
		{"memory each", "B", "less", float64(full.Anon-idle.Anon) / n},
		rate("subscribed", n, wall),
	}, n, cpu, nil
}

// benchRequest sends requests one after the other from one connection to a
// responder on another.
func benchRequest(_ context.Context, e *env) ([]metric, int, time.Duration, error) {
	conns, err := e.connectN(2)
	if err != nil {
		return nil, 0, 0, err
	}
	payload := make([]byte, 128)
	if _, err := conns[0].Subscribe("bench.request", func(m *nats.Msg) { _ = m.Respond(payload) }); err != nil {
		return nil, 0, 0, err
	}
	if err := conns[0].Flush(); err != nil {
		return nil, 0, 0, err
	}
	return e.roundTrips(func() error {
		_, err := conns[1].Request("bench.request", payload, 5*time.Second)
		return err
	})
}

// roundTrips calls one for the load time and reports its latency.
func (e *env) roundTrips(one func() error) ([]metric, int, time.Duration, error) {
	for range 50 { // connections, caches and the stream's first file exist from here on
		if err := one(); err != nil {
			return nil, 0, 0, err
		}
	}
	m, err := e.meter()
	if err != nil {
		return nil, 0, 0, err
	}
	var took []time.Duration
	for last := m.start; last.Sub(m.start) < e.duration; {
		if err := one(); err != nil {
			return nil, 0, 0, err
		}
		now := time.Now()
		took = append(took, now.Sub(last))
		last = now
	}
	wall, cpu, err := m.stop()
	slices.Sort(took)
	return []metric{
		{"p50", "us", "less", quantile(took, 0.50)},
		{"p99", "us", "less", quantile(took, 0.99)},
		rate("rate", len(took), wall),
	}, len(took), cpu, err
}

// quantile returns the q-quantile of sorted times, in microseconds.
func quantile(took []time.Duration, q float64) float64 {
	if len(took) == 0 {
		return 0
	}
	return float64(took[int(q*float64(len(took)-1))]) / 1e3
}

// stream creates the file stream that the JetStream cases use.
func (e *env) stream(ctx context.Context, opts ...jetstream.JetStreamOpt) (jetstream.JetStream, error) {
	nc, err := e.connect()
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc, opts...)
	if err != nil {
		return nil, err
	}
	_, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: "BENCH", Subjects: []string{"bench.js"}, Storage: jetstream.FileStorage,
	})
	if err != nil {
		return nil, fmt.Errorf("create stream: %w", err)
	}
	return js, nil
}

// benchSyncPublish has one publisher that waits for each acknowledgement.
func benchSyncPublish(ctx context.Context, e *env) ([]metric, int, time.Duration, error) {
	js, err := e.stream(ctx)
	if err != nil {
		return nil, 0, 0, err
	}
	payload := make([]byte, 128)
	return e.roundTrips(func() error {
		_, err := js.Publish(ctx, "bench.js", payload)
		return err
	})
}

// asyncWindow is how many publishes may wait for their acknowledgement.
const asyncWindow = 4000

// benchDisk stores a million messages, stops the server in order (which is a
// checkpoint), and does so once more. What the second million added to the
// store is what a message takes on disk, without what any store has to begin
// with.
func benchDisk(ctx context.Context, e *env) ([]metric, int, time.Duration, error) {
	const million = 1_000_000
	var size, reserved [2]int64
	for i := range size {
		if i > 0 {
			if err := e.start(); err != nil {
				return nil, 0, 0, err
			}
		}
		_, publish, err := e.async(ctx)
		if err != nil {
			return nil, 0, 0, err
		}
		if _, err := publish(func(sent int) bool { return sent < million }); err != nil {
			return nil, 0, 0, err
		}
		if err := e.stop(); err != nil {
			return nil, 0, 0, err
		}
		if size[i], reserved[i], err = allocated(e.store()); err != nil {
			return nil, 0, 0, err
		}
	}
	// As every case does, this one ends with a server that runs.
	if err := e.start(); err != nil {
		return nil, 0, 0, err
	}
	return []metric{
		{"disk", "B/msg", "less", float64(size[1]-size[0]) / million},
		{"all messages", "MiB", "less", float64(size[1]) / (1 << 20)},
		{"log and ballast", "MiB", "less", float64(reserved[1]) / (1 << 20)},
	}, 0, 0, nil
}

// allocated returns the octets of disk under dir: what holds messages, and what
// petiole sets aside (its log, which is preallocated, and its ballast).
func allocated(dir string) (size, reserved int64, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("no block count of %s on this system", path)
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if top, _, _ := strings.Cut(rel, string(filepath.Separator)); top == "wal" || top == "ballast" {
			reserved += st.Blocks * 512
		} else {
			size += st.Blocks * 512
		}
		return nil
	})
	return size, reserved, err
}

// async returns a JetStream context for windowed publishing and a function that
// publishes until more returns false, waits for every acknowledgement and
// returns how many there were.
func (e *env) async(ctx context.Context) (jetstream.JetStream, func(more func(sent int) bool) (int, error), error) {
	var acked atomic.Int64
	var failed atomic.Pointer[error]
	js, err := e.stream(ctx,
		jetstream.WithPublishAsyncMaxPending(asyncWindow),
		jetstream.WithPublishAsyncAckHandler(func(jetstream.JetStream, *nats.Msg, *jetstream.PubAck) { acked.Add(1) }),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, _ *nats.Msg, err error) { failed.CompareAndSwap(nil, &err) }))
	if err != nil {
		return nil, nil, err
	}
	payload := make([]byte, 128)
	return js, func(more func(int) bool) (int, error) {
		sent := 0
		for ; more(sent); sent++ {
			if _, err := js.PublishAsync("bench.js", payload, jetstream.WithStallWait(20*time.Second)); err != nil {
				return 0, fmt.Errorf("publish %d: %w", sent, err)
			}
		}
		select {
		case <-js.PublishAsyncComplete():
		case <-ctx.Done():
			return 0, fmt.Errorf("%d of %d acknowledgements are missing", int64(sent)-acked.Load(), sent)
		}
		if err := failed.Load(); err != nil {
			return 0, fmt.Errorf("publish: %w", *err)
		}
		return sent, nil
	}, nil
}

// benchAsyncPublish has one publisher with asyncWindow publishes in flight.
func benchAsyncPublish(ctx context.Context, e *env) ([]metric, int, time.Duration, error) {
	_, publish, err := e.async(ctx)
	if err != nil {
		return nil, 0, 0, err
	}
	m, err := e.meter()
	if err != nil {
		return nil, 0, 0, err
	}
	n, err := publish(func(int) bool { return time.Since(m.start) < e.duration })
	if err != nil {
		return nil, 0, 0, err
	}
	wall, cpu, err := m.stop()
	return []metric{rate("rate", n, wall)}, n, cpu, err
}

// benchConsume fetches a filled stream in batches of 500 through a durable pull
// consumer and acknowledges each message.
func benchConsume(ctx context.Context, e *env) ([]metric, int, time.Duration, error) {
	const stored, batch = 200_000, 500
	js, publish, err := e.async(ctx)
	if err != nil {
		return nil, 0, 0, err
	}
	if _, err := publish(func(sent int) bool { return sent < stored }); err != nil {
		return nil, 0, 0, fmt.Errorf("fill the stream: %w", err)
	}
	cons, err := js.CreateConsumer(ctx, "BENCH", jetstream.ConsumerConfig{
		Durable: "bench", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 4 * batch,
	})
	if err != nil {
		return nil, 0, 0, err
	}
	m, err := e.meter()
	if err != nil {
		return nil, 0, 0, err
	}
	got := 0
	for got < stored && time.Since(m.start) < 2*e.duration {
		msgs, err := cons.Fetch(batch, jetstream.FetchMaxWait(5*time.Second))
		if err != nil {
			return nil, 0, 0, err
		}
		n := 0
		for msg := range msgs.Messages() {
			n++
			if err := msg.Ack(); err != nil {
				return nil, 0, 0, err
			}
		}
		if err := msgs.Error(); err != nil {
			return nil, 0, 0, fmt.Errorf("fetch: %w", err)
		}
		if n == 0 {
			return nil, 0, 0, fmt.Errorf("fetch brought nothing with %d of %d messages received", got, stored)
		}
		got += n
	}
	wall, cpu, err := m.stop()
	return []metric{rate("rate", got, wall)}, got, cpu, err
}
