// Package broker is a core NATS server: publish/subscribe, queue groups and
// request/reply for unmodified NATS clients, over TCP or TLS.
//
// A client's read loop parses what arrived, looks every subject up in the
// account's subject index and appends the messages to the outbound queues of
// the matching clients. After the bytes of one read have been parsed, each
// destination touched is flushed once. Nothing on this path starts a
// goroutine, sets a timer or allocates per message.
//
// Code inside the process takes part through [Account.Handle] and
// [Account.Publish]. Handlers run on the publisher's read loop, with no lock
// of the broker held.
package broker

import (
	"crypto/tls"
	"log/slog"
	"time"

	"petiole/internal/subject/transform"
)

// Defaults of [Options]; they are those of nats-server.
const (
	DefaultVersion        = "2.15.2"
	DefaultPort           = 4222
	DefaultMaxPayload     = 1 << 20
	DefaultMaxControlLine = 4096
	DefaultMaxPending     = 64 << 20
	DefaultMaxConn        = 64 << 10
	DefaultPingInterval   = 2 * time.Minute
	DefaultMaxPingsOut    = 2
	DefaultWriteDeadline  = 10 * time.Second
	DefaultAuthTimeout    = 2 * time.Second
	DefaultTLSTimeout     = 2 * time.Second
	// DefaultTLSFallback is how long a server that starts TLS first usually
	// waits for a client to do the same before it sends INFO.
	DefaultTLSFallback = 50 * time.Millisecond
)

// LevelTrace is the level of protocol traces.
const LevelTrace = slog.Level(-8)

// Options configures a [Server]. The zero value listens on all interfaces,
// port 4222, without authentication. A zero field takes its default.
type Options struct {
	Host       string // interface to listen on; "" is all ("0.0.0.0")
	Port       int    // TCP port; 0 is 4222, -1 lets the system choose
	NoListen   bool   // no network: clients connect with Server.InProcessConn only
	ServerName string // shown in INFO; "" is the server's id
	// Version is advertised in INFO. Clients derive the features they may use
	// from it, so it has to be a version of nats-server with the same
	// capabilities, such as "2.15.2" (the default).
	Version   string
	GitCommit string // shown in INFO; may be empty

	// ConnectURLs are further "host:port" addresses of this server, told to
	// clients in INFO for reconnecting.
	ConnectURLs []string
	// Advertise, if not empty, is the "host:port" under which clients reach this
	// server from where they are; it replaces what INFO says otherwise.
	Advertise string

	MaxPayload     int   // octets of header and data of one message; 1 MiB
	MaxControlLine int   // octets of one protocol line; 4096
	MaxPending     int64 // octets queued for one client before it is disconnected as slow consumer; 64 MiB
	MaxConn        int   // clients at the same time; 65536; negative refuses all
	MaxSubs        int   // subscriptions of one client; 0 is unlimited
	MaxSubTokens   int   // tokens of a subject that is subscribed to; 0 is unlimited

	// NoHeaders says that headers are not supported: clients get messages
	// without them and must not send any.
	NoHeaders bool
	// NoStall never holds a publisher back for a client that does not keep up.
	// Instead a client with more than three quarters of MaxPending pending gets
	// nothing of what clients publish until it has less.
	NoStall bool
	// ProxyProtocol accepts a PROXY header, version 1 or 2, in front of what a
	// client sends, and takes the client's address from it. Whoever can reach
	// the server can then claim any address.
	ProxyProtocol bool

	PingInterval  time.Duration // between PINGs to a client; 2 min
	MaxPingsOut   int           // PINGs unanswered before the connection is stale; 2
	WriteDeadline time.Duration // a client that takes nothing for this long is disconnected as slow consumer; 10 s
	AuthTimeout   time.Duration // for CONNECT after INFO when authentication is required; 2 s, or TLSOptions.Timeout and 1 s

	Users      []User // if not empty, clients have to authenticate as one of them
	AuthToken  string // if not empty, clients may authenticate with this token (plain or bcrypt)
	NoAuthUser string // name or nkey of the user for clients that send no credentials; "" is none

	// Mappings send what clients publish elsewhere, before permissions and
	// subscriptions are looked at. Handlers and what is published inside are not
	// concerned.
	Mappings []transform.Mapping

	TLS        *tls.Config // if not nil, clients have to use TLS
	TLSOptions TLSOptions  // how they do

	JetStream bool // advertised in INFO
	APILevel  int  // JetStream API level advertised in INFO; 0 omits it

	Log *slog.Logger // nil discards
	// Trace logs what the protocol carries, less secrets and payloads, at
	// [LevelTrace].
	Trace bool

	// AfterRead, if set, is called on a client's read loop after a read
	// buffer has been parsed in which at least one internal handler ran. It
	// must not block.
	AfterRead func()
}

