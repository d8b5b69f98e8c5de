package msgstore

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/table"
)

func keyName(i int) string { return fmt.Sprintf("$KV.bucket.key-%05d", i) }

// manyKeys makes a store, and closes it, of more subjects than are read at once.
func manyKeys(tb testing.TB, n int) (dir string) {
	tb.Helper()
	s := openFast(tb, filepath.Join(fastDir(tb), "store"))
	for i := range n {
		if _, err := s.Append(storage.Message{Subject: keyName(i), Time: int64(i + 1), Data: fmt.Appendf(nil, "value %d", i)}); err != nil {
			tb.Fatal(err)
		}
	}
	if !s.Freeze(1, nil) {
		tb.Fatal("not frozen")
	}
	if err := s.Checkpoint(); err != nil {
		tb.Fatal(err)
	}
	if err := s.Close(); err != nil {
		tb.Fatal(err)
	}
	return s.dir()
}

// Subjects are looked up when they are needed: opening takes in none of many.
func TestSubjectsOnDemand(t *testing.T) {
	t.Parallel()
	const n = 3 * eagerSubjects
	s := openFast(t, manyKeys(t, n))
	if got := table.InMemory(s.Table); got != 0 || s.State().Subjects != n {
		t.Fatalf("%d subjects in memory, %d in all", got, s.State().Subjects)
	}
	for i := 0; i < n; i += 1000 {
		if m, err := s.LoadLast(keyName(i), 0); err != nil || string(m.Data) != fmt.Sprint("value ", i) {
			t.Errorf("last of key %d: %s, %v", i, m.Data, err)
		}
		m, err := s.LoadNext(storage.Filter{Patterns: []string{keyName(i), "none"}}, 0)
		if err != nil || m.Seq != uint64(i+1) {
			t.Errorf("next of key %d: %d, %v", i, m.Seq, err)
		}
		if st, ok := s.Subject(keyName(i)); !ok || st.Msgs != 1 || st.First != uint64(i+1) {
			t.Errorf("key %d: %+v", i, st)
		}
	}
	for _, name := range []string{"", "a", "$KV.bucket.key-00000x", "~"} {
		if _, ok := s.Subject(name); ok {
			t.Errorf("there is %q", name)
		}
	}
	used := table.InMemory(s.Table)
	if used != (n+999)/1000 {
		t.Errorf("%d subjects in memory", used)
	}
	// Writing takes in what it changes.
	for i := range 10 {
		if _, err := s.Append(storage.Message{Subject: keyName(i), Time: n + 1, Data: []byte("again")}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Remove(uint64(i + 1)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Remove(5000); err != nil { // a subject less
		t.Fatal(err)
	}
	if st := s.State(); st.Subjects != n-1 || table.InMemory(s.Table) > used+10 {
		t.Errorf("%+v, %d in memory", st, table.InMemory(s.Table))
	}
	checkpoint(t, s, 2)
	if st, ok := s.Subject(keyName(4999)); ok {
		t.Errorf("there is %+v of a key that is gone", st)
	}
	// A pattern takes in all.
	seen := 0
	s.Subjects("$KV.bucket.>", func(string, storage.SubjectState) bool { seen++; return true })
	if seen != n-1 || table.InMemory(s.Table) != n-1 {
		t.Errorf("%d subjects seen, %d in memory", seen, table.InMemory(s.Table))
	}
	if n, err := s.Purge("$KV.bucket.key-0001*", 0, 0); err != nil || n != 0 {
		t.Errorf("purged %d, %v", n, err)
	}
	checkedOnDisk(t, s)
}

// A summary that is damaged or missing is no answer; nothing is stored that might
// follow from one; repairing the open store brings it back.
func TestSubjectsDamaged(t *testing.T) {
	t.Parallel()
	const n, victim = 2 * eagerSubjects, 4321
	dir := manyKeys(t, n)
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, path string)
		looks  bool // at the victim, and finds it damaged
	}{
		{"a flipped bit in a key", flipInSummary(0x02), true},
		{"a flipped bit in a key, out of order", flipInSummary(0x08), true},
		{"missing", func(t *testing.T, path string) {
			db, err := bbolt.Open(path, 0, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucketSubj).Delete([]byte(keyName(victim))) }); err != nil {
				t.Fatal(err)
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			copied := filepath.Join(fastDir(t), "copy")
			if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			c.damage(t, filepath.Join(copied, FileName))
			s, err := Open(copied, Options{Log: quiet(), noSync: true, lazy: c.looks})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if c.looks {
				if m, err := s.LoadLast(keyName(victim), 0); !errors.Is(err, storage.ErrCorrupt) {
					t.Errorf("found %d, %v", m.Seq, err)
				}
			}
			s.audits.Wait()
			if _, err := s.Append(storage.Message{Subject: "x", Data: []byte("x")}); !errors.Is(err, storage.ErrCorrupt) {
				t.Errorf("append: %v", err)
			}
			if !s.Freeze(2, nil) {
				t.Error("not frozen")
			}
			if err := s.Checkpoint(); !errors.Is(err, storage.ErrCorrupt) || errors.Is(err, storage.ErrFailed) {
				t.Errorf("checkpoint: %v", err)
			}
			r, err := s.Repair(t.Context(), nil)
			if err != nil || len(r.Lost) > 0 || r.Kept != n {
				t.Fatalf("%+v, %v", r, err)
			}
			if m, err := s.LoadLast(keyName(victim), 0); err != nil || m.Seq != victim+1 {
				t.Errorf("found %d, %v", m.Seq, err)
			}
			if _, err := s.Append(storage.Message{Subject: keyName(victim), Data: []byte("x")}); err != nil {
				t.Error(err)
			}
			if err := s.Checkpoint(); err != nil {
				t.Error(err)
			}
			checkpoint(t, s, 3)
			if st, ok := s.Subject(keyName(victim)); !ok || st.Msgs != 2 || st.First != victim+1 || s.State().Subjects != n {
				t.Errorf("%+v, %+v", st, s.State())
			}
			checkedOnDisk(t, s)
		})
	}
}

// flipInSummary returns what flips a bit in the key of the victim's summary.
func flipInSummary(bit byte) func(t *testing.T, path string) {
	return func(t *testing.T, path string) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		name := []byte(keyName(4321))
		n := 0
		for at := 0; ; at++ {
			i := bytes.Index(b[at:], name)
			if i < 0 {
				break
			}
			at += i
			// Not those in messages: they are followed by what was stored.
			if !bytes.HasPrefix(b[at+len(name):], []byte("value ")) {
				b[at+len(name)-2] ^= bit
				n++
			}
		}
		if n == 0 {
			t.Fatal("there is no summary")
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkOpenKeys opens a store of 150,000 keys and reads one.
func BenchmarkOpenKeys(b *testing.B) {
	const n = 150_000
	dir := manyKeys(b, n)
	b.ReportAllocs()
	for b.Loop() {
		begin := time.Now()
		s, err := Open(dir, Options{Log: quiet()})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(time.Since(begin).Microseconds()), "us-to-open")
		if _, err := s.LoadLast(keyName(n/2), 0); err != nil {
			b.Fatal(err)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
