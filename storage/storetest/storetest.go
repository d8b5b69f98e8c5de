// Package storetest holds the tests that every storage.Store has to pass: one
// model, one set of properties, whatever the implementation.
package storetest

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"petiole/storage"
)

// Harness says how to make the store under test.
type Harness struct {
	// Open opens the store in dir, which is an empty directory the first time.
	Open func(dir string) (storage.Store, error)
	// Durable says that what was checkpointed is there after reopening.
	Durable bool
	// Dir returns a new empty directory.
	Dir func() string
}

// Run runs all tests.
func Run(t *testing.T, h Harness) {
	t.Run("Basics", func(t *testing.T) { basics(t, h) })
	t.Run("Jumps", func(t *testing.T) { jumps(t, h) })
	t.Run("Closed", func(t *testing.T) { closed(t, h) })
	t.Run("Concurrent", func(t *testing.T) { concurrent(t, h) })
	t.Run("Model", rapid.MakeCheck(func(t *rapid.T) { model(t, h) }))
}

// op is a record of the model's log: what the engine would replay.
type op struct {
	kind    string // append, skip, remove, purge
	msg     storage.Message
	seq     uint64
	pattern string
	upto    uint64
	keep    uint64
}

// naive is a store as simple as can be.
type naive struct {
	msgs     []storage.Message
	last     uint64
	lastTime int64
	kvs      map[string][]byte
}

func (n *naive) clone() *naive {
	return &naive{slices.Clone(n.msgs), n.last, n.lastTime, maps.Clone(n.kvs)}
}

func (n *naive) find(seq uint64) (int, bool) {
	return slices.BinarySearchFunc(n.msgs, seq, func(m storage.Message, q uint64) int { return cmp.Compare(m.Seq, q) })
}

func (n *naive) state() storage.State {
	s := storage.State{Msgs: uint64(len(n.msgs)), First: n.last + 1, Last: n.last, LastTime: n.lastTime}
	subjects := map[string]bool{}
	for i := range n.msgs {
		s.Bytes += n.msgs[i].Size()
		subjects[n.msgs[i].Subject] = true
	}
	s.Subjects = len(subjects)
	if len(n.msgs) > 0 {
		s.First, s.FirstTime = n.msgs[0].Seq, n.msgs[0].Time
		s.Deleted = s.Last - s.First + 1 - s.Msgs
	}
	return s
}

// apply performs o on the model; it returns what the store must return.
func (n *naive) apply(o op) (uint64, error) {
	switch o.kind {
	case "append":
		m := o.msg
		m.Seq = max(m.Seq, n.last+1)
		n.msgs = append(n.msgs, m)
		n.last, n.lastTime = m.Seq, m.Time
		return m.Seq, nil
	case "skip":
		n.last = max(n.last, o.seq)
		return 0, nil
	case "remove":
		i, ok := n.find(o.seq)
		if !ok {
			return 0, storage.ErrNotFound
		}
		size := n.msgs[i].Size()
		n.msgs = slices.Delete(n.msgs, i, i+1)
		return size, nil
	case "purge":
		var hit []uint64
		for _, m := range n.msgs {
			if storage.MatchSubject(o.pattern, m.Subject) && (o.upto == 0 || m.Seq < o.upto) {
				hit = append(hit, m.Seq)
			}
		}
		hit = hit[:max(0, len(hit)-int(o.keep))]
		n.msgs = slices.DeleteFunc(slices.Clone(n.msgs), func(m storage.Message) bool {
			_, ok := slices.BinarySearch(hit, m.Seq)
			return ok
		})
		return uint64(len(hit)), nil
	}
	panic(o.kind)
}

func perform(s storage.Store, o op) (uint64, error) {
	switch o.kind {
	case "append":
		return s.Append(o.msg)
	case "skip":
		return 0, s.Skip(o.seq)
	case "remove":
		return s.Remove(o.seq)
	case "purge":
		return s.Purge(o.pattern, o.upto, o.keep)
	}
	panic(o.kind)
}

// tb is what checks need of a test.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
}

func equal(a, b storage.Message) bool {
	return a.Seq == b.Seq && a.Time == b.Time && a.Subject == b.Subject &&
		bytes.Equal(a.Header, b.Header) && (a.Header == nil) == (b.Header == nil) && bytes.Equal(a.Data, b.Data)
}

func show(m storage.Message) string {
	return fmt.Sprintf("{%d t=%d %s %q %.20q}", m.Seq, m.Time, m.Subject, m.Header, m.Data)
}

