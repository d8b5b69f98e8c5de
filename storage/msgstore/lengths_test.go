package msgstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
)

// TestWrongLengths has each page in use say that it goes on over other pages than it
// does. bbolt would give those free, and write over what is on them: instead the
// checkpoint says what is wrong, and a repair finds all messages.
func TestWrongLengths(t *testing.T) {
	if testing.Short() {
		t.Skip("a long search, in which nothing runs at the same time as something else")
	}
	t.Parallel()
	p := newSample(t, 1500)
	list := boltpages.Open(bytes.NewReader(p.file), int64(len(p.file))).Metas()[0].Freelist
	told, untold, repaired := map[boltpages.Kind]int{}, map[boltpages.Kind][]uint64{}, 0
	for q := range uint64(len(p.file) / pageSize) {
		kind := p.kinds[q]
		if kind != boltpages.KindBranch && kind != boltpages.KindLeaf && q != list {
			continue
		}
		at := q*pageSize + 12
		over := binary.NativeEndian.Uint32(p.file[at:])
		says := []uint32{over + 1, over ^ 1<<18} // with more, to no end
		if over > 0 {
			says = append(says, over-1)
		}
		for _, n := range says {
			file := bytes.Clone(p.file)
			binary.NativeEndian.PutUint32(file[at:], n)
			dir := p.damaged(t, file)
			if q == list {
				// It has the checksum of the list, if it is that old.
				if err := os.Remove(filepath.Join(dir, FloorName)); err != nil {
					t.Fatal(err)
				}
			}
			c := &sample{state: p.state, applied: p.applied, places: p.places, msgs: maps.Clone(p.msgs), deleted: maps.Clone(p.deleted), kvs: maps.Clone(p.kvs)}
			s := c.open(t, dir)
			report, had := RepairReport{}, repaired
			put := func(round uint64) {
				lsn := c.grow(t, s, 60, false)
				for seq := range maps.Clone(c.msgs) {
					// Chunks are given up when little of them is left.
					if seq%50 != round && (round != 1 || !slices.Contains(c.places[seq], q) || seq%8 == 0) {
						continue
					}
					if _, err := s.Remove(seq); err != nil {
						t.Fatal(err)
					}
					delete(c.msgs, seq)
					c.deleted[seq] = true
				}
				if !s.Freeze(lsn, nil) {
					t.Fatal("not frozen")
				}
				c.applied = lsn
				err := s.Checkpoint()
				if errors.Is(err, storage.ErrCorrupt) {
					told[kind]++
					if report, err = s.Repair(t.Context(), nil); err == nil {
						err = s.Checkpoint()
					}
					repaired++
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			for round := range uint64(3) {
				put(round)
			}
			if repaired == had {
				untold[kind] = append(untold[kind], q)
			}
			// All is there. What has been deleted stays that.
			c.compare(t, s, report, func([]uint64) bool { return false }, false)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if report.Parked != "" {
				verified(t, dir)
			}
			// A repair at once finds all, too.
			dir2 := p.damaged(t, file)
			r, err := Salvage(dir2, SalvageOptions{Log: quiet()})
			if err != nil {
				t.Fatal(err)
			}
			p.check(t, dir2, r, func([]uint64) bool { return false }, false)
			if len(r.Lost)+len(r.Doubtful)+len(r.LostKeys)+len(r.StaleKeys) > 0 {
				t.Errorf("report: %+v", r)
			}
			if t.Failed() {
				t.Fatalf("with page %d, a %s, that says it goes on over %d pages, and does over %d: %+v", q, kind, n, over, report)
			}
			os.RemoveAll(dir)
			os.RemoveAll(dir2)
		}
	}
	if told[boltpages.KindBranch] == 0 || told[boltpages.KindLeaf] == 0 || told[boltpages.KindFreelist] == 0 {
		t.Errorf("told of %v", told)
	}
	if len(untold) > 0 {
		t.Errorf("changed without a word: pages %v", untold)
	}
	t.Logf("told of %v", told)
}
