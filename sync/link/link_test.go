package link

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"petiole/internal/udprelay"
	"petiole/storage"
	"petiole/sync/export"
	"petiole/sync/frame"
)

func TestReplay(t *testing.T) {
	r := newRig(t)
	r.stream.addN(5000, 128)
	e := r.edge(t, r.url(), nil)
	r.sink.waitCount(t, "PLANT", 5000)
	r.stream.addN(1, 128) // now live
	r.sink.waitCount(t, "PLANT", 5001)
	inOrder(t, r.sink.seqs("PLANT"), 1, 5001)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 5001 })
	st := e.Status()
	x := st.Exports[0]
	if !st.Connected || st.HubName != "hub" || st.HubID != "HUB1" || st.URL != r.url() || st.RTT <= 0 {
		t.Errorf("status %+v", st)
	}
	if !x.Active || x.Last != 5001 || x.LagMsgs != 0 || x.LagAge != 0 || x.Sent != 5001 || x.Incarnation != 1 || x.MsgRate == 0 {
		t.Errorf("export status %+v", x)
	}
	hs := r.hub.Status()
	if len(hs.Edges) != 1 || hs.Edges[0].EdgeID != st.EdgeID || hs.Edges[0].User != "edge" || len(hs.Edges[0].Exports) != 1 {
		t.Fatalf("hub status %+v", hs)
	}
	if hx := hs.Edges[0].Exports[0]; hx.Through != 5001 || hx.To != "PLANT" || hx.Msgs != 5001 {
		t.Errorf("hub's export status %+v", hx)
	}
	want := r.stream.msgs[17]
	got := r.sink.streams["PLANT"].msgs[16]
	if got.Subject != want.Subject || !bytes.Equal(got.Data, want.Data) || got.Time != want.Time {
		t.Errorf("message 17 arrived as %+v", got)
	}
}

func TestGapsAreTold(t *testing.T) {
	r := newRig(t)
	r.stream.addN(100, 50)
	e := r.edge(t, r.url(), nil)
	r.sink.waitCount(t, "PLANT", 100)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 100 })
	e.Close()
	r.stream.addN(100, 50) // the outage
	var lost []uint64
	for q := uint64(1); q <= 120; q++ {
		lost = append(lost, q) // limits
	}
	r.stream.remove(append(lost, 150, 151, 200)...)
	e = r.edge(t, r.url(), nil)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 200 })
	r.sink.mu.Lock()
	got := fmt.Sprint(r.sink.streams["PLANT"].gaps)
	r.sink.mu.Unlock()
	if want := "[{101 120 removed} {150 151 deleted} {200 200 deleted}]"; got != want {
		t.Errorf("gaps %v, want %v", got, want)
	}
	if x := e.Status().Exports[0]; x.Gaps != 3 || x.GapMsgs != 23 {
		t.Errorf("edge counts %d gaps of %d", x.Gaps, x.GapMsgs)
	}
	if n := r.sink.count("PLANT"); n != 177 {
		t.Errorf("hub holds %d, want 177", n)
	}
}

// A message that the disk gives back damaged becomes a gap, which both ends
// tell, and stops nothing.
func TestDamagedIsTold(t *testing.T) {
	r := newRig(t)
	r.stream.addN(100, 50)
	r.stream.bad = map[uint64]bool{40: true, 41: true, 100: true}
	var log lines
	e := r.edge(t, r.url(), func(o *EdgeOptions) { o.Log = log.logger() })
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 100 })
	if x := e.Status().Exports[0]; x.DamagedMsgs != 3 || x.GapMsgs != 3 || x.LastError != "" {
		t.Errorf("status %+v", x)
	}
	if log.count("damaged on disk") == 0 || !strings.Contains(log.all(), "first_seq=40") {
		t.Errorf("log says %s", log.all())
	}
	r.sink.mu.Lock()
	got := fmt.Sprint(r.sink.streams["PLANT"].gaps)
	r.sink.mu.Unlock()
	if want := "[{40 40 damaged} {41 41 damaged} {100 100 damaged}]"; got != want {
		t.Errorf("gaps %v, want %v", got, want)
	}
	// What comes later goes out, on a new connection too.
	e.Close()
	r.stream.addN(10, 50)
	e = r.edge(t, r.url(), nil)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 110 })
	if x := e.Status().Exports[0]; x.Incarnation != 1 {
		t.Errorf("status %+v", x)
	}
}

