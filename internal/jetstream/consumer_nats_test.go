package jetstream

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/broker"
	"petiole/internal/jetstream/consumer"
)

// recordFrom makes TestConsumerTranscripts write what the server at the URL
// answers, instead of comparing. The files in testdata/consumer were recorded
// from nats-server 2.15.2.
var recordFrom = flag.String("record-consumers", "", "record transcripts of consumers from the NATS server at this `URL`")

// talk is a conversation with a server about the consumer C of the stream S,
// of which a transcript is kept.
type talk struct {
	t    *testing.T
	nc   *nats.Conn
	in   map[string]*nats.Subscription // by label
	msgs []*nats.Msg                   // delivered
	adv  chan *nats.Msg
	log  strings.Builder
}

// request makes a request. It and next do without timeouts of nats.go, which keeps
// its timers for later: none made in a bubble may be used outside of it.
func (c *talk) request(subject string, body []byte) (*nats.Msg, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return c.nc.RequestWithContext(ctx, subject, body)
}

// nextMsg returns what comes to the label within d.
func (c *talk) nextMsg(label string, d time.Duration) (*nats.Msg, error) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return c.in[label].NextMsgWithContext(ctx)
}

func (c *talk) note(format string, args ...any) { fmt.Fprintf(&c.log, format+"\n", args...) }

var unstable = map[string]bool{
	"created": true, "ts": true, "last_active": true, "cluster": true, "pause_remaining": true, "id": true,
	"timestamp": true, "metadata": true, "pinned_ts": true,
}

// plain removes what differs from run to run.
func plain(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			if unstable[k] {
				delete(v, k)
			} else {
				v[k] = plain(v[k])
			}
		}
	case []any:
		for i := range v {
			v[i] = plain(v[i])
		}
	}
	return v
}

func plainJSON(b []byte) string {
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return fmt.Sprintf("%q", b)
	}
	out, err := json.Marshal(plain(v))
	if err != nil {
		return err.Error()
	}
	return string(out)
}

// api makes a request and notes the answer.
func (c *talk) api(subject, body string) {
	c.t.Helper()
	m, err := c.request("$JS.API."+subject, []byte(body))
	if err != nil {
		c.note("%s %s -> %v", subject, body, err)
		return
	}
	c.note("%s %s -> %s", subject, body, plainJSON(m.Data))
}

func (c *talk) create(cfg string) {
	c.api("CONSUMER.CREATE.S.C", `{"stream_name":"S","config":{"name":"C",`+strings.TrimSuffix(strings.TrimPrefix(cfg, "{"), "}")+`}}`)
}

// info notes the parts of the consumer's info that change.
func (c *talk) info() {
	m, err := c.request("$JS.API.CONSUMER.INFO.S.C", nil)
	if err != nil {
		c.t.Fatal(err)
	}
	var in struct {
		Delivered struct {
			C uint64 `json:"consumer_seq"`
			S uint64 `json:"stream_seq"`
		}
		Floor struct {
			C uint64 `json:"consumer_seq"`
			S uint64 `json:"stream_seq"`
		} `json:"ack_floor"`
		Ack   int  `json:"num_ack_pending"`
		Re    int  `json:"num_redelivered"`
		Wait  int  `json:"num_waiting"`
		Pend  int  `json:"num_pending"`
		Bound bool `json:"push_bound"`
		Pause bool `json:"paused"`
	}
	if err := json.Unmarshal(m.Data, &in); err != nil {
		c.t.Fatal(err)
	}
	c.note("info: delivered %v floor %v ack pending %d redelivered %d waiting %d pending %d bound %v paused %v",
		in.Delivered, in.Floor, in.Ack, in.Re, in.Wait, in.Pend, in.Bound, in.Pause)
}

// stream notes the stream's messages, after a moment in which removals settle.
func (c *talk) stream() {
	time.Sleep(100 * time.Millisecond) // nothing tells when a removal has happened
	m, err := c.request("$JS.API.STREAM.INFO.S", nil)
	if err != nil {
		c.t.Fatal(err)
	}
	var in struct {
		State struct {
			Messages uint64
			First    uint64 `json:"first_seq"`
			Last     uint64 `json:"last_seq"`
		}
	}
	if err := json.Unmarshal(m.Data, &in); err != nil {
		c.t.Fatal(err)
	}
	c.note("stream: %d messages, %d to %d", in.State.Messages, in.State.First, in.State.Last)
}

