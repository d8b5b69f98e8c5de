package broker

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// The PROXY protocol (haproxy.org, proxy-protocol.txt, sections 2.1 and 2.2):
// a proxy sends one header, text or binary, before anything else, in clear and
// before TLS, and says for whom it connects.
const (
	proxyText    = "PROXY "
	proxyTextMax = 107 // octets of a version 1 header, line end included
	proxyBinary  = "\r\n\r\n\x00\r\nQUIT\n"
	// proxyTimeout is how long a client may take until its header, if it has
	// one, is complete.
	proxyTimeout = 10 * time.Second
)

var (
	errProxy    = errors.New("PROXY header")
	errNoProxy  = errors.New("there is no PROXY header")
	errProxyCut = fmt.Errorf("%w: not complete", errProxy)
)

// proxyHeader parses the PROXY header that b begins with, and returns its
// length and the client's address. The address is not valid if the proxy speaks
// for itself, as it does to see whether the server is up. n is 0 if b is too
// short. The error is errNoProxy if b is not the beginning of a header, and
// wraps errProxy if that is malformed or of a kind that is not supported.
func proxyHeader(b []byte) (n int, from netip.AddrPort, err error) {
	is := func(start string) bool { return string(b[:min(len(b), len(start))]) == start[:min(len(b), len(start))] }
	switch {
	case len(b) == 0:
		return 0, from, nil
	case is(proxyText):
		if len(b) < len(proxyText) {
			return 0, from, nil
		}
		return proxyV1(b)
	// As nats-server, which looks at six octets: the rest has to be right.
	case is(proxyBinary[:6]):
		if !is(proxyBinary) {
			return 0, from, fmt.Errorf("%w: the signature of version 2 is not right", errProxy)
		}
		return proxyV2(b)
	}
	return 0, from, errNoProxy
}

func proxyV1(b []byte) (n int, from netip.AddrPort, err error) {
	line := b[:min(len(b), proxyTextMax)]
	end := bytes.Index(line, []byte("\r\n"))
	if end < 0 {
		if len(line) == proxyTextMax {
			return 0, from, fmt.Errorf("%w: no line end within %d octets", errProxy, proxyTextMax)
		}
		return 0, from, nil
	}
	n = end + 2
	f := strings.Fields(string(line[len(proxyText):end]))
	if len(f) > 0 && f[0] == "UNKNOWN" {
		return n, from, nil
	}
	if len(f) != 5 {
		return 0, from, fmt.Errorf("%w: %q has not five arguments", errProxy, line[:end])
	}
	src, err1 := netip.ParseAddr(f[1])
	dst, err2 := netip.ParseAddr(f[2])
	port, err3 := strconv.ParseUint(f[3], 10, 16)
	_, err4 := strconv.ParseUint(f[4], 10, 16)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return 0, from, fmt.Errorf("%w: %q: %w", errProxy, line[:end], err)
	}
	four := f[0] == "TCP4"
	if !four && f[0] != "TCP6" || src.Is4() != four || dst.Is4() != four || src.Zone() != "" {
		return 0, from, fmt.Errorf("%w: %q: protocol and addresses do not go together", errProxy, line[:end])
	}
	return n, netip.AddrPortFrom(src.Unmap(), uint16(port)), nil
}

func proxyV2(b []byte) (n int, from netip.AddrPort, err error) {
	const fixed = 16
	if len(b) < fixed {
		return 0, from, nil
	}
	command, family, proto := b[12], b[13]>>4, b[13]&0xf
	n = fixed + int(binary.BigEndian.Uint16(b[14:]))
	var size int // of one address
	switch {
	case command>>4 != 2:
		return 0, from, fmt.Errorf("%w: version %d", errProxy, command>>4)
	case command&0xf > 1:
		return 0, from, fmt.Errorf("%w: command %d", errProxy, command&0xf)
	case command&0xf == 0, family == 0: // LOCAL, or nothing that is known
	case proto != 1:
		return 0, from, fmt.Errorf("%w: transport %d; only TCP is supported", errProxy, proto)
	case family == 1:
		size = 4
	case family == 2:
		size = 16
	default:
		return 0, from, fmt.Errorf("%w: address family %d; only IPv4 and IPv6 are supported", errProxy, family)
	}
	if size > 0 && n < fixed+2*size+4 {
		return 0, from, fmt.Errorf("%w: %d octets are too short for two addresses", errProxy, n-fixed)
	}
	if len(b) < n {
		return 0, from, nil
	}
	if size > 0 {
		addr, _ := netip.AddrFromSlice(b[fixed : fixed+size])
		from = netip.AddrPortFrom(addr.Unmap(), binary.BigEndian.Uint16(b[fixed+2*size:]))
	}
	return n, from, nil
}

// proxied reads the PROXY header if the client begins with one, and makes the
// client the one it speaks of. pre is what has been read already; what follows
// the header, or all of it if there is none, is returned.
func (c *client) proxied(pre []byte) (rest []byte, err error) {
	_ = c.sock.SetReadDeadline(time.Now().Add(proxyTimeout))
	defer func() {
		_ = c.sock.SetReadDeadline(time.Time{})
		if c.closing.Load() { // that deadline was to stay
			rest, err = nil, errShutdown
		}
	}()
	buf := pre
	var chunk [256]byte // grown by what has arrived, not by what is announced
	for {
		n, from, err := proxyHeader(buf)
		switch {
		case errors.Is(err, errNoProxy):
			return buf, nil
		case err != nil:
			return nil, err
		case n > 0:
			if from.IsValid() {
				info := *c.info.Load()
				info.IP, info.Port = from.Addr().String(), int(from.Port())
				c.info.Store(&info)
			}
			return buf[n:], nil
		}
		k, err := c.sock.Read(chunk[:])
		if k == 0 && err != nil {
			return nil, fmt.Errorf("%w: %w", errProxyCut, err)
		}
		buf = append(buf, chunk[:k]...)
	}
}

// addr is where the client is, for the log.
func (c *client) addr() string {
	if info := c.info.Load(); info.IP != "" {
		return net.JoinHostPort(info.IP, strconv.Itoa(info.Port))
	}
	return c.sock.RemoteAddr().String()
}
