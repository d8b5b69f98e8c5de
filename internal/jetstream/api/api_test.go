package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"
)

// What nats-server 2.15 sends for a stream with every field set comes back as
// it was.
const fullConfig = `{"name":"S","description":"d","subjects":["a","b.*"],"retention":"workqueue","max_consumers":1,` +
	`"max_msgs":2,"max_bytes":3,"max_age":4000000000,"max_msgs_per_subject":5,"max_msg_size":6,"discard":"new",` +
	`"storage":"memory","num_replicas":1,"no_ack":true,"duplicate_window":7000000000,"placement":{"cluster":"c","tags":["t"]},` +
	`"mirror":{"name":"m","opt_start_seq":1,"filter_subject":"f","external":{"api":"x","deliver":"y"}},` +
	`"sources":[{"name":"n","subject_transforms":[{"src":"a","dest":"b"}]}],"compression":"s2","first_seq":8,` +
	`"subject_transform":{"src":"a","dest":"b"},"republish":{"src":"a","dest":"r","headers_only":true},"allow_direct":true,` +
	`"mirror_direct":true,"discard_new_per_subject":true,"sealed":true,"deny_delete":true,"deny_purge":true,` +
	`"allow_rollup_hdrs":true,"consumer_limits":{"inactive_threshold":9,"max_ack_pending":10},"allow_msg_ttl":true,` +
	`"subject_delete_marker_ttl":11000000000,"allow_msg_counter":true,"allow_atomic":true,"allow_msg_schedules":true,` +
	`"persist_mode":"async","allow_batched":true,"metadata":{"k":"v"}}`

func TestStreamConfigRoundTrip(t *testing.T) {
	var cfg StreamConfig
	if err := json.Unmarshal([]byte(fullConfig), &cfg); err != nil {
		t.Fatal(err)
	}
	v := reflect.ValueOf(cfg)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			t.Errorf("%s is not set", v.Type().Field(i).Name)
		}
	}
	b, err := json.Marshal(&cfg)
	if err != nil || string(b) != fullConfig {
		t.Errorf("%v\n got %s\nwant %s", err, b, fullConfig)
	}
}

func TestDefaultsInJSON(t *testing.T) {
	b, err := json.Marshal(&StreamConfig{Name: "S"})
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	for k, want := range map[string]any{"retention": "limits", "discard": "old", "storage": "file", "compression": "none", "allow_direct": false} {
		if m[k] != want {
			t.Errorf("%s is %v, want %v", k, m[k], want)
		}
	}
	var cfg StreamConfig
	if err := json.Unmarshal([]byte(`{"storage":"paper"}`), &cfg); err == nil {
		t.Error("an unknown storage type is accepted")
	}
}

func TestPubAck(t *testing.T) {
	for _, dup := range []bool{false, true} {
		var got PubAck
		if err := json.Unmarshal(AppendPubAck(nil, "S", 1<<63, dup), &got); err != nil {
			t.Fatal(err)
		}
		if want := (PubAck{Stream: "S", Sequence: 1 << 63, Duplicate: dup}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	var got PubAck
	refused := ErrStreamWrongLastMsgID.With("id", "a\"\\\x01é")
	if err := json.Unmarshal(AppendPubErr(nil, "S", refused), &got); err != nil {
		t.Fatal(err)
	}
	if *got.Error != *refused || got.Stream != "S" {
		t.Errorf("got %+v, want %+v", got.Error, refused)
	}
}

func TestErrors(t *testing.T) {
	e := ErrStreamWrongLastSequence.With("seq", 7)
	if e.Description != "wrong last sequence: 7" || e.ErrCode != 10071 || ErrStreamWrongLastSequence.Description != "wrong last sequence: {seq}" {
		t.Errorf("%+v, from %+v", e, ErrStreamWrongLastSequence)
	}
	if !errors.Is(fmt.Errorf("publishing: %w", e), ErrStreamWrongLastSequence) || errors.Is(e, ErrStreamNotFound) {
		t.Error("errors are not told apart by code")
	}
}

func TestInfoEmbedding(t *testing.T) {
	b, err := json.Marshal(&StreamCreateResponse{
		Response: Response{Type: TypeStreamCreate}, DidCreate: true,
		StreamInfo: &StreamInfo{Config: StreamConfig{Name: "S"}, Created: time.Unix(1, 0).UTC()},
	})
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"type", "config", "created", "state", "ts", "did_create"} {
		if _, ok := m[k]; !ok {
			t.Errorf("%s is missing in %s", k, b)
		}
	}
}
