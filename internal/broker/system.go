package broker

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"petiole/internal/subject"
)

// What clients of an account may ask nats-server about itself and about them,
// without being in its system account; with the same documents.
const (
	subjUserInfo      = "$SYS.REQ.USER.INFO"
	subjAccountConnz  = "$SYS.REQ.ACCOUNT.PING.CONNZ"
	subjAccountStatz  = "$SYS.REQ.ACCOUNT.PING.STATZ"
	subjServerConnz   = "$SYS.REQ.SERVER.PING.CONNZ"
	connzDefaultLimit = 1024
)

// AnswerSystem answers the requests below $SYS.REQ that nats-server answers
// every client: USER.INFO, ACCOUNT.PING.CONNZ and STATZ, SERVER.PING.CONNZ.
// Others have no responders, as there for whoever is not in the system account.
func (s *Server) AnswerSystem() error {
	sys := &system{srv: s}
	for subj, answer := range map[string]func(*Msg) (any, *systemError){
		subjUserInfo:     sys.userInfo,
		subjAccountConnz: sys.connz,
		subjServerConnz:  sys.connz,
		subjAccountStatz: sys.statz,
	} {
		if _, err := s.acc.Handle(subj, func(m *Msg) { sys.respond(m, answer) }); err != nil {
			return err
		}
	}
	return nil
}

// system answers requests about the server.
type system struct {
	srv *Server
	seq atomic.Uint64 // counts answers
}

// systemError is how a request that cannot be served is answered.
type systemError struct {
	Code        int    `json:"code"` // as in HTTP
	Description string `json:"description,omitempty"`
}

// systemServer introduces the server in an answer.
type systemServer struct {
	Name      string    `json:"name"`
	Host      string    `json:"host"`
	ID        string    `json:"id"`
	Version   string    `json:"ver"`
	JetStream bool      `json:"jetstream"`
	Flags     int       `json:"flags"` // 1: JetStream
	Seq       uint64    `json:"seq"`
	Time      time.Time `json:"time"`
}

// respond sends what answer says to whoever asks, if an answer is wanted.
func (sys *system) respond(m *Msg, answer func(*Msg) (any, *systemError)) {
	if len(m.Reply) == 0 || m.Client == nil {
		return
	}
	set := sys.srv.set.Load()
	doc := struct {
		Server systemServer `json:"server"`
		Data   any          `json:"data,omitempty"`
		Error  *systemError `json:"error,omitempty"`
	}{Server: systemServer{
		Name: sys.srv.Name(), Host: set.Host, ID: sys.srv.id, Version: set.Version, JetStream: set.JetStream, Seq: sys.seq.Add(1),
	}}
	if set.JetStream {
		doc.Server.Flags = 1
	}
	doc.Data, doc.Error = answer(m)
	doc.Server.Time = time.Now().UTC()
	text, err := json.Marshal(&doc)
	if err != nil {
		sys.srv.log.Error("request not answered", "subject", string(m.Subject), "err", err)
		return
	}
	sys.srv.acc.PublishBytes(m.Reply, nil, nil, text)
}

// options reads the options of a request, which may be empty.
func options(m *Msg, to any) *systemError {
	if len(bytes.TrimSpace(m.Data)) == 0 {
		return nil
	}
	if err := json.Unmarshal(m.Data, to); err != nil {
		return &systemError{Code: http.StatusBadRequest, Description: err.Error()}
	}
	return nil
}

type systemPermissions struct {
	Publish   systemSubjects `json:"publish"`
	Subscribe systemSubjects `json:"subscribe"`
	Responses *struct {
		Max int           `json:"max"`
		TTL time.Duration `json:"ttl"` // ns
	} `json:"responses,omitempty"`
}

type systemSubjects struct {
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
}

