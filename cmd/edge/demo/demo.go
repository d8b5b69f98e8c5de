// Package demo shows the product in one command: an edge and a hub as separate
// processes on this machine, a hub that is killed while messages flow, and at
// the end a comparison of what both sides hold, read as any NATS client would.
package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/admin"
	"petiole/testdata"
)

// Limit is how long a demonstration may take, building the hub apart. On a
// machine that does nothing else it is over in a fraction of that.
const Limit = time.Minute

// passes is how often the samples are published.
const passes = 3

// Options configure a demonstration.
type Options struct {
	Edge string    // the edge program; it is run as a separate process
	Hub  string    // the hub program; empty: beside Edge, or built
	Keep bool      // leave both running at the end, until ctx ends
	Out  io.Writer // where to show it
	Bar  bool      // Out is a terminal: draw a bar that moves
}

// ErrMismatch says that edge and hub do not hold the same.
var ErrMismatch = errors.New("edge and hub do not hold the same messages")

// exports are the streams of the demonstration.
var exports = []struct{ stream, subjects, to string }{
	{"READINGS", "plant.>", "PLANT_READINGS"},
	{"SALES", "till.>", "PLANT_SALES"},
}

// numberHeader numbers what is published, per stream from 1, so that the
// comparison can tell what is missing from what is out of order.
const numberHeader = "Demo-Number"

// demo is one demonstration under way.
type demo struct {
	Options
	dir      string
	password string
	hub      *process
	edge     *process
	hubAddr  string // UDP, for edges
	hubPort  int    // TCP, for clients
	pin      string
}

// Run runs the demonstration. It returns nil only if edge and hub hold
// exactly what was published, in order.
func Run(ctx context.Context, o Options) (err error) {
	dir, err := os.MkdirTemp("", "petiole-demo-")
	if err != nil {
		return err
	}
	d := &demo{Options: o, dir: dir, password: rand.Text(), hubAddr: "127.0.0.1:-1", hubPort: -1}
	defer func() {
		stopErr := errors.Join(d.edge.stop(), d.hub.stop())
		if err == nil {
			err = stopErr
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			err = fmt.Errorf("%w (logs are in %s)", err, dir)
			return
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	if d.Hub == "" {
		if d.Hub, err = d.findHub(ctx); err != nil {
			return err
		}
	}
	limited, cancel := context.WithTimeoutCause(ctx, Limit, fmt.Errorf("not finished within %s", Limit))
	defer cancel()
	if err := d.show(limited); err != nil {
		if cause := context.Cause(limited); cause != nil && ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		return err
	}
	d.lookAround()
	if d.Keep {
		fmt.Fprintln(d.Out, "\nBoth keep running until Ctrl-C.")
		<-ctx.Done()
	}
	return nil
}

// say prints one step.
func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.Out, "• "+format+"\n", args...) }

// show is the demonstration itself.
func (d *demo) show(ctx context.Context) error {
	began := time.Now()
	took, err := d.startHub(ctx)
	if err != nil {
		return err
	}
	d.say("hub runs as process %d, ready %s after its start: clients on 127.0.0.1:%d, edges on %s (UDP)", d.hub.pid(), took, d.hubPort, d.hubAddr)
	if took, err = d.startEdge(ctx); err != nil {
		return err
	}
	st, err := d.status(ctx, "edge")
	if err != nil {
		return err
	}
	edgeURL := st.ClientURL
	d.say("edge runs as process %d, ready %s after its start: clients on %s", d.edge.pid(), took, strings.TrimPrefix(edgeURL, "nats://"))

	nc, err := nats.Connect(edgeURL, nats.Name("petiole demo"))
	if err != nil {
		return fmt.Errorf("connect to the edge: %w", err)
	}
	defer nc.Close()
	pub, err := newPublisher(ctx, nc)
	if err != nil {
		return err
	}
	total := pub.total()
	d.say("publishing %d readings and receipts to the edge, each acknowledged after fsync", total)
	if err := pub.until(ctx, total/4); err != nil {
		return err
	}

	// The kill falls into the middle of it: the hub has some, not all.
	before, err := d.waitThrough(ctx, 1)
	if err != nil {
		return err
	}
	flowing := make(chan error, 1)
	go func() { flowing <- pub.until(ctx, total/3) }()
	d.hub.kill()
	if err := <-flowing; err != nil {
		return err
	}
	d.say("hub killed (SIGKILL) while messages were under way; it had acknowledged at least %d", before)
	outage := time.Now()
	if err := pub.until(ctx, total*5/6); err != nil {
		return err
	}
	st, err = d.status(ctx, "edge")
	if err != nil {
		return err
	}
	backlog, through := lag(st)
	d.say("the edge went on: %d acknowledged without a hub, %d wait for it", pub.acked(), backlog)

	go func() { flowing <- pub.until(ctx, total) }()
	if took, err = d.startHub(ctx); err != nil {
		return err
	}
	back := time.Now()
	d.say("hub is back as process %d after %s, ready %s after its start; publishing goes on meanwhile", d.hub.pid(), time.Since(outage).Round(10*time.Millisecond), took)
	r, err := d.drain(ctx, back, through, flowing)
	if err != nil {
		return err
	}
	if err := d.compare(ctx, nc, pub); err != nil {
		return err
	}
	d.say("first replayed message %s after the hub was back; %d replayed in %s, %.0f a second",
		r.first.Round(time.Millisecond), r.msgs, r.took.Round(time.Millisecond), float64(r.msgs)/r.took.Seconds())
	d.say("took %s in all", time.Since(began).Round(100*time.Millisecond))
	return nil
}

