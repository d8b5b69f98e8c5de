//go:build linux

// Rollback restores older copies of stores, as a restored backup or a machine's
// snapshot does: the edge's, the hub's, both, again and again. Edge and hub are
// processes of their own, linked by QUIC.
//
// Cases:
//
//	edge     the edge's copy was made while nothing was under way
//	load     it was made in the middle of publishing
//	hub      the hub's copy
//	both     edge and hub go back, to different moments
//	gap      the hub goes back further than the edge's stream reaches
//
// The hub has to end up with everything that was ever acknowledged and that the
// copies left anywhere: nothing that it held is lost because the edge's store
// went back, and what the restored edge takes under sequences that the hub has
// seen before arrives too. An edge that has gone back begins a new incarnation,
// logs and counts it. Nothing comes twice, but, if the copy was made under load,
// what was acknowledged in the second before it.
//
//	go run ./faults/rollback
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/faults/rig"
)

const (
	stream    = "READINGS"
	hubStream = "PLANT"
	// twice is how old what comes twice may be at the time of a copy made
	// under load: a second, of which README.md warns, and a bit for the rig.
	twice = 1500 * time.Millisecond
)

type options struct {
	cases     []string
	rows      int
	rounds    int
	edge, hub string
	dir       string
	timeout   time.Duration
}

var allCases = []string{"edge", "load", "hub", "both", "gap"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "rollback:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	var o options
	fs := flag.NewFlagSet("rollback", flag.ContinueOnError)
	cases := fs.String("cases", strings.Join(allCases, ","), "which cases to run")
	fs.IntVar(&o.rows, "rows", 5000, "publishes acknowledged between one event and the next, at least")
	fs.IntVar(&o.rounds, "rounds", 5, "how often the same copy is restored")
	fs.StringVar(&o.edge, "edge", "", "edge binary (default: built from this repository)")
	fs.StringVar(&o.hub, "hub", "", "hub binary (default: built from this repository)")
	fs.StringVar(&o.dir, "dir", "", "directory for stores and logs; kept (default: a temporary one, removed)")
	fs.DurationVar(&o.timeout, "timeout", 15*time.Minute, "bound for the whole run")
	if err := fs.Parse(args); err != nil {
		return err
	}
	o.cases = strings.Split(*cases, ",")
	for _, c := range o.cases {
		if !slices.Contains(allCases, c) {
			return fmt.Errorf("-cases: there is no case %q, only %s", c, strings.Join(allCases, ", "))
		}
	}
	if o.rows < 200 || o.rounds < 1 {
		return errors.New("-rows must be at least 200, -rounds at least 1")
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	dir, remove, err := rig.WorkDir(o.dir, "rollback-")
	if err != nil {
		return err
	}
	defer remove(&err)
	programs := rig.Programs{Edge: o.edge, Hub: o.hub}
	if err := programs.Missing(ctx, dir, true); err != nil {
		return err
	}
	for _, name := range o.cases {
		begun := time.Now()
		if err := o.one(ctx, name, filepath.Join(dir, name), programs); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Printf("rollback: %s passed in %v\n", name, time.Since(begun).Round(100*time.Millisecond))
	}
	return nil
}

// test is one case.
type test struct {
	o      options
	site   *rig.Site
	ledger *rig.Ledger
	next   int // number of the next publisher
	// allowed is how many messages may be at the hub twice.
	allowed int
}

func (o options) one(ctx context.Context, name, dir string, programs rig.Programs) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	t := &test{
		o: o, ledger: rig.NewLedger(),
		site: &rig.Site{Dir: dir, Programs: programs, Exports: []rig.Export{{Stream: stream, To: hubStream}}},
	}
	if err := t.site.Prepare(); err != nil {
		return err
	}
	defer t.site.Close()
	if err := errors.Join(t.site.StartHub(), t.site.StartEdge()); err != nil {
		return err
	}
	if err := t.site.CreateStream(ctx, stream, "plant.>"); err != nil {
		return err
	}
	run := map[string]func(context.Context) error{
		"edge": t.edge, "load": t.load, "hub": t.hub, "both": t.both, "gap": t.gap,
	}[name]
	if err := run(ctx); err != nil {
		var logs strings.Builder
		for _, p := range []*rig.Process{t.site.Edge, t.site.Hub} {
			if p != nil {
				fmt.Fprintf(&logs, "\n%s's log ends with:\n%s", p.Name(), p.Log(2000))
			}
		}
		return fmt.Errorf("%w%s", err, logs.String())
	}
	return nil
}

