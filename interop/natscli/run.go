package natscli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sys/unix"
)

// stepTimeout bounds each command of a step, so that a server that does not
// answer costs a bounded time.
const stepTimeout = 15 * time.Second

// runner runs steps against one server.
type runner struct {
	cli  string // path of the nats CLI
	url  string
	home string // the CLI's configuration directory
	nc   *nats.Conn
}

// process is one running CLI command.
type process struct {
	cmd    *exec.Cmd
	cancel context.CancelFunc
	copied chan struct{} // with a terminal: closed once all output was taken
	done   chan struct{}
	err    error

	mu     sync.Mutex
	out    bytes.Buffer
	change chan struct{} // closed and replaced when out grows
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out.Write(b)
	close(p.change)
	p.change = make(chan struct{})
	return len(b), nil
}

func (p *process) output() (string, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String(), p.change
}

func (r *runner) start(c command) (*process, error) {
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	args := append([]string{"--server", r.url, "--no-context", "--timeout", "4s"}, c.args...)
	p := &process{cancel: cancel, done: make(chan struct{}), change: make(chan struct{})}
	p.cmd = exec.CommandContext(ctx, r.cli, args...)
	p.cmd.Env = append(os.Environ(), "HOME="+r.home, "XDG_CONFIG_HOME="+r.home, "NO_COLOR=1", "COLUMNS=200")
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.Stdin = strings.NewReader(c.stdin)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if c.tty {
		closeTTY, err := p.onTerminal()
		if err != nil {
			cancel()
			return nil, err
		}
		defer closeTTY()
	}
	if err := p.cmd.Start(); err != nil {
		cancel()
		return nil, err
	}
	go func() {
		p.err = p.cmd.Wait()
		if ctx.Err() == context.DeadlineExceeded {
			p.err = fmt.Errorf("nats %s: still running after %v", strings.Join(c.args, " "), stepTimeout)
		}
		cancel()
		if p.copied != nil {
			<-p.copied
		}
		close(p.done)
	}()
	return p, nil
}

// onTerminal makes a new pseudo terminal the command's controlling terminal and
// copies what it prints there to p. The returned function closes the rig's copy
// of the terminal's inner side once the command holds its own.
func (p *process) onTerminal() (func(), error) {
	outer, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	fd := int(outer.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		outer.Close()
		return nil, fmt.Errorf("pseudo terminal: %w", err)
	}
	inner, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		outer.Close()
		return nil, err
	}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = inner, inner, inner
	p.cmd.SysProcAttr.Setsid, p.cmd.SysProcAttr.Setctty = true, true
	p.copied = make(chan struct{})
	go func() {
		defer close(p.copied)
		defer outer.Close()
		// Reading ends with an error once the command has closed its side.
		_, _ = io.Copy(p, outer)
	}()
	return func() { inner.Close() }, nil
}

// stop ends the command if it still runs.
func (p *process) stop() {
	p.cancel()
	<-p.done
}

// until waits for output that matches.
func (p *process) until(re *regexp.Regexp) error {
	for {
		text, change := p.output()
		if re.MatchString(text) {
			return nil
		}
		select {
		case <-change:
		case <-p.done:
			if text, _ := p.output(); re.MatchString(text) {
				return nil
			}
			return fmt.Errorf("ended without output that matches %q: %w", re, p.err)
		}
	}
}

// ready waits until a background command listens.
func (r *runner) ready(p *process, b *background) error {
	if b.when != nil {
		return p.until(b.when)
	}
	for end := time.Now().Add(stepTimeout); time.Now().Before(end); {
		// Without interest the server answers at once; with interest the
		// message reaches the command, which need not answer it.
		_, err := r.nc.Request(b.on, []byte("probe"), 100*time.Millisecond)
		if !errors.Is(err, nats.ErrNoResponders) {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("ended before it listened on %s: %w", b.on, p.err)
		case <-time.After(5 * time.Millisecond):
		}
	}
	return fmt.Errorf("nobody listens on %s after %v", b.on, stepTimeout)
}

// run1 runs a command that must succeed.
func (r *runner) run1(c command) error {
	p, err := r.start(c)
	if err != nil {
		return err
	}
	<-p.done
	if p.err != nil {
		text, _ := p.output()
		return fmt.Errorf("nats %s: %w: %s", strings.Join(c.args, " "), p.err, clip(text))
	}
	return nil
}

// run runs one step; a nil error means that it passed.
func (r *runner) run(s step) error {
	for _, c := range s.before {
		if err := r.run1(c); err != nil {
			return fmt.Errorf("before: %w", err)
		}
	}
	if s.beside != nil {
		b, err := r.start(s.beside.command)
		if err != nil {
			return err
		}
		defer b.stop()
		if err := r.ready(b, s.beside); err != nil {
			text, _ := b.output()
			return fmt.Errorf("background: %w: %s", err, clip(text))
		}
	}
	p, err := r.start(s.command)
	if err != nil {
		return err
	}
	defer p.stop()
	if err := r.drive(s, p); err != nil {
		text, _ := p.output()
		return fmt.Errorf("%w: %s", err, clip(text))
	}
	if s.until == nil {
		<-p.done
	}
	if s.anyway {
		return nil
	}
	return judge(s, p)
}

// drive does what has to happen while the step's command runs.
func (r *runner) drive(s step, p *process) error {
	if s.self != nil {
		if err := r.ready(p, s.self); err != nil {
			return err
		}
	}
	repeat := s.until != nil && s.self == nil && len(s.then) > 0
	for {
		for _, c := range s.then {
			if err := r.run1(c); err != nil {
				return fmt.Errorf("then: %w", err)
			}
		}
		if !repeat {
			break
		}
		text, change := p.output()
		if s.until.MatchString(text) {
			break
		}
		select {
		case <-change:
		case <-p.done:
			return fmt.Errorf("ended without output that matches %q: %w", s.until, p.err)
		case <-time.After(100 * time.Millisecond):
		}
	}
	if s.until != nil {
		return p.until(s.until)
	}
	return nil
}

// judge compares a finished command with what the step wants.
func judge(s step, p *process) error {
	text, _ := p.output()
	if s.until == nil {
		var exit *exec.ExitError
		code := 0
		if errors.As(p.err, &exit) {
			code = exit.ExitCode()
		} else if p.err != nil {
			return fmt.Errorf("%w: %s", p.err, clip(text))
		}
		if code != s.exit {
			return fmt.Errorf("exit status %d, want %d: %s", code, s.exit, clip(text))
		}
	}
	for _, re := range s.want {
		if !re.MatchString(text) {
			return fmt.Errorf("output does not match %q: %s", re, clip(text))
		}
	}
	if s.same[0] != "" {
		a, err := os.ReadFile(s.same[0])
		if err != nil {
			return err
		}
		b, err := os.ReadFile(s.same[1])
		if err != nil {
			return err
		}
		if !bytes.Equal(a, b) {
			return fmt.Errorf("%s and %s differ", s.same[0], s.same[1])
		}
	}
	return nil
}

// clip shortens output to what a report can show on one line.
func clip(text string) string {
	const most = 400
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		text = text[:most/2] + " ... " + text[len(text)-most/2:]
	}
	return text
}
