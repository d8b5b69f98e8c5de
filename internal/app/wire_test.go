//go:build !windows

package app

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nkeys"

	"petiole/internal/broker"
	"petiole/internal/config"
)

// oracle makes [TestOnTheWire], [TestLines] and [TestRefusals] talk to a
// nats-server and write down what that says, instead of comparing what Petiole
// says with it.
var oracle = flag.String("oracle", "", "nats-server `program` to record testdata/*.txt from")

// wireHash is a bcrypt hash of "hashed".
const wireHash = "$2a$04$5WzYbj39.qEipeYrG/jotObiNFtWZhu9PFZRjBXXe7v2DTjJoSyYy"

// dialogue is what clients say to a server. A step is "N text": text is what
// client N sends, with LF for CRLF; the server's answer is read up to the PONG
// for a PING that is sent behind it.
type dialogue struct {
	name, conf string
	steps      []string
	// ours is what Petiole answers where it does not do as nats-server; the
	// reason is beside the dialogue.
	ours string
	// info has what INFO says compared too.
	info bool
}

// steady is the document of INFO without what is another one each time, and
// what only servers look at.
func steady(t *testing.T, line string) string {
	var doc map[string]any
	if err := json.Unmarshal([]byte(strings.TrimPrefix(line, "INFO ")), &doc); err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"server_id", "git_commit", "go", "xkey"} {
		delete(doc, k)
	}
	if doc["host"] == "127.0.0.1" {
		delete(doc, "port")
	}
	if doc["nonce"] != nil {
		doc["nonce"] = len(doc["nonce"].(string))
	}
	delete(doc, "client_id")     // counted from another number
	text, _ := json.Marshal(doc) // can not fail: it was JSON
	return string(text)
}

// says is the answer to a first step that ends the connection.
func says(text string) string { return "1\n\t\"-ERR '" + text + "'\\r\\n\"\n\tclosed\n" }

const (
	quiet   = `CONNECT {"verbose":false}`
	asAda   = `CONNECT {"verbose":false,"user":"ada","pass":"a"}`
	asBob   = `CONNECT {"verbose":false,"user":"bob","pass":"b"}`
	twoUser = "authorization { users: [ { user: ada, password: a }, { user: bob, password: b } ] }"
)

// adaMay is a configuration in which ada has permissions, and bob all.
func adaMay(permissions string) string {
	return "authorization { users: [ { user: ada, password: a, permissions { " + permissions + " } }, { user: bob, password: b } ] }"
}

