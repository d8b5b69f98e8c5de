//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"petiole/faults/rig"
)

// latency is the 99th percentile of a client's round trips in each of several
// rounds, sorted. The best round is what the edge takes; the others also
// have in them what else the machine did.
type latency []time.Duration

func (l latency) best() time.Duration { return l[0] }

func (l latency) String() string { return fmt.Sprintf("%v (median round %v)", l[0], l[len(l)/2]) }

// measure sends requests until patience is over, or from the third round on
// until the best round is within enough.
func measure(nc *nats.Conn, subject string, enough, patience time.Duration) (latency, error) {
	const requests = 500
	var rounds latency
	times := make([]time.Duration, requests)
	for began := time.Now(); ; {
		for i := range times {
			t := time.Now()
			if _, err := nc.Request(subject, []byte("ping"), 10*time.Second); err != nil {
				return nil, fmt.Errorf("request %d of the healthy client: %w", i, err)
			}
			times[i] = time.Since(t)
		}
		slices.Sort(times)
		rounds = append(rounds, times[requests*99/100])
		slices.Sort(rounds)
		if len(rounds) >= 3 && (rounds.best() <= enough || time.Since(began) > patience) {
			return rounds, nil
		}
	}
}

// slowly is how a connection begins that never gets far: with first at once,
// then with one octet of then after the other, over and over.
type slowly struct {
	first, then string
	tls         bool // the handshake is done before that
}

// hold keeps a connection to addr open and unfinished until ctx ends. If the
// edge hangs up, another one takes its place.
func hold(ctx context.Context, addr string, how slowly, open *atomic.Int64) {
	for ctx.Err() == nil {
		holdOne(ctx, addr, how, open)
		select { // not a flood of connections: that is another check
		case <-ctx.Done():
		case <-time.After(time.Duration(rand.Int64N(int64(time.Second)))):
		}
	}
}

func holdOne(ctx context.Context, addr string, how slowly, open *atomic.Int64) {
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return
	}
	defer context.AfterFunc(ctx, func() { c.Close() })()
	defer c.Close()
	if how.tls {
		var info [4096]byte
		if _, err := c.Read(info[:]); err != nil {
			return
		}
		tc := tls.Client(c, &tls.Config{InsecureSkipVerify: true}) // it is not the one to be protected
		if err := tc.HandshakeContext(ctx); err != nil {
			return
		}
		c = tc
	}
	open.Add(1)
	defer open.Add(-1)
	if _, err := io.WriteString(c, how.first); err != nil {
		return
	}
	var got [512]byte
	for i := 0; ; i++ {
		// A second on the average, so that the octets do not come all at once.
		until := time.Now().Add(time.Second/2 + time.Duration(rand.Int64N(int64(time.Second))))
		for {
			_ = c.SetReadDeadline(until)
			if _, err := c.Read(got[:]); errors.Is(err, os.ErrDeadlineExceeded) {
				break
			} else if err != nil {
				return
			}
		}
		if how.then != "" {
			if _, err := io.WriteString(c, how.then[i%len(how.then):][:1]); err != nil {
				return
			}
		}
	}
}

// recorder keeps what is written to it, and is no connection otherwise.
type recorder struct {
	net.Conn
	bytes.Buffer
}

func (r *recorder) Write(b []byte) (int, error) { return r.Buffer.Write(b) }
func (r *recorder) Read([]byte) (int, error)    { return 0, io.EOF }

// clientHello is how a TLS connection begins.
func clientHello() string {
	var r recorder
	_ = tls.Client(&r, &tls.Config{ServerName: "edge.example"}).Handshake() // ends with EOF
	return r.String()
}

func halfOpenTCP(ctx context.Context, b *bench) error {
	return halfOpen(ctx, b, "half-open-tcp", "", []slowly{
		{},
		{then: "CONNECT {\"verbose\":false,\"name\":\"" + strings.Repeat("x", 500)},
		{first: "CONNECT {}\r\nPUB x 100000\r\n", then: "x"},
		{first: "CONNECT {}\r\nSUB some.> 1\r\n", then: "PING\r\n"},
	})
}

func halfOpenTLS(ctx context.Context, b *bench) error {
	dir, err := os.MkdirTemp(b.dir, "tls-")
	if err != nil {
		return err
	}
	cert, key, _, err := rig.Certificate(dir, "edge")
	if err != nil {
		return err
	}
	hello := clientHello()
	// As long as the check lasts: the point is what many cost that are there.
	config := fmt.Sprintf("tls { cert_file: %q, key_file: %q, timeout: 60 }\nauthorization { token: right, timeout: 60 }\n", cert, key)
	return halfOpen(ctx, b, "half-open-tls", config, []slowly{
		{},
		{then: hello},
		{first: hello},
		{tls: true, then: "CONNECT {\"verbose\":false,\"name\":\"" + strings.Repeat("x", 500)},
	})
}

