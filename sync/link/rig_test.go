//go:build rig

package link

import (
	"slices"
	"testing"
	"time"

	"petiole/internal/udprelay"
)

// These take minutes and measure the link at its real timing:
//
//	go test -tags rig -run Rig -v ./sync/link

// A hub that was killed listens again: how long until the first message that
// waited is stored?
func TestRigHubRestart(t *testing.T) {
	r := newRig(t)
	addr := r.hub.Addr().String()
	r.edge(t, r.url(), func(o *EdgeOptions) { o.Config.Timing = Timing{} })
	real := func(c *HubConfig) { c.Timing = Timing{} }
	var took []time.Duration
	total := 0
	const tries = 40
	for i := range tries {
		r.stream.addN(1, 100)
		total++
		r.sink.waitCount(t, "PLANT", total)
		r.hub.sock.Close() // killed: nobody is told
		r.hub.Close()
		r.stream.addN(1, 100)
		total++
		// From restarts at once to outages beyond the idle timeout.
		time.Sleep(time.Duration(i%8) * 1100 * time.Millisecond)
		r.hub = startHub(t, r.hubDir, addr, r.sink, real)
		start := time.Now()
		r.sink.waitCount(t, "PLANT", total)
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	t.Logf("first replayed message after the hub listens: median %v, 95 of 100 within %v, worst %v",
		took[tries/2], took[tries*95/100], took[tries-1])
	if took[tries*95/100] > 2500*time.Millisecond {
		t.Error("more than 2.5 s")
	}
}

// The network swallows everything for 20 s in the middle of a drain.
func TestRigBlackHole(t *testing.T) {
	r := newRig(t)
	r.hub.Close()
	r.hub = startHub(t, r.hubDir, "127.0.0.1:0", r.sink, func(c *HubConfig) { c.Timing = Timing{} })
	relay, err := udprelay.New(r.hub.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer relay.Close()
	relay.SetDelay(20 * time.Millisecond)
	r.sink.mu.Lock()
	r.sink.delay = 5 * time.Millisecond
	r.sink.mu.Unlock()
	e := r.edge(t, "quic://"+relay.Addr(), func(o *EdgeOptions) {
		o.Config.Timing = Timing{}
		o.Config.Window = 500_000
	})
	r.stream.addN(200_000, 100)
	r.sink.waitCount(t, "PLANT", 10_000)
	start := time.Now()
	relay.SetBlackhole(true)
	until(t, "outage seen", func() bool { return !e.Status().Connected })
	detected := time.Since(start)
	before := r.sink.count("PLANT")
	time.Sleep(time.Until(start.Add(20 * time.Second)))
	relay.SetBlackhole(false)
	start = time.Now()
	r.sink.waitCount(t, "PLANT", before+1)
	resumed := time.Since(start)
	r.sink.waitCount(t, "PLANT", 200_000)
	inOrder(t, r.sink.seqs("PLANT"), 1, 200_000)
	t.Logf("detected after %v, resumed %v after packets flowed again", detected, resumed)
	if detected > 6500*time.Millisecond || resumed > 2*time.Second {
		t.Error("too slow")
	}
}
