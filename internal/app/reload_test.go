//go:build !windows

package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"petiole/internal/admin"
	"petiole/internal/config"
	"petiole/sync/link"
)

// TestSettingsCoverTheConfiguration changes each field of the configuration and
// wants a setting that notices.
func TestSettingsCoverTheConfiguration(t *testing.T) {
	skip := map[string]bool{"Path": true, "Warnings": true, "TLS.Config": true, "Edges.TLS.Config": true}
	var walk func(path string, get func(*config.Config) reflect.Value)
	walk = func(path string, get func(*config.Config) reflect.Value) {
		if skip[path] {
			return
		}
		full := func() *config.Config {
			c := config.Default()
			c.TLS, c.Uplink, c.Edges = &config.TLS{}, &config.Uplink{}, &config.Edges{TLS: &config.TLS{}}
			return c
		}
		a, b := full(), full()
		v := get(b)
		if v.Kind() == reflect.Pointer {
			v = v.Elem()
		}
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				if f := v.Type().Field(i); f.IsExported() {
					walk(strings.TrimPrefix(path+"."+f.Name, "."), func(c *config.Config) reflect.Value {
						v := get(c)
						if v.Kind() == reflect.Pointer {
							v = v.Elem()
						}
						return v.Field(i)
					})
				}
			}
			return
		case reflect.Bool:
			v.SetBool(!v.Bool())
		case reflect.String:
			v.SetString(v.String() + "x")
		case reflect.Int, reflect.Int64:
			v.SetInt(v.Int() + 1)
		case reflect.Uint16:
			v.SetUint(v.Uint() + 1)
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		case reflect.Map:
			v.Set(reflect.MakeMap(v.Type()))
			v.SetMapIndex(reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem())
		case reflect.Array:
			v.Index(0).SetUint(1)
		default:
			t.Fatalf("%s is a %s: teach this test", path, v.Kind())
		}
		if !slices.ContainsFunc(settings, func(s setting) bool { return !reflect.DeepEqual(s.of(a), s.of(b)) }) {
			t.Errorf("a change of %s is not noticed", path)
		}
	}
	walk("", func(c *config.Config) reflect.Value { return reflect.ValueOf(c).Elem() })
}

// patience is how long tests wait for what is to happen anyway: however busy the
// machine is, it has happened by then.
const patience = time.Minute

// startNode starts a node with a configuration file.
func startNode(t *testing.T, text string) (n *Node, load func(text string) (*config.Config, error), log *lockedBuffer) {
	t.Helper()
	return startLinked(t, text, nil)
}

// startLinked is startNode with a link.
func startLinked(t *testing.T, text string, begin func(*Node) (Link, error)) (n *Node, load func(text string) (*config.Config, error), log *lockedBuffer) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "edge.conf")
	load = func(text string) (*config.Config, error) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return config.Load(path, config.Edge)
	}
	cfg, err := load(text)
	if err != nil {
		t.Fatal(err)
	}
	log = new(lockedBuffer)
	l, err := newLogger(cfg.Log, log)
	if err != nil {
		t.Fatal(err)
	}
	n, err = Start(Program{Program: config.Edge, Link: begin}, cfg, l.Logger)
	if err != nil {
		t.Fatal(err)
	}
	n.log = l
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
	})
	return n, load, log
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

const head = "listen: \"127.0.0.1:-1\"\n"

