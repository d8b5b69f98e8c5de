//go:build linux

// Powercut cuts the power in effigy: the edge is stopped in the middle of its
// work, and the ext4 or XFS image that its store lies on is taken from under it
// with an ioctl, which makes the kernel drop everything that was not yet written
// out. Then the edge is killed, the image is mounted again, which recovers the
// file system's journal, and the edge is started on what is left. Every publish
// that was acknowledged before the cut has to be there exactly once with its
// bytes, at the edge and, over the link, at a hub whose store lies outside the
// image.
//
//	go run ./faults/powercut -cycles 50
//	go run ./faults/powercut -cycles 50 -fs xfs
//
// In every other pair of cuts the image is a slow disk, which a control group
// limits to a few writes a second: then nearly every cut falls into an fdatasync.
//
// With -expect-loss it checks itself: given an edge that breaks its promise on
// purpose (see faults/mutants), it must find a loss. The disk is then always
// slow, and it is cut before the edge is stopped, so that nothing can become
// durable after its acknowledgement was counted.
//
// It needs root, mkfs.ext4 or mkfs.xfs, a loop device and the control group
// blkio (v1) or io (v2). Mounts live in a mount namespace of its own, so that
// nothing stays mounted however it ends.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"petiole/faults/rig"
)

type options struct {
	cycles, acks int
	publishers   int
	window       int
	fs           string
	sizeMiB      int64
	edge, hub    string
	tags         string
	expectLoss   bool
	noHub        bool
	recycled     bool
	dir          string
	timeout      time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "powercut:", err)
		os.Exit(1)
	}
}

func parse(args []string) (options, error) {
	var o options
	fs := flag.NewFlagSet("powercut", flag.ContinueOnError)
	fs.IntVar(&o.cycles, "cycles", 50, "how many cuts")
	fs.IntVar(&o.acks, "acks", 1000, "acknowledged publishes before each cut, at least")
	fs.IntVar(&o.publishers, "publishers", 4, "asynchronous publishers")
	fs.IntVar(&o.window, "window", 128, "publishes in flight of each")
	fs.StringVar(&o.fs, "fs", "ext4", "file system of the image: ext4 or xfs")
	fs.Int64Var(&o.sizeMiB, "size", 1024, "size of the image, MiB (sparse)")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&o.hub, "hub", "", "hub binary (default: built from this repository)")
	fs.StringVar(&o.tags, "tags", "", "build tags for the edge")
	fs.BoolVar(&o.expectLoss, "expect-loss", false, "succeed as soon as a loss is found, fail if there is none; without a hub")
	fs.BoolVar(&o.recycled, "recycled", false, "cut right after a recycled log segment has come into use, on a fast disk; for edges built with small_budgets")
	fs.BoolVar(&o.noHub, "no-hub", false, "leave the hub out")
	fs.StringVar(&o.dir, "dir", "", "directory for image, stores and logs; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", 0, "bound for the whole run (default: 1 minute and 30 s for each cut)")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if o.fs != "ext4" && o.fs != "xfs" {
		return o, fmt.Errorf("-fs %s: must be ext4 or xfs", o.fs)
	}
	o.noHub = o.noHub || o.expectLoss
	if o.timeout == 0 {
		o.timeout = time.Minute + time.Duration(o.cycles)*30*time.Second
	}
	return o, nil
}

// namespaceEnv marks the process that runs in the mount namespace.
const namespaceEnv = "PETIOLE_POWERCUT_NAMESPACE"

func run(ctx context.Context, args []string) (err error) {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("needs root to mount an image: run it with sudo")
	}
	if os.Getenv(namespaceEnv) == "" {
		return inNamespace(args)
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	dir, remove, err := rig.WorkDir(o.dir, "powercut-")
	if err != nil {
		return err
	}
	defer remove(&err)
	return o.cut(ctx, dir)
}

// inNamespace runs this program again in a mount namespace of its own.
func inNamespace(args []string) error {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), namespaceEnv+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("the run failed: %w", err)
	}
	return nil
}

// round is how many cuts a stream lives through: what has been read has to be
// compared with all of the ledger after each.
const round = 25

// streamOf is the stream that cut n, counted from 1, is about.
func streamOf(n int) string { return fmt.Sprintf("POWERCUT%d", (n-1)/round+1) }

// errLoss is a verdict that is not clean.
var errLoss = errors.New("messages were lost or changed")

