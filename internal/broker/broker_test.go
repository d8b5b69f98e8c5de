package broker

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

var noDeadline time.Time

// patience is how long tests wait for what is to happen anyway: however busy the
// machine is, it has happened by then.
const patience = time.Minute

// run starts a server on a port that the system chooses.
func run(tb testing.TB, opts Options, with ...func(*Server)) *Server {
	tb.Helper()
	opts.Host, opts.Port = "127.0.0.1", -1
	s, err := New(opts)
	if err != nil {
		tb.Fatal(err)
	}
	for _, f := range with {
		f(s)
	}
	if err := s.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			tb.Errorf("shutdown: %v", err)
		}
	})
	return s
}

func dial(tb testing.TB, s *Server, opts ...nats.Option) *nats.Conn {
	tb.Helper()
	nc, err := nats.Connect(s.ClientURL(), append([]nats.Option{nats.Timeout(patience)}, opts...)...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(nc.Close)
	return nc
}

func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func next(tb testing.TB, sub *nats.Subscription) *nats.Msg {
	tb.Helper()
	m, err := sub.NextMsg(patience)
	check(tb, err)
	return m
}

func subscribe(tb testing.TB, nc *nats.Conn, subj string) *nats.Subscription {
	tb.Helper()
	sub, err := nc.SubscribeSync(subj)
	check(tb, err)
	check(tb, nc.Flush())
	return sub
}

// raw is a client on the level of the protocol.
type raw struct {
	tb   testing.TB
	conn net.Conn
	r    *bufio.Reader
	info string
}

func rawDial(tb testing.TB, s *Server) *raw {
	tb.Helper()
	conn, err := net.Dial("tcp", s.Addr().String())
	check(tb, err)
	tb.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	r := &raw{tb: tb, conn: conn, r: bufio.NewReader(conn)}
	r.info, err = r.r.ReadString('\n')
	check(tb, err)
	return r
}

func (r *raw) send(s string) {
	r.tb.Helper()
	if _, err := io.WriteString(r.conn, s); err != nil {
		r.tb.Fatal(err)
	}
}

func (r *raw) expect(want string) {
	r.tb.Helper()
	got := make([]byte, len(want))
	n, err := io.ReadFull(r.r, got)
	if string(got) != want {
		r.tb.Fatalf("got %q (%v), want %q", got[:n], err, want)
	}
}

func (r *raw) expectEOF() {
	r.tb.Helper()
	if rest, err := io.ReadAll(r.r); err != nil || len(rest) > 0 {
		r.tb.Fatalf("got %q, %v; want end of connection", rest, err)
	}
}

const quiet = `CONNECT {"verbose":false,"headers":true,"no_responders":true}` + "\r\n"

func TestPubSub(t *testing.T) {
	s := run(t, Options{})
	a, b := dial(t, s), dial(t, s)
	lit, one, all := subscribe(t, a, "plant.1.temp"), subscribe(t, a, "plant.*.temp"), subscribe(t, a, "plant.>")
	other := subscribe(t, a, "plant.2.*")
	check(t, b.Publish("plant.1.temp", []byte("20")))
	check(t, b.Flush())
	for _, sub := range []*nats.Subscription{lit, one, all} {
		if m := next(t, sub); m.Subject != "plant.1.temp" || string(m.Data) != "20" {
			t.Errorf("%s: got %q on %q", sub.Subject, m.Data, m.Subject)
		}
	}
	check(t, a.Flush())
	if n, _, _ := other.Pending(); n != 0 {
		t.Errorf("plant.2.* got %d messages", n)
	}
	st := s.Stats()
	if st.Internal != 0 {
		t.Errorf("%d handlers", st.Internal)
	}
	h, err := s.Account().Handle("own", func(*Msg) {})
	check(t, err)
	if own := s.Stats(); own.Internal != 1 || own.Subscriptions != st.Subscriptions+1 {
		t.Errorf("with a handler: %+v", own)
	}
	h.Close()
	h.Close()
	if own := s.Stats(); own.Internal != 0 || own.Subscriptions != st.Subscriptions {
		t.Errorf("without it: %+v", own)
	}
	if st.InMsgs != 1 || st.OutMsgs != 3 || st.InBytes != 2 || st.OutBytes != 6 || st.Connections != 2 || st.Subscriptions != 4 {
		t.Errorf("stats: %+v", st)
	}
}

func TestRequestReply(t *testing.T) {
	s := run(t, Options{})
	a, b := dial(t, s), dial(t, s)
	_, err := a.Subscribe("svc", func(m *nats.Msg) { _ = m.Respond(append([]byte("re: "), m.Data...)) })
	check(t, err)
	check(t, a.Flush())
	for i := range 100 {
		m, err := b.Request("svc", []byte(strconv.Itoa(i)), patience)
		check(t, err)
		if want := "re: " + strconv.Itoa(i); string(m.Data) != want {
			t.Fatalf("got %q, want %q", m.Data, want)
		}
	}
	if _, err := b.Request("nobody", nil, patience); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("request without responder: %v", err)
	}
	old := dial(t, s, nats.UseOldRequestStyle())
	m, err := old.Request("svc", []byte("x"), patience)
	check(t, err)
	if string(m.Data) != "re: x" {
		t.Errorf("old style: %q", m.Data)
	}
}