// checkState compares what is cheap to compare.
func (n *naive) checkState(t tb, s storage.Store) {
	t.Helper()
	if got, want := s.State(), n.state(); got != want {
		t.Fatalf("state\n got %+v\nwant %+v", got, want)
	}
}

// checkAll compares everything there is.
func (n *naive) checkAll(t tb, s storage.Store) {
	t.Helper()
	n.checkState(t, s)
	i := 0
	if err := s.Range(0, func(m storage.Message) bool {
		if i >= len(n.msgs) || !equal(m, n.msgs[i]) {
			t.Fatalf("range: message %d is %s", i, show(m))
		}
		i++
		return true
	}); err != nil {
		t.Fatalf("range: %v", err)
	}
	if i != len(n.msgs) {
		t.Fatalf("range: %d messages, want %d", i, len(n.msgs))
	}
	subjects := map[string]storage.SubjectState{}
	for _, m := range n.msgs {
		st, ok := subjects[m.Subject]
		if !ok {
			st.First = m.Seq
		}
		st.Msgs++
		st.Last = m.Seq
		subjects[m.Subject] = st
	}
	got := map[string]storage.SubjectState{}
	s.Subjects("", func(subject string, st storage.SubjectState) bool {
		got[subject] = st
		return true
	})
	if !maps.Equal(got, subjects) {
		t.Fatalf("subjects\n got %v\nwant %v", got, subjects)
	}
	for subject, want := range subjects {
		if st, ok := s.Subject(subject); !ok || st != want {
			t.Fatalf("subject %q: %v, want %v", subject, st, want)
		}
	}
	if _, ok := s.Subject("never.used"); ok {
		t.Fatalf("a subject never used has messages")
	}
}

// checkReads compares look-ups from seq on.
func (n *naive) checkReads(t tb, s storage.Store, f storage.Filter, seq uint64, at int64) {
	t.Helper()
	var matching []storage.Message // at or after seq
	for _, m := range n.msgs {
		if m.Seq >= seq && f.Match(m.Subject) {
			matching = append(matching, m)
		}
	}
	if got, want := s.NumPending(f, seq), uint64(len(matching)); got != want {
		t.Fatalf("NumPending(%q, %d) = %d, want %d", f.Patterns, seq, got, want)
	}
	from := seq
	for i := 0; i < 40 && i <= len(matching); i++ {
		m, err := s.LoadNext(f, from)
		if i == len(matching) {
			if !errors.Is(err, storage.ErrEOF) {
				t.Fatalf("LoadNext(%q, %d) = %s, %v, want the end", f.Patterns, from, show(m), err)
			}
			break
		}
		if err != nil || !equal(m, matching[i]) {
			t.Fatalf("LoadNext(%q, %d) = %s, %v, want %s", f.Patterns, from, show(m), err, show(matching[i]))
		}
		from = m.Seq + 1
	}
	m, err := s.Load(seq)
	if i, ok := n.find(seq); ok {
		if err != nil || !equal(m, n.msgs[i]) {
			t.Fatalf("Load(%d) = %s, %v", seq, show(m), err)
		}
	} else if !errors.Is(err, storage.ErrNotFound) {
		t.Fatalf("Load(%d) = %s, %v, want not found", seq, show(m), err)
	}
	for _, p := range append([]string{"", ">"}, f.Patterns...) {
		for _, upto := range []uint64{0, seq} {
			var want storage.Message
			for _, m := range n.msgs {
				if storage.MatchSubject(p, m.Subject) && (upto == 0 || m.Seq <= upto) {
					want = m
				}
			}
			m, err := s.LoadLast(p, upto)
			if want.Seq == 0 && !errors.Is(err, storage.ErrNotFound) || want.Seq != 0 && (err != nil || !equal(m, want)) {
				t.Fatalf("LoadLast(%q, %d) = %s, %v, want %s", p, upto, show(m), err, show(want))
			}
		}
	}
	want := n.last + 1
	for _, m := range n.msgs {
		if m.Time >= at {
			want = m.Seq
			break
		}
	}
	if got := s.SeqAtTime(at); got != want {
		t.Fatalf("SeqAtTime(%d) = %d, want %d", at, got, want)
	}
	i, _ := n.find(seq)
	rest := n.msgs[i:]
	i = 0
	if err := s.Range(seq, func(m storage.Message) bool {
		if i >= len(rest) || !equal(m, rest[i]) {
			t.Fatalf("Range(%d): message %d is %s", seq, i, show(m))
		}
		i++
		return i < 5
	}); err != nil || i != min(5, len(rest)) {
		t.Fatalf("Range(%d): %d messages, %v", seq, i, err)
	}
}

