package broker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strconv"
	"time"

	"petiole/internal/wire"
)

// ErrNeedsRestart says that [Server.Reload] was asked for something that only
// a new server can have.
var ErrNeedsRestart = errors.New("needs a restart")

// Reload replaces the options of a running server. Those that it can not
// change (Host, Port, ServerName, Version, JetStream, APILevel, Log, AfterRead)
// have to be as they are, or the error wraps [ErrNeedsRestart]; then, or if the
// options are not valid, everything stays as it was.
//
// Clients are treated as nats-server does: one whose user is gone is
// disconnected, one whose credentials are no longer valid too, with
// "Authorization Violation". The others get their user's new permissions, lose
// the subscriptions that these no longer permit and are told each. Clients
// beyond a lower MaxConn are disconnected, any of them. Connections with TLS
// stay as they are; new ones use the new certificates.
func (s *Server) Reload(opts Options) error {
	old := s.set.Load()
	for _, same := range []struct {
		name     string
		old, now any
	}{
		{"host", old.Host, opts.Host},
		{"port", old.Port, opts.Port},
		{"server name", old.ServerName, opts.ServerName},
		{"JetStream", old.JetStream, opts.JetStream},
	} {
		if same.old != same.now && !reflect.ValueOf(same.now).IsZero() {
			return fmt.Errorf("%s can not change while the server runs: %w", same.name, ErrNeedsRestart)
		}
	}
	opts.Host, opts.Port, opts.ServerName, opts.JetStream = old.Host, old.Port, old.ServerName, old.JetStream
	opts.NoListen = old.NoListen
	opts.Version, opts.GitCommit, opts.APILevel, opts.Log, opts.AfterRead = old.Version, old.GitCommit, old.APILevel, old.Log, old.AfterRead
	set, err := newSettings(opts)
	if err != nil {
		return err
	}
	// Who is being authenticated is done before, or begins after.
	s.reload.Lock()
	s.set.Store(set)
	s.reload.Unlock()

	s.mu.Lock()
	clients := make([]*client, 0, len(s.clients))
	for _, c := range s.clients {
		clients = append(clients, c)
	}
	s.mu.Unlock()
	for i, c := range clients {
		if i < len(clients)-max(set.MaxConn, 0) {
			c.expel(wire.ErrMaxConn)
			continue
		}
		c.reauthenticate(set)
	}
	return nil
}

// expel ends the connection with an error, if the client can be told one.
func (c *client) expel(err *wire.Error) {
	if c.ready.Load() {
		c.fail(err)
	} else {
		c.disconnect(err)
	}
}

// reauthenticate looks at the client's credentials again.
func (c *client) reauthenticate(set *settings) {
	c.authMu.Lock() // it may be about to become another user
	defer c.authMu.Unlock()
	arg := c.cred.Load()
	switch {
	case arg == nil && c.awaiting.Load():
		return // still to come
	case arg == nil:
		arg = &connectArg{} // it never said CONNECT, which it did not have to
	}
	id := c.identity(arg)
	if set.auth.on() && !set.auth.has(id) {
		c.finish(errUserGone, "")
		return
	}
	id.proved = c.proved
	user, ok := set.auth.check(id)
	if !ok {
		c.srv.authErrors.Add(1)
		c.expel(wire.ErrAuthorization)
		return
	}
	c.proved = id.proved
	var perms *perms
	if user != nil {
		perms = newPerms(user.Permissions)
	}
	was := c.perms.Load()
	if was.same(perms) {
		return
	}
	c.out.mu.Lock()
	if was != nil && perms != nil {
		perms.replies, perms.pruned = was.replies, was.pruned
	}
	c.perms.Store(perms)
	c.out.mu.Unlock()
	c.changed.Add(1)
	c.mu.Lock()
	subs := make([]*subscription, 0, len(c.subs))
	for _, sub := range c.subs {
		subs = append(subs, sub)
	}
	c.mu.Unlock()
	for _, sub := range subs {
		c.recheck(sub)
	}
}

// same reports whether both permit the same.
func (p *perms) same(o *perms) bool {
	if p == nil || o == nil {
		return p == o
	}
	return reflect.DeepEqual(p.pub, o.pub) && reflect.DeepEqual(p.sub, o.sub) && reflect.DeepEqual(p.responses, o.responses)
}

// recheck ends sub if the client's permissions have changed and do not permit
// it any more.
func (c *client) recheck(sub *subscription) {
	ok, filter := true, false
	if p := c.perms.Load(); p != nil {
		ok, filter = p.maySubscribe(sub.subject, sub.queue)
	}
	sub.filter.Store(filter)
	if ok || sub.closed.Load() {
		return
	}
	c.unsubscribe(sub, true)
	text := "Permissions Violation for Subscription to " + strconv.Quote(sub.subject)
	if sub.queue != "" {
		text += " using queue " + strconv.Quote(sub.queue)
	}
	c.sendErr(text + " (sid " + strconv.Quote(string(sub.sid)) + ")")
	c.log.Info("subscription ended: no longer permitted", "cid", c.info.Load().ID, "user", c.info.Load().User, "subject", sub.subject, "queue", sub.queue)
}

// Lame reports whether the server takes no more clients.
func (s *Server) Lame() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lame
}

// LameDuck prepares for a stop without a crowd that comes back at once: it
// stops listening, tells clients (INFO with ldm), waits for grace and then
// disconnects one client after the other, spread over what is left of duration,
// at most a second apart. It returns when no client is left, or when ctx ends.
// What clients publish until then is served as ever. [Server.Shutdown] is still
// to be called.
func (s *Server) LameDuck(ctx context.Context, duration, grace time.Duration) error {
	s.mu.Lock()
	if s.closed || s.lame {
		s.mu.Unlock()
		return ErrServerClosed
	}
	s.lame = true
	if s.ln != nil {
		_ = s.ln.Close()
	}
	clients := make([]*client, 0, len(s.clients))
	for _, c := range s.clients {
		clients = append(clients, c)
	}
	s.mu.Unlock()
	if len(clients) == 0 {
		return nil
	}
	set := s.set.Load()
	for _, c := range clients {
		if c.async.Load() {
			c.text(s.infoLine(c, set, c.tls.Load(), lameDuck), false)
			c.flush()
		}
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	wait := func() error {
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := wait(); err != nil {
		return err
	}
	left := duration - grace
	if left <= 0 {
		left = time.Second
	}
	pause := min(left/time.Duration(len(clients)), time.Second)
	rand.Shuffle(len(clients), func(i, j int) { clients[i], clients[j] = clients[j], clients[i] })
	due := time.Now()
	for i, c := range clients {
		c.finish(errShutdown, "")
		due = due.Add(pause)
		// With thousands of clients the pauses are shorter than timers are good for.
		if d := time.Until(due); i < len(clients)-1 && d > time.Millisecond {
			timer.Reset(d)
			if err := wait(); err != nil {
				return err
			}
		}
	}
	return nil
}
