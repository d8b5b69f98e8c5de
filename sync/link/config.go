package link

import "time"

// Default timing of a link.
const (
	DefaultReconnect = time.Second      // between attempts to the same URL
	DefaultAttempt   = 10 * time.Second // life of one attempt
	DefaultPing      = time.Second      // between pings and QUIC keep-alives
	DefaultIdle      = 5 * time.Second  // without a packet, the link is down
	DefaultRetryMin  = 5 * time.Second  // back-off after a refusal, doubling
	DefaultRetryMax  = 60 * time.Second // its upper bound
	DefaultPart      = 60 * time.Second // for the next frame (64 KiB) of a large message
	DefaultPort      = 7423             // of the hub, UDP, where a URL names none
	DefaultMaxMsg    = 64 << 20         // largest message a hub takes, bytes
)

// EdgeConfig is the edge's side of a link.
type EdgeConfig struct {
	// URLs of the hub: "quic://host:port". With several, all are tried; the
	// first to answer is used.
	URLs []string
	// Name is the edge's server name, for display at the hub.
	Name    string
	Auth    Auth
	TLS     ClientTLS
	Exports []Export
	// Window is the number of bytes under way per export (0:
	// replay.DefaultWindow).
	Window int64
	// NoCompression switches S2 off.
	NoCompression bool
	Timing        Timing
}

// Timing adjusts a link's clocks; zero fields mean the defaults.
type Timing struct {
	Reconnect, Attempt, Ping, Idle, RetryMin, RetryMax, Part time.Duration
}

// Auth is how an edge proves that it may use a hub, beside its device key. At
// most one of the two is set; with neither, the device key alone has to do.
type Auth struct {
	User, Password string
	// NKeyFile names a file with a user nkey seed ("SU…") or with decorated
	// credentials that hold one.
	NKeyFile string
}

// ClientTLS is whom an edge trusts. At most one of CAFile and Pinned is set;
// with neither, the system's roots decide.
type ClientTLS struct {
	// CAFile names a PEM file of certificate authorities (or of the hub's
	// own self-signed certificate).
	CAFile string
	// Pinned is the SHA-256 fingerprint of the hub's certificate:
	// "sha256:" and 64 hex digits, colons between them allowed.
	Pinned string
	// ServerName is the name expected in the certificate (default: the URL's
	// host). Not used with Pinned.
	ServerName string
}

// Export is a local stream whose messages go to the hub.
type Export struct {
	Stream string // local stream
	To     string // stream at the hub (default: the same name)
}

// HubConfig is the hub's side.
type HubConfig struct {
	// Listen is the UDP address, "host:port"; port 0 is system-chosen.
	Listen string
	// Name is the hub's server name, ID its identity, for display.
	Name, ID string
	TLS      ServerTLS
	// Users and NKeys may connect. With both empty no edge may.
	Users []User
	NKeys []NKey
	// MaxMessage is the largest message taken, header and data in bytes (0:
	// DefaultMaxMsg).
	MaxMessage int
	// MaxEdges bounds the connections (0: 10000).
	MaxEdges int
	Timing   Timing
}

// ServerTLS is the hub's certificate. With both empty a self-signed one is
// generated in Dir, as hub.crt and hub.key, and used from then on.
type ServerTLS struct {
	CertFile, KeyFile string
	Dir               string
}

// User may connect with a password.
type User struct {
	Name string
	// Password in the clear, or its bcrypt hash ("$2a$…").
	Password string
	// Streams that edges of this user may write at the hub; "*" matches any
	// run of characters. Empty: none.
	Streams []string
}

// NKey may connect by proving that it owns a key: the device key of an edge,
// or the key in its credentials.
type NKey struct {
	Public  string // "U…"
	Streams []string
}
