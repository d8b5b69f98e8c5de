package broker

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"petiole/internal/wire"
)

var (
	errHandshake = errors.New("TLS handshake")
	errNotPinned = errors.New("the key of the client's certificate is not one of pinned_certs")
	errUserGone  = errors.New("user removed from the configuration")
)

// recordHandshake is the first octet of a TLS connection: the type of record
// that holds handshake messages (RFC 8446, section 5.1).
const recordHandshake = 0x16

// open brings a new connection to where CONNECT may arrive: INFO is sent and
// TLS, if any, is up. What was read on the way and belongs to the protocol is
// returned. A PROXY header comes before TLS. A connection that is one too many
// (full) is not brought up: its handshake would cost more than refusing it. It
// gets INFO in clear, or nothing where TLS comes first, as with nats-server.
func (c *client) open(set *settings, full bool) (pre []byte, err error) {
	to := set.TLSOptions
	offered := set.TLS != nil && c.kind == ConnStandard
	if full && offered && to.First {
		c.raw = newDirectWriter(c.conn)
		return nil, nil
	}
	first := offered && to.First
	start := offered && !to.Optional && !full // whether TLS is to be started
	proxy := set.ProxyProtocol && c.kind == ConnStandard && !full
	switch {
	case first && to.Fallback > 0:
		if pre, err = c.peek(to.Fallback); err != nil {
			return nil, err
		}
		if proxy && len(pre) > 0 {
			proxy = false
			if pre, err = c.proxied(pre); err == nil && len(pre) == 0 {
				pre, err = c.peek(to.Fallback)
			}
			if err != nil {
				return nil, err
			}
		}
		first = len(pre) > 0
	case first && proxy:
		if pre, err = c.proxied(nil); err != nil {
			return nil, err
		}
	}
	if !first {
		if err := c.sendInfo(set, false); err != nil {
			return nil, err
		}
		if proxy {
			// Only now: a client that comes without a proxy waits for INFO.
			if pre, err = c.proxied(nil); err != nil {
				return nil, err
			}
		}
		if offered && to.Optional && !full {
			if len(pre) == 0 {
				pre, err = c.peek(to.Timeout)
			}
			if err != nil {
				return nil, err
			}
			start = len(pre) > 0 && pre[0] == recordHandshake
		}
	}
	if !first && !start {
		c.raw = newDirectWriter(c.conn)
		return pre, nil
	}
	if to.RateLimit > 0 && !c.srv.handshakes.allow(to.RateLimit, time.Now()) {
		// Said in clear, for there is no TLS yet.
		c.raw = newDirectWriter(c.conn)
		c.fail(wire.ErrThrottled)
		return nil, nil
	}
	if err := c.handshake(set, pre); err != nil {
		return nil, err
	}
	if first {
		return nil, c.sendInfo(set, true)
	}
	return nil, nil
}

func (c *client) sendInfo(set *settings, first bool) error {
	_ = c.conn.SetWriteDeadline(time.Now().Add(set.WriteDeadline))
	_, err := c.conn.Write(c.srv.infoLine(c, set, first, arrives))
	_ = c.conn.SetWriteDeadline(time.Time{})
	return err
}

// peek returns what the client sends within d, the first octets of it; nothing
// if it sends nothing.
func (c *client) peek(d time.Duration) ([]byte, error) {
	var b [16]byte
	_ = c.sock.SetReadDeadline(time.Now().Add(d))
	n, err := c.sock.Read(b[:])
	_ = c.sock.SetReadDeadline(time.Time{})
	if c.closing.Load() { // that deadline was to stay
		return nil, errShutdown
	}
	var timeout net.Error
	if err != nil && n == 0 && (!errors.As(err, &timeout) || !timeout.Timeout()) {
		return nil, err
	}
	return b[:n], nil
}

// handshake turns the connection, on which pre has arrived, into a TLS
// connection.
func (c *client) handshake(set *settings, pre []byte) error {
	sock := c.sock
	if len(pre) > 0 {
		sock = &peeked{Conn: sock, pre: pre}
	}
	tc := tls.Server(sock, set.TLS)
	ctx, cancel := context.WithTimeout(context.Background(), set.TLSOptions.Timeout)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("%w: %w", errHandshake, err)
	}
	state := tc.ConnectionState()
	if certs := state.PeerCertificates; len(certs) > 0 {
		c.cert.Store(certs[0])
	}
	c.tlsState.Store(&tlsState{state.Version, state.CipherSuite})
	if pins := set.TLSOptions.Pinned; len(pins) > 0 {
		cert := c.cert.Load()
		if cert == nil {
			return fmt.Errorf("%w: %w", errHandshake, errNotPinned)
		}
		sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
		if !pins[hex.EncodeToString(sum[:])] {
			return fmt.Errorf("%w: %w", errHandshake, errNotPinned)
		}
	}
	c.tls.Store(true)
	c.out.mu.Lock()
	c.conn = tc
	c.out.mu.Unlock()
	return nil
}

// peeked gives back first what was read in advance.
type peeked struct {
	net.Conn
	pre []byte
}

// Read reads.
func (p *peeked) Read(b []byte) (int, error) {
	if len(p.pre) > 0 {
		n := copy(b, p.pre)
		p.pre = p.pre[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}

// rate counts events within a second.
type rate struct {
	mu    sync.Mutex
	since time.Time
	n     int
}

// allow reports whether one more event stays within the limit, and counts it.
func (r *rate) allow(limit int, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.since) >= time.Second {
		r.since, r.n = now, 0
	}
	if r.n >= limit {
		return false
	}
	r.n++
	return true
}

// InProcessConn returns the client's end of a connection to the server that
// needs no network, as [Server.Start] takes them from the network. It has no
// TLS. It may be used before Start.
func (s *Server) InProcessConn() (net.Conn, error) {
	theirs, ours := net.Pipe()
	if !s.accept(&pipe{Conn: ours}, ConnInProcess) {
		_ = theirs.Close()
		return nil, ErrServerClosed
	}
	return theirs, nil
}

// pipe is the server's end of an in-process connection. Closing a pipe loses
// nothing that was written, for a write returns when it has been read.
type pipe struct{ net.Conn }

// CloseWrite ends the connection, which has but one direction to end.
func (p *pipe) CloseWrite() error { return p.Close() }

var _ io.Closer = (*pipe)(nil)