func TestQueueGroups(t *testing.T) {
	s := run(t, Options{})
	a, b := dial(t, s), dial(t, s)
	const n = 300
	var plain, g1, g2 atomic.Int64
	per := make([]atomic.Int64, 3)
	for i := range per {
		_, err := a.QueueSubscribe("job.*", "g1", func(*nats.Msg) { g1.Add(1); per[i].Add(1) })
		check(t, err)
	}
	_, err := b.QueueSubscribe("job.>", "g2", func(*nats.Msg) { g2.Add(1) })
	check(t, err)
	_, err = b.Subscribe("job.x", func(*nats.Msg) { plain.Add(1) })
	check(t, err)
	check(t, a.Flush())
	check(t, b.Flush())
	for range n {
		check(t, a.Publish("job.x", nil))
	}
	check(t, a.Flush())
	check(t, a.Drain())
	check(t, b.Drain())
	for !a.IsClosed() || !b.IsClosed() {
		time.Sleep(time.Millisecond)
	}
	if plain.Load() != n || g1.Load() != n || g2.Load() != n {
		t.Errorf("plain %d, g1 %d, g2 %d; want %d each", plain.Load(), g1.Load(), g2.Load(), n)
	}
	for i := range per {
		if c := per[i].Load(); c < n/6 {
			t.Errorf("member %d got only %d of %d", i, c, n)
		}
	}
}

func TestDrainLosesNothing(t *testing.T) {
	s := run(t, Options{})
	a, b := dial(t, s), dial(t, s)
	var got atomic.Int64
	sub, err := a.Subscribe("d", func(*nats.Msg) { got.Add(1) })
	check(t, err)
	check(t, a.Flush())
	for range 1000 {
		check(t, b.Publish("d", []byte("x")))
	}
	check(t, b.Flush())
	check(t, sub.Drain())
	for sub.IsValid() {
		time.Sleep(time.Millisecond)
	}
	if got.Load() != 1000 {
		t.Errorf("got %d of 1000", got.Load())
	}
	check(t, b.Publish("d", []byte("x")))
	check(t, b.Flush())
	check(t, a.Flush())
	if got.Load() != 1000 {
		t.Error("message after drain")
	}
}

func TestHeaders(t *testing.T) {
	s := run(t, Options{})
	a, b := dial(t, s), dial(t, s)
	sub := subscribe(t, a, "h")
	old := rawDial(t, s)
	old.send("CONNECT {\"verbose\":false}\r\nSUB h 7\r\nPING\r\n")
	old.expect("PONG\r\n")
	m := nats.NewMsg("h")
	m.Header.Set("Nats-Msg-Id", "42")
	m.Header.Add("X", "a")
	m.Header.Add("X", "b")
	m.Data = []byte("body")
	check(t, b.PublishMsg(m))
	check(t, b.Flush())
	got := next(t, sub)
	if got.Header.Get("Nats-Msg-Id") != "42" || len(got.Header.Values("X")) != 2 || string(got.Data) != "body" {
		t.Errorf("got %v %q", got.Header, got.Data)
	}
	old.expect("MSG h 7 4\r\nbody\r\n")
	old.send("HPUB h 12 12\r\nNATS/1.0\r\n\r\n\r\n")
	old.expect("-ERR 'message headers not supported'\r\n")
	old.expectEOF()
}

