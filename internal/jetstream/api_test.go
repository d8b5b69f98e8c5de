package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/jetstream/api"
)

// answer is what the API test looks at in a response.
type answer struct {
	Type  string     `json:"type"`
	Error *api.Error `json:"error"`
}

func ask(t *testing.T, nc *nats.Conn, subject, body string) (answer, []byte) {
	t.Helper()
	m, err := nc.Request("$JS.API."+subject, []byte(body), patience)
	if err != nil {
		t.Fatalf("%s: %v", subject, err)
	}
	var a answer
	if err := json.Unmarshal(m.Data, &a); err != nil {
		t.Fatalf("%s answers %q: %v", subject, m.Data, err)
	}
	return a, m.Data
}

func TestAPIErrors(t *testing.T) {
	n := startNode(t, t.TempDir(), func(o *Options) { o.MaxStore = 1 << 20 })
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, MaxConsumers: 1, DenyDelete: true, DenyPurge: true})
	createStream(t, js, jetstream.StreamConfig{Name: "T", Subjects: []string{"t"}, MaxBytes: 1 << 19})
	publishN(t, js, "t", 3)
	stream := func(more string) string { return `{"name":"X","subjects":["x"]` + more + `}` }
	consumer := func(cfg string) string { return `{"stream_name":"T","config":{` + cfg + `}}` }
	for _, tc := range []struct {
		subject, body string
		code          uint16 // 0: success
		text          string // part of the description
	}{
		{"STREAM.CREATE.X", "", 10025, "invalid JSON: "},
		{"STREAM.CREATE.X", "{", 10025, "invalid JSON: "},
		{"STREAM.CREATE.X", `{"name":"Y"}`, 10056, "stream name in subject does not match request"},
		{"STREAM.CREATE.X.Y", `{"name":"X.Y"}`, 10003, "bad request"},
		{"STREAM.CREATE.X", stream(`,"retention":"some"`), 10025, "invalid JSON: "},
		{"STREAM.CREATE.X", `{"name":"X","subjects":["s.a"]}`, 10065, "subjects overlap with an existing stream"},
		{"STREAM.CREATE.X", `{"name":"X","subjects":["x..a"]}`, 10052, "invalid subject"},
		{"STREAM.CREATE.X", `{"name":"X","subjects":["x.*","x.a"]}`, 10052, `subject "x.*" overlaps with "x.a"`},
		{"STREAM.CREATE.X", `{"name":"X","subjects":["x","x"]}`, 10052, "duplicate subjects detected"},
		{"STREAM.CREATE.X", `{"name":"X","subjects":["$JS.API.x"]}`, 10052, "subjects that overlap with jetstream api require no-ack to be true"},
		{"STREAM.CREATE.X", `{"name":"X","subjects":[">"]}`, 10052, "capturing all subjects requires no-ack to be true"},
		{"STREAM.CREATE.X", stream(`,"num_replicas":3`), 10074, "replicas > 1 not supported in non-clustered mode"},
		{"STREAM.CREATE.X", stream(`,"num_replicas":-1`), 10133, "replicas count cannot be negative"},
		{"STREAM.CREATE.X", stream(`,"max_age":1`), 10052, "max age needs to be >= 100ms"},
		{"STREAM.CREATE.X", stream(`,"max_age":1000000000,"duplicate_window":2000000000`), 10052, "duplicates window can not be larger then max age"},
		{"STREAM.CREATE.X", stream(`,"first_seq":9223372036854775809`), 10052, "first sequence must not be above 9223372036854775808"},
		{"STREAM.CREATE.X", stream(`,"discard_new_per_subject":true`), 10052, "discard new per subject requires discard new policy to be set"},
		{"STREAM.CREATE.X", stream(`,"deny_purge":true,"allow_rollup_hdrs":true`), 10052, "roll-ups require the purge permission"},
		{"STREAM.CREATE.X", stream(`,"max_bytes":1000000`), 10047, "insufficient storage resources available"},
		{"STREAM.CREATE.X", stream(`,"mirror":{"name":"S"}`), 10003, "a mirror is not supported"},
		{"STREAM.CREATE.T", `{"name":"T","subjects":["u"]}`, 10058, "stream name already in use with a different configuration"},
		{"STREAM.CREATE.T", `{"name":"T","subjects":["t"],"max_bytes":524288}`, 0, ""},
		{"STREAM.UPDATE.X", stream(""), 10059, "stream not found"},
		{"STREAM.UPDATE.T", `{"name":"T","subjects":["t"],"storage":"memory"}`, 10052, "can not change storage type"},
		{"STREAM.UPDATE.T", `{"name":"T","subjects":["s.x"]}`, 10065, "subjects overlap"},
		{"STREAM.UPDATE.S", `{"name":"S","subjects":["s.>"]}`, 10052, "can not cancel deny message deletes"},
		{"STREAM.INFO.X", "", 10059, "stream not found"},
		{"STREAM.INFO", "", 10003, "bad request"},
		{"STREAM.DELETE.X", "", 10059, "stream not found"},
		{"STREAM.DELETE.T", "x", 10038, "expected an empty request payload"},
		{"STREAM.PURGE.S", "", 10110, "stream purge not permitted"},
		{"STREAM.PURGE.T", `{"seq":2,"keep":1}`, 10003, "bad request"},
		{"STREAM.MSG.DELETE.S", `{"seq":1}`, 10057, "message delete not permitted"},
		{"STREAM.MSG.DELETE.T", `{"seq":9}`, 10043, "sequence 9 not found"},
		{"STREAM.MSG.GET.T", ``, 10003, "bad request"},
		{"STREAM.MSG.GET.T", `{"seq":9}`, 10037, "no message found"},
		{"STREAM.MSG.GET.T", `{"last_by_subj":"zzz"}`, 10037, "no message found"},
		{"STREAM.MSG.GET.T", `{"seq":1,"last_by_subj":"t"}`, 10003, "bad request"},
		{"STREAM.MSG.GET.T", `{"last_by_subj":"t"}`, 0, ""},
		{"STREAM.SNAPSHOT.T", `{"deliver_subject":"x"}`, 10003, "stream snapshot is not supported"},
		{"STREAM.LEADER.STEPDOWN.T", "", 10010, "JetStream clustering support required"},
		{"STREAM.WHATEVER.T", "", 10003, "is not supported"},
		{"NOTHING", "", 10003, "is not supported"},
		{"CONSUMER.CREATE.X", `{"stream_name":"X","config":{}}`, 10059, "stream not found"},
		{"CONSUMER.CREATE.T", `{"stream_name":"S","config":{}}`, 10056, "stream name in subject does not match request"},
		{"CONSUMER.CREATE.T", consumer(`"durable_name":"D"`), 10020, "consumer expected to be ephemeral but a durable name was set in request"},
		{"CONSUMER.CREATE.T.D", consumer(`"durable_name":"E"`), 10017, "does not match durable name"},
		{"CONSUMER.CREATE.T.D.x", consumer(`"filter_subject":"t"`), 10131, "Consumer create request did not match filtered subject from create subject"},
		{"CONSUMER.DURABLE.CREATE.T.D", consumer(``), 10018, "a durable name was not set"},
		{"CONSUMER.CREATE.T.D", `{"stream_name":"T","action":"update","config":{"name":"D"}}`, 10149, "consumer does not exist"},
		{"CONSUMER.CREATE.T.D.t", consumer(`"durable_name":"D","ack_policy":"explicit","filter_subject":"t"`), 0, ""},
		{"CONSUMER.CREATE.T.D", `{"stream_name":"T","action":"create","config":{"durable_name":"D","ack_policy":"explicit","max_deliver":7}}`, 10148, "consumer already exists"},
		{"CONSUMER.INFO.T.D", "", 0, ""},
		{"CONSUMER.INFO.T.Z", "", 10014, "consumer not found"},
		{"CONSUMER.DELETE.T.Z", "", 10014, "consumer not found"},
		{"CONSUMER.NAMES.Z", "", 10059, "stream not found"},
		{"CONSUMER.DELETE.T.D", "", 0, ""},
		{"STREAM.DELETE.T", "", 0, ""},
	} {
		a, raw := ask(t, nc, tc.subject, tc.body)
		var code uint16
		var text string
		if a.Error != nil {
			code, text = a.Error.ErrCode, a.Error.Description
		}
		if code != tc.code || !strings.Contains(text, tc.text) {
			t.Errorf("%s %s: answered %s, want %d %q", tc.subject, tc.body, raw, tc.code, tc.text)
		}
		if !strings.HasPrefix(a.Type, api.TypePrefix) {
			t.Errorf("%s: type %q", tc.subject, a.Type)
		}
	}
}