// TLSOptions say how clients use TLS; they count only with [Options.TLS].
type TLSOptions struct {
	Timeout time.Duration // of the handshake; 2 s
	// Optional lets clients choose: what a client sends first tells.
	Optional bool
	// First starts TLS before INFO is sent instead of after it. With a Fallback
	// above zero, a client that sends nothing for so long gets INFO in clear
	// and may start TLS then.
	First    bool
	Fallback time.Duration
	// MapUsers takes the user from the client's certificate: one of its e-mail
	// addresses, DNS names, URIs or its subject is the name of a user. TLS has
	// to ask for and verify certificates.
	MapUsers bool
	// Pinned, if not empty, holds the SHA-256 of the public keys (DER encoded
	// SubjectPublicKeyInfo, in lower-case hex) that client certificates may have.
	Pinned map[string]bool
	// RateLimit bounds handshakes per second; 0 does not.
	RateLimit int
}

// The ways for a client to connect that [User.ConnTypes] may name.
const (
	ConnStandard  = "STANDARD"   // TCP
	ConnInProcess = "IN_PROCESS" // Server.InProcessConn
)

// User is one set of credentials.
type User struct {
	Name     string // user name; empty if NKey is set
	Password string // plain, or a bcrypt hash ("$2a$..."); without one, the user needs a certificate or is NoAuthUser
	NKey     string // public user nkey ("U..."); the client signs the nonce of INFO
	// ConnTypes limits how the user may connect; empty permits every way.
	ConnTypes []string
	// Permissions of the user; nil permits everything.
	Permissions *Permissions
}

// Permissions limits which subjects a user may publish and subscribe to.
type Permissions struct {
	Publish   SubjectPermission
	Subscribe SubjectPermission
	// Responses, if not nil, permits publishing to the reply subjects of
	// messages that the client received.
	Responses *ResponsePermission
}

// SubjectPermission is a pair of subject lists, wildcards permitted. A subject
// is permitted if Allow is empty or has a match, and Deny has none. In lists
// for subscribing an entry may be "subject queue", which then concerns
// subscriptions in matching queue groups only.
type SubjectPermission struct {
	Allow []string
	Deny  []string
}

// ResponsePermission bounds publishing to reply subjects.
type ResponsePermission struct {
	Max     int           // responses per request; 0 is 1, negative is unlimited
	Expires time.Duration // time for responding; 0 is 2 min, negative is unlimited
}

// Msg is a message given to a [Handler]. Everything it refers to is valid
// during the call only and must not be changed; copy what is kept.
type Msg struct {
	Subject []byte
	Reply   []byte // empty if no reply is wanted
	Header  []byte // raw header block "NATS/1.0\r\n...\r\n\r\n", empty if none
	Data    []byte
	Client  *ClientInfo // the publishing client; nil if published inside the process

	pub *Publisher
}

// Handler receives messages. It runs on the publisher's read loop (or the
// goroutine that publishes) with no lock of the broker held, and may publish.
// While it runs, its publisher waits: it must not block for longer than that
// client should be held back. Handlers may run concurrently.
type Handler func(*Msg)

// ClientInfo describes a connected client. It does not change after CONNECT
// and may be kept.
type ClientInfo struct {
	ID      uint64 // unique over the life of the server, from 1
	Name    string // as given in CONNECT
	User    string // user name or nkey it authenticated as; may be empty
	Lang    string
	Version string
	IP      string
	Port    int
	Headers bool // understands headers

	c *client
}