func TestReloadApplies(t *testing.T) {
	dir := t.TempDir()
	n, load, log := startNode(t, head+fmt.Sprintf("pid_file: %q\nports_file_dir: %q\n", dir+"/a.pid", dir))
	pid := func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	}
	if text, err := os.ReadFile(portsFile(dir)); err != nil || string(text) != fmt.Sprintf(`{"nats":[%q]}`, n.Broker.ClientURL()) {
		t.Errorf("ports file: %s, %v", text, err)
	}
	n.Log.Debug("unseen")
	next, err := load(head + fmt.Sprintf(`
		pid_file: %q
		debug: true
		log_format: json
		jetstream { enabled: false, max_mem: 1M, max_file: 2M }
		max_payload: 2
		max_connections: 7
		mappings { a: b }
		authorization { user: u, password: p }
		max_closed_clients: 5
	`, dir+"/b.pid"))
	if err != nil {
		t.Fatal(err)
	}
	changed, err := n.Reload(next)
	want := []string{"jetstream.max_mem", "jetstream.max_file", "log_format", "max_payload", "max_connections", "mappings", "authorization", "debug", "pid_file", "ports_file_dir"}
	if err != nil || !slices.Equal(changed, want) {
		t.Errorf("changed %q, %v; want %q", changed, err, want)
	}
	n.Log.With("a", "b").Debug("seen")
	if text := log.String(); strings.Contains(text, "unseen") || !strings.Contains(text, `"msg":"seen","a":"b"}`) {
		t.Errorf("log: %s", text)
	}
	if pid("a.pid") || !pid("b.pid") {
		t.Error("the pid file did not move")
	}
	if _, err := os.Stat(portsFile(dir)); err == nil {
		t.Error("the ports file is still there")
	}
	if nc, err := nats.Connect(n.Broker.ClientURL(), nats.Timeout(patience)); err == nil {
		nc.Close()
		t.Error("nobody needs to log in")
	}
	nc, err := nats.Connect(n.Broker.ClientURL(), nats.UserInfo("u", "p"), nats.Timeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if nc.MaxPayload() != 2 {
		t.Errorf("max_payload %d", nc.MaxPayload())
	}
	if changed, err := n.Reload(next); err != nil || len(changed) != 0 {
		t.Errorf("the same again changes %q, %v", changed, err)
	}
}