// A pull request to no consumer, and a direct get where it is not allowed, are
// answered like requests that nobody listens to.
func TestNobodyListens(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	for _, subject := range []string{"$JS.API.CONSUMER.MSG.NEXT.S.C", "$JS.API.CONSUMER.MSG.NEXT.X.C", "$JS.API.DIRECT.GET.S.s", "$JS.API.DIRECT.GET.X.s"} {
		if _, err := nc.Request(subject, nil, patience); err != nats.ErrNoResponders {
			t.Errorf("%s: %v", subject, err)
		}
	}
}

func TestDirectGet(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.*"}, AllowDirect: true})
	for i := range 10 {
		m := nats.NewMsg(fmt.Sprintf("s.%d", i%3))
		m.Data = fmt.Append(nil, i)
		m.Header.Set("K", "v")
		if _, err := js.PublishMsg(testContext(t), m); err != nil {
			t.Fatal(err)
		}
	}
	sub := must(nc.SubscribeSync(nats.NewInbox()))
	get := func(subject, body string) []string {
		t.Helper()
		if err := nc.PublishRequest("$JS.API.DIRECT.GET.S"+subject, sub.Subject, []byte(body)); err != nil {
			t.Fatal(err)
		}
		var list []string
		for {
			m, err := sub.NextMsg(patience)
			if err != nil {
				t.Fatal(err)
			}
			if status := m.Header.Get("Status"); status != "" {
				return append(list, strings.TrimSpace(status+" "+m.Header.Get("Description")+" "+m.Header.Get("Nats-Num-Pending")))
			}
			if m.Header.Get("Nats-Stream") != "S" || m.Header.Get("Nats-Time-Stamp") == "" || m.Header.Get("K") != "v" {
				t.Errorf("header %v", m.Header)
			}
			list = append(list, m.Header.Get("Nats-Sequence")+" "+m.Header.Get("Nats-Subject")+" "+string(m.Data))
			if !strings.Contains(body, "batch") && !strings.Contains(body, "multi") {
				return list
			}
		}
	}
	for _, tc := range []struct {
		subject, body, want string
	}{
		{"", `{"seq":4}`, "4 s.0 3"},
		{".s.1", "", "8 s.1 7"},
		{"", `{"last_by_subj":"s.2"}`, "9 s.2 8"},
		{"", `{"seq":5,"next_by_subj":"s.0"}`, "7 s.0 6"},
		{"", `{"seq":99}`, "404 Message Not Found"},
		{".zzz", "", "404 Message Not Found"},
		{"", "", "408 Empty Request"},
		{"", "{", "408 Malformed Request"},
		{"", `{"seq":1,"last_by_subj":"s.1"}`, "408 Bad Request"},
		{"", `{"seq":8,"batch":2}`, "8 s.1 7|9 s.2 8|204 EOB 1"},
		{"", `{"seq":1,"next_by_subj":"s.1","batch":9}`, "2 s.1 1|5 s.1 4|8 s.1 7|204 EOB 0"},
		{"", `{"multi_last":["s.0","s.1"]}`, "8 s.1 7|10 s.0 9|204 EOB 0"},
		{"", `{"multi_last":["s.*"],"up_to_seq":4}`, "2 s.1 1|3 s.2 2|4 s.0 3|204 EOB 0"},
		{"", `{"multi_last":["zzz"]}`, "404 No Results"},
	} {
		if got := strings.Join(get(tc.subject, tc.body), "|"); got != tc.want {
			t.Errorf("%s %s: %q, want %q", tc.subject, tc.body, got, tc.want)
		}
	}
}