// Nothing is sent under a state that could not be stored, however often it is
// tried.
func TestUnsavedStateSendsNothing(t *testing.T) {
	r := newRig(t)
	r.stream.addN(10, 10)
	r.states.fail = errors.New("disk full")
	e := r.edge(t, r.url(), nil)
	failed := func(n int) func() bool {
		return func() bool {
			r.states.mu.Lock()
			defer r.states.mu.Unlock()
			return r.states.puts >= n
		}
	}
	until(t, "several failures to store the state", failed(3))
	if n := r.sink.count("PLANT"); n != 0 {
		t.Fatalf("%d messages were sent under a state that is not stored", n)
	}
	if text := e.Status().Exports[0].LastError; !strings.Contains(text, "disk full") {
		t.Errorf("last error %q", text)
	}
	r.states.mu.Lock()
	r.states.fail = nil
	r.states.mu.Unlock()
	r.sink.waitCount(t, "PLANT", 10)
	// The same for a new incarnation.
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 10 })
	e.Close()
	r.stream.truncate(5)
	r.stream.addN(3, 20)
	r.states.mu.Lock()
	r.states.fail, r.states.puts = errors.New("disk full"), 0
	r.states.mu.Unlock()
	e = r.edge(t, r.url(), nil)
	until(t, "several failures to store the state", failed(3))
	if n := r.sink.count("PLANT"); n != 10 {
		t.Fatalf("hub has %d messages, want 10", n)
	}
	r.states.mu.Lock()
	r.states.fail = nil
	r.states.mu.Unlock()
	until(t, "acknowledged", func() bool { x := e.Status().Exports[0]; return x.Through == 8 && x.Incarnation == 2 })
}

// An export begins when edge and stream are there, not when a hub is: the
// status tells how much waits, and what the stream loses meanwhile is a gap.
func TestExportBeginsWithoutHub(t *testing.T) {
	r := newRig(t)
	addr := r.hub.Addr().String()
	r.hub.Close()
	r.sources.set("READINGS", nil)
	e := r.edge(t, "quic://"+addr, nil)
	r.stream.addN(10, 50)
	r.sources.set("READINGS", r.stream)
	until(t, "a lag without a hub", func() bool {
		x := e.Status().Exports[0]
		return x.Last == 10 && x.LagMsgs == 10 && x.LagBytes > 0 && x.LagAge > 0 && x.Incarnation == 1
	})
	r.stream.remove(1, 2, 3)
	r.hub = startHub(t, r.hubDir, addr, r.sink, nil)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 10 })
	if x := e.Status().Exports[0]; x.LagMsgs != 0 || x.GapMsgs != 3 {
		t.Errorf("status %+v", x)
	}
}

// What a stream that is deleted takes with it is told, also if it happens during an
// outage, and once.
func TestDeletedDuringOutage(t *testing.T) {
	r := newRig(t)
	url := r.url()
	r.hub.Close()
	var log lines
	e := r.edge(t, url, func(o *EdgeOptions) { o.Log = log.logger() })
	r.stream.addN(10, 50)
	until(t, "the stream is known", func() bool { return e.Status().Exports[0].Last == 10 })
	r.sources.set("READINGS", newMemStream(9))
	const text = "exported stream was deleted before the hub had all of it"
	until(t, "the loss is told", func() bool { return log.count(text) > 0 })
	r.sources.set("READINGS", nil)
	until(t, "the stream is gone", func() bool { return e.Status().Exports[0].Last == 0 })
	if n := log.count(text); n != 1 || log.count("hub_has=0 last=10") != 1 {
		t.Errorf("told %d times:\n%s", n, log.all())
	}
}

// A stream that does not serve while its files are being repaired is not said to have
// been deleted.
func TestRepairedDuringOutage(t *testing.T) {
	r := newRig(t)
	url := r.url()
	r.hub.Close()
	var log lines
	e := r.edge(t, url, func(o *EdgeOptions) { o.Log = log.logger() })
	r.stream.addN(10, 50)
	until(t, "the stream is known", func() bool { return e.Status().Exports[0].Last == 10 })
	r.sources.repair("READINGS")
	r.sources.set("READINGS", nil)
	until(t, "the stream does not serve", func() bool { return e.Status().Exports[0].Last == 0 })
	r.sources.set("READINGS", r.stream)
	r.sources.repair("")
	until(t, "the stream serves again", func() bool { return e.Status().Exports[0].Last == 10 })
	if text := log.all(); strings.Contains(text, "deleted") {
		t.Error(text)
	}
}

