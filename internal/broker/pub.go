package broker

import (
	"bytes"
	"strconv"
	"unsafe"

	"petiole/internal/subject"
	"petiole/internal/wire"
)

func (c *client) onPub(ev *wire.Event) {
	if ev.HasHdr && !c.headers.Load() {
		c.fail(wire.ErrHeaders)
		return
	}
	p := c.pub
	if c.maps != nil && c.mapped(ev) {
		return
	}
	e := p.cache.Lookup(ev.Subject)
	valid := e.Note&noteValid != 0
	told := c.pedantic && (!valid || e.Note&noteWild != 0)
	if told {
		c.sendErrSoon(wire.ErrPublishSubject.Error()) // a warning, if it is valid: the message goes on
	}
	if e.Note&notePermitted == 0 && !c.mayRespond(ev.Subject) {
		c.violation("Permissions Violation for Publish to " + strconv.Quote(string(ev.Subject)))
		return
	}
	if !valid {
		if !told {
			c.sendErrSoon(wire.ErrPublishSubject.Error())
		}
		if c.noResp && len(ev.Reply) > 0 {
			c.noResponders(ev.Subject, ev.Reply) // it waits for an answer
		}
		return
	}
	if len(ev.Reply) > 0 && reservedReply(ev.Reply) {
		c.violation("Permissions Violation for Publish with Reply of " + strconv.Quote(string(ev.Reply)))
		return
	}
	c.ok()
	if !p.route(e, ev.Subject, ev.Reply, ev.Header, ev.Data) && c.noResp && len(ev.Reply) > 0 {
		c.noResponders(ev.Subject, ev.Reply)
	}
}

// reservedReply reports whether only a server may ask for answers there: what
// gateways and imported services route answers by, and the subjects by which
// consumers of JetStream learn what was acknowledged.
func reservedReply(reply []byte) bool {
	if reply[0] != '$' && reply[0] != '_' {
		return false
	}
	return gatewayReply(reply) || bytes.HasPrefix(reply, []byte("_R_.")) || bytes.HasPrefix(reply, []byte("$JS.ACK."))
}

// gatewayReply reports whether subj is one that gateways route answers by.
// Clients may not publish there.
func gatewayReply(subj []byte) bool {
	return bytes.HasPrefix(subj, []byte("_GR_.")) || bytes.HasPrefix(subj, []byte("$GR."))
}

// mapped replaces the subject of ev by the one that a mapping gives it, and
// reports whether the mapping wants the message to be lost instead.
func (c *client) mapped(ev *wire.Event) (lost bool) {
	if !subject.Valid(ev.Subject) {
		return false // to be refused
	}
	p := c.pub
	to, ok := c.maps.Apply(p.mapped[:0], unsafe.String(unsafe.SliceData(ev.Subject), len(ev.Subject)))
	p.mapped = to
	switch {
	case !ok:
		return false
	case len(to) > 0:
		ev.Subject = to
		return false
	}
	c.ok()
	if c.noResp && len(ev.Reply) > 0 {
		c.noResponders(nil, ev.Reply)
	}
	return true
}

// noResponders tells the client that nobody got its request, if it subscribes to
// the reply itself; members of queue groups are not told, as with nats-server.
func (c *client) noResponders(subj, reply []byte) {
	var sub *subscription
	e := c.pub.cache.Lookup(reply)
	for _, s := range e.Plain {
		if s.c == c {
			sub = s
			break
		}
	}
	if sub == nil {
		return
	}
	hdr := wire.AppendStatus(c.pub.scratch[:0], 503, "", "Nats-Subject", string(subj))
	c.pub.scratch = hdr
	c.pub.begin(reply, nil, hdr, nil)
	c.pub.status = true
	c.pub.deliver(sub)
	c.pub.status = false
	c.pub.end()
}
