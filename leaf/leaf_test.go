package leaf

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

var _ nats.InProcessConnProvider = (*Leaf)(nil)

// patience is how long tests wait for what is to happen anyway: however busy the
// machine is, it has happened by then.
const patience = time.Minute

// start runs a leaf until the test ends.
func start(t *testing.T, cfg Config) (l *Leaf, stop func() error) {
	t.Helper()
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	select {
	case <-l.Ready():
	case err := <-done:
		t.Fatal(err)
	}
	stopped := false
	stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		return <-done
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return l, stop
}

func connect(t *testing.T, l *Leaf, url string, opts ...nats.Option) *nats.Conn {
	t.Helper()
	if url == "" {
		opts = append(opts, nats.InProcessServer(l))
	}
	nc, err := nats.Connect(url, append(opts, nats.Timeout(patience))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func TestInMemoryWithoutNetwork(t *testing.T) {
	l, stop := start(t, Config{Name: "till"})
	if l.ClientURL() != "" {
		t.Errorf("URL %q", l.ClientURL())
	}
	nc := connect(t, l, "")
	if nc.ConnectedServerName() != "till" {
		t.Errorf("name %q", nc.ConnectedServerName())
	}
	if _, err := nc.Subscribe("svc", func(m *nats.Msg) { _ = m.Respond(m.Data) }); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil { // the other client must find it there
		t.Fatal(err)
	}
	m, err := connect(t, l, "").Request("svc", []byte("x"), patience)
	if err != nil || string(m.Data) != "x" {
		t.Fatal(m, err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.InProcessConn(); !errors.Is(err, ErrNotRunning) {
		t.Error(err)
	}
	if err := l.Run(t.Context()); !errors.Is(err, ErrStarted) {
		t.Error(err)
	}
}

// TestKeepsWhatItAcknowledged stops a leaf and starts another on its store;
// one client is in the process, the other comes from the network.
func TestKeepsWhatItAcknowledged(t *testing.T) {
	cfg := Config{StoreDir: t.TempDir(), Listen: "127.0.0.1:-1"}
	l, stop := start(t, cfg)
	js, err := jetstream.New(connect(t, l, ""), jetstream.WithDefaultTimeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if _, err := js.Publish(t.Context(), "s.a", []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if other, err := New(cfg); err != nil {
		t.Fatal(err)
	} else if err := other.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "stop it, or choose another directory") {
		t.Errorf("two on one store: %v", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	l, _ = start(t, cfg)
	if !strings.HasPrefix(l.ClientURL(), "nats://127.0.0.1:") {
		t.Errorf("URL %q", l.ClientURL())
	}
	js, err = jetstream.New(connect(t, l, l.ClientURL()), jetstream.WithDefaultTimeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	if n := s.CachedInfo().State.Msgs; n != 20 {
		t.Errorf("%d messages, want 20", n)
	}
}

// TestTellsThoseWhoWait has a pull request wait when the leaf stops.
func TestTellsThoseWhoWait(t *testing.T) {
	l, stop := start(t, Config{StoreDir: t.TempDir()})
	nc := connect(t, l, "", nats.NoReconnect())
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "C"})
	if err != nil {
		t.Fatal(err)
	}
	inbox := nats.NewInbox()
	answers := make(chan *nats.Msg, 1)
	if _, err := nc.ChanSubscribe(inbox, answers); err != nil {
		t.Fatal(err)
	}
	if err := nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.S.C", inbox, []byte(`{"batch":3,"expires":60000000000}`)); err != nil {
		t.Fatal(err)
	}
	for {
		info, err := c.Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if info.NumWaiting == 1 {
			break
		}
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	select {
	case m := <-answers:
		if h := m.Header; h.Get("Status") != "409" || h.Get("Description") != "Server Shutdown" || h.Get("Nats-Pending-Messages") != "3" {
			t.Errorf("%v", h)
		}
	case <-time.After(patience):
		t.Error("the leaf stopped without a word")
	}
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.conf")
	text := "listen: \"127.0.0.1:-1\"\nserver_name: filed\nauthorization { user: a, password: b }\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	l, _ := start(t, Config{File: path, MaxPayload: 77})
	nc := connect(t, l, l.ClientURL(), nats.UserInfo("a", "b"))
	if nc.ConnectedServerName() != "filed" || nc.MaxPayload() != 77 {
		t.Errorf("%s, %d", nc.ConnectedServerName(), nc.MaxPayload())
	}
	if _, err := nats.Connect("", nats.InProcessServer(l)); err == nil {
		t.Error("nobody has to log in")
	}
}

func TestMistakes(t *testing.T) {
	for want, cfg := range map[string]Config{
		"cannot read the configuration file": {File: "/does/not/exist.conf"},
		`Listen "x"`:                         {Listen: "x"},
		`Listen ":0"`:                        {Listen: ":0"},
		"not the name of a stream":           {StoreDir: "x", Exports: []Export{{Stream: "a.b"}}},
		"only be exported with JetStream":    {Exports: []Export{{Stream: "A"}}},
		"is negative":                        {SyncInterval: -1},
	} {
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	l, err := New(Config{Listen: "192.0.2.1:4222"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.InProcessConn(); !errors.Is(err, ErrNotRunning) {
		t.Error(err)
	}
	if err := l.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no such address") {
		t.Error(err)
	}
	select {
	case <-l.Ready():
		t.Error("ready")
	default:
	}
}