func TestLargeMessages(t *testing.T) {
	r := newRig(t)
	var sums [][32]byte
	for i := range 2 {
		d := bytes.Repeat([]byte{byte(i), 1, 2, 3, 5, 7, 11}, 8<<20/7)
		for j := 0; j < len(d); j += 97 {
			d[j] = byte(j * (i + 3)) // not too easy to compress
		}
		sums = append(sums, sha256.Sum256(d))
		r.stream.add([]byte("small"), d)
	}
	r.edge(t, r.url(), nil)
	r.sink.waitCount(t, "PLANT", 4)
	inOrder(t, r.sink.seqs("PLANT"), 1, 4)
	for i, s := range sums {
		if sha256.Sum256(r.sink.streams["PLANT"].msgs[2*i+1].Data) != s {
			t.Errorf("large message %d has changed", i)
		}
	}
}

func TestTooLargeForHubIsTold(t *testing.T) {
	r := newRig(t)
	r.hub.Close()
	r.hub = startHub(t, r.hubDir, "127.0.0.1:0", r.sink, func(c *HubConfig) { c.MaxMessage = 1000 })
	r.stream.add(make([]byte, 1000), make([]byte, 1001), []byte("after")) // with subjects
	e := r.edge(t, r.url(), nil)
	r.sink.waitCount(t, "PLANT", 1)
	until(t, "the cause in the status", func() bool {
		return strings.Contains(e.Status().Exports[0].LastError, "have the hub take larger ones")
	})
	r.stream.remove(2)
	r.sink.waitCount(t, "PLANT", 2)
}

func TestHubRestart(t *testing.T) {
	r := newRig(t)
	addr := r.hub.Addr().String()
	r.edge(t, r.url(), func(o *EdgeOptions) { o.Config.Timing = brisk() })
	total := 0
	for round := range 5 {
		r.stream.addN(300, 100)
		total += 300
		r.sink.waitCount(t, "PLANT", total)
		if round%2 == 0 {
			r.hub.Close()
		} else { // killed: nobody is told
			r.hub.sock.Close()
			r.hub.Close()
		}
		r.stream.addN(50, 100)
		total += 50
		time.Sleep(time.Duration(round) * 150 * time.Millisecond)
		r.hub = startHub(t, r.hubDir, addr, r.sink, nil)
		start := time.Now()
		r.sink.waitCount(t, "PLANT", total)
		t.Logf("back %v after the hub listened again", time.Since(start))
	}
	inOrder(t, r.sink.seqs("PLANT"), 1, uint64(total))
}

