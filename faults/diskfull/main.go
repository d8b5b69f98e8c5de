//go:build linux

// Diskfull fills the file system that the edge's store lies on, first with what
// is published, then with somebody else's file, and demands that a full disk is
// a state and not an end: each publish is answered within a second, by an
// acknowledgement or by JetStream's error 10023; acknowledgements of consumers,
// deletions, purges and reads go on; publishing goes on within 5 seconds of
// there being space, without a restart; the edge starts on a full disk; and
// nothing that was acknowledged is lost. Store directories that cannot be used
// are refused with one clear error and the documented status.
//
//	go run ./faults/diskfull
//
// It needs root, mkfs.ext4 and a loop device.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"

	"petiole/faults/rig"
)

// What is demanded, and what a busy machine takes beside that; see demand.
var (
	answerWithin = time.Second     // each publish, and each request while the disk is full
	resumeWithin = 5 * time.Second // publishing, once there is space
)

// demand sets what is demanded by how busy the machine is now.
func demand(edge string) {
	answerWithin, resumeWithin = rig.Allow(time.Second, edge), rig.Allow(5*time.Second, edge)
}

const (
	codeFull   = 10023
	statusFull = 503
)

// The streams: the first is filled, the second is purged to make room, the
// third has a consumer at work.
const (
	fillStream  = "FILL"
	purgeStream = "PURGE"
	workStream  = "WORK"
)

type options struct {
	sizeMiB int64
	hold    time.Duration
	rounds  int
	only    string
	edge    string
	dir     string
	timeout time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "diskfull:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	var o options
	fs := flag.NewFlagSet("diskfull", flag.ContinueOnError)
	fs.Int64Var(&o.sizeMiB, "size", 512, "size of the file system, MiB")
	fs.DurationVar(&o.hold, "hold", 5*time.Second, "how long the disk stays full each time")
	fs.IntVar(&o.rounds, "rounds", 3, "how often a foreign file fills it")
	fs.StringVar(&o.only, "only", "", "only one part: full or directories")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&o.dir, "dir", "", "directory for image and logs; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", 15*time.Minute, "bound for the whole run")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if inside, err := rig.InNamespace(); !inside {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	dir, remove, err := rig.WorkDir(o.dir, "diskfull-")
	if err != nil {
		return err
	}
	defer remove(&err)
	site := &rig.Site{Dir: dir, Programs: rig.Programs{Edge: o.edge}}
	if err := site.Programs.Missing(ctx, dir, false); err != nil {
		return err
	}
	disk, err := rig.NewDisk(dir, o.sizeMiB<<20)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disk.Close()) }()
	site.EdgeStore = filepath.Join(disk.MountPoint, "store")
	if err := site.Prepare(); err != nil {
		return err
	}
	defer site.Close() // before the unmount above
	if o.only == "directories" {
		return directories(ctx, site, disk)
	}
	t := &test{o: o, site: site, disk: disk, ledger: map[string]*rig.Ledger{}}
	if err := t.run(ctx); err != nil {
		tail := ""
		if site.Edge != nil {
			tail = site.Edge.Log(2500)
		}
		return fmt.Errorf("%w; the edge's log ends with:\n%s", err, tail)
	}
	if o.only == "full" {
		return nil
	}
	return directories(ctx, site, disk)
}

// test is one run.
type test struct {
	o       options
	site    *rig.Site
	disk    *rig.Disk
	nc      *nats.Conn
	js      jetstream.JetStream
	ledger  map[string]*rig.Ledger
	askers  map[string]*rig.Askers
	first   int // number of the next publisher
	taken   map[uint64]bool
	deleted map[uint64]bool // of workStream
	purged  bool
}

