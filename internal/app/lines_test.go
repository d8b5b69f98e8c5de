//go:build !windows

package app

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// lineModes are the kinds of clients that send [mistypes]: what precedes the line.
var lineModes = []struct{ name, connect string }{
	{"plain", `CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}`},
	{"verbose", `CONNECT {"verbose":true,"pedantic":false,"headers":true}`},
	{"pedantic", `CONNECT {"verbose":false,"pedantic":true,"headers":true}`},
	{"silent", ""},   // without CONNECT
	{"stranger", ""}, // likewise, where users have to log in
	{"bounded", `CONNECT {"verbose":false,"pedantic":false,"headers":true,"user":"ada","pass":"a"}`}, // a user with permissions
}

// mistypes are what clients may send by mistake: each malformed argument of each
// verb, and what is next to it and permitted.
var mistypes = []string{
	"CONNECT\r\n", "CONNECT \r\n", "CONNECT{}\r\n", "CONNECT {}\r\n", "CONNECT\t {} \t\r\n", "CONNECT {}\n", "CONNECT {} x\r\n", "CONNECT {}{}\r\n",
	"CONNECT []\r\n", "CONNECT null\r\n", "CONNECT 1\r\n", "CONNECT \"x\"\r\n", "CONNECT true\r\n", "CONNECT {\r\n", "CONNECT {\"verbose\":\r\n", "CONNECT {'verbose':false}\r\n",
	"CONNECT {\"verbose\":1}\r\n", "CONNECT {\"verbose\":\"true\"}\r\n", "CONNECT {\"verbose\":null}\r\n", "CONNECT {\"VERBOSE\":false}\r\n", "CONNECT {\"verbose\":true,\"verbose\":false}\r\n",
	"CONNECT {\"pedantic\":0}\r\n", "CONNECT {\"echo\":\"no\"}\r\n", "CONNECT {\"tls_required\":1}\r\n", "CONNECT {\"tls_required\":true}\r\n",
	"CONNECT {\"protocol\":\"1\"}\r\n", "CONNECT {\"protocol\":1.5}\r\n", "CONNECT {\"protocol\":-1}\r\n", "CONNECT {\"protocol\":2}\r\n", "CONNECT {\"protocol\":99999999999999999999}\r\n", "CONNECT {\"protocol\":1e0}\r\n",
	"CONNECT {\"name\":1}\r\n", "CONNECT {\"name\":{}}\r\n", "CONNECT {\"lang\":[]}\r\n", "CONNECT {\"version\":2}\r\n", "CONNECT {\"user\":1}\r\n", "CONNECT {\"pass\":1}\r\n", "CONNECT {\"auth_token\":1}\r\n",
	"CONNECT {\"jwt\":1}\r\n", "CONNECT {\"jwt\":\"x\"}\r\n", "CONNECT {\"nkey\":1}\r\n", "CONNECT {\"nkey\":\"x\"}\r\n", "CONNECT {\"sig\":1}\r\n", "CONNECT {\"sig\":\"x\"}\r\n", "CONNECT {\"user\":\"x\",\"pass\":\"y\"}\r\n",
	"CONNECT {\"account\":1}\r\n", "CONNECT {\"account\":\"A\"}\r\n", "CONNECT {\"new_account\":1}\r\n", "CONNECT {\"headers\":1}\r\n", "CONNECT {\"no_responders\":1}\r\n", "CONNECT {\"headers\":false,\"no_responders\":true}\r\n",
	"CONNECT {\"import\":1}\r\n", "CONNECT {\"export\":{\"allow\":1}}\r\n", "CONNECT {\"export\":{\"deny\":[\"a\"]}}\r\n", "CONNECT {\"remote_account\":1}\r\n", "CONNECT {\"proxy_sig\":1}\r\n", "CONNECT {\"unheard_of\":1}\r\n",
	"CONNECT {\"name\":\"\xff\"}\r\n", "CONNECT {\"name\":\"\\ud800\"}\r\n", "CONNECT {\"name\":\"a\x00b\"}\r\n", "CONNECT {\"name\":\"a\rb\"}\r\n",
	"CONNEC {}\r\n", "CONNECTED {}\r\n", "CONNECT {}\r\r\n", "connect {}\r\n", "CANNECT {}\r\n",

	"SUB\r\n", "SUB \r\n", "SUB\t\r\n", "SUB a\r\n", "SUB a \r\n", "SUB a q 1 2\r\n", "SUB a b c d e f\r\n", "SUB a 1\n", "SUB  a  1 \r\n", "SUB\ta\t1\t\r\n", "SUB a q 1\r\n", "SUB a\r1\r\n", "SUB a 1\r\r\n",
	"SUBa 1\r\n", "SU a 1\r\n", "SUBB a 1\r\n", "SUB\x00a 1\r\n", "SUB . 1\r\n", "SUB .a 1\r\n", "SUB a. 1\r\n", "SUB a..b 1\r\n", "SUB > 1\r\n", "SUB >.a 1\r\n", "SUB a.>.b 1\r\n", "SUB a.>> 1\r\n", "SUB a.* 1\r\n", "SUB a* 1\r\n", "SUB *a 1\r\n", "SUB a> 1\r\n", "SUB ** 1\r\n", "SUB a.*.* 1\r\n",
	"SUB a * 1\r\nPUB a 0\r\n\r\n", "SUB a > 1\r\n", "SUB a q.* 1\r\n", "SUB a .. 1\r\n", "SUB a _sys_ 1\r\n", "SUB _sys_ 1\r\n", "SUB a\x00 1\r\n", "SUB a \x00\r\n", "SUB \xff 1\r\nPUB \xff 0\r\n\r\n", "SUB a\x7f 1\r\n", "SUB $SYS.> 1\r\n", "SUB $JS.API.> 1\r\n",
	"SUB a 0\r\nPUB a 0\r\n\r\n", "SUB a -1\r\nPUB a 0\r\n\r\n", "SUB a x\r\nPUB a 0\r\n\r\n", "SUB a 1.5\r\nUNSUB 1\r\nPUB a 0\r\n\r\n", "SUB a 99999999999999999999999\r\nPUB a 0\r\n\r\n", "SUB a 01\r\nUNSUB 1\r\nPUB a 0\r\n\r\n",

	"UNSUB\r\n", "UNSUB \r\n", "UNSUB 1\r\n", "UNSUB x\r\n", "UNSUB 1 \r\n", "UNSUB 1 1\r\n", "UNSUB 1 2 3\r\n", "UNSUB 1 2 3 4 5\r\n", "UNSU 1\r\n", "UNSUB1\r\n", "UNSUBS 1\r\n", "UNSUB 1 x\r\n",
	"SUB a 1\r\nUNSUB 1 x\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 -1\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 +1\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 1.5\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 0x1\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 1x\r\nPUB a 0\r\n\r\n",
	"SUB a 1\r\nUNSUB 1 0\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 00\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 01\r\nPUB a 0\r\n\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 999999999\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 1000000000\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 000000001\r\nPUB a 0\r\n\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 0000000001\r\nPUB a 0\r\n\r\n",
	"SUB a 1\r\nUNSUB 1 99999999999999999999\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 1\r\nUNSUB 1 x\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 01\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1\r1\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB 1 1\r\r\nPUB a 0\r\n\r\n", "SUB a 1\r\nUNSUB a\r\nPUB a 0\r\n\r\n",

	"PUB\r\n", "PUB \r\n", "PUB a\r\n", "PUB a \r\n", "PUB a b\r\n", "PUB a b c\r\n", "PUB a b c 0\r\n\r\n", "PUB a b c d e f\r\n", "PUB 0\r\n\r\n", "PUBa 0\r\n\r\n", "PU a 0\r\n\r\n", "PUBB a 0\r\n\r\n", "pUb a 0\r\n\r\n",
	"PUB a -1\r\n\r\n", "PUB a +1\r\nx\r\n", "PUB a 0x1\r\nx\r\n", "PUB a 1.0\r\nx\r\n", "PUB a 1e0\r\nx\r\n", "PUB a 01\r\nx\r\n", "PUB a 000000001\r\nx\r\n", "PUB a 0000000001\r\nx\r\n", "PUB a 1,0\r\nx\r\n",
	"PUB a 1\r\nx\n", "PUB a 1\r\nxy\r\n", "PUB a 0\r\nx\r\n", "PUB a 2\r\nx\r\n", "PUB a 0\r\n\n", "PUB a 0\r\n\r\r\n", "PUB a 1\nx\r\n", "PUB a 1 \r\nx\r\n", "PUB a 0\r\r\n\r\n", "PUB  a  r  1 \r\nx\r\n", "PUB\ta\t1\r\nx\r\n",
	"PUB a 1048577\r\n", "PUB a 999999999\r\n", "PUB a 1000000000\r\n", "PUB a 99999999999999999999\r\n", "PUB a r 1048577\r\n",
	"PUB * 0\r\n\r\n", "PUB > 0\r\n\r\n", "PUB a.* 0\r\n\r\n", "PUB a* 0\r\n\r\n", "PUB .a 0\r\n\r\n", "PUB a. 0\r\n\r\n", "PUB a..b 0\r\n\r\n", "PUB . 0\r\n\r\n", "PUB a\x00 0\r\n\r\n", "PUB a\rb 0\r\n\r\n", "PUB \xff 0\r\n\r\n", "PUB >.a 0\r\n\r\n",
	"SUB a 1\r\nPUB a * 0\r\n\r\n", "SUB a 1\r\nPUB a > 0\r\n\r\n", "SUB a 1\r\nPUB a b.* 0\r\n\r\n", "SUB a 1\r\nPUB a b..c 0\r\n\r\n", "SUB a 1\r\nPUB a .b 0\r\n\r\n", "SUB a 1\r\nPUB a b\x00 0\r\n\r\n", "SUB a 1\r\nPUB a \xff 0\r\n\r\n", "SUB > 1\r\nPUB b .. 0\r\n\r\n",

	"HPUB\r\n", "HPUB \r\n", "HPUB a\r\n", "HPUB a 12\r\n", "HPUB a x 12\r\n", "HPUB a 12 x\r\n", "HPUB a r 12\r\n", "HPUB a r x 12\r\n", "HPUB a r s 12 12\r\nNATS/1.0\r\n\r\n\r\n", "HPUBa 12 12\r\nNATS/1.0\r\n\r\n\r\n", "HPUBB a 12 12\r\n", "HPU a 12 12\r\n", "HUB a 12 12\r\n", "hpub a 12 12\r\nNATS/1.0\r\n\r\n\r\n",
	"HPUB a -1 0\r\n\r\n", "HPUB a 0 -1\r\n\r\n", "HPUB a 0 0\r\n\r\n", "HPUB a 1 0\r\n\r\n", "HPUB a 13 12\r\nNATS/1.0\r\n\r\n\r\n", "HPUB a 1000000000 12\r\n", "HPUB a 12 1048577\r\n", "HPUB a 12 1000000000\r\n", "HPUB a 012 0012\r\nNATS/1.0\r\n\r\n\r\n", "HPUB a 12 11\r\n",
	"SUB a 1\r\nHPUB a 12 12\r\nNATS/1.0\r\n\r\n\r\n", "SUB a 1\r\nHPUB a 0 1\r\nx\r\n", "SUB a 1\r\nHPUB a 1 1\r\nx\r\n", "SUB a 1\r\nHPUB a 10 12\r\nNATS/1.0\r\n\r\n\r\n", "SUB a 1\r\nHPUB a 8 8\r\nNATS/1.0\r\n", "SUB a 1\r\nHPUB a 12 12\r\nXATS/1.0\r\n\r\n\r\n", "SUB a 1\r\nHPUB a 10 10\r\nNATS/1.0\n\n\r\n", "SUB a 1\r\nHPUB a 17 17\r\nNATS/1.0\r\nabc\r\n\r\n\r\n", "SUB a 1\r\nHPUB a 18 18\r\nNATS/1.0\r\na: \x00\r\n\r\n\r\n", "SUB a 1\r\nHPUB a 17 17\r\nNATS/1.0\r\n:ab\r\n\r\n\r\n",
	"HPUB a.* 12 12\r\nNATS/1.0\r\n\r\n\r\n", "HPUB a..b 12 12\r\nNATS/1.0\r\n\r\n\r\n", "SUB a 1\r\nHPUB a .. 12 12\r\nNATS/1.0\r\n\r\n\r\n",

	"PING\r\n", "PING\n", "PING \r\n", "PING x\r\n", "PINGx\r\n", "PING\r\r\n", "PIN\r\n", "PI\r\n", "P\r\n", "PXNG\r\n", "ping\r\n", "PINGPING\r\n", "PONG\r\n", "PONG x\r\n", "PONGx\r\n", "PON\r\n", "pong\n",
	"+OK\r\n", "+OK x\r\n", "+OKx\r\n", "+ok\n", "+O\r\n", "+\r\n", "+NO\r\n", "-ERR\r\n", "-ERR \r\n", "-ERR x\r\n", "-ERR 'Parser Error'\r\n", "-err 'x'\r\n", "-ERRx\r\n", "-ER\r\n", "-\r\n",
	"INFO\r\n", "INFO \r\n", "INFO {}\r\n", "INFO{}\r\n", "info {}\n", "INFO x\r\n", "INFO 1\r\n", "INFO {\"server_id\":1}\r\n", "INFO {\"server_id\":\"x\",\"ldm\":true}\r\n", "INFO {} x\r\n", "INF\r\n", "INFX {}\r\n",
	"\r\n", "\n", " \r\n", " PING\r\n", "\x00\r\n", "\xff\xfe\r\n", "MSG a 1 0\r\n\r\n", "HMSG a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n", "HMSG\r\n", "RS+ $G a\r\n", "RS- $G a\r\n", "RMSG $G a 0\r\n\r\n", "LS+ a\r\n", "LMSG a 0\r\n\r\n", "A+ $G\r\n", "A- $G\r\n", "QUIT\r\n", "HELP\r\n", "\x16\x03\x01\x00\x05hello\r\n", "{}\r\n", "POST / HTTP/1.1\r\n\r\n",
}