// nats-server does not say why it closes a connection whose arguments it cannot
// parse.
var dialogues = []dialogue{
	{name: "nobody has to log in", conf: "", steps: []string{"1 PUB a 1\nx\n", "1 SUB a 1\nPUB a 1\nx\n", "2 " + asAda + "\nSUB a 1\nPUB a 0\n\n"}},
	{name: "INFO", info: true, conf: "server_name: s\nmax_payload: 77\nno_header_support: true\n" + twoUser, steps: []string{
		`1 CONNECT {"verbose":false,"protocol":1,"user":"ada","pass":"a"}` + "\n", "1 ", "1 ",
		`2 CONNECT {"verbose":false,"protocol":0,"user":"ada","pass":"a"}` + "\n", "2 ", `2 CONNECT {"protocol":1}` + "\n", "2 ",
		"3 PING\n",
	}},
	{name: "INFO where nobody has to log in", info: true, conf: "server_name: s", steps: []string{"1 ", `1 CONNECT {"protocol":1}` + "\n", "1 "}},
	{name: "INFO with no_auth_user", info: true, conf: "server_name: s\nno_auth_user: ada\n" + twoUser, steps: []string{"1 ", `2 CONNECT {"protocol":1}` + "\n", "2 "}},
	{name: "INFO with an nkey", info: true, conf: "server_name: s\nauthorization { users: [ { nkey: NKEY } ] }", steps: []string{
		`1 CONNECT {"verbose":false,"protocol":1,"nkey":"NKEY","sig":"SIGNATURE"}` + "\n", "1 ",
	}},
	{name: "INFO with a token", info: true, conf: "server_name: s\nauthorization { token: t }", steps: []string{`1 CONNECT {"auth_token":"t"}` + "\n"}},
	// Clients use connect_urls to find their way back; host and port they do
	// not look at. nats-server lists itself in a cluster only.
	{name: "INFO with client_advertise", info: true, conf: "server_name: s\nclient_advertise: \"h:7\"", steps: []string{"1 "}},
	{name: "verbose", conf: "", steps: []string{"1 CONNECT {}\nSUB a 1\nPUB a 1\nx\nUNSUB 1\nUNSUB 7\n"}},
	{name: "pedantic", conf: "", steps: []string{
		`1 CONNECT {"verbose":false,"pedantic":true}` + "\nPUB a.* 0\n\nPUB a..b 0\n\nSUB a..b 1\nSUB a.> 2\nPUB a.b 0\n\n",
		"2 " + quiet + "\nPUB a.* 0\n\nSUB a..b 1\nSUB >.a 2\nSUB a* 3\n",
	}},
	{name: "pedantic and not permitted", conf: adaMay("publish: a"), steps: []string{"1 " + asAda + "\nPUB b.* 0\n\nPUB b 0\n\n"}},
	// nats-server passes messages on or drops them in silence.
	{name: "subjects that are none, of a client that is not pedantic", conf: "", steps: []string{
		`1 CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}` + "\nSUB r 1\nPUB a.* 0\n\nPUB a..b r 0\n\nPUB .a s 0\n\n",
	}, ours: "1\n\t\"-ERR 'Invalid Publish Subject'\\r\\n\"\n\t\"HMSG r 1 36 36\\r\\n\"\n\t\"NATS/1.0 503\\r\\n\"\n\t\"Nats-Subject: a..b\\r\\n\"\n\t\"\\r\\n\"\n\t\"\\r\\n\"\n\t\"-ERR 'Invalid Publish Subject'\\r\\n\"\n\t\"PONG\\r\\n\"\n"},
	{name: "user and password", conf: "authorization { user: ada, password: a }", steps: []string{
		"1 " + asAda + "\n", "2 " + asBob + "\n", `3 CONNECT {"verbose":false,"user":"ada","pass":"x"}` + "\n",
		"4 " + quiet + "\n", "5 PUB a 1\nx\n", "6 SUB a 1\n", "7 ", `8 CONNECT {"user":"ada"}` + "\n", `9 CONNECT {"auth_token":"a"}` + "\n",
	}},
	{name: "token", conf: "authorization { token: tok }", steps: []string{
		`1 CONNECT {"verbose":false,"auth_token":"tok"}` + "\n", `2 CONNECT {"auth_token":"x"}` + "\n",
		`3 CONNECT {"user":"tok"}` + "\n", "4 " + quiet + "\n",
	}},
	{name: "hashed secrets", conf: `authorization { users: [ { user: ada, password: "` + wireHash + `" } ] }`, steps: []string{
		`1 CONNECT {"verbose":false,"user":"ada","pass":"hashed"}` + "\n", `2 CONNECT {"user":"ada","pass":"x"}` + "\n",
		`3 CONNECT {"user":"ada","pass":"` + wireHash + `"}` + "\n",
	}},
	{name: "hashed token", conf: `authorization { token: "` + wireHash + `" }`, steps: []string{
		`1 CONNECT {"verbose":false,"auth_token":"hashed"}` + "\n", `2 CONNECT {"auth_token":"x"}` + "\n",
	}},
	{name: "nkey", conf: "authorization { users: [ { nkey: NKEY } ] }", steps: []string{
		`1 CONNECT {"verbose":false,"nkey":"NKEY","sig":"SIGNATURE"}` + "\n", `2 CONNECT {"nkey":"NKEY","sig":"AAAA"}` + "\n",
		`3 CONNECT {"nkey":"NKEY"}` + "\n", "4 " + quiet + "\n", `5 CONNECT {"nkey":"UA","sig":"SIGNATURE"}` + "\n",
	}},
	{name: "no_auth_user", conf: "no_auth_user: guest\nauthorization { users: [ { user: guest, password: g, permissions { publish: open } }, { user: ada, password: a } ] }", steps: []string{
		"1 " + quiet + "\nPUB open 0\n\nPUB closed 0\n\n", "2 PUB open 0\n\nPUB closed 0\n\n", "3 " + asAda + "\nPUB closed 0\n\n",
		`4 CONNECT {"user":"ada","pass":"x"}` + "\n", `5 CONNECT {"auth_token":"x"}` + "\n", `6 CONNECT {"pass":"x"}` + "\n",
	}},
	{name: "no_auth_user with an nkey", conf: "no_auth_user: NKEY\nauthorization { users: [ { nkey: NKEY, permissions { publish: open } }, { user: ada, password: a } ] }", steps: []string{
		"1 " + quiet + "\nPUB open 0\n\nPUB closed 0\n\n", "2 " + asAda + "\nPUB closed 0\n\n", `3 CONNECT {"nkey":"NKEY"}` + "\n",
	}},
	{name: "kinds of connections", conf: "authorization { users: [ { user: ada, password: a, allowed_connection_types: [ standard ] }, { user: bob, password: b, allowed_connection_types: WEBSOCKET } ] }", steps: []string{
		"1 " + asAda + "\n", "2 " + asBob + "\n",
	}},
	{name: "twice", conf: twoUser, steps: []string{"1 " + asAda + "\n", "1 " + asBob + "\n"}},
	{name: "publishing", conf: adaMay(`publish { allow: ["p.*", "q.>"], deny: ["p.secret", "q.x.>"] }`), steps: []string{
		"2 " + asBob + "\nSUB > 1\n",
		"1 " + asAda + "\nPUB p.a 0\n\nPUB p.secret 0\n\nPUB p.a.b 0\n\nPUB q.a.b 0\n\nPUB q.x.b 0\n\nPUB other 1\nx\nPUB p.* 0\n\n",
		`1 CONNECT {"verbose":true,"user":"ada","pass":"a"}` + "\nPUB p.a 0\n\nPUB other 0\n\n",
		"2 ",
	}},
	{name: "only denied to publish", conf: adaMay(`publish { deny: "p.>" }`), steps: []string{"1 " + asAda + "\nPUB p.a 0\n\nPUB q 0\n\n"}},
	// nats-server lets "s.*" permit "s.>", which matches more, and refuses the
	// whole of "t.x.>" because of "t.x.*"; here the part that is denied is kept
	// back.
	{name: "subscribing", conf: adaMay(`subscribe { allow: ["s.*", "t.>", "_INBOX.>"], deny: ["s.secret", "t.x.*"] }`), steps: []string{
		"1 " + asAda + "\nSUB s.a 1\nSUB s.* 2\nSUB s.secret 3\nSUB s.> 4\nSUB t.> 5\nSUB t.x.y 6\nSUB t.x.> 7\nSUB _INBOX.a.b 8\nSUB > 9\nSUB s.a q 10\nSUB u q 11\n",
		"2 " + asBob + "\nPUB s.secret 1\nx\nPUB s.b 1\ny\nPUB t.x.y 1\nx\nPUB t.y 1\ny\nPUB t.x 1\nz\n",
		"1 ",
	}, ours: `1
	"-ERR 'Permissions Violation for Subscription to \"s.secret\"'\r\n"
	"-ERR 'Permissions Violation for Subscription to \"s.>\"'\r\n"
	"-ERR 'Permissions Violation for Subscription to \"t.x.y\"'\r\n"
	"-ERR 'Permissions Violation for Subscription to \">\"'\r\n"
	"-ERR 'Permissions Violation for Subscription to \"u\" using queue \"q\"'\r\n"
	"PONG\r\n"
2
	"PONG\r\n"
1
	"MSG s.b 2 1\r\n"
	"y\r\n"
	"MSG t.y 5 1\r\n"
	"y\r\n"
	"MSG t.x 5 1\r\n"
	"z\r\n"
	"PONG\r\n"
`},
	{name: "queue groups", conf: adaMay(`subscribe { allow: ["a q1", "b *.dev", "c"], deny: ["c bad", "c >"] }`), steps: []string{
		"1 " + asAda + "\nSUB a 1\nSUB a q1 2\nSUB a q2 3\nSUB b x.dev 4\nSUB b x.prod 5\nSUB c 6\nSUB c good 7\nSUB c bad 8\n",
	}},
	{name: "queue groups and subscriptions without", conf: adaMay(`subscribe { allow: ["a", "> q", "b.> q*", "c", "c q.*"], deny: "c q.x" }`), steps: []string{
		"1 " + asAda + "\nSUB a 1\nSUB a q 2\nSUB a other 3\nSUB b.c q 4\nSUB b.c q* 5\nSUB b.c qq 6\nSUB c 7\nSUB c q.y 8\nSUB c q.x 9\nSUB c other 10\nSUB b.c 11\n",
	}},
	{name: "queue groups denied", conf: adaMay(`subscribe { deny: ["c bad", "d x.*"] }`), steps: []string{
		"1 " + asAda + "\nSUB c 6\nSUB c good 7\nSUB c bad 8\nSUB d x.y 9\nSUB d x 10\n",
	}},
	{name: "responses", conf: adaMay("subscribe: svc, allow_responses: true"), steps: []string{
		"1 " + asAda + "\nSUB svc 1\n", "2 " + asBob + "\nSUB r.* 9\nPUB svc r.1 2\nhi\n",
		"1 PUB r.1 2\nho\nPUB r.1 2\nho\nPUB r.2 1\nx\n", "2 PUB svc 0\n\n", "1 PUB svc 0\n\n", "2 ",
	}},
	{name: "more responses", conf: adaMay("subscribe: svc, publish { allow: [ log ], deny: [ r.3 ] }, allow_responses { max: 2, expires: \"1m\" }"), steps: []string{
		"1 " + asAda + "\nSUB svc 1\n", "2 " + asBob + "\nSUB r.* 9\nPUB svc r.1 0\n\nPUB svc r.3 0\n\n",
		"1 PUB r.1 1\na\nPUB r.1 1\nb\nPUB r.1 1\nc\nPUB r.3 1\nd\nPUB log 1\ne\n", "2 ",
	}},
	{name: "responses unlimited", conf: adaMay("subscribe: svc, allow_responses { max: -1, expires: \"1m\" }"), steps: []string{
		"1 " + asAda + "\nSUB svc 1\n", "2 " + asBob + "\nSUB r.* 9\nPUB svc r.1 0\n\n", "1 PUB r.1 1\na\nPUB r.1 1\nb\nPUB r.1 1\nc\n", "2 ",
	}},
	{name: "default permissions", conf: "authorization { default_permissions { publish: d }, users: [ { user: ada, password: a }, { user: bob, password: b, permissions { publish: e } } ] }", steps: []string{
		"1 " + asAda + "\nPUB d 0\n\nPUB e 0\n\n", "2 " + asBob + "\nPUB d 0\n\nPUB e 0\n\n",
	}},
	{name: "nothing permitted", conf: adaMay(`publish { deny: ">" }, subscribe { deny: ">" }`), steps: []string{"1 " + asAda + "\nPUB a 0\n\nSUB a 1\nSUB > 2\n"}},
	{name: "authentication timeout", conf: "authorization { user: ada, password: a, timeout: 0.2 }", steps: []string{"1"}},
	{name: "max_connections", conf: "max_connections: 1", steps: []string{"1 " + quiet + "\n", "2 " + quiet + "\n", "1 "}},
	{name: "no connections", conf: "max_connections: 0", steps: []string{"1 " + quiet + "\n"}},
	{name: "max_subscriptions", conf: "max_subscriptions: 2", steps: []string{
		"1 " + quiet + "\nSUB a 1\nSUB b 2\nSUB c 3\nUNSUB 1\nSUB d 4\nSUB e 5\nPUB c 0\n\nPUB d 0\n\n",
	}},
	{name: "max_sub_tokens", conf: "max_sub_tokens: 2", steps: []string{
		"1 " + quiet + "\nSUB a.b 1\nSUB a.b.c 2\nSUB a.> 3\nSUB a.*.> q 4\nPUB a.b.c.d 1\nx\n",
	}},
	{name: "max_sub_tokens and permissions", conf: "max_sub_tokens: 2\n" + adaMay(`subscribe: "a.>"`), steps: []string{
		"1 " + asAda + "\nSUB b.b.b 1\nSUB a.b.c 2\nSUB a.b 3\n",
	}},
	{name: "no_header_support", conf: "no_header_support: true", steps: []string{
		`1 CONNECT {"verbose":false,"headers":true}` + "\nSUB a 1\nPUB a 1\nx\n", `1 HPUB a 12 13` + "\nNATS/1.0\n\ny\n",
	}, ours: "1\n\t\"MSG a 1 1\\r\\n\"\n\t\"x\\r\\n\"\n\t\"PONG\\r\\n\"\n" + says("message headers not supported")},
	{name: "no_header_support and no responders", conf: "no_header_support: true", steps: []string{
		`1 CONNECT {"verbose":false,"headers":true,"no_responders":true}` + "\n",
	}},
	{name: "no_fast_producer_stall", conf: "no_fast_producer_stall: true", steps: []string{"1 " + quiet + "\nSUB a 1\nPUB a 1\nx\n"}},
	{name: "proxy_protocol without a proxy", conf: "proxy_protocol: true", steps: []string{"1 " + quiet + "\nSUB a 1\nPUB a 1\nx\n", "2 PING\n"}},
	{name: "proxy_protocol for IPv4", conf: "proxy_protocol: true", steps: []string{"1 PROXY TCP4 192.0.2.1 192.0.2.2 5 6\n" + quiet + "\n"}},
	{name: "proxy_protocol for IPv6", conf: "proxy_protocol: true", steps: []string{"1 PROXY TCP6 2001:db8::1 ::ffff:192.0.2.1 5 6\n"}},
	{name: "proxy_protocol of a proxy itself", conf: "proxy_protocol: true", steps: []string{"1 PROXY UNKNOWN ffff::1 ffff::1 1 1\n" + quiet + "\n", "2 PROXY UNKNOWN\n"}},
	{name: "proxy_protocol with errors", conf: "proxy_protocol: true", steps: []string{
		"1 PROXY TCP4 192.0.2.1 192.0.2.2 5\n", "2 PROXY TCP4 ::1 ::1 5 6\n", "3 PROXY TCP6 192.0.2.1 192.0.2.2 5 6\n",
		"4 PROXY TCP4 192.0.2.1 192.0.2.2 5 65536\n", "5 PROXY UDP4 192.0.2.1 192.0.2.2 5 6\n", "6 PROXY TCP4 x y 5 6\n",
		"7 PROXY TCP4 192.0.2.1 192.0.2.2 5 6" + strings.Repeat(" ", 100) + "\n", "8 PROXY\n",
	}},
	{name: "proxy_protocol not permitted", conf: "", steps: []string{"1 PROXY TCP4 192.0.2.1 192.0.2.2 5 6\n"}},
	{name: "max_payload", conf: "max_payload: 8", steps: []string{"1 " + quiet + "\nSUB a 1\nPUB a 8\n12345678\n", "1 PUB a 9\n123456789\n"}},
	{name: "max_payload of a lie", conf: "max_payload: 8", steps: []string{"1 " + quiet + "\nPUB a 99999999999999999999\n"}, ours: says("Maximum Payload Violation")},
	{name: "length too short", conf: "", steps: []string{"1 " + quiet + "\nPUB a 2\nabc\n"}},
	{name: "length negative", conf: "", steps: []string{"1 " + quiet + "\nPUB a -1\n"}, ours: says("Parser Error")},
	{name: "length no number", conf: "", steps: []string{"1 " + quiet + "\nPUB a x\n"}, ours: says("Parser Error")},
	{name: "length missing", conf: "", steps: []string{"1 " + quiet + "\nPUB a\n"}, ours: says("Parser Error")},
	{name: "header longer than all", conf: "", steps: []string{`1 CONNECT {"verbose":false,"headers":true}` + "\nHPUB a 9 2\nxx\n"}, ours: says("Parser Error")},
	{name: "headers not announced", conf: "", steps: []string{"1 " + quiet + "\nHPUB a 12 12\nNATS/1.0\n\n\n"}, ours: says("message headers not supported")},
	{name: "max_control_line", conf: "max_control_line: 64", steps: []string{"1 " + quiet + "\nSUB " + strings.Repeat("a", 100) + " 1\n"}},
	{name: "unknown operation", conf: "", steps: []string{"1 FOO\n"}},
	{name: "GET / HTTP/1.1", conf: "", steps: []string{"1 GET / HTTP/1.1\n\n"}},
	{name: "lower case", conf: "", steps: []string{"1 connect {\"verbose\":false}\nsub a 1\npub a 1\nx\nunsub 1\nping\n"}},
	{name: "subscription without id", conf: "", steps: []string{"1 " + quiet + "\nSUB a\n"}, ours: says("Parser Error")},
	{name: "too many arguments", conf: "", steps: []string{"1 " + quiet + "\nSUB a b c d\n"}, ours: says("Parser Error")},
	{name: "CONNECT without a document", conf: "", steps: []string{"1 CONNECT\n"}, ours: says("Parser Error")},
	{name: "CONNECT with a broken document", conf: "", steps: []string{"1 CONNECT {\"verbose\":fa\n"}, ours: says("Parser Error")},
	{name: "protocol unknown", conf: "", steps: []string{`1 CONNECT {"verbose":false,"protocol":9}` + "\n"}},
	{name: "no responders without headers", conf: "", steps: []string{`1 CONNECT {"verbose":false,"no_responders":true}` + "\n"}},
	{name: "no responders", conf: "", steps: []string{`1 CONNECT {"verbose":false,"headers":true,"no_responders":true}` + "\nSUB r 1\nPUB nobody r 0\n\n"}},
	{name: "no echo", conf: "", steps: []string{`1 CONNECT {"verbose":false,"echo":false}` + "\nSUB a 1\nPUB a 0\n\n"}},
	{name: "unsubscribe after", conf: "", steps: []string{"1 " + quiet + "\nSUB a 1\nUNSUB 1 2\nPUB a 0\n\nPUB a 0\n\nPUB a 0\n\n"}},
	{name: "no responders for a queue group", conf: "", steps: []string{`1 CONNECT {"verbose":false,"headers":true,"no_responders":true}` + "\nSUB r q 1\nPUB nobody r 0\n\n"}},
	// What a client hears of the server does not count as one of the messages
	// that it waits for with nats-server, which keeps the subscription of a
	// request that nobody answered.
	{name: "no responders and unsubscribe after", conf: "", steps: []string{
		`1 CONNECT {"verbose":false,"headers":true,"no_responders":true}` + "\nSUB r 1\nUNSUB 1 1\nPUB nobody r 0\n\nPUB nobody r 0\n\n",
	}, ours: "1\n\t\"HMSG r 1 38 38\\r\\n\"\n\t\"NATS/1.0 503\\r\\n\"\n\t\"Nats-Subject: nobody\\r\\n\"\n\t\"\\r\\n\"\n\t\"\\r\\n\"\n\t\"PONG\\r\\n\"\n"},
	{name: "no responders but an echo kept back", conf: "", steps: []string{
		`1 CONNECT {"verbose":false,"headers":true,"no_responders":true,"echo":false}` + "\nSUB r 1\nSUB n 2\nSUB m q 3\nPUB n r 0\n\nPUB m r 0\n\n",
	}},
	{name: "CONNECT again", conf: "", steps: []string{
		`1 CONNECT {"verbose":false,"headers":true,"echo":false}` + "\nSUB a 1\n", "1 CONNECT {\"echo\":true}\nPUB a 0\n\nSUB b 2\nHPUB b 12 13\nNATS/1.0\n\nx\n",
		`1 CONNECT {"verbose":true}` + "\nSUB b 3\nPUB b 0\n\n",
	}},
	{name: "CONNECT again as somebody else", conf: adaMay("publish: p"), steps: []string{
		"1 " + asAda + "\nSUB > 1\nPUB p 0\n\nPUB q 0\n\n", "1 " + asBob + "\nPUB p 0\n\nPUB q 0\n\nSUB > 1\nPUB q 0\n\n", "1 " + asAda + "\nPUB q 0\n\n",
		`1 CONNECT {"pass":"x"}` + "\n",
	}},
	{name: "an account is asked for", conf: "", steps: []string{`1 CONNECT {"account":"A"}` + "\n", `2 CONNECT {"new_account":true}` + "\n"}},
	{name: "an account is asked for with a wrong password", conf: twoUser, steps: []string{`1 CONNECT {"user":"ada","pass":"x","protocol":7}` + "\n", `2 CONNECT {"user":"ada","pass":"a","account":"A"}` + "\n"}},
	{name: "subjects of servers", conf: "", steps: []string{
		"1 " + quiet + "\nSUB > 1\nPUB _GR_.x 0\n\nPUB $GR.x 0\n\nPUB _R_.x 0\n\nPUB $SYS.x 0\n\nPUB $JS.x 0\n\nPUB _GR_ 0\n\n",
		"1 PUB a _GR_.x 0\n\nPUB a $GR.x 0\n\nPUB a _R_.x 0\n\nPUB a $JS.ACK.x 0\n\nPUB a $JS.FC.x 0\n\nPUB a _INBOX.x 0\n\n",
		"2 CONNECT {}\nPUB a _R_.x 0\n\nPUB $GR.x 0\n\n",
	}},
	{name: "subjects of servers and permissions", conf: adaMay(`publish: ["p", "_GR_.>"]`), steps: []string{"1 " + asAda + "\nPUB q _R_.x 0\n\nPUB p _R_.x 0\n\nPUB _GR_.x 0\n\n"}},
	{name: "the longest control line", conf: "max_control_line: 64", steps: []string{
		"1 " + quiet + "\nSUB " + strings.Repeat("a", 62) + " 1\nPUB " + strings.Repeat("a", 62) + " 1\nx\nSUB     " + strings.Repeat("b", 62) + " 2\n",
		"1 SUB " + strings.Repeat("a", 63) + " 1\n",
	}},
	{name: "unsubscribe after more or fewer", conf: "", steps: []string{
		"1 " + quiet + "\nSUB a 1\nPUB a 0\n\nPUB a 0\n\nUNSUB 1 1\nPUB a 0\n\n", "1 SUB a 2\nPUB a 0\n\nPUB a 0\n\nUNSUB 2 3\nPUB a 0\n\nPUB a 0\n\n",
		"1 SUB a 3\nUNSUB 3 1\nUNSUB 3 2\nPUB a 0\n\nPUB a 0\n\nPUB a 0\n\n", "1 SUB a q 4\nUNSUB 4 2\nPUB a 0\n\n", "1 UNSUB 4 0\nPUB a 0\n\n",
	}},
	{name: "an id twice", conf: "", steps: []string{"1 CONNECT {}\nSUB a 1\nSUB b 1\nPUB a 0\n\nPUB b 0\n\n"}},
	{name: "headers and a client without", conf: "", steps: []string{
		"1 " + quiet + "\nSUB a 1\n", `2 CONNECT {"verbose":false,"headers":true}` + "\nSUB a 2\nHPUB a r 18 20\nNATS/1.0\nA: b\n\nhi\nHPUB a 0 2\nhi\nHPUB a 2 4\nxxhi\n", "1 ",
	}},
	{name: "blanks", conf: "", steps: []string{"1 CONNECT\t{\"verbose\":false}  \nSUB\t a \t 1 \nPUB  a \t1  \nx\nPING  \nUNSUB  1  \n"}},
	{name: "mapping", conf: "mappings { \"in.*\": \"out.$1\" }\n" + adaMay(`publish: "out.x"`), steps: []string{
		"2 " + asBob + "\nSUB > 1\n", "1 " + asAda + "\nPUB in.x 0\n\nPUB in.y 0\n\nPUB out.x 0\n\n", "2 ",
	}},
	{name: "mapping that loses all", conf: "mappings { lossy: [ { destination: lossy, weight: 0 } ] }", steps: []string{
		"1 CONNECT {}\nSUB lossy 1\nPUB lossy 0\n\n", `2 CONNECT {"verbose":false,"headers":true,"no_responders":true}` + "\nSUB r 1\nPUB lossy r 0\n\n",
	}},
}