// userInfo tells a client whom it counts as.
func (sys *system) userInfo(m *Msg) (any, *systemError) {
	doc := struct {
		User        string             `json:"user"`
		Account     string             `json:"account"`
		AccountName string             `json:"account_name,omitempty"`
		Permissions *systemPermissions `json:"permissions,omitempty"`
	}{User: m.Client.User, Account: sys.srv.acc.name, AccountName: sys.srv.acc.name}
	if p := m.Client.c.perms.Load(); p != nil {
		doc.Permissions = &systemPermissions{Publish: systemSubjects(p.pub), Subscribe: systemSubjects(p.sub)}
		if r := p.responses; r != nil {
			doc.Permissions.Responses = &struct {
				Max int           `json:"max"`
				TTL time.Duration `json:"ttl"`
			}{cmp.Or(r.Max, 1), cmp.Or(r.Expires, 2*time.Minute)}
		}
	}
	return doc, nil
}

// statz gives the account's counters, which are this server's: it has but one
// account, the asking client's, and that is not left out whatever accounts the
// request names, as with nats-server.
func (sys *system) statz(m *Msg) (any, *systemError) {
	var opts struct {
		Accounts []string `json:"accounts"`
	}
	if err := options(m, &opts); err != nil {
		return nil, err
	}
	type count struct {
		Msgs  uint64 `json:"msgs"`
		Bytes uint64 `json:"bytes"`
	}
	type account struct {
		Account       string `json:"acc"`
		Name          string `json:"name"`
		Conns         int    `json:"conns"`
		Leafnodes     int    `json:"leafnodes"`
		TotalConns    int    `json:"total_conns"`
		Subscriptions int    `json:"num_subscriptions"`
		Sent          count  `json:"sent"`
		Received      count  `json:"received"`
		Slow          uint64 `json:"slow_consumers"`
	}
	st := sys.srv.Stats()
	name := sys.srv.acc.name
	return struct {
		ID       string    `json:"server_id"`
		Now      time.Time `json:"now"`
		Accounts []account `json:"account_statz"`
	}{sys.srv.id, time.Now().UTC(), []account{{
		Account: name, Name: name, Conns: st.Connections, TotalConns: st.Connections, Subscriptions: st.Subscriptions,
		Sent: count{st.OutMsgs, st.OutBytes}, Received: count{st.InMsgs, st.InBytes}, Slow: st.SlowConsumers,
	}}}, nil
}

// connzOptions are those of nats-server's CONNZ.
type connzOptions struct {
	Sort                string `json:"sort"`
	Auth                bool   `json:"auth"`
	Subscriptions       bool   `json:"subscriptions"`
	SubscriptionsDetail bool   `json:"subscriptions_detail"`
	Offset              int    `json:"offset"`
	Limit               int    `json:"limit"`
	CID                 uint64 `json:"cid"`
	MQTTClient          string `json:"mqtt_client"`
	State               int    `json:"state"` // 0: open, 1: closed, 2: all
	User                string `json:"user"`
	Account             string `json:"acc"`
	FilterSubject       string `json:"filter_subject"`
}

// connzConn is one connection in CONNZ.
type connzConn struct {
	CID          uint64     `json:"cid"`
	Kind         string     `json:"kind"`
	Type         string     `json:"type"`
	IP           string     `json:"ip"`
	Port         int        `json:"port"`
	Start        time.Time  `json:"start"`
	LastActivity time.Time  `json:"last_activity"`
	RTT          string     `json:"rtt,omitempty"`
	Uptime       string     `json:"uptime"`
	Idle         string     `json:"idle"`
	Pending      int64      `json:"pending_bytes"`
	InMsgs       uint64     `json:"in_msgs"`
	OutMsgs      uint64     `json:"out_msgs"`
	InBytes      uint64     `json:"in_bytes"`
	OutBytes     uint64     `json:"out_bytes"`
	NumSubs      int        `json:"subscriptions"`
	Name         string     `json:"name,omitempty"`
	Lang         string     `json:"lang,omitempty"`
	Version      string     `json:"version,omitempty"`
	TLSVersion   string     `json:"tls_version,omitempty"`
	TLSCipher    string     `json:"tls_cipher_suite,omitempty"`
	User         string     `json:"authorized_user,omitempty"`
	Account      string     `json:"name_tag,omitempty"`
	Subs         []string   `json:"subscriptions_list,omitempty"`
	SubsDetail   []connzSub `json:"subscriptions_list_detail,omitempty"`
}