// startHub writes the hub's configuration and starts it. The first time the
// system chooses the ports; they are kept for the next.
func (d *demo) startHub(ctx context.Context) (time.Duration, error) {
	conf := fmt.Sprintf("listen: \"127.0.0.1:%d\"\nserver_name: demo-hub\njetstream { store_dir: %q }\nedges {\n  listen: %q\n  users: [ { user: demo, password: %q, streams: \"PLANT_*\" } ]\n}\n",
		d.hubPort, filepath.Join(d.dir, "hub"), d.hubAddr, d.password)
	p, took, err := d.start(ctx, "hub", d.Hub, conf)
	if err != nil {
		return 0, err
	}
	d.hub = p
	st, err := d.status(ctx, "hub")
	if err != nil {
		return 0, err
	}
	if st.Edges == nil {
		return 0, errors.New("the hub does not listen for edges")
	}
	d.hubAddr, d.pin = st.Edges.Addr, st.Edges.Fingerprint
	_, port, err := net.SplitHostPort(strings.TrimPrefix(st.ClientURL, "nats://"))
	if err != nil {
		return 0, fmt.Errorf("address of the hub: %w", err)
	}
	d.hubPort, err = strconv.Atoi(port)
	return took, err
}

// startEdge writes the edge's configuration and starts it.
func (d *demo) startEdge(ctx context.Context) (time.Duration, error) {
	var list strings.Builder
	for _, e := range exports {
		fmt.Fprintf(&list, "  { stream: %s, to: %s }\n", e.stream, e.to)
	}
	conf := fmt.Sprintf("listen: \"127.0.0.1:-1\"\nserver_name: demo-edge\njetstream { store_dir: %q }\nhub {\n  urls: [\"quic://%s\"]\n  user: demo, password: %q\n  tls { pinned: %q }\n}\nexports: [\n%s]\n",
		filepath.Join(d.dir, "edge"), d.hubAddr, d.password, d.pin, list.String())
	p, took, err := d.start(ctx, "edge", d.Edge, conf)
	d.edge = p
	return took, err
}

// status asks one of the two programs.
func (d *demo) status(ctx context.Context, name string) (admin.Status, error) {
	return admin.Ask(ctx, filepath.Join(d.dir, name, admin.SocketName))
}

// lag sums up what the hub does not have yet, and what it has.
func lag(st admin.Status) (behind, through uint64) {
	if st.Hub != nil {
		for _, e := range st.Hub.Exports {
			behind += e.LagMsgs
			through += e.Through
		}
	}
	return behind, through
}

// poll is how often a running program is asked for its progress.
const poll = 10 * time.Millisecond

// waitThrough waits until the hub has acknowledged at least n messages and
// returns how many.
func (d *demo) waitThrough(ctx context.Context, n uint64) (uint64, error) {
	for {
		st, err := d.status(ctx, "edge")
		if err != nil {
			return 0, err
		}
		if _, through := lag(st); through >= n {
			return through, nil
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("the hub acknowledges nothing: %s", linkTrouble(st))
		case <-time.After(poll):
		}
	}
}

func linkTrouble(st admin.Status) string {
	if st.Hub == nil {
		return "the edge has no hub configured"
	}
	text := st.Hub.LastError
	for _, e := range st.Hub.Exports {
		if e.LastError != "" {
			text += "; " + e.Stream + ": " + e.LastError
		}
	}
	return strings.TrimPrefix(text, "; ")
}

// replayed is what draining the backlog took.
type replayed struct {
	first time.Duration // from the hub being back to the first message
	took  time.Duration // from the first to the last
	msgs  uint64
}