func (c *talk) publish(subjects ...string) {
	for _, s := range subjects {
		if _, err := c.request(s, []byte("data of "+s)); err != nil {
			c.t.Fatal(err)
		}
	}
	c.note("published %v", subjects)
}

// listen subscribes; label stands for the subject in the transcript.
func (c *talk) listen(label string) string {
	sub, ok := c.in[label]
	if !ok {
		var err error
		if sub, err = c.nc.SubscribeSync(nats.NewInbox()); err != nil {
			c.t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := c.nc.FlushWithContext(ctx); err != nil {
			c.t.Fatal(err)
		}
		c.in[label] = sub
	}
	return sub.Subject
}

// next makes a pull request.
func (c *talk) next(label, body string) {
	reply := c.listen(label)
	if err := c.nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.S.C", reply, []byte(body)); err != nil {
		c.t.Fatal(err)
	}
	c.note("next %s %s", label, body)
}

var flowSubject = regexp.MustCompile(`\$JS\.FC\.\S+`)

// expect notes n messages that arrive on label's subject.
func (c *talk) expect(label string, n int) {
	c.t.Helper()
	c.listen(label)
	for range n {
		m, err := c.nextMsg(label, patience)
		if err != nil {
			c.note("%s: %v", label, err)
			return
		}
		c.heard(label, m)
	}
}

func (c *talk) heard(label string, m *nats.Msg) {
	if m.Header.Get("Nats-Pin-Id") != "" {
		m.Header.Set("Nats-Pin-Id", "#")
	}
	if _, _, ref, ok := consumer.ParseAck(m.Reply); ok {
		c.msgs = append(c.msgs, m)
		c.note("%s: #%d %s delivered %d, stream %d, consumer %d, pending %d; %v %q", label, len(c.msgs)-1, m.Subject,
			ref.Deliveries, ref.Seq, ref.ConsumerSeq, ref.Pending, m.Header, m.Data)
		return
	}
	status := flowSubject.ReplaceAllString(fmt.Sprint(m.Header), "$$JS.FC.#")
	c.note("%s: %v %q reply %q", label, status, m.Data, flowSubject.ReplaceAllString(m.Reply, "$$JS.FC.#"))
}

// quiet notes what arrives within d, which should be nothing.
func (c *talk) quiet(label string, d time.Duration) {
	if m, err := c.nextMsg(label, d); err == nil {
		c.heard(label, m)
		return
	}
	c.note("%s: silence", label)
}

// ack answers the i-th message delivered and waits for that to be taken in.
func (c *talk) ack(i int, payload string) {
	m := c.msgs[i]
	r, err := c.request(m.Reply, []byte(payload))
	switch {
	case err != nil:
		c.note("ack #%d %q: %v", i, payload, err)
	default:
		c.note("ack #%d %q: %v %q", i, payload, r.Header, r.Data)
	}
}

// ackNext acknowledges and asks for more, to label.
func (c *talk) ackNext(i int, payload, label string) {
	if err := c.nc.PublishRequest(c.msgs[i].Reply, c.listen(label), []byte(payload)); err != nil {
		c.t.Fatal(err)
	}
	c.note("ack #%d %q to %s", i, payload, label)
}

// advisory notes the next event.
func (c *talk) advisory() {
	select {
	case m := <-c.adv:
		c.note("advisory on %s: %s", m.Subject, plainJSON(m.Data))
	case <-time.After(patience):
		c.note("no advisory")
	}
}

