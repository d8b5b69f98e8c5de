package broker

import (
	"context"
	"net"
	"time"
)

// Server is a NATS server. Create it with [New], then [Server.Start] it.
type Server struct {
	opts Options
	acc  *Account
}

// New checks the options and makes a server that does not listen yet.
// Handlers may be registered before Start.
func New(opts Options) (*Server, error) {
	return &Server{opts: opts, acc: &Account{}}, nil
}

// Start listens and serves clients in the background until [Server.Shutdown].
func (s *Server) Start() error { return nil }

// Addr returns the address listened on; nil before Start.
func (s *Server) Addr() net.Addr { return nil }

// ClientURL returns a URL under which clients on this machine reach the
// server, such as "nats://127.0.0.1:4222".
func (s *Server) ClientURL() string { return "" }

// ID returns the server id, a public server nkey ("N...").
func (s *Server) ID() string { return "" }

// Name returns the server name, by default the id.
func (s *Server) Name() string { return s.opts.ServerName }

// Account returns the default account, "$G".
func (s *Server) Account() *Account { return s.acc }

// Shutdown stops listening, sends what is queued and disconnects all clients.
// When ctx ends first, the remaining clients are cut off and its error is
// returned. Internal handlers are not called once it has returned.
func (s *Server) Shutdown(ctx context.Context) error { return nil }

// Stats is a snapshot of the server's counters.
type Stats struct {
	Start         time.Time
	Connections   int    // now
	TotalConns    uint64 // since Start
	Subscriptions int    // now, internal ones included
	InMsgs        uint64
	InBytes       uint64 // header and data
	OutMsgs       uint64 // to clients
	OutBytes      uint64
	SlowConsumers uint64 // clients disconnected because they did not keep up
	Stalls        uint64 // times a publisher was held back for a slow consumer
	StaleConns    uint64 // clients disconnected because they did not answer
	AuthErrors    uint64
	ProtoErrors   uint64 // clients disconnected because of what they sent
}

// Stats returns the server's counters.
func (s *Server) Stats() Stats { return Stats{} }

// ConnInfo describes a client connection for monitoring.
type ConnInfo struct {
	ClientInfo
	Start         time.Time
	LastActivity  time.Time
	RTT           time.Duration // of the last PING; 0 before the first PONG
	Pending       int64         // octets queued for the client
	Subscriptions int
	InMsgs        uint64
	InBytes       uint64
	OutMsgs       uint64
	OutBytes      uint64
	TLS           bool
}

// Conns returns the clients connected now, by ID.
func (s *Server) Conns() []ConnInfo { return nil }
