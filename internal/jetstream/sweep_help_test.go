package jetstream

import (
	"encoding/json"
	"testing"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
)

func consumerDelete(name string) []byte { return (&command.ConsumerDelete{Name: name}).Append(nil) }

func consumerCreate(t testing.TB, name string, cfg *api.ConsumerConfig) []byte {
	t.Helper()
	b, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return (&command.ConsumerCreate{Name: name, Created: time.Now().UnixNano(), Config: b}).Append(nil)
}

func sweepRecord(n uint64) []byte { return (&command.Sweep{Max: n}).AppendTo(nil) }

func publishRecord(subject string) []byte {
	return (&command.Publish{Time: time.Now().UnixNano(), Subject: subject, Data: []byte{}}).AppendTo(nil)
}
