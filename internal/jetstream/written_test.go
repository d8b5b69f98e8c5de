package jetstream

import (
	"bytes"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
	"petiole/storage/simbolt"
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

// Who asks what has been written, as the status does, does not wait for a disk that
// does not answer.
func TestWrittenDuringStall(t *testing.T) {
	dir := t.TempDir()
	disk := simbolt.New(dir, 1)
	t.Cleanup(disk.Close)
	n := startNode(t, dir)
	n.e.writes.message(&storage.Message{Subject: "s"})
	saving, answers := make(chan struct{}), make(chan struct{})
	disk.CutAtUpdate(1, func() {
		close(saving)
		<-answers
	})
	saved := make(chan error, 1)
	go func() { saved <- n.e.saveWritten(0) }()
	<-saving
	told := make(chan Written, 1)
	go func() { told <- n.e.Written() }()
	select {
	case w := <-told:
		if w.Messages == 0 {
			t.Errorf("%+v", w)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits for the disk")
	}
	close(answers)
	if err := <-saved; err != nil {
		t.Error(err)
	}
}