func (t *test) run(ctx context.Context) error {
	t.taken, t.deleted = map[uint64]bool{}, map[uint64]bool{}
	if err := t.start(ctx); err != nil {
		return err
	}
	defer func() { t.nc.Close() }()
	for _, name := range []string{fillStream, purgeStream, workStream} {
		if err := t.site.CreateStream(ctx, name, strings.ToLower(name)+".>"); err != nil {
			return err
		}
	}
	if _, err := t.js.CreateConsumer(ctx, workStream, jetstream.ConsumerConfig{Durable: "worker", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1}); err != nil {
		return fmt.Errorf("create consumer: %w", err)
	}
	for _, part := range []struct {
		name string
		msgs int64
	}{{workStream, 64 * t.o.sizeMiB}, {purgeStream, t.o.sizeMiB << 20 / 4 / (8 << 10)}} {
		if err := t.publish(ctx, part.name, part.msgs); err != nil {
			return fmt.Errorf("publish to %s: %w", part.name, err)
		}
	}

	// Full of the edge's own data, and room again by a purge.
	demand(t.site.Programs.Edge)
	begun := time.Now()
	if err := t.untilRefused(ctx); err != nil {
		return fmt.Errorf("fill the disk with messages: %w", err)
	}
	acked, _ := t.ledger[fillStream].Acknowledged()
	fmt.Printf("diskfull: full of messages after %v: %d acknowledged, then refused with %d (%d); slowest answer %v\n",
		time.Since(begun).Round(time.Millisecond), acked, codeFull, statusFull, t.slowest())
	if err := t.whileFull(ctx, "full of messages"); err != nil {
		return err
	}
	if err := t.purge(ctx); err != nil {
		return err
	}
	if err := t.resumes(ctx, "a purge"); err != nil {
		return err
	}

	// Full of somebody else's data.
	for round := range t.o.rounds {
		demand(t.site.Programs.Edge)
		last := round == t.o.rounds-1
		foreign, err := t.fillDisk()
		if err != nil {
			return err
		}
		if err := t.untilRefused(ctx); err != nil {
			return fmt.Errorf("with a foreign file: %w", err)
		}
		if err := t.fillUp(foreign); err != nil { // what was left or given up meanwhile
			return err
		}
		what := fmt.Sprintf("full of a foreign file, round %d", round+1)
		if err := t.whileFull(ctx, what); err != nil {
			return err
		}
		if last {
			if err := t.restart(ctx); err != nil {
				return err
			}
			if err := t.whileFull(ctx, what+", after the restarts"); err != nil {
				return err
			}
		}
		if err := os.Remove(foreign); err != nil {
			return err
		}
		if err := t.resumes(ctx, "the foreign file's removal"); err != nil {
			return err
		}
	}
	if err := t.verify(ctx, "at last"); err != nil {
		return err
	}
	t.nc.Close()
	return t.site.Edge.Stop(rig.StopTimeout)
}

// start starts the edge and connects to it.
func (t *test) start(ctx context.Context) (err error) {
	if err := t.site.StartEdge(); err != nil {
		return err
	}
	if t.nc, err = nats.Connect(t.site.EdgeURL(), nats.NoReconnect(), nats.Timeout(rig.StartTimeout)); err != nil {
		return err
	}
	demand(t.site.Programs.Edge)
	if t.js, err = jetstream.New(t.nc, jetstream.WithDefaultTimeout(answerWithin)); err != nil {
		return err
	}
	t.askers = map[string]*rig.Askers{}
	for _, name := range []string{fillStream, purgeStream, workStream} {
		if t.ledger[name] == nil {
			t.ledger[name] = rig.NewLedger()
		}
		rows := &rig.Sized{Seed: uint64(t.first) + 1, Min: 4 << 10, Max: 12 << 10}
		if name == workStream { // many of them
			rows.Min, rows.Max = 64, 256
		}
		t.askers[name] = rig.NewAskers(t.nc, t.ledger[name], strings.ToLower(name)+".", rows, t.first, 16)
		t.first += 16
	}
	return ctx.Err()
}

func (t *test) slowest() (d time.Duration) {
	for _, as := range t.askers {
		d = max(d, as.Slowest())
	}
	return d.Round(time.Millisecond)
}

// publish publishes at least so many messages, all of which have to be taken.
func (t *test) publish(ctx context.Context, name string, msgs int64) error {
	var taken atomic.Int64
	var refused atomic.Pointer[jetstream.APIError]
	err := t.askers[name].Run(ctx, 10*time.Second, func(a rig.Answer) bool {
		if a.Refused != nil {
			refused.Store(a.Refused)
			return true
		}
		return taken.Add(1) >= msgs
	})
	if err == nil && refused.Load() != nil {
		err = refused.Load()
	}
	return err
}

