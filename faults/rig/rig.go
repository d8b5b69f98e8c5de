//go:build linux

// Package rig holds what the fault rigs and the benchmarks share: building the
// programs, running them as separate processes, choosing ports, waiting until
// a server answers, and generating messages whose fate can be checked.
//
// It drives the programs from outside only, over sockets, signals and files;
// it imports nothing of the product.
package rig

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// ModuleRoot is the directory of the module petiole, seen from the module in
// which the caller runs.
func ModuleRoot() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "petiole").Output()
	if err != nil {
		return "", fmt.Errorf("find the module petiole (run inside the repository): %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Build compiles package pkg of the module in moduleDir into the file out, with
// the given build tags. The error carries the compiler's output.
func Build(ctx context.Context, moduleDir, pkg, out string, tags ...string) error {
	args := []string{"build", "-ldflags", "-s -w", "-o", out} // linking takes the longest
	if len(tags) > 0 {
		args = append(args, "-tags", strings.Join(tags, ","))
	}
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	cmd.Dir = moduleDir
	cmd.Env = append(os.Environ(), "GOGC=400") // of the compiler
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, text)
	}
	return nil
}

// Programs are the paths of the programs under test; empty: not chosen yet.
type Programs struct {
	Edge string
	Hub  string
}

// Missing compiles into dir those programs that have no path yet: cmd/edge with
// the given build tags, and cmd/hub, without any, if hub is set.
func (p *Programs) Missing(ctx context.Context, dir string, hub bool, edgeTags ...string) error {
	if p.Edge != "" && (p.Hub != "" || !hub) {
		return nil
	}
	root, err := ModuleRoot()
	if err != nil {
		return err
	}
	if p.Edge == "" {
		p.Edge = filepath.Join(dir, "edge")
		if err := Build(ctx, root, "./cmd/edge", p.Edge, edgeTags...); err != nil {
			return err
		}
	}
	if p.Hub == "" && hub {
		p.Hub = filepath.Join(dir, "hub")
		return Build(ctx, root, "./cmd/hub", p.Hub)
	}
	return nil
}

// FreePort returns a TCP port of the loopback interface that was free a moment
// ago. Programs that must come back on the same port after a restart are given
// one of these. It lies below those that the system gives to whoever asks for any:
// a client that connects meanwhile does not take it.
func FreePort() (int, error) {
	return freePort(func(port int) (io.Closer, error) { return net.Listen("tcp", Addr(port)) })
}

// FreeUDPPort is FreePort for UDP.
func FreeUDPPort() (int, error) {
	return freePort(func(port int) (io.Closer, error) { return net.ListenPacket("udp", Addr(port)) })
}

// lowestPort is the first of those that FreePort chooses from.
const lowestPort = 10_000

func freePort(listen func(port int) (io.Closer, error)) (int, error) {
	end := 32_768
	if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		if _, err := fmt.Sscan(string(b), &end); err != nil {
			return 0, fmt.Errorf("choose a port: %w", err)
		}
	}
	if end < lowestPort+1000 {
		return 0, fmt.Errorf("choose a port: the system gives all from %d on to whoever asks for any", end)
	}
	var last error
	for range 1000 {
		port := lowestPort + rand.IntN(end-lowestPort)
		l, err := listen(port)
		if err == nil {
			return port, l.Close()
		}
		last = err
	}
	return 0, fmt.Errorf("choose a port: %w", last)
}

// Addr is the loopback address with the given port.
func Addr(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// ErrEnded is returned by WaitReady when the process ended instead.
var ErrEnded = errors.New("the process ended before it answered")

// WaitReady returns once the server that p runs answers PING with PONG on its
// client port addr; that another process answers there does not count. It tries
// every few milliseconds for at most timeout.
func WaitReady(p *Process, addr string, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	var last error
	for time.Now().Before(deadline) {
		if last = ping(addr, deadline); last == nil {
			var own bool
			if own, last = p.listensOn(addr); own {
				return nil
			}
			if last == nil {
				last = errors.New("it is another process that answers there")
			}
		}
		select {
		case <-p.Done():
			return fmt.Errorf("wait for %s on %s: %w with status %d; %s", p.name, addr, ErrEnded, p.ExitCode(), p.tailHint())
		case <-tick.C:
		}
	}
	return fmt.Errorf("%s does not answer on %s after %v: %w; %s", p.name, addr, timeout, last, p.tailHint())
}

// ping does the smallest NATS conversation that proves that a server serves.
func ping(addr string, deadline time.Time) error {
	c, err := net.DialTimeout("tcp", addr, time.Until(deadline))
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "INFO ") {
		return fmt.Errorf("no INFO from %s (got %q): %w", addr, line, err)
	}
	if _, err := c.Write([]byte("CONNECT {\"verbose\":false,\"pedantic\":false,\"lang\":\"rig\",\"version\":\"1\",\"protocol\":1}\r\nPING\r\n")); err != nil {
		return err
	}
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return err
		}
		switch {
		case strings.HasPrefix(line, "PONG"):
			return nil
		case strings.HasPrefix(line, "-ERR"):
			return fmt.Errorf("%s refused: %s", addr, strings.TrimSpace(line))
		}
	}
}

// WriteFile writes text to dir/name and returns the path.
func WriteFile(dir, name, text string) (string, error) {
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return "", fmt.Errorf("write configuration: %w", err)
	}
	return path, nil
}

// WorkDir returns the directory a rig works in: given, which is kept, or a new
// temporary one. The returned function, deferred with the rig's error, removes
// the latter unless the rig failed; then it says where the evidence is.
func WorkDir(given, pattern string) (dir string, remove func(*error), err error) {
	if given != "" {
		if dir, err = filepath.Abs(given); err != nil {
			return "", nil, err
		}
		return dir, func(*error) {}, os.MkdirAll(dir, 0o755)
	}
	if dir, err = os.MkdirTemp("", pattern); err != nil {
		return "", nil, err
	}
	return dir, func(failed *error) {
		if *failed != nil {
			*failed = fmt.Errorf("%w (stores and logs are kept in %s)", *failed, dir)
			return
		}
		os.RemoveAll(dir)
	}, nil
}
