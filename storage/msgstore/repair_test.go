package msgstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
)

// hurt overwrites a page of the open store's file that messages are on, and
// returns which. The memory map shows it at once.
func hurt(t fataler, p *sample, dir string, n int) (pages map[uint64]bool) {
	t.Helper()
	pages = map[uint64]bool{}
	f, err := os.OpenFile(filepath.Join(dir, FileName), os.O_RDWR, 0)
	if err != nil {
		t.Fatalf("%v", err)
	}
	defer f.Close()
	r := rand.New(rand.NewPCG(uint64(n), 3))
	for range n {
		var of []uint64
		for of == nil {
			seq := r.Uint64N(p.state.Last) + 1
			if _, ok := p.msgs[seq]; ok {
				of = p.places[seq]
			}
		}
		q := of[0] // the leaf
		pages[q] = true
		if _, err := f.WriteAt(bytes.Repeat([]byte{0xA5}, pageSize), int64(q)*pageSize); err != nil {
			t.Fatalf("%v", err)
		}
	}
	return pages
}

// TestRepair repairs an open store that holds more in memory than its file
// does: frozen and active messages and deletions.
func TestRepair(t *testing.T) {
	t.Parallel()
	for _, frozen := range []bool{false, true} {
		t.Run(fmt.Sprint("frozen ", frozen), func(t *testing.T) {
			p := newSample(t, 2000)
			s := p.open(t, p.dir)
			defer func() { s.Close() }()
			lsn := p.grow(t, s, 250, false)
			kv := storage.KV{Key: "c/000", Value: []byte("consumer 0, frozen")}
			if frozen {
				if !s.Freeze(lsn, []storage.KV{kv}) {
					t.Fatal("not frozen")
				}
				p.applied = lsn
				lsn = p.grow(t, s, 120, false)
			}
			// What the file holds is deleted, too, and so is the first.
			first := s.State().First
			for i := range uint64(40) {
				q := first + 3*i*i
				if _, ok := p.msgs[q]; !ok {
					continue
				}
				if _, err := s.Remove(q); err != nil {
					t.Fatal(err)
				}
				delete(p.msgs, q)
				p.deleted[q] = true
			}
			last := s.State().Last
			pages := hurt(t, p, p.dir, 3)
			hit := func(on []uint64) bool { return slices.ContainsFunc(on, func(q uint64) bool { return pages[q] }) }
			r, err := s.Repair(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if len(r.Lost) == 0 || r.Parked == "" {
				t.Errorf("report: %+v", r)
			}
			p.compare(t, s, r, hit, false)
			if got := s.State().Last; got != last {
				t.Errorf("last is %d, was %d", got, last)
			}
			for seq := range p.msgs { // from here on they are gone
				if inSpans(r.Lost, seq) {
					delete(p.msgs, seq)
					p.deleted[seq] = true
				}
			}
			r.Lost = nil
			// It goes on as if nothing had been.
			if frozen {
				if err := s.Checkpoint(); err != nil {
					t.Fatal(err)
				}
				p.kvs[kv.Key] = string(kv.Value)
				if s.Applied() != p.applied {
					t.Errorf("applied is %d, not %d", s.Applied(), p.applied)
				}
				p.compare(t, s, r, hit, false)
			}
			p.applied = lsn
			lsn = p.grow(t, s, 300, false)
			freezeAt(t, s, lsn)
			p.compare(t, s, r, hit, false)
			want := s.State()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			verified(t, p.dir)
			s = p.open(t, p.dir)
			if got := s.State(); got != want || s.Applied() != lsn {
				t.Errorf("opened again: %+v at %d, was %+v at %d", got, s.Applied(), want, lsn)
			}
			p.compare(t, s, r, hit, false)
		})
	}
}

// TestRepairBesideOthers repairs a store while it is written to and read.
func TestRepairBesideOthers(t *testing.T) {
	t.Parallel()
	p := newSample(t, 2000)
	s := p.open(t, p.dir)
	defer s.Close()
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer func() {
		stop.Store(true)
		wg.Wait()
	}()
	var readers atomic.Int64
	for i := range 2 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 5))
			for !stop.Load() {
				seq := r.Uint64N(s.State().Last) + 1
				m, err := s.Load(seq)
				switch {
				case err == nil:
					if want := sampleMessage(seq); !bytes.Equal(m.Data, want.Data) || m.Subject != want.Subject {
						t.Errorf("message %d is another one", seq)
					}
					readers.Add(1)
				case errors.Is(err, storage.ErrNotFound), errors.Is(err, storage.ErrCorrupt):
				default:
					t.Errorf("load %d: %v", seq, err)
				}
				subject := fmt.Sprintf("s.%d", r.IntN(sampleSubjects))
				m, err = s.LoadNext(storage.Filter{Patterns: []string{subject}}, seq)
				if err == nil && m.Subject != subject {
					t.Errorf("next of %s is of %s", subject, m.Subject)
				}
			}
		})
	}
	lsn := p.applied
	for i := range 5 {
		pages := hurt(t, p, p.dir, 1+i)
		done := make(chan struct{})
		var r RepairReport
		var err error
		go func() {
			defer close(done)
			r, err = s.Repair(t.Context(), nil)
		}()
		p.applied = lsn
		for n, going := 0, true; going && n < 500; n++ {
			select {
			case <-done:
				going = false
			default:
				lsn = p.grow(t, s, 1, false)
				p.applied = lsn
			}
		}
		<-done
		if err != nil {
			t.Fatal(err)
		}
		p.compare(t, s, r, func(on []uint64) bool {
			return slices.ContainsFunc(on, func(q uint64) bool { return pages[q] })
		}, false)
		for seq := range p.msgs {
			if inSpans(r.Lost, seq) {
				delete(p.msgs, seq)
				p.deleted[seq] = true
			}
		}
		freezeAt(t, s, lsn)
		p.state = s.State()
		p.load(t)
	}
	stop.Store(true)
	wg.Wait()
	if readers.Load() == 0 {
		t.Error("nothing has been read meanwhile")
	}
}