// untilRefused publishes until the disk is full.
func (t *test) untilRefused(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 3*time.Minute, errors.New("publishes are not refused although the disk is full"))
	defer cancel()
	var other atomic.Pointer[jetstream.APIError]
	var full atomic.Int64
	err := t.askers[fillStream].Run(ctx, answerWithin, func(a rig.Answer) bool {
		if a.Refused == nil {
			return false
		}
		if a.Refused.ErrorCode != codeFull || a.Refused.Code != statusFull {
			other.Store(a.Refused)
			return true
		}
		return full.Add(1) >= 100
	})
	switch {
	case err != nil:
		return err
	case other.Load() != nil:
		return fmt.Errorf("refused with %w, want error %d", other.Load(), codeFull)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// whileFull demands that everything but publishing works for a while.
func (t *test) whileFull(ctx context.Context, what string) error {
	before, _ := t.ledger[fillStream].Acknowledged()
	refused := t.askers[fillStream].Refused()
	publishing, stop := context.WithCancel(ctx)
	answers := make(chan error, 1)
	go func() {
		answers <- t.askers[fillStream].Run(publishing, answerWithin, func(a rig.Answer) bool {
			select {
			case <-publishing.Done():
			case <-time.After(20 * time.Millisecond):
			}
			return false
		})
	}()
	var works counts
	var err error
	for end := time.Now().Add(t.o.hold); err == nil && time.Now().Before(end); {
		err = t.work(ctx, &works)
	}
	if err == nil && works.acks == 0 {
		err = errors.New("no message was consumed")
	}
	stop()
	err = errors.Join(err, <-answers)
	if !t.site.Edge.Alive() {
		err = errors.Join(err, fmt.Errorf("the edge ended with status %d", t.site.Edge.ExitCode()))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	after, _ := t.ledger[fillStream].Acknowledged()
	free, err := t.disk.Free()
	if err != nil {
		return err
	}
	n := t.askers[fillStream].Refused() - refused
	fmt.Printf("diskfull: %s: in %v %d publishes refused and %d taken; %d acknowledgements of a consumer, %d deletions, %d reads, %d requests between clients, the slowest %v; slowest publish %v; %d KiB free\n",
		what, t.o.hold, n, after-before, works.acks, works.deletes, works.reads, works.requests, works.slowest.Round(time.Millisecond), t.slowest(), free>>10)
	if n == 0 {
		return fmt.Errorf("%s: no publish was refused: the disk was not full", what)
	}
	return nil
}

// counts is what worked while the disk was full.
type counts struct {
	acks, deletes, reads, requests int
	slowest                        time.Duration
}

// work does one of everything.
func (t *test) work(ctx context.Context, c *counts) error {
	timed := func(what string, fn func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		begun := time.Now()
		if err := fn(ctx); err != nil {
			return fmt.Errorf("%s, after %v: %w", what, time.Since(begun).Round(time.Millisecond), err)
		}
		c.slowest = max(c.slowest, time.Since(begun))
		return nil
	}
	var msgs []jetstream.Msg
	err := timed("fetch", func(ctx context.Context) error {
		cons, err := t.js.Consumer(ctx, workStream, "worker")
		if err != nil {
			return err
		}
		b, err := cons.Fetch(4, jetstream.FetchMaxWait(answerWithin))
		if err != nil {
			return err
		}
		for m := range b.Messages() {
			msgs = append(msgs, m)
		}
		return b.Error()
	})
	if err != nil {
		return err
	}
	for _, m := range msgs {
		meta, err := m.Metadata()
		if err != nil {
			return err
		}
		if t.taken[meta.Sequence.Stream] {
			return fmt.Errorf("message %d was delivered again although its acknowledgement was confirmed", meta.Sequence.Stream)
		}
		if err := timed("acknowledge", m.DoubleAck); err != nil {
			return err
		}
		t.taken[meta.Sequence.Stream] = true
		c.acks++
	}
	err = timed("delete and read", func(ctx context.Context) error {
		s, err := t.js.Stream(ctx, workStream)
		if err != nil {
			return err
		}
		seq := uint64(len(t.deleted) + 2)
		if seq >= s.CachedInfo().State.LastSeq-50 {
			return nil
		}
		if err := s.DeleteMsg(ctx, seq); err != nil {
			return err
		}
		t.deleted[seq] = true
		c.deletes++
		if _, err := s.GetMsg(ctx, seq+1); err != nil {
			return err
		}
		c.reads++
		return nil
	})
	if err != nil {
		return err
	}
	return timed("a request between clients", func(ctx context.Context) error {
		sub, err := t.nc.Subscribe("core.echo", func(m *nats.Msg) { _ = m.Respond(m.Data) })
		if err != nil {
			return err
		}
		defer func() { _ = sub.Unsubscribe() }()
		if _, err := t.nc.RequestWithContext(ctx, "core.echo", []byte("x")); err != nil {
			return err
		}
		c.requests++
		return nil
	})
}

// purge empties a stream while the disk is full.
func (t *test) purge(ctx context.Context) error {
	s, err := t.js.Stream(ctx, purgeStream)
	if err != nil {
		return fmt.Errorf("purge: %w", err)
	}
	begun := time.Now()
	if err := s.Purge(ctx); err != nil {
		return fmt.Errorf("purge on a full disk, after %v: %w", time.Since(begun).Round(time.Millisecond), err)
	}
	t.purged = true
	fmt.Printf("diskfull: purged %s in %v\n", purgeStream, time.Since(begun).Round(time.Millisecond))
	return nil
}

// resumes demands that publishing goes on soon, and stays so.
func (t *test) resumes(ctx context.Context, after string) error {
	begun := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, resumeWithin, fmt.Errorf("publishing does not go on within %v of %s", resumeWithin, after))
	defer cancel()
	var took time.Duration
	var taken atomic.Int64
	err := t.askers[fillStream].Run(ctx, answerWithin, func(a rig.Answer) bool {
		if a.Refused != nil {
			time.Sleep(10 * time.Millisecond)
			return false
		}
		n := taken.Add(1)
		if n == 1 {
			took = time.Since(begun)
		}
		return n >= 200
	})
	if err != nil {
		return fmt.Errorf("after %s: %w", after, err)
	}
	if taken.Load() < 200 {
		return fmt.Errorf("%w (%d publishes were taken)", context.Cause(ctx), taken.Load())
	}
	fmt.Printf("diskfull: publishing goes on %v after %s\n", took.Round(time.Millisecond), after)
	return nil
}

// fillDisk makes a foreign file that takes all the space there is.
func (t *test) fillDisk() (string, error) {
	path := filepath.Join(t.disk.MountPoint, "foreign")
	return path, t.fillUp(path)
}

func (t *test) fillUp(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	for try := 0; try < 8; try++ {
		st, err := f.Stat()
		if err != nil {
			return err
		}
		free, err := t.disk.Free()
		if err != nil {
			return err
		}
		if free < 8<<10 {
			break
		}
		// What the file system needs for the file itself comes off.
		for n := free; n >= 4<<10; n /= 2 {
			if err = unix.Fallocate(int(f.Fd()), 0, st.Size(), n); err == nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	return f.Sync()
}

// restart kills the edge on the full disk and starts it, and stops and starts it.
func (t *test) restart(ctx context.Context) error {
	t.nc.Close()
	t.site.Edge.Kill()
	for _, how := range []string{"kill -9", "a clean stop"} {
		begun := time.Now()
		if err := t.start(ctx); err != nil {
			return fmt.Errorf("start on a full disk after %s: %w", how, err)
		}
		fmt.Printf("diskfull: serving again on the full disk %v after %s\n", time.Since(begun).Round(time.Millisecond), how)
		if err := t.verify(ctx, "on the full disk after "+how); err != nil {
			return err
		}
		if how == "kill -9" {
			t.nc.Close()
			if err := t.site.Edge.Stop(rig.StopTimeout); err != nil {
				return fmt.Errorf("stop on a full disk: %w", err)
			}
		}
	}
	return nil
}

// verify compares what the streams hold with what was acknowledged.
func (t *test) verify(ctx context.Context, when string) error {
	for _, name := range []string{fillStream, workStream} {
		held, err := t.site.ReadEdge(ctx, name, 1)
		if err != nil {
			return fmt.Errorf("%s: %w", when, err)
		}
		if err := t.askers[name].Stored(held); err != nil {
			return fmt.Errorf("%s: %w", when, err)
		}
		v := t.ledger[name].Check(name+" "+when, held)
		if name == workStream { // what was deleted is missing as it should be
			for _, h := range held {
				if t.deleted[h.Seq] {
					return fmt.Errorf("%s: message %d is there, which was deleted", when, h.Seq)
				}
			}
			v.Missing -= len(t.deleted)
			v.Found += len(t.deleted)
			if v.OK() {
				v.Examples = nil
			}
		}
		fmt.Println("diskfull:", v)
		if !v.OK() {
			return fmt.Errorf("%s: not all that was acknowledged is there", when)
		}
	}
	msgs, _, err := rig.StreamLastAt(ctx, t.site.EdgeURL(), purgeStream)
	if err == nil && t.purged && msgs != 0 {
		err = fmt.Errorf("%s: the purged stream holds %d messages", when, msgs)
	}
	if err != nil {
		return err
	}
	cons, err := t.js.Consumer(ctx, workStream, "worker")
	if err != nil {
		return fmt.Errorf("%s: %w", when, err)
	}
	info := cons.CachedInfo()
	acked, _ := t.ledger[workStream].Acknowledged()
	want := acked
	for seq := range uint64(acked + 1) {
		if seq > 0 && (t.taken[seq] || t.deleted[seq]) {
			want--
		}
	}
	if left := int(info.NumPending) + info.NumAckPending; left != want {
		return fmt.Errorf("%s: the consumer has %d messages left, want %d: confirmed acknowledgements were lost or invented", when, left, want)
	}
	return nil
}

const nobody = math.MaxUint16 - 1 // the user id of nobody
