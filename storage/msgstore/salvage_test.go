package msgstore

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
	"petiole/storage/internal/table"
)

// sample is a closed store of some size, and what it holds.
type sample struct {
	dir     string
	file    []byte
	state   storage.State
	applied storage.LSN
	msgs    map[uint64]storage.Message
	deleted map[uint64]bool
	kvs     map[string]string
	places  map[uint64][]uint64 // pages that a message is on, or is found by
	gone    map[uint64]bool     // pages that notes of deletions are on, or are found by
	kinds   map[uint64]boltpages.Kind
	// postings are the leaves that postings are on.
	postings []uint64
}

const sampleSubjects = 40

// sampleMessage makes the message of a sequence, always the same.
func sampleMessage(seq uint64) storage.Message {
	r := rand.New(rand.NewPCG(seq, 7))
	m := storage.Message{Seq: seq, Time: int64(seq) * 1e6, Subject: fmt.Sprintf("s.%d", r.IntN(sampleSubjects))}
	n := 20 + r.IntN(200)
	switch {
	case seq%211 == 0:
		n = 9000 + r.IntN(9000)
	case seq%31 == 0:
		n = 2500
	}
	m.Data = bytes.Repeat(fmt.Appendf(nil, "<%d>", seq), n/3+1)[:n]
	if seq%5 == 0 {
		m.Header = fmt.Appendf(nil, "NATS/1.0\r\nSeq: %d\r\n\r\n", seq)
	}
	return m
}

func freezeAt(t fataler, s *Store, lsn storage.LSN, kvs ...storage.KV) {
	t.Helper()
	if !s.Freeze(lsn, kvs) {
		t.Fatalf("not frozen")
	}
	if err := s.Checkpoint(); err != nil {
		t.Fatalf("%v", err)
	}
}

// fataler is what checks need of a test.
type fataler interface {
	Helper()
	Errorf(string, ...any)
	Fatalf(string, ...any)
}

// grow appends messages to a store, deletes some, and checkpoints now and then.
func (p *sample) grow(t fataler, s *Store, n uint64, checkpoints bool) (lsn storage.LSN) {
	t.Helper()
	remove := func(q uint64) {
		if _, ok := p.msgs[q]; !ok {
			return
		}
		_, err := s.Remove(q)
		if errors.Is(err, storage.ErrCorrupt) {
			// Damage that has not been repaired yet; it may be gone even so.
			if next, ok := table.NextSeq(s.Table, q); ok && next == q {
				return
			}
		} else if err != nil {
			t.Fatalf("remove %d: %v", q, err)
		}
		delete(p.msgs, q)
		p.deleted[q] = true
	}
	lsn = p.applied
	for range n {
		seq := s.State().Last + 1
		lsn++
		m := sampleMessage(seq)
		if _, err := s.Append(m); err != nil {
			t.Fatalf("%v", err)
		}
		p.msgs[seq] = m
		if seq%7 == 0 {
			remove(seq - 3)
		}
		if seq%500 == 0 {
			remove(s.State().First)
		}
		if seq%500 == 0 && checkpoints {
			var kvs []storage.KV
			for i := range 30 {
				k, v := fmt.Sprintf("c/%03d", i), fmt.Sprintf("consumer %d at %d", i, seq)
				kvs = append(kvs, storage.KV{Key: k, Value: []byte(v)})
				p.kvs[k] = v
			}
			freezeAt(t, s, lsn, kvs...)
			p.applied = lsn
		}
	}
	return lsn
}

// newSample fills a store by way of several checkpoints, and closes it.
func newSample(t testing.TB, total uint64) *sample {
	t.Helper()
	p := &sample{dir: filepath.Join(fastDir(t), "store"), msgs: map[uint64]storage.Message{}, deleted: map[uint64]bool{}, kvs: map[string]string{}}
	s := p.open(t, p.dir)
	p.grow(t, s, total/2, true)
	// A long jump in the numbering.
	if err := s.Skip(s.State().Last + 10_000); err != nil {
		t.Fatal(err)
	}
	lsn := p.grow(t, s, total/2, true)
	freezeAt(t, s, lsn)
	p.state, p.applied = s.State(), s.Applied()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	p.load(t)
	return p
}

// fastDir is TempDir in memory where there is a file system for that: hundreds
// of stores are made, and all that is to be durable is brought to disk.
func fastDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "msgstore-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (p *sample) open(t fataler, dir string) *Store {
	t.Helper()
	s, err := Open(dir, Options{Log: quiet(), noSync: true})
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return s
}

