package broker

import (
	"cmp"
	"encoding/json"

	"petiole/internal/wire"
)

// How a client says who it is.

// connectArg is the document of CONNECT.
type connectArg struct {
	Verbose      bool   `json:"verbose"`
	Pedantic     bool   `json:"pedantic"`
	TLSRequired  bool   `json:"tls_required"`
	Token        string `json:"auth_token"`
	User         string `json:"user"`
	Pass         string `json:"pass"`
	Name         string `json:"name"`
	Lang         string `json:"lang"`
	Version      string `json:"version"`
	Protocol     int    `json:"protocol"`
	Echo         bool   `json:"echo"`
	Headers      bool   `json:"headers"`
	NoResponders bool   `json:"no_responders"`
	NKey         string `json:"nkey"`
	Sig          string `json:"sig"`

	// Once asked for an account of that name; an error today, as with nats-server.
	Account    string `json:"account"`
	NewAccount bool   `json:"new_account"`
}

// connectChecked is what CONNECT may hold that counts for nothing here, but has
// to be of the right type.
type connectChecked struct {
	JWT           string        `json:"jwt"`
	Import        *subjectLists `json:"import"`
	Export        *subjectLists `json:"export"`
	RemoteAccount string        `json:"remote_account"`
	ProxySig      string        `json:"proxy_sig"`
}

type subjectLists struct {
	Allow []string `json:"allow"`
	Deny  []string `json:"deny"`
}

// due ends clients that send anything but CONNECT, however little of it, while
// they are not authenticated. Without it they count as the user for those
// without credentials, if there is one: whoever types the protocol need not
// begin with it.
func (c *client) due() bool {
	if c.srv.set.Load().auth.noAuth != nil {
		if !c.authenticate(&connectArg{}) {
			return true
		}
		c.connected = false // CONNECT may still come
		return false
	}
	c.srv.authErrors.Add(1)
	c.fail(wire.ErrAuthorization)
	return true
}

// onConnect takes CONNECT. A client that sends another one keeps what that does
// not mention, but not its subscriptions, and has to prove again who it is.
func (c *client) onConnect(doc []byte) {
	said := struct {
		connectArg
		connectChecked
	}{connectArg: connectArg{Echo: true, Verbose: true, Pedantic: true}}
	if c.connected {
		said.connectArg = *c.cred.Load()
	}
	if err := json.Unmarshal(doc, &said); err != nil {
		c.fail(wire.ErrParser)
		return
	}
	arg := said.connectArg
	headers := arg.Headers && !c.srv.set.Load().NoHeaders
	if c.connected {
		c.unsubscribeAll()
	}
	switch {
	case !c.authenticate(&arg):
		return
	case arg.Account != "" || arg.NewAccount:
		c.srv.authErrors.Add(1)
		c.fail(wire.ErrAuthorization)
		return
	case arg.Protocol < 0 || arg.Protocol > 1:
		c.fail(wire.ErrProtocol)
		return
	case arg.NoResponders && !headers:
		c.fail(wire.ErrNoResponders)
		return
	}
	c.verbose, c.pedantic, c.echo, c.noResp = arg.Verbose, arg.Pedantic, arg.Echo, arg.NoResponders
	c.protocol = arg.Protocol
	c.headers.Store(headers)
	c.ok()
}

// unsubscribeAll ends the client's subscriptions.
func (c *client) unsubscribeAll() {
	c.mu.Lock()
	subs := make([]*subscription, 0, len(c.subs))
	for _, sub := range c.subs {
		subs = append(subs, sub)
	}
	c.mu.Unlock()
	for _, sub := range subs {
		c.unsubscribe(sub, false)
	}
}

// authenticate makes the client the user that its CONNECT names. It reports
// whether it may stay.
func (c *client) authenticate(arg *connectArg) bool {
	c.srv.reload.RLock()
	defer c.srv.reload.RUnlock()
	c.authMu.Lock()
	defer c.authMu.Unlock()
	id := c.identity(arg)
	user, ok := c.srv.set.Load().auth.check(id)
	if !ok {
		c.srv.authErrors.Add(1)
		c.log.Warn("client failed to authenticate", "user", arg.User, "nkey", arg.NKey, "addr", c.addr())
		c.fail(wire.ErrAuthorization)
		return false
	}
	c.mu.Lock()
	if c.authDue != nil {
		c.authDue.Stop()
	}
	c.mu.Unlock()
	info := *c.info.Load()
	var perms *perms
	switch {
	case user != nil:
		info.User = cmp.Or(user.Name, user.NKey)
		perms = newPerms(user.Permissions)
	case len(arg.Token) == 0:
		info.User = arg.User
	}
	if perms != nil || c.perms.Load() != nil {
		c.perms.Store(perms)
		c.pub.cache.Forget()
	}
	info.Name, info.Lang, info.Version = arg.Name, arg.Lang, arg.Version
	info.Headers = arg.Headers && !c.srv.set.Load().NoHeaders
	c.info.Store(&info)
	c.connected = true
	c.cred.Store(arg)
	c.proved = id.proved
	c.awaiting.Store(false)
	return true
}

func (c *client) identity(arg *connectArg) *identity {
	return &identity{arg: arg, nonce: c.nonce, cert: c.cert.Load(), kind: c.kind}
}
