// Package tester serves the protocol in which the test suites of NATS clients
// ask for servers (NATS Testing Framework, github.com/synadia-io/orbit.go/ntf-client
// v0.0.3): requests on tester.*, JSON both ways, errors in the headers of NATS
// services. It starts edge, hub or nats-server as processes of their own, each
// with a configuration file, a directory and ports of 127.0.0.1.
//
// Not served: super-clusters, trace capture, traffic shaping; of edge and hub
// what they do not have, clusters first of all, is an error of the request.
package tester

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"github.com/synadia-io/orbit.go/ntf-client/api"
)

// Kind is what program the servers are.
type Kind string

// The kinds. Hub and Edge share their configuration.
const (
	Edge       Kind = "edge"
	Hub        Kind = "hub"
	NATSServer Kind = "nats-server"
)

// Options say which servers to make, and where.
type Options struct {
	Kind   Kind
	Binary string // the program's path
	Dir    string // exists; what is made in it goes with Close
	Log    *slog.Logger
}

// Tester is the running service. Its own requests go through a server of the
// same kind.
type Tester struct {
	o     Options
	own   *server
	nc    *nats.Conn
	ports *ports
	work  sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	instances map[string]*instance
}

// instance is one server or one cluster that a test asked for.
type instance struct {
	id, kind, description string
	dir                   string
	created               time.Time
	tls                   *certificates
	servers               []*server
}

