package jetstream

import (
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/storage"
	"petiole/storage/msgstore"
)

// watchedBacking notes how many messages that were loaded from it are referenced at
// a time.
type watchedBacking struct {
	backing
	mu     sync.Mutex
	loaded []weak.Pointer[byte]
	most   int
}

func (b *watchedBacking) Load(seq uint64) (storage.Message, error) {
	return b.watch(b.backing.Load(seq))
}

func (b *watchedBacking) LoadLast(pattern string, upTo uint64) (storage.Message, error) {
	return b.watch(b.backing.LoadLast(pattern, upTo))
}

func (b *watchedBacking) watch(m storage.Message, err error) (storage.Message, error) {
	if err != nil {
		return m, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	runtime.GC()
	n := 0
	for _, p := range b.loaded {
		if p.Value() != nil {
			n++
		}
	}
	b.most = max(b.most, n)
	m.Data = append(make([]byte, 0, 1024), m.Data...)
	b.loaded = append(b.loaded, weak.Make(&m.Data[0]))
	return m, err
}

// A request for the last messages of many subjects takes no more memory than some of
// them: they may be as large as messages get.
func TestMultiLastLoadsOneByOne(t *testing.T) {
	const subjects = 6
	watched := make(chan *watchedBacking, 1)
	n := startNode(t, t.TempDir(), func(o *Options) {
		o.openStore = func(dir string, o msgstore.Options) (backing, error) {
			st, err := msgstore.Open(dir, o)
			b := &watchedBacking{backing: st}
			watched <- b
			return b, err
		}
	})
	nc, js := n.connect()
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.*"}, AllowDirect: true})
	for i := range 2 * subjects {
		publishN(t, js, fmt.Sprint("s.", i%subjects), 1)
	}
	b := <-watched
	for _, upTo := range []int{subjects + subjects/2, 2 * subjects} { // what is last then, and what is last now
		sub := must(nc.SubscribeSync(nats.NewInbox()))
		if err := nc.PublishRequest("$JS.API.DIRECT.GET.S", sub.Subject, fmt.Appendf(nil, `{"multi_last":["s.*"],"up_to_seq":%d}`, upTo)); err != nil {
			t.Fatal(err)
		}
		for i := range subjects {
			want := strconv.Itoa(upTo - subjects + 1 + i)
			if m := must(sub.NextMsg(time.Minute)); m.Header.Get("Nats-Sequence") != want {
				t.Fatalf("%v instead of message %s", m.Header, want)
			}
		}
		if m := must(sub.NextMsg(time.Minute)); m.Header.Get("Status") != "204" {
			t.Fatalf("%v at the end", m.Header)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.loaded) < 2*subjects || b.most > 2 {
		t.Errorf("up to %d of %d messages loaded were referenced at a time", b.most, len(b.loaded))
	}
}