// TestCompact makes a store that has been drained smaller, beside a writer and
// checkpoints.
func TestCompact(t *testing.T) {
	t.Parallel()
	p := newSample(t, 3000)
	s := p.open(t, p.dir)
	defer func() { s.Close() }()
	all := func([]uint64) bool { return false }
	// All but every twentieth.
	lsn := p.applied + 1
	for seq := range p.msgs {
		if seq%20 != 0 {
			if _, err := s.Remove(seq); err != nil {
				t.Fatal(err)
			}
			delete(p.msgs, seq)
			p.deleted[seq] = true
		}
	}
	freezeAt(t, s, lsn)
	p.applied = lsn
	before, err := s.Waste()
	if err != nil || before.File < before.Used || before.Used+before.Free != before.File || before.Live != int64(s.State().Bytes) || before.After > before.File/2 {
		t.Fatalf("%+v, %v", before, err)
	}
	// Beside a writer the file may have grown since.
	alone, err := s.Compact(t.Context(), CompactOptions{BytesPerSecond: -1})
	if err != nil || alone.Before != before.File || alone.After > before.File/2 || alone.After != fileSize(t, s) {
		t.Fatalf("%+v, %v", alone, err)
	}
	for _, o := range []CompactOptions{{BytesPerSecond: -1}, {BytesPerSecond: 4 << 20, SliceBytes: 20_000}, {BytesPerSecond: -1, SliceBytes: 1000}} {
		type result struct {
			r   CompactReport
			err error
		}
		done := make(chan result)
		go func() {
			r, err := s.Compact(t.Context(), o)
			done <- result{r, err}
		}()
		var got result
		for going := true; going; {
			select {
			case got = <-done:
				going = false
			default:
				lsn = p.grow(t, s, 20, false)
				p.applied = lsn
				freezeAt(t, s, lsn)
			}
		}
		if got.err != nil {
			t.Fatal(got.err)
		}
		if got.r.Messages == 0 || got.r.Slices == 0 || got.r.Copied == 0 || got.r.Duration < got.r.Blocked {
			t.Errorf("report %+v", got.r)
		}
		p.compare(t, s, RepairReport{}, all, false)
	}
	lsn = p.grow(t, s, 100, false)
	freezeAt(t, s, lsn)
	want := s.State()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	verified(t, p.dir)
	s = p.open(t, p.dir)
	if s.State() != want || s.Applied() != lsn {
		t.Errorf("opened again: %+v, was %+v", s.State(), want)
	}
	p.compare(t, s, RepairReport{}, all, false)
	names, err := os.ReadDir(p.dir)
	if err != nil || len(names) != 2 {
		t.Errorf("left are %v, %v", names, err)
	}
}