var transcripts = []struct {
	name   string
	stream string // configuration beside name and subjects
	run    func(c *talk)
}{
	{"pull", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.c")
		c.create(`{"durable_name":"C","ack_policy":"explicit"}`)
		c.next("x", "2")
		c.expect("x", 2)
		c.info()
		c.ack(1, "")
		c.info()
		c.ack(0, "+ACK")
		c.ack(0, "+ACK")
		c.info()
		c.next("x", `{"batch":3,"expires":300000000}`)
		c.expect("x", 2)
		c.info()
		c.api("CONSUMER.INFO.S.C", "")
		c.api("CONSUMER.NAMES.S", "")
		c.api("CONSUMER.LIST.S", "")
		c.next("y", `{"batch":3}`)
		c.publish("s.d")
		c.expect("y", 1)
		c.api("CONSUMER.DELETE.S.C", "")
		c.expect("y", 1)
		c.api("CONSUMER.INFO.S.C", "")
		c.api("CONSUMER.DELETE.S.C", "")
	}},
	{"statuses", "", func(c *talk) {
		c.create(`{"durable_name":"C","ack_policy":"explicit","max_batch":5,"max_expires":60000000000,"max_bytes":5000,"max_waiting":2}`)
		c.next("x", `{"batch":1,"no_wait":true}`)
		c.expect("x", 1)
		c.next("x", `{"batch":6}`)
		c.expect("x", 1)
		c.next("x", `6`)
		c.expect("x", 1)
		c.next("x", `{"batch":1,"expires":61000000000}`)
		c.expect("x", 1)
		c.next("x", `{"batch":1,"max_bytes":5001}`)
		c.expect("x", 1)
		c.next("x", `{"batch":1,"expires":1000000000,"idle_heartbeat":600000000}`)
		c.expect("x", 1)
		c.next("x", `{"batch":2,"min_pending":5}`)
		c.expect("x", 1)
		c.next("x", `{"batch":2,"id":"five"}`)
		c.expect("x", 1)
		c.next("x", `{"batch":2,"priority":11}`)
		c.expect("x", 1)
		c.next("x", `{"batch":2,"expires":5000000000,"max_bytes":20}`)
		c.next("y", `{"batch":2,"expires":6000000000,"idle_heartbeat":1000000000}`)
		c.next("z", `{"batch":2}`)
		c.expect("z", 1)
		c.next("z", `{"batch":2,"expires":2000000000,"idle_heartbeat":1000000000}`)
		c.quiet("z", 50*time.Millisecond)
		c.info()
		c.expect("y", 1)
		c.publish("s.a")
		c.expect("x", 1)
		c.expect("y", 1)
		c.next("x", `{"batch":1,"max_bytes":1000}`)
		c.publish("s.b")
		c.expect("y", 1)
		c.publish("s.c")
		c.expect("x", 2)
	}},
	{"nowait", "", func(c *talk) {
		c.publish("s.a", "s.b")
		c.create(`{"durable_name":"C","ack_policy":"explicit"}`)
		c.next("x", `{"batch":5,"no_wait":true}`)
		c.expect("x", 3)
		c.next("x", `{"batch":5,"no_wait":true,"expires":300000000}`)
		c.expect("x", 1)
		c.next("x", `{"batch":5,"no_wait":true,"expires":2000000000}`)
		c.publish("s.c")
		c.expect("x", 2)
		c.next("y", `{"batch":5}`)
		c.next("x", `{"batch":5,"no_wait":true}`)
		c.expect("x", 1)
	}},
	{"redelivery", "", func(c *talk) {
		c.publish("s.a", "s.b")
		c.create(`{"durable_name":"C","ack_policy":"explicit","ack_wait":1000000000,"max_deliver":2}`)
		c.next("x", "1")
		c.expect("x", 1)
		c.next("x", "10")
		c.expect("x", 1)
		c.expect("x", 2)
		c.info()
		c.ack(0, "+ACK")
		c.info()
		c.advisory()
		c.info()
		c.quiet("x", 100*time.Millisecond)
	}},
	{"nak", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.c")
		c.create(`{"durable_name":"C","ack_policy":"explicit","ack_wait":10000000000}`)
		c.next("x", "30")
		c.expect("x", 3)
		c.ack(1, "-NAK")
		c.expect("x", 1)
		c.advisory()
		c.info()
		c.ack(0, `-NAK {"delay":1000000000}`)
		c.quiet("x", 100*time.Millisecond)
		c.expect("x", 1)
		c.ack(2, `-NAK 700ms`)
		c.expect("x", 1)
		c.ack(4, "+WPI")
		c.ack(4, "+TERM because")
		c.advisory()
		c.advisory()
		c.advisory()
		c.info()
		c.ack(4, "-NAK")
		c.quiet("x", 100*time.Millisecond)
		c.ack(3, "nonsense")
		c.ack(3, "")
		c.ack(5, "+OK")
		c.info()
	}},
	{"backoff", "", func(c *talk) {
		c.publish("s.a")
		c.create(`{"durable_name":"C","ack_policy":"explicit","backoff":[300000000,1500000000],"max_deliver":3}`)
		c.next("x", "30")
		c.expect("x", 2)
		c.quiet("x", 600*time.Millisecond)
		c.expect("x", 1)
		c.advisory()
		c.info()
	}},
	{"acknext", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.c", "s.d")
		c.create(`{"durable_name":"C","ack_policy":"explicit"}`)
		c.next("x", "")
		c.expect("x", 1)
		c.ackNext(0, "+NXT", "y")
		c.expect("y", 1)
		c.ackNext(1, `+NXT {"batch":2}`, "z")
		c.expect("z", 2)
		c.info()
	}},
	{"ackall", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.c", "s.d")
		c.create(`{"durable_name":"C","ack_policy":"all"}`)
		c.next("x", "3")
		c.expect("x", 3)
		c.ack(1, "")
		c.info()
		c.ack(0, "")
		c.info()
		c.ack(2, "")
		c.info()
	}},
	{"maxackpending", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.c", "s.d")
		c.create(`{"durable_name":"C","ack_policy":"explicit","max_ack_pending":2}`)
		c.next("x", `{"batch":10,"no_wait":true}`)
		c.expect("x", 2)
		c.quiet("x", 100*time.Millisecond)
		c.info()
		c.ack(0, "")
		c.expect("x", 1)
		c.ack(1, "-NAK")
		c.expect("x", 1)
		c.info()
	}},
	{"filters", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.a", "s.c", "s.b")
		c.create(`{"durable_name":"C","ack_policy":"explicit","filter_subjects":["s.b","s.c"]}`)
		c.info()
		c.next("x", "2")
		c.expect("x", 2)
		c.info()
		c.ack(0, "")
		c.ack(1, "")
		c.info()
		c.next("x", "5")
		c.expect("x", 1)
		c.publish("s.a", "s.b")
		c.expect("x", 1)
		c.info()
		c.create(`{"durable_name":"C","ack_policy":"explicit","filter_subject":"s.a"}`)
		c.publish("s.a")
		c.expect("x", 1)
		c.info()
	}},
	{"lastpersubject", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.a", "s.c", "s.b", "s.a")
		c.create(`{"durable_name":"C","ack_policy":"explicit","deliver_policy":"last_per_subject","filter_subject":"s.>"}`)
		c.info()
		c.next("x", "1")
		c.expect("x", 1)
		c.info()
		c.publish("s.b")
		c.next("x", "10")
		c.expect("x", 3)
		c.info()
	}},
	{"start", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.a", "s.c")
		for _, p := range []string{
			`"deliver_policy":"last"`, `"deliver_policy":"new"`, `"deliver_policy":"last","filter_subject":"s.a"`,
			`"deliver_policy":"by_start_sequence","opt_start_seq":3`, `"deliver_policy":"by_start_sequence","opt_start_seq":30`,
			`"deliver_policy":"by_start_time","opt_start_time":"2020-01-01T00:00:00Z"`,
			`"deliver_policy":"by_start_time","opt_start_time":"2120-01-01T00:00:00Z"`,
			`"deliver_policy":"last","filter_subject":"s.x"`,
		} {
			c.create(`{"ack_policy":"explicit",` + p + `}`)
			c.info()
			c.api("CONSUMER.DELETE.S.C", "")
		}
	}},
	{"removed", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.c", "s.d", "s.e", "s.f")
		c.create(`{"durable_name":"C","ack_policy":"explicit"}`)
		c.api("STREAM.MSG.DELETE.S", `{"seq":2}`)
		c.next("x", "2")
		c.expect("x", 2)
		c.info()
		c.api("STREAM.MSG.DELETE.S", `{"seq":1}`)
		c.advisory()
		c.info()
		c.api("STREAM.MSG.DELETE.S", `{"seq":4}`)
		c.info()
		c.api("STREAM.PURGE.S", `{"seq":5}`)
		c.info()
		c.api("STREAM.PURGE.S", ``)
		c.info()
		c.publish("s.g")
		c.next("x", "2")
		c.expect("x", 1)
		c.info()
	}},
	{"workqueue", `,"retention":"workqueue"`, func(c *talk) {
		c.publish("s.a", "s.b", "s.c")
		c.create(`{"durable_name":"C","ack_policy":"none"}`)
		c.create(`{"durable_name":"C","ack_policy":"all"}`)
		c.create(`{"durable_name":"C","ack_policy":"explicit","deliver_policy":"new"}`)
		c.create(`{"durable_name":"C","ack_policy":"explicit","max_deliver":1,"ack_wait":1500000000}`)
		c.api("CONSUMER.CREATE.S.D", `{"stream_name":"S","config":{"name":"D","ack_policy":"explicit"}}`)
		c.api("CONSUMER.CREATE.S.D.s.a", `{"stream_name":"S","config":{"name":"D","ack_policy":"explicit","filter_subject":"s.a"}}`)
		c.next("x", "3")
		c.expect("x", 3)
		c.ack(1, "")
		c.stream()
		c.ack(0, "+TERM")
		c.stream()
		c.advisory()
		c.advisory()
		c.info()
		c.stream()
	}},
	{"interest", `,"retention":"interest"`, func(c *talk) {
		c.publish("s.a")
		c.stream()
		c.create(`{"durable_name":"C","ack_policy":"all"}`)
		c.api("CONSUMER.CREATE.S.D.s.c", `{"stream_name":"S","config":{"name":"D","durable_name":"D","ack_policy":"explicit","filter_subject":"s.c"}}`)
		c.publish("s.a", "s.b", "s.c")
		c.stream()
		c.next("x", "3")
		c.expect("x", 3)
		c.ack(1, "")
		c.stream()
		c.ack(2, "")
		c.stream()
		c.api("CONSUMER.DELETE.S.D", "")
		c.stream()
	}},
	{"push", "", func(c *talk) {
		c.publish("s.a", "s.b")
		d := c.listen("d")
		c.log.WriteString("push\n")
		m, err := c.request("$JS.API.CONSUMER.CREATE.S.C", []byte(`{"stream_name":"S","config":{"name":"C","deliver_subject":"`+d+
			`","ack_policy":"none","flow_control":true,"idle_heartbeat":1000000000}}`))
		if err != nil || strings.Contains(string(m.Data), "error") {
			c.t.Fatalf("%v %s", err, m.Data)
		}
		c.expect("d", 3)
		c.publish("s.c")
		c.expect("d", 2)
		c.info()
	}},
	{"headersonly", "", func(c *talk) {
		c.publish("s.a")
		if _, err := c.nc.RequestMsgWithContext(testContext(c.t), &nats.Msg{Subject: "s.b", Header: nats.Header{"K": {"v"}}, Data: []byte("12345")}); err != nil {
			c.t.Fatal(err)
		}
		c.create(`{"durable_name":"C","ack_policy":"explicit","headers_only":true}`)
		c.next("x", `{"batch":2,"max_bytes":1000}`)
		c.expect("x", 3)
	}},
	{"priority", "", func(c *talk) {
		c.create(`{"durable_name":"C","ack_policy":"explicit","priority_policy":"overflow","priority_groups":["g"]}`)
		c.next("x", "1")
		c.expect("x", 0)
		c.next("x", `{"batch":1}`)
		c.expect("x", 1)
		c.next("x", `{"batch":1,"group":"h"}`)
		c.expect("x", 1)
		c.next("y", `{"batch":5,"group":"g","min_pending":2}`)
		c.publish("s.a")
		c.expect("x", 1)
		c.publish("s.b")
		c.quiet("y", 100*time.Millisecond)
		c.publish("s.c")
		c.expect("y", 1)
		c.info()
		c.next("z", `{"batch":5,"group":"g","min_ack_pending":2}`)
		c.expect("z", 1)
	}},
	{"update", "", func(c *talk) {
		c.create(`{"durable_name":"C","ack_policy":"explicit"}`)
		c.create(`{"durable_name":"C","ack_policy":"explicit"}`)
		c.create(`{"durable_name":"C","ack_policy":"all"}`)
		c.create(`{"durable_name":"C","ack_policy":"explicit","deliver_policy":"new"}`)
		c.create(`{"durable_name":"C","ack_policy":"explicit","max_waiting":5}`)
		c.create(`{"durable_name":"C","ack_policy":"explicit","deliver_subject":"d"}`)
		c.create(`{"durable_name":"C","ack_policy":"explicit","description":"other","ack_wait":60000000000}`)
		c.api("CONSUMER.CREATE.S.C", `{"stream_name":"S","action":"create","config":{"name":"C","durable_name":"C","ack_policy":"explicit"}}`)
		c.api("CONSUMER.CREATE.S.X", `{"stream_name":"S","action":"update","config":{"name":"X","durable_name":"X","ack_policy":"explicit"}}`)
		c.api("CONSUMER.CREATE.S.X", `{"stream_name":"S","config":{"durable_name":"Y"}}`)
		c.api("CONSUMER.CREATE.S.X.s.a", `{"stream_name":"S","config":{"filter_subject":"s.b"}}`)
		c.api("CONSUMER.CREATE.T.X", `{"stream_name":"S","config":{}}`)
		c.api("CONSUMER.DURABLE.CREATE.S.X", `{"stream_name":"S","config":{}}`)
		c.api("CONSUMER.CREATE.S", `{"stream_name":"S","config":{"durable_name":"X"}}`)
		c.api("CONSUMER.PAUSE.S.C", `{"pause_until":"2120-01-01T00:00:00Z"}`)
		c.info()
		c.create(`{"durable_name":"C","ack_policy":"explicit"}`)
		c.info()
		c.api("CONSUMER.PAUSE.S.C", `{}`)
		c.info()
	}},
	{"pinned", "", func(c *talk) {
		c.create(`{"durable_name":"C","ack_policy":"explicit","priority_policy":"pinned_client","priority_groups":["g"],"priority_timeout":1000000000}`)
		c.next("x", `{"batch":2,"group":"g"}`)
		c.next("y", `{"batch":2,"group":"g"}`)
		c.publish("s.a")
		c.expect("x", 1)
		c.publish("s.b")
		c.expect("x", 1)
		c.publish("s.c")
		c.next("z", `{"batch":2,"group":"g","id":"wrong"}`)
		c.expect("z", 1)
		c.expect("y", 1)
		c.api("CONSUMER.UNPIN.S.C", `{"group":"h"}`)
		c.api("CONSUMER.UNPIN.S.C", `{"group":"g"}`)
		c.next("z", `{"batch":2,"group":"g"}`)
		c.publish("s.d")
		c.expect("z", 0)
		c.expect("y", 1)
	}},
	{"prioritized", "", func(c *talk) {
		c.create(`{"durable_name":"C","ack_policy":"explicit","priority_policy":"prioritized","priority_groups":["g"]}`)
		c.next("x", `{"batch":2,"group":"g","priority":5}`)
		c.next("y", `{"batch":2,"group":"g","priority":1}`)
		for i, s := range []string{"y", "y", "x"} {
			c.publish(fmt.Sprint("s.", i))
			c.expect(s, 1)
		}
	}},
	{"acknone", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.c")
		c.create(`{"durable_name":"C","ack_policy":"none"}`)
		c.next("x", "2")
		c.expect("x", 2)
		c.info()
	}},
	{"pushack", "", func(c *talk) {
		c.publish("s.a", "s.b")
		d := c.listen("d")
		c.log.WriteString("push\n")
		m, err := c.request("$JS.API.CONSUMER.DURABLE.CREATE.S.C", []byte(`{"stream_name":"S","config":{"durable_name":"C","deliver_subject":"`+d+
			`","ack_policy":"explicit","ack_wait":1000000000,"max_ack_pending":2}}`))
		if err != nil || strings.Contains(string(m.Data), "error") {
			c.t.Fatalf("%v %s", err, m.Data)
		}
		c.expect("d", 2)
		c.publish("s.c")
		c.ack(0, "")
		c.expect("d", 1)
		c.expect("d", 2)
		c.info()
		c.next("x", "1")
		c.expect("x", 1)
	}},
	{"validation", "", func(c *talk) {
		for _, cfg := range []string{
			`"ack_policy":"explicit","max_deliver":1,"backoff":[1,2]`, `"deliver_subject":"d.*"`, `"deliver_subject":"s.d"`,
			`"deliver_subject":"d","max_waiting":5`, `"deliver_subject":"d","max_ack_pending":5`,
			`"deliver_subject":"d","idle_heartbeat":1`, `"deliver_subject":"d","flow_control":true`, `"flow_control":true`,
			`"idle_heartbeat":1000000000`, `"rate_limit_bps":1`, `"max_expires":1`, `"deliver_policy":"last","opt_start_seq":1`,
			`"deliver_policy":"by_start_sequence"`, `"deliver_policy":"by_start_time"`, `"deliver_policy":"last_per_subject"`,
			`"filter_subject":"a","filter_subjects":["b"]`, `"filter_subjects":[""]`, `"filter_subjects":["s.*","s.a"]`,
			`"filter_subject":"a..b"`, `"sample_freq":"x"`, `"num_replicas":3`, `"priority_groups":["g"]`,
			`"priority_policy":"overflow"`, `"priority_policy":"overflow","priority_groups":["a b"]`,
			`"priority_policy":"overflow","priority_groups":[""]`, `"priority_timeout":5`, `"ack_wait":-1`, `"backoff":[-1]`,
			`"durable_name":"other"`, `"ack_policy":"sometimes"`, `"deliver_policy":1`, `"direct":true`,
			`"filter_subject":"other.subject"`, `"max_deliver":-5,"max_waiting":-1,"max_ack_pending":-9,"max_batch":-1`,
		} {
			c.create(`{` + cfg)
			_, _ = c.request("$JS.API.CONSUMER.DELETE.S.C", nil)
		}
	}},
	{"reset", "", func(c *talk) {
		c.publish("s.a", "s.b", "s.c")
		c.create(`{"durable_name":"C","ack_policy":"explicit"}`)
		c.next("x", "3")
		c.expect("x", 3)
		c.ack(0, "")
		c.api("CONSUMER.RESET.S.C", ``)
		c.info()
		c.next("x", "1")
		c.expect("x", 1)
		c.api("CONSUMER.RESET.S.C", `{"seq":1}`)
		c.next("x", "1")
		c.expect("x", 1)
		c.info()
	}},
}