// halfOpen has b.conns connections that never get to be clients beside a client
// whose 99th percentile must not double, at an edge of their own.
func halfOpen(ctx context.Context, b *bench, name, config string, ways []slowly) error {
	return edgeAlone(b, name, config, func(p *rig.Process, addr string) error {
		opts := []nats.Option{nats.Token("right"), nats.MaxReconnects(0), nats.Timeout(rig.StartTimeout)}
		if strings.Contains(config, "tls") {
			opts = append(opts, nats.Secure(&tls.Config{InsecureSkipVerify: true}))
		}
		var conns [2]*nats.Conn
		for i := range conns {
			nc, err := connect(p, addr, opts...)
			if err != nil {
				return err
			}
			defer nc.Close()
			conns[i] = nc
		}
		if _, err := conns[0].Subscribe("healthy.p99", func(m *nats.Msg) { _ = m.Respond(m.Data) }); err != nil {
			return err
		}
		if err := conns[0].Flush(); err != nil {
			return err
		}
		before, err := measure(conns[1], "healthy.p99", 0, b.load)
		if err != nil {
			return err
		}
		idle, err := p.Usage()
		if err != nil {
			return err
		}

		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		release := func() {
			cancel()
			wg.Wait()
		}
		defer release()
		var open atomic.Int64
		for i := range b.conns {
			wg.Go(func() { hold(ctx, addr, ways[i%len(ways)], &open) })
		}
		for end := time.Now().Add(time.Minute); open.Load() < int64(b.conns); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				return fmt.Errorf("only %d of %d connections are open after a minute", open.Load(), b.conns)
			}
		}
		held := open.Load()
		attacked, err := measure(conns[1], "healthy.p99", 2*before.best(), 20*time.Second)
		if err != nil {
			return err
		}
		full, err := p.Usage()
		if err != nil {
			return err
		}
		release()
		// What else the machine does may have changed meanwhile, so that the
		// time after the attack tells as much as that before it.
		after, err := measure(conns[1], "healthy.p99", 0, b.load)
		if err != nil {
			return err
		}
		each := (full.Anon - idle.Anon) / int64(b.conns)
		fmt.Printf("     %s: p99 of a client's requests %v, with %d connections half open %v, without them again %v; %d octets of memory for each of them\n",
			name, before, held, attacked, after, each)
		if alone := max(before.best(), after.best()); attacked.best() > 2*alone {
			return fmt.Errorf("the healthy client's p99 is %v, more than twice the %v that it is without the attack", attacked.best(), alone)
		}
		if each > 64<<10 {
			return fmt.Errorf("%d octets of memory for a connection that does nothing", each)
		}
		return nil
	})
}

// connect connects to an edge that may still be starting.
func connect(p *rig.Process, addr string, opts ...nats.Option) (nc *nats.Conn, err error) {
	for end := time.Now().Add(rig.StartTimeout); time.Now().Before(end) && p.Alive(); time.Sleep(10 * time.Millisecond) {
		if nc, err = nats.Connect("nats://"+addr, opts...); err == nil {
			return nc, nil
		}
	}
	return nil, fmt.Errorf("connect to the edge: %w\n%s", err, p.Log(2000))
}

