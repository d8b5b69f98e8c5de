package config

import (
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"petiole/internal/subject/transform"
)

// write puts text into a file of a fresh directory.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestEmptyFileGivesDefaults(t *testing.T) {
	path := write(t, "empty.conf", "# nothing\n")
	got, err := Load(path, Edge)
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Path = path
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got.JetStream.SyncInterval != 0 {
		t.Error("the default has to be fsync before acknowledgement")
	}
}

func TestLoadEdge(t *testing.T) {
	ca := write(t, "ca.pem", "")
	path := write(t, "edge.conf", `
		SECRET: "s3cret"
		listen: "127.0.0.1:4333"
		server_name: till-7
		max_payload: 2MB, max_control_line: 8k
		max_connections: 12
		max_subscriptions: 99
		max_pending: "32MB"
		ping_interval: "30s"
		ping_max: 5
		write_deadline: 3
		authorization {
			timeout: 0.5
			default_permissions { publish: "out.>" }
			users: [
				{ user: a, password: $SECRET }
				{ user: b, pass: "$2a$11$xyz", permissions {
					publish { allow: ["x.>", "y"], deny: "x.z" }
					subscribe: ["_INBOX.>"]
					allow_responses { max: 5, expires: "1m" } } }
				{ nkey: UAH42UG6PV552P5SWLWTBP3H3S5BHAVCO2IEKEXUANJXR75J63RQ5WM6 }
			]
		}
		no_auth_user: a
		jetstream { store_dir: "/var/lib/petiole", max_mem: 256MB, max_file: "10G", sync_interval: "250ms" }
		debug: true, logtime: false
		log_file: "/var/log/edge.log"
		log_format: json
		pid_file: "/run/edge.pid"
		hub {
			urls: ["quic://hub-a:7423", "quic://[::1]:7423"]
			user: plant, password: $SECRET
			tls { ca_file: "`+ca+`", server_name: hub.example, pinned: "sha256:AB:`+strings.Repeat("0", 62)+`" }
		}
		exports: [ {stream: READINGS, to: PLANT}, {stream: SALES} ]
	`)
	got, err := Load(path, Edge)
	if err != nil {
		t.Fatal(err)
	}
	defaults := &Permissions{Publish: Subjects{Allow: []string{"out.>"}}}
	want := &Config{
		Path: path, Host: "127.0.0.1", Port: 4333, ServerName: "till-7",
		MaxPayload: 2 << 20, MaxControlLine: 8000, MaxConnections: 12, MaxSubs: 99, MaxPending: 32 << 20,
		PingInterval: 30 * time.Second, PingMax: 5, WriteDeadline: 3 * time.Second,
		Auth: Authorization{Timeout: 500 * time.Millisecond, NoAuthUser: "a", Users: []User{
			{Name: "a", Password: "s3cret", Permissions: defaults},
			{Name: "b", Password: "$2a$11$xyz", Permissions: &Permissions{
				Publish:   Subjects{Allow: []string{"x.>", "y"}, Deny: []string{"x.z"}},
				Subscribe: Subjects{Allow: []string{"_INBOX.>"}},
				Responses: &Responses{Max: 5, Expires: time.Minute},
			}},
			{Nkey: "UAH42UG6PV552P5SWLWTBP3H3S5BHAVCO2IEKEXUANJXR75J63RQ5WM6", Permissions: defaults},
		}},
		JetStream: JetStream{Enabled: true, StoreDir: "/var/lib/petiole", MaxMemory: 256 << 20, MaxStore: 10 << 30, SyncInterval: 250 * time.Millisecond},
		Log:       Logging{Debug: true, File: "/var/log/edge.log", Format: "json"},
		PIDFile:   "/run/edge.pid",
		LameDuck:  DefaultLameDuck, LameDuckGrace: DefaultLameDuckGrace,
		Uplink: &Uplink{
			URLs: []string{"quic://hub-a:7423", "quic://[::1]:7423"}, User: "plant", Password: "s3cret",
			CAFile: ca, Digest: sha256.Sum256(nil), ServerName: "hub.example", Pinned: "sha256:ab" + strings.Repeat("0", 62),
		},
		Exports: []Export{{"READINGS", "PLANT"}, {"SALES", "SALES"}},
	}
	if at := got.At("jetstream.sync_interval"); at.File != path || at.Line != 25 {
		t.Errorf("sync_interval is at %+v", at)
	}
	got.where = nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

func TestLoadHub(t *testing.T) {
	path := write(t, "hub.conf", `
		port: 4222
		jetstream { store_dir: "/srv/hub" }
		edges {
			listen: ":7500"
			users: [
				{ user: plant, password: x, streams: ["PLANT_*", SALES] }
				{ nkey: UAH42UG6PV552P5SWLWTBP3H3S5BHAVCO2IEKEXUANJXR75J63RQ5WM6, streams: PLANT }
			]
		}`)
	got, err := Load(path, Hub)
	if err != nil {
		t.Fatal(err)
	}
	want := &Edges{Host: "0.0.0.0", Port: 7500, Users: []EdgeUser{
		{User: "plant", Password: "x", Streams: []string{"PLANT_*", "SALES"}},
		{Nkey: "UAH42UG6PV552P5SWLWTBP3H3S5BHAVCO2IEKEXUANJXR75J63RQ5WM6", Streams: []string{"PLANT"}},
	}}
	if !reflect.DeepEqual(got.Edges, want) {
		t.Errorf("edges %+v, want %+v", got.Edges, want)
	}
}

func TestJetStreamWords(t *testing.T) {
	for text, want := range map[string]JetStream{
		"jetstream: true":                                      {Enabled: true, MaxMemory: -1, MaxStore: -1},
		"jetstream: enabled":                                   {Enabled: true, MaxMemory: -1, MaxStore: -1},
		"jetstream: disabled":                                  {MaxMemory: -1, MaxStore: -1},
		"jetstream {}":                                         {Enabled: true, MaxMemory: -1, MaxStore: -1},
		"jetstream { enabled: false }":                         {MaxMemory: -1, MaxStore: -1},
		"store_dir: /d; jetstream: true":                       {Enabled: true, StoreDir: "/d", MaxMemory: -1, MaxStore: -1},
		"jetstream { sync_interval: always }":                  {Enabled: true, MaxMemory: -1, MaxStore: -1},
		"jetstream { sync: 2, max_file_store: 5, max_mem: 0 }": {Enabled: true, MaxStore: 5, SyncInterval: 2 * time.Second},
	} {
		got, err := Load(write(t, "js.conf", text), Edge)
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if got.JetStream != want {
			t.Errorf("%s: got %+v, want %+v", text, got.JetStream, want)
		}
	}
}

// TestMistakes pins what a user is told. FILE stands for the file's name.
func TestMistakes(t *testing.T) {
	tests := []struct {
		name string
		text string
		hub  bool
		want []string
	}{
		{
			name: "unknown key, near one",
			text: "port: 4222\npingInterval: 3\n",
			want: []string{`FILE:2: pingInterval: unknown key; did you mean "ping_interval"?`},
		},
		{
			name: "unknown key, nothing near",
			text: "colour: green\n",
			want: []string{`FILE:1: colour: unknown key; see the configuration table in README.md`},
		},
		{
			name: "unknown key in a block",
			text: "jetstream {\n  stor_dir: /x\n}\n",
			want: []string{`FILE:2: jetstream.stor_dir: unknown key; did you mean "store_dir"?`},
		},
		{
			name: "wrong type",
			text: "port: \"many\"\n",
			want: []string{`FILE:1: port: bad value "many"; accepted: 1 to 65535, or -1 for one the system chooses`},
		},
		{
			name: "out of range",
			text: "\n\nlisten: 70000\n",
			want: []string{`FILE:3: listen: bad value 70000; accepted: "host:port" or a port, 1 to 65535, or -1 for one the system chooses`},
		},
		{
			name: "all at once, in order",
			text: "debug: maybe\ntrace: 3\nlog_format: xml\n",
			want: []string{
				`FILE:1: debug: bad value "maybe"; accepted: true or false`,
				`FILE:2: trace: bad value 3; accepted: true or false`,
				`FILE:3: log_format: bad value "xml"; accepted: text or json`,
			},
		},
		{
			name: "of nats-server, not here",
			text: "cluster {\n  name: x\n}\n",
			want: []string{"FILE:1: cluster: not supported yet; remove it: each program runs as one node; edges reach a hub through `hub { urls }`"},
		},
		{
			name: "of nats-server's jetstream, not here",
			text: "jetstream {\n domain: leaf\n}\n",
			want: []string{"FILE:2: jetstream.domain: not supported yet; remove it: there are no domains, the JetStream of each program is its own"},
		},
		{
			name: "hub's key at an edge",
			text: "edges { listen: 7423 }\n",
			want: []string{"FILE:1: edges: belongs to the configuration of the hub program; remove it here"},
		},
		{
			name: "edge's key at a hub", hub: true,
			text: "exports: [A]\n",
			want: []string{"FILE:1: exports: belongs to the configuration of the edge program; remove it here"},
		},
		{
			name: "two names of one setting",
			text: "max_conn: 3\nmax_connections: 4\n",
			want: []string{`FILE:2: max_connections: "max_conn" and "max_connections" are names of one setting; keep one of them`},
		},
		{
			name: "bad sync interval",
			text: "jetstream { sync_interval: never }\n",
			want: []string{`FILE:1: jetstream.sync_interval: bad value "never"; accepted: always, or a duration such as "100ms"`},
		},
		{
			name: "hub without urls",
			text: "hub { user: a }\n",
			want: []string{`FILE:1: hub: urls is missing; accepted: "quic://host:port", or a list of them; name the hub`},
		},
		{
			name: "hub over another protocol",
			text: "hub { urls: [\"nats://h:1\"] }\n",
			want: []string{`FILE:1: hub.urls: bad value "nats://h:1"; accepted: "quic://host:port", or a list of them`},
		},
		{
			name: "user without password for the hub",
			text: "hub { url: \"quic://h\", user: plant }\n",
			want: []string{"FILE:1: hub: user without password; add password"},
		},
		{
			name: "missing seed file",
			text: "hub { url: \"quic://h\", nkey_seed_file: /does/not/exist }\n",
			want: []string{"FILE:1: hub.nkey_seed_file: cannot read /does/not/exist: no such file or directory; check the name and who may read it"},
		},
		{
			name: "exports without jetstream",
			text: "exports: [{stream: A}]\n",
			want: []string{"FILE:1: exports: streams can only be exported with JetStream; add `jetstream { store_dir: ... }`"},
		},
		{
			name: "export of an impossible stream, and one twice",
			text: "jetstream: true\nexports: [\n  {stream: \"a.b\"}\n  {stream: A}\n  {stream: A, to: B}\n]\n",
			want: []string{
				`FILE:3: exports[0]: "a.b" cannot be a stream; accepted: a stream name: no blanks, dots, wildcards or slashes`,
				`FILE:5: exports[2]: stream "A" is exported twice; keep one of them`,
			},
		},
		{
			name: "tls half configured",
			text: "tls { cert_file: /c.pem }\n",
			want: []string{"FILE:1: tls: cert_file and key_file are both needed; accepted: two PEM files; add the missing one"},
		},
		{
			name: "user without name",
			text: "authorization { users: [\n {password: x}\n] }\n",
			want: []string{"FILE:2: authorization.users[0]: neither user nor nkey is given; accepted: { user, password, permissions } or { nkey, permissions }"},
		},
		{
			name: "bad permission",
			text: "authorization { users: [ {user: a, permissions { publish: \"a..b\" }} ] }\n",
			want: []string{`FILE:1: authorization.users[0].permissions.publish: bad value "a..b"; accepted: a subject such as "plant.>", or a list of subjects`},
		},
		{
			name: "a queue group where none can be",
			text: "authorization { users: [ {user: a, password: b, permissions {\n publish: \"a q\"\n subscribe: [\"a q\", \"a q r\"\n\" a\"\n\"a\\tq\"] }} ] }\n",
			want: []string{
				`FILE:2: authorization.users[0].permissions.publish: bad value "a q"; accepted: a subject such as "plant.>", or a list of subjects`,
				`FILE:3: authorization.users[0].permissions.subscribe: bad value "a q r"; accepted: a subject such as "plant.>", or a list of subjects`,
				`FILE:4: authorization.users[0].permissions.subscribe: bad value " a"; accepted: a subject such as "plant.>", or a list of subjects`,
				`FILE:5: authorization.users[0].permissions.subscribe: bad value "a\tq"; accepted: a subject such as "plant.>", or a list of subjects`,
			},
		},
		{
			name: "payload above pending",
			text: "max_payload: 2MB\nmax_pending: 1MB\n",
			want: []string{"FILE:1: max_payload: 2097152 is more than max_pending (1048576), so the largest message could never be delivered; raise max_pending"},
		},
		{
			name: "syntax",
			text: "port: 4222\nlisten: [1, 2\n",
			want: []string{"FILE:3: "},
		},
		{
			name: "unclosed block",
			text: "jetstream {\n  store_dir: /x\n",
			want: []string{"FILE:"},
		},
		{
			name: "unknown variable",
			text: "port: 4222\nserver_name: $NO_SUCH_VARIABLE_HERE\n",
			want: []string{"FILE:2: variable reference for 'NO_SUCH_VARIABLE_HERE' on line 2 can not be found; define the variable in the file, or in the environment"},
		},
		{
			name: "edge user without streams", hub: true,
			text: "jetstream: true\nedges { users: [ {user: a, password: b} ] }\n",
			want: []string{"FILE:2: edges.users[0]: streams is missing; accepted: a stream name, in which * matches any characters, or a list of them; say `streams: \"*\"` if it may fill every stream"},
		},
		{
			name: "edge user without password", hub: true,
			text: "jetstream: true\nedges { users: [ {user: a} ] }\n",
			want: []string{"FILE:2: edges.users[0]: password is missing; give the user a password, or use nkey"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := write(t, "x.conf", tt.text)
			program := Edge
			if tt.hub {
				program = Hub
			}
			_, err := Load(path, program)
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("got %v, want a configuration error", err)
			}
			got := strings.Split(strings.ReplaceAll(err.Error(), path, "FILE"), "\n")
			if len(got) != len(tt.want) {
				t.Fatalf("got %q, want %q", got, tt.want)
			}
			for i, want := range tt.want {
				if got[i] != want && (!strings.HasSuffix(want, ": ") && !strings.HasSuffix(want, ":") || !strings.HasPrefix(got[i], want)) {
					t.Errorf("got  %s\nwant %s", got[i], want)
				}
				if e.Problems[i].Line == 0 && !strings.Contains(want, "FILE: ") {
					t.Errorf("%s: no line", got[i])
				}
			}
		})
	}
}