// connzSub is one subscription in CONNZ.
type connzSub struct {
	Subject string `json:"subject"`
	Queue   string `json:"qgroup,omitempty"`
	SID     string `json:"sid"`
	Msgs    int    `json:"msgs"`
	Max     int    `json:"max,omitempty"`
	CID     uint64 `json:"cid"`
}

// connzOrder holds the ways to sort; all but "cid" and "start" are descending.
var connzOrder = map[string]func(a, b *ConnInfo) int{
	"cid":        func(a, b *ConnInfo) int { return cmp.Compare(a.ID, b.ID) },
	"start":      func(a, b *ConnInfo) int { return cmp.Compare(a.ID, b.ID) },
	"subs":       func(a, b *ConnInfo) int { return cmp.Compare(b.Subscriptions, a.Subscriptions) },
	"pending":    func(a, b *ConnInfo) int { return cmp.Compare(b.Pending, a.Pending) },
	"msgs_to":    func(a, b *ConnInfo) int { return cmp.Compare(b.OutMsgs, a.OutMsgs) },
	"msgs_from":  func(a, b *ConnInfo) int { return cmp.Compare(b.InMsgs, a.InMsgs) },
	"bytes_to":   func(a, b *ConnInfo) int { return cmp.Compare(b.OutBytes, a.OutBytes) },
	"bytes_from": func(a, b *ConnInfo) int { return cmp.Compare(b.InBytes, a.InBytes) },
	"last":       func(a, b *ConnInfo) int { return b.LastActivity.Compare(a.LastActivity) },
	"idle":       func(a, b *ConnInfo) int { return a.LastActivity.Compare(b.LastActivity) },
	"uptime":     func(a, b *ConnInfo) int { return a.Start.Compare(b.Start) },
	"rtt":        func(a, b *ConnInfo) int { return cmp.Compare(b.RTT, a.RTT) },
}

// check says what is wrong with the options.
func (o *connzOptions) check() *systemError {
	bad := func(format string, args ...any) *systemError {
		return &systemError{Code: http.StatusInternalServerError, Description: fmt.Sprintf(format, args...)}
	}
	o.Sort = cmp.Or(o.Sort, "cid")
	switch closed := o.State != 0; {
	case o.Sort == "stop" && !closed, o.Sort == "reason" && !closed:
		return bad("sort by %s only valid on closed connections", o.Sort)
	case o.Sort != "stop" && o.Sort != "reason" && connzOrder[o.Sort] == nil:
		return bad("invalid sorting option: %s", o.Sort)
	case o.User != "" && !o.Auth:
		return bad("filter by user only valid with auth option")
	case o.FilterSubject != "" && !subject.Valid(o.FilterSubject):
		return bad("invalid filter subject: %s", o.FilterSubject)
	}
	o.Offset = max(o.Offset, 0)
	if o.Limit <= 0 {
		o.Limit = connzDefaultLimit
	}
	if o.CID > 0 {
		o.Limit = 1
	}
	return nil
}