// TestOnTheWire compares what clients get to see with what nats-server v2.15.2
// tells them, octet by octet: who may connect, publish and subscribe, limits,
// and what ends a connection.
func TestOnTheWire(t *testing.T) {
	const file = "testdata/wire.txt"
	if *oracle != "" {
		var all strings.Builder
		for _, d := range dialogues {
			fmt.Fprintf(&all, "== %s\n%s", d.name, d.hold(t, startOracle(t, d.expand())))
		}
		if err := os.WriteFile(file, []byte(all.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want := make(map[string]string)
	for part := range strings.SplitSeq(string(text), "== ") {
		name, answers, _ := strings.Cut(part, "\n")
		want[name] = answers
	}
	for _, d := range dialogues {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			want := want[d.name]
			if d.ours == want {
				t.Error("no difference to nats-server: remove it from the table")
			}
			if d.ours != "" {
				want = d.ours
			}
			if got := d.hold(t, startBroker(t, d.expand())); got != want {
				t.Errorf("got\n%swant\n%s", got, want)
			}
		})
	}
}

// wireKey is the nkey of the dialogues.
var wireKey = sync.OnceValues(func() (nkeys.KeyPair, string) {
	kp, err := nkeys.CreateUser()
	if err != nil {
		panic(err)
	}
	public, err := kp.PublicKey()
	if err != nil {
		panic(err)
	}
	return kp, public
})

func (d dialogue) expand() string { return "listen: \"127.0.0.1:-1\"\n" + d.conf + "\n" }

// startBroker starts Petiole's and returns its address.
func startBroker(t *testing.T, conf string) string {
	_, public := wireKey()
	path := filepath.Join(t.TempDir(), "x.conf")
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(conf, "NKEY", public)), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(path, config.Edge)
	if err != nil {
		t.Fatal(err)
	}
	o := brokerOptions(cfg)
	if !strings.Contains(conf, "timeout") {
		o.AuthTimeout = patience // a busy machine may take longer to log in than usual
	}
	s, err := broker.New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = s.Shutdown(ctx)
	})
	return s.Addr().String()
}

