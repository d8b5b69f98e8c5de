package broker

import (
	"time"

	"petiole/internal/wire"
)

func (c *client) onPing() {
	c.reply(linePong)
	if !c.connected {
		return
	}
	first := !c.ponged
	c.ponged = true
	if c.protocol >= 1 {
		// Not before: a client that waits for its first PONG takes nothing else.
		c.async.Store(true)
		if first {
			c.reply(c.srv.infoLine(c, c.srv.set.Load(), c.tls.Load(), connects))
		}
	}
}

func (c *client) onPong() {
	c.mu.Lock()
	if c.pings > 0 && !c.pinged.IsZero() {
		c.rtt.Store(int64(time.Since(c.pinged)))
	}
	c.pings = 0
	c.mu.Unlock()
}

// pingTick sends a PING, or finds that the client does not answer.
func (c *client) pingTick() {
	if c.closing.Load() {
		return
	}
	act := c.activity.Load()
	c.mu.Lock()
	if act != c.seenAct {
		c.seenAct = act
		c.pings = 0
	}
	stale := c.pings >= c.srv.set.Load().MaxPingsOut
	if !stale {
		c.pings++
		c.pinged = time.Now()
		if c.pinger != nil {
			c.pinger.Reset(c.srv.set.Load().PingInterval)
		}
	}
	c.mu.Unlock()
	if stale {
		c.srv.stale.Add(1)
		c.fail(wire.ErrStale)
		return
	}
	c.text(linePing, false)
	c.flush()
}
