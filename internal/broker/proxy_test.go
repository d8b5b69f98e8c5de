package broker

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// v2 is a PROXY header of version 2.
func v2(command, family byte, body string) string {
	return proxyBinary + string([]byte{command, family}) + string(binary.BigEndian.AppendUint16(nil, uint16(len(body)))) + body
}

const (
	four = "\xc0\x00\x02\x01" + "\xc0\x00\x02\x02" + "\x00\x05" + "\x00\x06"
	six  = "\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"
	long = six + six + "\x01\x00" + "\x00\x06"
)

func TestProxyHeader(t *testing.T) {
	for in, want := range map[string]string{
		"PROXY TCP4 192.0.2.1 192.0.2.2 5 6\r\n":             "192.0.2.1:5",
		"PROXY TCP6 2001:db8::1 ::1 65535 0\r\n":             "[2001:db8::1]:65535",
		"PROXY TCP6 ::ffff:192.0.2.1 ::1 5 6\r\n":            "192.0.2.1:5",
		"PROXY UNKNOWN\r\n":                                  "itself",
		"PROXY UNKNOWN whatever it says\r\n":                 "itself",
		"PROXY TCP4 192.0.2.1 192.0.2.2 5\r\n":               "error",
		"PROXY TCP4 192.0.2.1 192.0.2.2 5 6 7\r\n":           "error",
		"PROXY TCP4 192.0.2.1 192.0.2.2 5 -6\r\n":            "error",
		"PROXY TCP4 192.0.2.1 192.0.2.2 65536 6\r\n":         "error",
		"PROXY TCP4 ::1 ::1 5 6\r\n":                         "error",
		"PROXY TCP6 192.0.2.1 192.0.2.2 5 6\r\n":             "error",
		"PROXY TCP6 fe80::1%eth0 ::1 5 6\r\n":                "error",
		"PROXY TCP4 host 192.0.2.2 5 6\r\n":                  "error",
		"PROXY UDP4 192.0.2.1 192.0.2.2 5 6\r\n":             "error",
		"PROXY \r\n":                                         "error",
		"PROXY " + strings.Repeat("x", 200):                  "error",
		v2(0x21, 0x11, four):                                 "192.0.2.1:5",
		v2(0x21, 0x11, four+"\x04\x00\x01\x00"):              "192.0.2.1:5",
		v2(0x21, 0x21, long):                                 "[2001:db8::1]:256",
		v2(0x20, 0x11, four):                                 "itself",
		v2(0x20, 0x00, ""):                                   "itself",
		v2(0x21, 0x00, ""):                                   "itself",
		v2(0x21, 0x01, "tlv"):                                "itself",
		v2(0x21, 0x12, four):                                 "error",
		v2(0x21, 0x31, strings.Repeat("/", 216)):             "error",
		v2(0x21, 0x11, four[:11]):                            "error",
		v2(0x21, 0x21, long[:35]):                            "error",
		v2(0x22, 0x11, four):                                 "error",
		v2(0x11, 0x11, four):                                 "error",
		strings.Replace(v2(0x21, 0x11, four), "Q", "q", 1):   "error",
		"PUB a 0\r\n\r\n":                                    "none",
		"PING\r\n":                                           "none",
		"proxy TCP4 192.0.2.1 192.0.2.2 5 6\r\n":             "none",
		"CONNECT {}\r\n":                                     "none",
		"\r\n\r\nPING\r\n":                                   "none",
		string([]byte{recordHandshake, 3, 1, 2, 0, 1, 0, 1}): "none",
	} {
		show := func(n int, from netip.AddrPort, err error) string {
			switch {
			case errors.Is(err, errNoProxy):
				return "none"
			case errors.Is(err, errProxy):
				return "error"
			case n == 0 || err != nil:
				return "more"
			case from.IsValid():
				return from.String()
			}
			return "itself"
		}
		n, from, err := proxyHeader([]byte(in + "PING\r\n"))
		if got := show(n, from, err); got != want || err == nil && n != len(in) {
			t.Errorf("%q: %s, %d octets of %d, %v; want %s", in, got, n, len(in), err, want)
		}
		for i := range in {
			got := show(proxyHeader([]byte(in[:i])))
			if got != "more" && got != want || got == "more" && i > 0 && want == "none" && i >= 6 {
				t.Errorf("%q: %s after %d octets, want %s", in, got, i, want)
			}
		}
	}
}

// FuzzProxyHeader: what is said of the beginning of a header stays true when more
// of it arrives.
func FuzzProxyHeader(f *testing.F) {
	for _, s := range []string{
		"PROXY TCP4 192.0.2.1 192.0.2.2 5 6\r\nPING\r\n", "PROXY TCP6 2001:db8::1 ::1 5 6\r\n", "PROXY UNKNOWN\r\n", "PROXY x\r\n", "PUB a 0\r\n\r\n",
		v2(0x21, 0x11, four) + "PING\r\n", v2(0x21, 0x21, long+"tlv"), v2(0x20, 0, ""), v2(0x21, 0x12, four), v2(0x21, 0x11, ""),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n, from, err := proxyHeader(b)
		if n < 0 || n > len(b) || n > 0 && err != nil || n == 0 && from.IsValid() {
			t.Fatalf("%d octets of %d, %v, %v", n, len(b), from, err)
		}
		for i := range min(len(b), 300) {
			k, addr, prefixErr := proxyHeader(b[:i])
			switch {
			case prefixErr != nil && (err == nil || errors.Is(prefixErr, errNoProxy) != errors.Is(err, errNoProxy)):
				t.Fatalf("after %d octets: %v; then %v", i, prefixErr, err)
			case k > 0 && (k != n || addr != from):
				t.Fatalf("after %d octets: %d octets from %v; then %d from %v", i, k, addr, n, from)
			case prefixErr == nil && k == 0 && n > 0 && i >= n:
				t.Fatalf("%d octets are enough, %d are not", n, i)
			}
		}
	})
}

