package config

import (
	"crypto/sha256"
	"fmt"
	"math"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/conf"
)

// Load reads the file at path for program p and fills in defaults. Every
// error is an *[Error] that names file, line, key, what is accepted and the
// remedy.
func Load(path string, p Program) (*Config, error) {
	cfg := Default()
	cfg.Path = path
	if p := circular(path); p != nil {
		return nil, &Error{Problems: []*Problem{p}}
	}
	tree, err := conf.ParseFileWithChecks(path)
	if err != nil {
		return nil, &Error{Problems: []*Problem{syntax(path, err)}}
	}
	d := &decoder{program: p}
	d.block(value{raw: tree, file: path}, topKeys(cfg))
	if len(d.problems) == 0 {
		d.check(cfg)
	}
	if len(d.problems) > 0 {
		return nil, (&Error{Problems: d.problems}).sorted()
	}
	cfg.where = d.where
	if len(d.warnings) > 0 {
		cfg.Warnings = (&Error{Problems: d.warnings}).sorted().Problems
	}
	return cfg, nil
}

func only(p Program) *Program { return &p }

// topKeys is the top level of a configuration file.
func topKeys(c *Config) []key {
	keys := []key{
		{names: []string{"listen"}, accepts: `"host:port" or a port, 1 to 65535, or -1 for one the system chooses`, set: listenKey(&c.Host, &c.Port)},
		{names: []string{"host", "net"}, accepts: "a host name or address", set: nonEmpty(&c.Host)},
		{names: []string{"port"}, accepts: "1 to 65535, or -1 for one the system chooses", set: portKey(&c.Port)},
		{names: []string{"server_name"}, accepts: "a name without blanks", set: nameKey(&c.ServerName)},
		{names: []string{"max_payload"}, accepts: "octets, 1 to 64MB", set: intKey(&c.MaxPayload, 1, 64<<20)},
		{names: []string{"max_control_line"}, accepts: "octets, 64 to 64MB", set: intKey(&c.MaxControlLine, 64, 64<<20)},
		{names: []string{"max_connections", "max_conn"}, accepts: "a number of clients; 0 or -1 for none", set: func(d *decoder, v value, accepts string) {
			intKey(&c.MaxConnections, -1, math.MaxInt32)(d, v, accepts)
			if c.MaxConnections == 0 { // as with nats-server
				c.MaxConnections = -1
			}
		}},
		{names: []string{"max_subscriptions", "max_subs"}, accepts: "a number for each client; 0 or -1 for no bound", set: func(d *decoder, v value, accepts string) {
			intKey(&c.MaxSubs, -1, math.MaxInt32)(d, v, accepts)
			c.MaxSubs = max(c.MaxSubs, 0)
		}},
		{names: []string{"max_sub_tokens", "max_subscription_tokens"}, accepts: "a number of tokens, 1 to 255", set: intKey(&c.MaxSubTokens, 1, math.MaxUint8)},
		{names: []string{"no_header_support"}, accepts: "true or false", set: boolKey(&c.NoHeaders)},
		{names: []string{"no_fast_producer_stall"}, accepts: "true or false", set: boolKey(&c.NoStall)},
		{names: []string{"proxy_protocol"}, accepts: "true or false", set: boolKey(&c.ProxyProtocol)},
		{names: []string{"max_pending"}, accepts: "octets, such as 64MB", set: intKey(&c.MaxPending, 1, math.MaxInt64)},
		{names: []string{"ping_interval"}, accepts: `a duration such as "2m", or seconds`, set: durationKey(&c.PingInterval, time.Millisecond)},
		{names: []string{"ping_max"}, accepts: "a number of pings, at least 1", set: intKey(&c.PingMax, 1, math.MaxInt32)},
		{names: []string{"write_deadline"}, accepts: `a duration such as "10s", or seconds`, set: durationKey(&c.WriteDeadline, time.Millisecond)},
		{names: []string{"authorization"}, accepts: "a block { user, password } or { token } or { users: [...] }", set: c.authorization},
		{names: []string{"no_auth_user"}, accepts: "a name from authorization.users", set: nonEmpty(&c.Auth.NoAuthUser)},
		{names: []string{"mappings", "maps"}, accepts: "a block { SUBJECT: DESTINATION, SUBJECT: [ { destination, weight }, ... ] }", set: c.mappings},
		{names: []string{"tls"}, accepts: "a block { cert_file, key_file, ca_file, ... }", set: serverTLSKey(&c.TLS, clientTLSKeys)},
		{names: []string{"allow_non_tls"}, accepts: "true or false", set: boolKey(&c.AllowNonTLS)},
		{names: []string{"client_advertise"}, accepts: `"host:port"`, set: func(d *decoder, v value, accepts string) {
			s, _ := v.raw.(string)
			host, port, err := net.SplitHostPort(s)
			n, err2 := strconv.ParseInt(port, 10, 32)
			if err != nil || err2 != nil || host == "" || n < 1 || n > 65535 {
				d.wrong(v, accepts)
				return
			}
			c.ClientAdvertise = s
		}},
		{names: []string{"lame_duck_duration"}, accepts: `a duration of at least "30s"`, set: durationKey(&c.LameDuck, 30*time.Second)},
		{names: []string{"lame_duck_grace_period"}, accepts: `a duration such as "10s"`, set: durationKey(&c.LameDuckGrace, 0)},
		{names: []string{"jetstream"}, accepts: "true, false, or a block { store_dir, max_mem, max_file, sync_interval }", set: c.jetstream},
		{names: []string{"store_dir", "storedir"}, accepts: "a directory", set: nonEmpty(&c.JetStream.StoreDir)},
		{names: []string{"debug"}, accepts: "true or false", set: boolKey(&c.Log.Debug)},
		{names: []string{"trace"}, accepts: "true or false", set: boolKey(&c.Log.Trace)},
		{names: []string{"logtime"}, accepts: "true or false", set: boolKey(&c.Log.Time)},
		{names: []string{"logtime_utc"}, accepts: "true or false", set: boolKey(&c.Log.UTC)},
		{names: []string{"log_file", "logfile"}, accepts: "a file name", set: nonEmpty(&c.Log.File)},
		{names: []string{"logfile_size_limit", "log_size_limit"}, accepts: "octets, such as 100MB; 0 for no bound", set: intKey(&c.Log.SizeLimit, 0, math.MaxInt64)},
		{names: []string{"logfile_max_num", "log_max_num"}, accepts: "a number of files, the current one included; 0 for no bound", set: intKey(&c.Log.MaxFiles, 0, math.MaxInt32)},
		{names: []string{"log_format"}, accepts: "text or json", set: enumKey(&c.Log.Format, "text", "json")},
		{names: []string{"pid_file", "pidfile"}, accepts: "a file name", set: nonEmpty(&c.PIDFile)},
		{names: []string{"ports_file_dir"}, accepts: "a directory", set: nonEmpty(&c.PortsDir)},
		{names: []string{"hub"}, accepts: "a block { urls, user, password, nkey_seed_file, tls }", set: c.uplink, only: only(Edge)},
		{names: []string{"exports"}, accepts: "a list of { stream: NAME, to: NAME }", set: c.exports, only: only(Edge)},
		{names: []string{"edges"}, accepts: "a block { listen, tls, users }", set: c.edges, only: only(Hub)},
	}
	keys = append(keys, ignored(topIgnored)...)
	return append(keys, unsupported(topUnsupported)...)
}

