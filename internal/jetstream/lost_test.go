package jetstream

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
)

// What is remembered of lost messages goes from memory and file when retention
// has passed it, or when there is too much of it.
func TestLostNotesGo(t *testing.T) {
	ctx := testContext(t)
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	stream := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
	for range 100 {
		must(js.Publish(ctx, "s.x", nil))
	}
	s, ok := n.e.Stream("S")
	if !ok {
		t.Fatal("no stream")
	}
	add := func(spans ...storage.Span) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, l := range spans {
			s.addLost(l, time.Unix(1, 0))
		}
	}
	keys := func() (keys []string) {
		t.Helper()
		if err := n.e.Checkpoint(); err != nil {
			t.Fatal(err)
		}
		if err := s.store.KVs(prefixLost, func(k string, _ []byte) error {
			keys = append(keys, strings.TrimLeft(k[len(prefixLost):], "0"))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return keys
	}
	add(storage.Span{First: 3, Last: 5}, storage.Span{First: 7, Last: 7}, storage.Span{First: 20, Last: 30}, storage.Span{First: 80, Last: 81})
	if got := keys(); !slices.Equal(got, []string{"3", "7", "14", "50"}) {
		t.Fatalf("keys are %v", got)
	}
	if err := stream.Purge(ctx, jetstream.WithPurgeSequence(25)); err != nil {
		t.Fatal(err)
	}
	if got := keys(); !slices.Equal(got, []string{"14", "50"}) {
		t.Errorf("keys are %v", got)
	}
	if got := s.Lost(0); len(got) != 2 || got[0].First != 20 {
		t.Errorf("remembered are %v", got)
	}
	// All that is left is lost: that is no retention.
	add(storage.Span{First: 2, Last: 24})
	for range 2 {
		if got := keys(); !slices.Equal(got, []string{"2", "14", "50"}) {
			t.Errorf("keys are %v", got)
		}
	}
	if err := stream.DeleteMsg(ctx, 25); err != nil {
		t.Fatal(err)
	}
	if got := keys(); !slices.Equal(got, []string{"14", "50"}) {
		t.Errorf("keys are %v", got)
	}
	// One comes back under the key of one that goes.
	add(storage.Span{First: 7, Last: 90})
	if got := keys(); !slices.Equal(got, []string{"7", "14", "50"}) {
		t.Errorf("keys are %v", got)
	}
	var many []storage.Span
	for i := range uint64(maxLost) {
		many = append(many, storage.Span{First: 1000 + 2*i, Last: 1000 + 2*i})
	}
	add(many...)
	if got := keys(); len(got) != maxLost {
		t.Errorf("%d keys", len(got))
	}
	if err := stream.Purge(ctx); err != nil {
		t.Fatal(err)
	}
	// They lie above everything that is there.
	if got := keys(); len(got) != maxLost {
		t.Errorf("%d keys", len(got))
	}
}
