package broker

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"golang.org/x/crypto/bcrypt"
)

// until waits for cond, which something under way makes true.
func until(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	for end := time.Now().Add(patience); !cond(); {
		if time.Now().After(end) {
			tb.Fatalf("timed out: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestAuth(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("hashed"), bcrypt.MinCost)
	check(t, err)
	kp, err := nkeys.CreateUser()
	check(t, err)
	pub, err := kp.PublicKey()
	check(t, err)
	other, err := nkeys.CreateUser()
	check(t, err)
	s := run(t, Options{
		AuthToken: "tok", AuthTimeout: time.Minute,
		Users: []User{{Name: "ada", Password: "pw"}, {Name: "bob", Password: string(hash)}, {NKey: pub}},
	})
	sign := func(kp nkeys.KeyPair) nats.SignatureHandler {
		return func(n []byte) ([]byte, error) { return kp.Sign(n) }
	}
	for name, tc := range map[string]struct {
		opt nats.Option
		ok  bool
	}{
		"password":       {nats.UserInfo("ada", "pw"), true},
		"bcrypt":         {nats.UserInfo("bob", "hashed"), true},
		"token":          {nats.Token("tok"), true},
		"nkey":           {nats.Nkey(pub, sign(kp)), true},
		"nothing":        {nats.Name("x"), false},
		"wrong password": {nats.UserInfo("ada", "pw2"), false},
		"wrong bcrypt":   {nats.UserInfo("bob", "pw"), false},
		"hash itself":    {nats.UserInfo("bob", string(hash)), false},
		"unknown user":   {nats.UserInfo("eve", ""), false},
		"wrong token":    {nats.Token("tok2"), false},
		"wrong key":      {nats.Nkey(pub, sign(other)), false},
	} {
		t.Run(name, func(t *testing.T) {
			nc, err := nats.Connect(s.ClientURL(), tc.opt, nats.Timeout(patience))
			if tc.ok {
				check(t, err)
				check(t, nc.Flush())
				nc.Close()
			} else if !errors.Is(err, nats.ErrAuthorization) {
				t.Errorf("error %v", err)
			}
		})
	}
	r := rawDial(t, s)
	if !strings.Contains(r.info, `"auth_required":true`) || !strings.Contains(r.info, `"nonce":"`) {
		t.Errorf("INFO %s", r.info)
	}
	r.send("PUB a 1\r\nx\r\n")
	r.expect("-ERR 'Authorization Violation'\r\n")
	r.expectEOF()
	if s.Stats().AuthErrors != 8 {
		t.Errorf("%d authentication errors, want 8", s.Stats().AuthErrors)
	}

	open := run(t, Options{Users: []User{{Name: "ada", Password: "pw"}, {Name: "guest"}}, NoAuthUser: "guest"})
	r = rawDial(t, open)
	r.send("SUB > 1\r\n") // without CONNECT it is guest
	r.expect("+OK\r\n")
	until(t, "guest by default", func() bool { c := open.Conns(); return len(c) == 1 && c[0].User == "guest" })
	r.send(`CONNECT {"user":"ada","pass":"pw","verbose":false}` + "\r\nPING\r\n")
	r.expect("PONG\r\n")
	until(t, "ada", func() bool { c := open.Conns(); return len(c) == 1 && c[0].User == "ada" })
	_ = r.conn.Close()
	until(t, "gone", func() bool { return len(open.Conns()) == 0 })
	dial(t, open)
	until(t, "guest", func() bool { c := open.Conns(); return len(c) == 1 && c[0].User == "guest" })
}

func TestDefaultAuthTimeout(t *testing.T) {
	for want, opts := range map[time.Duration]Options{
		2 * time.Second:  {},
		3 * time.Second:  {TLS: &tls.Config{}},
		11 * time.Second: {TLS: &tls.Config{}, TLSOptions: TLSOptions{Timeout: 10 * time.Second}},
		time.Second:      {TLS: &tls.Config{}, AuthTimeout: time.Second},
	} {
		set, err := newSettings(opts)
		check(t, err)
		if set.AuthTimeout != want {
			t.Errorf("%s, want %s", set.AuthTimeout, want)
		}
	}
}

// A responder that takes too long may not answer any more.
func TestResponsesExpire(t *testing.T) {
	only := &Permissions{Subscribe: SubjectPermission{Allow: []string{"svc"}}, Responses: &ResponsePermission{Max: -1, Expires: time.Nanosecond}}
	s := run(t, Options{Users: []User{{Name: "late", Password: "l", Permissions: only}, {Name: "b", Password: "b"}}})
	late, b := rawAs(t, s, "late", "l"), rawAs(t, s, "b", "b")
	late.send("SUB svc 1\r\nPING\r\n")
	late.expect("PONG\r\n")
	b.send("PUB svc re 0\r\n\r\n")
	late.expect("MSG svc 1 re 0\r\n\r\n")
	late.send("PUB re 0\r\n\r\n")
	late.expect("-ERR 'Permissions Violation for Publish to \"re\"'\r\n")
}

func TestAuthTimeout(t *testing.T) {
	s := run(t, Options{AuthToken: "t", AuthTimeout: 20 * time.Millisecond})
	r := rawDial(t, s)
	r.expect("-ERR 'Authentication Timeout'\r\n")
	r.expectEOF()
}

func TestPermissions(t *testing.T) {
	s := run(t, Options{Users: []User{
		{Name: "all", Password: "x"},
		{Name: "some", Password: "x", Permissions: &Permissions{
			Publish:   SubjectPermission{Allow: []string{"out.*", "svc"}, Deny: []string{"out.secret"}},
			Subscribe: SubjectPermission{Allow: []string{"in.>", "_INBOX.>"}, Deny: []string{"in.secret"}},
		}},
		{Name: "svc", Password: "x", Permissions: &Permissions{Subscribe: SubjectPermission{Allow: []string{"svc", "only q"}}, Responses: &ResponsePermission{}}},
	}})
	const con = `CONNECT {"verbose":false,"headers":true,"no_responders":true,"pass":"x","user":`
	r := rawDial(t, s)
	r.send(con + "\"some\"}\r\nPUB out.a 0\r\n\r\nPUB out.secret 0\r\n\r\nPUB out.a.b 0\r\n\r\nPUB out.secret 0\r\n\r\nSUB in.secret 1\r\nSUB in.a 2\r\nSUB out.a g 3\r\nSUB in.* 4\r\nSUB in.secret q 5\r\nPING\r\n")
	r.expect("-ERR 'Permissions Violation for Publish to \"out.secret\"'\r\n")
	r.expect("-ERR 'Permissions Violation for Publish to \"out.a.b\"'\r\n")
	r.expect("-ERR 'Permissions Violation for Publish to \"out.secret\"'\r\n")
	r.expect("-ERR 'Permissions Violation for Subscription to \"in.secret\"'\r\n")
	r.expect("-ERR 'Permissions Violation for Subscription to \"out.a\" using queue \"g\"'\r\n")
	r.expect("-ERR 'Permissions Violation for Subscription to \"in.secret\" using queue \"q\"'\r\n")
	r.expect("PONG\r\n")
	all := dial(t, s, nats.UserInfo("all", "x"))
	check(t, all.Publish("in.secret", []byte("hidden")))
	check(t, all.Publish("in.open", []byte("seen")))
	check(t, all.Flush())
	r.expect("MSG in.open 4 4\r\nseen\r\n")

	svc := rawDial(t, s)
	svc.send(con + "\"svc\"}\r\nSUB svc 1\r\nSUB only 2\r\nSUB only q 3\r\nPUB free 0\r\n\r\nPING\r\n")
	svc.expect("-ERR 'Permissions Violation for Subscription to \"only\"'\r\n-ERR 'Permissions Violation for Publish to \"free\"'\r\nPONG\r\n")
	r.send("PUB svc _INBOX.1 2\r\nhi\r\n")
	svc.expect("MSG svc 1 _INBOX.1 2\r\nhi\r\n")
	r.send("SUB _INBOX.1 9\r\nPING\r\n")
	r.expect("PONG\r\n")
	svc.send("PUB _INBOX.1 2\r\nho\r\nPUB _INBOX.1 2\r\nho\r\nPING\r\n")
	svc.expect("-ERR 'Permissions Violation for Publish to \"_INBOX.1\"'\r\nPONG\r\n")
	r.expect("MSG _INBOX.1 9 2\r\nho\r\n")
}

// TestUnansweredRequests has a client with permission for responses get many
// more requests than it answers: they are forgotten one by one, and at a cost
// that does not grow with their number.
func TestUnansweredRequests(t *testing.T) {
	p := newPerms(&Permissions{Responses: &ResponsePermission{}})
	expect := func(from, to int) time.Duration {
		start := time.Now()
		for i := from; i < to; i++ {
			p.expect(fmt.Appendf(nil, "r.%d", i))
			if len(p.replies) > maxReplies {
				t.Fatalf("%d replies remembered, want %d at most", len(p.replies), maxReplies)
			}
		}
		return time.Since(start)
	}
	few := expect(0, maxReplies)
	if _, ok := p.replies["r.0"]; !ok || len(p.replies) != maxReplies {
		t.Fatalf("%d replies remembered, want %d", len(p.replies), maxReplies)
	}
	const rounds = 5
	many := time.Hour // on a busy machine a round may take long
	for i := range rounds {
		many = min(many, expect((1+i)*maxReplies, (2+i)*maxReplies))
	}
	if many > 20*few+time.Second {
		t.Errorf("%d requests took %v at best, as many before that %v", maxReplies, many, few)
	}
	if _, ok := p.replies[fmt.Sprintf("r.%d", (1+rounds)*maxReplies-1)]; !ok {
		t.Error("the last request is forgotten")
	}

	for k, r := range p.replies {
		r.expires = time.Now().Add(-time.Minute)
		p.replies[k] = r
	}
	p.pruned = time.Time{}
	p.expect([]byte("new"))
	if len(p.replies) != 1 {
		t.Errorf("%d replies remembered after all but one have expired", len(p.replies))
	}
}

func TestOptions(t *testing.T) {
	for want, o := range map[string]Options{
		"port 70000":     {Port: 70000},
		"invalid subj":   {Users: []User{{Name: "a", Permissions: &Permissions{Publish: SubjectPermission{Allow: []string{"a..b"}}}}}},
		"twice":          {Users: []User{{Name: "a"}, {Name: "a"}}},
		"neither a name": {Users: []User{{}}},
		"nkey":           {Users: []User{{NKey: "UABC"}}},
		"no_auth_user":   {NoAuthUser: "x"},
		"max_pending":    {MaxPending: 1000},
		"max_payload":    {MaxPayload: 1 << 30},
	} {
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
	s := run(t, Options{})
	port := s.Addr().(*net.TCPAddr).Port
	twin, err := New(Options{Host: "127.0.0.1", Port: port})
	check(t, err)
	if err := twin.Start(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("127.0.0.1:%d: address already in use; ", port)) {
		t.Errorf("error %v", err)
	}
}

func TestMaxConn(t *testing.T) {
	s := run(t, Options{MaxConn: 2})
	dial(t, s)
	a := dial(t, s)
	r := rawDial(t, s)
	r.expect("-ERR 'maximum connections exceeded'\r\n")
	r.expectEOF()
	a.Close()
	until(t, "place for a third client", func() bool { return s.Stats().Connections == 1 })
	dial(t, s)
}

func TestMaxSubs(t *testing.T) {
	s := run(t, Options{MaxSubs: 1})
	r := rawDial(t, s)
	r.send(quiet + "SUB a 1\r\nSUB b 2\r\nUNSUB 1\r\nSUB b 3\r\nPUB b 0\r\n\r\nPING\r\n")
	r.expect("-ERR 'maximum subscriptions exceeded'\r\nMSG b 3 0\r\n\r\nPONG\r\n")
}

// TestStale lets the time between pings pass for a client that answers and one
// that does not.
func TestStale(t *testing.T) {
	s := run(t, Options{PingInterval: time.Hour})
	live := dial(t, s)
	r := rawDial(t, s)
	r.send(quiet)
	until(t, "both are served", func() bool { return len(s.Conns()) == 2 })
	tick := func(id uint64) {
		s.mu.Lock()
		c := s.clients[id]
		s.mu.Unlock()
		c.pingTick()
	}
	answers, mute := s.Conns()[0].ID, s.Conns()[1].ID
	for i := range 4 {
		tick(answers)
		until(t, "the answer to a ping", func() bool { return s.clientPings(answers) == 0 })
		if i < 3 {
			tick(mute)
		}
	}
	r.expect("PING\r\nPING\r\n-ERR 'Stale Connection'\r\n")
	r.expectEOF()
	check(t, live.Flush())
	if st := s.Stats(); st.StaleConns != 1 || live.Stats().Reconnects != 0 {
		t.Errorf("%d stale, %d reconnects", st.StaleConns, live.Stats().Reconnects)
	}
	until(t, "round trip time", func() bool { c := s.Conns(); return len(c) == 1 && c[0].RTT > 0 })
}

// clientPings is how many pings a client has not answered.
func (s *Server) clientPings(id uint64) int {
	s.mu.Lock()
	c := s.clients[id]
	s.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pings
}

// TestPinger: pings are sent by the time that passes.
func TestPinger(t *testing.T) {
	s := run(t, Options{PingInterval: 10 * time.Millisecond, MaxPingsOut: 3})
	r := rawDial(t, s)
	r.send(quiet)
	r.expect("PING\r\nPING\r\nPING\r\n-ERR 'Stale Connection'\r\n")
}

func TestTLS(t *testing.T) {
	ca := newAuthority(t)
	pool := ca.pool
	s := run(t, Options{TLS: ca.server(t)})
	a, b := dial(t, s, nats.Secure(&tls.Config{RootCAs: pool})), dial(t, s, nats.Secure(&tls.Config{RootCAs: pool}))
	sub := subscribe(t, a, "t")
	data := bytes.Repeat([]byte("x"), 300<<10)
	for range 20 {
		check(t, b.Publish("t", data))
	}
	check(t, b.Publish("t", []byte("last")))
	check(t, b.Flush())
	for range 20 {
		if m := next(t, sub); !bytes.Equal(m.Data, data) {
			t.Fatal("payload changed")
		}
	}
	if m := next(t, sub); string(m.Data) != "last" {
		t.Errorf("got %q", m.Data)
	}
	r := rawDial(t, s)
	if !strings.Contains(r.info, `"tls_required":true`) {
		t.Errorf("INFO %s", r.info)
	}
	r.send(quiet + "PING\r\n")
	if rest, _ := io.ReadAll(r.r); bytes.Contains(rest, []byte("PONG")) {
		t.Error("plain text served although TLS is required")
	}
}

// TestSlowConsumer has a client that reads nothing while another is flooded
// along with it.
func TestSlowConsumer(t *testing.T) {
	for name, o := range map[string]Options{
		"pending":  {MaxPayload: 1 << 20, MaxPending: 4 << 20},
		"deadline": {WriteDeadline: 2 * time.Second}, // longer than the other does not get a processor
	} {
		t.Run(name, func(t *testing.T) {
			s := run(t, o)
			slow := rawDial(t, s)
			slow.send(quiet + "SUB flood 1\r\nPING\r\n")
			slow.expect("PONG\r\n")
			good, pub := dial(t, s), dial(t, s)
			var got atomic.Int64
			_, err := good.Subscribe("flood", func(*nats.Msg) { got.Add(1) })
			check(t, err)
			check(t, good.Flush())
			data := make([]byte, 16<<10)
			var sent int64
			for end := time.Now().Add(patience); s.Stats().SlowConsumers == 0; {
				if time.Now().After(end) {
					t.Fatal("slow consumer was not disconnected")
				}
				for range 64 {
					check(t, pub.Publish("flood", data))
					sent++
				}
				check(t, pub.Flush())
				// So that it never has much pending, however busy the machine is.
				until(t, "healthy consumer gets everything", func() bool { return got.Load() == sent })
			}
			if good.Stats().Reconnects != 0 || s.Stats().SlowConsumers != 1 || s.Stats().Connections != 2 {
				t.Errorf("%+v", s.Stats())
			}
		})
	}
}

// TestLargestMessage has the largest message delivered where max_pending is no
// larger, beside something that is queued already, and one that is larger than
// both, such as hubs get from edges.
func TestLargestMessage(t *testing.T) {
	const size = 1 << 20
	s := run(t, Options{MaxPayload: size, MaxPending: size})
	nc, pub := dial(t, s), dial(t, s)
	sub, err := nc.SubscribeSync("large.>")
	check(t, err)
	check(t, nc.Flush())
	taken := func() bool { // what a client has read may count as queued for a moment
		return !slices.ContainsFunc(s.Conns(), func(c ConnInfo) bool { return c.Pending > 0 })
	}
	for i := range 3 {
		m := &nats.Msg{Subject: "large." + strings.Repeat("s", 1000), Data: make([]byte, size)}
		until(t, "everything is taken", taken)
		s.Account().Publish("large.before", "", nil, []byte("queued"))
		s.Account().Publish(m.Subject, "", []byte("NATS/1.0\r\nAdded-By: JetStream\r\n\r\n"), make([]byte, 2*size))
		for _, want := range []int{len("queued"), 2 * size} {
			got, err := sub.NextMsg(patience)
			if err != nil {
				t.Fatalf("message %d: %v", i, err)
			}
			if len(got.Data) != want {
				t.Fatalf("message %d has %d octets, want %d", i, len(got.Data), want)
			}
		}
		until(t, "everything is taken", taken)
		check(t, pub.PublishMsg(m))
		if got, err := sub.NextMsg(patience); err != nil || len(got.Data) != size {
			t.Fatalf("message %d: %v", i, err)
		}
	}
	if n := s.Stats().SlowConsumers; n != 0 {
		t.Errorf("%d slow consumers", n)
	}
}

// TestBackPressure has a consumer that starts to read only when its producer
// is held back, and a limit far below what is sent.
func TestBackPressure(t *testing.T) {
	// However slow the machine is: the reader is waited for until it has read.
	s := run(t, Options{MaxPending: 4 << 20}, func(s *Server) { s.stallMax, s.stuckAfter = time.Minute, time.Minute })
	r := rawDial(t, s)
	r.send(quiet + "SUB flood 1\r\nPING\r\n")
	r.expect("PONG\r\n")
	_ = r.conn.SetDeadline(noDeadline)
	const total = 6000
	one := "MSG flood 1 8192\r\n" + strings.Repeat("x", 8192) + "\r\n"
	done := make(chan error, 1)
	go func() {
		for end := time.Now().Add(patience); s.Stats().Stalls == 0 && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		buf := make([]byte, 256<<10)
		left := total * len(one)
		for left > 0 {
			n, err := r.conn.Read(buf)
			if err != nil {
				done <- fmt.Errorf("%d octets missing: %w", left, err)
				return
			}
			left -= n
		}
		done <- nil
	}()
	pub := dial(t, s)
	data := []byte(strings.Repeat("x", 8192))
	for range total {
		check(t, pub.Publish("flood", data))
	}
	check(t, pub.Flush())
	check(t, <-done)
	if st := s.Stats(); st.Stalls == 0 || st.SlowConsumers != 0 {
		t.Errorf("%d stalls, %d slow consumers", st.Stalls, st.SlowConsumers)
	}
}

// TestBadInput throws garbage at the server while a healthy client works.
func TestBadInput(t *testing.T) {
	s := run(t, Options{MaxPending: 2 << 20})
	// Some of the garbage is well-formed enough to reach the service.
	ignore := nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})
	svc, nc := dial(t, s, ignore), dial(t, s)
	_, err := svc.Subscribe("svc", func(m *nats.Msg) { _ = m.Respond(m.Data) })
	check(t, err)
	check(t, svc.Flush())
	ctx, cancel := context.WithCancel(t.Context())
	var healthy sync.WaitGroup
	var served int
	healthy.Add(1)
	go func() {
		defer healthy.Done()
		for ctx.Err() == nil {
			m, err := nc.Request("svc", []byte("ping"), patience)
			if err != nil || string(m.Data) != "ping" {
				t.Errorf("healthy client: %v", err)
				return
			}
			served++
		}
	}()
	rnd := mrand.New(mrand.NewPCG(3, 4))
	noise := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		return string(b)
	}
	inputs := []string{
		"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"\x16\x03\x01" + noise(500),
		quiet + "PUB svc 1000000\r\nshort\r\n",
		quiet + "PUB svc 3\r\nmuch longer than that\r\n",
		quiet + "PUB svc 1048577\r\n",
		quiet + "HPUB svc 1048576 1048576\r\n" + strings.Repeat("A: b\r\n", 174762) + "\r\n\r\n\r\n",
		quiet + "HPUB svc 999999999999 1\r\n",
		"CONNECT {" + strings.Repeat("[", 4000) + "\r\n",
		"CONNECT " + strings.Repeat("x", 10<<20),
		quiet + "SUB " + strings.Repeat("a.", 5<<20) + " 1\r\n",
		quiet + strings.Repeat("PING\r\n", 200000),
		quiet + strings.Repeat("SUB > 1\r\nUNSUB 1\r\n", 5000),
		strings.Repeat("\r\n", 1000),
		strings.Repeat("P", 100000),
		quiet + "PUB " + strings.Repeat(" ", 4000) + "a 0\r\n\r\n",
	}
	for range 30 {
		inputs = append(inputs, noise(2000), quiet+[]string{"PUB ", "SUB ", "HPUB ", "UNSUB ", "CONNECT "}[rnd.IntN(5)]+noise(300))
	}
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	var wg sync.WaitGroup
	gate := make(chan struct{}, 8)
	for _, in := range inputs {
		gate <- struct{}{}
		wg.Add(1)
		go func() {
			defer func() { <-gate; wg.Done() }()
			conn, err := net.Dial("tcp", s.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = conn.Close() }()
			_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
			_, _ = io.WriteString(conn, in) // answers are not read until then
			_ = conn.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, conn)
		}()
	}
	wg.Wait()
	cancel()
	healthy.Wait()
	until(t, "bad clients are gone", func() bool { return s.Stats().Connections == 2 })
	if served == 0 || nc.Stats().Reconnects+svc.Stats().Reconnects != 0 {
		t.Errorf("healthy client: %d requests, reconnected %d times", served, nc.Stats().Reconnects)
	}
	var after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 64<<20 {
		t.Errorf("heap has grown by %d octets", grown)
	}
	if n := s.Account().index.Len(); n != 2 {
		t.Errorf("%d subscriptions left, want 2", n)
	}
}