// load finds out what is on which page.
func (p *sample) load(t testing.TB) {
	t.Helper()
	var err error
	if p.file, err = os.ReadFile(filepath.Join(p.dir, FileName)); err != nil {
		t.Fatal(err)
	}
	// Without what has never been used: smaller is faster.
	f := boltpages.Open(bytes.NewReader(p.file), int64(len(p.file)))
	p.file = p.file[:f.Metas()[0].HighWater*uint64(f.PageSize())]
	f = boltpages.Open(bytes.NewReader(p.file), int64(len(p.file)))
	floor, err := ReadFloor(p.dir)
	if err != nil {
		t.Fatal(err)
	}
	seal := newSealer(floor.Store, bucketMsgs)
	p.places, p.kinds, p.gone = map[uint64][]uint64{}, map[uint64]boltpages.Kind{}, map[uint64]bool{}
	w := f.NewWalker(func(d boltpages.Damage) { t.Error(d) })
	size := int64(f.PageSize())
	if err := w.Walk(f.Root(f.Metas()[0]), func(e boltpages.Entry) error {
		name := string(e.Key)
		b, err := f.Bucket(e)
		if err != nil {
			return err
		}
		return w.Walk(b, func(e boltpages.Entry) error {
			pages := []uint64{e.Page}
			for q := e.Offset() / size; q <= (e.Offset()+int64(e.Size())-1)/size; q++ {
				pages = append(pages, uint64(q))
			}
			switch name {
			case string(bucketMsgs):
				v, err := e.Value(nil)
				if err != nil {
					return err
				}
				ck, err := parseChunk(seal, e.Key, v)
				if err != nil {
					return err
				}
				for i := range ck.n {
					p.places[ck.seq(i)] = pages
				}
			case string(bucketGone):
				for _, q := range pages {
					p.gone[q] = true
				}
			case string(bucketPost):
				if !slices.Contains(p.postings, e.Page) {
					p.postings = append(p.postings, e.Page)
				}
			}
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	for q := range f.Pages() {
		k := f.Info(q).Kind
		if k != boltpages.KindMeta && k != boltpages.KindFreelist && !w.Seen(q) {
			k = "free"
		}
		p.kinds[q] = k
	}
}

// copyTo makes a store directory of the sample, with another file (nil: none).
func (p *sample) damaged(t fataler, file []byte) string {
	t.Helper()
	dir, err := os.MkdirTemp(filepath.Dir(p.dir), "d")
	if err != nil {
		t.Fatalf("%v", err)
	}
	b, err := os.ReadFile(filepath.Join(p.dir, FloorName))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, FloorName), b, 0o600)
	}
	if err == nil && file != nil {
		err = os.WriteFile(filepath.Join(dir, FileName), file, 0o600)
	}
	if err != nil {
		t.Fatalf("%v", err)
	}
	return dir
}

func inSpans(spans []storage.Span, seq uint64) bool {
	return slices.ContainsFunc(spans, func(s storage.Span) bool { return s.First <= seq && seq <= s.Last })
}

// check opens the repaired store in dir and compares it with the sample and the
// report.
func (p *sample) check(t fataler, dir string, r RepairReport, hit func(pages []uint64) bool, goneHit bool) {
	t.Helper()
	s := p.open(t, dir)
	defer s.Close()
	if s.Applied() != p.applied || r.Applied != p.applied {
		t.Errorf("applied is %d, reported %d, was %d", s.Applied(), r.Applied, p.applied)
	}
	if st := s.State(); st != r.State || st.Msgs != r.Kept || st.Last != p.state.Last {
		t.Errorf("state is %+v, reported %+v, was %+v", st, r.State, p.state)
	}
	p.compare(t, s, r, hit, goneHit)
}

// compare compares a repaired store with the sample: nothing may be other than
// it was, nothing missing that has not been reported, and nothing reported that
// has not been hit.
func (p *sample) compare(t fataler, s *Store, r RepairReport, hit func(pages []uint64) bool, goneHit bool) {
	t.Helper()
	seen := map[uint64]bool{}
	perSubject := map[string]uint64{}
	var octets uint64
	if err := s.Range(0, func(m storage.Message) bool {
		seen[m.Seq] = true
		perSubject[m.Subject]++
		octets += m.Size()
		want, ok := p.msgs[m.Seq]
		if !ok {
			want = sampleMessage(m.Seq)
			if !p.deleted[m.Seq] || !inSpans(r.Doubtful, m.Seq) || !goneHit {
				t.Errorf("message %d is back", m.Seq)
			}
		}
		if m.Time != want.Time || m.Subject != want.Subject || !bytes.Equal(m.Data, want.Data) || !bytes.Equal(m.Header, want.Header) {
			t.Errorf("message %d is another one", m.Seq)
		}
		return true
	}); err != nil {
		t.Errorf("range: %v", err)
	}
	if st := s.State(); uint64(len(seen)) != st.Msgs || octets != st.Bytes || len(perSubject) != st.Subjects {
		t.Errorf("%d messages of %d octets read, with %d subjects; state %+v", len(seen), octets, len(perSubject), st)
	}
	for seq := range p.msgs {
		lost := inSpans(r.Lost, seq)
		if lost == seen[seq] {
			t.Errorf("message %d: there %v, lost %v", seq, seen[seq], lost)
		}
		if lost && !hit(p.places[seq]) {
			t.Errorf("message %d is lost, and on pages %v, which have not been hit", seq, p.places[seq])
		}
	}
	for _, l := range r.Lost {
		for seq := l.First; seq <= l.Last; seq++ {
			if _, ok := p.msgs[seq]; !ok && !inSpans(r.Doubtful, seq) {
				t.Errorf("message %d is reported as lost and has not been there", seq)
				break
			}
		}
	}
	kvs := map[string]string{}
	if err := s.KVs("", func(k string, v []byte) error { kvs[k] = string(v); return nil }); err != nil {
		t.Errorf("keys: %v", err)
	}
	for k, v := range p.kvs {
		g, ok := kvs[k]
		told := r.KeysDoubtful || slices.Contains(r.LostKeys, k) || slices.Contains(r.StaleKeys, k)
		if (!ok || g != v) && !told {
			t.Errorf("key %q is %q, was %q: %+v", k, g, v, r)
		}
		if ok && !strings.HasPrefix(g, "consumer ") {
			t.Errorf("key %q is %q", k, g)
		}
	}
	for k := range kvs {
		if _, ok := p.kvs[k]; !ok {
			t.Errorf("key %q has come from nowhere", k)
		}
	}
	for i := range sampleSubjects {
		subject := fmt.Sprintf("s.%d", i)
		n := perSubject[subject]
		got, _ := s.Subject(subject)
		// From a sequence on, so that postings are read.
		pending := s.NumPending(storage.Filter{Patterns: []string{subject}}, got.First+1)
		if got.Msgs != n || n > 0 && pending != n-1 {
			t.Errorf("subject %q: %+v, %d pending behind the first, there are %d", subject, got, pending, n)
		}
	}
}

// verified fails unless Verify finds nothing.
func verified(t fataler, dir string) {
	t.Helper()
	if _, err := Verify(dir, func(err error) { t.Errorf("verify: %v", err) }); err != nil {
		t.Errorf("verify: %v", err)
	}
}

// TestSalvageEveryPage destroys each page in turn.
func TestSalvageEveryPage(t *testing.T) {
	if testing.Short() {
		t.Skip("a long search, in which nothing runs at the same time as something else")
	}
	t.Parallel()
	p := newSample(t, 1500)
	kinds := map[boltpages.Kind]int{}
	lost := 0
	for q := range uint64(len(p.file) / pageSize) {
		kind := p.kinds[q]
		if kind == "free" && q%2 != 0 {
			continue
		}
		kinds[kind]++
		file := bytes.Clone(p.file)
		r := rand.New(rand.NewPCG(q, 1))
		for i := range file[q*pageSize : (q+1)*pageSize] {
			file[q*pageSize+uint64(i)] = byte(r.Uint32())
		}
		dir := p.damaged(t, file)
		report, err := Salvage(dir, SalvageOptions{Log: quiet()})
		if err != nil {
			t.Fatalf("%s %d: %v", kind, q, err)
		}
		p.check(t, dir, report, func(pages []uint64) bool { return slices.Contains(pages, q) }, p.gone[q] || kind == boltpages.KindBranch || kind == boltpages.KindLeaf)
		verified(t, dir)
		if b, err := os.ReadFile(report.Parked); err != nil || !bytes.Equal(b, file) {
			t.Errorf("parked: %v", err)
		}
		switch kind {
		case boltpages.KindMeta, boltpages.KindFreelist, boltpages.KindBranch, "free":
			if len(report.Lost) > 0 {
				t.Errorf("lost with a %s: %v", kind, report.Lost)
			}
		}
		if len(report.Lost) > 0 {
			lost++
		}
		if t.Failed() {
			t.Fatalf("with page %d, a %s: %+v", q, kind, report)
		}
		os.RemoveAll(dir)
	}
	if lost == 0 {
		t.Error("nothing has ever been lost")
	}
	for _, k := range []boltpages.Kind{boltpages.KindBranch, boltpages.KindLeaf, boltpages.KindMeta, boltpages.KindFreelist, boltpages.KindPage, "free"} {
		if kinds[k] == 0 {
			t.Errorf("there was no page of kind %s: %v", k, kinds)
		}
	}
}

// TestSalvageFlippedKeys flips bits where keys of notes of deletions stand, and the
// names of buckets, and the numbers of entries: what is not found under its key is
// not taken for never having been.
func TestSalvageFlippedKeys(t *testing.T) {
	if testing.Short() {
		t.Skip("a long search, in which nothing runs at the same time as something else")
	}
	t.Parallel()
	p := newSample(t, 700)
	at := -1
	for q := range uint64(len(p.file) / pageSize) {
		if page := p.file[q*pageSize:][:pageSize]; p.gone[q] && p.kinds[q] == boltpages.KindLeaf {
			at = int(q)*pageSize + bytes.Index(page, bucketGone)
		}
	}
	if at < 0 {
		t.Fatal("there are no notes of deletions")
	}
	for i := range 96 { // name, root, header, two elements, the first key
		file := bytes.Clone(p.file)
		file[at+i] ^= 1 << (i % 5)
		dir := p.damaged(t, file)
		r, err := Salvage(dir, SalvageOptions{Log: quiet()})
		if err != nil {
			t.Fatalf("octet %d: %v", i, err)
		}
		p.check(t, dir, r, func(pages []uint64) bool { return slices.Contains(pages, uint64(at/pageSize)) }, true)
		if t.Failed() {
			t.Fatalf("octet %d: %+v", i, r)
		}
		os.RemoveAll(dir)
	}
}

// TestSalvageRandomPages destroys pages at random, 500 times.
func TestSalvageRandomPages(t *testing.T) {
	if testing.Short() {
		t.Skip("a long search, in which nothing runs at the same time as something else")
	}
	t.Parallel()
	p := newSample(t, 700)
	pages := uint64(len(p.file) / pageSize)
	n, lost, kept := 0, uint64(0), uint64(0)
	run := func(t *rapid.T) {
		n++
		file := bytes.Clone(p.file)
		hit := map[uint64]bool{}
		touched := false
		for range rapid.IntRange(1, 4).Draw(t, "pages") {
			q := rapid.Uint64Range(0, pages-1).Draw(t, "page")
			at := q * pageSize
			switch rapid.IntRange(0, 3).Draw(t, "how") {
			case 0:
				clear(file[at : at+pageSize])
			case 1:
				other := rapid.Uint64Range(0, pages-1).Draw(t, "other")
				copy(file[at:at+pageSize], p.file[other*pageSize:(other+1)*pageSize])
			case 2:
				off := at + rapid.Uint64Range(0, pageSize-1).Draw(t, "octet")
				file[off] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
			case 3:
				from := rapid.Uint64Range(0, 7).Draw(t, "sector") * 512
				r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
				for i := at + from; i < at+pageSize; i++ {
					file[i] = byte(r.Uint32())
				}
			}
			hit[q] = true
			touched = touched || p.kinds[q] != "free"
		}
		dir := p.damaged(t, file)
		defer os.RemoveAll(dir)
		// By way of remembering everything, and by reading the tree twice.
		most := rapid.SampledFrom([]int{1, 20, maxExtents}).Draw(t, "extents")
		report, err := Salvage(dir, SalvageOptions{Log: quiet(), extents: most})
		if err != nil {
			t.Fatalf("salvage: %v", err)
		}
		lost += report.LostMsgs()
		kept += report.Kept
		p.check(t, dir, report, func(pages []uint64) bool {
			return slices.ContainsFunc(pages, func(q uint64) bool { return hit[q] })
		}, touched)
	}
	for n < 500 && !t.Failed() {
		rapid.Check(t, run)
	}
	if lost == 0 || kept == 0 {
		t.Errorf("lost %d, kept %d", lost, kept)
	}
	t.Logf("%d files, %d messages kept, %d lost", n, kept, lost)
}

// TestSalvageFileLevel damages the file as a whole.
func TestSalvageFileLevel(t *testing.T) {
	t.Parallel()
	p := newSample(t, 1500)
	all := func([]uint64) bool { return true }
	size := len(p.file)
	cut := func(n int) []byte { return bytes.Clone(p.file[:n]) }
	zero := func(from, to int) []byte {
		b := bytes.Clone(p.file)
		clear(b[from:to])
		return b
	}
	for _, c := range []struct {
		name string
		file []byte
		lost string // nothing, some, everything
	}{
		{"appended", append(bytes.Clone(p.file), bytes.Repeat([]byte{0xA5}, 10_000)...), "nothing"},
		{"first meta", zero(0, pageSize), "nothing"},
		{"second meta", zero(pageSize, 2*pageSize), "nothing"},
		{"both metas", zero(0, 2*pageSize), "nothing"},
		{"cut a little", cut(size - 100), ""},
		{"cut in half", cut(size / 2), "some"},
		{"cut to metas", cut(2 * pageSize), "everything"},
		{"cut to an octet", cut(1), "everything"},
		{"empty", []byte{}, "everything"},
		{"zeros", make([]byte, size), "everything"},
		{"gone", nil, "everything"},
		{"another's", bytes.Repeat([]byte("something else "), size/15), "everything"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := p.damaged(t, c.file)
			r, err := Salvage(dir, SalvageOptions{Log: quiet()})
			if err != nil {
				t.Fatal(err)
			}
			p.check(t, dir, r, all, true)
			verified(t, dir)
			if n := r.LostMsgs(); c.lost == "nothing" && n > 0 || c.lost == "some" && (n == 0 || r.Kept == 0) || c.lost == "everything" && r.Kept > 0 {
				t.Errorf("lost %d, kept %d", n, r.Kept)
			}
			if r.State.Last != p.state.Last {
				t.Errorf("last is %d, was %d: sequences would be given away again", r.State.Last, p.state.Last)
			}
			if (r.Parked == "") != (c.file == nil) {
				t.Errorf("parked as %q", r.Parked)
			}
			// Once more: there is nothing to do, and nothing is lost by it.
			again, err := Salvage(dir, SalvageOptions{Log: quiet()})
			if err != nil || again.State != r.State || len(again.Lost) > 0 || len(again.Damage) > 0 {
				t.Errorf("again: %+v, %v", again, err)
			}
		})
	}
}

