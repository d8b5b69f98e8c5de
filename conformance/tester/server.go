package tester

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/synadia-io/orbit.go/ntf-client/api"
)

// patience is how long a server may take to start, stop or reload.
const patience = 20 * time.Second

// server is one process, or the place for one.
type server struct {
	inst          *instance
	binary        string
	name, cluster string
	dir, conf     string
	port, route   int
	listeners     map[string]int
	scope         scope

	mu   sync.Mutex
	cmd  *exec.Cmd
	gone chan struct{} // closed when cmd has ended
}

// newServer prepares directory, ports and configuration.
func (t *Tester) newServer(inst *instance, req api.CreateServerRequest, index int, routes []int) (*server, error) {
	short := inst.id[max(0, len(inst.id)-8):]
	s := &server{
		inst: inst, binary: t.o.Binary, name: fmt.Sprintf("%s-n%d", short, index),
		dir: filepath.Join(inst.dir, "n"+strconv.Itoa(index)), listeners: map[string]int{},
	}
	s.conf = filepath.Join(s.dir, "server.conf")
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	if s.port, err = t.ports.take(); err != nil {
		return nil, err
	}
	for name, port := range slots {
		if _, given := req.Snippets[name]; given && port {
			if s.listeners[name], err = t.ports.take(); err != nil {
				return nil, err
			}
		}
	}
	s.scope = scope{
		ServerName: s.name, ShortID: short, InstanceID: inst.id, ServerIndex: index,
		ServerDir: s.dir, StoreDir: s.dir, LogFile: filepath.Join(s.dir, "server.log"),
		Host: "localhost", AdvertiseHost: "localhost", ClientPort: s.port, JetStream: req.JetStream,
		Description: inst.description, Kind: inst.kind, Ports: s.listeners, Program: t.o.Kind, ClusterPort: -1,
	}
	if routes != nil {
		s.cluster, s.route = "cluster-"+short, routes[index-1]
		s.scope.ClusterName, s.scope.ClusterIndex, s.scope.ClusterPort, s.scope.ClusterSize = s.cluster, 1, s.route, len(routes)
		for _, p := range routes {
			s.scope.Routes = append(s.scope.Routes, "127.0.0.1:"+strconv.Itoa(p))
		}
	}
	if c := inst.tls; c != nil {
		s.scope.TLS = &tlsFiles{CAFile: c.caFile, CertFile: c.cert, KeyFile: c.keyFile}
	}
	return s, s.write(req.Snippets, req.Template)
}

func (s *server) managed() *api.ManagedServer {
	ports := maps.Clone(s.listeners)
	if s.route != 0 {
		ports["cluster"] = s.route
	}
	return &api.ManagedServer{Name: s.name, Cluster: s.cluster, Port: s.port, Ports: ports, Running: s.running()}
}

func (s *server) running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cmd != nil
}

// readyLine is what the logs say when clients can connect.
var readyLine = map[Kind]string{Edge: "edge is ready", Hub: "hub is ready", NATSServer: "Server is ready"}

// start returns when clients can connect.
func (s *server) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd != nil {
		return fmt.Errorf("server %s runs already", s.name)
	}
	before, err := s.logged()
	if err != nil {
		return err
	}
	ready := readyLine[s.scope.Program]
	out, err := os.OpenFile(filepath.Join(s.dir, "output"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := exec.Command(s.binary, "-c", s.conf)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, out, out
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start server %s: %w", s.name, err)
	}
	s.cmd, s.gone = cmd, make(chan struct{})
	go func(gone chan struct{}) {
		// How it ended is told by its text.
		_ = cmd.Wait()
		close(gone)
	}(s.gone)
	deadline := time.Now().Add(patience)
	for {
		select {
		case <-s.gone:
			s.cmd = nil
			return fmt.Errorf("server %s ended at its start: %s", s.name, s.said())
		case <-time.After(5 * time.Millisecond):
		}
		// No connection is made to see it: it might be one too many.
		if log, err := s.logged(); err != nil {
			return errors.Join(err, s.end())
		} else if strings.Contains(log[min(len(before), len(log)):], ready) {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("server %s does not listen after %v: %s", s.name, patience, s.said()), s.end())
		}
	}
}

// logged is all that the process has written, to its log or elsewhere.
func (s *server) logged() (string, error) {
	var all strings.Builder
	for _, path := range []string{filepath.Join(s.dir, "output"), s.scope.LogFile} {
		text, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("the log of server %s: %w", s.name, err)
		}
		all.Write(text)
	}
	return all.String(), nil
}

// said is the end of that.
func (s *server) said() string {
	text, err := s.logged()
	if err != nil {
		return err.Error()
	}
	text = strings.TrimSpace(text)
	return text[max(0, len(text)-600):]
}

func (s *server) stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end()
}

// end ends the process, if there is one.
func (s *server) end() error {
	if s.cmd == nil {
		return nil
	}
	defer func() { s.cmd = nil }()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop server %s: %w", s.name, err)
	}
	select {
	case <-s.gone:
		return nil
	case <-time.After(patience):
	}
	err := s.cmd.Process.Kill()
	<-s.gone
	return errors.Join(fmt.Errorf("server %s had to be killed: it did not stop within %v", s.name, patience), err)
}

// The lines of the logs that tell what became of a reload: nats-server's, ours.
var (
	reloadDone   = []string{"Reloaded server configuration", "configuration reloaded"}
	reloadFailed = []string{"Failed to reload server configuration", "configuration not reloaded"}
)

// reload has the configuration file read again, and returns when that is done.
func (s *server) reload(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return fmt.Errorf("server %s does not run", s.name)
	}
	before, err := s.logged()
	if err != nil {
		return err
	}
	if err := s.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		return fmt.Errorf("reload server %s: %w", s.name, err)
	}
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("reload server %s: its log does not tell what became of it", s.name)
		case <-s.gone:
			return fmt.Errorf("server %s ended at a reload: %s", s.name, s.said())
		case <-time.After(5 * time.Millisecond):
		}
		log, err := s.logged()
		if err != nil {
			return err
		}
		for line := range strings.Lines(log[min(len(before), len(log)):]) {
			if !strings.HasSuffix(line, "\n") {
				break
			}
			if has(line, reloadFailed) {
				return fmt.Errorf("reload server %s: %s", s.name, strings.TrimSpace(line))
			}
			if has(line, reloadDone) {
				return nil
			}
		}
	}
}

func has(line string, any []string) bool {
	for _, text := range any {
		if strings.Contains(line, text) {
			return true
		}
	}
	return false
}
