// Package config reads the configuration of Petiole's programs. The language
// is nats-server's own (its conf package parses it: JSON-like blocks, `=`, `:`
// or blank between key and value, # and // comments, size suffixes, variables,
// includes), and keys that both products know mean the same in both. What
// nats-server knows and Petiole does not do yet is refused by name instead of
// being ignored, so that nobody runs with a setting that has no effect.
//
// [Load] reports every mistake it finds at once, each with file, line, key,
// what is accepted and what to do.
package config

import (
	"crypto/tls"
	"log/slog"
	"time"

	"petiole/internal/subject/transform"
)

// Program says whose configuration a file is. A few blocks belong to one of
// the two programs only.
type Program int

// The two programs.
const (
	Edge Program = iota
	Hub
)

// String returns the program's name as a user types it.
func (p Program) String() string {
	if p == Hub {
		return "hub"
	}
	return "edge"
}

// Defaults. They equal nats-server's where both products have the setting,
// except SyncInterval: nats-server acknowledges before fsync and syncs every
// two minutes, Petiole syncs before it acknowledges.
const (
	DefaultHost           = "0.0.0.0"
	DefaultPort           = 4222
	DefaultMaxPayload     = 1 << 20
	DefaultMaxControlLine = 4096
	DefaultMaxConnections = 64 << 10
	DefaultMaxPending     = 64 << 20
	DefaultPingInterval   = 2 * time.Minute
	DefaultPingMax        = 2
	DefaultWriteDeadline  = 10 * time.Second
	DefaultTLSTimeout     = 2 * time.Second
	DefaultLameDuck       = 2 * time.Minute
	DefaultLameDuckGrace  = 10 * time.Second
	// DefaultTLSFallback is what `handshake_first: auto` waits for a client to
	// begin TLS before it is sent INFO.
	DefaultTLSFallback = 50 * time.Millisecond
	DefaultEdgesPort   = 7423
)

// Config is a whole configuration with every default filled in.
type Config struct {
	// Path is the file that was read; empty without one.
	Path string

	Host           string        // host, net, listen: address clients connect to
	Port           int           // port, listen; -1 lets the system choose
	NoListen       bool          // no file says so: clients are in the process only
	ServerName     string        // server_name; empty: the server's id
	MaxPayload     int           // max_payload, octets of header and data
	MaxControlLine int           // max_control_line, octets
	MaxConnections int           // max_connections; negative: none
	MaxSubs        int           // max_subscriptions of one client; 0: unlimited
	MaxSubTokens   int           // max_sub_tokens of a subject that is subscribed to; 0: unlimited
	MaxPending     int64         // max_pending, octets queued to one client
	PingInterval   time.Duration // ping_interval
	PingMax        int           // ping_max, unanswered pings before a client is dropped
	WriteDeadline  time.Duration // write_deadline

	NoHeaders     bool // no_header_support
	NoStall       bool // no_fast_producer_stall: what is too much for a client is dropped instead
	ProxyProtocol bool // proxy_protocol: clients may come through a proxy that names them

	Mappings []transform.Mapping // mappings: where what clients publish goes instead

	Auth      Authorization // authorization
	TLS       *TLS          // tls; nil: plain TCP
	JetStream JetStream     // jetstream, store_dir
	Log       Logging       // debug, trace, logtime, log_file, log_format
	PIDFile   string        // pid_file; empty: none is written
	PortsDir  string        // ports_file_dir: where a file that lists the ports is written; empty: none is

	AllowNonTLS     bool          // allow_non_tls: clients may use TLS or not
	ClientAdvertise string        // client_advertise: "host:port" that clients are told; empty: none
	LameDuck        time.Duration // lame_duck_duration: over how long a lame duck disconnects clients
	LameDuckGrace   time.Duration // lame_duck_grace_period: how long it waits before

	Uplink  *Uplink  // hub (edge only); nil: the edge works alone
	Exports []Export // exports (edge only)
	Edges   *Edges   // edges (hub only); nil: no edge can connect

	// Warnings are settings that are accepted and have no effect.
	Warnings []*Problem

	where map[string]position // of every key that is set, by its canonical path
}

// position is a place in a file.
type position struct {
	file string
	line int
}

// At returns a problem that stands where key, such as "jetstream.store_dir",
// is set; if it is not set, in the file as a whole. Keys with several names
// have the one that the tables list first.
func (c *Config) At(key string) *Problem {
	p := &Problem{File: c.Path, Key: key}
	if w, ok := c.where[key]; ok {
		p.File, p.Line = w.file, w.line
	}
	return p
}

// Authorization says who may connect. The zero value lets everybody in.
type Authorization struct {
	User       string // one user for all clients
	Password   string // clear, or a bcrypt hash ($2a$...)
	Token      string // clear, or a bcrypt hash
	Users      []User
	NoAuthUser string        // no_auth_user: whom clients without credentials count as
	Timeout    time.Duration // how long a client may take to authenticate; 0: 2 s, or 1 s more than a TLS handshake
}

// User is one client login.
type User struct {
	Name        string       // empty if Nkey is set
	Password    string       // clear, or a bcrypt hash
	Nkey        string       // public user nkey (U...)
	ConnTypes   []string     // allowed_connection_types, in capitals; empty: all
	Permissions *Permissions // nil: everything is allowed
}

