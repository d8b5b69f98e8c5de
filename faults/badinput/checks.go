//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"petiole/faults/rig"
)

// Statuses that the README documents.
const (
	exitUsage       = 64
	exitUnavailable = 69
	exitCannotStore = 73
	exitConfig      = 78
)

func checks() []check {
	return []check{
		{"client-noise", clientNoise},
		{"client-protocol", clientProtocol},
		{"client-hangs-up", clientHangsUp},
		{"client-floods", clientFloods},
		{"slow-readers", slowReaders},
		{"half-open-tcp", halfOpenTCP},
		{"half-open-tls", halfOpenTLS},
		{"quic-noise", quicNoise},
		{"client-password", clientPassword},
		{"edge-password", edgePassword},
		{"hub-certificate", hubCertificate},
		{"hub-stream-not-allowed", streamNotAllowed},
		{"unknown-key", refused(exitConfig, "listenn: 4222\n", nil, `edge\.conf:1`, `listenn`, `(?i)listen\b`)},
		{"unknown-nested-key", refused(exitConfig, "jetstream {\n  store_dir: %DIR/js\n  sinc_interval: always\n}\n", nil, `edge\.conf:3`, `jetstream\.sinc_interval`, `sync_interval`)},
		{"wrong-value", refused(exitConfig, "listen: \"127.0.0.1:99999\"\n", nil, `edge\.conf:1`, `listen`, `(?i)accepted|65535`)},
		{"unsupported-block", refused(exitConfig, "cluster { listen: 127.0.0.1:6222 }\n", nil, `edge\.conf:1`, `cluster`, `(?i)not supported`)},
		{"syntax", refused(exitConfig, "listen: 4222\njetstream {\n", nil, `edge\.conf`, `(?i)parse|syntax|unexpected|end`)},
		{"exports-without-jetstream", refused(exitConfig, "exports: [ROWS]\n", nil, `exports`, `jetstream`)},
		{"unknown-flag", refused(exitUsage, "", []string{"--frobnicate"}, `frobnicate`)},
		{"missing-file", missingFile},
		{"store-is-a-file", storeIsFile},
		{"store-unwritable", storeUnwritable},
		{"store-in-use", storeInUse},
		{"port-in-use", portInUse},
	}
}

// clientNoise sends random bytes on many connections.
func clientNoise(ctx context.Context, b *bench) error {
	for end, n := time.Now().Add(b.load), uint64(0); time.Now().Before(end); n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		c, err := net.DialTimeout("tcp", b.site.EdgeAddr, 5*time.Second)
		if err != nil {
			return fmt.Errorf("the edge does not accept connection %d: %w", n, err)
		}
		r := rand.New(rand.NewPCG(n, 1))
		noise := make([]byte, 1+r.IntN(16<<10))
		for i := range noise {
			noise[i] = byte(r.Uint32())
		}
		if n%3 == 0 { // noise behind a good beginning
			noise = append([]byte("CONNECT {\"verbose\":false}\r\nSUB x 1\r\nPUB x "), noise...)
		}
		_ = c.SetDeadline(time.Now().Add(time.Second))
		_, _ = c.Write(noise) // the edge may hang up any time
		if n%2 == 0 {
			_, _ = c.Read(noise)
		}
		c.Close()
	}
	return nil
}

// clientProtocol sends lines that break a rule each; the edge has to answer
// with -ERR, or to hang up.
func clientProtocol(_ context.Context, b *bench) error {
	long := strings.Repeat("x", 1<<20)
	for _, lines := range []string{
		"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"PUB\r\n",
		"PUB x\r\n",
		"PUB x -1\r\n",
		"PUB x 99999999999999999999\r\n",
		"PUB x 5\r\nhelloworld\r\n",
		"PUB x 2097152\r\n",
		"HPUB x 10 5\r\nhello\r\n",
		"HPUB x 99999 5\r\nhello\r\n",
		"SUB\r\n",
		"SUB x\r\n",
		"SUB x y z a b\r\n",
		"UNSUB\r\n",
		"UNSUB 1 2 3\r\n",
		"CONNECT {\r\n",
		"CONNECT []\r\n",
		"CONNECT " + strings.Repeat("[", 2000) + "\r\n",
		"NONSENSE\r\n",
		"\x00\x00\x00\x00\r\n",
		"SUB " + long + " 1\r\n",
		long + long,
	} {
		name := lines[:min(len(lines), 40)]
		if err := expectRefusal(b.site.EdgeAddr, lines); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
	}
	return nil
}

func expectRefusal(addr, lines string) error {
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	if _, err := r.ReadString('\n'); err != nil {
		return fmt.Errorf("no INFO: %w", err)
	}
	go func() {
		_, _ = c.Write([]byte(lines)) // the edge may hang up any time
	}()
	for {
		line, err := r.ReadString('\n')
		switch {
		case strings.HasPrefix(line, "-ERR"):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return errors.New("the edge neither complained nor hung up within 10 s")
		case err != nil:
			return nil // hung up
		}
	}
}