// connz lists connections. Of those that are closed none is remembered.
func (sys *system) connz(m *Msg) (any, *systemError) {
	var o connzOptions
	if err := options(m, &o); err != nil {
		return nil, err
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	var conns []ConnInfo
	if o.State != 1 && o.MQTTClient == "" {
		conns = slices.DeleteFunc(sys.srv.Conns(), func(c ConnInfo) bool {
			return o.CID > 0 && c.ID != o.CID || o.User != "" && c.User != o.User ||
				o.Account != "" && sys.srv.acc.name != o.Account ||
				o.FilterSubject != "" && !slices.ContainsFunc(c.c.subscriptions(), func(s connzSub) bool { return subject.Subset(o.FilterSubject, s.Subject) })
		})
	}
	if order := connzOrder[o.Sort]; order != nil {
		slices.SortStableFunc(conns, func(a, b ConnInfo) int { return order(&a, &b) })
	}
	now := time.Now()
	doc := struct {
		ID     string      `json:"server_id"`
		Now    time.Time   `json:"now"`
		Num    int         `json:"num_connections"`
		Total  int         `json:"total"`
		Offset int         `json:"offset"`
		Limit  int         `json:"limit"`
		Conns  []connzConn `json:"connections"`
	}{ID: sys.srv.id, Now: now.UTC(), Total: len(conns), Offset: o.Offset, Limit: o.Limit, Conns: []connzConn{}}
	conns = conns[min(o.Offset, len(conns)):]
	for _, c := range conns[:min(o.Limit, len(conns))] {
		doc.Conns = append(doc.Conns, sys.conn(c, &o, now))
	}
	doc.Num = len(doc.Conns)
	return doc, nil
}

// conn describes one connection.
func (sys *system) conn(c ConnInfo, o *connzOptions, now time.Time) connzConn {
	doc := connzConn{
		CID: c.ID, Kind: "Client", Type: "nats", IP: c.IP, Port: c.Port, Start: c.Start.UTC(), LastActivity: c.LastActivity.UTC(),
		Uptime: span(now.Sub(c.Start)), Idle: span(now.Sub(c.LastActivity)), Pending: c.Pending,
		InMsgs: c.InMsgs, OutMsgs: c.OutMsgs, InBytes: c.InBytes, OutBytes: c.OutBytes, NumSubs: c.Subscriptions,
		Name: c.Name, Lang: c.Lang, Version: c.Version, TLSVersion: c.TLSVersion, TLSCipher: c.TLSCipher,
	}
	if c.RTT > 0 {
		doc.RTT = c.RTT.String()
	}
	if o.Auth {
		doc.User, doc.Account = c.User, sys.srv.acc.name
	}
	switch {
	case o.SubscriptionsDetail:
		doc.SubsDetail = c.c.subscriptions()
	case o.Subscriptions:
		for _, s := range c.c.subscriptions() {
			doc.Subs = append(doc.Subs, s.Subject)
		}
	}
	return doc
}

// subscriptions lists what the client is subscribed to, by id.
func (c *client) subscriptions() []connzSub {
	cid := c.info.Load().ID
	c.mu.Lock()
	list := make([]connzSub, 0, len(c.subs))
	subs := make([]*subscription, 0, len(c.subs))
	for _, s := range c.subs {
		subs = append(subs, s)
	}
	c.mu.Unlock()
	c.out.mu.Lock()
	for _, s := range subs {
		list = append(list, connzSub{Subject: s.subject, Queue: s.queue, SID: string(s.sid), Msgs: s.delivered, Max: s.max, CID: cid})
	}
	c.out.mu.Unlock()
	slices.SortFunc(list, func(a, b connzSub) int {
		return cmp.Or(cmp.Compare(len(a.SID), len(b.SID)), strings.Compare(a.SID, b.SID))
	})
	return list
}

// span writes a duration in whole seconds as nats-server does: "1d2h3m4s".
func span(d time.Duration) string {
	s := int64(max(d, 0) / time.Second)
	parts := []struct {
		n    int64
		unit string
	}{{s / 86400, "d"}, {s / 3600 % 24, "h"}, {s / 60 % 60, "m"}, {s % 60, "s"}}
	for len(parts) > 1 && parts[0].n == 0 {
		parts = parts[1:]
	}
	var b strings.Builder
	for _, p := range parts {
		fmt.Fprintf(&b, "%d%s", p.n, p.unit)
	}
	return b.String()
}
