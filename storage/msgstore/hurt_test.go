package msgstore

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"petiole/storage"
)

// destroy overwrites pages of the open store's file.
func destroy(t testing.TB, dir string, pages ...uint64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, FileName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range pages {
		if _, err := f.WriteAt(bytes.Repeat([]byte{0xA5}, pageSize), int64(q)*pageSize); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// exact checks the store's sums against those of what p has.
func (p *sample) exact(t testing.TB, s *Store) {
	t.Helper()
	st := s.State()
	bySubject := map[string]uint64{}
	first, last := map[string]uint64{}, map[string]uint64{}
	for seq, m := range p.msgs {
		bySubject[m.Subject]++
		if f := first[m.Subject]; f == 0 || seq < f {
			first[m.Subject] = seq
		}
		last[m.Subject] = max(last[m.Subject], seq)
	}
	if st.Msgs != uint64(len(p.msgs)) || st.Subjects != len(bySubject) {
		t.Errorf("%d messages of %d subjects, want %d of %d", st.Msgs, st.Subjects, len(p.msgs), len(bySubject))
	}
	s.Subjects("", func(name string, ss storage.SubjectState) bool {
		if want := (storage.SubjectState{Msgs: bySubject[name], First: first[name], Last: last[name]}); ss != want {
			t.Errorf("subject %s: %+v, want %+v", name, ss, want)
		}
		return true
	})
}

// drop notes that messages are removed.
func (p *sample) drop(which func(m storage.Message) bool) (n uint64) {
	for seq, m := range p.msgs {
		if which(m) {
			delete(p.msgs, seq)
			p.deleted[seq] = true
			n++
		}
	}
	return n
}

// pagesOf returns the leaves that the messages of a range are on.
func (p *sample) pagesOf(from, to uint64) (pages []uint64) {
	seen := map[uint64]bool{}
	for seq := from; seq <= to; seq++ {
		if at := p.places[seq]; at != nil && !seen[at[0]] {
			seen[at[0]] = true
			pages = append(pages, at[0])
		}
	}
	return pages
}

// TestRemovalOverDamage removes messages that destroyed pages hold, or whose
// indexes they hold: the store goes on, says once that it is damaged, and its
// sums are right before and after the repair.
func TestRemovalOverDamage(t *testing.T) {
	for _, what := range []string{"messages", "postings"} {
		t.Run(what, func(t *testing.T) {
			p := newSample(t, 2000)
			told := 0
			s, err := Open(p.dir, Options{Log: quiet(), noSync: true, Damaged: func(error) { told++ }})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { s.Close() }()
			p.grow(t, s, 50, false)
			first := s.State().First
			var bad []uint64
			if what == "messages" {
				bad = p.pagesOf(first+100, first+260)
			} else {
				bad = p.postings
			}
			if len(bad) == 0 {
				t.Fatalf("%d pages", len(bad))
			}
			destroy(t, p.dir, bad...)
			for seq := first + 90; seq < first+270; seq += 7 {
				if _, ok := p.msgs[seq]; !ok {
					continue
				}
				if _, err := s.Remove(seq); err != nil {
					t.Fatalf("Remove(%d): %v", seq, err)
				}
				delete(p.msgs, seq)
				p.deleted[seq] = true
			}
			p.exact(t, s)
			if told != 1 {
				t.Errorf("damage was told of %d times", told)
			}
			upto := first + 180
			want := p.drop(func(m storage.Message) bool { return m.Seq < upto })
			if n, err := s.Purge("", upto, 0); n != want || err != nil {
				t.Fatalf("Purge up to %d: %d, %v, want %d", upto, n, err, want)
			}
			p.exact(t, s)
			if ft := s.State().FirstTime; ft < int64(s.State().First)*1e6 {
				t.Errorf("the first message, %d, is of %d", s.State().First, ft)
			}
			for i := range 4 {
				subject := fmt.Sprintf("s.%d", i)
				want := p.drop(func(m storage.Message) bool { return m.Subject == subject })
				if n, err := s.Purge(subject, 0, 0); n != want || err != nil {
					t.Fatalf("Purge %s: %d, %v, want %d", subject, n, err, want)
				}
			}
			p.exact(t, s)
			r, err := s.Repair(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			p.drop(func(m storage.Message) bool { return inSpans(r.Lost, m.Seq) })
			var octets uint64
			for _, m := range p.msgs {
				octets += m.Size()
			}
			if st := s.State(); st.Bytes != octets {
				t.Errorf("%d octets, want %d", st.Bytes, octets)
			}
			if what == "messages" && len(r.Lost) == 0 || what == "postings" && len(r.Lost) > 0 {
				t.Errorf("lost: %v", r.Lost)
			}
			p.exact(t, s)
			checkpoint(t, s, p.applied+1000)
			want = s.State().Msgs
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = p.open(t, p.dir)
			if s.State().Msgs != want {
				t.Errorf("opened again: %+v", s.State())
			}
			p.exact(t, s)
		})
	}
}

// TestHiddenSizes removes the messages of destroyed pages: of each subject those
// that are left count what they have, as soon as none of the others is left.
func TestHiddenSizes(t *testing.T) {
	p := newSample(t, 2000)
	s := p.open(t, p.dir)
	defer func() { s.Close() }()
	first := s.State().First
	destroy(t, p.dir, p.pagesOf(first+100, first+160)...)
	hidden := 0
	for seq := first; seq < first+400; seq++ {
		if _, ok := p.msgs[seq]; !ok {
			continue
		}
		if _, err := s.Load(seq); err == nil {
			continue
		}
		if _, err := s.Remove(seq); err != nil {
			t.Fatal(err)
		}
		delete(p.msgs, seq)
		p.deleted[seq] = true
		hidden++
	}
	var octets uint64
	for _, m := range p.msgs {
		octets += m.Size()
	}
	if st := s.State(); st.Bytes != octets || hidden < 20 {
		t.Errorf("%d octets without %d messages, want %d", st.Bytes, hidden, octets)
	}
	p.exact(t, s)
}

// TestPurgeOverDamage purges a store of which nothing can be read any more but the
// keyed state: none of that is needed.
func TestPurgeOverDamage(t *testing.T) {
	for _, pattern := range []string{"", ">"} {
		p := newSample(t, 1000)
		s := p.open(t, p.dir)
		defer func() { s.Close() }()
		p.grow(t, s, 20, false)
		bad := append(p.pagesOf(1, p.state.Last), p.postings...)
		destroy(t, p.dir, bad...)
		want := s.State()
		if n, err := s.Purge(pattern, 0, 0); n != want.Msgs || err != nil {
			t.Fatalf("Purge: %d, %v, want %d", n, err, want.Msgs)
		}
		if _, err := s.Append(storage.Message{Subject: "s.1", Time: 1}); err != nil {
			t.Fatal(err)
		}
		checkpoint(t, s, p.applied+1000)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		verified(t, p.dir)
		s = p.open(t, p.dir)
		if st := s.State(); st.Msgs != 1 || st.First != want.Last+1 || st.Last != want.Last+1 {
			t.Errorf("%+v, was %+v", st, want)
		}
		kvs := 0
		if err := s.KVs("", func(string, []byte) error { kvs++; return nil }); err != nil || kvs != len(p.kvs) {
			t.Errorf("%d keys, want %d, %v", kvs, len(p.kvs), err)
		}
	}
}

// A damaged message counts with the size that its record has room for, when it is
// removed: limits go by the sums. If its record does not tell its size, a repair is
// told of it, and it counts with what its subject has beyond the others.
func TestSumsOverDamage(t *testing.T) {
	large := bytes.Repeat([]byte{0x5A}, 100_000)
	sizes := func(msgs ...storage.Message) (n uint64) {
		for _, m := range msgs {
			n += m.Size()
		}
		return n
	}
	for _, c := range []struct {
		name   string
		at     int  // from the beginning of the message's data
		hidden bool // its size
		remove []uint64
		left   []int // indexes
	}{
		{"data, its subject has others", 1, false, []uint64{2}, []int{0, 2, 3}},
		{"data, as the first", 1, false, []uint64{1, 2}, []int{2, 3}},
		{"time", -30, false, []uint64{2}, []int{0, 2, 3}},
		{"subject", -19, false, []uint64{2}, []int{0, 2, 3}},
		{"header", -10, false, []uint64{2}, []int{0, 2, 3}},
		{"data, with its subject", 1, false, []uint64{2, 3, 1}, []int{3}},
		{"length of the header", -23, true, []uint64{2}, []int{0, 2, 3}},
		{"length of the data, with its subject", -22, true, []uint64{2, 3, 1}, []int{3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			told := 0
			s, err := Open(dir, Options{Log: quiet(), Damaged: func(error) { told++ }})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			msgs := []storage.Message{
				{Subject: "a", Data: []byte("x")},
				{Subject: "a", Header: []byte("NATS/1.0\r\nA: b\r\n\r\n"), Data: large},
				{Subject: "a", Data: []byte("y")},
				{Subject: "b", Data: []byte("z")},
			}
			for i, m := range msgs {
				m.Seq, m.Time = uint64(i+1), int64(i+1)
				if _, err := s.Append(m); err != nil {
					t.Fatal(err)
				}
			}
			checkpoint(t, s, 4)
			path := filepath.Join(dir, FileName)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			at := bytes.Index(b, large[:50_000])
			if at < 0 {
				t.Fatal("message 2 is not in the file")
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err == nil {
				_, err = f.WriteAt([]byte{b[at+c.at] ^ 0x15}, int64(at+c.at))
			}
			if err != nil {
				t.Fatal(at, err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Load(2); err == nil {
				t.Fatal("message 2 is not damaged")
			}
			for _, seq := range c.remove {
				if _, err := s.Remove(seq); err != nil {
					t.Fatal(err)
				}
			}
			var left []storage.Message
			for _, i := range c.left {
				left = append(left, msgs[i])
			}
			if st := s.State(); st.Msgs != uint64(len(left)) || st.Bytes != sizes(left...) {
				t.Errorf("%d messages of %d octets are left, want %d of %d", st.Msgs, st.Bytes, len(left), sizes(left...))
			}
			if c.hidden != (told > 0) {
				t.Errorf("a repair is told of it %d times", told)
			}
			if _, err := s.Repair(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			if st := s.State(); st.Msgs != uint64(len(left)) || st.Bytes != sizes(left...) {
				t.Errorf("%d messages of %d octets are there after a repair, want %d of %d", st.Msgs, st.Bytes, len(left), sizes(left...))
			}
		})
	}
}