// The network swallows everything for a while in the middle of a drain. How soon
// that is noticed, and how soon it goes on, is measured by what the beginning took;
// a busy machine may spoil one measurement, or two.
func TestBlackHole(t *testing.T) {
	r := newRig(t)
	relay, err := udprelay.New(r.hub.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer relay.Close()
	relay.SetDelay(5 * time.Millisecond)
	const each = 20_000
	var total, last int
	add := func() {
		last, total = total, total+each
		hole := total - each*3/4
		r.sink.mu.Lock()
		r.sink.after = func(n int) {
			if n >= hole {
				r.sink.after = nil
				relay.SetBlackhole(true)
			}
		}
		r.sink.mu.Unlock()
		r.stream.addN(each, 100)
	}
	add()
	start := time.Now()
	timing := brisk()
	e := r.edge(t, "quic://"+relay.Addr(), func(o *EdgeOptions) {
		o.Config.Timing = timing
		o.Config.Window = 10_000 // octets as they are sent, compressed: a small part of all
	})
	r.sink.waitCount(t, "PLANT", 1)
	slack := time.Second + 10*time.Since(start)
	for try := 1; ; try++ {
		r.sink.waitCount(t, "PLANT", last+each/4)
		start = time.Now()
		until(t, "outage seen", func() bool { return !e.Status().Connected })
		seen := time.Since(start)
		before := r.sink.count("PLANT")
		time.Sleep(time.Second)
		if n := r.sink.count("PLANT"); n != before || n == total {
			t.Fatalf("%d messages before the outage was seen, %d a second later", before, n)
		}
		relay.SetBlackhole(false)
		start = time.Now()
		r.sink.waitCount(t, "PLANT", before+1)
		back := time.Since(start)
		r.sink.waitCount(t, "PLANT", total)
		inOrder(t, r.sink.seqs("PLANT"), 1, uint64(total))
		t.Logf("outage seen after %v, resumed %v after packets flowed again, slack %v", seen, back, slack)
		if seen <= timing.Idle+timing.Ping+slack && back <= slack {
			return
		}
		if try == 3 {
			t.Fatalf("outage seen after %v, resumed after %v", seen, back)
		}
		add()
	}
}

// From the hub's first answer to the first message stored: two round trips
// are the handshake and the hello, the batch is in the third. What a busy machine
// takes for itself counts for little where the way is long enough; a protocol with
// one round trip more takes it on any way.
func TestResumeRoundTrips(t *testing.T) {
	var took []string
	for _, rtt := range []time.Duration{150 * time.Millisecond, 600 * time.Millisecond, 2 * time.Second, 2 * time.Second, 2 * time.Second} {
		r := newRig(t)
		r.hub.Close()
		r.hub = startHub(t, r.hubDir, "127.0.0.1:0", r.sink, func(c *HubConfig) { c.Timing = Timing{} })
		relay, err := udprelay.New(r.hub.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer relay.Close()
		relay.SetDelay(rtt / 2)
		// The relay's hook runs when an answer is passed on, half a round trip
		// after the hub sent it.
		first := make(chan time.Time, 1)
		relay.OnDown(func(int) {
			select {
			case first <- time.Now().Add(-rtt / 2):
			default:
			}
		})
		r.stream.addN(1000, 100)
		e := r.edge(t, "quic://"+relay.Addr(), func(o *EdgeOptions) { o.Config.Timing = Timing{} })
		r.sink.waitCount(t, "PLANT", 1)
		d := time.Since(<-first)
		took = append(took, fmt.Sprintf("%v = %.2f RTT", d, float64(d)/float64(rtt)))
		t.Logf("first answer to first stored: %s", took[len(took)-1])
		if d <= rtt*5/2+20*time.Millisecond {
			return
		}
		e.Close()
	}
	t.Errorf("took %v, want 2.5 RTT at most", took)
}

func TestSeveralURLs(t *testing.T) {
	r := newRig(t)
	r.stream.addN(10, 10)
	// The first two lead nowhere; the third answers.
	e := r.edge(t, "quic://127.0.0.1:9", func(o *EdgeOptions) {
		o.Config.URLs = []string{"quic://127.0.0.1:9", "quic://127.0.0.1:10", r.url()}
	})
	r.sink.waitCount(t, "PLANT", 10)
	until(t, "connected", func() bool { return e.Status().URL == r.url() })
}

func TestLostTail(t *testing.T) {
	r := newRig(t)
	e := r.edge(t, r.url(), nil)
	for i := range 10 { // batches of ten
		r.stream.addN(10, 20)
		until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == uint64(10*i+10) })
	}
	e.Close()
	r.stream.truncate(95) // 96 to 100 are lost at the edge, the hub has them
	e = r.edge(t, r.url(), nil)
	until(t, "connected", func() bool { return e.Status().Exports[0].Active })
	r.stream.addN(20, 20) // 96 to 115, new ones
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 115 })
	x := e.Status().Exports[0]
	if x.Incarnation != 2 || x.Base != 91 || x.Regressions != 1 {
		t.Errorf("after the lost tail: %+v", x)
	}
	seqs := r.sink.seqs("PLANT")
	inOrder(t, seqs[:100], 1, 100)
	inOrder(t, seqs[100:], 91, 115) // from the last batch end that both have
}

