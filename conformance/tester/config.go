package tester

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"github.com/synadia-io/orbit.go/ntf-client/api"
)

// slots are the places of a configuration that a request may fill; those with
// true get a port of their own.
var slots = map[string]bool{
	"accounts": false, "system_account": false, "authorization": false, "tls": false,
	"websocket": true, "mqtt": true, "leafnode": true, "jetstream": false, "top": false,
}

// scope is what the templates of a request can refer to. The names are the
// protocol's.
type scope struct {
	ServerName, ShortID, InstanceID string
	ServerIndex                     int
	ServerDir, StoreDir, LogFile    string
	Host, AdvertiseHost             string
	ClientPort                      int
	JetStream                       bool

	ClusterName               string
	ClusterIndex, ClusterPort int
	Routes                    []string
	ClusterSize               int

	Clusters    []string
	GatewayPort int
	Gateways    map[string][]string

	Description, Kind string
	Ports             map[string]int
	// Snippets are paths, relative to the configuration file, by slot.
	Snippets   map[string]string
	TLSInclude string
	TLS        *tlsFiles

	// Program is the kind of server, for main.
	Program Kind
	// Login is what stands for the default accounts in edge and hub: "users",
	// "anonymous" (the users, and no_auth_user) or nothing.
	Login string
}

type tlsFiles struct{ CAFile, CertFile, KeyFile string }

// main is the configuration of a server for which the request brings none.
// nats-server gets the accounts that the protocol promises; edge and hub, where
// all clients share one, their users. A slot that is filled is included.
var main = `{{define "slot"}}{{if .}}include "{{.}}"{{end}}{{end -}}
{{template "slot" .Snippets.top}}
server_name: "{{.ServerName}}"
host: "127.0.0.1"
port: {{.ClientPort}}
client_advertise: "{{.AdvertiseHost}}:{{.ClientPort}}"
log_file: "{{.LogFile}}"
{{if .JetStream}}jetstream {
  enabled: true
  store_dir: "{{.StoreDir}}"
  {{template "slot" .Snippets.jetstream}}
}{{end}}
{{if .ClusterName}}cluster {
  name: "{{.ClusterName}}"
  host: "127.0.0.1"
  port: {{.ClusterPort}}
  routes: [ {{range $i, $r := .Routes}}{{if $i}}, {{end}}"nats://{{$r}}"{{end}} ]
}{{end}}
{{template "slot" .Snippets.tls}}
{{template "slot" .TLSInclude}}
{{template "slot" .Snippets.websocket}}
{{template "slot" .Snippets.mqtt}}
{{template "slot" .Snippets.leafnode}}
{{if .Snippets.system_account}}{{template "slot" .Snippets.system_account}}{{else if eq .Program "nats-server"}}system_account: "$SYS"{{end}}
{{if .Snippets.authorization}}{{template "slot" .Snippets.authorization}}{{else if eq .Program "nats-server"}}no_auth_user: user1{{else if eq .Login "anonymous"}}no_auth_user: user1{{end}}
{{if .Snippets.accounts}}{{template "slot" .Snippets.accounts}}{{else if eq .Program "nats-server"}}accounts {
{{- range $i, $n := users}}
  USERS{{$n}} { users: [ { user: "user{{$n}}", pass: "password" } ], jetstream: {{$.JetStream}} }{{end}}
  $SYS { users: [ { user: "system", pass: "password" } ] }
}{{else if .Login}}authorization {
  users: [ {{range users}}{ user: "user{{.}}", password: "password" }, {{end}}{ user: "system", password: "password" } ]
}{{end}}
`

var functions = template.FuncMap{
	"hostport": func(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) },
	"users":    func() []int { return []int{1, 2, 3, 4, 5} },
}

func render(name, text string, s *scope) ([]byte, error) {
	t, err := template.New(name).Funcs(functions).Parse(text)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := t.Execute(&out, s); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// sets says whether a configuration sets a key, leaving out comments.
func sets(text, key string) bool {
	return slices.ContainsFunc(strings.Split(text, "\n"), func(line string) bool {
		return strings.HasPrefix(strings.TrimSpace(line), key)
	})
}

// login decides what stands for the default accounts.
func login(snippets map[string]string) string {
	if _, given := snippets["accounts"]; given {
		return ""
	}
	auth, given := snippets["authorization"]
	switch {
	case !given:
		return "anonymous"
	case sets(auth, "authorization"):
		return ""
	default:
		return "users"
	}
}

// write makes the configuration file of a server.
func (s *server) write(snippets map[string]string, text string) error {
	sc := s.scope
	sc.Snippets, sc.Login = map[string]string{}, login(snippets)
	dir := filepath.Join(s.dir, "snippets")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	put := func(name string, text []byte) (string, error) {
		path := filepath.Join("snippets", name+".conf")
		// An empty file would not be a configuration.
		return path, os.WriteFile(filepath.Join(s.dir, path), append([]byte("# "+name+"\n"), text...), 0o600)
	}
	for name, body := range snippets {
		if _, known := slots[name]; !known {
			return fmt.Errorf("unknown snippet %q", name)
		}
		if name == "jetstream" && !sc.JetStream {
			return fmt.Errorf("a jetstream snippet for a server without JetStream")
		}
		out, err := render(name, body, &sc)
		if err != nil {
			return fmt.Errorf("snippet %s: %w", name, err)
		}
		if sc.Snippets[name], err = put(name, out); err != nil {
			return err
		}
	}
	if c := s.inst.tls; c != nil {
		var err error
		if sc.TLSInclude, err = put("generated_tls", []byte(c.block())); err != nil {
			return err
		}
	}
	if text == "" {
		text = main
	}
	out, err := render("configuration", text, &sc)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	return os.WriteFile(s.conf, out, 0o600)
}

// update makes the configuration file anew. Which ports there are stays.
func (s *server) update(req api.UpdateServerRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, port := range slots {
		_, now := req.Snippets[name]
		if _, before := s.listeners[name]; port && now != before {
			return fmt.Errorf("snippet %s cannot come or go with an update", name)
		}
	}
	if req.TLSTimeout != nil {
		if s.inst.tls == nil {
			return fmt.Errorf("server %s has no generated TLS", s.name)
		}
		s.inst.tls.options.Timeout = *req.TLSTimeout
	}
	return s.write(req.Snippets, req.Template)
}
