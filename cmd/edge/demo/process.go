package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stopTimeout is how long a program may take to stop before it is killed. Each
// lets go of the other (2 s at most) and of its clients (5 s), and takes into its
// files what only the log has: some thirty syncs in a row, which a disk that
// others use, too, may answer in tenths of a second each.
const stopTimeout = 20 * time.Second

// process is a program that runs on its own.
type process struct {
	name   string
	cmd    *exec.Cmd
	done   chan struct{} // closed once it has ended
	killed bool          // by us: its exit is no failure
}

// start writes the configuration, runs the program with it, and waits until
// it says that it is ready. It returns how long that took.
func (d *demo) start(ctx context.Context, name, program, conf string) (*process, time.Duration, error) {
	path := filepath.Join(d.dir, name+".conf")
	if err := os.WriteFile(path, []byte(conf), 0o600); err != nil {
		return nil, 0, err
	}
	logPath := filepath.Join(d.dir, name+".log")
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, 0, err
	}
	// Not bound to ctx: stop and kill end it, so that it can save its state.
	cmd := exec.Command(program, "-c", path)
	cmd.Args[0] = name
	ready := &watcher{log: log, want: []byte(name + " is ready"), found: make(chan struct{})}
	cmd.Stderr = ready
	began := time.Now()
	if err := cmd.Start(); err != nil {
		log.Close()
		return nil, 0, fmt.Errorf("start the %s: %w", name, err)
	}
	p := &process{name: name, cmd: cmd, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ended is in cmd.ProcessState
		log.Close()
		close(p.done)
	}()
	select {
	case <-ready.found:
		return p, time.Since(began).Round(time.Millisecond), nil
	case <-p.done:
		text, _ := os.ReadFile(logPath)
		return nil, 0, fmt.Errorf("the %s ended instead of serving (%s): %s", name, cmd.ProcessState, bytes.TrimSpace(text))
	case <-ctx.Done():
		p.kill()
		return nil, 0, fmt.Errorf("the %s did not get ready: %w", name, context.Cause(ctx))
	}
}

// pid returns the process id.
func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends the process as a crash would, and returns when it is gone.
func (p *process) kill() {
	p.killed = true
	_ = p.cmd.Process.Kill() // it fails only if the process has ended
	<-p.done
}

// stop asks the process to end and waits for it; a nil process is fine.
func (p *process) stop() error {
	if p == nil || p.killed {
		return nil
	}
	if runtime.GOOS == "windows" { // which has no signal to ask with
		p.kill()
		return nil
	}
	select {
	case <-p.done:
		if !p.cmd.ProcessState.Exited() {
			return nil // somebody tried what happens when it is killed
		}
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it fails only if the process has ended
	select {
	case <-p.done:
	case <-time.After(stopTimeout):
		p.kill()
		return fmt.Errorf("the %s did not stop within %s and was killed", p.name, stopTimeout)
	}
	if !p.cmd.ProcessState.Success() {
		return fmt.Errorf("the %s stopped with %s", p.name, p.cmd.ProcessState)
	}
	return nil
}

// watcher copies a log into a file and closes found when want came by.
type watcher struct {
	log   *os.File
	want  []byte
	found chan struct{}
	once  sync.Once
	tail  []byte
}

// Write implements io.Writer.
func (w *watcher) Write(p []byte) (int, error) {
	w.tail = append(w.tail, p...)
	if bytes.Contains(w.tail, w.want) {
		w.once.Do(func() { close(w.found) })
	}
	w.tail = append(w.tail[:0], w.tail[max(0, len(w.tail)-len(w.want)):]...)
	return w.log.Write(p)
}

// hubPackage is built when no hub program is at hand.
const hubPackage = "petiole/cmd/hub"

// findHub returns the hub program beside the edge, or builds it from source.
func (d *demo) findHub(ctx context.Context) (string, error) {
	suffix := ""
	if runtime.GOOS == "windows" {
		suffix = ".exe"
	}
	beside := filepath.Join(filepath.Dir(d.Edge), "hub"+suffix)
	if fi, err := os.Stat(beside); err == nil && fi.Mode().IsRegular() {
		return beside, nil
	}
	out := filepath.Join(d.dir, "bin", "hub"+suffix)
	d.say("no hub program beside %s: building it", filepath.Base(d.Edge))
	cmd := exec.CommandContext(ctx, "go", "build", "-o", out, hubPackage)
	if text, err := cmd.CombinedOutput(); err != nil {
		detail := strings.TrimSpace(string(text))
		if errors.Is(err, exec.ErrNotFound) {
			detail = "there is no go command"
		}
		return "", fmt.Errorf("cannot build the hub program (%w): %s; run this in the source directory, put the hub program beside the edge program, or name it with --hub", err, detail)
	}
	return out, nil
}