func TestReloadRefuses(t *testing.T) {
	n, load, _ := startNode(t, head+"server_name: a\nmax_payload: 100\n")
	before := n.Config()
	next, err := load("max_payload: 7\nlisten: \"127.0.0.1:4999\"\njetstream {\n  store_dir: /nowhere\n}\n\nexports: [ X ]\n")
	if err != nil {
		t.Fatal(err)
	}
	_, err = n.Reload(next)
	const what = ": can not change while the program runs; restart it, or put back what was there; nothing is reloaded"
	want := strings.Join([]string{
		"FILE:2: listen" + what,
		"FILE: server_name" + what,
		"FILE:3: jetstream" + what,
		"FILE:4: jetstream.store_dir" + what,
	}, "\n")
	if err == nil || strings.ReplaceAll(err.Error(), next.Path, "FILE") != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	if ExitCode(err) != ExitConfig {
		t.Errorf("exit code %d", ExitCode(err))
	}
	// What cannot be had leaves everything as it was, too.
	for _, text := range []string{
		head + "server_name: a\nmax_payload: 7\npid_file: /does/not/exist/x.pid\n",
	} {
		if next, err = load(text); err != nil {
			t.Fatal(err)
		}
		if _, err := n.Reload(next); err == nil {
			t.Errorf("reloaded %q", text)
		}
	}
	nc, err := nats.Connect(n.Broker.ClientURL(), nats.Timeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if nc.MaxPayload() != 100 || n.Config() != before {
		t.Errorf("something changed: max_payload %d", nc.MaxPayload())
	}
	n.reload(func() (*config.Config, error) { return nil, errors.New("x") })
}

// fakeLink notes what becomes of it.
type fakeLink struct {
	name   string
	events *[]string
	stuck  bool // does not end in time
}

func (f fakeLink) Describe(st *admin.Status) { st.Hub = &link.EdgeStatus{EdgeID: f.name} }

func (f fakeLink) Close(context.Context) error {
	if f.stuck {
		return context.DeadlineExceeded
	}
	*f.events = append(*f.events, "end "+f.name)
	return nil
}

// slowLink does not come to its end.
type slowLink struct{ fakeLink }

func (slowLink) Close(ctx context.Context) error {
	return CloseWithin(ctx, "slow link", func() error { select {} })
}

// TestStopWithBusyLink: that a link has much under way, which a slow disk does not
// take in time, is no failure of a stop that was asked for.
func TestStopWithBusyLink(t *testing.T) {
	var log *lockedBuffer
	t.Run("", func(t *testing.T) { // which stops the node at its end, and fails if that fails
		_, _, log = startLinked(t, "port: -1", func(*Node) (Link, error) { return slowLink{}, nil })
	})
	if got := log.String(); !strings.Contains(got, "the link is left in the middle of its work") {
		t.Errorf("the log says only\n%s", got)
	}
}

// TestReloadOfTheLink: it ends before it begins anew; what cannot begin leaves
// everything as it was, and so does what cannot end.
func TestReloadOfTheLink(t *testing.T) {
	var events []string
	stuck := false
	n, load, log := startLinked(t, head+"hub { url: \"quic://a\" }\n", func(n *Node) (Link, error) {
		name := "none"
		if u := n.Config().Uplink; u != nil {
			name = u.URLs[0]
		}
		if name == "quic://wrong" {
			events = append(events, "refuse "+name)
			return nil, errors.New("no such hub")
		}
		events = append(events, "begin "+name)
		if name == "none" {
			return nil, nil
		}
		return fakeLink{name, &events, stuck}, nil
	})
	for _, tc := range []struct {
		conf    string
		stuck   bool // the link that begins will not end
		changed string
		err     string
		events  []string
		hub     string // what status says then
	}{
		{conf: "hub { url: \"quic://a\" }\nmax_payload: 5", changed: "max_payload", hub: "quic://a"},
		{conf: "hub { url: \"quic://b\" }\nmax_payload: 6", changed: "hub max_payload", events: []string{"end quic://a", "begin quic://b"}, hub: "quic://b"},
		{conf: "hub { url: \"quic://b\", user: u, password: p }\nmax_payload: 6", changed: "hub", events: []string{"end quic://b", "begin quic://b"}, hub: "quic://b"},
		{conf: "hub { url: \"quic://wrong\" }\nmax_payload: 7", err: "no such hub", events: []string{"end quic://b", "refuse quic://wrong", "begin quic://b"}, hub: "quic://b"},
		{conf: "hub { url: \"quic://c\" }\nlisten: \"127.0.0.1:4999\"", err: "listen: can not change", hub: "quic://b"},
		{conf: "hub { url: \"quic://c\" }\npid_file: /does/not/exist/x.pid", err: "x.pid", hub: "quic://b"},
		{conf: "max_payload: 6", changed: "hub", events: []string{"end quic://b", "begin none"}},
		{conf: "hub { url: \"quic://d\" }\nmax_payload: 6", stuck: true, changed: "hub", events: []string{"begin quic://d"}, hub: "quic://d"},
		{conf: "max_payload: 9", err: "the link does not end", hub: "quic://d"},
	} {
		events, stuck = nil, tc.stuck
		text := tc.conf
		if !strings.Contains(text, "listen") {
			text = head + text
		}
		next, err := load(text)
		if err != nil {
			t.Fatal(err)
		}
		before := n.Config()
		changed, err := n.Reload(next)
		if got := strings.Join(changed, " "); got != tc.changed || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: changed %q, %v", tc.conf, got, err)
		}
		if want := map[bool]*config.Config{true: next, false: before}[tc.err == ""]; n.Config() != want {
			t.Errorf("%s: runs with %+v", tc.conf, n.Config())
		}
		if !slices.Equal(events, tc.events) {
			t.Errorf("%s: %q, want %q", tc.conf, events, tc.events)
		}
		hub := ""
		if st := n.Status(); st.Hub != nil {
			hub = st.Hub.EdgeID
		}
		if hub != tc.hub {
			t.Errorf("%s: the link is %q", tc.conf, hub)
		}
	}
	n.setLink(nil) // it would not end
	if strings.Contains(log.String(), "link is down") {
		t.Errorf("log: %s", log)
	}
}

func TestLogTimes(t *testing.T) {
	var out lockedBuffer
	l, err := newLogger(config.Logging{Time: true, UTC: true, Format: "text"}, &out)
	if err != nil {
		t.Fatal(err)
	}
	r := slog.NewRecord(time.Date(2030, 1, 2, 3, 4, 5, 0, time.FixedZone("", 7200)), slog.LevelInfo, "x", 0)
	for _, tc := range []struct {
		c    config.Logging
		want string
	}{
		{config.Logging{Time: true, UTC: true, Format: "text"}, "time=2030-01-02T01:04:05.000Z level=INFO msg=x\n"},
		{config.Logging{Time: true, Format: "text"}, "time=2030-01-02T03:04:05.000+02:00 level=INFO msg=x\n"},
		{config.Logging{UTC: true, Format: "json"}, "{\"level\":\"INFO\",\"msg\":\"x\"}\n"},
	} {
		out.b.Reset()
		if err := l.set(tc.c); err != nil {
			t.Fatal(err)
		}
		if err := l.Handler().Handle(context.Background(), r); err != nil || out.String() != tc.want {
			t.Errorf("%+v: %q, %v", tc.c, out.String(), err)
		}
	}
}