func TestLargePayloads(t *testing.T) {
	s := run(t, Options{})
	b := dial(t, s)
	var subs []*nats.Subscription
	for range 3 {
		subs = append(subs, subscribe(t, dial(t, s), "big"))
	}
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(i * 7 >> 3)
	}
	sizes := []int{1 << 20, 0, 1, shareFrom - 1, shareFrom, 65535, 65536, 65537, 1<<20 - 1}
	for _, n := range sizes {
		check(t, b.Publish("big", data[:n]))
	}
	check(t, b.Flush())
	for _, sub := range subs {
		for _, n := range sizes {
			if m := next(t, sub); !bytes.Equal(m.Data, data[:n]) {
				t.Fatalf("payload of %d octets arrived changed (%d octets)", n, len(m.Data))
			}
		}
	}
	if err := b.Publish("big", make([]byte, 1<<20+1)); !errors.Is(err, nats.ErrMaxPayload) {
		t.Errorf("too large: %v", err)
	}
}

func TestEcho(t *testing.T) {
	s := run(t, Options{})
	a, b := dial(t, s, nats.NoEcho()), dial(t, s)
	sa, sb := subscribe(t, a, "e"), subscribe(t, b, "e")
	check(t, a.Publish("e", []byte("1")))
	check(t, a.Flush())
	check(t, b.Publish("e", []byte("2")))
	check(t, b.Flush())
	if m := next(t, sa); string(m.Data) != "2" {
		t.Errorf("no-echo client got %q", m.Data)
	}
	if m := next(t, sb); string(m.Data) != "1" {
		t.Errorf("got %q", m.Data)
	}
}

