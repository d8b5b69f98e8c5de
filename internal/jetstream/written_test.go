package jetstream

import (
	"bytes"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// What is written for a message is counted over restarts: log and checkpoints, and
// what recovery applies again not twice.
func TestWritten(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	const msgs, size = 200, 4096
	for range msgs {
		must(js.Publish(ctx, "s", bytes.Repeat([]byte("x"), size)))
	}
	s := must2(n.e.Stream("S"))
	content := s.State().Bytes
	check := func(what string, w Written) {
		t.Helper()
		// Each message once in the log and once in the file, and what is around it.
		if w.Messages != content || w.Log < content || w.Files < content ||
			w.Amplification() < 2 || w.Amplification() > 5 {
			t.Errorf("%s: %+v for %d octets, %.2f times", what, w, content, w.Amplification())
		}
	}
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	was := n.e.Written()
	check("serving", was)
	n.stop()
	n = startNode(t, dir)
	w := n.e.Written()
	check("after a restart", w)
	if !w.Since.Equal(was.Since) || w.Log < was.Log || w.Files < was.Files {
		t.Errorf("%+v after %+v", w, was)
	}
}