func TestMappings(t *testing.T) {
	c, err := Load(write(t, "x.conf", `
		mappings {
			in: out
			"orders.*": [ { destination: "o.$1", weight: 40 }, { dest: "p.{{partition(3,1)}}", weight: "30%", cluster: east } ]
			b: { destination: c, weight: 100% }
		}`), Edge)
	if err != nil {
		t.Fatal(err)
	}
	want := []transform.Mapping{
		{Source: "b", Destinations: []transform.Destination{{Subject: "c", Weight: 100}}},
		{Source: "in", Destinations: []transform.Destination{{Subject: "out", Weight: 100}}},
		{Source: "orders.*", Destinations: []transform.Destination{
			{Subject: "o.$1", Weight: 40}, {Subject: "p.{{partition(3,1)}}", Weight: 30, Cluster: "east"},
		}},
	}
	if !reflect.DeepEqual(c.Mappings, want) {
		t.Errorf("%+v", c.Mappings)
	}
}

// TestWhatIsAccepted: mistakes whose remedy is a list.
func TestWhatIsAccepted(t *testing.T) {
	for text, want := range map[string]string{
		"mappings { \"foo.*\": \"bar.$2\" }":       "; accepted: $1, for foo.* has one wildcard * only",
		"mappings { \"foo.*.*\": \"bar.$3\" }":     "; accepted: $1 to $2, one for each wildcard * of foo.*.*",
		"mappings { foo: \"bar.$1\" }":             "; accepted: no reference, for foo has no wildcard *",
		"jetstream { domain: x }":                  ": jetstream.domain: not supported yet; remove it: there are no domains, the JetStream of each program is its own",
		"jetstream { quorum: 3 }":                  ": jetstream.quorum: unknown key; accepted: store_dir, max_mem, max_file, sync_interval, enabled",
		"exports: [ { stream: A, retention: 3 } ]": "unknown key; accepted: stream, to",
	} {
		_, err := Load(write(t, "x.conf", text), Edge)
		if err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", text, err, want)
		}
	}
}

