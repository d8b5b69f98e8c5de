package broker

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"petiole/internal/subject/transform"
)

func mapTo(source string, dests ...string) transform.Mapping {
	m := transform.Mapping{Source: source}
	for _, d := range dests {
		m.Destinations = append(m.Destinations, transform.Destination{Subject: d, Weight: 100 / len(dests)})
	}
	return m
}

func TestMappings(t *testing.T) {
	s := run(t, Options{
		Mappings: []transform.Mapping{
			mapTo("in.*.*", "out.$2.$1"), mapTo("req", "svc"),
			{Source: "lossy", Destinations: []transform.Destination{{Subject: "lossy", Weight: 0}}},
		},
		Users: []User{{Name: "a", Password: "a", Permissions: &Permissions{
			Publish: SubjectPermission{Allow: []string{"out.>", "svc", "lossy", "free"}},
		}}},
	})
	_, err := s.Account().Handle("svc", func(m *Msg) { m.Respond(nil, m.Subject) })
	check(t, err)
	r := rawDial(t, s)
	r.send(`CONNECT {"user":"a","pass":"a","verbose":false,"headers":true,"no_responders":true}` + "\r\nSUB > 1\r\nPING\r\n")
	r.expect("PONG\r\n")
	// The receiver sees the new subject; permissions look at it too.
	r.send("PUB in.x.y 1\r\na\r\nPUB in.x.y re 1\r\nb\r\nPUB free 1\r\nc\r\nPUB in.x 0\r\n\r\n")
	r.expect("MSG out.y.x 1 1\r\na\r\nMSG out.y.x 1 re 1\r\nb\r\nMSG free 1 1\r\nc\r\n" +
		"-ERR 'Permissions Violation for Publish to \"in.x\"'\r\n")
	// A handler gets it under the new one.
	r.send("PUB req re 0\r\n\r\n")
	r.expect("MSG svc 1 re 0\r\n\r\nMSG re 1 3\r\nsvc\r\n")
	// What is to be lost reaches nobody, and a requester hears so.
	r.send("PUB lossy 0\r\n\r\nPUB lossy re 0\r\n\r\nPING\r\n")
	r.expect("HMSG re 1 32 32\r\nNATS/1.0 503\r\nNats-Subject: \r\n\r\n\r\nPONG\r\n")
	r.send("PUB in..x 0\r\n\r\nPUB out..x 0\r\n\r\n")
	const none = "-ERR 'Invalid Publish Subject'\r\n"
	r.expect(none + "-ERR 'Permissions Violation for Publish to \"in..x\"'\r\n" + none)
	// What is published inside goes where it says.
	s.Account().Publish("in.x.y", "", nil, []byte("i"))
	r.expect("MSG in.x.y 1 1\r\ni\r\n")
	if _, err := New(Options{Mappings: []transform.Mapping{mapTo("a", "$1")}}); err == nil || !strings.Contains(err.Error(), `mapping for "a": invalid mapping destination`) {
		t.Error(err)
	}
}

// TestMappingDoesNotAllocate counts what a client's messages through a mapping
// cost the whole process.
func TestMappingDoesNotAllocate(t *testing.T) {
	s := run(t, Options{Mappings: []transform.Mapping{mapTo("in.*.>", "p.{{partition(8,1)}}.$1.>")}})
	c := rawDial(t, s)
	c.send(quiet + "PING\r\n")
	c.expect("PONG\r\n")
	_ = c.conn.SetDeadline(time.Now().Add(time.Minute))
	const k = 100
	burst := strings.Repeat("PUB in.abc.x.y 5\r\nhello\r\n", k) + "PING\r\n"
	pong := make([]byte, len("PONG\r\n"))
	n := testing.AllocsPerRun(50, func() {
		if _, err := fmt.Fprint(c.conn, burst); err != nil {
			t.Fatal(err)
		}
		if _, err := c.r.Read(pong); err != nil {
			t.Fatal(err)
		}
	})
	if n > k/5 {
		t.Errorf("%.1f allocations for %d messages", n, k)
	}
}

func BenchmarkMapped(b *testing.B) {
	s := run(b, Options{Mappings: []transform.Mapping{mapTo("bench.*", "mapped.$1")}})
	r := rawDial(b, s)
	r.send(quiet)
	_ = r.conn.SetDeadline(noDeadline)
	chunk := []byte(strings.Repeat("PUB bench.subject 16\r\n0123456789abcdef\r\n", 500))
	b.ReportAllocs()
	for n := 0; n < b.N; n += 500 {
		if _, err := r.conn.Write(chunk); err != nil {
			b.Fatal(err)
		}
	}
	r.send("PING\r\n")
	r.expect("PONG\r\n")
}