// topIgnored are nats-server's top-level keys that tune what is not there, so
// that leaving them out changes nothing; with the reason.
var topIgnored = map[string]string{
	"connect_error_reports":   "there are no routes to report on",
	"reconnect_error_reports": "there are no routes to report on",
	"default_js_domain":       "there are no domains",
	"disable_sublist_cache":   "lookups are cached for each client",
	"no_sublist_cache":        "lookups are cached for each client",
	"max_closed_clients":      "no list of closed clients is kept",
	"max_traced_msg_len":      "payloads are not traced",
	"no_sys_acc":              "there is no system account",
	"no_system":               "there is no system account",
	"no_system_account":       "there is no system account",
	"prof_block_rate":         "there is no profiling port",
}

// topUnsupported are nats-server's top-level keys that Petiole refuses, with
// what to do instead.
var topUnsupported = map[string]string{
	"accounts":                 "remove it: there is one account for all clients; limit users with permissions",
	"cluster":                  "remove it: each program runs as one node; edges reach a hub through `hub { urls }`",
	"default_sentinel":         "remove it",
	"feature_flags":            "remove it",
	"gateway":                  "remove it: each program runs as one node",
	"http":                     "remove it: `edge status` asks a running server",
	"http_base_path":           "remove it: `edge status` asks a running server",
	"http_port":                "remove it: `edge status` asks a running server",
	"https":                    "remove it: `edge status` asks a running server",
	"https_port":               "remove it: `edge status` asks a running server",
	"leaf":                     "use `hub { urls }` at the edge and `edges { listen }` at the hub",
	"leafnodes":                "use `hub { urls }` at the edge and `edges { listen }` at the hub",
	"monitor_port":             "remove it: `edge status` asks a running server",
	"mqtt":                     "remove it: clients speak the NATS protocol",
	"ocsp":                     "remove it: nothing asks an OCSP responder, nor staples its answers; use certificates that expire soon, or `tls { pinned_certs }`",
	"ocsp_cache":               "remove it: nothing asks an OCSP responder",
	"operator":                 "use `authorization { users }`",
	"operators":                "use `authorization { users }`",
	"prof_port":                "remove it",
	"proxies":                  "remove it: proxies are not known by keys; `proxy_protocol` takes a client's address from one",
	"remote_syslog":            "use `log_file`, or let the service manager collect standard error",
	"resolver":                 "use `authorization { users }`",
	"account_resolver":         "use `authorization { users }`",
	"accounts_resolver":        "use `authorization { users }`",
	"resolver_pinned_accounts": "use `authorization { users }`",
	"resolver_preload":         "use `authorization { users }`",
	"resolver_tls":             "use `authorization { users }`",
	"root":                     "use `authorization { users }`",
	"root_operator":            "use `authorization { users }`",
	"root_operators":           "use `authorization { users }`",
	"roots":                    "use `authorization { users }`",
	"server_metadata":          "remove it",
	"server_tags":              "remove it",
	"syslog":                   "use `log_file`, or let the service manager collect standard error",
	"system":                   "remove it: there is no system account",
	"system_account":           "remove it: there is no system account",
	"trace_headers":            "use `trace`",
	"trace_verbose":            "use `trace`",
	"trusted":                  "use `authorization { users }`",
	"trusted_keys":             "use `authorization { users }`",
	"websocket":                "remove it: clients connect over TCP",
	"write_timeout":            "remove it: `write_deadline` closes clients that do not read",
	"ws":                       "remove it: clients connect over TCP",
}