// TestExact compares with what nats-server 2.15.2 answers, octet by octet.
func TestExact(t *testing.T) {
	s := run(t, Options{MaxPayload: 1 << 20})
	for _, tc := range []struct{ name, send, want string }{
		{"verbose", "CONNECT {}\r\nSUB a 1\r\nPUB a 1\r\nx\r\nUNSUB 1\r\nUNSUB 99\r\nPING\r\n", "+OK\r\n+OK\r\n+OK\r\nMSG a 1 1\r\nx\r\n+OK\r\n+OK\r\nPONG\r\n"},
		{"verbose without CONNECT", "PING\r\nSUB a 1\r\nPUB a 1\r\nx\r\n", "PONG\r\n+OK\r\n+OK\r\nMSG a 1 1\r\nx\r\n"},
		{"echo off", "CONNECT {\"echo\":false}\r\nSUB foo 1\r\nPUB foo 1\r\n1\r\nPING\r\n", "+OK\r\n+OK\r\n+OK\r\nPONG\r\n"},
		{"reply", quiet + "SUB a q 1\r\nPUB a r.1 2\r\nhi\r\nPING\r\n", "MSG a 1 r.1 2\r\nhi\r\nPONG\r\n"},
		{"headers", quiet + "SUB a 1\r\nHPUB a r 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPING\r\n", "HMSG a 1 r 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPONG\r\n"},
		{"no responders", quiet + "SUB rep 1\r\nPUB nobody rep 2\r\nhi\r\nPING\r\n", "HMSG rep 1 38 38\r\nNATS/1.0 503\r\nNats-Subject: nobody\r\n\r\n\r\nPONG\r\n"},
		{"no responders without echo", "CONNECT {\"verbose\":false,\"echo\":false,\"headers\":true,\"no_responders\":true}\r\nSUB rep 1\r\nSUB own 2\r\nPUB own rep 2\r\nhi\r\nPING\r\n", "HMSG rep 1 35 35\r\nNATS/1.0 503\r\nNats-Subject: own\r\n\r\n\r\nPONG\r\n"},
		{"same sid twice", quiet + "SUB a 1\r\nSUB a 1\r\nPUB a 0\r\n\r\nPING\r\n", "MSG a 1 0\r\n\r\nPONG\r\n"},
		{"auto-unsubscribe", quiet + "SUB a 1\r\nUNSUB 1 2\r\nPUB a 1\r\n1\r\nPUB a 1\r\n2\r\nPUB a 1\r\n3\r\nPING\r\n", "MSG a 1 1\r\n1\r\nMSG a 1 1\r\n2\r\nPONG\r\n"},
		{"auto-unsubscribe late", quiet + "SUB a 1\r\nPUB a 1\r\n1\r\nPUB a 1\r\n2\r\nUNSUB 1 3\r\nPUB a 1\r\n3\r\nPUB a 1\r\n4\r\nPING\r\n", "MSG a 1 1\r\n1\r\nMSG a 1 1\r\n2\r\nMSG a 1 1\r\n3\r\nPONG\r\n"},
		{"auto-unsubscribe past", quiet + "SUB a 1\r\nPUB a 1\r\n1\r\nPUB a 1\r\n2\r\nUNSUB 1 2\r\nPUB a 1\r\n3\r\nPING\r\n", "MSG a 1 1\r\n1\r\nMSG a 1 1\r\n2\r\nPONG\r\n"},
		{"lower case, tabs, bare line feeds", quiet + "sub\ta  1\nPub a 1\nx\r\nping\n", "MSG a 1 1\r\nx\r\nPONG\r\n"},
		{"bad subject", quiet + "SUB a..b 1\r\nSUB a. 2\r\nSUB >.a 3\r\nPING\r\n", "-ERR 'Invalid Subject'\r\n-ERR 'Invalid Subject'\r\n-ERR 'Invalid Subject'\r\nPONG\r\n"},
		{"bad publish subject", quiet + "SUB > 1\r\nPUB a.* 1\r\nx\r\nPUB a..b 1\r\nx\r\nPING\r\n", "-ERR 'Invalid Publish Subject'\r\nMSG a.* 1 1\r\nx\r\n-ERR 'Invalid Publish Subject'\r\nPONG\r\n"},
		{"publish subject with wildcard, not pedantic", "CONNECT {\"verbose\":false,\"pedantic\":false}\r\nSUB > 1\r\nPUB a.* 1\r\nx\r\nPING\r\n", "MSG a.* 1 1\r\nx\r\nPONG\r\n"},
		{"protocol version", "CONNECT {\"protocol\":5}\r\nPING\r\n", "-ERR 'invalid client protocol'\r\n"},
		{"no responders need headers", "CONNECT {\"no_responders\":true}\r\nPING\r\n", "-ERR 'no responders requires headers support'\r\n"},
		{"HTTP", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "-ERR 'Unknown Protocol Operation'\r\n"},
		{"TLS hello", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "-ERR 'Unknown Protocol Operation'\r\n"},
		{"empty line", quiet + "\r\nPING\r\n", "-ERR 'Unknown Protocol Operation'\r\n"},
		{"payload longer than said", quiet + "PUB a 3\r\nhelloPING\r\n", "-ERR 'Unknown Protocol Operation'\r\n"},
		{"payload too large", quiet + "PUB a 1048577\r\n", "-ERR 'Maximum Payload Violation'\r\n"},
		{"payload too large to count", quiet + "PUB a 99999999999999999999999999\r\n", "-ERR 'Maximum Payload Violation'\r\n"},
		{"negative size", quiet + "PUB a -1\r\n", "-ERR 'Parser Error'\r\n"},
		{"header longer than message", quiet + "HPUB a 15 12\r\nNATS/1.0\r\n\r\n\r\n", "-ERR 'Parser Error'\r\n"},
		{"arguments", quiet + "SUB a b c d\r\n", "-ERR 'Parser Error'\r\n"},
		{"CONNECT not JSON", "CONNECT {\"verbose\":tru\r\n", "-ERR 'Parser Error'\r\n"},
		{"control line", quiet + "SUB " + strings.Repeat("a", 5000) + " 1\r\n", "-ERR 'maximum control line exceeded'\r\n"},
		{"control line without end", quiet + "SUB " + strings.Repeat("a", 10<<20), "-ERR 'maximum control line exceeded'\r\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := rawDial(t, s)
			go func() { _, _ = io.WriteString(r.conn, tc.send) }() // may be cut off
			r.expect(tc.want)
			if strings.HasSuffix(tc.want, "PONG\r\n") || strings.HasSuffix(tc.want, "x\r\n") {
				r.send("PING\r\n")
				r.expect("PONG\r\n")
				return
			}
			if len(tc.send) < 1<<20 {
				r.expectEOF()
			}
		})
	}
}