// TestSalvageStates is about which state is put together: the floor file may be
// there or not, newer than the file or older.
func TestSalvageStates(t *testing.T) {
	p := newSample(t, 1500)
	older := p.file
	wasApplied, wasLast := p.applied, p.state.Last
	// 300 messages more.
	s := p.open(t, p.dir)
	lsn := p.grow(t, s, 300, false)
	freezeAt(t, s, lsn)
	p.state, p.applied = s.State(), lsn
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	p.load(t)
	all := func([]uint64) bool { return true }

	// An old file, and a log that does not reach back: what the floor knows.
	dir := p.damaged(t, older)
	r, err := Salvage(dir, SalvageOptions{Log: quiet(), LogFrom: wasApplied + 2})
	if err != nil {
		t.Fatal(err)
	}
	p.check(t, dir, r, all, true)
	if !inSpans(r.Lost, wasLast+1) || !inSpans(r.Lost, p.state.Last) || r.Kept == 0 {
		t.Errorf("kept %d, lost %v", r.Kept, r.Lost)
	}
	// One that does: the old state, of which nothing is lost.
	dir = p.damaged(t, older)
	r, err = Salvage(dir, SalvageOptions{Log: quiet(), LogFrom: wasApplied + 1})
	if err != nil || r.Applied != wasApplied || r.State.Last != wasLast || len(r.Lost) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
	// No floor, no tree: what can be found.
	dir = p.damaged(t, append(make([]byte, 2*pageSize), p.file[2*pageSize:]...))
	if err := os.Remove(filepath.Join(dir, FloorName)); err != nil {
		t.Fatal(err)
	}
	if r, err = Salvage(dir, SalvageOptions{Log: quiet()}); err != nil {
		t.Fatal(err)
	}
	p.check(t, dir, r, func([]uint64) bool { return false }, true)
	// Nothing at all to begin with: nothing is changed.
	dir = p.damaged(t, []byte("nothing"))
	if err := os.Remove(filepath.Join(dir, FloorName)); err != nil {
		t.Fatal(err)
	}
	if _, err = Salvage(dir, SalvageOptions{Log: quiet()}); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("of nothing: %v", err)
	}
	if names, _ := os.ReadDir(dir); len(names) != 1 {
		t.Errorf("left are %v", names)
	}
	// Too little room.
	dir = p.damaged(t, p.file[:len(p.file)/2])
	_, err = Salvage(dir, SalvageOptions{Log: quiet(), free: func(string) (int64, error) { return 4096, nil }})
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("without room: %v", err)
	}
	if names, _ := os.ReadDir(dir); len(names) != 2 {
		t.Errorf("left are %v", names)
	}
}