// TestConsumerTranscripts has conversations about consumers, and compares what
// is said to what nats-server says. They are about when something happens as well:
// in a bubble no more time passes than they let pass.
func TestConsumerTranscripts(t *testing.T) {
	for _, tr := range transcripts {
		run := func(t *testing.T) {
			var connect nats.Option
			if *recordFrom == "" {
				// A time to which those in the conversations are as they are to now.
				time.Sleep(time.Until(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)))
				connect = nats.InProcessServer(startNodeOn(t, t.TempDir(), broker.Options{NoListen: true}).srv)
			}
			nc, err := nats.Connect(*recordFrom, connect)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			c := &talk{t: t, nc: nc, in: map[string]*nats.Subscription{}, adv: make(chan *nats.Msg, 100)}
			for _, s := range []string{"MAX_DELIVERIES", "MSG_TERMINATED", "MSG_NAKED"} {
				if _, err := nc.ChanSubscribe("$JS.EVENT.ADVISORY.CONSUMER."+s+".>", c.adv); err != nil {
					t.Fatal(err)
				}
			}
			defer func() {
				m, err := c.request("$JS.API.STREAM.DELETE.S", nil)
				if err != nil || strings.Contains(string(m.Data), `"error"`) {
					t.Errorf("deleting the stream: %v %s", err, m.Data)
				}
				if *recordFrom != "" {
					time.Sleep(time.Second) // nats-server removes files after answering
				}
			}()
			m, err := c.request("$JS.API.STREAM.CREATE.S", []byte(`{"name":"S","subjects":["s.>"]`+tr.stream+`}`))
			if err != nil || strings.Contains(string(m.Data), `"error"`) {
				t.Fatalf("creating the stream: %v %s", err, m.Data)
			}
			tr.run(c)
			file := filepath.Join("testdata", "consumer", tr.name+".txt")
			got := c.log.String()
			if *recordFrom != "" {
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			g, w := strings.Split(got, "\n"), strings.Split(string(want), "\n")
			for i := range max(len(g), len(w)) {
				switch {
				case i >= len(g):
					t.Errorf("line %d missing: %s", i+1, w[i])
				case i >= len(w):
					t.Errorf("line %d too many: %s", i+1, g[i])
				case g[i] != w[i]:
					t.Errorf("line %d is\n  %s, nats-server says\n  %s", i+1, g[i], w[i])
				}
			}
		}
		t.Run(tr.name, func(t *testing.T) {
			if *recordFrom != "" {
				run(t)
			} else {
				synctest.Test(t, run)
			}
		})
	}
}