// clientHangsUp leaves connections in the middle of something and hangs up.
func clientHangsUp(_ context.Context, b *bench) error {
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range 200 {
		c, err := net.DialTimeout("tcp", b.site.EdgeAddr, 5*time.Second)
		if err != nil {
			return err
		}
		conns = append(conns, c)
		part := []string{"", "CON", "CONNECT {}\r\nPUB x 100\r\nhalf", "CONNECT {}\r\nSUB > 1\r\n", "PING"}[i%5]
		if _, err := c.Write([]byte(part)); err != nil {
			return err
		}
	}
	return nil
}

// quicNoise sends random datagrams, and such that look like the beginning of a
// QUIC connection, to the hub's port for edges.
func quicNoise(ctx context.Context, b *bench) error {
	c, err := net.Dial("udp", b.site.LinkAddr)
	if err != nil {
		return err
	}
	defer c.Close()
	for end, n := time.Now().Add(b.load), uint64(0); time.Now().Before(end); n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		r := rand.New(rand.NewPCG(n, 2))
		p := make([]byte, 1+r.IntN(1452))
		for i := range p {
			p[i] = byte(r.Uint32())
		}
		switch n % 4 {
		case 1: // long header, version 1, Initial
			copy(p, "\xc3\x00\x00\x00\x01\x08")
		case 2: // long header, a version that does not exist
			copy(p, "\xc3\xba\xba\xba\xba\x08")
		case 3: // short header
			p[0] = 0x40 | p[0]&0x3f
		}
		if _, err := c.Write(p); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		if n%64 == 0 {
			time.Sleep(time.Millisecond) // not a flood: each one shall be read
		}
	}
	return nil
}

// edgeAlone starts another edge with a configuration that is wrong in one way
// that does not keep it from starting, and ends it after use.
func edgeAlone(b *bench, name, config string, use func(p *rig.Process, addr string) error) error {
	dir := filepath.Join(b.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	port, err := rig.FreePort()
	if err != nil {
		return err
	}
	conf, err := rig.WriteFile(dir, "edge.conf", fmt.Sprintf("listen: %q\n", rig.Addr(port))+strings.ReplaceAll(config, "%DIR", dir))
	if err != nil {
		return err
	}
	p, err := rig.Start("edge", filepath.Join(dir, "edge.log"), b.site.Programs.Edge, "-c", conf)
	if err != nil {
		return err
	}
	defer p.Kill()
	return use(p, rig.Addr(port))
}

// clientPassword logs in with a wrong password, and without one.
func clientPassword(_ context.Context, b *bench) error {
	return edgeAlone(b, "client-password", "authorization { user: alice, password: right }\n", func(p *rig.Process, addr string) error {
		nc, err := connect(p, addr, nats.UserInfo("alice", "right"))
		if err != nil {
			return fmt.Errorf("the right password is refused: %w", err)
		}
		nc.Close()
		for _, login := range []string{"alice:wrong@", "bob:right@", ""} {
			nc, err := nats.Connect("nats://" + login + addr)
			if err == nil {
				nc.Close()
				return fmt.Errorf("login %q was accepted", login)
			}
			if !errors.Is(err, nats.ErrAuthorization) {
				return fmt.Errorf("login %q: want an authorization violation, got %w", login, err)
			}
		}
		return waitLog(p, `(?i)auth`)
	})
}

// waitLog waits until the process's log matches every expression.
func waitLog(p *rig.Process, want ...string) error {
	var missing string
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		missing = ""
		text := p.Log(1 << 20)
		for _, w := range want {
			if !regexp.MustCompile(w).MatchString(text) {
				missing = w
			}
		}
		if missing == "" {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("no line of the log matches %q:\n%s", missing, p.Log(2000))
}

// uplink is the configuration of an edge that exports to the healthy hub.
func (b *bench) uplink(user, password, pin, to string) string {
	return fmt.Sprintf("jetstream { store_dir: \"%%DIR/js\" }\nhub {\n  urls: [\"quic://%s\"]\n  user: %s, password: %q\n  tls { pinned: %q }\n}\nexports: [ { stream: OTHER, to: %s } ]\n",
		b.site.LinkAddr, user, password, pin, to)
}

// refusedUplink starts an edge whose hub must not take it: the log says why,
// and clients are served all the same.
func refusedUplink(b *bench, name, config string, want ...string) error {
	return edgeAlone(b, name, config, func(p *rig.Process, addr string) error {
		if err := rig.WaitReady(p, addr, rig.StartTimeout); err != nil {
			return err
		}
		if err := waitLog(p, want...); err != nil {
			return err
		}
		return rig.WaitReady(p, addr, time.Second) // still serving
	})
}

func edgePassword(_ context.Context, b *bench) error {
	return refusedUplink(b, "edge-password", b.uplink(rig.EdgeUser, "wrong", b.site.Pin, "OTHER"),
		`(?i)user|password|login|auth`, regexp.QuoteMeta(b.site.LinkAddr))
}

func hubCertificate(_ context.Context, b *bench) error {
	pin := "sha256:" + strings.Repeat("ab", 32)
	return refusedUplink(b, "hub-certificate", b.uplink(rig.EdgeUser, rig.EdgePassword, pin, "OTHER"),
		`(?i)certificate`, `(?i)pinned|fingerprint`, regexp.QuoteMeta(b.site.LinkAddr))
}

// streamNotAllowed logs in as a user who may fill other streams only.
func streamNotAllowed(ctx context.Context, b *bench) error {
	config := b.uplink(rig.LimitedUser, rig.LimitedPassword, b.site.Pin, "FORBIDDEN")
	return edgeAlone(b, "hub-stream-not-allowed", config, func(p *rig.Process, addr string) error {
		if err := rig.WaitReady(p, addr, rig.StartTimeout); err != nil {
			return err
		}
		if err := (&rig.Site{EdgeAddr: addr}).CreateStream(ctx, "OTHER", "other.>"); err != nil {
			return err
		}
		return waitLog(p, `FORBIDDEN`, `(?i)not allowed|may not|permi`, rig.LimitedUser)
	})
}

// refused runs the edge with a configuration, or arguments, that it has to
// refuse with the given status and a text that matches every expression.
func refused(status int, config string, args []string, want ...string) func(context.Context, *bench) error {
	return func(ctx context.Context, b *bench) error {
		dir, err := os.MkdirTemp(b.dir, "refused-")
		if err != nil {
			return err
		}
		if config != "" {
			conf, err := rig.WriteFile(dir, "edge.conf", strings.ReplaceAll(config, "%DIR", dir))
			if err != nil {
				return err
			}
			args = append([]string{"-c", conf}, args...)
		}
		return mustFail(exec.CommandContext(ctx, b.site.Programs.Edge, args...), status, want...)
	}
}

// mustFail runs a command that has to end by itself with the given status.
func mustFail(cmd *exec.Cmd, status int, want ...string) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return err
	}
	overdue := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait() // the exit status tells
	if !overdue.Stop() {
		return fmt.Errorf("still running after 10 s, want an end with status %d:\n%s", status, out.String())
	}
	if code := cmd.ProcessState.ExitCode(); code != status {
		return fmt.Errorf("ended with status %d, want %d:\n%s", code, status, out.String())
	}
	for _, w := range want {
		if !regexp.MustCompile(w).MatchString(out.String()) {
			return fmt.Errorf("what it said does not match %q:\n%s", w, out.String())
		}
	}
	return nil
}