// watchAnon notes the largest anonymous memory of p until stop is called, which
// returns by how much it exceeded what there was at first.
func watchAnon(p *rig.Process) (stop func() (int64, error), err error) {
	u, err := p.Usage()
	if err != nil {
		return nil, err
	}
	first, most := u.Anon, u.Anon
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil && err == nil {
			if u, err = p.Usage(); err == nil {
				most = max(most, u.Anon)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	return func() (int64, error) {
		cancel()
		wg.Wait()
		return most - first, err
	}, nil
}

// clientFloods sends, on many connections at once, what never ends, lengths
// that are lies, and headers of a thousand times a thousand fields. Each has to
// be refused and closed, and the edge's memory must not grow with what is sent.
func clientFloods(ctx context.Context, b *bench) error {
	const atOnce = 8
	const mostAnon = 64 << 20
	long := func(s string) string { return strings.Repeat(s, 10_000_000/len(s)) }
	con := `CONNECT {"verbose":false,"headers":true}` + "\r\n"
	floods := []string{
		con + "SUB " + long("a"),
		con + "PUB a" + long(".a"),
		con + "HPUB " + long("a "),
		con + "UNSUB " + long("1"),
		con + "PING" + long(" "),
		`CONNECT {"name":"` + long("x"),
		"CONNECT " + long("["),
		con + "PUB a 10000000\r\n" + long("x"),
		con + "PUB a " + strings.Repeat("9", 3000) + "\r\n" + long("x"),
		con + "PUB a 3\r\n" + long("x"),
		con + "PUB a 1048577\r\n" + long("x"),
		con + "HPUB a 10000000 10000000\r\nNATS/1.0\r\n" + long("a:b\r\n"),
		con + "HPUB a 20 10\r\n" + long("a:b\r\n"),
		con + "HPUB a 1048576 1048576\r\nNATS/1.0\r\n" + long("a:b\r\n"),
		con + "HPUB rows.bomb 1048576 1048576\r\nNATS/1.0\r\n" + long("a:\n"),
	}
	stop, err := watchAnon(b.site.Edge)
	if err != nil {
		return err
	}
	errs := make(chan error, atOnce)
	var next atomic.Int64
	for range atOnce {
		go func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= 4*len(floods) || ctx.Err() != nil {
					errs <- nil
					return
				}
				flood := floods[i%len(floods)]
				if err := expectRefusal(b.site.EdgeAddr, flood); err != nil {
					errs <- fmt.Errorf("%.60q: %w", flood, err)
					return
				}
			}
		}()
	}
	for range atOnce {
		err = errors.Join(err, <-errs)
	}
	grown, usageErr := stop()
	fmt.Printf("     client-floods: memory grew by %d KiB\n", grown>>10)
	if grown > mostAnon {
		err = errors.Join(err, fmt.Errorf("the edge's memory grew by %d octets", grown))
	}
	return errors.Join(err, usageErr)
}

// slowReaders has subscribers that read nothing beside one that does. The edge
// may keep max_pending for each of them, then it has to cut them off.
func slowReaders(ctx context.Context, b *bench) error {
	const slow, pending, total, size = 8, 8 << 20, 256 << 20, 4 << 10
	const mostAnon = slow*pending + 48<<20
	return edgeAlone(b, "slow-readers", fmt.Sprintf("max_pending: %d\n", pending), func(p *rig.Process, addr string) error {
		good, err := connect(p, addr, nats.MaxReconnects(0))
		if err != nil {
			return err
		}
		defer good.Close()
		var got atomic.Int64
		sub, err := good.Subscribe("flood", func(*nats.Msg) { got.Add(1) })
		if err != nil {
			return err
		}
		if err := errors.Join(sub.SetPendingLimits(-1, -1), good.Flush()); err != nil {
			return err
		}
		for range slow {
			c, err := net.DialTimeout("tcp", addr, 5*time.Second)
			if err != nil {
				return err
			}
			defer c.Close()
			_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
			if _, err := io.WriteString(c, "CONNECT {\"verbose\":false}\r\nSUB flood 1\r\nPING\r\n"); err != nil {
				return err
			}
			var answer bytes.Buffer
			for buf := make([]byte, 512); !strings.HasSuffix(answer.String(), "PONG\r\n"); {
				_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
				n, err := c.Read(buf)
				if err != nil {
					return fmt.Errorf("subscribe: %w", err)
				}
				answer.Write(buf[:n])
			}
		}
		stop, err := watchAnon(p)
		if err != nil {
			return err
		}
		pub, err := connect(p, addr, nats.MaxReconnects(0))
		if err != nil {
			return err
		}
		defer pub.Close()
		data := make([]byte, size)
		for range total / size {
			if err := pub.Publish("flood", data); err != nil {
				return fmt.Errorf("publish: %w", err)
			}
		}
		if err := pub.FlushTimeout(time.Minute); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		for end := time.Now().Add(30 * time.Second); got.Load() < total/size && time.Now().Before(end) && ctx.Err() == nil; {
			time.Sleep(10 * time.Millisecond)
		}
		grown, err := stop()
		if err != nil {
			return err
		}
		cut := strings.Count(p.Log(1<<20), "does not keep up")
		fmt.Printf("     slow-readers: %d of %d were cut off, memory grew by %d KiB of %d that may be pending\n", cut, slow, grown>>10, slow*pending>>10)
		switch {
		case got.Load() != total/size:
			return fmt.Errorf("the subscriber that reads got %d of %d messages", got.Load(), total/size)
		case cut != slow:
			return fmt.Errorf("%d of %d that read nothing were cut off", cut, slow)
		case grown > mostAnon:
			return fmt.Errorf("the edge's memory grew by %d octets", grown)
		}
		return nil
	})
}
