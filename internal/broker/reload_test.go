package broker

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/crypto/bcrypt"

	"petiole/internal/subject/transform"
)

func user(name, pass string, pub, sub []string) User {
	return User{Name: name, Password: pass, Permissions: &Permissions{
		Publish: SubjectPermission{Allow: pub}, Subscribe: SubjectPermission{Allow: sub},
	}}
}

func rawAs(t *testing.T, s *Server, name, pass string) *raw {
	t.Helper()
	r := rawDial(t, s)
	r.send(fmt.Sprintf("CONNECT {\"user\":%q,\"pass\":%q,\"verbose\":false,\"headers\":true,\"protocol\":1}\r\nPING\r\n", name, pass))
	r.expect("PONG\r\n")
	line, err := r.r.ReadString('\n')
	check(t, err)
	if !strings.HasPrefix(line, "INFO {") || !strings.Contains(line, `"connect_info":true,"remote_account":"$G"`) {
		t.Fatalf("after the first PONG %q", line)
	}
	return r
}

func TestReloadUsers(t *testing.T) {
	opts := Options{Users: []User{
		user("stays", "a", []string{"p.>"}, []string{"s.>", "q"}),
		user("gone", "b", nil, nil), user("new password", "c", nil, nil),
	}}
	s := run(t, opts)
	stays, gone, changed := rawAs(t, s, "stays", "a"), rawAs(t, s, "gone", "b"), rawAs(t, s, "new password", "c")
	stays.send("SUB s.1 1\r\nSUB s.2 2\r\nSUB q grp 3\r\nPUB p.1 0\r\n\r\nPING\r\n")
	stays.expect("PONG\r\n")
	opts.Users = []User{
		user("stays", "a", []string{"o.>", "s.>"}, []string{"s.1"}),
		user("new password", "d", nil, nil),
	}
	check(t, s.Reload(opts))
	gone.expectEOF()
	changed.expect("-ERR 'Authorization Violation'\r\n")
	changed.expectEOF()
	// In any order: subscriptions are in a map.
	want := map[string]bool{
		"-ERR 'Permissions Violation for Subscription to \"s.2\" (sid \"2\")'\r\n":                   true,
		"-ERR 'Permissions Violation for Subscription to \"q\" using queue \"grp\" (sid \"3\")'\r\n": true,
	}
	for range 2 {
		line, err := stays.r.ReadString('\n')
		check(t, err)
		if !want[line] {
			t.Errorf("got %q", line)
		}
		delete(want, line)
	}
	// What was permitted to it is not any more, although it is remembered.
	stays.send("PUB p.1 0\r\n\r\nPUB s.1 1\r\nx\r\nPUB s.2 1\r\nx\r\nPING\r\n")
	stays.expect("-ERR 'Permissions Violation for Publish to \"p.1\"'\r\nMSG s.1 1 1\r\nx\r\nPONG\r\n")
	rawAs(t, s, "new password", "d")
	if st := s.Stats(); st.Subscriptions != 1 {
		t.Errorf("%d subscriptions", st.Subscriptions)
	}

	// Nobody needs to log in any more; then everybody.
	check(t, s.Reload(Options{}))
	open := rawDial(t, s)
	open.send(quiet + "PING\r\n")
	open.expect("PONG\r\n")
	stays.send("SUB x 9\r\nPING\r\n")
	stays.expect("PONG\r\n")
	check(t, s.Reload(Options{AuthToken: "t"}))
	open.expect("-ERR 'Authorization Violation'\r\n")
	open.expectEOF()
	stays.expectEOF() // its user is gone
}

func TestReloadDeniesPartOfASubscription(t *testing.T) {
	opts := Options{Users: []User{{Name: "a", Password: "a"}}}
	s := run(t, opts)
	r := rawAs(t, s, "a", "a")
	r.send("SUB x.> 1\r\nPUB x.secret 0\r\n\r\n")
	r.expect("MSG x.secret 1 0\r\n\r\n")
	opts.Users = []User{{Name: "a", Password: "a", Permissions: &Permissions{Subscribe: SubjectPermission{Deny: []string{"x.secret"}}}}}
	check(t, s.Reload(opts))
	r.send("PUB x.secret 0\r\n\r\nPUB x.open 0\r\n\r\n")
	r.expect("MSG x.open 1 0\r\n\r\n")
	opts.Users[0].Permissions = nil
	check(t, s.Reload(opts))
	r.send("PUB x.secret 0\r\n\r\n")
	r.expect("MSG x.secret 1 0\r\n\r\n")
}