func TestRestoredBackup(t *testing.T) {
	r := newRig(t)
	e := r.edge(t, r.url(), nil)
	r.stream.addN(50, 20)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 50 })
	e.Close()
	backup := r.states.copy()
	e = r.edge(t, r.url(), nil)
	r.stream.addN(50, 20)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 100 })
	e.Close()
	// The backup holds 1 to 50; the plant went on before the link came back.
	r.states.m = backup
	r.stream.truncate(50)
	for i := range 60 {
		r.stream.add([]byte(fmt.Sprint("after the restore ", i)))
	}
	e = r.edge(t, r.url(), nil)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 110 })
	x := e.Status().Exports[0]
	if x.Incarnation != 2 || x.Base != 51 {
		t.Errorf("after the restore: %+v", x)
	}
	seqs := r.sink.seqs("PLANT")
	inOrder(t, seqs[:100], 1, 100)
	inOrder(t, seqs[100:], 51, 110)
}

// What the edge remembers of an export is damaged: the hub's position and the
// stream itself are enough to go on.
func TestDamagedState(t *testing.T) {
	r := newRig(t)
	last := uint64(0)
	for i, damage := range []func(key string){
		func(key string) { r.states.m[key] = r.states.m[key][:5] },
		func(key string) { r.states.m[key][3] ^= 4 }, // the identity
		func(string) { r.states.broken = fmt.Errorf("%w: a checksum", storage.ErrCorrupt) },
	} {
		e := r.edge(t, r.url(), nil)
		r.stream.addN(50, 20)
		last += 50
		until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == last })
		e.Close()
		damage(export.Key(r.stream.UID(), "PLANT"))
		e = r.edge(t, r.url(), nil)
		r.stream.addN(50, 20)
		last += 50
		until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == last })
		if x := e.Status().Exports[0]; x.Incarnation != 1 || x.Regressions != 0 {
			t.Errorf("damage %d: %+v", i, x)
		}
		e.Close()
		r.states.broken = nil
		if b, err := r.states.Get(export.Key(r.stream.UID(), "PLANT")); err != nil {
			t.Error(err)
		} else if _, err := export.DecodeState(b); err != nil {
			t.Errorf("damage %d: the state is not made anew: %v", i, err)
		}
	}
	inOrder(t, r.sink.seqs("PLANT"), 1, last)
}

// A copy of the store made soon after all had arrived knows that it had: what
// has been acknowledged is saved when it grows quiet.
func TestSavedWhenQuiet(t *testing.T) {
	r := newRig(t)
	e := r.edge(t, r.url(), nil)
	saved := func() uint64 {
		b, _ := r.states.Get(export.Key(r.stream.UID(), "PLANT"))
		st, err := export.DecodeState(b)
		if err != nil || len(st.Ladder) == 0 {
			return 0
		}
		return st.Ladder[len(st.Ladder)-1].Through
	}
	best := time.Hour // on a busy machine one try may be late
	last := uint64(0)
	for range 10 {
		for range 3 { // more than one acknowledgement
			r.stream.addN(5, 20)
			last += 5
			until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == last })
		}
		begin := time.Now()
		until(t, "saved", func() bool { return saved() == last })
		if best = min(best, time.Since(begin)); best <= saveEvery/2 {
			break
		}
	}
	if best > saveEvery/2 {
		t.Errorf("saved after %v at best", best)
	}
}

func TestRecreatedStream(t *testing.T) {
	r := newRig(t)
	e := r.edge(t, r.url(), nil)
	r.stream.addN(50, 20)
	r.sink.waitCount(t, "PLANT", 50)
	r.sources.set("READINGS", nil)
	until(t, "export idle", func() bool { return !e.Status().Exports[0].Active })
	again := newMemStream(2)
	again.addN(30, 20)
	r.sources.set("READINGS", again)
	r.sink.waitCount(t, "PLANT", 80)
	seqs := r.sink.seqs("PLANT")
	inOrder(t, seqs[:50], 1, 50)
	inOrder(t, seqs[50:], 1, 30)
	if n := len(r.sink.streams["PLANT"].pos); n != 2 {
		t.Errorf("hub keeps %d positions, want one per life of the stream", n)
	}
}