// Start starts a tester.
func Start(o Options) (*Tester, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	t := &Tester{o: o, instances: map[string]*instance{}}
	var err error
	if t.ports, err = newPorts(); err != nil {
		return nil, err
	}
	if err := t.start(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

func (t *Tester) start() error {
	inst := &instance{id: "tester", dir: filepath.Join(t.o.Dir, "tester"), kind: "server"}
	s, err := t.newServer(inst, api.CreateServerRequest{Snippets: map[string]string{
		"accounts": "", "authorization": "", "system_account": "",
	}}, 1, nil)
	if err != nil {
		return fmt.Errorf("the tester's own server: %w", err)
	}
	t.own = s
	if err := s.start(); err != nil {
		return fmt.Errorf("the tester's own server: %w", err)
	}
	if t.nc, err = nats.Connect(t.URL(), nats.MaxReconnects(-1)); err != nil {
		return fmt.Errorf("the tester's own server: %w", err)
	}
	svc, err := micro.AddService(t.nc, micro.Config{Name: "tester", Version: "0.0.1", Description: "starts " + string(t.o.Kind)})
	if err != nil {
		return fmt.Errorf("the tester's service: %w", err)
	}
	group := svc.AddGroup("tester")
	for subject, handle := range map[string]func([]byte) (any, error){
		"create.server":        t.createServer,
		"create.cluster":       t.createCluster,
		"create.super-cluster": func([]byte) (any, error) { return nil, failed("003", "super-clusters are not served") },
		"stop.server":          t.stopServer,
		"start.server":         t.startServer,
		"stop.instance":        t.stopInstance,
		"start.instance":       t.startInstance,
		"update.server":        t.updateServer,
		"reload.server":        t.reloadServer,
		"status":               t.status,
		"list":                 t.list,
		"destroy":              t.destroy,
		"reset":                t.reset,
	} {
		name := strings.ReplaceAll(subject, ".", "-")
		err := group.AddEndpoint(name, micro.HandlerFunc(func(req micro.Request) { t.serve(req, handle) }), micro.WithEndpointSubject(subject))
		if err != nil {
			return fmt.Errorf("the tester's endpoint %s: %w", subject, err)
		}
	}
	return t.nc.Flush()
}

// URL is what goes into TESTER_NATS_URL. It says localhost because tests make
// certificates for the name in it.
func (t *Tester) URL() string { return "nats://localhost:" + strconv.Itoa(t.own.port) }

// Close stops all servers and removes what they left.
func (t *Tester) Close() error {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	if t.nc != nil {
		t.nc.Close()
	}
	t.work.Wait()
	_, err := t.reset(nil)
	if t.own != nil {
		err = errors.Join(err, t.own.stop(), os.RemoveAll(t.own.inst.dir))
	}
	return err
}

// failure is an error with the code that the protocol gives it.
type failure struct {
	code string
	error
}

func failed(code, format string, args ...any) error {
	return &failure{code, fmt.Errorf(format, args...)}
}

// serve answers one request beside the others: starting a server takes long.
func (t *Tester) serve(req micro.Request, handle func([]byte) (any, error)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	t.work.Go(func() {
		answer, err := handle(req.Data())
		if err == nil {
			err = req.RespondJSON(answer)
		} else {
			t.o.Log.Warn("request refused", "subject", req.Subject(), "error", err)
			code := "500"
			var f *failure
			if errors.As(err, &f) {
				code = f.code
			}
			// The text travels in a header.
			err = req.Error(code, strings.Join(strings.Fields(err.Error()), " "), nil)
		}
		if err != nil {
			t.o.Log.Error("request not answered", "subject", req.Subject(), "error", err)
		}
	})
}

func decode[T any](data []byte) (v T, err error) {
	if len(data) > 0 {
		err = json.Unmarshal(data, &v)
	}
	if err != nil {
		return v, failed("001", "invalid request: %w", err)
	}
	return v, nil
}

func (t *Tester) createServer(data []byte) (any, error) {
	req, err := decode[api.CreateServerRequest](data)
	if err != nil {
		return nil, err
	}
	return t.create("server", req, 1)
}

func (t *Tester) createCluster(data []byte) (any, error) {
	req, err := decode[api.CreateClusterRequest](data)
	if err != nil {
		return nil, err
	}
	if t.o.Kind != NATSServer {
		return nil, failed("003", "%s has no clusters", t.o.Kind)
	}
	if req.Servers < 2 || req.Servers > 20 {
		return nil, failed("002", "a cluster of %d servers; accepted: 2 to 20", req.Servers)
	}
	return t.create("cluster", api.CreateServerRequest{
		JetStream: req.JetStream, Description: req.Description, Snippets: req.Snippets,
		Template: req.Template, TLS: req.TLS, Trace: req.Trace,
	}, req.Servers)
}

func (t *Tester) create(kind string, req api.CreateServerRequest, size int) (*api.CreateResponse, error) {
	if req.Trace {
		return nil, failed("014", "trace capture is not served")
	}
	if req.TLS != nil && req.Snippets["tls"] != "" {
		return nil, failed("007", "generated TLS and a tls snippet exclude each other")
	}
	// One case, for ids and their ends become names of servers and directories.
	id := strings.ToLower(rand.Text())
	inst := &instance{
		id: id, kind: kind, description: req.Description, created: time.Now(),
		dir: filepath.Join(t.o.Dir, id),
	}
	resp := &api.CreateResponse{ID: id, Description: req.Description, Kind: kind}
	err := func() (err error) {
		if req.TLS != nil {
			if inst.tls, err = newCertificates(filepath.Join(inst.dir, "tls"), *req.TLS); err != nil {
				return err
			}
			resp.TLS = &inst.tls.material
		}
		var routes []int
		if size > 1 {
			for range size {
				p, err := t.ports.take()
				if err != nil {
					return err
				}
				routes = append(routes, p)
			}
		}
		for i := range size {
			s, err := t.newServer(inst, req, i+1, routes)
			if err != nil {
				return err
			}
			inst.servers = append(inst.servers, s)
		}
		for _, s := range inst.servers {
			if err := s.start(); err != nil {
				return err
			}
			resp.Servers = append(resp.Servers, s.managed())
		}
		return nil
	}()
	if err != nil {
		return nil, failed("003", "create %s: %w", kind, errors.Join(err, t.remove(inst)))
	}
	t.mu.Lock()
	t.instances[id] = inst
	t.mu.Unlock()
	return resp, nil
}

// remove ends an instance's servers and takes its directory away.
func (t *Tester) remove(inst *instance) error {
	var errs []error
	for _, s := range inst.servers {
		errs = append(errs, s.stop())
		t.ports.give(s.port)
		t.ports.give(s.route)
		for _, p := range s.listeners {
			t.ports.give(p)
		}
	}
	return errors.Join(append(errs, os.RemoveAll(inst.dir))...)
}

// byName finds a server, whose name is unique among all instances.
func (t *Tester) byName(name string) (*server, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, inst := range t.instances {
		for _, s := range inst.servers {
			if s.name == name {
				return s, nil
			}
		}
	}
	return nil, failed("001", "server not found: %q", name)
}

func (t *Tester) byID(id string) (*instance, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	inst := t.instances[id]
	if inst == nil {
		return nil, failed("404", "instance not found: %q", id)
	}
	return inst, nil
}

func (t *Tester) stopServer(data []byte) (any, error) {
	req, err := decode[api.StopServerRequest](data)
	if err != nil {
		return nil, err
	}
	s, err := t.byName(req.Name)
	if err != nil {
		return nil, err
	}
	if !s.running() {
		return nil, failed("003", "server not running: %s", s.name)
	}
	if err := s.stop(); err != nil {
		return nil, failed("004", "%w", err)
	}
	return api.StopServerResponse{Shutdown: true}, nil
}

func (t *Tester) startServer(data []byte) (any, error) {
	req, err := decode[api.StartServerRequest](data)
	if err != nil {
		return nil, err
	}
	s, err := t.byName(req.Name)
	if err != nil {
		return nil, err
	}
	if s.running() {
		return nil, failed("003", "server already running: %s", s.name)
	}
	if err := s.start(); err != nil {
		return nil, failed("005", "%w", err)
	}
	return api.StartServerResponse{Started: true}, nil
}

// each does something to all servers of an instance.
func (t *Tester) each(id string, do func(*server) error) ([]api.ServerStateResult, error) {
	inst, err := t.byID(id)
	if err != nil {
		return nil, err
	}
	var out []api.ServerStateResult
	for _, s := range inst.servers {
		r := api.ServerStateResult{Name: s.name}
		if err := do(s); err != nil {
			r.Error = err.Error()
		}
		r.Running = s.running()
		out = append(out, r)
	}
	return out, nil
}

func (t *Tester) stopInstance(data []byte) (any, error) {
	req, err := decode[api.StopInstanceRequest](data)
	if err != nil {
		return nil, err
	}
	out, err := t.each(req.InstanceID, (*server).stop)
	return api.StopInstanceResponse{Servers: out}, err
}

func (t *Tester) startInstance(data []byte) (any, error) {
	req, err := decode[api.StartInstanceRequest](data)
	if err != nil {
		return nil, err
	}
	out, err := t.each(req.InstanceID, func(s *server) error {
		if s.running() {
			return nil
		}
		return s.start()
	})
	return api.StartInstanceResponse{Servers: out}, err
}

func (t *Tester) updateServer(data []byte) (any, error) {
	req, err := decode[api.UpdateServerRequest](data)
	if err != nil {
		return nil, err
	}
	s, err := t.byName(req.Name)
	if err != nil {
		return nil, err
	}
	if err := s.update(req); err != nil {
		return nil, failed("009", "%w", err)
	}
	return api.UpdateServerResponse{Updated: true}, nil
}

func (t *Tester) reloadServer(data []byte) (any, error) {
	req, err := decode[api.ReloadServerRequest](data)
	if err != nil {
		return nil, err
	}
	s, err := t.byName(req.Name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.reload(ctx); err != nil {
		return nil, failed("010", "%w", err)
	}
	return api.ReloadServerResponse{Reloaded: true}, nil
}

func (t *Tester) status(data []byte) (any, error) {
	req, err := decode[api.StatusRequest](data)
	if err != nil {
		return nil, err
	}
	resp := api.StatusResponse{Instances: []api.InstanceStatus{}}
	for _, inst := range t.sorted() {
		if req.InstanceID != "" && inst.id != req.InstanceID {
			continue
		}
		st := api.InstanceStatus{ID: inst.id, Description: inst.description, Kind: inst.kind}
		for _, s := range inst.servers {
			st.Servers = append(st.Servers, *s.managed())
		}
		resp.Instances = append(resp.Instances, st)
	}
	if req.InstanceID != "" && len(resp.Instances) == 0 {
		return nil, failed("404", "instance not found: %q", req.InstanceID)
	}
	return resp, nil
}

func (t *Tester) list([]byte) (any, error) {
	resp := api.ListResponse{Instances: []api.InstanceSummary{}}
	for _, inst := range t.sorted() {
		resp.Instances = append(resp.Instances, api.InstanceSummary{
			ID: inst.id, Description: inst.description, Kind: inst.kind,
			Cluster: inst.servers[0].cluster, Servers: len(inst.servers), Created: inst.created,
		})
	}
	return resp, nil
}

func (t *Tester) sorted() []*instance {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.SortedFunc(maps.Values(t.instances), func(a, b *instance) int { return a.created.Compare(b.created) })
}

func (t *Tester) destroy(data []byte) (any, error) {
	req, err := decode[api.DestroyRequest](data)
	if err != nil {
		return nil, err
	}
	inst, err := t.byID(req.InstanceID)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	delete(t.instances, inst.id)
	t.mu.Unlock()
	if err := t.remove(inst); err != nil {
		return nil, failed("004", "%w", err)
	}
	return api.DestroyResponse{Destroyed: true}, nil
}

func (t *Tester) reset([]byte) (any, error) {
	t.mu.Lock()
	all := t.instances
	t.instances = map[string]*instance{}
	t.mu.Unlock()
	var errs []error
	for _, inst := range all {
		errs = append(errs, t.remove(inst))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, failed("004", "%w", err)
	}
	return api.ResetResponse{Shutdown: true}, nil
}