func TestInfoAndPaging(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.*"}})
	ctx := testContext(t)
	for i := range 6 {
		if _, err := js.Publish(ctx, fmt.Sprintf("s.%d", i%3), nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, seq := range []uint64{2, 4} {
		if err := s.DeleteMsg(ctx, seq); err != nil {
			t.Fatal(err)
		}
	}
	info := must(s.Info(ctx, jetstream.WithSubjectFilter("s.>"), jetstream.WithDeletedDetails(true)))
	if st := info.State; fmt.Sprint(st.Deleted) != "[2 4]" || st.NumDeleted != 2 || fmt.Sprint(st.Subjects) != "map[s.0:1 s.1:1 s.2:2]" || st.NumSubjects != 3 {
		t.Errorf("%+v", st)
	}
	// The newest, too, which leaves the last sequence where it is.
	if err := s.DeleteMsg(ctx, 6); err != nil {
		t.Fatal(err)
	}
	if st := must(s.Info(ctx, jetstream.WithDeletedDetails(true))).State; fmt.Sprint(st.Deleted) != "[2 4 6]" || st.NumDeleted != 3 || st.LastSeq != 6 {
		t.Errorf("%+v", st)
	}
	for i := range 20 {
		createStream(t, js, jetstream.StreamConfig{Name: fmt.Sprintf("P%03d", i), Subjects: []string{fmt.Sprintf("p.%d", i)}, Storage: jetstream.MemoryStorage})
	}
	var names struct {
		Total, Offset, Limit int
		Streams              []string
	}
	_, raw := ask(t, nc, "STREAM.NAMES", `{"subject":"p.*","offset":1}`)
	if err := json.Unmarshal(raw, &names); err != nil || names.Streams[0] != "P001" || names.Offset != 1 || names.Limit != api.NamesLimit || names.Total != len(names.Streams)+1 {
		t.Errorf("%s", raw)
	}
	count := 0
	for range js.ListStreams(ctx).Info() {
		count++
	}
	if count != names.Total+1 {
		t.Errorf("%d streams listed, want %d", count, names.Total+1)
	}
	acc := must(js.AccountInfo(ctx))
	if acc.Streams != count || acc.Store == 0 || acc.API.Total == 0 {
		t.Errorf("account %+v", acc)
	}
}

func TestServerLimits(t *testing.T) {
	n := startNode(t, t.TempDir(), func(o *Options) { o.MaxMemory = 1000 })
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "M", Subjects: []string{"m"}, Storage: jetstream.MemoryStorage})
	ctx := testContext(t)
	var err error
	stored := 0
	for err == nil && stored < 20 {
		if _, err = js.Publish(ctx, "m", make([]byte, 100)); err == nil {
			stored++
		}
	}
	var apiErr *jetstream.APIError
	if !errors.As(err, &apiErr) || apiErr.ErrorCode != 10023 || stored < 5 || stored > 10 {
		t.Errorf("%d messages stored, then %v", stored, err)
	}
	if _, raw := ask(t, nc, "STREAM.PURGE.M", ""); !strings.Contains(string(raw), fmt.Sprintf(`"purged":%d`, stored)) {
		t.Errorf("purge: %s", raw)
	}
	if _, err := js.Publish(ctx, "m", make([]byte, 100)); err != nil {
		t.Errorf("after the purge: %v", err)
	}
	// The limits may change while it runs: what is stored stays, in any case.
	for limit, ok := range map[int64]bool{10: false, 100_000: true, 0: true} {
		n.e.SetLimits(limit, -1)
		if _, err := js.Publish(ctx, "m", make([]byte, 100)); (err == nil) != ok {
			t.Errorf("with %d octets permitted: %v", limit, err)
		}
		acc, err := js.AccountInfo(ctx)
		if err != nil || limit > 0 && acc.Limits.MaxMemory != limit || limit == 0 && acc.Limits.MaxMemory != -1 || acc.Limits.MaxStore != -1 {
			t.Errorf("with %d octets permitted: %+v, %v", limit, acc, err)
		}
	}
}

