package storetest

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"

	"petiole/storage"
)

func open(t *testing.T, h Harness, dir string) storage.Store {
	t.Helper()
	s, err := h.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func basics(t *testing.T, h Harness) {
	s := open(t, h, h.Dir())
	if got, want := s.State(), (storage.State{First: 1}); got != want {
		t.Fatalf("empty store: %+v", got)
	}
	if _, err := s.LoadNext(storage.Filter{}, 0); !errors.Is(err, storage.ErrEOF) {
		t.Fatalf("LoadNext of an empty store: %v", err)
	}
	big := bytes.Repeat([]byte("x"), 1<<20)
	n := &naive{}
	for i, m := range []storage.Message{
		{Subject: "a", Time: 10, Data: []byte("one")},
		{Subject: "b", Time: 10, Header: []byte("NATS/1.0\r\nK: v\r\n\r\n")},
		{Subject: "a", Time: 12, Data: big},
	} {
		want, _ := n.apply(op{kind: "append", msg: m})
		if seq, err := s.Append(m); err != nil || seq != want {
			t.Fatalf("append %d: %d, %v", i, seq, err)
		}
	}
	check := func() {
		t.Helper()
		n.checkAll(t, s)
		for seq := range uint64(5) {
			n.checkReads(t, s, storage.Filter{}, seq, 11)
			n.checkReads(t, s, storage.Filter{Patterns: []string{"a"}}, seq, 10)
		}
	}
	check()
	if !s.Freeze(7, []storage.KV{{Key: "k", Value: []byte("v")}, {Key: "empty", Value: []byte{}}}) {
		t.Fatal("Freeze refused")
	}
	check()
	if err := s.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	check()
	if s.Applied() != 7 || s.TableBytes() != 0 {
		t.Fatalf("applied %d, table of %d bytes after a checkpoint", s.Applied(), s.TableBytes())
	}
	(&naive{kvs: map[string][]byte{"k": []byte("v"), "empty": {}}}).checkKVs(t, s, "")
	stop := errors.New("stop")
	if err := s.KVs("", func(string, []byte) error { return stop }); !errors.Is(err, stop) {
		t.Fatalf("KVs hides fn's error: %v", err)
	}
	want, _ := n.apply(op{kind: "remove", seq: 1})
	if size, err := s.Remove(1); err != nil || size != want {
		t.Fatalf("remove: %d, %v", size, err)
	}
	if _, err := s.Remove(1); !errors.Is(err, storage.ErrNotFound) {
		t.Fatalf("second remove: %v", err)
	}
	check()
	if got, err := s.Purge("", 0, 0); err != nil || got != 2 {
		t.Fatalf("purge: %d, %v", got, err)
	}
	n.msgs = nil
	check()
	if err := s.Destroy(); err != nil {
		t.Fatal(err)
	}
}

// jumps checks that long gaps cost neither memory nor time.
func jumps(t *testing.T, h Harness) {
	dir := h.Dir()
	s := open(t, h, dir)
	n := &naive{}
	do := func(o op) {
		t.Helper()
		want, _ := n.apply(o)
		if got, err := perform(s, o); err != nil || got != want {
			t.Fatalf("%+v: %d, %v", o, got, err)
		}
	}
	do(op{kind: "skip", seq: 1 << 50})
	for i := range uint64(4) {
		do(op{kind: "append", msg: storage.Message{Subject: "s", Time: int64(i + 1)}})
		do(op{kind: "append", msg: storage.Message{Seq: (i + 2) << 50, Subject: "far", Time: int64(i + 1)}})
		do(op{kind: "skip", seq: n.last + 100_000})
		if i == 2 {
			if !s.Freeze(1, nil) {
				t.Fatal("Freeze refused")
			}
			if err := s.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			if h.Durable {
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = open(t, h, dir)
			}
		}
	}
	check := func() {
		t.Helper()
		n.checkAll(t, s)
		for _, m := range n.msgs {
			for _, seq := range []uint64{m.Seq - 1, m.Seq, m.Seq + 1} {
				n.checkReads(t, s, storage.Filter{}, seq, m.Time)
				n.checkReads(t, s, storage.Filter{Patterns: []string{"far"}}, seq, m.Time+1)
			}
		}
	}
	check()
	do(op{kind: "purge", upto: 3 << 50})
	check()
	do(op{kind: "purge", pattern: "far"})
	check()
}

func closed(t *testing.T, h Harness) {
	s := open(t, h, h.Dir())
	if _, err := s.Append(storage.Message{Subject: "a"}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s.Freeze(1, nil) {
		t.Error("Freeze succeeds on a closed store")
	}
	_, appendErr := s.Append(storage.Message{Subject: "a"})
	_, loadErr := s.Load(1)
	_, nextErr := s.LoadNext(storage.Filter{}, 1)
	_, lastErr := s.LoadLast("a", 0)
	_, removeErr := s.Remove(1)
	_, purgeErr := s.Purge("", 0, 0)
	for what, err := range map[string]error{
		"append": appendErr, "load": loadErr, "next": nextErr, "last": lastErr, "remove": removeErr, "purge": purgeErr,
		"skip": s.Skip(9), "range": s.Range(1, nil), "checkpoint": s.Checkpoint(), "kvs": s.KVs("", nil),
	} {
		if !errors.Is(err, storage.ErrClosed) {
			t.Errorf("%s on a closed store: %v", what, err)
		}
	}
}

// concurrent checks that readers see only whole messages that were stored,
// in order, while the writer and checkpoints go on.
func concurrent(t *testing.T, h Harness) {
	s := open(t, h, h.Dir())
	const total = 6000
	subjects := []string{"a.1", "a.2", "b.1", "c"}
	payload := func(seq uint64) []byte { return fmt.Appendf(nil, "payload of %d", seq) }
	intact := func(m storage.Message) error {
		if m.Subject != subjects[m.Seq%4] || !bytes.Equal(m.Data, payload(m.Seq)) || m.Time != int64(m.Seq) {
			return fmt.Errorf("message %d is %s %q", m.Seq, m.Subject, m.Data)
		}
		return nil
	}
	done := make(chan struct{})
	work := make(chan struct{}, 1)
	var wg sync.WaitGroup
	wg.Go(func() { // checkpoints
		for range work {
			if err := s.Checkpoint(); err != nil {
				t.Errorf("checkpoint: %v", err)
			}
		}
	})
	reader := func(f storage.Filter) {
		next := uint64(1)
		for {
			var last bool
			select {
			case <-done:
				last = true
			default:
			}
			for {
				m, err := s.LoadNext(f, next)
				if errors.Is(err, storage.ErrEOF) {
					break
				}
				if err == nil {
					err = intact(m)
				}
				if err == nil && (m.Seq < next || !f.Match(m.Subject)) {
					err = fmt.Errorf("LoadNext(%q, %d) = %d %s", f.Patterns, next, m.Seq, m.Subject)
				}
				if err != nil {
					t.Error(err)
					return
				}
				next = m.Seq + 1
			}
			if last {
				return
			}
			st := s.State()
			if st.Msgs > 0 && (st.First > st.Last || st.FirstTime == 0) {
				t.Errorf("state %+v", st)
			}
			s.NumPending(f, st.First+st.Msgs/2)
			s.SeqAtTime(int64(st.First + st.Msgs/2))
			if m, err := s.LoadLast("a.1", st.Last); err == nil {
				if err := intact(m); err != nil {
					t.Error(err)
				}
			}
			var prev uint64
			if err := s.Range(st.First, func(m storage.Message) bool {
				if err := intact(m); err != nil || m.Seq <= prev {
					t.Errorf("range: %d after %d: %v", m.Seq, prev, err)
				}
				prev = m.Seq
				return true
			}); err != nil {
				t.Errorf("range: %v", err)
			}
			s.Subjects("a.*", func(subject string, st storage.SubjectState) bool {
				if st.Msgs == 0 || st.First > st.Last {
					t.Errorf("subject %s: %+v", subject, st)
				}
				return true
			})
		}
	}
	for _, f := range []storage.Filter{{}, {Patterns: []string{"c"}}, {Patterns: []string{"a.*"}}, {Patterns: []string{"b.>", "c"}}} {
		wg.Go(func() { reader(f) })
	}
	for i := uint64(1); i <= total; i++ {
		if _, err := s.Append(storage.Message{Subject: subjects[i%4], Time: int64(i), Data: payload(i)}); err != nil {
			t.Error(err)
			break
		}
		if i > 2000 {
			if _, err := s.Remove(i - 2000); err != nil && !errors.Is(err, storage.ErrNotFound) {
				t.Error(err)
				break
			}
		}
		if i%3 == 0 && i > 100 {
			if _, err := s.Remove(i - 50); err != nil && !errors.Is(err, storage.ErrNotFound) {
				t.Error(err)
				break
			}
		}
		if i%700 == 0 {
			if _, err := s.Purge("b.*", i-300, 3); err != nil {
				t.Error(err)
				break
			}
		}
		if i%200 == 0 && s.Freeze(storage.LSN(i), nil) {
			select {
			case work <- struct{}{}:
			default:
				if h.Durable {
					t.Error("Freeze succeeds before the last one's checkpoint has begun")
				}
			}
		}
	}
	close(done)
	close(work)
	wg.Wait()
}