// startOracle starts nats-server and returns its address.
func startOracle(t *testing.T, conf string) string {
	_, public := wireKey()
	dir := t.TempDir()
	path := filepath.Join(dir, "x.conf")
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(conf, "NKEY", public)), 0o600); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(dir, "log")
	cmd := exec.Command(*oracle, "-c", path, "-l", log)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	ready := regexp.MustCompile(`Listening for client connections on (127\.0\.0\.1:\d+)`)
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		text, _ := os.ReadFile(log)
		if m := ready.FindSubmatch(text); m != nil && strings.Contains(string(text), "Server is ready") {
			return string(m[1])
		}
	}
	text, _ := os.ReadFile(log)
	t.Fatalf("nats-server does not start: %s", text)
	return ""
}

// hold has the dialogue with the server at addr and returns what it said, one
// line for each step and line of answer.
func (d dialogue) hold(t *testing.T, addr string) string {
	type conn struct {
		net.Conn
		r     *bufio.Reader
		nonce string
		over  bool
	}
	conns := make(map[string]*conn)
	kp, public := wireKey()
	var out strings.Builder
	for _, step := range d.steps {
		who, text, sends := strings.Cut(step, " ")
		c := conns[who]
		if c == nil {
			nc, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			_ = nc.SetDeadline(time.Now().Add(time.Minute))
			c = &conn{Conn: nc, r: bufio.NewReader(nc)}
			conns[who] = c
			line, err := c.r.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			var info struct {
				Nonce string `json:"nonce"`
			}
			if err := json.Unmarshal([]byte(strings.TrimPrefix(line, "INFO ")), &info); err != nil {
				t.Fatal(err)
			}
			c.nonce = info.Nonce
			if d.info {
				fmt.Fprintf(&out, "%s INFO %s\n", who, steady(t, line))
			}
		}
		if strings.Contains(text, "SIGNATURE") {
			sig, err := kp.Sign([]byte(c.nonce))
			if err != nil {
				t.Fatal(err)
			}
			text = strings.ReplaceAll(text, "SIGNATURE", base64.RawURLEncoding.EncodeToString(sig))
		}
		text = strings.ReplaceAll(strings.ReplaceAll(text, "NKEY", public), "\n", "\r\n")
		fmt.Fprintf(&out, "%s\n", who)
		if c.over {
			fmt.Fprintln(&out, "\tover")
			continue
		}
		if sends {
			_, _ = io.WriteString(c, text+"PING\r\n") // it may be closed already
		}
		for {
			line, err := c.r.ReadString('\n')
			if strings.HasPrefix(line, "INFO ") {
				line = "INFO " + steady(t, line)
			}
			if line != "" {
				fmt.Fprintf(&out, "\t%q\n", line)
			}
			if err != nil {
				c.over = true
				fmt.Fprintln(&out, "\tclosed")
				break
			}
			if line == "PONG\r\n" {
				break
			}
		}
	}
	return out.String()
}