// cut builds the programs, makes the image and does o.cycles cuts.
func (o options) cut(ctx context.Context, dir string) (err error) {
	site := &rig.Site{Dir: dir, Programs: rig.Programs{Edge: o.edge, Hub: o.hub}}
	var tags []string
	if o.tags != "" {
		tags = append(tags, o.tags)
	}
	if err := site.Programs.Missing(ctx, dir, !o.noHub, tags...); err != nil {
		return err
	}
	img, err := newImage(dir, o.fs, o.sizeMiB)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, img.unmount()) }()
	if err := img.mount(); err != nil {
		return err
	}
	slow, err := newSlowDisk()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, slow.remove()) }()
	if err := slow.throttle(img.mountPoint); err != nil {
		return err
	}
	perWrite, err := slow.check(ctx, img.mountPoint)
	if err != nil {
		return err
	}
	fmt.Printf("powercut: %s; a synchronous write takes %v on the slow disk\n", o.fs, perWrite.Round(time.Millisecond))
	site.EdgeStore = filepath.Join(img.mountPoint, "store")
	if !o.noHub {
		for n := 1; n <= o.cycles; n += round {
			site.Exports = append(site.Exports, rig.Export{Stream: streamOf(n), To: streamOf(n)})
		}
	}
	if err := site.Prepare(); err != nil {
		return err
	}
	defer site.Close() // before the unmount above
	err = o.cutAll(ctx, site, img, slow)
	switch {
	case o.expectLoss && errors.Is(err, errLoss):
		fmt.Println("powercut: a loss was found, as expected")
		return nil
	case o.expectLoss && err == nil:
		return fmt.Errorf("no loss was found in %d cuts", o.cycles)
	}
	return err
}

func (o options) cutAll(ctx context.Context, site *rig.Site, img *image, slow *slowDisk) error {
	if !o.noHub {
		if err := site.StartHub(); err != nil {
			return err
		}
	}
	if err := site.StartEdge(); err != nil {
		return err
	}
	rows := &rig.Endless{Seed: 2}
	var stream string
	var ledger *rig.Ledger
	var crew *rig.Crew
	var atEdge, atHub rig.Copy
	var acknowledged, found, inRound, foundInRound int
	close := 0 // cuts within closeCut of an acknowledgement
	begin := time.Now()
	for cycle := 1; cycle <= o.cycles; cycle++ {
		if stream != streamOf(cycle) {
			stream = streamOf(cycle)
			if err := site.CreateStream(ctx, stream, stream+".>"); err != nil {
				return err
			}
			acknowledged, found = acknowledged+inRound, found+foundInRound
			ledger, crew, atEdge, atHub = rig.NewLedger(), &rig.Crew{}, rig.Copy{}, rig.Copy{}
			for i := range o.publishers {
				crew.Loads = append(crew.Loads, &rig.Load{
					URL: site.EdgeURL(), Prefix: fmt.Sprintf("%s.%d.", stream, i), Publisher: i, Window: o.window, Ledger: ledger, Rows: rows,
				})
			}
		}
		c, err := o.one(ctx, site, img, slow, crew, ledger, cycle)
		if err != nil {
			return fmt.Errorf("cut %d: %w", cycle, err)
		}
		if c.gap <= closeCut {
			close++
		}
		if c.acked < minAcked {
			return fmt.Errorf("cut %d: only %d publishes were acknowledged before it, want %d", cycle, c.acked, minAcked)
		}
		afresh := cycle == o.cycles || cycle%round == 0
		if err := atEdge.Update(ctx, site.EdgeURL(), stream, afresh); err != nil {
			return fmt.Errorf("after cut %d: %w", cycle, err)
		}
		v := ledger.Check(fmt.Sprintf("cut %d, edge", cycle), atEdge.Held)
		inRound, foundInRound = v.Acknowledged, v.Found
		fmt.Printf("cut %d: %d acknowledged since the last one, the latest %v before it; serving again after %v\n%v\n",
			cycle, c.acked, c.gap.Round(10*time.Microsecond), c.recovery.Round(time.Millisecond), v)
		if !v.OK() {
			return fmt.Errorf("cut %d: %w at the edge", cycle, errLoss)
		}
		if o.noHub {
			continue
		}
		wait, cancel := context.WithTimeout(ctx, 30*time.Second)
		err = site.WaitHub(wait, stream, uint64(len(atEdge.Held)))
		cancel()
		if err != nil {
			return fmt.Errorf("after cut %d: %w", cycle, err)
		}
		if err := atHub.Update(ctx, site.HubURL(), stream, afresh); err != nil {
			return fmt.Errorf("after cut %d: %w", cycle, err)
		}
		v = rig.Compare(fmt.Sprintf("cut %d, hub", cycle), atEdge.Held, atHub.Held)
		fmt.Println(v)
		if !v.OK() {
			return fmt.Errorf("cut %d: %w at the hub", cycle, errLoss)
		}
	}
	fmt.Printf("powercut: %d cuts of %s in %v, %d of them within %v of an acknowledgement; acknowledged %d, found %d, missing 0, duplicated 0\n",
		o.cycles, o.fs, time.Since(begin).Round(time.Second), close, closeCut, acknowledged+inRound, found+foundInRound)
	// Of a few cuts it says how busy the machine was.
	if 2*close < o.cycles && !o.recycled && o.cycles >= 20 {
		return fmt.Errorf("only %d of %d cuts were within %v of an acknowledgement, want half", close, o.cycles, closeCut)
	}
	return nil
}