// TestSalvageInterrupted stops a repair at each step, and repeats it.
func TestSalvageInterrupted(t *testing.T) {
	p := newSample(t, 1000)
	file := bytes.Clone(p.file)
	var hit uint64
	for q, k := range p.kinds {
		if k == boltpages.KindLeaf && q > hit && slices.ContainsFunc(slices.Collect(maps.Keys(p.msgs)), func(seq uint64) bool { return slices.Contains(p.places[seq], q) }) {
			hit = q
		}
	}
	clear(file[hit*pageSize : (hit+1)*pageSize])
	crash := errors.New("power cut")
	for _, step := range []string{"read", "written", "parked", "done"} {
		dir := p.damaged(t, file)
		_, err := Salvage(dir, SalvageOptions{Log: quiet(), step: func(s string) error {
			if s == step {
				// What stands in the file system then, with what a crash
				// leaves: it is as if nothing ran after it.
				b, err := os.ReadFile(filepath.Join(dir, FileName+repairSuffix))
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, "left"), b, 0o600)
				}
				if err != nil && !errors.Is(err, fs.ErrNotExist) {
					return err
				}
				return crash
			}
			return nil
		}})
		if step != "done" && !errors.Is(err, crash) || step == "done" && err != nil {
			t.Fatalf("%s: %v", step, err)
		}
		if err := os.Rename(filepath.Join(dir, "left"), filepath.Join(dir, FileName+repairSuffix)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		r, err := Salvage(dir, SalvageOptions{Log: quiet()})
		if err != nil {
			t.Fatalf("%s: %v", step, err)
		}
		if step == "done" {
			if len(r.Lost) > 0 {
				t.Errorf("the second time lost are %v", r.Lost)
			}
			continue
		}
		p.check(t, dir, r, func(pages []uint64) bool { return slices.Contains(pages, hit) }, false)
		if len(r.Lost) == 0 {
			t.Errorf("%s: nothing is lost", step)
		}
		names, err := filepath.Glob(filepath.Join(dir, FileName+"*"))
		if err != nil || len(names) != 2 {
			t.Errorf("%s: left are %v, %v", step, names, err)
		}
	}
}