// Messages that come back into a stream from inside are stored, and block
// nothing: here a consumer delivers into the subjects of its own stream.
func TestDeliveryIntoAStream(t *testing.T) {
	n := startNode(t, t.TempDir())
	nc, js := n.connect()
	a := createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	b := createStream(t, js, jetstream.StreamConfig{Name: "B", Subjects: []string{"b.>"}})
	publishN(t, js, "a", 20)
	old := must(nc.JetStream(nats.MaxWait(patience)))
	if _, err := old.AddConsumer("A", &nats.ConsumerConfig{Durable: "P", DeliverSubject: "b.x", AckPolicy: nats.AckNonePolicy}); err != nil {
		t.Fatal(err)
	}
	stored := must2(n.e.Stream("B"))
	grown := make(chan struct{}, 1)
	defer stored.Watch(func() {
		select {
		case grown <- struct{}{}:
		default:
		}
	})()
	for stored.DurableState().Msgs < 20 {
		select {
		case <-grown:
		case <-time.After(patience):
			t.Fatalf("B holds %+v", stored.DurableState())
		}
	}
	if st := must(b.Info(testContext(t))).State; st.Msgs != 20 {
		t.Errorf("B holds %+v", st)
	}
	if st := must(a.Info(testContext(t))).State; st.Msgs != 20 {
		t.Errorf("A holds %+v", st)
	}
}