// A client that becomes another user while permissions are looked at again has
// those of the user that it has become.
func TestReloadWhileAClientBecomesAnotherUser(t *testing.T) {
	slow, err := bcrypt.GenerateFromPassword([]byte("a"), bcrypt.MinCost) // so that there is time for it
	check(t, err)
	options := func(extra string) Options {
		return Options{Users: []User{
			user("ada", string(slow), []string{"a", extra}, nil), user("bob", "b", []string{"b", extra}, nil),
		}}
	}
	s := run(t, options("x"))
	r := rawAs(t, s, "ada", "a")
	for i := range 20 {
		reloaded := make(chan error, 1)
		go func() { reloaded <- s.Reload(options(fmt.Sprintf("x%d", i))) }()
		r.send("CONNECT {\"user\":\"bob\",\"pass\":\"b\"}\r\nPING\r\n")
		r.expect("PONG\r\n")
		check(t, <-reloaded)
		r.send("PUB b 0\r\n\r\nPUB a 0\r\n\r\nCONNECT {\"user\":\"ada\",\"pass\":\"a\"}\r\nPING\r\n")
		r.expect("-ERR 'Permissions Violation for Publish to \"a\"'\r\nPONG\r\n")
	}
}

// What a client logged in with is compared with a hash anew only if that is
// another one: with many clients a reload would take minutes.
func TestReloadComparesNoHashTwice(t *testing.T) {
	var compared atomic.Int64
	compareHash = func(hash, password []byte) error {
		compared.Add(1)
		return bcrypt.CompareHashAndPassword(hash, password)
	}
	defer func() { compareHash = bcrypt.CompareHashAndPassword }()
	hash := func(password string) string {
		h, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
		check(t, err)
		return string(h)
	}
	first, second, guest := hash("a"), hash("a"), hash("g")
	options := func(ada, extra string) Options {
		return Options{NoAuthUser: "guest", Users: []User{user("ada", ada, []string{extra}, nil), user("guest", guest, []string{extra}, nil)}}
	}
	s := run(t, options(first, "x"))
	ada, nobody := rawAs(t, s, "ada", "a"), rawDial(t, s)
	nobody.send(quiet + "PING\r\n")
	nobody.expect("PONG\r\n")
	for i, step := range []struct {
		opts Options
		want int64
	}{{options(first, "y"), 1}, {options(second, "y"), 2}, {options(second, "z"), 2}} {
		check(t, s.Reload(step.opts))
		ada.send("PING\r\n")
		ada.expect("PONG\r\n")
		if n := compared.Load(); n != step.want {
			t.Errorf("%d comparisons after reload %d, want %d", n, i, step.want)
		}
	}
	// The guest has shown nothing.
	opts := options(second, "z")
	opts.NoAuthUser, opts.AuthToken = "", guest
	check(t, s.Reload(opts))
	nobody.expect("-ERR 'Authorization Violation'\r\n")
	check(t, s.Reload(options(hash("b"), "z")))
	ada.expect("-ERR 'Authorization Violation'\r\n")
}

func TestReloadLimits(t *testing.T) {
	s := run(t, Options{})
	r := rawDial(t, s)
	r.send(quiet + "SUB > 1\r\nPUB a 3\r\nabc\r\n")
	r.expect("MSG a 1 3\r\nabc\r\n")
	check(t, s.Reload(Options{
		MaxPayload: 2, MaxSubs: 1, PingInterval: time.Hour,
		Mappings: []transform.Mapping{mapTo("a", "b")},
	}))
	r.send("SUB x 2\r\nPUB a 1\r\na\r\n")
	r.expect("-ERR 'maximum subscriptions exceeded'\r\nMSG b 1 1\r\na\r\n")
	r.send("PUB a 3\r\nabc\r\n")
	r.expect("-ERR 'Maximum Payload Violation'\r\n")
	r.expectEOF()

	rs := make([]*raw, 5)
	for i := range rs {
		rs[i] = rawDial(t, s)
		rs[i].send(quiet + "PING\r\n")
		rs[i].expect("PONG\r\n")
	}
	until(t, "the other has left", func() bool { return len(s.Conns()) == 5 })
	check(t, s.Reload(Options{MaxConn: 3}))
	until(t, "clients to leave", func() bool { return len(s.Conns()) == 3 })
	left := 0
	for _, r := range rs {
		r.send("PING\r\n")
		line, err := r.r.ReadString('\n')
		switch {
		case line == "PONG\r\n":
			left++
		case line != "-ERR 'maximum connections exceeded'\r\n":
			t.Errorf("got %q, %v", line, err)
		}
	}
	if left != 3 {
		t.Errorf("%d of 3 stayed", left)
	}
	check(t, s.Reload(Options{MaxConn: -1}))
	r = rawDial(t, s)
	r.expect("-ERR 'maximum connections exceeded'\r\n")
}