// TestLameDuckSignals: SIGTERM does not cut a lame duck's time short, SIGINT
// does.
func TestLameDuckSignals(t *testing.T) {
	n, load, log := startNode(t, head+"lame_duck_duration: \"2h\"\nlame_duck_grace_period: \"1h\"\n")
	nc, err := nats.Connect(n.Broker.ClientURL(), nats.NoReconnect(), nats.Timeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	signals := make(chan os.Signal) // each is taken before the next
	done := make(chan error, 1)
	go func() { done <- n.run(signals, func() (*config.Config, error) { return load(head + "debug: true\n") }) }()
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGUSR2, syscall.SIGTERM, os.Interrupt} {
		select {
		case signals <- sig:
		case err := <-done:
			t.Fatalf("ended before %v: %v", sig, err)
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	var at int
	for _, want := range []string{
		`msg="configuration reloaded" changed=`, `msg="log file opened anew"`, `msg="lame duck: no new clients are taken" clients=1`,
		`msg="lame duck: the stop that is asked for is under way" signal=terminated`, "msg=stopping signal=interrupt", "msg=stopped",
	} {
		i := strings.Index(log.String()[at:], want)
		if i < 0 {
			t.Fatalf("log lacks %q in its place:\n%s", want, log.String())
		}
		at += i
	}
}

// TestFailureDuringStop: a stop that has begun does not hide that the storage
// has failed.
func TestFailureDuringStop(t *testing.T) {
	n, _, log := startNode(t, head)
	n.failed <- syscall.EIO
	err := n.stop(make(chan os.Signal), "terminated")
	if ExitCode(err) != ExitStorage || !errors.Is(err, syscall.EIO) {
		t.Errorf("exit code %d, %v", ExitCode(err), err)
	}
	if strings.Contains(log.String(), "msg=stopped") {
		t.Errorf("logged:\n%s", log)
	}
}

func TestLogRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "edge.log")
	l, err := openLog(config.Logging{File: path, SizeLimit: 100, MaxFiles: 3})
	if err != nil {
		t.Fatal(err)
	}
	other := path + ".not-one-of-them"
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	line := []byte(strings.Repeat("x", 39) + "\n")
	for range 20 {
		if n, err := l.Write(line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	old, err := rotated(path)
	if err != nil || len(old) != 2 {
		t.Fatalf("%q, %v", old, err)
	}
	for _, name := range append(old, path) {
		text, err := os.ReadFile(name)
		if err != nil || len(text) != 80 {
			t.Errorf("%s: %d octets, %v", name, len(text), err)
		}
	}
	if _, err := os.Stat(other); err != nil {
		t.Error(err)
	}
	// A line longer than the limit is written, in a file of its own.
	if _, err := l.Write(bytes.Repeat([]byte("y"), 500)); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || len(text) != 500 {
		t.Errorf("%d octets, %v", len(text), err)
	}
	// Without a limit nothing moves; another name is another file.
	next := filepath.Join(filepath.Dir(path), "next.log")
	if err := l.set(config.Logging{File: next}); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		_, _ = l.Write(line)
	}
	if text, err := os.ReadFile(next); err != nil || len(text) != 800 {
		t.Errorf("%d octets, %v", len(text), err)
	}
	if err := l.set(config.Logging{File: "/does/not/exist/x.log"}); err == nil {
		t.Error("a file that cannot be")
	}
	if _, err := l.Write(line); err != nil {
		t.Errorf("after that: %v", err)
	}
}

func TestReadPID(t *testing.T) {
	file := filepath.Join(t.TempDir(), "p")
	if err := os.WriteFile(file, []byte("42\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for s, want := range map[string]int{"17": 17, file: 42, "x": 0, "-1": 0, "": 0} {
		if got, err := readPID(s); got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %d, %v", s, got, err)
		}
	}
}
