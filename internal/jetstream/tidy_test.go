package jetstream

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage/msgstore"
)

// A stream's file shrinks again once most of what it held is gone, without a
// restart, and beside publishers and readers.
func TestFilesShrink(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	n := startNode(t, dir, func(o *Options) { o.TableBudget, o.tidyEvery = 1<<20, 20*time.Millisecond })
	nc, js := n.connect()
	s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
	const total, kept = 16_000, 50
	body := bytes.Repeat([]byte("0123456789abcdef"), 128) // 2 KiB
	publish := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			if i%1000 == 999 {
				<-js.PublishAsyncComplete()
			}
			if _, err := js.PublishAsync(fmt.Sprintf("s.%d", i%10), fmt.Appendf(bytes.Clone(body), "-%d", i)); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case <-js.PublishAsyncComplete():
		case <-ctx.Done():
			t.Fatal(ctx.Err())
		}
	}
	publish(0, total)
	file := filepath.Join(dir, "streams", groupDir(2), msgstore.FileName)
	size := func() int64 { return must(os.Stat(file)).Size() }
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	before := size()
	if before < total*2<<10 {
		t.Fatalf("the file has %d octets, it should have more", before)
	}
	if err := s.Purge(ctx, jetstream.WithPurgeKeep(kept)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the file is small", func() bool {
		publish(total, total+1)
		return size() < before/4
	})
	st := must(s.Info(ctx)).State
	if st.Msgs < kept || st.FirstSeq != total-kept+1 {
		t.Errorf("state %+v", st)
	}
	for seq := st.FirstSeq; seq <= st.LastSeq; seq++ {
		m := must(s.GetMsg(ctx, seq))
		if want := fmt.Sprintf("-%d", min(seq-1, total)); !bytes.HasSuffix(m.Data, []byte(want)) {
			t.Fatalf("message %d ends in %q", seq, m.Data[len(m.Data)-8:])
		}
	}
	nc.Close()
	if names := must(filepath.Glob(file + "*")); len(names) != 1 {
		t.Errorf("left are %v", names)
	}
}
