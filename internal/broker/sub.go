package broker

import (
	"bytes"
	"strconv"
	"sync/atomic"

	"petiole/internal/subject"
	"petiole/internal/wire"
)

// systemGroup is the queue group of nats-server's own subscriptions; clients
// must not join it.
const systemGroup = "_sys_"

// subscription is one SUB of a client, or an internal handler.
type subscription struct {
	c       *client // nil for a handler
	handler Handler
	acc     *Account
	subject string
	queue   string
	sid     []byte
	filter  atomic.Bool // some of what matches is denied to the client

	// For a client's these are guarded by its out.mu.
	delivered int
	max       int // unsubscribe after this many; 0 is never
	closed    atomic.Bool
}

func (c *client) onSub(ev *wire.Event) {
	sub := &subscription{c: c, acc: c.acc, subject: string(ev.Subject), queue: string(ev.Queue), sid: bytes.Clone(ev.SID)}
	perms := c.perms.Load()
	if perms != nil || sub.queue == systemGroup {
		ok, filter := false, false
		if sub.queue != systemGroup {
			ok, filter = perms.maySubscribe(sub.subject, sub.queue)
		}
		if !ok {
			text := "Permissions Violation for Subscription to " + strconv.Quote(sub.subject)
			if sub.queue != "" {
				text += " using queue " + strconv.Quote(sub.queue)
			}
			c.violation(text)
			return
		}
		sub.filter.Store(filter)
	}
	if m := c.srv.set.Load().MaxSubTokens; m > 0 && subject.NumTokens(sub.subject) > m {
		c.violation("Permissions Violation for Subscription to " + strconv.Quote(sub.subject) + ", too many tokens")
		return
	}
	if !subject.Valid(sub.subject) {
		c.sendErrSoon(wire.ErrSubject.Error())
		return
	}
	c.mu.Lock()
	if _, dup := c.subs[string(ev.SID)]; dup {
		c.mu.Unlock()
		c.ok() // as nats-server: the first one stays
		return
	}
	if m := c.srv.set.Load().MaxSubs; m > 0 && len(c.subs) >= m {
		c.mu.Unlock()
		c.sendErrSoon(wire.ErrMaxSubs.Error())
		return
	}
	c.subs[string(sub.sid)] = sub
	c.mu.Unlock()
	if c.perms.Load() != perms {
		c.recheck(sub) // the permissions changed meanwhile, and who changed them may not have seen sub
	}
	c.acc.insert(sub, false)
	c.ok()
}

func (c *client) onUnsub(ev *wire.Event) {
	c.mu.Lock()
	sub := c.subs[string(ev.SID)]
	c.mu.Unlock()
	if sub != nil {
		end := ev.Max == 0
		if !end {
			c.out.mu.Lock()
			sub.max = ev.Max
			end = sub.delivered >= ev.Max
			c.out.mu.Unlock()
		}
		if end {
			c.unsubscribe(sub, false)
		}
	}
	c.ok()
}

// unsubscribe takes sub out; no message is delivered to it any more. It may be
// called from any goroutine, more than once; async is for [Account.remove].
func (c *client) unsubscribe(sub *subscription, async bool) {
	if sub.closed.Swap(true) {
		return
	}
	// Deliveries check the flag with out.mu held, and what the client is told
	// next is queued under it too: no message follows the answer to UNSUB.
	c.mu.Lock()
	if c.subs[string(sub.sid)] == sub {
		delete(c.subs, string(sub.sid))
	}
	c.mu.Unlock()
	c.acc.remove(sub, async)
}
