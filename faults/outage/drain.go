//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"petiole/faults/rig"
	"petiole/internal/udprelay"
)

// The edge's streams, and the hub's name for the first of them.
const (
	rowsStream    = "ROWS"
	hubRowsStream = "PLANT"
	plainStream   = "PLAIN"
)

// traffic is the publishers of one variant.
type traffic struct {
	site     *rig.Site
	total    int // rows on each of the two streams
	ledger   *rig.Ledger
	plain    *rig.Ledger
	gate     *rig.Gate // of the acknowledged publishes
	plainTap *rig.Gate
	done     chan error
}

// begin creates the streams and starts the publishers behind closed gates.
func begin(ctx context.Context, s *rig.Site, rows []rig.Row) (*traffic, error) {
	if err := errors.Join(
		s.CreateStream(ctx, rowsStream, "plant.>", "till.>", "rows.>"),
		s.CreateStream(ctx, plainStream, "plain.>")); err != nil {
		return nil, err
	}
	t := &traffic{
		site: s, total: len(rows), ledger: rig.NewLedger(), plain: rig.NewLedger(),
		gate: &rig.Gate{}, plainTap: &rig.Gate{}, done: make(chan error, 1),
	}
	crew := &rig.Crew{}
	acknowledged, unacknowledged := rig.NewFinite(rows), rig.NewFinite(rows)
	for i := range 3 {
		crew.Loads = append(crew.Loads, &rig.Load{
			URL: s.EdgeURL(), Publisher: i, Window: 256,
			Ledger: t.ledger, Rows: acknowledged, Pace: t.gate.Pass,
		})
	}
	crew.Loads = append(crew.Loads, &rig.Load{
		URL: s.EdgeURL(), Prefix: "plain.", Publisher: 9, Window: 1, Plain: true,
		Ledger: t.plain, Rows: unacknowledged, Pace: t.alongside,
	})
	go func() { t.done <- crew.Through(ctx) }()
	return t, nil
}

// alongside paces the plain publishes, which nothing holds up otherwise, so that
// they keep step with the acknowledged ones and every kill meets both.
func (t *traffic) alongside(ctx context.Context) error {
	if err := t.plainTap.Pass(ctx); err != nil {
		return err
	}
	return t.ledger.WaitAcknowledged(ctx, min(t.plain.Sent()-500, t.total*9/10))
}

// until lets the publishers go on to part of the rows and waits until that many
// are acknowledged.
func (t *traffic) until(ctx context.Context, part float64) error {
	n := int(part * float64(t.total))
	t.open(n)
	return t.acknowledged(ctx, part-0.01) // some of what was let through may have to be published again
}

func (t *traffic) open(n int) {
	t.gate.Open(n)
	t.plainTap.Open(n)
}

func (t *traffic) acknowledged(ctx context.Context, part float64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 3*time.Minute, errors.New("publishing stalls"))
	defer cancel()
	return t.ledger.WaitAcknowledged(ctx, int(part*float64(t.total)))
}

// killMidDrain starts the hub, waits until it has caught up with part of what
// the edge holds, kills it, and fails if it had caught up entirely by then.
func (t *traffic) killMidDrain(ctx context.Context, part float64) error {
	s := t.site
	if err := s.StartHub(); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	want := uint64(part * float64(t.total))
	if err := s.WaitHub(wait, hubRowsStream, want); err != nil {
		return err
	}
	s.Hub.Kill()
	fmt.Printf("  hub killed after it had caught up with %d of %d rows\n", want, t.total)
	return nil
}