func (n *naive) checkKVs(t tb, s storage.Store, prefix string) {
	t.Helper()
	var want, got []string
	for k, v := range n.kvs {
		if strings.HasPrefix(k, prefix) {
			want = append(want, k+"="+string(v))
		}
	}
	slices.Sort(want)
	if err := s.KVs(prefix, func(k string, v []byte) error {
		got = append(got, k+"="+string(v))
		return nil
	}); err != nil || !slices.Equal(got, want) {
		t.Fatalf("KVs(%q) = %q, %v, want %q", prefix, got, err, want)
	}
}

var (
	subjectGen = rapid.SampledFrom([]string{"a", "b", "p.l1.t", "p.l1.h", "p.l2.t", "p.l2.h", "x.y.z.w", "rare.one"})
	patternGen = rapid.SampledFrom([]string{"", ">", "a", "b", "*", "p.>", "p.*.t", "p.l1.*", "x.>", "rare.*", "rare.one", "none", "none.>"})
)

// model drives a store and the naive one through the same random history of
// changes, checkpoints and crashes, and compares them all along.
func model(t *rapid.T, h Harness) {
	dir := h.Dir()
	s, err := h.Open(dir)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	defer func() { _ = s.Destroy() }()

	cur := &naive{kvs: map[string][]byte{}}
	var log []op // log[i] has LSN i+1
	var frozen, image *naive
	image = cur.clone()
	var frozenLSN storage.LSN
	pending := map[string]storage.KV{}
	now := int64(1000)

	do := func(o op) {
		want, wantErr := cur.apply(o)
		log = append(log, o)
		got, err := perform(s, o)
		if got != want || !errors.Is(err, wantErr) || (err == nil) != (wantErr == nil) {
			t.Fatalf("%+v = %d, %v, want %d, %v", o, got, err, want, wantErr)
		}
	}
	seqGen := func() uint64 {
		return uint64(rapid.Int64Range(0, int64(cur.last)+2).Draw(t, "seq"))
	}
	anySeq := func() uint64 {
		if len(cur.msgs) == 0 || rapid.IntRange(0, 4).Draw(t, "wild") == 0 {
			return seqGen()
		}
		if rapid.IntRange(0, 2).Draw(t, "first") == 0 {
			return cur.msgs[0].Seq
		}
		return cur.msgs[rapid.IntRange(0, len(cur.msgs)-1).Draw(t, "index")].Seq
	}
	message := func(subject string) storage.Message {
		now += int64(rapid.IntRange(0, 3).Draw(t, "dt"))
		m := storage.Message{Subject: subject, Time: now, Data: []byte(fmt.Sprintf("payload %d", len(log)))}
		if len(log)%3 == 0 {
			m.Header = []byte("NATS/1.0\r\nA: b\r\n\r\n")
		}
		return m
	}
	actions := map[string]func(*rapid.T){
		"append": func(t *rapid.T) {
			o := op{kind: "append", msg: message(subjectGen.Draw(t, "subject"))}
			switch rapid.IntRange(0, 20).Draw(t, "jump") {
			case 0:
				o.msg.Seq = cur.last + uint64(rapid.IntRange(1, 70).Draw(t, "by"))
			case 1:
				o.msg.Seq = cur.last + uint64(rapid.IntRange(1, 20000).Draw(t, "by"))
			case 2:
				o.msg.Seq = cur.last / 2
			}
			do(o)
		},
		"burst": func(t *rapid.T) {
			subject := subjectGen.Draw(t, "subject")
			for range rapid.IntRange(1, 400).Draw(t, "n") {
				now++
				do(op{kind: "append", msg: storage.Message{Subject: subject, Time: now, Data: []byte{byte(now)}}})
			}
		},
		"mixed": func(t *rapid.T) {
			subjects := rapid.SliceOfN(subjectGen, 1, 4).Draw(t, "subjects")
			for i := range rapid.IntRange(1, 300).Draw(t, "n") {
				now++
				do(op{kind: "append", msg: storage.Message{Subject: subjects[i%len(subjects)], Time: now, Data: []byte{byte(now)}}})
			}
		},
		"skip": func(t *rapid.T) {
			do(op{kind: "skip", seq: cur.last + uint64(rapid.SampledFrom([]int{0, 1, 5, 300, 9000}).Draw(t, "by"))})
		},
		"remove":  func(*rapid.T) { do(op{kind: "remove", seq: anySeq()}) },
		"remove2": func(*rapid.T) { do(op{kind: "remove", seq: anySeq()}) },
		"roll": func(t *rapid.T) {
			for range min(len(cur.msgs), rapid.IntRange(1, 300).Draw(t, "n")) {
				do(op{kind: "remove", seq: cur.msgs[0].Seq})
			}
		},
		"thin": func(t *rapid.T) {
			step := rapid.IntRange(2, 5).Draw(t, "step")
			var seqs []uint64
			for i := 0; i < len(cur.msgs); i += step {
				seqs = append(seqs, cur.msgs[i].Seq)
			}
			for _, q := range seqs {
				do(op{kind: "remove", seq: q})
			}
		},
		"purge": func(t *rapid.T) {
			o := op{kind: "purge", pattern: patternGen.Draw(t, "pattern")}
			switch rapid.IntRange(0, 3).Draw(t, "how") {
			case 1:
				o.upto = anySeq()
			case 2:
				o.keep = uint64(rapid.IntRange(1, 20).Draw(t, "keep"))
			case 3:
				o.upto, o.keep = anySeq(), uint64(rapid.IntRange(1, 20).Draw(t, "keep"))
			}
			do(o)
		},
		"kv": func(t *rapid.T) {
			kv := storage.KV{Key: rapid.SampledFrom([]string{"config", "c/one", "c/two", "d/1"}).Draw(t, "key")}
			delete(cur.kvs, kv.Key)
			if rapid.Bool().Draw(t, "put") {
				kv.Value = []byte(fmt.Sprintf("value %d", len(log)))
				cur.kvs[kv.Key] = kv.Value
			}
			pending[kv.Key] = kv
		},
		"freeze": func(t *rapid.T) {
			kvs := slices.Collect(maps.Values(pending))
			if got := s.Freeze(storage.LSN(len(log)), kvs); got != (frozen == nil) {
				t.Fatalf("Freeze = %v with a frozen set: %v", got, frozen != nil)
			} else if !got {
				return
			}
			clear(pending)
			frozen, frozenLSN = cur.clone(), storage.LSN(len(log))
			if !h.Durable {
				image, frozen = frozen, nil
			}
		},
		"checkpoint": func(t *rapid.T) {
			if err := s.Checkpoint(); err != nil {
				t.Fatalf("checkpoint: %v", err)
			}
			if frozen != nil {
				image, frozen = frozen, nil
				if got := s.Applied(); got != frozenLSN {
					t.Fatalf("Applied = %d after a checkpoint of %d", got, frozenLSN)
				}
			}
			image.checkKVs(t, s, "")
			image.checkKVs(t, s, "c/")
		},
		"crash": func(t *rapid.T) {
			if !h.Durable {
				return
			}
			if err := s.Close(); err != nil {
				t.Fatalf("close: %v", err)
			}
			if s, err = h.Open(dir); err != nil {
				t.Fatalf("reopen: %v", err)
			}
			image.checkAll(t, s)
			image.checkKVs(t, s, "")
			cur, frozen = image.clone(), nil
			clear(pending)
			// Sometimes the end of the log is gone as well.
			log = log[:max(int(s.Applied()), len(log)-rapid.IntRange(0, 2).Draw(t, "lost"))]
			for _, o := range log[s.Applied():] {
				want, wantErr := cur.apply(o)
				if got, err := perform(s, o); got != want || !errors.Is(err, wantErr) {
					t.Fatalf("replay of %+v = %d, %v, want %d, %v", o, got, err, want, wantErr)
				}
			}
			cur.checkAll(t, s)
		},
		"read": func(t *rapid.T) {
			f := storage.Filter{Patterns: rapid.SliceOfN(patternGen, 0, 3).Draw(t, "patterns")}
			cur.checkReads(t, s, f, anySeq(), now-int64(rapid.IntRange(-2, 1000).Draw(t, "ago")))
		},
		"": func(t *rapid.T) { cur.checkState(t, s) },
	}
	actions["burst2"], actions["checkpoint2"], actions["freeze2"] = actions["mixed"], actions["checkpoint"], actions["freeze"]
	actions["read2"], actions["read3"] = actions["read"], actions["read"]
	t.Repeat(actions)
	cur.checkAll(t, s)
	for _, p := range []string{"a", "p.>", "p.*.t", "rare.one"} {
		cur.checkReads(t, s, storage.Filter{Patterns: []string{p}}, cur.last/2, now-50)
	}
}
