package consumer

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"petiole/internal/jetstream/api"
)

func TestDefaults(t *testing.T) {
	st := &api.StreamConfig{Name: "S"}
	var c api.ConsumerConfig
	c.AckPolicy = api.AckExplicit
	if err := Defaults(&c, st, Limits{}, false); err != nil {
		t.Fatal(err)
	}
	want := api.ConsumerConfig{
		AckPolicy: api.AckExplicit, AckWait: 30 * time.Second, MaxDeliver: -1, MaxWaiting: 512,
		MaxAckPending: 1000, InactiveThreshold: 5 * time.Second,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("%+v", c)
	}
	c = api.ConsumerConfig{DeliverSubject: "d", Durable: "D", MaxDeliver: -7}
	if err := Defaults(&c, st, Limits{}, false); err != nil {
		t.Fatal(err)
	}
	if want := (api.ConsumerConfig{DeliverSubject: "d", Durable: "D", MaxDeliver: -1}); !reflect.DeepEqual(c, want) {
		t.Errorf("%+v", c)
	}
	c.MaxDeliver = -7
	if err := Defaults(&c, st, Limits{}, true); err == nil || err.ErrCode != 10157 {
		t.Errorf("pedantic: %v", err)
	}
	st.ConsumerLimits = api.ConsumerLimits{InactiveThreshold: time.Hour, MaxAckPending: 7}
	c = api.ConsumerConfig{AckPolicy: api.AckAll, BackOff: []time.Duration{time.Second}}
	if err := Defaults(&c, st, Limits{MaxRequestBatch: 9}, false); err != nil {
		t.Fatal(err)
	}
	if c.MaxAckPending != 7 || c.InactiveThreshold != time.Hour || c.AckWait != time.Second || c.MaxRequestBatch != 9 {
		t.Errorf("%+v", c)
	}
}