func TestHubForgetsAndStartsOver(t *testing.T) {
	r := newRig(t)
	addr := r.hub.Addr().String()
	e := r.edge(t, r.url(), nil)
	r.stream.addN(50, 20)
	until(t, "acknowledged", func() bool { return e.Status().Exports[0].Through == 50 })
	r.hub.Close()
	r.sink = newMemSink()
	r.hub = startHub(t, r.hubDir, addr, r.sink, nil)
	r.stream.addN(50, 20)
	r.sink.waitCount(t, "PLANT", 100)
	inOrder(t, r.sink.seqs("PLANT"), 1, 100)
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name string
		mod  func(*EdgeOptions)
		want string // in the link's or the export's last error
	}{
		{"wrong password", func(o *EdgeOptions) { o.Config.Auth.Password = "wrong" }, "check user and password"},
		{"unknown user", func(o *EdgeOptions) { o.Config.Auth.User = "nobody" }, "check user and password"},
		{"no credentials", func(o *EdgeOptions) { o.Config.Auth = Auth{} }, "add the edge's device key"},
		{"foreign stream", func(o *EdgeOptions) { o.Config.Exports[0].To = "SECRET" }, "may not write stream SECRET"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // mostly waiting
			r := newRig(t)
			r.stream.addN(1, 1)
			var log lines
			start := time.Now()
			e := r.edge(t, r.url(), func(o *EdgeOptions) { c.mod(o); o.Log = log.logger() })
			last := func() string {
				st := e.Status()
				return st.LastError + st.Exports[0].LastError
			}
			until(t, "the cause in the status", func() bool { return strings.Contains(last(), c.want) })
			// Tries again, slowly, and without filling the log.
			until(t, "three refusals", func() bool { return r.hub.Status().Refused >= 3 })
			if d := time.Since(start); d < 3*quick.RetryMin {
				t.Errorf("refused three times within %v", d)
			}
			if n := log.count(c.want); n != 1 {
				t.Errorf("cause logged %d times: %v", n, log.all())
			}
			if n := r.sink.count("PLANT") + r.sink.count("SECRET"); n != 0 {
				t.Errorf("%d messages arrived", n)
			}
		})
	}
}

