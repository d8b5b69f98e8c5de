package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nkeys"
	"github.com/quic-go/quic-go"

	"petiole/sync/export"
	"petiole/sync/frame"
	"petiole/sync/replay"
)

// EdgeOptions are what an Edge is made of.
type EdgeOptions struct {
	Config   EdgeConfig
	Device   nkeys.KeyPair // see LoadDevice
	Sources  export.Sources
	States   export.StateStore
	Software string // version for display
	// Limiter sizes the window of each export run (nil: Fixed of
	// Config.Window).
	Limiter func() replay.Limiter
	Log     *slog.Logger
}

// Edge is an edge's side of the link: it keeps one connection to a hub, comes
// back when it breaks, and replays the exports.
type Edge struct {
	conf     EdgeConfig
	cred     *credentials
	sources  export.Sources
	states   export.StateStore
	software string
	limiter  func() replay.Limiter
	log      *slog.Logger
	targets  []*target
	exports  []*exporter

	cancel context.CancelFunc
	done   chan struct{}
	saver  chan struct{} // wakes the saver
	saved  chan struct{} // closed when the saver has ended

	mu       sync.Mutex
	streams  chan struct{} // closed, and replaced, when streams come or go
	session  *session
	status   EdgeStatus
	lastLog  string
	lastLogT time.Time
}

// target is one URL of the hub.
type target struct {
	url, addr string
	tls       *tls.Config
	next      time.Time     // earliest next attempt
	backoff   time.Duration // after refusals; 0: none
	refusedAt time.Time     // the last refusal
}

// NewEdge checks the configuration and returns an edge that is not started.
func NewEdge(o EdgeOptions) (*Edge, error) {
	c := o.Config
	c.Timing.defaults()
	if len(c.URLs) == 0 {
		return nil, errors.New("link: no hub URL is set")
	}
	e := &Edge{
		conf: c, sources: o.Sources, states: o.States, software: o.Software,
		limiter: o.Limiter, log: o.Log,
		done: make(chan struct{}), saver: make(chan struct{}, 1), saved: make(chan struct{}),
		streams: make(chan struct{}),
	}
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	if e.limiter == nil {
		window := c.Window
		if window <= 0 {
			window = replay.DefaultWindow
		}
		e.limiter = func() replay.Limiter { return replay.Fixed(window) }
	}
	var err error
	if e.cred, err = loadCredentials(o.Device, c.Auth); err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	e.status.EdgeID = e.cred.deviceID
	for _, u := range c.URLs {
		t, err := newTarget(u, &c.TLS)
		if err != nil {
			return nil, fmt.Errorf("link: %w", err)
		}
		e.targets = append(e.targets, t)
	}
	seen := map[Export]bool{}
	for _, x := range c.Exports {
		if x.To == "" {
			x.To = x.Stream
		}
		if x.Stream == "" || seen[x] {
			return nil, fmt.Errorf("link: export of stream %q to %q is empty or listed twice", x.Stream, x.To)
		}
		seen[x] = true
		e.exports = append(e.exports, &exporter{e: e, conf: x})
	}
	return e, nil
}

func newTarget(raw string, conf *ClientTLS) (*target, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("hub URL: %w", err)
	}
	if u.Scheme != "quic" || u.Hostname() == "" || u.User != nil || (u.Path != "" && u.Path != "/") || u.RawQuery != "" {
		return nil, fmt.Errorf("hub URL %q is not of the form quic://host:port", u.Redacted())
	}
	port := u.Port()
	if port == "" {
		port = strconv.Itoa(DefaultPort)
	}
	t := &target{url: raw, addr: net.JoinHostPort(u.Hostname(), port)}
	t.tls, err = clientTLS(conf, raw, u.Hostname())
	return t, err
}

// Start begins to connect. The edge works until Close.
func (e *Edge) Start() {
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	e.status.Since = time.Now()
	unwatch := e.sources.WatchStreams(func() {
		e.mu.Lock()
		close(e.streams)
		e.streams = make(chan struct{})
		e.mu.Unlock()
	})
	go e.save(ctx)
	var followers sync.WaitGroup
	for _, x := range e.exports {
		followers.Go(func() { x.follow(ctx) })
	}
	go func() {
		defer close(e.done)
		defer followers.Wait()
		defer unwatch()
		e.run(ctx)
	}()
}

// Close ends the connection, stores the exports' states and returns.
func (e *Edge) Close() error {
	if e.cancel == nil {
		return nil
	}
	e.cancel()
	<-e.done
	<-e.saved
	var errs []error
	for _, x := range e.exports {
		errs = append(errs, x.save(false))
	}
	return errors.Join(errs...)
}

// streamsChanged returns a channel that is closed when streams come or go.
func (e *Edge) streamsChanged() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.streams
}

