package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
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
	eventually(t, "nothing else is left", func() bool { return len(must(filepath.Glob(file+"*"))) == 1 })
}

// wastefulBacking is a store that is worth compacting once that comes to an error.
type wastefulBacking struct {
	*msgstore.Store
	err *atomic.Pointer[error]
}

func (b wastefulBacking) Waste() (msgstore.Waste, error) {
	return msgstore.Waste{Worth: b.err.Load() != nil}, nil
}

func (b wastefulBacking) Compact(context.Context, msgstore.CompactOptions) (msgstore.CompactReport, error) {
	return msgstore.CompactReport{}, *b.err.Load()
}

// Why files stay larger than need be is told; a write that fails ends the process.
func TestCompactionThatCannotBe(t *testing.T) {
	var errs [2]atomic.Pointer[error] // of the first stream's store, and of the second's
	fail := func(i int, e error) { errs[i].Store(&e) }
	fail(0, fmt.Errorf("%w: no room for 100 MiB", msgstore.ErrPostponed))
	var first atomic.Pointer[string]
	n := startNode(t, t.TempDir(), func(o *Options) {
		o.tidyEvery = 5 * time.Millisecond
		o.openStore = func(dir string, o msgstore.Options) (backing, error) {
			st, oerr := msgstore.Open(dir, o)
			err := &errs[1]
			if first.CompareAndSwap(nil, &dir) || *first.Load() == dir {
				err = &errs[0]
			}
			return wastefulBacking{st, err}, oerr
		}
	})
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publishN(t, js, "s", 1)
	s := must2(n.e.Stream("S"))
	eventually(t, "the reason is told", func() bool { return s.CompactionPostponed() != "" })
	createStream(t, js, jetstream.StreamConfig{Name: "T", Subjects: []string{"t"}})
	publishN(t, js, "t", 1)
	fail(1, fmt.Errorf("%w: %w", storage.ErrFailed, syscall.EIO))
	must(js.PublishAsync("t", nil)) // it is looked at again; nobody may be left to acknowledge
	select {
	case got := <-n.fail:
		if !errors.Is(got, syscall.EIO) {
			t.Error(got)
		}
	case <-time.After(patience):
		t.Error("the process goes on")
	}
	if err := n.srv.Shutdown(testContext(t)); err != nil {
		t.Error(err)
	}
	_ = n.e.close(false) // it has been reported
	n.srv = nil
}

// scrubbedBacking is a store whose scrub takes until it is ended, and that is
// worth compacting.
type scrubbedBacking struct {
	*msgstore.Store
	scrubs, compacted chan struct{}
}

func (b scrubbedBacking) Scrub(ctx context.Context, _ int, _ func(error)) (msgstore.ScrubReport, error) {
	wakeUp(b.scrubs)
	<-ctx.Done()
	return msgstore.ScrubReport{}, ctx.Err()
}

func (b scrubbedBacking) Waste() (msgstore.Waste, error) { return msgstore.Waste{Worth: true}, nil }

func (b scrubbedBacking) Compact(context.Context, msgstore.CompactOptions) (msgstore.CompactReport, error) {
	wakeUp(b.compacted)
	return msgstore.CompactReport{}, nil
}

// Reading through large files takes hours: files are made smaller meanwhile.
func TestFilesShrinkWhileScrubbed(t *testing.T) {
	b := scrubbedBacking{scrubs: make(chan struct{}, 1), compacted: make(chan struct{}, 1)}
	n := startNode(t, t.TempDir(), func(o *Options) {
		o.tidyEvery, o.scrubFirst = 5*time.Millisecond, 200*time.Millisecond
		o.openStore = func(dir string, o msgstore.Options) (backing, error) {
			st, err := msgstore.Open(dir, o)
			return scrubbedBacking{st, b.scrubs, b.compacted}, err
		}
	})
	_, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	wait := func(ch chan struct{}, what string) {
		t.Helper()
		select {
		case <-ch:
		case <-time.After(patience):
			t.Fatal(what)
		}
	}
	wait(b.scrubs, "no scrub begins")
	for range 2 { // the first may have begun before
		publishN(t, js, "s", 1)
		wait(b.compacted, "nothing is compacted while a scrub runs")
	}
}
