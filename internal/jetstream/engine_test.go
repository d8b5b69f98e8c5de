package jetstream

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/broker"
	"petiole/storage"
	"petiole/storage/msgstore"
)

// node is a broker with an engine.
type node struct {
	t    *testing.T
	dir  string
	srv  *broker.Server
	e    *Engine
	fail chan error
}

// patience is how long tests wait for what is to happen anyway: however busy the
// machine is, it has happened by then.
const patience = time.Minute

func startNode(t *testing.T, dir string, tweak ...func(*Options)) *node {
	t.Helper()
	return startNodeOn(t, dir, broker.Options{Host: "127.0.0.1", Port: -1}, tweak...)
}

// startNodeOn is startNode with a broker of its own kind.
func startNodeOn(t *testing.T, dir string, bo broker.Options, tweak ...func(*Options)) *node {
	t.Helper()
	n := &node{t: t, dir: dir, fail: make(chan error, 1)}
	bo.JetStream = true
	bo.AfterRead = func() {
		if n.e != nil {
			n.e.AfterRead()
		}
	}
	srv, err := broker.New(bo)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{
		Account: srv.Account(), Dir: dir, SegmentSize: 1 << 20,
		OnFail: func(err error) { n.fail <- err },
	}
	if testing.Verbose() {
		o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	for _, f := range tweak {
		f(&o)
	}
	if n.e, err = Open(o); err != nil {
		t.Fatal(err)
	}
	if err := srv.Start(); err != nil {
		t.Fatal(err)
	}
	n.srv = srv
	t.Cleanup(n.stop)
	return n
}

func (n *node) stop() { n.end(true) }

// crash ends the node without a checkpoint.
func (n *node) crash() { n.end(false) }

func (n *node) end(checkpoint bool) {
	if n.srv == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := n.srv.Shutdown(ctx); err != nil {
		n.t.Error(err)
	}
	if err := n.e.close(checkpoint); err != nil {
		n.t.Error(err)
	}
	n.srv = nil
	select {
	case err := <-n.fail:
		n.t.Errorf("the storage failed: %v", err)
	default:
	}
}

func (n *node) connect() (*nats.Conn, jetstream.JetStream) {
	n.t.Helper()
	nc, err := nats.Connect(n.srv.ClientURL(), nats.NoReconnect(), nats.Timeout(patience))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(patience))
	if err != nil {
		n.t.Fatal(err)
	}
	return nc, js
}

// copyLive copies the directory of a store that is in use, as a kill would leave
// it: a file that goes meanwhile, or gets another name, may be missing.
func copyLive(t *testing.T, dir string) string {
	t.Helper()
	image := t.TempDir()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		to := filepath.Join(image, rel)
		if d.IsDir() {
			return os.MkdirAll(to, 0o700)
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return errors.Join(err, os.WriteFile(to, b, 0o600))
	})
	if err != nil {
		t.Fatal(err)
	}
	return image
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	return ctx
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestPublishAndRecover(t *testing.T) {
	for _, tc := range []struct {
		name       string
		checkpoint bool
		sync       time.Duration
	}{
		{"checkpoint at the end", true, 0},
		{"replay of the log", false, 0},
		{"replay, deferred sync", false, 50 * time.Millisecond},
		{"checkpoint, deferred sync", true, 50 * time.Millisecond},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			tweak := func(o *Options) { o.SyncInterval = tc.sync }
			n := startNode(t, dir, tweak)
			_, js := n.connect()
			ctx := testContext(t)
			if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
				t.Fatal(err)
			}
			var acks []jetstream.PubAckFuture
			for i := range 500 {
				f, err := js.PublishAsync(fmt.Sprintf("s.%d", i%7), fmt.Appendf(nil, "message %d", i), jetstream.WithMsgID(fmt.Sprintf("id-%d", i)))
				if err != nil {
					t.Fatal(err)
				}
				acks = append(acks, f)
			}
			<-js.PublishAsyncComplete()
			for i, f := range acks {
				select {
				case a := <-f.Ok():
					if a.Sequence != uint64(i+1) || a.Stream != "S" || a.Duplicate {
						t.Fatalf("ack of message %d: %+v", i, a)
					}
				case err := <-f.Err():
					t.Fatal(err)
				}
			}
			uid := must2(n.e.Stream("S")).UID()
			n.end(tc.checkpoint)

			n = startNode(t, dir, tweak)
			_, js = n.connect()
			s, ok := n.e.Stream("S")
			if !ok {
				t.Fatal("the stream is gone")
			}
			if s.UID() != uid {
				t.Error("the stream has another identity")
			}
			if st := s.DurableState(); st.Msgs != 500 || st.First != 1 || st.Last != 500 || st.Subjects != 7 {
				t.Fatalf("state after the restart: %+v", st)
			}
			i := 0
			err := s.Range(1, func(m storage.Message) bool {
				if want := fmt.Sprintf("message %d", i); string(m.Data) != want || m.Subject != fmt.Sprintf("s.%d", i%7) {
					t.Fatalf("message %d is %q on %q, want %q", m.Seq, m.Data, m.Subject, want)
				}
				i++
				return true
			})
			if err != nil || i != 500 {
				t.Fatalf("read %d messages: %v", i, err)
			}
			a, err := js.Publish(ctx, "s.0", nil, jetstream.WithMsgID("id-123"))
			if err != nil || !a.Duplicate || a.Sequence != 124 {
				t.Fatalf("a message id from before the restart: %+v, %v", a, err)
			}
			a, err = js.Publish(ctx, "s.0", nil)
			if err != nil || a.Sequence != 501 {
				t.Fatalf("after the restart: %+v, %v", a, err)
			}
		})
	}
}

func must2[T any](v T, ok bool) T {
	if !ok {
		panic("not found")
	}
	return v
}

// A request that is under way when the engine is closed has ended when that is: it
// must not make files in a directory that another process may have opened by then.
func TestCloseWaitsForRequests(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	enter := sync.OnceFunc(func() { close(entered) })
	n := startNode(t, t.TempDir(), func(o *Options) {
		o.openStore = func(dir string, o msgstore.Options) (backing, error) {
			enter()
			<-release
			return msgstore.Open(dir, o)
		}
	})
	nc, _ := n.connect()
	if err := nc.Publish("$JS.API.STREAM.CREATE.S", []byte(`{"name":"S","subjects":["s"],"storage":"file","retention":"limits","num_replicas":1}`)); err != nil {
		t.Fatal(err)
	}
	<-entered
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		if err := n.e.Close(); err != nil {
			t.Error(err)
		}
	}()
	eventually(t, "the engine waits for what is under way", func() bool {
		n.e.spawnMu.Lock()
		defer n.e.spawnMu.Unlock()
		return n.e.ended
	})
	select {
	case <-closed:
		t.Error("closed while a request was under way")
	case <-time.After(200 * time.Millisecond):
	}
	close(release)
	<-closed
}