// TestLastTimeOutlivesState: the time of the last message, which those that come
// must not be before, outlives that message and the state in the file.
func TestLastTimeOutlivesState(t *testing.T) {
	for _, open := range []bool{false, true} {
		t.Run(fmt.Sprintf("open %v", open), func(t *testing.T) {
			dir := filepath.Join(fastDir(t), "store")
			s, err := Open(dir, Options{Log: quiet(), noSync: true})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { s.Close() }()
			for i := range 3 {
				if _, err := s.Append(storage.Message{Subject: "s", Time: int64(1000 + i)}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := s.Purge("", 0, 0); err != nil {
				t.Fatal(err)
			}
			checkpoint(t, s, 4)
			want := s.State()
			if want.LastTime != 1002 {
				t.Fatalf("%+v", want)
			}
			if !open {
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join(dir, FileName)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			hits, mark := 0, append(slices.Clone(keyState), version)
			for at := 0; ; at++ {
				i := bytes.Index(b[at:], mark)
				if i < 0 {
					break
				}
				at += i
				if _, err := f.WriteAt([]byte{b[at+len(mark)] ^ 1}, int64(at+len(mark))); err != nil {
					t.Fatal(err)
				}
				hits++
			}
			if err := f.Close(); err != nil || hits == 0 {
				t.Fatal(hits, err)
			}
			if open {
				_, err = s.Repair(t.Context(), nil)
				if err == nil {
					err = s.Close()
				}
			} else {
				_, err = Salvage(dir, SalvageOptions{Log: quiet()})
			}
			if err != nil {
				t.Fatal(err)
			}
			if s, err = Open(dir, Options{Log: quiet(), noSync: true}); err != nil {
				t.Fatal(err)
			}
			if got := s.State(); got != want {
				t.Errorf("%+v, was %+v", got, want)
			}
		})
	}
}