func unsupported(names map[string]string) []key {
	keys := make([]key, 0, len(names))
	for name, remedy := range names {
		keys = append(keys, key{names: []string{name}, accepts: remedy})
	}
	return keys
}

func ignored(names map[string]string) []key {
	keys := make([]key, 0, len(names))
	for name, why := range names {
		keys = append(keys, key{names: []string{name}, accepts: why, ignored: true})
	}
	return keys
}

func nameKey(to *string) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		s, ok := v.raw.(string)
		if !ok || s == "" || strings.ContainsAny(s, " \t\r\n") {
			d.wrong(v, accepts)
			return
		}
		*to = s
	}
}

// authorization decodes the block of the same name.
func (c *Config) authorization(d *decoder, v value, _ string) {
	a := &c.Auth
	var defaults *Permissions
	keys := []key{
		{names: []string{"user", "username"}, accepts: "a user name", set: nonEmpty(&a.User)},
		{names: []string{"password", "pass"}, accepts: "a password or its bcrypt hash", set: nonEmpty(&a.Password)},
		{names: []string{"token"}, accepts: "a token or its bcrypt hash", set: nonEmpty(&a.Token)},
		{names: []string{"timeout"}, accepts: "seconds, or a duration such as \"2s\"", set: durationKey(&a.Timeout, 1)},
		{names: []string{"users"}, accepts: "a list of { user, password, permissions }", set: func(d *decoder, v value, _ string) {
			d.list(v, func(item value) {
				var u User
				if d.block(item, userKeys(&u)) {
					switch {
					case u.Name == "" && u.Nkey == "":
						d.fail(item, "neither user nor nkey is given", "{ user, password, permissions } or { nkey, permissions }", "")
					case u.Nkey != "" && (u.Name != "" || u.Password != ""):
						d.fail(item, "nkey excludes user and password", "", "keep one of them")
					}
				}
				a.Users = append(a.Users, u)
			})
		}},
		{names: []string{"default_permissions", "default_permission", "permissions"}, accepts: "a block { publish, subscribe }", set: permissionsKey(&defaults)},
	}
	keys = append(keys, unsupported(map[string]string{
		"auth_callout":   "use `users`",
		"auth_hook":      "use `users`",
		"proxy_required": "remove it",
	})...)
	if !d.block(v, keys) {
		return
	}
	switch {
	case a.User != "" && a.Token != "":
		d.fail(v, "user and token exclude each other", "", "keep one of them")
	case len(a.Users) > 0 && (a.User != "" || a.Token != ""):
		d.fail(v, "users excludes user and token", "", "move that login into users")
	case a.User == "" && a.Password != "":
		d.fail(v, "password without user", "", "add user")
	case a.User != "" && a.Password == "":
		d.fail(v, "user without password", "", "add password")
	}
	names := make(map[string]bool)
	for i := range a.Users {
		name := a.Users[i].Name + a.Users[i].Nkey
		if names[name] {
			d.fail(v, fmt.Sprintf("user %q is there twice", name), "", "keep one of them")
		}
		names[name] = true
		if a.Users[i].Permissions == nil {
			a.Users[i].Permissions = defaults
		}
	}
	if defaults != nil && a.User != "" {
		a.Users = []User{{Name: a.User, Password: a.Password, Permissions: defaults}}
		a.User, a.Password = "", ""
	}
}