// purge removes the edge's messages before a sequence.
func (t *test) purge(ctx context.Context, below uint64) error {
	nc, err := nats.Connect(t.site.EdgeURL())
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return fmt.Errorf("purge: %w", err)
	}
	return s.Purge(ctx, jetstream.WithPurgeSequence(below))
}

// atHub returns once the hub holds so many messages.
func (t *test) atHub(ctx context.Context, msgs int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return t.site.WaitHub(ctx, hubStream, uint64(msgs))
}

// begin starts publishers; the returned function ends them.
func (t *test) begin(ctx context.Context) func() error {
	crew := &rig.Crew{}
	for range 3 {
		crew.Loads = append(crew.Loads, &rig.Load{
			URL: t.site.EdgeURL(), Prefix: fmt.Sprintf("plant.%d.", t.next), Publisher: t.next, Window: 32,
			Ledger: t.ledger, Rows: &rig.Endless{Seed: uint64(t.next) + 11},
		})
		t.next++
	}
	return crew.Go(ctx)
}

// publish lets at least o.rows publishes be acknowledged.
func (t *test) publish(ctx context.Context) error {
	before, _ := t.ledger.Acknowledged()
	stop := t.begin(ctx)
	wait, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("publishing stalls"))
	defer cancel()
	return errors.Join(t.ledger.WaitAcknowledged(wait, before+t.o.rows), stop())
}

// status of the edge's only export.
type status struct {
	Through, Last, Incarnation, Regressions uint64
	Gap                                     uint64 `json:"gap_msgs"`
	Active                                  bool
}

func (t *test) status(ctx context.Context) (status, error) {
	var st struct {
		Hub struct{ Exports []status }
	}
	out, err := exec.CommandContext(ctx, t.site.Programs.Edge, "status", "--json", "-c", filepath.Join(t.site.Dir, "edge.conf")).Output()
	if err == nil {
		err = json.Unmarshal(out, &st)
	}
	if err != nil {
		return status{}, fmt.Errorf("edge status: %w", err)
	}
	if len(st.Hub.Exports) != 1 {
		return status{}, fmt.Errorf("edge status names %d exports, want 1", len(st.Hub.Exports))
	}
	return st.Hub.Exports[0], nil
}