func TestShutdownSendsWhatIsQueued(t *testing.T) {
	s, err := New(Options{Host: "127.0.0.1", Port: -1})
	check(t, err)
	check(t, s.Start())
	r := rawDial(t, s)
	r.send(quiet + "SUB a 1\r\nPING\r\n")
	r.expect("PONG\r\n")
	data := strings.Repeat("x", 1<<20)
	for range 8 {
		s.Account().Publish("a", "", nil, []byte(data))
	}
	end := make(chan error, 1)
	go func() { end <- s.Shutdown(t.Context()) }()
	for range 8 {
		r.expect(fmt.Sprintf("MSG a 1 %d\r\n%s\r\n", len(data), data))
	}
	r.expectEOF()
	_ = r.conn.Close()
	check(t, <-end)
	if _, err := net.Dial("tcp", s.Addr().String()); err == nil {
		t.Error("still listening")
	}
	if err := s.Start(); err == nil {
		t.Error("started again")
	}
}

func TestShutdownCutsOff(t *testing.T) {
	s, err := New(Options{Host: "127.0.0.1", Port: -1})
	check(t, err)
	check(t, s.Start())
	r := rawDial(t, s)
	r.send(quiet + "SUB a 1\r\nPING\r\n")
	r.expect("PONG\r\n")
	for range 20 {
		s.Account().Publish("a", "", nil, make([]byte, 1<<20)) // is not read
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// TestChurn has clients come and go, subscribe and unsubscribe, while others
// publish: what was acknowledged as subscribed gets every later message.
func TestChurn(t *testing.T) {
	s := run(t, Options{})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		pub := dial(t, s)
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				_ = pub.Publish(fmt.Sprintf("churn.%d", i%50), []byte("noise"))
				if i%100 == 0 {
					_ = pub.Flush()
				}
			}
		}()
	}
	var workers sync.WaitGroup
	for w := range 4 {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for i := range 25 {
				nc, err := nats.Connect(s.ClientURL(), nats.Timeout(patience))
				if err != nil {
					t.Error(err)
					return
				}
				subj := fmt.Sprintf("own.%d.%d", w, i)
				sub, _ := nc.SubscribeSync(subj)
				_, _ = nc.Subscribe("churn.*", func(*nats.Msg) {})
				_, _ = nc.QueueSubscribe("churn.>", "q", func(*nats.Msg) {})
				_ = sub.AutoUnsubscribe(10)
				_ = nc.Flush()
				for range 10 {
					s.Account().Publish(subj, "", nil, []byte("x"))
				}
				for k := range 10 {
					if _, err := sub.NextMsg(patience); err != nil {
						t.Errorf("message %d: %v", k, err)
					}
				}
				nc.Close()
			}
		}()
	}
	workers.Wait()
	close(stop)
	wg.Wait()
	until(t, "subscriptions of clients gone are removed", func() bool { return s.Stats().Subscriptions == 0 })
}