func userKeys(u *User) []key {
	return append([]key{
		{names: []string{"user", "username"}, accepts: "a user name", set: nonEmpty(&u.Name)},
		{names: []string{"password", "pass"}, accepts: "a password or its bcrypt hash", set: nonEmpty(&u.Password)},
		{names: []string{"nkey"}, accepts: "a public user nkey (U...)", set: nkeyKey(&u.Nkey)},
		{names: []string{"permissions", "permission", "authorization"}, accepts: "a block { publish, subscribe }", set: permissionsKey(&u.Permissions)},
		{names: []string{"allowed_connection_types", "connection_types", "clients"}, accepts: connTypesAccepted, set: connTypesKey(&u.ConnTypes)},
	}, unsupported(map[string]string{
		"proxy_required": "remove it",
	})...)
}

const connTypesAccepted = "STANDARD, IN_PROCESS, WEBSOCKET, MQTT, MQTT_WS, LEAFNODE or LEAFNODE_WS, or a list of them"

// connTypesKey stores ways of connecting, nats-server's names. Of those only
// the first two exist here; a user that may use others only cannot connect.
func connTypesKey(to *[]string) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		d.list(v, func(item value) {
			s, ok := item.raw.(string)
			s = strings.ToUpper(s)
			if !ok || !slices.Contains([]string{"STANDARD", "IN_PROCESS", "WEBSOCKET", "MQTT", "MQTT_WS", "LEAFNODE", "LEAFNODE_WS"}, s) {
				d.wrong(item, accepts)
				return
			}
			*to = append(*to, s)
		})
	}
}

func permissionsKey(to **Permissions) func(*decoder, value, string) {
	return func(d *decoder, v value, _ string) {
		p := &Permissions{}
		*to = p
		d.block(v, []key{
			{names: []string{"publish", "pub", "import"}, accepts: "a subject, a list, or a block { allow, deny }", set: subjectsKey(&p.Publish, validSubject)},
			{names: []string{"subscribe", "sub", "export"}, accepts: "a subject, a list, or a block { allow, deny }", set: subjectsKey(&p.Subscribe, validPermission)},
			{names: []string{"allow_responses", "publish_allow_responses"}, accepts: "true, false, or a block { max, expires }", set: func(d *decoder, v value, accepts string) {
				switch raw := v.raw.(type) {
				case bool:
					if raw {
						p.Responses = &Responses{Max: 1, Expires: 2 * time.Minute}
					}
				case map[string]any:
					r := &Responses{Max: 1, Expires: 2 * time.Minute}
					d.block(v, []key{
						{names: []string{"max", "max_msgs", "max_messages", "max_responses"}, accepts: "a number of messages, or -1 for no bound", set: intKey(&r.Max, -1, math.MaxInt32)},
						{names: []string{"expires", "expiration", "ttl"}, accepts: `a duration such as "2m"`, set: durationKey(&r.Expires, math.MinInt64)},
					})
					p.Responses = r
				default:
					d.wrong(v, accepts)
				}
			}},
		})
	}
}