// TestCompactRefusals leaves the file as it was.
func TestCompactRefusals(t *testing.T) {
	p := newSample(t, 800)
	s := p.open(t, p.dir)
	defer s.Close()
	file := filepath.Join(p.dir, FileName)
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Compact(t.Context(), CompactOptions{Free: func(string) (int64, error) { return 1 << 20, nil }})
	if !errors.Is(err, ErrPostponed) {
		t.Errorf("without room: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = s.Compact(ctx, CompactOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	if after, err := os.ReadFile(file); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file has changed: %v", err)
	}
	hurt(t, p, p.dir, 2)
	if _, err = s.Compact(t.Context(), CompactOptions{}); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("damaged: %v", err)
	}
	if names, err := os.ReadDir(p.dir); err != nil || len(names) != 2 {
		t.Errorf("left are %v, %v", names, err)
	}
	s.Close()
	if _, err = s.Compact(t.Context(), CompactOptions{}); !errors.Is(err, storage.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// TestScrub finds nothing in an intact store, and every damage to a value.
func TestScrub(t *testing.T) {
	t.Parallel()
	p := newSample(t, 2000)
	s := p.open(t, p.dir)
	defer s.Close()
	r, err := s.Scrub(t.Context(), 0, func(err error) { t.Error(err) })
	if err != nil || r.Messages != p.state.Msgs || r.Damaged != 0 || r.Bytes < int64(p.state.Bytes)/2 {
		t.Errorf("%+v, %v", r, err)
	}
	// At a limit, beside a writer.
	done := make(chan error)
	go func() {
		_, err := s.Scrub(t.Context(), 8<<20, func(err error) { t.Error(err) })
		done <- err
	}()
	for going := true; going; {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			going = false
		default:
			lsn := p.grow(t, s, 20, false)
			freezeAt(t, s, lsn)
			p.applied = lsn
		}
	}
	p.state = s.State()
	p.load(t)
	// One octet of each of some messages.
	f, err := os.OpenFile(filepath.Join(p.dir, FileName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := map[uint64]bool{}
	for seq, m := range p.msgs {
		if seq%97 != 0 || len(m.Data) < 30 {
			continue
		}
		on := p.places[seq]
		at := -1
		for _, q := range on[1:] {
			from := int(q) * pageSize
			if i := bytes.Index(p.file[from:from+pageSize], m.Data[:20]); i >= 0 {
				at = from + i
				break
			}
		}
		if at < 0 {
			continue // it goes over the end of a page
		}
		if _, err := f.WriteAt([]byte{p.file[at] ^ 0x40}, int64(at)); err != nil {
			t.Fatal(err)
		}
		want[seq] = true
	}
	found := map[uint64]bool{}
	if _, err := s.Scrub(t.Context(), 0, func(err error) {
		if seq, ok := storage.Damaged(err); ok {
			found[seq] = true
		} else {
			t.Errorf("found %v", err)
		}
	}); err != nil {
		t.Error(err)
	}
	if len(want) < 5 || len(want) != len(found) {
		t.Errorf("found %v, damaged are %v", found, want)
	}
	for seq := range want {
		if !found[seq] {
			t.Errorf("message %d is damaged, and not found to be", seq)
		}
	}
	// A leaf, a meta page.
	hurt(t, p, p.dir, 1)
	meta := boltpages.Open(f, int64(len(p.file))).Metas()[1].Page
	if _, err := f.WriteAt(make([]byte, 100), int64(meta)*pageSize); err != nil {
		t.Fatal(err)
	}
	n := 0
	if _, err := s.Scrub(t.Context(), 0, func(err error) {
		if _, ok := storage.Damaged(err); !ok {
			n++
			if !errors.Is(err, storage.ErrCorrupt) {
				t.Errorf("found %v", err)
			}
		}
	}); err != nil || n < 2 {
		t.Errorf("%d findings beside messages, %v", n, err)
	}
}