// TestProxied has clients come through a proxy and without one.
func TestProxied(t *testing.T) {
	s := run(t, Options{ProxyProtocol: true})
	for in, want := range map[string]string{
		"PROXY TCP4 192.0.2.1 192.0.2.2 5 6\r\n": "192.0.2.1:5",
		v2(0x21, 0x21, long):                     "[2001:db8::1]:256",
		v2(0x20, 0x00, strings.Repeat("x", 999)): "itself",
		"":                                       "itself",
	} {
		r := rawDial(t, s)
		if strings.Contains(r.info, "client_ip") {
			t.Errorf("the proxy's address is given away: %s", r.info)
		}
		for _, b := range []byte(in) { // however it is cut
			_, err := r.conn.Write([]byte{b})
			check(t, err)
		}
		r.send(quiet + "SUB a 1\r\nPUB a 1\r\nx\r\n")
		r.expect("MSG a 1 1\r\nx\r\n")
		c := s.Conns()
		if want == "itself" {
			want = r.conn.LocalAddr().String()
		}
		if got := net.JoinHostPort(c[0].IP, strconv.Itoa(c[0].Port)); got != want {
			t.Errorf("%q: comes from %s, want %s", in, got, want)
		}
		_ = r.conn.Close()
		until(t, "it is gone", func() bool { return len(s.Conns()) == 0 })
	}
	bad := rawDial(t, s)
	bad.send("PROXY TCP4 1 2 3 4\r\nPING\r\n")
	bad.expectEOF()
	until(t, "that counts", func() bool { return s.Stats().ProtoErrors == 1 })
}

// viaProxy dials as a proxy does.
type viaProxy struct{ header string }

// Dial dials.
func (p viaProxy) Dial(network, addr string) (net.Conn, error) {
	c, err := net.DialTimeout(network, addr, patience)
	if err == nil {
		_, err = c.Write([]byte(p.header))
	}
	return c, err
}

// TestProxiedTLS: the header comes in clear, TLS after it, in all the ways that
// TLS may begin.
func TestProxiedTLS(t *testing.T) {
	ca := newAuthority(t)
	via := nats.SetCustomDialer(viaProxy{v2(0x21, 0x11, four)})
	secure := nats.Secure(&tls.Config{RootCAs: ca.pool})
	for name, tt := range map[string]struct {
		how  TLSOptions
		opts []nats.Option
	}{
		"after INFO":          {TLSOptions{}, []nats.Option{secure}},
		"optional":            {TLSOptions{Optional: true, Timeout: patience}, []nats.Option{secure}},
		"first":               {TLSOptions{First: true}, []nats.Option{secure, nats.TLSHandshakeFirst()}},
		"first with fallback": {TLSOptions{First: true, Fallback: patience}, []nats.Option{secure, nats.TLSHandshakeFirst()}},
	} {
		t.Run(name, func(t *testing.T) {
			s := run(t, Options{ProxyProtocol: true, TLS: ca.server(t), TLSOptions: tt.how})
			check(t, dial(t, s, append(tt.opts, via)...).Flush())
			if c := s.Conns(); len(c) != 1 || c[0].IP != "192.0.2.1" || c[0].Port != 5 || !c[0].TLS {
				t.Errorf("%+v", c)
			}
			// Without a proxy, too.
			check(t, dial(t, s, tt.opts...).Flush())
		})
	}
	optional := run(t, Options{ProxyProtocol: true, TLS: ca.server(t), TLSOptions: TLSOptions{Optional: true, Timeout: patience}})
	r := rawDial(t, optional)
	r.send(v2(0x21, 0x11, four))
	r.send("PING\r\n")
	r.expect("PONG\r\n")
	// Nothing comes behind the header until INFO has been sent.
	s := run(t, Options{ProxyProtocol: true, TLS: ca.server(t), TLSOptions: TLSOptions{First: true, Fallback: 10 * time.Millisecond}})
	check(t, dial(t, s, secure, via).Flush())
}

// TestNoStall: publishers go on at once, and a client that does not read misses
// messages instead of being disconnected.
func TestNoStall(t *testing.T) {
	s := run(t, Options{NoStall: true, MaxPending: 2 << 20, WriteDeadline: time.Hour}, func(s *Server) { s.stallMax, s.stuckAfter = time.Hour, time.Hour })
	slow, pub := rawDial(t, s), dial(t, s)
	slow.send(quiet + "SUB a 1\r\nPING\r\n")
	slow.expect("PONG\r\n")
	data := make([]byte, 64<<10)
	const most = 1000 // far more than the kernel and the queue take
	for range most {
		check(t, pub.Publish("a", data))
	}
	check(t, pub.FlushTimeout(patience))
	c := s.Conns()
	if st := s.Stats(); st.Stalls != 0 || st.SlowConsumers != 0 || len(c) != 2 || c[0].Pending > 2<<20 {
		t.Errorf("%+v, %+v", st, c)
	}
	got := c[0].OutMsgs
	if got == 0 || got >= most {
		t.Errorf("%d of %d messages are on their way", got, most)
	}
	for range got {
		slow.expect("MSG a 1 65536\r\n" + string(data) + "\r\n")
	}
	check(t, pub.Publish("a", []byte("again")))
	slow.expect("MSG a 1 5\r\nagain\r\n")
}
