package broker

import (
	"cmp"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"time"

	"petiole/internal/subject/transform"
)

// settings is what [Options] say, checked, with defaults filled in and made
// ready for use. It does not change; a reload replaces it.
type settings struct {
	Options
	auth *auth
	maps *transform.Map // nil: no mappings

	advertHost string // Advertise, taken apart
	advertPort int
}

func newSettings(opts Options) (*settings, error) {
	set := &settings{Options: opts}
	o := &set.Options
	o.Host = cmp.Or(o.Host, "0.0.0.0")
	o.Port = cmp.Or(o.Port, DefaultPort)
	o.Version = cmp.Or(o.Version, DefaultVersion)
	o.MaxPayload = cmp.Or(o.MaxPayload, DefaultMaxPayload)
	o.MaxControlLine = cmp.Or(o.MaxControlLine, DefaultMaxControlLine)
	o.MaxPending = cmp.Or(o.MaxPending, DefaultMaxPending)
	o.MaxConn = cmp.Or(o.MaxConn, DefaultMaxConn)
	o.PingInterval = cmp.Or(o.PingInterval, DefaultPingInterval)
	o.MaxPingsOut = cmp.Or(o.MaxPingsOut, DefaultMaxPingsOut)
	o.WriteDeadline = cmp.Or(o.WriteDeadline, DefaultWriteDeadline)
	o.TLSOptions.Timeout = cmp.Or(o.TLSOptions.Timeout, DefaultTLSTimeout)
	if o.AuthTimeout == 0 {
		o.AuthTimeout = DefaultAuthTimeout
		if o.TLS != nil { // where a handshake takes long, a login does
			o.AuthTimeout = o.TLSOptions.Timeout + time.Second
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	switch {
	case o.Port < -1 || o.Port > 65535:
		return nil, fmt.Errorf("port %d: not a TCP port; use 1 to 65535, or -1 for any free one", o.Port)
	case o.MaxPayload < 0 || o.MaxPayload > maxMaxPayload:
		return nil, fmt.Errorf("max_payload %d: not between 1 and %d octets", o.MaxPayload, maxMaxPayload)
	case o.MaxControlLine < 64:
		return nil, fmt.Errorf("max_control_line %d: less than 64 octets", o.MaxControlLine)
	case o.MaxPending < int64(o.MaxPayload):
		return nil, fmt.Errorf("max_pending %d: less than max_payload (%d), so that no client could get the largest message", o.MaxPending, o.MaxPayload)
	}
	if o.Advertise != "" {
		host, port, err := net.SplitHostPort(o.Advertise)
		n, numErr := strconv.Atoi(port)
		if err != nil || numErr != nil || n < 1 || n > 65535 {
			return nil, fmt.Errorf("client_advertise %q: not host:port", o.Advertise)
		}
		set.advertHost, set.advertPort = host, n
	}
	var err error
	if set.auth, err = newAuth(o); err != nil {
		return nil, err
	}
	if set.maps, err = transform.NewMap(o.Mappings); err != nil {
		return nil, err
	}
	return set, nil
}
