//go:build linux && (amd64 || arm64)

// Stall lets the disk hang, be slow and fail under the edge's store.
//
// Cases:
//
//	freeze    the file system is frozen for some seconds: nothing is acknowledged,
//	          core publish/subscribe goes on undisturbed, log and status tell of
//	          the stall, and everything is acknowledged afterwards
//	slow      the disk takes 20 writes a second: publishing is slow, nothing else is
//	fsync     one fdatasync of the log fails with EIO, once: nothing is acknowledged
//	          after it, exit code 74 within a second (and what a busy machine takes
//	          beside that), a restart finds everything
//	shutdown  the file system shuts itself down: the same
//
//	go run ./faults/stall
//	go run ./faults/stall -cases freeze -freeze 30s
//
// It needs root, mkfs.ext4, a loop device, and for slow the control group blkio.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sys/unix"

	"petiole/faults/rig"
	"petiole/faults/rig/trap"
)

const (
	stream      = "STALL"
	exitStorage = 74
	exitWithin  = time.Second
	// coreWithin and coreFactor say how long messages between clients may take
	// (99th percentile): the one, or so many times what they take at an edge
	// that has no store and runs beside this one. How busy the machine is both
	// see alike.
	coreWithin = 50 * time.Millisecond
	coreFactor = 4
	// publishers wait for an answer each, at the same time.
	publishers = 16
	// leastAcks have to come before each failure.
	leastAcks = 100
)

type options struct {
	cases   []string
	freeze  time.Duration
	slow    time.Duration
	rounds  int
	edge    string
	dir     string
	timeout time.Duration
}

var allCases = []string{"freeze", "slow", "fsync", "shutdown"}

func main() {
	trap.Child()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "stall:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	var o options
	fs := flag.NewFlagSet("stall", flag.ContinueOnError)
	cases := fs.String("cases", strings.Join(allCases, ","), "which cases to run")
	fs.DurationVar(&o.freeze, "freeze", 15*time.Second, "how long the disk hangs; the watchdog speaks up after 5 s")
	fs.DurationVar(&o.slow, "slow", 10*time.Second, "how long it is slow")
	fs.IntVar(&o.rounds, "rounds", 20, "rounds of fsync and of shutdown")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&o.dir, "dir", "", "directory for image and logs; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", 20*time.Minute, "bound for the whole run")
	if err := fs.Parse(args); err != nil {
		return err
	}
	o.cases = strings.Split(*cases, ",")
	for _, c := range o.cases {
		if !slices.Contains(allCases, c) {
			return fmt.Errorf("-cases: there is no case %q, only %s", c, strings.Join(allCases, ", "))
		}
	}
	if inside, err := rig.InNamespace(); !inside {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	dir, remove, err := rig.WorkDir(o.dir, "stall-")
	if err != nil {
		return err
	}
	defer remove(&err)
	programs := rig.Programs{Edge: o.edge}
	if err := programs.Missing(ctx, dir, false); err != nil {
		return err
	}
	for _, c := range o.cases {
		begun := time.Now()
		if err := o.one(ctx, c, filepath.Join(dir, c), programs); err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
		fmt.Printf("stall: %s passed in %v\n", c, time.Since(begun).Round(100*time.Millisecond))
	}
	return nil
}

// bench is an edge whose store lies on an image.
type bench struct {
	o      options
	site   *rig.Site
	disk   *rig.Disk
	ledger *rig.Ledger
	first  int
}

func (o options) one(ctx context.Context, name, dir string, programs rig.Programs) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	disk, err := rig.NewDisk(dir, 512<<20)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disk.Close()) }()
	b := &bench{
		o: o, disk: disk, ledger: rig.NewLedger(),
		site: &rig.Site{Dir: dir, Programs: programs, EdgeStore: filepath.Join(disk.MountPoint, "store")},
	}
	if err := b.site.Prepare(); err != nil {
		return err
	}
	defer b.site.Close() // before the unmount above
	defer disk.Thaw()    //nolint:errcheck // Close tries again and reports
	if err := b.site.StartEdge(); err != nil {
		return err
	}
	if err := b.site.CreateStream(ctx, stream, "stall.>"); err != nil {
		return err
	}
	switch name {
	case "freeze":
		err = b.freeze(ctx)
	case "slow":
		err = b.slow(ctx)
	case "fsync":
		err = b.rounds(ctx, b.failSync)
	case "shutdown":
		err = b.rounds(ctx, b.shutdown)
	}
	if err != nil {
		err = fmt.Errorf("%w; the edge's log ends with:\n%s", err, b.site.Edge.Log(2500))
	}
	return err
}