// drain shows the backlog shrinking until everything is published and the hub
// has all of it.
func (d *demo) drain(ctx context.Context, back time.Time, through uint64, published <-chan error) (replayed, error) {
	var r replayed
	var first time.Time
	g := newGauge(d.Out, d.Bar)
	defer g.end()
	for {
		st, err := d.status(ctx, "edge")
		if err != nil {
			return r, err
		}
		now := time.Now()
		behind, have := lag(st)
		if first.IsZero() && have > through {
			first = now
			r.first = now.Sub(back)
		}
		rate := 0.0
		if !first.IsZero() && now.After(first) {
			rate = float64(have-through) / now.Sub(first).Seconds()
		}
		g.draw(now, behind, have-through, rate)
		if published == nil && behind == 0 && !first.IsZero() {
			// The first sight of progress may come with all of it.
			r.took, r.msgs = max(now.Sub(first), poll), have-through
			return r, nil
		}
		select {
		case err := <-published:
			if err != nil {
				return r, err
			}
			published = nil
		case <-ctx.Done():
			return r, fmt.Errorf("%d messages did not reach the hub: %s", behind, linkTrouble(st))
		case <-time.After(poll):
		}
	}
}

// compare reads both sides and judges them against what was published.
func (d *demo) compare(ctx context.Context, edge *nats.Conn, pub *publisher) error {
	hub, err := nats.Connect(fmt.Sprintf("nats://127.0.0.1:%d", d.hubPort), nats.Name("petiole demo"))
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	defer hub.Close()
	d.say("reading both sides back through NATS clients")
	fmt.Fprintf(d.Out, "\n  %-31s %9s %8s %11s %13s %16s\n", "stream", "messages", "missing", "duplicated", "out of order", "different bytes")
	good := true
	for i, e := range exports {
		for _, side := range []struct {
			name   string
			nc     *nats.Conn
			stream string
		}{{"edge", edge, e.stream}, {"hub", hub, e.to}} {
			got, err := read(ctx, side.nc, side.stream)
			if err != nil {
				return fmt.Errorf("read %s at the %s: %w", side.stream, side.name, err)
			}
			v := judge(pub.sent[i], got)
			good = good && v.good(len(pub.sent[i]))
			fmt.Fprintf(d.Out, "  %-31s %9d %8d %11d %13d %16d\n", side.name+" "+side.stream, v.messages, v.missing, v.duplicated, v.disordered, v.different)
		}
	}
	fmt.Fprintln(d.Out)
	if !good {
		return ErrMismatch
	}
	d.say("edge and hub hold exactly what was published: %d messages, once, in order, byte for byte", pub.total())
	return nil
}

// lookAround tells what to try next.
func (d *demo) lookAround() {
	fmt.Fprintln(d.Out)
	if !d.Keep {
		fmt.Fprintln(d.Out, "`edge demo --keep` leaves both running, to look around with the nats CLI and `edge status`.")
		return
	}
	st, err := d.status(context.Background(), "edge")
	if err != nil {
		fmt.Fprintln(d.Out, err)
		return
	}
	hub := fmt.Sprintf("nats://127.0.0.1:%d", d.hubPort)
	fmt.Fprintln(d.Out, "Look around:")
	for _, line := range []string{
		"nats -s " + st.ClientURL + " stream ls",
		"nats -s " + st.ClientURL + " pub plant.test hello",
		"nats -s " + hub + " stream view PLANT_READINGS",
		"nats -s " + hub + " stream info PLANT_SALES",
		d.Edge + " status -sd " + filepath.Join(d.dir, "edge"),
		d.Edge + " export ls -sd " + filepath.Join(d.dir, "edge"),
		d.Hub + " status -sd " + filepath.Join(d.dir, "hub"),
		"kill -9 " + strconv.Itoa(d.hub.pid()) + "    # and publish on",
	} {
		fmt.Fprintln(d.Out, "  "+line)
	}
}

// samples returns what is published: the sample messages of both streams,
// mixed, by index into exports.
func samples() ([][]testdata.Record, error) {
	readings, err := testdata.Readings()
	if err != nil {
		return nil, err
	}
	sales, err := testdata.Sales()
	if err != nil {
		return nil, err
	}
	return [][]testdata.Record{readings, sales}, nil
}

// createStream makes one of the edge's streams.
func createStream(ctx context.Context, js jetstream.JetStream, name, subjects string) error {
	_, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{subjects}, Storage: jetstream.FileStorage})
	if err != nil {
		return fmt.Errorf("create stream %s: %w", name, err)
	}
	return nil
}