func TestValidate(t *testing.T) {
	now := time.Now()
	long := strings.Repeat("x", 5000)
	limits := api.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Replicas: 1}
	wq := limits
	wq.Retention = api.WorkQueuePolicy
	bounded := limits
	bounded.ConsumerLimits = api.ConsumerLimits{InactiveThreshold: time.Minute, MaxAckPending: 7}
	type C = api.ConsumerConfig
	tests := []struct {
		name   string
		cfg    C
		stream *api.StreamConfig
		others []Other
		code   uint16
		text   string
	}{
		{"plain", C{}, nil, nil, 0, ""},
		{"push", C{DeliverSubject: "d", Heartbeat: time.Second, FlowControl: true, RateLimit: 8}, nil, nil, 0, ""},
		{"name", C{Name: "a.b"}, nil, nil, 10052, "consumer name can not contain '.', '*', '>', '\\', '/'"},
		{"durable", C{Durable: "a b"}, nil, nil, 10052, "consumer durable name can not contain '.', '*', '>', '\\', '/'"},
		{"long", C{Durable: long[:300]}, nil, nil, 10102, "consumer name is too long, maximum allowed is 255"},
		{"mismatch", C{Durable: "a", Name: "b"}, nil, nil, 10132, "Consumer Durable and Name have to be equal if both are provided"},
		{"description", C{Description: long}, nil, nil, 10107, "consumer description is too long, maximum allowed is 4096"},
		{"replicas", C{Replicas: 3}, nil, nil, 10074, "replicas > 1 not supported in non-clustered mode"},
		{"negative replicas", C{Replicas: -1}, nil, nil, 10133, "replicas count cannot be negative"},
		{"negative backoff", C{BackOff: []time.Duration{-1}}, nil, nil, 10184, "consumer backoff needs to be positive"},
		{"negative wait", C{AckWait: -1}, nil, nil, 10183, "consumer ack wait needs to be positive"},
		{"backoff", C{BackOff: []time.Duration{1, 2, 3}, MaxDeliver: 2}, nil, nil, 10116, "max deliver is required to be > length of backoff values"},
		{"wildcard", C{DeliverSubject: "d.*"}, nil, nil, 10079, "consumer deliver subject has wildcards"},
		{"bad subject", C{DeliverSubject: "d..e"}, nil, nil, 10112, "invalid push consumer deliver subject"},
		{"cycle", C{DeliverSubject: "s.d"}, nil, nil, 10081, "consumer deliver subject forms a cycle"},
		{"max waiting", C{DeliverSubject: "d", MaxWaiting: 1}, nil, nil, 10080, "consumer in push mode can not set max waiting"},
		{"max pending", C{DeliverSubject: "d", MaxAckPending: 1}, nil, nil, 10082, "consumer requires ack policy for max ack pending"},
		{"heartbeat", C{DeliverSubject: "d", Heartbeat: time.Millisecond}, nil, nil, 10083, "consumer idle heartbeat needs to be >= 100ms"},
		{"no heartbeat", C{DeliverSubject: "d", FlowControl: true}, nil, nil, 10108, "consumer with flow control also needs heartbeats"},
		{"pull heartbeat", C{Heartbeat: time.Second}, nil, nil, 10088, "consumer idle heartbeat requires a push based consumer"},
		{"pull flow control", C{FlowControl: true}, nil, nil, 10089, "consumer flow control requires a push based consumer"},
		{"pull rate", C{RateLimit: 1}, nil, nil, 10086, "consumer in pull mode can not have rate limit set"},
		{"short expiry", C{MaxRequestExpires: 1}, nil, nil, 10115, "consumer max request expires needs to be >= 1ms"},
		{"stream's pending", C{AckPolicy: api.AckExplicit, MaxAckPending: 8}, &bounded, nil, 10121, "consumer max ack pending exceeds system limit of 7"},
		{"stream's threshold", C{InactiveThreshold: time.Hour}, &bounded, nil, 10153, "consumer inactive threshold exceeds system limit of 1m0s"},
		{"direct", C{Direct: true}, nil, nil, 10090, "consumer direct requires a push based consumer"},
		{"two filters", C{FilterSubject: "a", FilterSubjects: []string{"b"}}, nil, nil, 10136, "consumer cannot have both FilterSubject and FilterSubjects specified"},
		{"empty filter", C{FilterSubjects: []string{""}}, nil, nil, 10139, "consumer filter in FilterSubjects cannot be empty"},
		{"bad filter", C{FilterSubject: "a..b"}, nil, nil, 10052, "invalid subject"},
		{"overlap", C{FilterSubjects: []string{"s.*", "s.a"}}, nil, nil, 10138, "consumer subject filters cannot overlap"},
		{"all with sequence", C{OptStartSeq: 1}, nil, nil, 10094, "consumer delivery policy is deliver all, but optional start sequence is also set"},
		{"new with time", C{DeliverPolicy: api.DeliverNew, OptStartTime: &now}, nil, nil, 10094, "consumer delivery policy is deliver new, but optional start time is also set"},
		{"no sequence", C{DeliverPolicy: api.DeliverByStartSequence}, nil, nil, 10094, "consumer delivery policy is deliver by start sequence, but optional start sequence is not set"},
		{"no time", C{DeliverPolicy: api.DeliverByStartTime}, nil, nil, 10094, "consumer delivery policy is deliver by start time, but optional start time is not set"},
		{"no filter", C{DeliverPolicy: api.DeliverLastPerSubject}, nil, nil, 10094, "consumer delivery policy is deliver last per subject, but optional filter subject is not set"},
		{"sampling", C{SampleFrequency: "often"}, nil, nil, 10095, "failed to parse consumer sampling configuration: strconv.Atoi: parsing \"often\": invalid syntax"},
		{"metadata", C{Metadata: map[string]string{"k": strings.Repeat("v", 128*1024)}}, nil, nil, 10135, "consumer metadata exceeds maximum size of 128KB"},
		{"group without policy", C{PriorityGroups: []string{"g"}}, nil, nil, 10196, "consumer can not have priority groups when policy is none"},
		{"policy without group", C{PriorityPolicy: api.PriorityOverflow}, nil, nil, 10159, "Setting PriorityPolicy requires at least one PriorityGroup to be set"},
		{"bad group", C{PriorityPolicy: api.PriorityOverflow, PriorityGroups: []string{"a b"}}, nil, nil, 10162, "Valid priority group name must match A-Z, a-z, 0-9, -_/=)+ and may not exceed 16 characters"},
		{"push group", C{DeliverSubject: "d", PriorityPolicy: api.PriorityOverflow, PriorityGroups: []string{"g"}}, nil, nil, 10178, "priority groups can not be used with push consumers"},
		{"queue", C{AckPolicy: api.AckExplicit, FilterSubject: "s.a"}, &wq, []Other{{"o", []string{"s.b"}}}, 0, ""},
		{"queue, no ack", C{AckPolicy: api.AckNone}, &wq, nil, 10084, "consumer in pull mode requires explicit ack policy on workqueue stream"},
		{"queue, ack all", C{AckPolicy: api.AckAll}, &wq, nil, 10098, "workqueue stream requires explicit ack"},
		{"queue, new", C{AckPolicy: api.AckExplicit, DeliverPolicy: api.DeliverNew}, &wq, nil, 10101, "consumer must be deliver all on workqueue stream"},
		{"queue, second", C{AckPolicy: api.AckExplicit}, &wq, []Other{{"o", nil}}, 10099, "multiple non-filtered consumers not allowed on workqueue stream"},
		{"queue, same", C{AckPolicy: api.AckExplicit, FilterSubject: "s.*"}, &wq, []Other{{"o", []string{"s.b"}}}, 10100, "filtered consumer not unique on workqueue stream"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			st := tt.stream
			if st == nil {
				st = &limits
			}
			if err := Defaults(&tt.cfg, st, Limits{}, false); err != nil {
				t.Fatal(err)
			}
			err := Validate(&tt.cfg, st, Limits{}, tt.others)
			if tt.code == 0 {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || err.ErrCode != tt.code || err.Description != tt.text {
				t.Fatalf("%v, want %d %q", err, tt.code, tt.text)
			}
		})
	}
}

