package broker

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// ask requests a document below $SYS.REQ, and returns it without what is never
// the same twice.
func ask(t *testing.T, nc *nats.Conn, subj, opts string) map[string]any {
	t.Helper()
	m, err := nc.Request("$SYS.REQ."+subj, []byte(opts), patience)
	check(t, err)
	var doc map[string]any
	check(t, json.Unmarshal(m.Data, &doc))
	var clean func(any)
	clean = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for _, k := range []string{"server_id", "now", "port", "start", "last_activity", "rtt", "seq", "time", "id"} {
				delete(v, k)
			}
			for _, e := range v {
				clean(e)
			}
		case []any:
			for _, e := range v {
				clean(e)
			}
		}
	}
	clean(doc)
	return doc
}

// TestSystemRequests holds the answers against those of nats-server.
func TestSystemRequests(t *testing.T) {
	s := run(t, Options{ServerName: "o", Users: []User{
		{Name: "ada", Password: "a", Permissions: &Permissions{
			Publish:   SubjectPermission{Allow: []string{"$SYS.REQ.USER.INFO", "$SYS.REQ.SERVER.>"}},
			Subscribe: SubjectPermission{Deny: []string{"z"}},
			Responses: &ResponsePermission{},
		}},
		{Name: "bob", Password: "b", Permissions: &Permissions{Publish: SubjectPermission{Allow: []string{">"}}}},
		{Name: "eve", Password: "e"},
	}})
	check(t, s.AnswerSystem())
	ada := dial(t, s, nats.UserInfo("ada", "a"), nats.Name("first"), nats.CustomInboxPrefix("_ADA"))
	bob := dial(t, s, nats.UserInfo("bob", "b"))
	eve := dial(t, s, nats.UserInfo("eve", "e"))
	_, err := ada.SubscribeSync("a.b")
	check(t, err)
	_, err = ada.QueueSubscribeSync("c.*", "q")
	check(t, err)
	check(t, ada.Flush())
	const server = `"server":{"name":"o","host":"127.0.0.1","ver":"2.15.2","jetstream":false,"flags":0}`
	conn := func(cid int, user, name, rest string) string {
		if name != "" {
			name = fmt.Sprintf(`,"name":%q`, name)
		}
		return fmt.Sprintf(`{"cid":%d,"kind":"Client","type":"nats","ip":"127.0.0.1","uptime":"0s","idle":"0s","pending_bytes":0`, cid) + name +
			fmt.Sprintf(`,"lang":"go","version":%q%s%s}`, nats.Version, user, rest)
	}
	auth := func(user string) string { return fmt.Sprintf(`,"authorized_user":%q,"name_tag":"$G"`, user) }
	list := func(num, total, offset, limit int, conns ...string) string {
		return fmt.Sprintf(`"data":{"num_connections":%d,"total":%d,"offset":%d,"limit":%d,"connections":[%s]}`, num, total, offset, limit, strings.Join(conns, ","))
	}
	bad := func(code int, text string) string {
		return fmt.Sprintf(`"error":{"code":%d,"description":%q}`, code, text)
	}
	for _, tc := range []struct {
		nc            *nats.Conn
		subject, opts string
		want          string
	}{
		{ada, "USER.INFO", "", `"data":{"user":"ada","account":"$G","account_name":"$G","permissions":{"publish":{"allow":["$SYS.REQ.USER.INFO","$SYS.REQ.SERVER.>"]},"subscribe":{"deny":["z"]},"responses":{"max":1,"ttl":120000000000}}}`},
		{bob, "USER.INFO", "anything", `"data":{"user":"bob","account":"$G","account_name":"$G","permissions":{"publish":{"allow":[">"]},"subscribe":{}}}`},
		{eve, "USER.INFO", "", `"data":{"user":"eve","account":"$G","account_name":"$G"}`},
		{bob, "SERVER.PING.CONNZ", "x", bad(400, "invalid character 'x' looking for beginning of value")},
		{bob, "SERVER.PING.CONNZ", `{"sort":"size"}`, bad(500, "invalid sorting option: size")},
		{bob, "SERVER.PING.CONNZ", `{"sort":"reason"}`, bad(500, "sort by reason only valid on closed connections")},
		{bob, "SERVER.PING.CONNZ", `{"filter_subject":"a..b"}`, bad(500, "invalid filter subject: a..b")},
		{bob, "SERVER.PING.CONNZ", `{"user":"ada"}`, bad(500, "filter by user only valid with auth option")},
		{bob, "SERVER.PING.CONNZ", `{"cid":77}`, list(0, 0, 0, 1)},
		{bob, "SERVER.PING.CONNZ", `{"state":1,"sort":"stop"}`, list(0, 0, 0, 1024)},
		{bob, "SERVER.PING.CONNZ", `{"acc":"other"}`, list(0, 0, 0, 1024)},
		{bob, "SERVER.PING.CONNZ", `{"offset":9,"limit":3}`, list(0, 3, 9, 3)},
		{bob, "ACCOUNT.PING.CONNZ", `{"filter_subject":"c.x","auth":true}`, list(1, 1, 0, 1024, conn(1, auth("ada"), "first", ""))},
		{bob, "SERVER.PING.CONNZ", `{"sort":"subs","limit":1}`, list(1, 3, 0, 1, conn(1, "", "first", ""))},
		{bob, "SERVER.PING.CONNZ", `{"sort":"cid","offset":1,"limit":2}`, list(2, 3, 1, 2, conn(2, "", "", ""), conn(3, "", "", ""))},
		{bob, "SERVER.PING.CONNZ", `{"user":"ada","auth":true,"subscriptions":true}`, list(1, 1, 0, 1024, conn(1, auth("ada"), "first", `,"subscriptions_list":["a.b","c.*","_ADA.*"]`))},
	} {
		var want map[string]any
		check(t, json.Unmarshal([]byte("{"+server+","+tc.want+"}"), &want))
		got := ask(t, tc.nc, tc.subject, tc.opts)
		if data, ok := got["data"].(map[string]any); ok { // counters have a test below
			if conns, ok := data["connections"].([]any); ok {
				for _, c := range conns {
					c := c.(map[string]any)
					for _, k := range []string{"in_msgs", "out_msgs", "in_bytes", "out_bytes", "subscriptions"} {
						delete(c, k)
					}
					c["uptime"], c["idle"] = "0s", "0s"
					if c["pending_bytes"].(float64) > 0 { // an answer may be on its way
						c["pending_bytes"] = 0.0
					}
					if l, ok := c["subscriptions_list"].([]any); ok { // the inbox has a name of its own
						for i, s := range l {
							if strings.HasPrefix(s.(string), "_ADA.") {
								l[i] = "_ADA.*"
							}
						}
					}
				}
			}
		}
		if !reflect.DeepEqual(got, want) {
			a, _ := json.Marshal(got)
			b, _ := json.Marshal(want)
			t.Errorf("%s %s\ngot  %s\nwant %s", tc.subject, tc.opts, a, b)
		}
	}

	detail := ask(t, bob, "SERVER.PING.CONNZ", `{"cid":1,"subscriptions_detail":true}`)["data"].(map[string]any)["connections"].([]any)[0].(map[string]any)
	subs, _ := json.Marshal(detail["subscriptions_list_detail"])
	if want := `{"cid":1,"msgs":0,"qgroup":"q","sid":"2","subject":"c.*"}`; !strings.Contains(string(subs), want) {
		t.Errorf("subscriptions %s lack %s", subs, want)
	}
	if detail["in_msgs"].(float64) < 1 || detail["out_msgs"].(float64) < 1 || detail["subscriptions"].(float64) != 3 {
		t.Errorf("counters %v", detail)
	}
	st := ask(t, eve, "ACCOUNT.PING.STATZ", "")["data"].(map[string]any)["account_statz"].([]any)[0].(map[string]any)
	if st["acc"] != "$G" || st["conns"].(float64) != 3 || st["received"].(map[string]any)["msgs"].(float64) < 10 || st["sent"].(map[string]any)["msgs"].(float64) < 10 {
		t.Errorf("STATZ %v", st)
	}

	// What only nats-server's system account may ask has nobody to answer, and
	// who may not ask is told so.
	if _, err := eve.Request("$SYS.REQ.SERVER.PING.VARZ", nil, patience); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("VARZ: %v", err)
	}
	r := rawDial(t, s)
	r.send(`CONNECT {"verbose":false,"user":"ada","pass":"a"}` + "\r\nPUB $SYS.REQ.ACCOUNT.PING.STATZ r 0\r\n\r\n")
	r.expect("-ERR 'Permissions Violation for Publish to \"$SYS.REQ.ACCOUNT.PING.STATZ\"'\r\n")
}

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 0: "0s", 59999 * time.Millisecond: "59s", time.Minute: "1m0s", 25*time.Hour + 61*time.Second: "1d1h1m1s",
	} {
		if got := span(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}