// load is publishers that wait for each answer, for as long as it takes.
type load struct {
	askers *rig.Askers
	nc     *nats.Conn
	stop   func() error
}

func (b *bench) load(ctx context.Context, patience time.Duration) (*load, error) {
	nc, err := nats.Connect(b.site.EdgeURL(), nats.NoReconnect(), nats.Timeout(rig.StartTimeout))
	if err != nil {
		return nil, err
	}
	l := &load{nc: nc, askers: rig.NewAskers(nc, b.ledger, "stall.", &rig.Endless{Seed: uint64(b.first) + 3}, b.first, publishers)}
	b.first += publishers
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		done <- l.askers.Run(ctx, patience, func(a rig.Answer) bool { return a.Refused != nil })
	}()
	l.stop = func() error {
		cancel()
		err := <-done
		nc.Close()
		return err
	}
	return l, nil
}

// core is messages between clients, measured all the time.
type core struct {
	mu    sync.Mutex
	times []time.Duration
	stop  func() error
}

func newCore(ctx context.Context, url string) (*core, error) {
	from, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(rig.StartTimeout))
	if err != nil {
		return nil, err
	}
	to, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(rig.StartTimeout))
	if err != nil {
		from.Close()
		return nil, err
	}
	sub, err := to.SubscribeSync("core.ping")
	if err == nil {
		err = to.Flush()
	}
	if err != nil {
		from.Close()
		to.Close()
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	c := &core{}
	done := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			sent := time.Now()
			if err := from.Publish("core.ping", []byte("x")); err != nil {
				done <- err
				return
			}
			if _, err := sub.NextMsg(time.Minute); err != nil {
				done <- fmt.Errorf("a message between clients did not arrive: %w", err)
				return
			}
			c.mu.Lock()
			c.times = append(c.times, time.Since(sent))
			c.mu.Unlock()
			select {
			case <-ctx.Done():
			case <-time.After(2 * time.Millisecond):
			}
		}
		done <- nil
	}()
	c.stop = func() error {
		cancel()
		err := <-done
		from.Close()
		to.Close()
		return err
	}
	return c, nil
}

// delays is what messages between clients took for a while.
type delays struct {
	n            int
	p99, slowest time.Duration
}

func (d delays) String() string {
	return fmt.Sprintf("%d messages between clients, 99 of 100 within %v, the slowest %v", d.n, d.p99, d.slowest)
}

// take returns the delays since the last call.
func (c *core) take() (d delays) {
	c.mu.Lock()
	times := c.times
	c.times = nil
	c.mu.Unlock()
	if d.n = len(times); d.n > 0 {
		slices.Sort(times)
		d.p99 = times[d.n*99/100].Round(10 * time.Microsecond)
		d.slowest = times[d.n-1].Round(10 * time.Microsecond)
	}
	return d
}

// cores is messages between clients of the edge, and beside them of one that has
// no store.
type cores struct {
	edge, control *core
	program       *rig.Process
}

func (b *bench) cores(ctx context.Context) (c *cores, err error) {
	port, err := rig.FreePort()
	if err != nil {
		return nil, err
	}
	conf, err := rig.WriteFile(b.site.Dir, "control.conf", fmt.Sprintf("listen: %q\n", rig.Addr(port)))
	if err != nil {
		return nil, err
	}
	c = &cores{}
	if c.program, err = rig.Start("control", filepath.Join(b.site.Dir, "control.log"), b.site.Programs.Edge, "-c", conf); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.stop())
		}
	}()
	if err := rig.WaitReady(c.program, rig.Addr(port), rig.StartTimeout); err != nil {
		return nil, err
	}
	if c.control, err = newCore(ctx, "nats://"+rig.Addr(port)); err != nil {
		return nil, err
	}
	c.edge, err = newCore(ctx, b.site.EdgeURL())
	return c, err
}

func (c *cores) take() (edge, control delays) { return c.edge.take(), c.control.take() }