// TestAcknowledgedSurvivesCrash has messages acknowledged for good, ends the
// node without a checkpoint, and looks for what comes again.
func TestAcknowledgedSurvivesCrash(t *testing.T) {
	for _, retention := range []jetstream.RetentionPolicy{jetstream.LimitsPolicy, jetstream.WorkQueuePolicy, jetstream.InterestPolicy} {
		t.Run(retention.String(), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			n := startNode(t, dir)
			_, js := n.connect()
			ctx := testContext(t)
			s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Retention: retention})
			if _, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{
				Durable: "C", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 300 * time.Millisecond,
			}); err != nil {
				t.Fatal(err)
			}
			const total = 60
			publishN(t, js, "s", total)
			done := map[string]int{} // the round in which it was acknowledged
			for round := 0; len(done) < total; round++ {
				if round > 20 {
					t.Fatalf("%d of %d after %d rounds", len(done), total, round)
				}
				c, err := js.Consumer(ctx, "S", "C")
				if err != nil {
					t.Fatal(err)
				}
				batch, err := c.Fetch(20, jetstream.FetchMaxWait(2*time.Second))
				if err != nil {
					t.Fatal(err)
				}
				i := 0
				for m := range batch.Messages() {
					if r, ok := done[string(m.Data())]; ok {
						if r == round { // it was on its way again before it was acknowledged
							continue
						}
						t.Fatalf("round %d: %s came again after its acknowledgement", round, m.Data())
					}
					// Two of three are acknowledged, one of them is told so.
					switch i++; i % 3 {
					case 0:
						if err := m.DoubleAck(ctx); err != nil {
							t.Fatal(err)
						}
						done[string(m.Data())] = round
					case 1:
						if err := m.TermWithReason("not today"); err != nil {
							t.Fatal(err)
						}
						if err := m.DoubleAck(ctx); err == nil {
							t.Fatal("acknowledged twice")
						}
						// The next answered acknowledgement makes it durable, too.
						r, err := js.Conn().Request(m.Reply(), []byte("+ACK"), patience)
						if err != nil || len(r.Data) != 0 {
							t.Fatalf("acknowledging again: %v", err)
						}
						done[string(m.Data())] = round
					}
				}
				n.crash()
				n = startNode(t, dir)
				_, js = n.connect()
			}
			st, err := js.Stream(ctx, "S")
			if err != nil {
				t.Fatal(err)
			}
			info, err := st.Info(ctx)
			if err != nil {
				t.Fatal(err)
			}
			want := uint64(total)
			if retention != jetstream.LimitsPolicy {
				want = 0
			}
			if info.State.Msgs != want {
				t.Errorf("stream holds %d messages, want %d", info.State.Msgs, want)
			}
			c, err := js.Consumer(ctx, "S", "C")
			if err != nil {
				t.Fatal(err)
			}
			ci := c.CachedInfo()
			if ci.AckFloor.Stream != total || ci.NumAckPending != 0 || ci.NumPending != 0 {
				t.Errorf("consumer: %+v", ci)
			}
		})
	}
}