func TestValidateUpdate(t *testing.T) {
	base := api.ConsumerConfig{Durable: "C", AckPolicy: api.AckExplicit}
	push := api.ConsumerConfig{Durable: "C", DeliverSubject: "d"}
	tests := []struct {
		name string
		old  api.ConsumerConfig
		set  func(c *api.ConsumerConfig)
		want string
	}{
		{"same", base, func(*api.ConsumerConfig) {}, ""},
		{"allowed", base, func(c *api.ConsumerConfig) { c.FilterSubject, c.AckWait, c.MaxDeliver = "a", time.Hour, 7 }, ""},
		{"deliver", base, func(c *api.ConsumerConfig) { c.DeliverPolicy = api.DeliverNew }, "deliver policy can not be updated"},
		{"ack", base, func(c *api.ConsumerConfig) { c.AckPolicy = api.AckAll }, "ack policy can not be updated"},
		{"waiting", base, func(c *api.ConsumerConfig) { c.MaxWaiting = 1 }, "max waiting can not be updated"},
		{"to push", base, func(c *api.ConsumerConfig) { c.DeliverSubject, c.MaxWaiting = "d", 0 }, "can not update pull consumer to push based"},
		{"to pull", push, func(c *api.ConsumerConfig) { c.DeliverSubject = "" }, "can not update push consumer to pull based"},
		{"bound", push, func(c *api.ConsumerConfig) { c.DeliverSubject = "e" }, "consumer name already in use"},
	}
	for _, tt := range tests {
		st := &api.StreamConfig{Name: "S"}
		old, cfg := tt.old, tt.old
		tt.set(&cfg)
		for _, c := range []*api.ConsumerConfig{&old, &cfg} {
			if err := Defaults(c, st, Limits{}, false); err != nil {
				t.Fatal(err)
			}
		}
		err := ValidateUpdate(&old, &cfg, true)
		if got := ""; err != nil {
			if got = err.Description; got != tt.want {
				t.Errorf("%s: %v", tt.name, err)
			}
		} else if tt.want != "" {
			t.Errorf("%s: accepted", tt.name)
		}
	}
}

// TestConfigJSON reads a configuration with every field as a client writes it.
func TestConfigJSON(t *testing.T) {
	in := `{"durable_name":"D","name":"D","description":"x","deliver_policy":"by_start_time","opt_start_seq":1,` +
		`"opt_start_time":"2026-01-02T03:04:05Z","ack_policy":"explicit","ack_wait":1,"max_deliver":2,"backoff":[3],` +
		`"filter_subject":"a","filter_subjects":["b"],"replay_policy":"original","rate_limit_bps":4,"sample_freq":"5%",` +
		`"max_waiting":6,"max_ack_pending":7,"flow_control":true,"headers_only":true,"max_batch":8,"max_expires":9,` +
		`"max_bytes":10,"deliver_subject":"c","deliver_group":"d","idle_heartbeat":11,"inactive_threshold":12,` +
		`"num_replicas":1,"mem_storage":true,"direct":true,"sourcing":true,"metadata":{"k":"v"},` +
		`"pause_until":"2027-01-02T03:04:05Z","priority_groups":["g"],"priority_policy":"overflow","priority_timeout":13}`
	var c api.ConsumerConfig
	if err := json.Unmarshal([]byte(in), &c); err != nil {
		t.Fatal(err)
	}
	v := reflect.ValueOf(c)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			t.Errorf("%s was not read", v.Type().Field(i).Name)
		}
	}
	out, err := json.Marshal(&c)
	if err != nil || string(out) != in {
		t.Errorf("came back as\n%s\n%v", out, err)
	}
	if !c.Equal(c.Clone()) {
		t.Error("not equal to its clone")
	}
	var r api.CreateConsumerRequest
	if err := json.Unmarshal([]byte(`{"stream_name":"S","config":{},"action":"create"}`), &r); err != nil || r.Action != api.ActionCreate {
		t.Errorf("%+v %v", r, err)
	}
	if err := json.Unmarshal([]byte(`{"config":{"ack_policy":"maybe"}}`), &r); err == nil {
		t.Error("unknown policy accepted")
	}
}