// finish lets the rest through, waits until everything is at the hub, and
// compares.
func (t *traffic) finish(ctx context.Context) error {
	s := t.site
	t.open(math.MaxInt)
	select {
	case err := <-t.done:
		if err != nil {
			return fmt.Errorf("publish: %w", err)
		}
	case <-time.After(5 * time.Minute):
		return errors.New("publishing does not come to its end within 5 minutes")
	}
	var failed error
	for _, e := range s.Exports {
		var edge, hub rig.Copy
		if err := edge.Update(ctx, s.EdgeURL(), e.Stream, true); err != nil {
			return err
		}
		wait, cancel := context.WithTimeout(ctx, 2*time.Minute)
		err := s.WaitHub(wait, e.To, uint64(len(edge.Held)))
		cancel()
		if e := hub.Update(ctx, s.HubURL(), e.To, true); e != nil {
			return errors.Join(err, e)
		}
		verdicts := []rig.Verdict{rig.Compare("stream "+e.To+" at the hub against the edge's", edge.Held, hub.Held)}
		if e.Stream == plainStream {
			fmt.Printf("  stream %s: %d plain publishes, of which the edge held %d\n", e.Stream, t.plain.Sent(), len(edge.Held))
			verdicts = append(verdicts, t.plain.Check("stream "+e.Stream+" at the edge", edge.Held))
		} else {
			verdicts = append(verdicts,
				t.ledger.Check("stream "+e.Stream+" at the edge", edge.Held),
				t.ledger.CheckCopy("stream "+e.To+" at the hub", hub.Held))
		}
		for _, v := range verdicts {
			fmt.Println(" ", v)
			if !v.OK() {
				failed = errors.New("the hub does not hold what the edge acknowledged")
			}
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// drain is the variant of the same name.
func (o options) drain(ctx context.Context, s *rig.Site, rows []rig.Row) error {
	if err := s.Prepare(); err != nil {
		return err
	}
	if err := s.StartHub(); err != nil {
		return err
	}
	if err := s.StartEdge(); err != nil {
		return err
	}
	t, err := begin(ctx, s, rows)
	if err != nil {
		return err
	}
	if err := t.until(ctx, 0.15); err != nil {
		return err
	}
	fmt.Println("  hub killed, publishing goes on")
	s.Hub.Kill()
	t.open(int(0.9 * float64(t.total)))
	if err := t.acknowledged(ctx, 0.4); err != nil {
		return err
	}
	s.Edge.Kill()
	if acked, _ := t.ledger.Acknowledged(); acked >= int(0.88*float64(t.total)) {
		return errors.New("the edge was not killed in the middle of the stream: it had acknowledged all that was let through")
	}
	fmt.Println("  edge killed in the middle of the stream")
	if err := s.StartEdge(); err != nil {
		return err
	}
	if err := t.acknowledged(ctx, 0.88); err != nil {
		return err
	}
	for _, part := range []float64{0.3, 0.6} {
		if err := t.killMidDrain(ctx, part); err != nil {
			return err
		}
	}
	if err := s.StartHub(); err != nil {
		return err
	}
	held, err := t.hubHolds(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("  hub started for the last time, it holds %d rows\n", held)
	return t.finish(ctx)
}

// hubHolds returns how many rows the hub holds at this moment.
func (t *traffic) hubHolds(ctx context.Context) (n uint64, err error) {
	n, _, err = rig.StreamLastAt(ctx, t.site.HubURL(), hubRowsStream)
	return n, err
}

// hubSettled returns how many rows the hub holds when no more have come for a
// second: its sockets may have received some that are not stored yet.
func (t *traffic) hubSettled(ctx context.Context) (last uint64, err error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for since := time.Now(); time.Since(since) < time.Second; {
		n, err := t.hubHolds(ctx)
		if err != nil {
			return 0, err
		}
		if n != last {
			last, since = n, time.Now()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return last, nil
}

// blackHole is the variant of the same name.
func (o options) blackHole(ctx context.Context, s *rig.Site, rows []rig.Row) error {
	relay, err := relayed(s)
	if err != nil {
		return err
	}
	defer relay.Close()
	if err := s.StartEdge(); err != nil {
		return err
	}
	t, err := begin(ctx, s, rows)
	if err != nil {
		return err
	}
	if err := t.until(ctx, 0.8); err != nil {
		return err
	}
	if err := s.StartHub(); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := s.WaitHub(wait, hubRowsStream, uint64(0.2*float64(t.total))); err != nil {
		return err
	}
	relay.SetBlackhole(true)
	before, err := t.hubSettled(ctx)
	if err != nil {
		return err
	}
	t.open(int(0.9 * float64(t.total))) // clients do not notice
	select {
	case <-time.After(o.blackhole):
	case <-ctx.Done():
		return ctx.Err()
	}
	after, err := t.hubHolds(ctx)
	if err != nil {
		return err
	}
	if before != after || before >= uint64(0.79*float64(t.total)) {
		return fmt.Errorf("the black hole did not come in the middle of the drain: %d rows at the hub before it, %d after", before, after)
	}
	relay.SetBlackhole(false)
	back := time.Now()
	wait, cancel = context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := s.WaitHub(wait, hubRowsStream, after+1); err != nil {
		return err
	}
	fmt.Printf("  %d of %d rows were at the hub during %v without network; replay went on %v after it came back\n",
		after, t.total, o.blackhole, time.Since(back).Round(time.Millisecond))
	return t.finish(ctx)
}

// relayed prepares the site with a relay between edge and hub.
func relayed(s *rig.Site) (*udprelay.Relay, error) {
	relay, err := udprelay.New("127.0.0.1:9") // nothing is sent before the target is known
	if err != nil {
		return nil, err
	}
	s.Uplink = relay.Addr()
	if err := s.Prepare(); err != nil {
		relay.Close()
		return nil, err
	}
	return relay, relay.SetTarget(s.LinkAddr)
}