// arrived returns once the hub has everything that the edge's stream holds.
func (t *test) arrived(ctx context.Context) (status, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		st, err := t.status(ctx)
		if err == nil && st.Active && st.Through == st.Last {
			return st, nil
		}
		select {
		case <-ctx.Done():
			return st, fmt.Errorf("the hub did not get everything: %+v: %w", st, errors.Join(err, ctx.Err()))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// save copies a store, and restore puts the copy in its place. The program must
// not run.
func save(store, name string) (string, error) {
	to := store + "-" + name
	return to, rig.Tool("cp", "-a", "--sparse=always", store, to)
}

func restore(store, from string) error {
	return errors.Join(os.RemoveAll(store), rig.Tool("cp", "-a", "--sparse=always", from, store))
}

// compare checks what the hub holds.
func (t *test) compare(ctx context.Context, when string) error {
	held, err := t.site.ReadHub(ctx, hubStream, 1)
	if err != nil {
		return fmt.Errorf("%s: %w", when, err)
	}
	v := t.ledger.CheckCopy("at the hub "+when, held)
	fine := v
	if v.Duplicated <= t.allowed {
		fine.Duplicated = 0
	}
	if fine.OK() {
		v.Examples = nil // of what may be
	}
	fmt.Println("rollback:", v)
	if t.allowed > 0 {
		fmt.Printf("rollback: up to %d may be there twice, which were acknowledged within %v before the copy was made\n", t.allowed, twice)
	}
	if !fine.OK() {
		return fmt.Errorf("%s: the hub does not hold what was acknowledged", when)
	}
	return nil
}

// regressed waits until all has arrived and demands a new incarnation that is
// logged and counted.
func (t *test) regressed(ctx context.Context, before status) error {
	st, err := t.arrived(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("rollback: incarnation %d after %d, %d counted\n", st.Incarnation, before.Incarnation, st.Regressions)
	switch {
	case st.Incarnation <= before.Incarnation:
		return fmt.Errorf("incarnation %d follows %d: it has to move on", st.Incarnation, before.Incarnation)
	case st.Regressions == 0:
		return errors.New("the edge does not count that its store went back")
	case !strings.Contains(t.site.Edge.Log(1<<20), "older copy restored") && !strings.Contains(t.site.Edge.Log(1<<20), "older copy was restored"):
		return errors.New("the edge's log does not tell that an older copy was restored")
	}
	return nil
}

// edge is the case of the same name.
func (t *test) edge(ctx context.Context) error {
	if err := t.publish(ctx); err != nil {
		return err
	}
	st, err := t.arrived(ctx)
	if err != nil {
		return err
	}
	if err := t.site.Edge.Stop(rig.StopTimeout); err != nil {
		return err
	}
	copied, err := save(t.site.EdgeStore, "copy")
	if err != nil {
		return err
	}
	if err := t.site.StartEdge(); err != nil {
		return err
	}
	return t.goBack(ctx, copied, st, func(int) {})
}

// goBack publishes, waits until the hub has it, restores the edge's copy, and
// publishes again, o.rounds times.
func (t *test) goBack(ctx context.Context, copied string, st status, before func(round int)) error {
	for round := 1; round <= t.o.rounds; round++ {
		if err := t.publish(ctx); err != nil {
			return err
		}
		st, err := t.arrived(ctx)
		if err != nil {
			return err
		}
		t.site.Edge.Kill()
		if err := restore(t.site.EdgeStore, copied); err != nil {
			return err
		}
		before(round)
		if err := t.site.StartEdge(); err != nil {
			return err
		}
		if round%2 == 0 { // before or after it has met the hub again
			if _, err := t.arrived(ctx); err != nil {
				return err
			}
		}
		if err := t.publish(ctx); err != nil {
			return err
		}
		if err := t.regressed(ctx, st); err != nil {
			return err
		}
		if err := t.compare(ctx, fmt.Sprintf("after the edge went back, round %d", round)); err != nil {
			return err
		}
	}
	return nil
}

// load is the case of the same name.
func (t *test) load(ctx context.Context) error {
	stop := t.begin(ctx)
	err := t.ledger.WaitAcknowledged(ctx, t.o.rows)
	since := t.ledger.Sent()
	select {
	case <-time.After(twice):
	case <-ctx.Done():
	}
	// A snapshot of a machine that runs.
	err = errors.Join(err, t.site.Edge.Halt())
	var copied string
	if err == nil {
		copied, err = save(t.site.EdgeStore, "copy")
	}
	recent := t.ledger.Sent() - since
	err = errors.Join(err, t.site.Edge.Signal(syscall.SIGCONT), stop())
	if err != nil {
		return err
	}
	st, err := t.arrived(ctx)
	if err != nil {
		return err
	}
	return t.goBack(ctx, copied, st, func(round int) { t.allowed = recent * round })
}

// hub is the case of the same name.
func (t *test) hub(ctx context.Context) error {
	if err := t.publish(ctx); err != nil {
		return err
	}
	if _, err := t.arrived(ctx); err != nil {
		return err
	}
	if err := t.site.Hub.Stop(rig.StopTimeout); err != nil {
		return err
	}
	copied, err := save(t.site.HubStore, "copy")
	if err != nil {
		return err
	}
	if err := t.site.StartHub(); err != nil {
		return err
	}
	for round := 1; round <= t.o.rounds; round++ {
		if err := t.publish(ctx); err != nil {
			return err
		}
		st, err := t.arrived(ctx)
		if err != nil {
			return err
		}
		t.site.Hub.Kill()
		if err := restore(t.site.HubStore, copied); err != nil {
			return err
		}
		if err := t.site.StartHub(); err != nil {
			return err
		}
		if err := t.publish(ctx); err != nil {
			return err
		}
		// The edge may not have noticed yet that its hub is another one.
		acked, _ := t.ledger.Acknowledged()
		if err := t.atHub(ctx, acked); err != nil {
			return err
		}
		again, err := t.arrived(ctx)
		if err != nil {
			return err
		}
		if again.Incarnation != st.Incarnation {
			return fmt.Errorf("incarnation %d follows %d although the edge has lost nothing", again.Incarnation, st.Incarnation)
		}
		if !strings.Contains(t.site.Edge.Log(1<<20), "the hub went back") {
			return errors.New("the edge's log does not tell that the hub went back")
		}
		if err := t.compare(ctx, fmt.Sprintf("after the hub went back, round %d", round)); err != nil {
			return err
		}
	}
	return nil
}

// both is the case of the same name: the edge goes back to an earlier moment
// than the hub, then to a later one.
func (t *test) both(ctx context.Context) error {
	var edges, hubs []string
	for i := range 2 {
		if err := t.publish(ctx); err != nil {
			return err
		}
		if _, err := t.arrived(ctx); err != nil {
			return err
		}
		if err := errors.Join(t.site.Edge.Stop(rig.StopTimeout), t.site.Hub.Stop(rig.StopTimeout)); err != nil {
			return err
		}
		e, err1 := save(t.site.EdgeStore, fmt.Sprint(i))
		h, err2 := save(t.site.HubStore, fmt.Sprint(i))
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		edges, hubs = append(edges, e), append(hubs, h)
		if err := errors.Join(t.site.StartHub(), t.site.StartEdge()); err != nil {
			return err
		}
	}
	// What is published from here on is in no copy: it is lost with both
	// stores, and neither demanded nor foreign if it is there.
	kept := t.ledger
	for _, back := range []struct {
		what       string
		edge, hub  string
		regression bool
	}{
		{"the edge further than the hub", edges[0], hubs[1], true},
		{"the hub further than the edge", edges[1], hubs[0], false},
		{"both to the same moment", edges[1], hubs[1], false},
	} {
		t.ledger = rig.NewLedger()
		if err := t.publish(ctx); err != nil {
			return err
		}
		st, err := t.arrived(ctx)
		if err != nil {
			return err
		}
		t.site.Edge.Kill()
		t.site.Hub.Kill()
		t.ledger = kept
		if err := errors.Join(restore(t.site.EdgeStore, back.edge), restore(t.site.HubStore, back.hub)); err != nil {
			return err
		}
		if err := errors.Join(t.site.StartHub(), t.site.StartEdge()); err != nil {
			return err
		}
		if back.regression {
			err = t.regressed(ctx, status{Incarnation: st.Incarnation})
		} else {
			_, err = t.arrived(ctx)
		}
		if err == nil {
			err = t.compare(ctx, "after both went back, "+back.what)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", back.what, err)
		}
	}
	return nil
}

// gap is the case of the same name.
func (t *test) gap(ctx context.Context) error {
	if err := t.publish(ctx); err != nil {
		return err
	}
	if _, err := t.arrived(ctx); err != nil {
		return err
	}
	msgs, _, err := rig.StreamLastAt(ctx, t.site.HubURL(), hubStream)
	if err != nil {
		return err
	}
	copyHeld := int(msgs)
	if err := t.site.Hub.Stop(rig.StopTimeout); err != nil {
		return err
	}
	copied, err := save(t.site.HubStore, "copy")
	if err != nil {
		return err
	}
	if err := t.site.StartHub(); err != nil {
		return err
	}
	if err := t.publish(ctx); err != nil {
		return err
	}
	before, err := t.arrived(ctx)
	if err != nil {
		return err
	}
	// The edge need not keep what its hub holds.
	acked, _ := t.ledger.Acknowledged()
	keep := uint64(acked - t.o.rows/4)
	if err := t.purge(ctx, keep); err != nil {
		return err
	}
	held, err := t.site.ReadEdge(ctx, stream, 1)
	if err != nil {
		return err
	}
	t.site.Hub.Kill()
	if err := restore(t.site.HubStore, copied); err != nil {
		return err
	}
	if err := t.site.StartHub(); err != nil {
		return err
	}
	if err := t.atHub(ctx, copyHeld+len(held)); err != nil {
		return err
	}
	after, err := t.arrived(ctx)
	if err != nil {
		return err
	}
	want := held[0].Seq - 1 - uint64(copyHeld) // acknowledged and in neither store any more
	atHub, err := t.site.ReadHub(ctx, hubStream, 1)
	if err != nil {
		return err
	}
	fmt.Printf("rollback: the hub went back to %d messages, the edge's stream begins at %d: %d are counted as a gap, the hub holds %d\n",
		copyHeld, held[0].Seq, after.Gap-before.Gap, len(atHub))
	if got := after.Gap - before.Gap; got != want {
		return fmt.Errorf("the edge counts %d messages as a gap, want %d", got, want)
	}
	if len(atHub) != copyHeld+len(held) {
		return fmt.Errorf("the hub holds %d messages, want the %d of its copy and the %d that the edge holds", len(atHub), copyHeld, len(held))
	}
	v := rig.Compare("what the edge holds, at the hub", held, atHub[copyHeld:])
	fmt.Println("rollback:", v)
	if !v.OK() {
		return errors.New("the hub does not hold what the edge holds")
	}
	return nil
}