func (c *cores) stop() (err error) {
	for _, one := range []*core{c.edge, c.control} {
		if one != nil {
			err = errors.Join(err, one.stop())
		}
	}
	c.program.Kill()
	return err
}

// undisturbed judges messages between clients in a time in which the disk was
// slow, or hung for as long as hung.
func undisturbed(edge, control delays, hung time.Duration) error {
	switch {
	case hung > 0 && edge.slowest > hung/2:
		return fmt.Errorf("a message between clients took %v: it waited for the disk, which hung for %v", edge.slowest, hung)
	case edge.n < control.n/coreFactor:
		return fmt.Errorf("only %d messages between clients, and %d at the edge without a store", edge.n, control.n)
	case edge.p99 > max(coreWithin, coreFactor*control.p99):
		return fmt.Errorf("messages between clients took %v (99 of 100), and %v at the edge without a store", edge.p99, control.p99)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// freeze is the case of the same name.
func (b *bench) freeze(ctx context.Context) error {
	l, err := b.load(ctx, b.o.freeze+time.Minute)
	if err != nil {
		return err
	}
	c, err := b.cores(ctx)
	if err != nil {
		return errors.Join(err, l.stop())
	}
	err = b.frozen(ctx, c)
	err = errors.Join(err, c.stop(), l.stop())
	if err != nil {
		return err
	}
	return b.verify(ctx, "after the freeze")
}

func (b *bench) frozen(ctx context.Context, c *cores) error {
	if err := b.ledger.WaitAcknowledged(ctx, 10*leastAcks); err != nil {
		return err
	}
	if err := b.disk.Freeze(); err != nil {
		return err
	}
	before, _ := b.ledger.Acknowledged()
	c.take()
	if err := pause(ctx, b.o.freeze); err != nil {
		return err
	}
	during, _ := b.ledger.Acknowledged()
	edge, control := c.take()
	status, statusErr := b.status(ctx)
	thawed := time.Now()
	if err := b.disk.Thaw(); err != nil {
		return err
	}
	if err := b.ledger.WaitAcknowledged(ctx, during+10*leastAcks); err != nil {
		return fmt.Errorf("after the disk answers again: %w", err)
	}
	after, _ := b.ledger.Acknowledged()
	fmt.Printf("stall: %d acknowledged, then the disk hung for %v: %d acknowledged, %v; at an edge without a store %v; %d acknowledged within %v after it\n",
		before, b.o.freeze, during-before, edge, control, after-during, time.Since(thawed).Round(time.Millisecond))
	log := b.site.Edge.Log(1 << 20)
	err := undisturbed(edge, control, b.o.freeze)
	switch {
	// What was synced before had yet to reach the clients: one answer for each
	// of the publishers that wait. What they publish then cannot be synced.
	case during-before > publishers:
		return fmt.Errorf("%d publishes were acknowledged while the disk hung, by %d publishers of which each waits for its answer", during-before, publishers)
	case err != nil:
		return err
	case statusErr != nil:
		return fmt.Errorf("status while the disk hung: %w", statusErr)
	case !strings.Contains(log, "level=WARN") || !strings.Contains(log, "stall"):
		return errors.New("the log does not warn of the stall")
	case !strings.Contains(status, "stall"):
		return fmt.Errorf("status does not tell of the stall: %s", status)
	}
	return nil
}

// status asks the running edge.
func (b *bench) status(ctx context.Context) (string, error) {
	// It is asked while the disk hangs: if the edge waited for that, it would for
	// as long as this does.
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, b.site.Programs.Edge, "status", "--json", "-c", filepath.Join(b.site.Dir, "edge.conf")).Output()
	if err != nil {
		return "", err
	}
	var st struct {
		JetStream json.RawMessage `json:"jetstream"`
	}
	if err := json.Unmarshal(out, &st); err != nil {
		return "", err
	}
	return string(st.JetStream), nil
}

// slow is the case of the same name.
func (b *bench) slow(ctx context.Context) error {
	group, err := rig.NewCgroup("blkio")
	if err != nil {
		return err
	}
	defer func() {
		b.site.Edge.Kill()
		group.Close()
	}()
	const iops = 20
	if err := errors.Join(group.LimitWrites(b.disk, iops, 1<<20), group.Add(b.site.Edge.PID())); err != nil {
		return err
	}
	l, err := b.load(ctx, time.Minute)
	if err != nil {
		return err
	}
	c, err := b.cores(ctx)
	if err != nil {
		return errors.Join(err, l.stop())
	}
	err = b.ledger.WaitAcknowledged(ctx, 2*leastAcks)
	c.take()
	before, _ := b.ledger.Acknowledged()
	err = errors.Join(err, pause(ctx, b.o.slow))
	after, _ := b.ledger.Acknowledged()
	edge, control := c.take()
	err = errors.Join(err, c.stop(), l.stop())
	if err != nil {
		return err
	}
	fmt.Printf("stall: %d writes a second: %d acknowledged in %v, the slowest after %v; %v; at an edge without a store %v\n",
		iops, after-before, b.o.slow, l.askers.Slowest().Round(time.Millisecond), edge, control)
	switch {
	case after == before:
		return errors.New("nothing was acknowledged on a slow disk")
	// All publishers share a commit.
	case float64(after-before) > b.o.slow.Seconds()*iops*publishers*2:
		return errors.New("that is more than the disk could have written: it was not slow, or not asked")
	}
	if err := undisturbed(edge, control, 0); err != nil {
		return err
	}
	b.site.Edge.Kill()
	if err := b.site.StartEdge(); err != nil {
		return err
	}
	return b.verify(ctx, "after the slow disk")
}

// rounds repeats a failure, each time with an edge that has recovered.
func (b *bench) rounds(ctx context.Context, fail func(context.Context) (time.Duration, error)) error {
	if err := b.site.Edge.Stop(rig.StopTimeout); err != nil {
		return err
	}
	var slowest time.Duration
	for round := 1; round <= b.o.rounds; round++ {
		ended, err := fail(ctx)
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		slowest = max(slowest, ended)
		if err := b.site.StartEdge(); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := b.verify(ctx, fmt.Sprintf("round %d", round)); err != nil {
			return err
		}
		if err := b.site.Edge.Stop(rig.StopTimeout); err != nil {
			return err
		}
	}
	acked, _ := b.ledger.Acknowledged()
	fmt.Printf("stall: %d failures, exit code %d after %v at most; acknowledged %d, found %d\n", b.o.rounds, exitStorage, slowest.Round(time.Millisecond), acked, acked)
	return nil
}

// failure is the moment of one.
type failure struct {
	mu    sync.Mutex
	armed bool
	acked int // acknowledged by then
	at    time.Time
}

// failSync lets one fdatasync of the log fail.
func (b *bench) failSync(ctx context.Context) (time.Duration, error) {
	f := &failure{}
	hit := make(chan struct{})
	left := 1 + rand.IntN(20)
	cmd, tr, err := trap.Command(b.site.EdgeStore, func(c trap.Call) trap.Answer {
		f.mu.Lock()
		defer f.mu.Unlock()
		if !f.armed || c.Name != "fdatasync" || filepath.Base(filepath.Dir(c.Path)) != "wal" {
			return trap.Answer{}
		}
		if left--; left != 0 {
			return trap.Answer{}
		}
		return trap.Answer{Errno: unix.EIO, Before: func() {
			// The sync has not happened, so that nothing new can be
			// acknowledged; what was synced before it arrives meanwhile.
			acked := b.settled()
			f.mu.Lock()
			f.acked = acked
			f.at = time.Now()
			f.mu.Unlock()
			close(hit)
		}}
	}, b.site.Programs.Edge, "-c", filepath.Join(b.site.Dir, "edge.conf"))
	if err != nil {
		return 0, err
	}
	p, err := rig.StartCmd("edge", filepath.Join(b.site.Dir, "edge.log"), cmd)
	if err != nil {
		return 0, err
	}
	b.site.Edge = p
	if err := errors.Join(tr.Serve(), rig.WaitReady(p, b.site.EdgeAddr, rig.StartTimeout)); err != nil {
		return 0, err
	}
	before, _ := b.ledger.Acknowledged()
	l, err := b.load(ctx, time.Minute)
	if err != nil {
		return 0, err
	}
	err = b.ledger.WaitAcknowledged(ctx, before+leastAcks)
	f.mu.Lock()
	f.armed = true
	f.mu.Unlock()
	if err == nil {
		select {
		case <-hit:
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(time.Minute):
			err = errors.New("no fdatasync was made in a minute")
		}
	}
	ended, e := b.ends(f, 0)
	_ = l.stop() // the connection is lost, as it should be
	return ended, errors.Join(err, e, tr.Wait())
}

// settled returns how many publishes have been acknowledged when no further has
// been for a while.
func (b *bench) settled() int {
	const quiet, patience = 300 * time.Millisecond, 10 * time.Second
	last, _ := b.ledger.Acknowledged()
	since := time.Now()
	for start := since; time.Since(since) < quiet && time.Since(start) < patience; time.Sleep(quiet / 20) {
		if n, _ := b.ledger.Acknowledged(); n != last {
			last, since = n, time.Now()
		}
	}
	return last
}

// Of ext4.h: _IOR('X', 125, __u32). The flags: without writing anything back,
// the journal included.
const (
	ext4IOCShutdown = 0x8004587d
	flagsNoLogFlush = 2
)

// shutdown lets the whole file system fail.
func (b *bench) shutdown(ctx context.Context) (time.Duration, error) {
	if err := b.site.StartEdge(); err != nil {
		return 0, err
	}
	before, _ := b.ledger.Acknowledged()
	l, err := b.load(ctx, time.Minute)
	if err != nil {
		return 0, err
	}
	if err := b.ledger.WaitAcknowledged(ctx, before+leastAcks+rand.IntN(leastAcks)); err != nil {
		return 0, errors.Join(err, l.stop())
	}
	dir, err := os.Open(b.disk.MountPoint)
	if err != nil {
		return 0, errors.Join(err, l.stop())
	}
	// The edge holds still, outside of the kernel, while it fails: ext4 lets an
	// fdatasync that is under way at the shutdown succeed although the extents
	// it wrote to are not recorded, which no disk does that fails.
	err = b.site.Edge.Halt()
	if err == nil {
		err = unix.IoctlSetPointerInt(int(dir.Fd()), ext4IOCShutdown, flagsNoLogFlush)
	}
	f := &failure{at: time.Now()}
	f.acked, _ = b.ledger.Acknowledged()
	err = errors.Join(err, dir.Close(), b.site.Edge.Signal(syscall.SIGCONT))
	// What was synced before is acknowledged after: one answer for each of
	// the publishers that wait, at most.
	ended, e := b.ends(f, publishers)
	_ = l.stop() // the connection is lost, as it should be
	if err := errors.Join(err, e); err != nil {
		return 0, err
	}
	if err := b.disk.Close(); err != nil {
		return 0, err
	}
	return ended, b.disk.Mount()
}

// ends waits for the edge's end after a failure and judges it. On their way
// to the clients may have been that many acknowledgements.
func (b *bench) ends(f *failure, onTheWay int) (time.Duration, error) {
	select {
	case <-b.site.Edge.Done():
	case <-time.After(rig.StopTimeout):
		return 0, errors.New("the edge runs on after its disk failed")
	}
	within := exitWithin
	f.mu.Lock()
	if b.site.Edge.Ended().Sub(f.at) > within {
		within = rig.Allow(within, b.site.Programs.Edge)
	}
	f.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	ended := b.site.Edge.Ended().Sub(f.at)
	acked, _ := b.ledger.Acknowledged()
	switch code := b.site.Edge.ExitCode(); {
	case code != exitStorage:
		return ended, fmt.Errorf("exit code %d, want %d", code, exitStorage)
	case ended > within:
		return ended, fmt.Errorf("the edge ended %v after the failure, want at most %v", ended.Round(time.Millisecond), within.Round(time.Millisecond))
	case acked > f.acked+onTheWay:
		return ended, fmt.Errorf("%d publishes were acknowledged after the failure", acked-f.acked)
	}
	return ended, nil
}

// verify compares what the stream holds with what was acknowledged.
func (b *bench) verify(ctx context.Context, when string) error {
	held, err := b.site.ReadEdge(ctx, stream, 1)
	if err != nil {
		return fmt.Errorf("%s: %w", when, err)
	}
	v := b.ledger.Check(when, held)
	fmt.Println("stall:", v)
	if !v.OK() {
		return fmt.Errorf("%s: not all that was acknowledged is there", when)
	}
	return nil
}