// TestClientsOfOldAPI uses the subscriptions of nats.go's first JetStream API.
func TestClientsOfOldAPI(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.*"}})
	old, err := nc.JetStream(nats.MaxWait(patience))
	if err != nil {
		t.Fatal(err)
	}
	const total = 200
	got := make(chan *nats.Msg, 2*total)
	for range 2 {
		sub, err := old.QueueSubscribe("s.*", "workers", func(m *nats.Msg) {
			if err := m.Ack(); err != nil {
				t.Error(err)
			}
			got <- m
		}, nats.Durable("D"), nats.ManualAck(), nats.AckExplicit())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = sub.Unsubscribe() }()
	}
	bound, err := old.SubscribeSync("s.a", nats.Durable("E"), nats.AckAll(), nats.EnableFlowControl(), nats.IdleHeartbeat(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := old.SubscribeSync("s.a", nats.Durable("E"), nats.AckAll(), nats.EnableFlowControl(), nats.IdleHeartbeat(time.Second)); err == nil {
		t.Error("two subscribers of one push consumer")
	}
	publishN(t, js, "s.a", total)
	seen := map[string]bool{}
	for range total {
		select {
		case m := <-got:
			if seen[string(m.Data)] {
				t.Fatalf("%s came to both", m.Data)
			}
			seen[string(m.Data)] = true
		case <-time.After(patience):
			t.Fatalf("%d messages", len(seen))
		}
	}
	for i := range total {
		m, err := bound.NextMsg(patience)
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if i == total-1 {
			if err := m.AckSync(); err != nil {
				t.Fatal(err)
			}
		}
	}
	ci, err := bound.ConsumerInfo()
	if err != nil || ci.AckFloor.Stream != total || ci.NumAckPending != 0 || !ci.PushBound {
		t.Errorf("%+v %v", ci, err)
	}
	pull, err := old.PullSubscribe("s.*", "P")
	if err != nil {
		t.Fatal(err)
	}
	msgs, err := pull.Fetch(50, nats.MaxWait(patience))
	if err != nil || len(msgs) != 50 {
		t.Fatalf("fetched %d: %v", len(msgs), err)
	}
	for i, m := range msgs {
		if md, err := m.Metadata(); err != nil || md.Sequence.Stream != uint64(i+1) || md.NumPending != uint64(total-i-1) {
			t.Fatalf("message %d: %+v %v", i, md, err)
		}
	}
}