// minAcked is how many acknowledged publishes make a cut count.
const minAcked = 100

// closeCut is how soon after an acknowledgement half of the cuts have to come.
const closeCut = 3 * time.Millisecond

// cycle is what one cut was like.
type cycle struct {
	acked    int           // since the previous cut
	gap      time.Duration // latest acknowledgement to cut
	recovery time.Duration // start to first PONG
}

// one loads the edge, cuts, and brings the edge back on what is left.
func (o options) one(ctx context.Context, site *rig.Site, img *image, slow *slowDisk, crew *rig.Crew, ledger *rig.Ledger, n int) (c cycle, err error) {
	if !o.recycled && (o.expectLoss || n%4 >= 2) { // pairs, so that either kind of cut meets either kind of disk
		if err := errors.Join(slow.throttle(img.mountPoint), slow.add(site.Edge.PID())); err != nil {
			return c, err
		}
	}
	before, _ := ledger.Acknowledged()
	stop := crew.Go(ctx)
	err = ledger.WaitAcknowledged(ctx, before+o.acks)
	switch {
	case err != nil:
	case o.recycled:
		err = recycled(ctx, filepath.Join(site.EdgeStore, "wal"), ledger)
	case n%2 == 1:
		err = justAcknowledged(ctx, ledger)
	default: // anywhere
		time.Sleep(time.Duration(rand.IntN(30_000)) * time.Microsecond)
	}
	if err != nil {
		return c, errors.Join(fmt.Errorf("%w; the edge's log ends with:\n%s", err, site.Edge.Log(2000)), stop())
	}
	_, last := ledger.Acknowledged()
	c.gap = time.Since(last)
	if o.expectLoss {
		err = diskFirst(img, ledger)
	} else {
		err = edgeFirst(site, img)
	}
	acked, _ := ledger.Acknowledged()
	c.acked = acked - before
	if err != nil {
		return c, errors.Join(err, stop())
	}
	site.Edge.Kill()
	if err := stop(); err != nil {
		return c, err
	}
	ledger.Thaw()
	if err := img.unmount(); err != nil {
		return c, err
	}
	if err := img.mount(); err != nil {
		return c, err
	}
	start := time.Now()
	err = site.StartEdge()
	c.recovery = time.Since(start)
	return c, err
}

// recycled returns right after a publish was acknowledged that came after a
// segment of the log had come into use whose file was another one before. Its
// blocks have been written to before: nothing but a sync of the directory makes
// its name durable.
func recycled(ctx context.Context, dir string, ledger *rig.Ledger) error {
	spares := map[uint64]bool{}
	for ctx.Err() == nil {
		names, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			fi, err := name.Info()
			if err != nil {
				continue // renamed meanwhile
			}
			inode := fi.Sys().(*syscall.Stat_t).Ino
			switch filepath.Ext(name.Name()) {
			case ".spare":
				spares[inode] = true
			case ".wal":
				if spares[inode] {
					acked, _ := ledger.Acknowledged()
					return ledger.WaitAcknowledged(ctx, acked+1)
				}
			}
		}
		time.Sleep(time.Millisecond)
	}
	return fmt.Errorf("no recycled segment of the log came into use: %w", context.Cause(ctx))
}

// edgeFirst stops the whole machine at once: first the program, in the middle of
// whatever it does, then its disk. If it ran on, it would acknowledge and export
// what it could not have: ext4 lets an fdatasync that is under way at the
// shutdown succeed although the extents it wrote to are not recorded.
func edgeFirst(site *rig.Site, img *image) error {
	return errors.Join(site.Edge.Freeze(), img.shutdown())
}

// diskFirst cuts the disk off while the edge runs on. The ledger takes no
// acknowledgement after the moment before the cut, so that nothing is demanded
// that was synced after it. Stopping the edge first, as edgeFirst does, would
// give an fdatasync under way the time to end, and the loss would go unnoticed
// of a program that acknowledges before. There must be no hub, which could learn
// what the edge then forgets.
func diskFirst(img *image, ledger *rig.Ledger) error {
	ledger.Freeze()
	return img.shutdown()
}

// justAcknowledged returns right after an acknowledgement has come. On a busy
// machine it may be woken late; then it waits for the next one.
func justAcknowledged(ctx context.Context, ledger *rig.Ledger) error {
	for range 1000 {
		acked, last := ledger.Acknowledged()
		if time.Since(last) < closeCut/6 {
			return nil
		}
		if err := ledger.WaitAcknowledged(ctx, acked+1); err != nil {
			return err
		}
	}
	return errors.New("this machine is too busy to cut right after an acknowledgement")
}
