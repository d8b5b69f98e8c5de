//go:build linux

package rig

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is one program under test, running in a process of its own. Its
// standard output and standard error go to a log file.
type Process struct {
	name    string
	logPath string
	cmd     *exec.Cmd
	done    chan struct{}
	once    sync.Once
	started time.Time
	ended   time.Time // set before done is closed
}

// Start runs the program at path with args and appends what it prints to the
// file logPath. The process is killed by the kernel if the rig dies before it.
func Start(name, logPath, path string, args ...string) (*Process, error) {
	return StartCmd(name, logPath, exec.Command(path, args...))
}

// StartCmd is Start for a command that was prepared by the caller; its output
// and its parent-death signal are set here.
func StartCmd(name, logPath string, cmd *exec.Cmd) (*Process, error) {
	if err := os.MkdirAll(filepath.Dir(logPath), 0o755); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	logFile, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer logFile.Close()
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &Process{name: name, logPath: logPath, cmd: cmd, done: make(chan struct{}), started: time.Now()}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		// The exit status is kept in cmd.ProcessState; Wait's error says
		// nothing beyond it.
		_ = cmd.Wait()
		p.ended = time.Now()
		close(p.done)
	}()
	return p, nil
}

// Name is the name given to Start.
func (p *Process) Name() string { return p.name }

// PID is the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Started is the moment just before the process was created.
func (p *Process) Started() time.Time { return p.started }

// Ended is the moment at which the process was seen to have ended, zero if it
// still runs.
func (p *Process) Ended() time.Time {
	if p.Alive() {
		return time.Time{}
	}
	return p.ended
}

// Signal sends the process a signal.
func (p *Process) Signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("send %v to %s: %w", s, p.name, err)
	}
	return nil
}

// Done is closed when the process has ended and was reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Alive reports whether the process has not ended yet.
func (p *Process) Alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// ExitCode is the exit status once Done is closed, -1 when a signal ended the
// process or it still runs.
func (p *Process) ExitCode() int {
	if p.Alive() {
		return -1
	}
	return p.cmd.ProcessState.ExitCode()
}

// Kill ends the process with SIGKILL, as a crash would, and waits until it is
// gone. Killing an ended process does nothing.
func (p *Process) Kill() {
	p.once.Do(func() {
		if p.Alive() {
			_ = p.cmd.Process.Kill()
		}
	})
	<-p.done
}

// Freeze stops the process with SIGSTOP and returns when none of its threads
// can do anything any more: each is stopped, or waits in the kernel and stops
// before it returns from there. What remains to be done with it is Kill.
func (p *Process) Freeze() error { return p.freeze("TD") }

// Halt is Freeze that also waits until no thread is in the kernel any more. The
// process goes on at SIGCONT.
func (p *Process) Halt() error { return p.freeze("T") }

// freeze waits until every thread is in one of the given states of
// proc_pid_stat(5).
func (p *Process) freeze(states string) error {
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("freeze %s: %w", p.name, err)
	}
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
		frozen, err := p.frozen(states)
		if err != nil {
			return fmt.Errorf("freeze %s: %w", p.name, err)
		}
		if frozen {
			return nil
		}
	}
	return fmt.Errorf("freeze %s: its threads still run 5 s after SIGSTOP", p.name)
}

func (p *Process) frozen(states string) (bool, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.PID()))
	if err != nil || len(tasks) == 0 {
		return false, errors.Join(err, errors.New("it has ended"))
	}
	for _, t := range tasks {
		stat, err := os.ReadFile(t)
		if err != nil {
			return false, err
		}
		_, rest, ok := bytes.Cut(stat, []byte(") "))
		if !ok || len(rest) == 0 {
			return false, errors.New("unexpected /proc stat line")
		}
		if !strings.Contains(states, string(rest[:1])) {
			return false, nil
		}
	}
	return true, nil
}

// Stop asks the process to end with SIGTERM and waits at most grace before it
// kills it. It returns an error if the process had to be killed or ended with
// another status than 0.
func (p *Process) Stop(grace time.Duration) error {
	if p.Alive() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
	}
	select {
	case <-p.done:
	case <-time.After(grace):
		p.Kill()
		return fmt.Errorf("%s did not end within %v of SIGTERM and was killed; %s", p.name, grace, p.tailHint())
	}
	if code := p.ExitCode(); code != 0 {
		return fmt.Errorf("%s ended with status %d after SIGTERM; %s", p.name, code, p.tailHint())
	}
	return nil
}

// busy is how many times what a program takes to do nothing it may take longer
// to do something, see Allow.
const busy = 20

// Allow returns how long the program may take for what it has d for: d, and what
// a busy machine takes beside that, which is measured by how long the program takes
// now to do nothing.
func Allow(d time.Duration, program string) time.Duration {
	began := time.Now()
	if err := exec.Command(program, "--version").Run(); err != nil {
		return d
	}
	return d + busy*time.Since(began)
}

// Log returns the last n bytes of what the process printed.
func (p *Process) Log(n int) string {
	b, err := os.ReadFile(p.logPath)
	if err != nil {
		return err.Error()
	}
	if len(b) > n {
		b = b[len(b)-n:]
	}
	return string(b)
}

func (p *Process) tailHint() string {
	return fmt.Sprintf("its log %s ends with:\n%s", p.logPath, p.Log(2000))
}

// Usage is what a process has consumed so far.
type Usage struct {
	CPU  time.Duration // user and system time, in steps of 10 ms
	RSS  int64         // resident set, bytes
	Anon int64         // the part of it that is no mapped file, bytes
}

// Usage reads the process's CPU time and resident set from /proc.
func (p *Process) Usage() (Usage, error) {
	var u Usage
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	if err != nil {
		return u, fmt.Errorf("usage of %s: %w", p.name, err)
	}
	// The second field is the command in parentheses and may hold spaces;
	// utime and stime are the 14th and 15th fields (proc_pid_stat(5)).
	_, rest, ok := bytes.Cut(stat, []byte(") "))
	fields := strings.Fields(string(rest))
	if !ok || len(fields) < 22 {
		return u, fmt.Errorf("usage of %s: unexpected /proc stat line", p.name)
	}
	utime, err1 := strconv.ParseInt(fields[11], 10, 64)
	stime, err2 := strconv.ParseInt(fields[12], 10, 64)
	pages, err3 := strconv.ParseInt(fields[21], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return u, fmt.Errorf("usage of %s: %w", p.name, err)
	}
	const ticksPerSecond = 100 // USER_HZ, fixed in the Linux ABI
	u.CPU = time.Duration(utime+stime) * time.Second / ticksPerSecond
	u.RSS = pages * int64(os.Getpagesize())
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		return u, fmt.Errorf("usage of %s: %w", p.name, err)
	}
	_, anon, _ := strings.Cut(string(status), "RssAnon:")
	var kib int64
	if _, err := fmt.Sscan(anon, &kib); err != nil {
		return u, fmt.Errorf("usage of %s: no RssAnon in /proc status: %w", p.name, err)
	}
	u.Anon = kib << 10
	return u, nil
}