func TestReloadRefuses(t *testing.T) {
	s := run(t, Options{Users: []User{{Name: "a", Password: "a"}}})
	before := s.set.Load()
	for name, o := range map[string]Options{
		"port": {Port: 4999}, "host": {Host: "0.0.0.0"}, "name": {ServerName: "x"}, "jetstream": {JetStream: true},
	} {
		if err := s.Reload(o); !errors.Is(err, ErrNeedsRestart) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := s.Reload(Options{NoAuthUser: "nobody"}); err == nil || errors.Is(err, ErrNeedsRestart) {
		t.Errorf("invalid options: %v", err)
	}
	if s.set.Load() != before {
		t.Error("something changed")
	}
	rawAs(t, s, "a", "a")
}

func TestReloadTLS(t *testing.T) {
	one, two := newAuthority(t), newAuthority(t)
	s := run(t, Options{TLS: one.server(t)})
	old := dial(t, s, secure(one))
	check(t, s.Reload(Options{TLS: two.server(t)}))
	check(t, old.Flush())
	check(t, dial(t, s, secure(two)).Flush())
	if nc, err := nats.Connect(s.ClientURL(), secure(one)); err == nil {
		nc.Close()
		t.Error("the old certificate is still shown")
	}
	check(t, s.Reload(Options{}))
	check(t, old.Flush())
	check(t, dial(t, s).Flush())
}

// TestReloadWhileClientsCome has permissions change while clients connect,
// subscribe and publish: in the end nobody has what is not permitted.
func TestReloadWhileClientsCome(t *testing.T) {
	permitted := func(n int) Options {
		return Options{Users: []User{user("a", "a", []string{fmt.Sprintf("p.%d", n)}, []string{fmt.Sprintf("s.%d", n)})}}
	}
	s := run(t, permitted(0))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := 0; ; i++ {
				conn, err := s.InProcessConn()
				if err != nil {
					t.Error(err)
					return
				}
				go func() {
					r := bufio.NewReader(conn)
					for {
						if _, err := r.ReadString('\n'); err != nil {
							return
						}
					}
				}()
				fmt.Fprintf(conn, "CONNECT {\"user\":\"a\",\"pass\":\"a\",\"verbose\":false}\r\n")
				for k := range 40 {
					fmt.Fprintf(conn, "SUB s.%d %d\r\nPUB p.%d 0\r\n\r\n", k%20, k, k%20)
				}
				if i%3 == 0 {
					t.Cleanup(func() { _ = conn.Close() })
				} else {
					_ = conn.Close()
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		}()
	}
	for n := range 20 {
		check(t, s.Reload(permitted(n)))
		time.Sleep(5 * time.Millisecond)
	}
	close(stop)
	wg.Wait()
	check(t, s.Reload(permitted(19)))
	until(t, "subscriptions to end", func() bool {
		for n := range 19 {
			if s.acc.index.Any(fmt.Sprintf("s.%d", n)) {
				return false
			}
		}
		return true
	})
	s.mu.Lock()
	clients := len(s.clients)
	for _, c := range s.clients {
		if p := c.perms.Load(); p != nil && p.pub.Allow[0] != "p.19" {
			t.Errorf("a client still has %v", p.pub)
		}
	}
	s.mu.Unlock()
	if clients == 0 {
		t.Error("no client stayed")
	}
}

func secure(a *authority) nats.Option {
	return func(o *nats.Options) error {
		o.Secure = true
		o.TLSConfig = &tls.Config{RootCAs: a.pool}
		return nil
	}
}

// TestLameDuck stays within the time of grace: clients are told and served, and
// no new ones are taken.
func TestLameDuck(t *testing.T) {
	s := run(t, Options{ConnectURLs: []string{"127.0.0.1:1"}})
	told := make(chan struct{})
	nc := dial(t, s, nats.LameDuckModeHandler(func(*nats.Conn) { close(told) }), nats.NoReconnect())
	check(t, nc.Flush())
	old := rawDial(t, s) // protocol 0: is told nothing
	old.send(quiet + "SUB still 1\r\nPING\r\n")
	old.expect("PONG\r\n")
	r := rawAs(t, s, "x", "y")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.LameDuck(ctx, 2*time.Hour, time.Hour) }()
	<-told
	line, err := r.r.ReadString('\n')
	check(t, err)
	if !strings.HasPrefix(line, "INFO {") || !strings.Contains(line, `"ldm":true`) || strings.Contains(line, "connect_urls") {
		t.Errorf("got %q", line)
	}
	if _, err := nats.Connect(s.ClientURL()); err == nil {
		t.Error("a new client is served")
	}
	if _, err := s.InProcessConn(); !errors.Is(err, ErrServerClosed) {
		t.Error(err)
	}
	check(t, nc.Publish("still", []byte("served")))
	old.expect("MSG still 1 6\r\nserved\r\n")
	if err := s.LameDuck(ctx, 1, 1); !errors.Is(err, ErrServerClosed) {
		t.Errorf("again: %v", err)
	}
	if !s.Lame() {
		t.Error("not lame")
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestLameDuckEmpties: after the time of grace all clients are disconnected.
func TestLameDuckEmpties(t *testing.T) {
	s := run(t, Options{})
	rs := make([]*raw, 7)
	for i := range rs {
		rs[i] = rawAs(t, s, "x", "y")
	}
	check(t, s.LameDuck(t.Context(), 100*time.Millisecond, 10*time.Millisecond))
	for _, r := range rs {
		line, err := r.r.ReadString('\n')
		check(t, err)
		if !strings.Contains(line, `"ldm":true`) {
			t.Errorf("got %q", line)
		}
		r.expectEOF()
	}
	until(t, "all have left", func() bool { return len(s.Conns()) == 0 })
}

func TestLameDuckEndsEarly(t *testing.T) {
	alone := run(t, Options{})
	check(t, alone.LameDuck(t.Context(), time.Hour, time.Hour))
	s := run(t, Options{})
	dial(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.LameDuck(ctx, time.Hour, time.Hour); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