// run connects, over and over.
func (e *Edge) run(ctx context.Context) {
	var jitter time.Duration
	for ctx.Err() == nil {
		now := time.Now()
		for i, t := range e.targets {
			// Spread the URLs over the interval; the first goes at once.
			if at := now.Add(jitter + e.conf.Timing.Reconnect*time.Duration(i)/time.Duration(len(e.targets))); t.next.Before(at) {
				t.next = at
			}
		}
		d, err := e.connect(ctx)
		if err != nil {
			return // ctx ended
		}
		s := newSession(e, d)
		e.mu.Lock()
		e.session = s
		e.mu.Unlock()
		err = s.run(ctx)
		e.mu.Lock()
		e.session = nil
		if e.status.Connected {
			e.status.Connected, e.status.Since, e.status.RTT = false, time.Now(), 0
		}
		e.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		e.after(d.t, s, err)
		// Many edges lose a hub in the same moment; they do not all come
		// back in the same.
		jitter = time.Duration(rand.Int64N(int64(e.conf.Timing.Reconnect / 5)))
	}
}

// after decides when the target of a session that ended is tried again.
func (e *Edge) after(t *target, s *session, err error) {
	now := time.Now()
	var fe *frame.Error
	code := frame.CodeNone
	if errors.As(err, &fe) {
		code = fe.Code
	}
	switch code {
	case frame.CodeAuth, frame.CodeDenied, frame.CodeVersion, frame.CodeProtocol,
		frame.CodeTooLarge, frame.CodeSuperseded, frame.CodeBusy, frame.CodeInternal:
		t.refused(now, &e.conf.Timing, fe.RetryAfter)
	default:
		if s.welcomed {
			t.backoff = 0
		} else {
			t.next = now.Add(e.conf.Timing.Reconnect)
		}
	}
	if code == frame.CodeSuperseded {
		err = fmt.Errorf("%w; if this edge has been cloned, give each clone a device key of its own (move %s away)", err, DeviceFile)
	}
	what := "link to hub ended"
	if !s.welcomed {
		what = "hub answers, but there is no link"
	}
	e.fail(what, t.url, err)
}

// refused puts the next attempt off, longer each time.
func (t *target) refused(now time.Time, c *Timing, after uint32) {
	if t.backoff == 0 {
		t.backoff = c.RetryMin
	} else {
		t.backoff = min(2*t.backoff, c.RetryMax)
	}
	wait := t.backoff + time.Duration(rand.Int64N(int64(t.backoff)/4+1))
	t.next = now.Add(max(wait, time.Duration(after)*time.Second))
	t.refusedAt = now
}

// repeatLog is after how long the same failure is logged again.
const repeatLog = time.Hour

// fail notes a failure in the status, and in the log if it is a new one.
func (e *Edge) fail(what, url string, err error) {
	text := err.Error()
	now := time.Now()
	e.mu.Lock()
	e.status.LastError, e.status.LastErrorTime = text, now
	level := slog.LevelWarn
	if text == e.lastLog && now.Sub(e.lastLogT) < repeatLog {
		level = slog.LevelDebug
	} else {
		e.lastLog, e.lastLogT = text, now
	}
	e.mu.Unlock()
	e.log.Log(context.Background(), level, what, "url", url, "error", text)
}

// dialed is a connection whose handshake is complete.
type dialed struct {
	t    *target
	conn *quic.Conn
	tr   *quic.Transport
	sock *net.UDPConn
}

func (d *dialed) close(e *frame.Error) {
	closeWith(d.conn, e)
	d.tr.Close()
	d.sock.Close()
}

type attempt struct {
	d     *dialed
	t     *target
	began time.Time
	err   error
}

// connect starts attempts until one succeeds; it fails only when ctx ends.
// Each lives on its own socket: a dead NAT binding must not take the next one
// down with it.
func (e *Edge) connect(ctx context.Context) (*dialed, error) {
	actx, cancel := context.WithCancel(ctx)
	results := make(chan attempt)
	running := 0
	defer func() {
		cancel()
		// Whoever answers later is not needed any more.
		go func(n int) {
			for ; n > 0; n-- {
				if a := <-results; a.d != nil {
					a.d.close(&frame.Error{Text: "another attempt was faster"})
				}
			}
		}(running)
	}()
	for {
		var t *target
		for _, c := range e.targets {
			if t == nil || c.next.Before(t.next) {
				t = c
			}
		}
		timer := time.NewTimer(time.Until(t.next))
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		case <-timer.C:
			// Whoever refused is not asked by several attempts at a time.
			interval := max(e.conf.Timing.Reconnect, t.backoff)
			began := time.Now()
			t.next = began.Add(interval*9/10 + time.Duration(rand.Int64N(int64(interval/5)+1)))
			running++
			e.mu.Lock()
			e.status.Attempts++
			e.mu.Unlock()
			go func() {
				d, err := e.dial(actx, t)
				results <- attempt{d, t, began, err}
			}()
		case a := <-results:
			timer.Stop()
			running--
			if a.err == nil {
				return a.d, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			e.attemptFailed(a.t, a.began, a.err)
		}
	}
}

