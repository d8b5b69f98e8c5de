package broker

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
)

type logLines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestTrace(t *testing.T) {
	var out logLines
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: LevelTrace, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
			return slog.Attr{}
		}
		return a
	}}))
	opts := Options{Log: log, Trace: true}
	s := run(t, opts)
	r := rawDial(t, s)
	r.send(`CONNECT {"verbose":false,"headers":true,"user":"u","pass":"secret","auth_token":"secret"}` + "\r\n" +
		"SUB a q 1\r\nPUB a r 5\r\nhello\r\nHPUB a 12 17\r\nNATS/1.0\r\n\r\nhello\r\nUNSUB 1 7\r\nPUB a..b 0\r\n\r\nPING\r\n")
	r.expect("MSG a 1 r 5\r\nhello\r\nHMSG a 1 12 17\r\nNATS/1.0\r\n\r\nhello\r\n-ERR 'Invalid Publish Subject'\r\nPONG\r\n")
	check(t, s.Reload(Options{}))
	r.send("PUB off 0\r\n\r\nPING\r\n")
	r.expect("PONG\r\n")
	want := strings.Join([]string{
		`msg=<<- cid=1 op="CONNECT {\"auth_token\":\"[REDACTED]\",\"headers\":true,\"pass\":\"[REDACTED]\",\"user\":\"u\",\"verbose\":false}"`,
		`msg=<<- cid=1 op="SUB a q 1"`,
		`msg=<<- cid=1 op="PUB a r 5"`,
		`msg=->> cid=1 op="MSG a 1 r 5"`,
		`msg=<<- cid=1 op="HPUB a 12 17"`,
		`msg=->> cid=1 op="HMSG a 1 12 17"`,
		`msg=<<- cid=1 op="UNSUB 1 7"`,
		`msg=<<- cid=1 op="PUB a..b 0"`,
		`msg=->> cid=1 op="-ERR 'Invalid Publish Subject'"`,
		`msg=<<- cid=1 op=PING`,
		`msg=->> cid=1 op=PONG`,
		"",
	}, "\n")
	if got := out.String(); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}