func TestRepublish(t *testing.T) {
	for _, kind := range []jetstream.StorageType{jetstream.FileStorage, jetstream.MemoryStorage} {
		t.Run(kind.String(), func(t *testing.T) {
			n := startNode(t, t.TempDir())
			nc, js := n.connect()
			createStream(t, js, jetstream.StreamConfig{
				Name: "S", Subjects: []string{"s.*"}, Storage: kind,
				RePublish: &jetstream.RePublish{Source: "s.*", Destination: "again.{{wildcard(1)}}"},
			})
			sub := must(nc.SubscribeSync("again.>"))
			if err := nc.Flush(); err != nil {
				t.Fatal(err)
			}
			publishN(t, js, "s.a", 2)
			for i := range 2 {
				m, err := sub.NextMsg(patience)
				if err != nil {
					t.Fatal(err)
				}
				if m.Subject != "again.a" || string(m.Data) != fmt.Sprint(i) || m.Header.Get("Nats-Sequence") != fmt.Sprint(i+1) ||
					m.Header.Get("Nats-Last-Sequence") != fmt.Sprint(i) || m.Header.Get("Nats-Subject") != "s.a" {
					t.Errorf("message %d: %+v", i, m)
				}
			}
		})
	}
	n := startNode(t, t.TempDir())
	nc, _ := n.connect()
	a, _ := ask(t, nc, "STREAM.CREATE.S", `{"name":"S","subjects":["s.*"],"republish":{"dest":"s.>"}}`)
	if a.Error == nil || !strings.Contains(a.Error.Description, "forms a cycle") {
		t.Errorf("a cycle: %+v", a)
	}
}

func TestAtomicBatch(t *testing.T) {
	for _, kind := range []jetstream.StorageType{jetstream.FileStorage, jetstream.MemoryStorage} {
		t.Run(kind.String(), func(t *testing.T) {
			n := startNode(t, t.TempDir())
			nc, _ := n.connect()
			cfg := fmt.Sprintf(`{"name":"S","subjects":["s"],"storage":%q,"allow_atomic":true}`, strings.ToLower(kind.String()))
			if a, raw := ask(t, nc, "STREAM.CREATE.S", cfg); a.Error != nil {
				t.Fatalf("%s", raw)
			}
			send := func(id string, seq int, commit string) string {
				m := nats.NewMsg("s")
				m.Header.Set("Nats-Batch-Id", id)
				m.Header.Set("Nats-Batch-Sequence", fmt.Sprint(seq))
				if commit != "" {
					m.Header.Set("Nats-Batch-Commit", commit)
				}
				r, err := nc.RequestMsg(m, patience)
				if err != nil {
					t.Fatal(err)
				}
				return string(r.Data)
			}
			stored := func(want uint64) {
				t.Helper()
				if st := must2(n.e.Stream("S")).DurableState(); st.Msgs != want {
					t.Errorf("%d messages stored, want %d", st.Msgs, want)
				}
			}
			for seq := 1; seq <= 2; seq++ {
				if got := send("one", seq, ""); got != "" {
					t.Errorf("message %d: %s", seq, got)
				}
			}
			stored(0)
			if got := send("one", 3, "1"); got != `{"stream":"S","seq":3,"batch":"one","count":3}` {
				t.Errorf("commit: %s", got)
			}
			stored(3)
			send("two", 1, "")
			if got := send("two", 2, "eob"); got != `{"stream":"S","seq":4,"batch":"two","count":1}` {
				t.Errorf("end of batch: %s", got)
			}
			for _, tc := range []struct {
				id, commit string
				seq        int
				code       string
			}{
				{"three", "", 2, "10176"},
				{"three", "no", 1, "10200"},
				{"three", "1", 1001, "10176"},
				{strings.Repeat("x", 65), "", 1, "10179"},
			} {
				if got := send(tc.id, tc.seq, tc.commit); !strings.Contains(got, `"err_code":`+tc.code) {
					t.Errorf("%+v: %s", tc, got)
				}
			}
			stored(4)
		})
	}
}