func subjectsKey(to *Subjects, valid func(string) bool) func(*decoder, value, string) {
	const accepts = "a subject such as \"plant.>\", or a list of subjects"
	return func(d *decoder, v value, _ string) {
		if _, ok := v.raw.(map[string]any); ok {
			d.block(v, []key{
				{names: []string{"allow"}, accepts: accepts, set: stringsKey(&to.Allow, valid)},
				{names: []string{"deny"}, accepts: accepts, set: stringsKey(&to.Deny, valid)},
			})
			return
		}
		stringsKey(&to.Allow, valid)(d, v, accepts)
	}
}

// validPermission checks a subject with wildcards, optionally followed by a
// queue group as nats-server allows for subscriptions.
func validPermission(s string) bool {
	subj, queue, grouped := strings.Cut(s, " ")
	return validSubject(subj) && (!grouped || len(strings.Fields(queue)) == 1)
}

// validSubject checks a subject with wildcards.
func validSubject(s string) bool {
	if strings.ContainsAny(s, " \t\r\n\f") {
		return false
	}
	tokens := strings.Split(s, ".")
	for i, t := range tokens {
		if t == "" || t == ">" && i < len(tokens)-1 {
			return false
		}
	}
	return true
}

// jetstream decodes the key of the same name, which may be a word or a block.
func (c *Config) jetstream(d *decoder, v value, accepts string) {
	js := &c.JetStream
	switch raw := v.raw.(type) {
	case bool:
		js.Enabled = raw
	case string:
		switch strings.ToLower(raw) {
		case "enabled", "enable":
			js.Enabled = true
		case "disabled", "disable":
			js.Enabled = false
		default:
			d.wrong(v, accepts)
		}
	case map[string]any:
		js.Enabled = true
		d.block(v, append([]key{
			{names: []string{"store_dir", "storedir", "store"}, accepts: "a directory", set: nonEmpty(&js.StoreDir)},
			{names: []string{"max_mem", "max_mem_store", "max_memory_store"}, accepts: "octets, such as 256MB, or -1 for no bound", set: intKey(&js.MaxMemory, -1, math.MaxInt64)},
			{names: []string{"max_file", "max_file_store"}, accepts: "octets, such as 10GB, or -1 for no bound", set: intKey(&js.MaxStore, -1, math.MaxInt64)},
			{names: []string{"sync_interval", "sync"}, accepts: `always, or a duration such as "100ms"`, set: func(d *decoder, v value, accepts string) {
				if s, ok := v.raw.(string); ok && strings.EqualFold(s, "always") {
					js.SyncInterval = 0
					return
				}
				durationKey(&js.SyncInterval, time.Millisecond)(d, v, accepts)
			}},
			{names: []string{"enabled", "enable"}, accepts: "true or false", set: boolKey(&js.Enabled)},
		}, unsupported(map[string]string{
			"domain":                  "remove it: there are no domains, the JetStream of each program is its own",
			"unique_tag":              "remove it: replicas are not placed, each program runs as one node",
			"limits":                  "set limits on the streams",
			"key":                     "encrypt the disk underneath",
			"ek":                      "encrypt the disk underneath",
			"encryption_key":          "encrypt the disk underneath",
			"prev_key":                "encrypt the disk underneath",
			"prev_ek":                 "encrypt the disk underneath",
			"prev_encryption_key":     "encrypt the disk underneath",
			"cipher":                  "encrypt the disk underneath",
			"tpm":                     "encrypt the disk underneath",
			"strict":                  "remove it: unknown fields of requests are passed over",
			"extension_hint":          "remove it: there is nothing to extend, each program runs as one node",
			"max_outstanding_catchup": "remove it: there are no replicas to catch up",
			"max_buffered_size":       "remove it: publishers are held back by the log",
			"max_buffered_msgs":       "remove it: publishers are held back by the log",
			"request_queue_limit":     "remove it: clients that send requests are held back",
			"info_queue_limit":        "remove it: clients that send requests are held back",
			"meta_compact":            "remove it: what streams there are is kept in a database that needs no compaction",
			"meta_compact_size":       "remove it: what streams there are is kept in a database that needs no compaction",
			"meta_compact_sync":       "remove it: what streams there are is kept in a database that needs no compaction",
			"max_concurrent_io":       "remove it: all streams share one log",
		})...))
	default:
		d.wrong(v, accepts)
	}
}