// TestLines compares what each of [mistypes] is answered with, and whether the
// connection ends, with what nats-server v2.15.2 does.
func TestLines(t *testing.T) {
	const file = "testdata/lines.txt"
	login := adaMay("publish: b, subscribe: b")
	if *oracle != "" {
		open, closed := startOracle(t, dialogue{}.expand()), startOracle(t, dialogue{conf: login}.expand())
		var all strings.Builder
		for _, line := range mistypes {
			fmt.Fprintf(&all, "%q\n%s", line, sayLine(t, open, closed, line))
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
	want := make(map[string][]string)
	line := ""
	for l := range strings.Lines(string(text)) {
		l = strings.TrimSuffix(l, "\n")
		if strings.HasPrefix(l, "\t") {
			want[line] = append(want[line], l)
		} else if line, err = strconv.Unquote(l); err != nil {
			t.Fatalf("%s: %s: %v", file, l, err)
		}
	}
	open, closed := startBroker(t, dialogue{}.expand()), startBroker(t, dialogue{conf: login}.expand())
	for _, line := range mistypes {
		got := strings.Split(strings.TrimSuffix(sayLine(t, open, closed, line), "\n"), "\n")
		if len(want[line]) != len(got) {
			t.Fatalf("%q is not recorded", line)
		}
		for i, g := range got {
			if w := want[line][i]; g != w && !differs(line, g, w) {
				t.Errorf("%q:\ngot  %s\nwant %s", line, g, w)
			}
		}
	}
}

// longNumbers have more digits than the nine that nats-server reads, and what a
// client that is not verbose gets. nats-server takes such a number of messages
// for none, and such a size for an error.
var longNumbers = map[string]string{
	"SUB a 1\r\nUNSUB 1 1000000000\r\nPUB a 0\r\n\r\n":           `	plain "MSG a 1 0\r\n\r\n" open`,
	"SUB a 1\r\nUNSUB 1 0000000001\r\nPUB a 0\r\n\r\n":           `	plain "MSG a 1 0\r\n\r\n" open`,
	"SUB a 1\r\nUNSUB 1 99999999999999999999\r\nPUB a 0\r\n\r\n": `	plain "MSG a 1 0\r\n\r\n" open`,
	"PUB a 0000000001\r\nx\r\n":                                  `	plain "" open`,
}

// differs reports whether got is one of the answers that are meant to be others
// than nats-server's, want.
func differs(line, got, want string) bool {
	if plain, ok := longNumbers[line]; ok {
		return got == plain || !strings.HasPrefix(got, "\tplain")
	}
	// Octets that nats-server takes as parts of subjects or, of some verbs, for blanks.
	first, _, _ := strings.Cut(strings.TrimPrefix(line, "SUB a 1\r\n"), "\r\n")
	if strings.ContainsAny(first, "\r\x00") && strings.HasSuffix(want, "open") {
		return strings.HasSuffix(got, `-ERR 'Parser Error'\r\n" closed`)
	}
	// Who is cut off is told why.
	if said, ok := strings.CutSuffix(want, `" closed`); ok {
		for _, why := range []string{"Parser Error", "Maximum Payload Violation", "message headers not supported"} {
			if got == said+"-ERR '"+why+`'\r\n" closed` {
				return true
			}
		}
	}
	// A subject that is none is refused, in whatever way a client talks.
	const refused = `-ERR 'Invalid Publish Subject'\r\n`
	was, ok := strings.CutSuffix(want, `" open`)
	if silent, verbose := strings.CutSuffix(was, `+OK\r\n`); verbose {
		was = silent
	}
	return ok && strings.Contains(line, "PUB ") && (got == was+refused+`" open` || got == was+`" open` && strings.HasSuffix(was, refused))
}

// sayLine sends line as each of [lineModes] to a server that is open to all, or
// wants a login, and returns the answers.
func sayLine(t *testing.T, open, closed, line string) string {
	t.Helper()
	// What follows the line shows whether the connection is still there, and ends it.
	const end, atEnd = "PING\r\nZ\r\n", "PONG\r\n-ERR 'Unknown Protocol Operation'\r\n"
	var out strings.Builder
	for _, m := range lineModes {
		addr := open
		if m.name == "stranger" || m.name == "bounded" {
			addr = closed
		}
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = nc.SetDeadline(time.Now().Add(time.Minute))
		r := bufio.NewReader(nc)
		if _, err := r.ReadString('\n'); err != nil { // INFO
			t.Fatal(err)
		}
		text := line + end
		if m.connect != "" {
			text = m.connect + "\r\n" + text
		}
		_, _ = io.WriteString(nc, text)
		answer, _ := io.ReadAll(r) // a reset is an end, too
		said, ok := strings.CutSuffix(string(answer), atEnd)
		state := "closed"
		if ok {
			state = "open"
		}
		_ = nc.Close()
		fmt.Fprintf(&out, "\t%s %q %s\n", m.name, said, state)
	}
	return out.String()
}
