package jetstream

import (
	"fmt"
	"io/fs"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage/msgstore"
)

// Where no more files may be open those of other streams are closed: nothing fails
// for that.
func TestFewFiles(t *testing.T) {
	const streams, most = 12, 4
	ctx := testContext(t)
	var limited atomic.Bool
	var n *node
	n = startNode(t, t.TempDir(), func(o *Options) {
		o.IdleClose = time.Hour
		o.openStore = func(dir string, so msgstore.Options) (backing, error) {
			if limited.Load() && n.e.openStores.Load() >= most {
				return nil, fmt.Errorf("open message store: %w", &fs.PathError{Op: "open", Path: dir, Err: syscall.EMFILE})
			}
			return msgstore.Open(dir, so)
		}
	})
	_, js := n.connect()
	subject := func(i int) string { return fmt.Sprintf("s.%d", i) }
	for i := range streams {
		createStream(t, js, jetstream.StreamConfig{Name: fmt.Sprintf("S%d", i), Subjects: []string{subject(i)}})
		must(js.Publish(ctx, subject(i), nil))
	}
	limited.Store(true)
	n.e.fewFiles.Store(true)
	n.e.wakeKeeper()
	eventually(t, "files are closed", func() bool { return n.e.openStores.Load() <= streams/2 })
	for range 3 {
		for i := range streams {
			must(js.Publish(ctx, subject(i), nil))
		}
	}
	for i := range streams {
		if info := must(must(js.Stream(ctx, fmt.Sprintf("S%d", i))).Info(ctx)); info.State.Msgs != 4 {
			t.Errorf("stream %d has %d messages, want 4", i, info.State.Msgs)
		}
	}
	createStream(t, js, jetstream.StreamConfig{Name: "MORE", Subjects: []string{"more"}})
}