// uplink decodes the edge's hub block.
func (c *Config) uplink(d *decoder, v value, _ string) {
	u := &Uplink{}
	sum := sha256.New()
	before := len(d.problems)
	ok := d.block(v, []key{
		{names: []string{"urls", "url"}, accepts: `"quic://host:port", or a list of them`, set: stringsKey(&u.URLs, validHubURL)},
		{names: []string{"user", "username"}, accepts: "a user name", set: nonEmpty(&u.User)},
		{names: []string{"password", "pass"}, accepts: "a password", set: nonEmpty(&u.Password)},
		{names: []string{"nkey_seed_file"}, accepts: "a file that holds a user nkey seed (SU...)", set: nonEmpty(&u.NkeySeedFile)},
		{names: []string{"tls"}, accepts: "a block { ca_file, server_name, pinned }", set: func(d *decoder, v value, _ string) {
			d.block(v, []key{
				{names: []string{"ca_file"}, accepts: "a PEM file", set: nonEmpty(&u.CAFile)},
				{names: []string{"server_name"}, accepts: "the name in the hub's certificate", set: nonEmpty(&u.ServerName)},
				{names: []string{"pinned", "pin"}, accepts: "the SHA-256 fingerprint of the hub's certificate, sha256: and 64 hex digits", set: pinKey(&u.Pinned)},
			})
			sum.Write(d.readable(v, "ca_file", u.CAFile))
		}},
	})
	if !ok || len(d.problems) > before {
		return
	}
	switch {
	case len(u.URLs) == 0:
		d.fail(v, "urls is missing", `"quic://host:port", or a list of them`, "name the hub")
	case u.User != "" && u.NkeySeedFile != "":
		d.fail(v, "user and nkey_seed_file exclude each other", "", "keep one of them")
	case u.User == "" && u.Password != "":
		d.fail(v, "password without user", "", "add user")
	case u.User != "" && u.Password == "":
		d.fail(v, "user without password", "", "add password") // a hub has no users without one
	}
	sum.Write(d.readable(v, "nkey_seed_file", u.NkeySeedFile))
	sum.Sum(u.Digest[:0])
	c.Uplink = u
}

var hexPin = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)

func pinKey(to *string) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		s, ok := v.raw.(string)
		hex, _ := strings.CutPrefix(strings.ReplaceAll(s, ":", ""), "sha256")
		if !ok || !hexPin.MatchString(hex) {
			d.wrong(v, accepts)
			return
		}
		*to = "sha256:" + strings.ToLower(hex)
	}
}

func validHubURL(s string) bool {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "quic" || u.Hostname() == "" || u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" {
		return false
	}
	if u.Port() == "" {
		return true
	}
	n, err := strconv.ParseInt(u.Port(), 10, 32)
	return err == nil && n >= 1 && n <= 65535
}

// ValidStreamName says whether name may be a stream's.
func ValidStreamName(name string) bool {
	return name != "" && len(name) <= 255 && !strings.ContainsAny(name, " \t\r\n\f.*>/\\") && strings.IndexFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }) < 0
}

// exports decodes the list of exported streams.
func (c *Config) exports(d *decoder, v value, _ string) {
	d.list(v, func(item value) {
		var e Export
		const accepts = "a stream name: no blanks, dots, wildcards or slashes"
		if name, ok := item.raw.(string); ok { // exports: [READINGS]
			e.Stream = name
		} else if !d.block(item, []key{
			{names: []string{"stream"}, accepts: accepts, set: nonEmpty(&e.Stream)},
			{names: []string{"to"}, accepts: accepts, set: nonEmpty(&e.To)},
		}) {
			return
		}
		if e.To == "" {
			e.To = e.Stream
		}
		switch {
		case e.Stream == "":
			d.fail(item, "stream is missing", "{ stream: NAME, to: NAME }", "name the stream")
			return
		case !ValidStreamName(e.Stream):
			d.fail(item, fmt.Sprintf("%q cannot be a stream", e.Stream), accepts, "")
			return
		case !ValidStreamName(e.To):
			d.fail(item, fmt.Sprintf("%q cannot be a stream", e.To), accepts, "")
			return
		}
		for _, other := range c.Exports {
			if other.Stream == e.Stream {
				d.fail(item, fmt.Sprintf("stream %q is exported twice", e.Stream), "", "keep one of them")
				return
			}
		}
		c.Exports = append(c.Exports, e)
	})
}

