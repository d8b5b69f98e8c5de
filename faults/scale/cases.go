//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/faults/rig"
)

// The limits.
const (
	backlogReady  = 5 * time.Second
	backlogAnon   = 150 * mib
	backlogMemory = 300 * 1000 * 1000
	// While it is published to at full speed.
	backlogPublish = 200 * mib

	storedReady = time.Second
	storedRead  = 64 * mib

	drainFiles  = 50 * 1000 * 1000
	drainWithin = time.Minute
	drainP99    = 100 * time.Millisecond

	// 128 stores are open at a time, with two files each at most; the log, the
	// meta store and connections come on top, and stores of streams just created
	// that still have to be closed.
	streamsFiles = 320
	// What is not checkpointed yet is in memory and in the log; the collector
	// lets garbage grow to the same size.
	streamsAnon = 256 * mib
	// The log's budget is 128 MiB; the segment that is being written and the
	// spares that are kept for a full disk come on top.
	streamsLog = 320 * mib
	// All stores are opened, and the log is replayed.
	streamsReady = 5 * time.Second
)

func (b *bench) create(ctx context.Context, cfg jetstream.StreamConfig) error {
	return b.with(func(js jetstream.JetStream) error {
		cfg.Storage = jetstream.FileStorage
		cfg.Subjects = []string{strings.ToLower(cfg.Name) + ".>"}
		_, err := js.CreateStream(ctx, cfg)
		return err
	})
}

func (b *bench) with(fn func(jetstream.JetStream) error) error {
	nc, err := nats.Connect(b.site.EdgeURL(), nats.Timeout(rig.StartTimeout))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(30*time.Second))
	if err != nil {
		return err
	}
	return fn(js)
}

// fill publishes and tells how fast.
func (b *bench) fill(ctx context.Context, what string, f *flood, more func() bool) error {
	f.url = b.site.EdgeURL()
	begun := time.Now()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		tick := time.NewTicker(30 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Printf("scale: … %d messages, %.2f GB\n", f.acked.Load(), float64(f.bytes.Load())/1e9)
			case <-stop:
				return
			}
		}
	}()
	if err := f.run(ctx, more); err != nil {
		return err
	}
	took := time.Since(begun)
	files, err := onDisk(b.site.EdgeStore)
	if err != nil {
		return err
	}
	fmt.Printf("scale: %s: %d messages, %.2f GB, acknowledged in %v: %.0f a second; %.2f GB of files\n",
		what, f.acked.Load(), float64(f.bytes.Load())/1e9, took.Round(100*time.Millisecond), float64(f.acked.Load())/took.Seconds(), float64(files)/1e9)
	return nil
}

func (b *bench) holds(ctx context.Context, stream string, want uint64) error {
	msgs, _, err := rig.StreamLastAt(ctx, b.site.EdgeURL(), stream)
	if err == nil && msgs < want {
		err = fmt.Errorf("stream %s holds %d messages, %d were acknowledged", stream, msgs, want)
	}
	return err
}

// backlog is the case of the same name.
func (b *bench) backlog(ctx context.Context) error {
	if err := b.site.StartEdge(); err != nil {
		return err
	}
	if err := b.create(ctx, jetstream.StreamConfig{Name: "EXPORTED"}); err != nil {
		return err
	}
	f := &flood{subjects: []string{"exported.a", "exported.b", "exported.c"}, min: 1 << 10, max: 8 << 10}
	m := watch(b.site.Edge)
	if err := b.fill(ctx, "backlog", f, func() bool { return float64(f.bytes.Load()) < b.o.size*1e9 }); err != nil {
		return err
	}
	p := m.take()
	m.close()
	fmt.Printf("scale: at most %s resident while publishing at full speed\n", inMB(p.rss))
	within(b, "anonymous memory while publishing at full speed", p.anon, backlogPublish, inMB)
	b.site.Edge.Kill()
	if err := b.backlogOnce(ctx, "", uint64(f.acked.Load()), nil); err != nil {
		return err
	}
	group, err := rig.NewCgroup("memory")
	if err != nil {
		return err
	}
	defer func() {
		b.site.Edge.Kill()
		group.Close()
	}()
	if err := group.LimitMemory(backlogMemory); err != nil {
		return err
	}
	return b.backlogOnce(ctx, fmt.Sprintf(" in %d MB", backlogMemory/1_000_000), uint64(f.acked.Load()), group)
}

