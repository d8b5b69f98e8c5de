package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sys/unix"

	"petiole/internal/app"
)

// logBuffer collects a program's log and tells when a pattern has come by.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // has an element when something was added
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.more <- struct{}{}:
	default:
	}
	return l.text.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// await returns the first group of the pattern once the log matches it.
func (l *logBuffer) await(t *testing.T, pattern string) string {
	t.Helper()
	re := regexp.MustCompile(pattern)
	timeout := time.After(20 * time.Second)
	for {
		if m := re.FindStringSubmatch(l.String()); m != nil {
			return m[len(m)-1]
		}
		select {
		case <-l.more:
		case <-timeout:
			t.Fatalf("no %s in the log:\n%s", pattern, l)
		}
	}
}

// startEdge runs an edge on a store and returns it with the URL for clients.
func startEdge(t *testing.T, store string) (*exec.Cmd, *logBuffer, string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-js", "-sd", store, "-a", "127.0.0.1", "-p", "-1")
	cmd.Args[0] = "edge" // see TestMain
	log := &logBuffer{more: make(chan struct{}, 1)}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, log, log.await(t, `edge is ready.* clients=(\S+)`)
}

// TestStorageFailure takes the disk away under a running edge: the publish is
// not acknowledged, and the program ends within a second with the code for it.
// What had been acknowledged is there after the next start.
func TestStorageFailure(t *testing.T) {
	store := filepath.Join(t.TempDir(), "store")
	cmd, log, url := startEdge(t, store)
	nc, err := nats.Connect(url, nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := nc.JetStream()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.AddStream(&nats.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish("s.before", []byte("kept")); err != nil {
		t.Fatal(err)
	}
	// From now on every write to a file is refused.
	if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1, Max: 1}, nil); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if ack, err := js.Publish("s.after", []byte("lost"), nats.AckWait(3*time.Second), nats.RetryAttempts(0)); err == nil {
		t.Errorf("a publish that cannot be stored was acknowledged as %d", ack.Sequence)
	}
	err = cmd.Wait()
	if took := time.Since(began); took > time.Second {
		t.Errorf("the program ended only %s after the failure", took)
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != app.ExitStorage {
		t.Errorf("ended with %v, want exit code %d", err, app.ExitStorage)
	}
	if !strings.Contains(log.String(), "edge: storage failed: ") || !strings.Contains(log.String(), "start again to recover from disk") {
		t.Errorf("does not say what happened and what to do:\n%s", log)
	}

	cmd, _, url = startEdge(t, store)
	nc, err = nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if js, err = nc.JetStream(); err != nil {
		t.Fatal(err)
	}
	m, err := js.GetMsg("S", 1)
	if err != nil || string(m.Data) != "kept" {
		t.Errorf("acknowledged message after the restart: %v, %v", m, err)
	}
	if _, err := js.Publish("s.again", nil); err != nil {
		t.Errorf("publish after the restart: %v", err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if _, err := os.Stat(filepath.Join(store, "admin.sock")); err == nil {
		t.Error("the admin socket is left behind")
	}
}
