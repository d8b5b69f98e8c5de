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
	timeout := time.After(patience)
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

// patience is how long the test waits for what is to happen anyway: however busy
// the machine is, it has happened by then.
const patience = time.Minute

// runs returns how long it takes to run the program for nothing.
func runs(t *testing.T) time.Duration {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "--version")
	cmd.Args[0] = "edge" // see TestMain
	began := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return time.Since(began)
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
// not acknowledged, and the program ends within a second with the code for it, or
// what a busy machine takes instead.
// What had been acknowledged is there after the next start.
func TestStorageFailure(t *testing.T) {
	store := filepath.Join(t.TempDir(), "store")
	cmd, log, url := startEdge(t, store)
	nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := nc.JetStream(nats.MaxWait(patience))
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
	idle := runs(t)
	began := time.Now()
	if ack, err := js.Publish("s.after", []byte("lost"), nats.AckWait(patience), nats.RetryAttempts(0)); err == nil {
		t.Errorf("a publish that cannot be stored was acknowledged as %d", ack.Sequence)
	}
	err = cmd.Wait()
	if took := time.Since(began); took > time.Second+20*max(idle, runs(t)) {
		t.Errorf("the program ended only %s after the failure, to run it for nothing takes %s", took, idle)
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != app.ExitStorage {
		t.Errorf("ended with %v, want exit code %d", err, app.ExitStorage)
	}
	if !strings.Contains(log.String(), "edge: storage failed: ") || !strings.Contains(log.String(), "start again to recover from disk") {
		t.Errorf("does not say what happened and what to do:\n%s", log)
	}

	cmd, _, url = startEdge(t, store)
	nc, err = nats.Connect(url, nats.Timeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if js, err = nc.JetStream(nats.MaxWait(patience)); err != nil {
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