// backlogOnce starts the edge on the backlog, reads it and exports it.
func (b *bench) backlogOnce(ctx context.Context, where string, msgs uint64, group *rig.Cgroup) error {
	took, m, err := b.start(ctx, group)
	if err != nil {
		return fmt.Errorf("start%s: %w", where, err)
	}
	defer m.close()
	within(b, "ready after kill -9"+where, took, backlogReady, duration)
	within(b, "anonymous memory while starting"+where, m.take().anon, backlogAnon, inMB)
	if err := b.holds(ctx, "EXPORTED", msgs); err != nil {
		return err
	}
	n, bytes, err := b.read(ctx, b.o.phase)
	if err != nil {
		return fmt.Errorf("read%s: %w", where, err)
	}
	p := m.take()
	fmt.Printf("scale: read%s: %d messages, %.0f MB/s; %s resident\n", where, n, float64(bytes)/1e6/b.o.phase.Seconds(), inMB(p.rss))
	within(b, "anonymous memory while reading"+where, p.anon, backlogAnon, inMB)

	if err := b.site.StartHub(); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, b.o.phase)
	err = b.site.WaitHub(wait, "EXPORTED", msgs)
	cancel()
	if err != nil && ctx.Err() != nil {
		return err
	}
	exported, _, err := rig.StreamLastAt(ctx, b.site.HubURL(), "EXPORTED")
	if err != nil {
		return err
	}
	p = m.take()
	fmt.Printf("scale: exported%s: %d messages are at the hub; %s resident\n", where, exported, inMB(p.rss))
	within(b, "anonymous memory while exporting"+where, p.anon, backlogAnon, inMB)
	if exported == 0 {
		return errors.New("nothing arrived at the hub")
	}
	if !b.site.Edge.Alive() {
		return fmt.Errorf("the edge ended with status %d%s", b.site.Edge.ExitCode(), where)
	}
	b.site.Hub.Kill()
	b.site.Edge.Kill()
	return nil
}

// read reads the stream from its beginning for a while.
func (b *bench) read(ctx context.Context, d time.Duration) (msgs int, bytes int64, err error) {
	err = b.with(func(js jetstream.JetStream) error {
		s, err := js.Stream(ctx, "EXPORTED")
		if err != nil {
			return err
		}
		cons, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
		if err != nil {
			return err
		}
		it, err := cons.Messages(jetstream.PullMaxBytes(4 << 20))
		if err != nil {
			return err
		}
		defer it.Stop()
		for end := time.Now().Add(d); time.Now().Before(end); {
			m, err := it.Next(jetstream.NextMaxWait(10 * time.Second))
			if err != nil {
				return fmt.Errorf("after %d messages: %w", msgs, err)
			}
			meta, err := m.Metadata()
			if err != nil {
				return err
			}
			msgs++
			bytes += int64(len(m.Data()))
			if meta.NumPending == 0 {
				return nil
			}
		}
		return nil
	})
	return msgs, bytes, err
}