func TestInfo(t *testing.T) {
	s := run(t, Options{ServerName: "edge-1", JetStream: true, Version: "2.15.2", ConnectURLs: []string{"10.0.0.1:4222"}})
	r := rawDial(t, s)
	for _, want := range []string{
		`INFO {"server_id":"N`, `"server_name":"edge-1"`, `"version":"2.15.2"`, `"proto":1`, `"headers":true`, `"max_payload":1048576`,
		`"client_id":1`, `"client_ip":"127.0.0.1"`, `"jetstream":true`, `"connect_urls":["10.0.0.1:4222"]`, `"port":` + strconv.Itoa(s.Addr().(*net.TCPAddr).Port),
	} {
		if !strings.Contains(r.info, want) {
			t.Errorf("INFO lacks %s: %s", want, r.info)
		}
	}
	// What the server is called from outside is no further address: clients that
	// do not trust it under the one they were given must not try the other.
	r = rawDial(t, run(t, Options{Advertise: "edge.example:4222"}))
	if !strings.Contains(r.info, `"host":"edge.example","port":4222`) || strings.Contains(r.info, "connect_urls") {
		t.Errorf("INFO of a server with client_advertise: %s", r.info)
	}
	nc := dial(t, s)
	if nc.ConnectedServerName() != "edge-1" || nc.ConnectedServerId() != s.ID() || len(s.ID()) != 56 || nc.MaxPayload() != 1<<20 || !nc.HeadersSupported() {
		t.Errorf("client sees %q %q %d", nc.ConnectedServerName(), nc.ConnectedServerId(), nc.MaxPayload())
	}
	if rtt, err := nc.RTT(); err != nil || rtt <= 0 {
		t.Errorf("rtt %v %v", rtt, err)
	}
}

func TestHandlers(t *testing.T) {
	var reads atomic.Int64
	s := run(t, Options{AfterRead: func() { reads.Add(1) }})
	acc := s.Account()
	var who atomic.Pointer[ClientInfo]
	h, err := acc.Handle("api.*", func(m *Msg) {
		who.Store(m.Client)
		m.Respond(m.Header, append([]byte("re: "), m.Data...))
		m.Publish("log", "", nil, m.Subject)
		acc.Publish("log", "", nil, []byte("late"))
	})
	check(t, err)
	nc := dial(t, s, nats.Name("tester"))
	log := subscribe(t, nc, "log")
	req := nats.NewMsg("api.x")
	req.Header.Set("A", "b")
	req.Data = []byte("ping")
	m, err := nc.RequestMsg(req, patience)
	check(t, err)
	if string(m.Data) != "re: ping" || m.Header.Get("A") != "b" {
		t.Errorf("got %q %v", m.Data, m.Header)
	}
	seen := []string{string(next(t, log).Data), string(next(t, log).Data)}
	if seen[0] != "api.x" || seen[1] != "late" {
		t.Errorf("log %q", seen)
	}
	if c := who.Load(); c == nil || c.Name != "tester" || c.ID == 0 || c.IP != "127.0.0.1" {
		t.Errorf("client %+v", c)
	}
	until(t, "AfterRead is called", func() bool { return reads.Load() > 0 })
	h.Close()
	h.Close()
	if _, err := nc.Request("api.x", nil, patience); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("after Close: %v", err)
	}
	if _, err := acc.Handle("a..b", nil); err == nil {
		t.Error("malformed subject accepted")
	}
}

func TestPublishInside(t *testing.T) {
	s := run(t, Options{})
	acc := s.Account()
	nc := dial(t, s)
	sub := subscribe(t, nc, "in.>")
	var handled atomic.Int64
	_, err := acc.Handle("in.*", func(m *Msg) {
		if m.Client != nil {
			t.Error("message from inside has a client")
		}
		handled.Add(1)
	})
	check(t, err)
	acc.Publish("in.1", "re", nil, []byte("a"))
	acc.PublishBytes([]byte("in.2"), nil, []byte("NATS/1.0\r\nK: v\r\n\r\n"), nil)
	p := acc.NewPublisher()
	for i := range 100 {
		p.Publish("in."+strconv.Itoa(3+i), "", nil, nil)
	}
	p.Publish("in.last", "", nil, nil)
	p.Deliver("in.x", "seen.as", []byte("ack"), nil, []byte("d"))
	p.Publish("in..bad", "", nil, nil)
	p.Flush()
	for i := range 103 {
		want := "in." + strconv.Itoa(i+1)
		if i == 102 {
			want = "in.last"
		}
		if m := next(t, sub); m.Subject != want || i == 0 && m.Reply != "re" || i == 1 && m.Header.Get("K") != "v" {
			t.Fatalf("message %d: %+v, want %s", i, m, want)
		}
	}
	if m := next(t, sub); m.Subject != "seen.as" || m.Reply != "ack" || string(m.Data) != "d" {
		t.Errorf("delivered %+v", m)
	}
	if handled.Load() != 104 {
		t.Errorf("handler got %d", handled.Load())
	}
}