// TestNoBound: nats-server's ways of saying that there is no bound.
func TestNoBound(t *testing.T) {
	c, err := Load(write(t, "x.conf", "max_subscriptions: -1\nmax_connections: 0\n"), Edge)
	if err != nil || c.MaxSubs != 0 || c.MaxConnections != -1 {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestMissingFile(t *testing.T) {
	_, err := Load("/does/not/exist.conf", Edge)
	const want = "/does/not/exist.conf: cannot read the configuration file: no such file or directory; check the name given with -c"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestIncludeNamesTheIncludedFile(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"main.conf": "port: 4222\ninclude 'more.conf'\n", "more.conf": "\ndebug: 7\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, err := Load(filepath.Join(dir, "main.conf"), Edge)
	if want := filepath.Join(dir, "more.conf") + ":2: debug: "; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want it to start with %s", err, want)
	}
}

// TestIncludesThatAreWrong: the mistake is where it stands, not where the file
// is included.
func TestIncludesThatAreWrong(t *testing.T) {
	main := "port: 4222\n# include main.conf\n\ninclude 'more.conf'\ndebug: true\n"
	for name, c := range map[string]struct{ main, more, want string }{
		"missing":            {"port: 4222\n\ninclude \"gone.conf\"\n", "", "main.conf:3: cannot read the included file gone.conf: "},
		"missing further on": {main, "\ninclude gone.conf", "more.conf:2: cannot read the included file gone.conf: "},
		"blank in the name":  {main, "include 'far gone.conf'", "more.conf:1: cannot read the included file far gone.conf: "},
		"unclosed":           {main, "\n\nauthorization { user: a\n", "more.conf:4: syntax error: the file ends within a block"},
		"syntax":             {main, "\n]", "more.conf:2: syntax error: "},
		"variable":           {main, "\n\ndebug: $NO_SUCH_VARIABLE\n", "more.conf:3: variable reference for 'NO_SUCH_VARIABLE'"},
		"itself":             {"debug: true\nInclude 'main.conf'\n", "", "main.conf:2: include: the file includes itself; remove it"},
		"each other":         {main, "debug: true\ntls { include \"./main.conf\" }", "more.conf:2: include: ./main.conf includes this file, directly or through others; remove it here or there"},
		"twice":              {main + "include 'more.conf'\n", "max_subs: 5 # include main.conf\n", ""},
	} {
		dir := t.TempDir()
		for file, text := range map[string]string{"main.conf": c.main, "more.conf": c.more} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_, err := Load(filepath.Join(dir, "main.conf"), Edge)
		if c.want == "" && err == nil {
			continue
		}
		want := filepath.Join(dir, c.want)
		if err == nil || c.want == "" || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "braces") != strings.Contains(want, "syntax") {
			t.Errorf("%s: got %v, want it to start with %q", name, err, want)
		}
	}
}

// TestSuggestions checks that a typo of any supported key leads back to it.
func TestSuggestions(t *testing.T) {
	d := &decoder{program: Edge}
	known := d.known(topKeys(Default()))
	for _, k := range known {
		if len(k) < 6 {
			continue
		}
		for typo, what := range map[string]string{
			k[:2] + k[3:]:       "one letter missing",
			k[:3] + "x" + k[3:]: "one letter too many",
			k[:1] + string(k[2]) + string(k[1]) + k[3:]:      "two letters swapped",
			strings.ToUpper(strings.ReplaceAll(k, "_", "-")): "capitals and dashes",
		} {
			got := nearest(typo, known)
			if find(topKeys(Default()), got) == nil || find(topKeys(Default()), got).names[0] != find(topKeys(Default()), k).names[0] {
				t.Errorf("%s (%s of %s) suggests %q", typo, what, k, got)
			}
		}
	}
	if got := nearest("zzzzzzzz", known); got != "" {
		t.Errorf("zzzzzzzz suggests %q", got)
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "12": 12, "1K": 1 << 10, "2kb": 2 << 10, "3 MiB": 3 << 20, "4g": 4 << 30, "1T": 1 << 40, "-1": -1} {
		if got, ok := Size(text); !ok || got != want {
			t.Errorf("Size(%q) = %d, %v", text, got, ok)
		}
	}
	for _, text := range []string{"", "x", "1.5G", "-1K", "99999999T", "K"} {
		if got, ok := Size(text); ok {
			t.Errorf("Size(%q) = %d", text, got)
		}
	}
}

// FuzzLoad feeds arbitrary configuration text: whatever it is, the outcome is
// a configuration or an error that names the file.
func FuzzLoad(f *testing.F) {
	for _, seed := range []string{
		"", "port: 4222", "listen: \"[::1]:-1\"", "jetstream { store_dir: /x, sync_interval: always }",
		"hub { urls: [\"quic://h:1\"] }\nexports: [ {stream: A, to: B} ]", "authorization { users: [ {user: a, permissions {publish {deny: x}}} ] }",
		"A: 1\nport: $A", "{ \"port\": 1 }", "edges { users: [ [ ] ] }", "tls: 3", "max_pending: 9223372036854775807", "ping_interval: 1e30",
	} {
		f.Add(seed)
	}
	path := filepath.Join(f.TempDir(), "fuzz.conf")
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Contains(text, "include") || strings.Contains(text, "_file") {
			t.Skip("reads other files")
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, p := range []Program{Edge, Hub} {
			cfg, err := Load(path, p)
			if (cfg == nil) == (err == nil) {
				t.Fatalf("configuration %v and error %v", cfg, err)
			}
			if err != nil && !strings.HasPrefix(err.Error(), path) {
				t.Fatalf("error does not name the file: %v", err)
			}
		}
	})
}