// stored is the case of the same name.
func (b *bench) stored(ctx context.Context) error {
	if err := b.site.StartEdge(); err != nil {
		return err
	}
	if err := b.create(ctx, jetstream.StreamConfig{Name: "SMALL"}); err != nil {
		return err
	}
	f := &flood{subjects: []string{"small.a", "small.b", "small.c"}, min: 16, max: 48}
	if err := b.fill(ctx, "stored", f, count(b.o.msgs)); err != nil {
		return err
	}
	if err := b.site.Edge.Stop(rig.StopTimeout); err != nil {
		return err
	}
	for _, how := range []string{"a clean stop", "kill -9"} {
		took, m, err := b.start(ctx, nil)
		if err != nil {
			return err
		}
		if err := b.holds(ctx, "SMALL", uint64(b.o.msgs)); err != nil {
			return err
		}
		read, err1 := processIO(b.site.Edge, "read_bytes")
		rchar, err2 := processIO(b.site.Edge, "rchar")
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		p := m.take()
		m.close()
		within(b, "ready after "+how, took, storedReady, duration)
		if how == "kill -9" { // the log has to be read
			fmt.Printf("scale: read after %s: %s from disk, %s by system calls\n", how, inMB(read), inMB(rchar))
		} else {
			within(b, "read from disk until the stream's state was told, after "+how, read, storedRead, inMB)
			within(b, "read by system calls, after "+how, rchar, storedRead, inMB)
		}
		fmt.Printf("scale: memory after %s: %s anonymous, %s resident\n", how, inMB(p.anon), inMB(p.rss))
		b.site.Edge.Kill()
	}
	return nil
}

// drain is the case of the same name: half of the messages are in a work queue
// and are consumed, half expire.
func (b *bench) drain(ctx context.Context) error {
	if err := b.site.StartEdge(); err != nil {
		return err
	}
	queue := jetstream.StreamConfig{Name: "QUEUE", Retention: jetstream.WorkQueuePolicy}
	expire := jetstream.StreamConfig{Name: "EXPIRE", Storage: jetstream.FileStorage, Subjects: []string{"expire.>"}}
	if err := errors.Join(b.create(ctx, queue), b.create(ctx, expire), b.create(ctx, jetstream.StreamConfig{Name: "LIVE", MaxMsgs: 10_000})); err != nil {
		return err
	}
	half := b.o.msgs / 2
	for _, subject := range []string{"queue.a", "expire.a"} {
		f := &flood{subjects: []string{subject}, min: 64, max: 256}
		if err := b.fill(ctx, subject, f, count(half)); err != nil {
			return err
		}
	}
	probing, err := probe(ctx, b.site.EdgeURL(), "live.x")
	if err != nil {
		return err
	}
	err = b.drained(ctx, probing, expire, half)
	if err := errors.Join(err, probing.stop()); err != nil {
		return err
	}
	return b.site.Edge.Stop(rig.StopTimeout)
}