// TestInterestEndsWhileLocked has the last message of a subscription delivered
// by a publisher that holds a lock which its interest watch takes.
func TestInterestEndsWhileLocked(t *testing.T) {
	s := run(t, Options{})
	acc := s.Account()
	r := rawDial(t, s)
	r.send(quiet + "SUB d 1\r\nUNSUB 1 1\r\nPING\r\n")
	r.expect("PONG\r\n")
	var mu sync.Mutex
	gone := make(chan bool, 1)
	cancel := acc.WatchInterest("d", func(has bool) {
		mu.Lock()
		defer mu.Unlock()
		gone <- has
	})
	defer cancel()
	mu.Lock()
	acc.Publish("d", "", nil, nil)
	mu.Unlock()
	select {
	case has := <-gone:
		if has {
			t.Error("interest came")
		}
	case <-time.After(patience):
		t.Fatal("watch was not called")
	}
}

// TestHandlersComeAndGoWhileLocked has a handler registered and closed by one
// that holds a lock which an interest watch takes.
func TestHandlersComeAndGoWhileLocked(t *testing.T) {
	s := run(t, Options{})
	acc := s.Account()
	var mu sync.Mutex
	seen := make(chan bool, 1)
	defer acc.WatchInterest("d.e", func(has bool) {
		mu.Lock()
		defer mu.Unlock()
		seen <- has
	})()
	expect := func(want bool) {
		t.Helper()
		select {
		case has := <-seen:
			if has != want {
				t.Fatalf("interest %v, want %v", has, want)
			}
		case <-time.After(patience):
			t.Fatal("watch was not called")
		}
	}
	locked := func(f func()) {
		t.Helper()
		done := make(chan struct{})
		go func() {
			defer close(done)
			mu.Lock()
			defer mu.Unlock()
			f()
		}()
		select {
		case <-done:
		case <-time.After(patience):
			t.Fatal("waits for a watch")
		}
	}
	var sub *Subscription
	locked(func() { sub, _ = acc.Handle("d.*", func(*Msg) {}) })
	expect(true)
	locked(sub.Close)
	expect(false)
}

// TestWatchBeginsWhileLocked begins watches with a lock held that they take,
// while interest comes and goes.
func TestWatchBeginsWhileLocked(t *testing.T) {
	s := run(t, Options{})
	acc := s.Account()
	r := rawDial(t, s)
	_ = r.conn.SetDeadline(noDeadline)
	r.send(quiet)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				r.send("SUB d 1\r\nUNSUB 1\r\nSUB d 2\r\nUNSUB 2\r\nSUB d 3\r\nUNSUB 3\r\nSUB d 4\r\nUNSUB 4\r\n")
			}
		}
	}()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var mu sync.Mutex
		for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
			mu.Lock()
			cancel := acc.WatchInterest("d", func(bool) { mu.Lock(); defer mu.Unlock() })
			mu.Unlock()
			cancel()
		}
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("WatchInterest and a watch wait for each other")
	}
	close(stop)
	<-stopped
}

func TestHandlersWithoutEnd(t *testing.T) {
	s := run(t, Options{})
	acc := s.Account()
	var calls atomic.Int64
	_, err := acc.Handle("loop", func(m *Msg) { calls.Add(1); m.Publish("loop", "", nil, nil) })
	check(t, err)
	acc.Publish("loop", "", nil, nil)
	if n := calls.Load(); n != maxDepth {
		t.Errorf("%d calls, want %d", n, maxDepth)
	}
}

func TestInterest(t *testing.T) {
	s := run(t, Options{})
	acc := s.Account()
	var mu sync.Mutex
	var seen []bool
	cancel := acc.WatchInterest("deliver.me", func(has bool) { mu.Lock(); seen = append(seen, has); mu.Unlock() })
	nc := dial(t, s)
	if acc.HasInterest("deliver.me") {
		t.Error("interest before any")
	}
	a := subscribe(t, nc, "deliver.me")
	b := subscribe(t, nc, "deliver.*")
	if !acc.HasInterest("deliver.me") {
		t.Error("no interest with two subscriptions")
	}
	check(t, a.Unsubscribe())
	check(t, b.Unsubscribe())
	check(t, nc.Flush())
	_, err := nc.QueueSubscribe("deliver.>", "q", func(*nats.Msg) {})
	check(t, err)
	check(t, nc.Flush())
	nc.Close()
	for acc.HasInterest("deliver.me") {
		time.Sleep(time.Millisecond)
	}
	for {
		mu.Lock()
		n := len(seen)
		mu.Unlock()
		if n >= 4 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	cancel()
	cancel()
	subscribe(t, dial(t, s), "deliver.me")
	mu.Lock()
	defer mu.Unlock()
	if fmt.Sprint(seen) != "[true false true false]" {
		t.Errorf("seen %v", seen)
	}
}