// edges decodes the hub's block of the same name.
func (c *Config) edges(d *decoder, v value, _ string) {
	e := &Edges{Host: DefaultHost, Port: DefaultEdgesPort}
	const streamAccepts = "a stream name, in which * matches any characters, or a list of them"
	d.block(v, []key{
		{names: []string{"listen"}, accepts: `"host:port" or a UDP port, 1 to 65535, or -1 for one the system chooses`, set: listenKey(&e.Host, &e.Port)},
		{names: []string{"host", "net"}, accepts: "a host name or address", set: nonEmpty(&e.Host)},
		{names: []string{"port"}, accepts: "1 to 65535, or -1 for one the system chooses", set: portKey(&e.Port)},
		{names: []string{"tls"}, accepts: "a block { cert_file, key_file, ca_file }", set: serverTLSKey(&e.TLS, tlsKeys)},
		{names: []string{"users"}, accepts: "a list of { user, password, streams } or { nkey, streams }", set: func(d *decoder, v value, _ string) {
			d.list(v, func(item value) {
				var u EdgeUser
				if !d.block(item, []key{
					{names: []string{"user", "username"}, accepts: "a user name", set: nonEmpty(&u.User)},
					{names: []string{"password", "pass"}, accepts: "a password or its bcrypt hash", set: nonEmpty(&u.Password)},
					{names: []string{"nkey"}, accepts: "a public user nkey (U...)", set: nkeyKey(&u.Nkey)},
					{names: []string{"streams"}, accepts: streamAccepts, set: stringsKey(&u.Streams, func(s string) bool {
						return ValidStreamName(strings.ReplaceAll(s, "*", "x"))
					})},
				}) {
					return
				}
				switch {
				case u.Nkey == "" && u.User == "":
					d.fail(item, "neither user nor nkey is given", "{ user, password, streams } or { nkey, streams }", "")
				case u.Nkey != "" && (u.User != "" || u.Password != ""):
					d.fail(item, "nkey excludes user and password", "", "keep one of them")
				case u.User != "" && u.Password == "":
					d.fail(item, "password is missing", "", "give the user a password, or use nkey")
				case len(u.Streams) == 0:
					d.fail(item, "streams is missing", streamAccepts, "say `streams: \"*\"` if it may fill every stream")
				}
				e.Users = append(e.Users, u)
			})
		}},
	})
	c.Edges = e
}

// check looks at settings that only make sense together.
func (d *decoder) check(c *Config) {
	at := func(key string) value {
		if w, ok := d.where[key]; ok {
			return value{file: w.file, line: w.line, key: key}
		}
		return value{file: c.Path, key: key}
	}
	if int64(c.MaxPayload) > c.MaxPending {
		d.fail(at("max_payload"), fmt.Sprintf("%d is more than max_pending (%d), so the largest message could never be delivered", c.MaxPayload, c.MaxPending), "", "raise max_pending")
	}
	if c.LameDuckGrace >= c.LameDuck {
		d.fail(at("lame_duck_grace_period"), fmt.Sprintf("%v is not less than lame_duck_duration (%v)", c.LameDuckGrace, c.LameDuck), "", "shorten it")
	}
	if c.AllowNonTLS && c.TLS == nil {
		d.fail(at("allow_non_tls"), "there is no TLS to choose", "", "add a `tls` block, or remove it")
	}
	for _, u := range c.Auth.Users {
		if u.Name != "" && u.Password == "" && u.Name != c.Auth.NoAuthUser && (c.TLS == nil || !c.TLS.Map) {
			d.fail(at("authorization.users"), fmt.Sprintf("user %q has no password, so nobody can log in as that user", u.Name), "", "give the user one, use nkey, or let certificates name users with `tls { verify_and_map }`")
		}
	}
	if name := c.Auth.NoAuthUser; name != "" && !slices.ContainsFunc(c.Auth.Users, func(u User) bool { return u.Name == name || u.Nkey == name }) {
		d.fail(at("no_auth_user"), fmt.Sprintf("there is no user %q", name), "a name from authorization.users", "")
	}
	if len(c.Exports) > 0 && !c.JetStream.Enabled {
		d.fail(at("exports"), "streams can only be exported with JetStream", "", "add `jetstream { store_dir: ... }`")
	}
	if c.Edges != nil && !c.JetStream.Enabled {
		d.fail(at("edges"), "a hub keeps what edges export in JetStream, which is off", "", "add `jetstream { store_dir: ... }`")
	}
}
