package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"

	"petiole/internal/wire"
)

// trace logs a line of the protocol; dir is "<<-" for what the client sent and
// "->>" for what it is sent, as in nats-server's log.
func (c *client) trace(dir string, line []byte) {
	c.log.LogAttrs(context.Background(), LevelTrace, dir,
		slog.Uint64("cid", c.info.Load().ID), slog.String("op", string(bytes.TrimRight(line, "\r\n"))))
}

// traceIn logs an operation of the client.
func (c *client) traceIn(ev *wire.Event) {
	var b []byte
	arg := func(s []byte) {
		if len(s) > 0 {
			b = append(append(b, ' '), s...)
		}
	}
	switch ev.Op {
	case wire.OpPub:
		if ev.HasHdr {
			b = append(b, "HPUB"...)
		} else {
			b = append(b, "PUB"...)
		}
		arg(ev.Subject)
		arg(ev.Reply)
		if ev.HasHdr {
			b = fmt.Appendf(b, " %d", len(ev.Header))
		}
		b = fmt.Appendf(b, " %d", len(ev.Header)+len(ev.Data))
	case wire.OpSub:
		b = append(b, "SUB"...)
		arg(ev.Subject)
		arg(ev.Queue)
		arg(ev.SID)
	case wire.OpUnsub:
		b = append(b, "UNSUB"...)
		arg(ev.SID)
		if ev.Max > 0 {
			b = fmt.Appendf(b, " %d", ev.Max)
		}
	case wire.OpPing:
		b = append(b, "PING"...)
	case wire.OpPong:
		b = append(b, "PONG"...)
	case wire.OpConnect:
		b = append(b, "CONNECT "...)
		var doc map[string]any
		if json.Unmarshal(ev.Arg, &doc) != nil {
			b = append(b, "(malformed)"...) // who knows what secrets it holds
			break
		}
		for _, secret := range []string{"pass", "auth_token", "jwt", "sig"} {
			if doc[secret] != nil {
				doc[secret] = "[REDACTED]"
			}
		}
		text, err := json.Marshal(doc)
		if err == nil {
			b = append(b, text...)
		}
	case wire.OpOK:
		b = append(b, "+OK"...)
	case wire.OpInfo:
		b = append(append(b, "INFO "...), ev.Arg...)
	case wire.OpErr:
		b = append(append(b, "-ERR "...), ev.Arg...)
	}
	c.trace("<<-", b)
}