func TestCredentials(t *testing.T) {
	r := newRig(t)
	kp := device(t)
	pub, _ := kp.PublicKey()
	seed, _ := kp.Seed()
	dev, _ := r.device.PublicKey()
	file := filepath.Join(t.TempDir(), "user.nk")
	if err := os.WriteFile(file, seed, 0o600); err != nil {
		t.Fatal(err)
	}
	hash, err := bcrypt.GenerateFromPassword([]byte("s3cret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	r.hub.Close()
	r.hub = startHub(t, r.hubDir, "127.0.0.1:0", r.sink, func(c *HubConfig) {
		c.Users = []User{{Name: "hashed", Password: string(hash), Streams: []string{"*"}}}
		c.NKeys = []NKey{{Public: pub, Streams: []string{"PLANT"}}, {Public: dev, Streams: []string{"PLANT"}}}
	})
	r.stream.addN(1, 1)
	for name, a := range map[string]Auth{
		"bcrypt": {User: "hashed", Password: "s3cret"},
		"nkey":   {NKeyFile: file},
		"device": {},
	} {
		t.Run(name, func(t *testing.T) {
			e := r.edge(t, r.url(), func(o *EdgeOptions) { o.Config.Auth = a })
			until(t, "connected", func() bool { return e.Status().Exports[0].Through == 1 })
			e.Close()
		})
	}
}

// A proof recorded on one connection is worth nothing on another.
func TestProofIsBoundToConnection(t *testing.T) {
	v, err := newVerifier(&HubConfig{Users: []User{{Name: "edge", Password: password}}})
	if err != nil {
		t.Fatal(err)
	}
	cred, err := loadCredentials(device(t), Auth{User: "edge", Password: password})
	if err != nil {
		t.Fatal(err)
	}
	one, two := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	h, err := cred.hello(frame.Hello{MaxVersion: 1}, one)
	if err != nil {
		t.Fatal(err)
	}
	h.Signed = h.AppendSigned(nil)
	if _, refused, why := v.verify(&h, one); refused != nil {
		t.Errorf("refused on its own connection: %v", why)
	}
	if _, refused, _ := v.verify(&h, two); refused == nil {
		t.Error("accepted on another connection")
	}
	h.Name = "other"
	h.Signed = h.AppendSigned(nil)
	if _, refused, _ := v.verify(&h, one); refused == nil {
		t.Error("accepted with a changed field")
	}
}

func TestWrongCertificate(t *testing.T) {
	r := newRig(t)
	other := filepath.Join(r.hubDir, "other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := generate(filepath.Join(other, HubCertFile), filepath.Join(other, HubKeyFile)); err != nil {
		t.Fatal(err)
	}
	wrong := "sha256:" + strings.Repeat("ab", 32)
	for _, c := range []struct {
		name string
		tls  ClientTLS
		want []string
	}{
		{"pinned", ClientTLS{Pinned: wrong}, []string{wrong, r.hub.Fingerprint(), "put its fingerprint"}},
		{"ca", ClientTLS{CAFile: filepath.Join(other, HubCertFile)}, []string{r.hub.Fingerprint(), "expected one issued by sha256:", "ca_file"}},
		{"system", ClientTLS{}, []string{r.hub.Fingerprint(), "system's roots", "pinned"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // mostly waiting
			var log lines
			e := r.edge(t, r.url(), func(o *EdgeOptions) { o.Config.TLS = c.tls; o.Log = log.logger() })
			until(t, "failed", func() bool { return e.Status().LastError != "" })
			for _, w := range c.want {
				if got := e.Status().LastError; !strings.Contains(got, w) {
					t.Errorf("error %q does not tell %q", got, w)
				}
			}
			start, n := time.Now(), e.Status().Attempts
			time.Sleep(4 * quick.RetryMin)
			if n = e.Status().Attempts - n; n > 2+uint64(time.Since(start)/quick.RetryMin) {
				t.Errorf("%d attempts in %v", n, time.Since(start))
			}
			if n := log.count("not trusted"); n != 1 {
				t.Errorf("logged %d times", n)
			}
		})
	}
	t.Run("right ca", func(t *testing.T) {
		t.Parallel()
		r.stream.addN(1, 1)
		r.edge(t, r.url(), func(o *EdgeOptions) {
			o.Config.TLS = ClientTLS{CAFile: filepath.Join(r.hubDir, HubCertFile)}
		})
		r.sink.waitCount(t, "PLANT", 1)
	})
}

func TestNewestConnectionWins(t *testing.T) {
	r := newRig(t)
	r.stream.addN(10, 10)
	one := r.edge(t, r.url(), nil)
	r.sink.waitCount(t, "PLANT", 10)
	// A clone: same device key, a stream of its own.
	clone := newMemStream(9)
	clone.addN(5, 10)
	r.edge(t, r.url(), func(o *EdgeOptions) {
		o.Sources = &memSources{streams: map[string]*memStream{"READINGS": clone}}
		o.States = &memStates{m: map[string][]byte{}}
	})
	r.sink.waitCount(t, "PLANT", 15)
	until(t, "the older is told", func() bool { return strings.Contains(one.Status().LastError, "same device key") })
	if n := len(r.hub.Status().Edges); n > 1 {
		t.Errorf("%d connections of one edge", n)
	}
	seqs := r.sink.seqs("PLANT")
	inOrder(t, seqs[:10], 1, 10)
	inOrder(t, seqs[10:15], 1, 5)
}

func TestStorageFullIsTold(t *testing.T) {
	r := newRig(t)
	r.sink.mu.Lock()
	r.sink.fail = &frame.Error{Code: frame.CodeStorage, Text: "stream PLANT is full: raise its limits"}
	r.sink.mu.Unlock()
	r.stream.addN(10, 10)
	e := r.edge(t, r.url(), nil)
	until(t, "the cause in the status", func() bool {
		x := e.Status().Exports[0]
		return x.Failing && strings.Contains(x.LastError, "raise its limits")
	})
	r.sink.mu.Lock()
	r.sink.fail = nil
	r.sink.mu.Unlock()
	r.sink.waitCount(t, "PLANT", 10)
	if e.Status().Connects != 1 {
		t.Error("a full stream took the connection down")
	}
	if x := e.Status().Exports[0]; x.Failing || x.LastError == "" {
		t.Errorf("the export has resumed, and what failed is past: %+v", x)
	}
}

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		p, s string
		want bool
	}{
		{"*", "X", true},
		{"PLANT", "PLANT", true},
		{"PLANT", "PLANTX", false},
		{"PLANT*", "PLANTX", true},
		{"*_RAW", "A_RAW", true},
		{"A*B*C", "AxxBC", true},
		{"A*B*C", "AxxC", false},
		{"", "X", false},
		{"**", "", true},
	} {
		if got := match(c.p, c.s); got != c.want {
			t.Errorf("match(%q, %q) = %v", c.p, c.s, got)
		}
	}
}