// Permissions restrict the subjects of a user.
type Permissions struct {
	Publish   Subjects
	Subscribe Subjects
	// Responses lets the user publish to reply subjects it has received; nil
	// if not configured.
	Responses *Responses
}

// Subjects is an allow and a deny list. An empty Allow allows every subject;
// Deny wins over Allow.
type Subjects struct {
	Allow, Deny []string
}

// Responses bounds what a responder may publish to a reply subject.
type Responses struct {
	Max     int           // messages per request; -1 unlimited
	Expires time.Duration // how long after the request; negative: unlimited
}

// TLS is a TLS configuration. Relative names of files are relative to the
// working directory, as in nats-server.
type TLS struct {
	CertFile string
	KeyFile  string
	Certs    []KeyPair     // certs, instead of the two above
	CAFile   string        // verifies the peer
	Verify   bool          // a client has to present a certificate of CAFile
	Timeout  time.Duration // of the handshake

	// For clients only, not for edges:
	Map       bool            // verify_and_map: the certificate names the user; implies Verify
	First     bool            // handshake_first: TLS starts before INFO
	Fallback  time.Duration   // handshake_first: what a client that does not start it waits for INFO; 0: for ever
	Pinned    map[string]bool // pinned_certs: SHA-256 of public keys, lower-case hex
	RateLimit int             // connection_rate_limit: handshakes per second; 0: no bound

	MinVersion uint16        // min_version; 0: TLS 1.2
	Ciphers    []uint16      // cipher_suites; empty: Go's choice
	Insecure   bool          // allow_insecure_cipher_suites
	Curves     []tls.CurveID // curve_preferences; empty: Go's choice

	// Config is the loaded result, ready for a server.
	Config *tls.Config
	// Digest covers the contents of the files.
	Digest [32]byte
}

// KeyPair names the files of a certificate and its key.
type KeyPair struct{ CertFile, KeyFile string }

// JetStream configures persistence.
type JetStream struct {
	Enabled   bool
	StoreDir  string
	MaxMemory int64 // max_mem, octets for memory streams; -1: no bound
	MaxStore  int64 // max_file, octets on disk; -1: no bound
	// SyncInterval is zero for `always`, the default: fsync comes before the
	// acknowledgement. Above zero an acknowledged message may be lost to a
	// power cut within that time.
	SyncInterval time.Duration
}

// Logging configures the log.
type Logging struct {
	Debug  bool
	Trace  bool   // protocol trace
	Time   bool   // logtime: each line starts with the time
	UTC    bool   // logtime_utc: that time is UTC, not local
	File   string // log_file; empty: standard error
	Format string // "text" or "json"
	// SizeLimit is the size in octets from which a new log file is begun
	// (logfile_size_limit); 0: none. MaxFiles is how many are kept, the current
	// one included (logfile_max_num); 0: all.
	SizeLimit int64
	MaxFiles  int
}

// LevelTrace is the slog level of protocol traces.
const LevelTrace = slog.Level(-8)

// Level returns the lowest level that is logged.
func (l Logging) Level() slog.Level {
	switch {
	case l.Trace:
		return LevelTrace
	case l.Debug:
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

// Uplink is the edge's way to its hub.
type Uplink struct {
	URLs     []string // quic://host:port, tried all
	User     string
	Password string
	// NkeySeedFile holds the seed of the nkey that logs the edge in.
	NkeySeedFile string
	CAFile       string // verifies the hub's certificate; empty: the system's authorities
	ServerName   string // name expected in it; empty: the URL's host
	// Pinned is the SHA-256 fingerprint of the hub certificate that is accepted,
	// "sha256:" and 64 hex digits; with it no authority is asked.
	Pinned string
	// Digest covers the contents of the two files.
	Digest [32]byte
}

// Export sends one stream of the edge to the hub.
type Export struct {
	Stream string // the edge's stream
	To     string // its name at the hub
}

// Edges is where a hub accepts edges.
type Edges struct {
	Host string
	Port int // UDP; -1 lets the system choose
	// TLS is nil if the hub shall make a certificate of its own in the store
	// directory, whose fingerprint edges pin.
	TLS   *TLS
	Users []EdgeUser
}

// EdgeUser is one login for edges: by password or by nkey.
type EdgeUser struct {
	User     string
	Password string   // clear, or a bcrypt hash
	Nkey     string   // public user nkey, U...
	Streams  []string // hub streams the edge may fill; names, `*` in them matches any characters
}

// Default returns the configuration that a program has without a file.
func Default() *Config {
	return &Config{
		Host:           DefaultHost,
		Port:           DefaultPort,
		MaxPayload:     DefaultMaxPayload,
		MaxControlLine: DefaultMaxControlLine,
		MaxConnections: DefaultMaxConnections,
		MaxPending:     DefaultMaxPending,
		PingInterval:   DefaultPingInterval,
		PingMax:        DefaultPingMax,
		WriteDeadline:  DefaultWriteDeadline,
		LameDuck:       DefaultLameDuck,
		LameDuckGrace:  DefaultLameDuckGrace,
		JetStream:      JetStream{MaxMemory: -1, MaxStore: -1},
		Log:            Logging{Time: true, Format: "text"},
	}
}