// drained empties both streams and watches files and publishes.
func (b *bench) drained(ctx context.Context, probing *prober, expire jetstream.StreamConfig, half int) error {
	begun := time.Now()
	phase := func(what string) {
		took := probing.take()
		fmt.Printf("scale: %s took %v; %d publishes meanwhile: p50 %v, p90 %v, the slowest %v\n", what, time.Since(begun).Round(time.Millisecond),
			len(took), duration(quantile(took, 0.5)), duration(quantile(took, 0.9)), duration(quantile(took, 1)))
		within(b, "p99 of publishes while "+what, quantile(took, 0.99), drainP99, duration)
		begun = time.Now()
	}
	if err := sleep(ctx, 3*time.Second); err != nil {
		return err
	}
	phase("resting")
	err := b.with(func(js jetstream.JetStream) error {
		expire.MaxAge = time.Second
		expire.Duplicates = time.Second
		if _, err := js.UpdateStream(ctx, expire); err != nil {
			return fmt.Errorf("let messages expire: %w", err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := b.empty(ctx, "EXPIRE"); err != nil {
		return err
	}
	phase(fmt.Sprintf("expiring %d messages", half))
	if err := b.consume(ctx, half); err != nil {
		return err
	}
	if err := b.empty(ctx, "QUEUE"); err != nil {
		return err
	}
	phase(fmt.Sprintf("consuming %d messages", half))
	drained := time.Now()
	var files, log int64
	for {
		all, err := onDisk(b.site.EdgeStore)
		if err != nil {
			return err
		}
		if log, err = onDisk(filepath.Join(b.site.EdgeStore, "wal")); err != nil {
			return err
		}
		files = all - log
		if files < drainFiles || time.Since(drained) > 2*drainWithin {
			break
		}
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	within(b, "time until the files had shrunk", time.Since(drained), drainWithin, duration)
	// What is done in the background goes on for a while.
	if err := sleep(ctx, 10*time.Second); err != nil {
		return err
	}
	phase("shrinking")
	within(b, "files besides the log", files, drainFiles, inMB)
	fmt.Printf("scale: %s of log\n", inMB(log))
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// consume acknowledges so many messages of the work queue.
func (b *bench) consume(ctx context.Context, n int) error {
	const workers = 4
	var left atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	errs := make([]error, workers)
	err := b.with(func(js jetstream.JetStream) error {
		_, err := js.CreateConsumer(ctx, "QUEUE", jetstream.ConsumerConfig{Durable: "worker", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 50_000})
		return err
	})
	if err != nil {
		return fmt.Errorf("consume: %w", err)
	}
	for i := range workers {
		wg.Go(func() {
			errs[i] = b.with(func(js jetstream.JetStream) error {
				cons, err := js.Consumer(ctx, "QUEUE", "worker")
				if err != nil {
					return err
				}
				for left.Load() > 0 {
					batch, err := cons.Fetch(2000, jetstream.FetchMaxWait(2*time.Second))
					if err != nil {
						return err
					}
					for m := range batch.Messages() {
						if err := m.Ack(); err != nil {
							return err
						}
						left.Add(-1)
					}
					if err := batch.Error(); err != nil && !errors.Is(err, nats.ErrTimeout) {
						return err
					}
				}
				return js.Conn().Flush()
			})
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("consume: %w", err)
	}
	return nil
}

// empty returns once the streams hold nothing.
func (b *bench) empty(ctx context.Context, streams ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for _, s := range streams {
		for {
			msgs, _, err := rig.StreamLastAt(ctx, b.site.EdgeURL(), s)
			if err == nil && msgs == 0 {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("stream %s still holds %d messages: %w", s, msgs, errors.Join(err, ctx.Err()))
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}

// streams is the case of the same name.
func (b *bench) streams(ctx context.Context) error {
	if err := b.site.StartEdge(); err != nil {
		return err
	}
	const busy = 10
	if b.o.streams <= busy {
		return fmt.Errorf("-streams must be above %d", busy)
	}
	begun := time.Now()
	err := b.with(func(js jetstream.JetStream) error {
		for i := range b.o.streams {
			name := fmt.Sprintf("IDLE%d", i)
			cfg := jetstream.StreamConfig{Name: name, Storage: jetstream.FileStorage, Subjects: []string{fmt.Sprintf("idle.%d.>", i)}}
			if i < busy {
				// Bounded, so that ten minutes fit on the disk.
				cfg.Name, cfg.Subjects, cfg.MaxBytes = fmt.Sprintf("BUSY%d", i), []string{fmt.Sprintf("busy.%d.>", i)}, 64*mib
			}
			if _, err := js.CreateStream(ctx, cfg); err != nil {
				return fmt.Errorf("create stream %d: %w", i, err)
			}
			if i < busy {
				continue
			}
			for range 3 {
				if _, err := js.Publish(ctx, fmt.Sprintf("idle.%d.x", i), make([]byte, 100)); err != nil {
					return fmt.Errorf("publish to stream %d: %w", i, err)
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Printf("scale: %d streams with 3 messages each created in %v\n", b.o.streams, time.Since(begun).Round(time.Millisecond))
	m := watch(b.site.Edge)
	f := &flood{min: 100, max: 1000}
	for i := range busy {
		f.subjects = append(f.subjects, fmt.Sprintf("busy.%d.x", i))
	}
	end := time.Now().Add(time.Duration(b.o.minutes * float64(time.Minute)))
	var most, latest int64
	watching, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		for watching.Err() == nil {
			n, err := onDisk(filepath.Join(b.site.EdgeStore, "wal"))
			if err != nil {
				done <- err
				return
			}
			most, latest = max(most, n), n
			select {
			case <-watching.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
		done <- nil
	}()
	err = b.fill(ctx, "10 busy streams", f, func() bool { return time.Now().Before(end) })
	stop()
	if err := errors.Join(err, <-done); err != nil {
		return err
	}
	p := m.take()
	m.close()
	within(b, "open files", p.fds, streamsFiles, number)
	within(b, "anonymous memory", p.anon, streamsAnon, inMB)
	within(b, "log on disk", most, streamsLog, inMB)
	fmt.Printf("scale: at the end %s of log; at most %s resident\n", inMB(latest), inMB(p.rss))
	b.site.Edge.Kill()
	took, m, err := b.start(ctx, nil)
	if err != nil {
		return err
	}
	p = m.take()
	m.close()
	within(b, fmt.Sprintf("ready with %d streams after kill -9", b.o.streams), took, streamsReady, duration)
	within(b, "open files then", p.fds, streamsFiles, number)
	for i := busy; i < b.o.streams; i++ {
		if err := b.holds(ctx, fmt.Sprintf("IDLE%d", i), 3); err != nil {
			return err
		}
	}
	fmt.Printf("scale: every idle stream holds its 3 messages\n")
	return b.site.Edge.Stop(rig.StopTimeout)
}

// idle is the case of the same name.
func (b *bench) idle(ctx context.Context) error {
	if err := errors.Join(b.site.StartHub(), b.site.StartEdge()); err != nil {
		return err
	}
	if err := b.create(ctx, jetstream.StreamConfig{Name: "EXPORTED"}); err != nil {
		return err
	}
	f := &flood{subjects: []string{"exported.a"}, min: 100, max: 1000}
	if err := b.fill(ctx, "before", f, count(20_000)); err != nil {
		return err
	}
	nc, err := nats.Connect(b.site.EdgeURL())
	if err != nil {
		return err
	}
	defer nc.Close()
	if _, err := nc.SubscribeSync("some.thing"); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := b.site.WaitHub(wait, "EXPORTED", 20_000); err != nil {
		return err
	}
	// What follows on the last message (positions, checkpoints) has its time.
	if err := sleep(ctx, 15*time.Second); err != nil {
		return err
	}
	before, err := processIO(b.site.Edge, "write_bytes")
	if err != nil {
		return err
	}
	hub, err := processIO(b.site.Hub, "write_bytes")
	if err != nil {
		return err
	}
	usage, err := b.site.Edge.Usage()
	if err != nil {
		return err
	}
	if err := sleep(ctx, time.Duration(b.o.seconds)*time.Second); err != nil {
		return err
	}
	after, err := processIO(b.site.Edge, "write_bytes")
	if err != nil {
		return err
	}
	hubAfter, err := processIO(b.site.Hub, "write_bytes")
	if err != nil {
		return err
	}
	used, err := b.site.Edge.Usage()
	if err != nil {
		return err
	}
	bytes := func(n int64) string { return fmt.Sprintf("%d bytes", n) }
	within(b, fmt.Sprintf("written by the edge in %d idle seconds", b.o.seconds), after-before, 0, bytes)
	within(b, fmt.Sprintf("written by the hub in %d idle seconds", b.o.seconds), hubAfter-hub, 0, bytes)
	fmt.Printf("scale: processor time of the edge meanwhile: %v\n", used.CPU-usage.CPU)
	if err := nc.FlushTimeout(5 * time.Second); err != nil {
		return fmt.Errorf("the idle client's connection: %w", err)
	}
	return errors.Join(b.site.Edge.Stop(rig.StopTimeout), b.site.Hub.Stop(rig.StopTimeout))
}