func (e *Edge) attemptFailed(t *target, began time.Time, err error) {
	refused := func() {
		// Of attempts that were under way together, one counts.
		if began.After(t.refusedAt) {
			t.refused(time.Now(), &e.conf.Timing, 0)
		}
	}
	var (
		cert *CertError
		tr   *quic.TransportError
		ht   *quic.HandshakeTimeoutError
	)
	what := "hub cannot be reached"
	switch {
	case errors.As(err, &cert):
		what, err = "hub answers, but is not trusted", cert
		refused()
	case errors.As(err, &tr):
		err = fmt.Errorf("%s refused the connection: %w; check that a petiole hub of a matching version listens there", t.url, err)
		refused()
	case errors.As(err, &ht), errors.Is(err, context.DeadlineExceeded):
		if t.backoff > 0 { // it is down now: be there when it comes back
			t.backoff, t.next = 0, time.Now()
		}
		err = fmt.Errorf("no answer from %s within %v; check that the hub runs and that UDP gets through to it", t.url, e.conf.Timing.Attempt)
	default:
		err = fmt.Errorf("connect to %s: %w", t.url, err)
	}
	e.fail(what, t.url, err)
}

// Receive windows at the edge, which receives control frames only.
const edgeWindow = 512 << 10

func (e *Edge) dial(ctx context.Context, t *target) (*dialed, error) {
	ctx, cancel := context.WithTimeout(ctx, e.conf.Timing.Attempt)
	defer cancel()
	addr, err := resolve(ctx, t.addr)
	if err != nil {
		return nil, err
	}
	network, local := "udp4", &net.UDPAddr{}
	if addr.IP.To4() == nil {
		network = "udp6"
	}
	sock, err := net.ListenUDP(network, local)
	if err != nil {
		return nil, err
	}
	tr := &quic.Transport{Conn: sock}
	conf := quicConfig(&e.conf.Timing)
	conf.InitialStreamReceiveWindow = edgeWindow
	conf.MaxStreamReceiveWindow = edgeWindow
	conf.InitialConnectionReceiveWindow = edgeWindow
	conf.MaxConnectionReceiveWindow = edgeWindow
	conf.MaxIncomingStreams = -1
	conf.MaxIncomingUniStreams = -1
	var refused error // what our own check of the certificate said
	tc := t.tls.Clone()
	verify := tc.VerifyConnection
	tc.VerifyConnection = func(cs tls.ConnectionState) error {
		err := verify(cs)
		if err != nil {
			refused = err
		}
		return err
	}
	conn, err := tr.Dial(ctx, addr, tc, conf)
	if err != nil {
		tr.Close()
		sock.Close()
		if refused != nil {
			err = refused
		}
		return nil, err
	}
	return &dialed{t: t, conn: conn, tr: tr, sock: sock}, nil
}

func resolve(ctx context.Context, addr string) (*net.UDPAddr, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	p, err := net.DefaultResolver.LookupPort(ctx, "udp", port)
	if err != nil {
		return nil, err
	}
	ips, err := net.DefaultResolver.LookupIPAddr(ctx, host)
	if err != nil {
		return nil, err
	}
	if len(ips) == 0 {
		return nil, fmt.Errorf("%s has no address", host)
	}
	// A name may have several addresses: attempts go through them at random.
	ip := ips[rand.IntN(len(ips))]
	return &net.UDPAddr{IP: ip.IP, Port: p, Zone: ip.Zone}, nil
}

// Acknowledged positions are saved when none has come for saveQuiet, and after
// saveEvery if they keep coming. After a crash, losing some costs comparing a
// few more batches. For a copy of the store that is restored later it decides
// how much is sent twice: what the hub acknowledged beyond the saved positions,
// if the hub has gone on by more batches than its ladder holds. So a copy made
// when everything had arrived is to have it all, and saving must not compete
// with publishers for the disk while they are busy.
const (
	saveQuiet = 50 * time.Millisecond
	saveEvery = time.Second
)

// save stores states that changed, coalesced.
func (e *Edge) save(ctx context.Context) {
	defer close(e.saved)
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.saver:
		}
		latest := time.After(saveEvery)
		for quiet := false; !quiet; {
			select {
			case <-ctx.Done():
				return
			case <-e.saver:
				continue
			case <-time.After(saveQuiet):
			case <-latest:
			}
			quiet = true
		}
		for _, x := range e.exports {
			if err := x.save(false); err != nil {
				x.fail(err)
			}
		}
	}
}

// Status returns a snapshot.
func (e *Edge) Status() EdgeStatus {
	e.mu.Lock()
	st, s := e.status, e.session
	e.mu.Unlock()
	if s != nil && st.Connected {
		st.RTT = s.d.conn.ConnectionStats().SmoothedRTT
	}
	st.Exports = make([]ExportStatus, 0, len(e.exports))
	for _, x := range e.exports {
		st.Exports = append(st.Exports, x.status())
	}
	return st
}

// EdgeID returns the public device key.
func (e *Edge) EdgeID() string { return e.cred.deviceID }