func missingFile(ctx context.Context, b *bench) error {
	path := filepath.Join(b.dir, "nowhere", "edge.conf")
	return mustFail(exec.CommandContext(ctx, b.site.Programs.Edge, "-c", path), exitConfig, regexp.QuoteMeta(path), `(?i)no such file|does not exist`)
}

// startOn runs another edge on a store directory that it cannot use.
func startOn(ctx context.Context, b *bench, store string, as *syscall.Credential, want ...string) error {
	cmd := exec.CommandContext(ctx, b.site.Programs.Edge, "-a", "127.0.0.1", "-p", "-1", "-js", "-sd", store)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	return mustFail(cmd, exitCannotStore, append(want, regexp.QuoteMeta(store), `-sd|store_dir`)...)
}

func storeIsFile(ctx context.Context, b *bench) error {
	path, err := rig.WriteFile(b.dir, "a-file", "not a directory")
	if err != nil {
		return err
	}
	return startOn(ctx, b, path, nil, `(?i)not a directory`)
}

// storeUnwritable runs the edge as a user who may not write to the directory.
func storeUnwritable(ctx context.Context, b *bench) error {
	dir := filepath.Join(b.dir, "unwritable")
	if err := os.MkdirAll(dir, 0o555); err != nil {
		return err
	}
	var as *syscall.Credential
	if os.Geteuid() == 0 { // root may write everywhere
		const nobody = 65534
		as = &syscall.Credential{Uid: nobody, Gid: nobody}
		// Another user may not enter the directory that the binary lies in.
		program, err := os.ReadFile(b.site.Programs.Edge)
		if err != nil {
			return err
		}
		mine := *b
		mine.site = &rig.Site{Programs: rig.Programs{Edge: filepath.Join(b.dir, "edge-for-all")}}
		if err := os.WriteFile(mine.site.Programs.Edge, program, 0o755); err != nil {
			return err
		}
		b = &mine
	}
	return startOn(ctx, b, dir, as, `(?i)permission denied`, `(?i)let this user|choose another`)
}

func storeInUse(ctx context.Context, b *bench) error {
	return startOn(ctx, b, b.site.EdgeStore, nil, `(?i)in use|locked`)
}

func portInUse(ctx context.Context, b *bench) error {
	host, port, err := net.SplitHostPort(b.site.EdgeAddr)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, b.site.Programs.Edge, "-a", host, "-p", port)
	return mustFail(cmd, exitUnavailable, regexp.QuoteMeta(b.site.EdgeAddr), `(?i)in use|another program`, `-p\b|port`)
}
