package jetstream

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// A message file cut anywhere concerns its stream alone, and that stream goes on
// behind its last sequence.
func TestCutMessageFile(t *testing.T) {
	ctx := testContext(t)
	whole := t.TempDir()
	n := startNode(t, whole)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "A", Subjects: []string{"a"}})
	createStream(t, js, jetstream.StreamConfig{Name: "B", Subjects: []string{"b"}})
	publishN(t, js, "a", 500)
	publishN(t, js, "b", 5)
	n.stop()
	for range 2 { // the log forgets the segments before the last
		n = startNode(t, whole)
		_, js = n.connect()
		must(js.Publish(ctx, "a", []byte("more")))
		must(js.Publish(ctx, "b", []byte("more")))
		n.stop()
	}
	file := filepath.Join("streams", groupDir(2), "msgs.db")
	size := must(os.Stat(filepath.Join(whole, file))).Size()
	for _, to := range []int64{100, 4096, 8892, 12300, 20000, size - 4096} {
		t.Run(fmt.Sprint(to), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			if err := os.CopyFS(dir, os.DirFS(whole)); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(filepath.Join(dir, file), to); err != nil {
				t.Fatal(err)
			}
			for start := range 2 {
				n := startNode(t, dir)
				_, js := n.connect()
				if ack := must(js.Publish(ctx, "b", []byte("next"))); ack.Sequence != uint64(8+start) {
					t.Fatalf("start %d: the stream beside it goes on at %d", start, ack.Sequence)
				}
				eventually(t, "the stream serves", func() bool { _, ok := n.e.Stream("A"); return ok })
				if ack := must(js.Publish(ctx, "a", []byte("next"))); ack.Sequence != uint64(503+start) {
					t.Fatalf("start %d: the stream goes on at %d", start, ack.Sequence)
				}
				info := must(must(js.Stream(ctx, "A")).Info(ctx))
				lost := uint64(0)
				s, _ := n.e.Stream("A")
				for _, l := range s.Lost(0) {
					lost += l.Len()
				}
				if got := info.State.Msgs + lost; got != uint64(503+start) {
					t.Errorf("start %d: %d messages and %d lost", start, info.State.Msgs, lost)
				}
				n.stop()
			}
		})
	}
}
