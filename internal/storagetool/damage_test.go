package storagetool

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"petiole/storage"
	"petiole/storage/msgstore"
)

// A file whose pages make no sense is told of once, in plain words, with the
// command that repairs it; stat does not take its stream for an empty one.
func TestDamagedStructure(t *testing.T) {
	dir := fill(t, nil)
	file := filepath.Join(dir, "streams", "0000000000000002", msgstore.FileName)
	b := must(os.ReadFile(file))
	for i := 2 * 4096; i < len(b); i++ { // all but the two meta pages
		b[i] = 0xff
	}
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	s.Program = "hub"
	found := 0
	for _, d := range must(s.Verify()).Damage {
		if d.File != file {
			continue
		}
		found++
		if !strings.Contains(d.Remedy, "run `hub storage salvage`: it keeps everything whose checksum is right") {
			t.Errorf("finding: %+v", d)
		}
		if strings.Contains(d.Problem, "panic") || strings.Contains(d.Problem, "runtime error") || strings.Contains(d.Problem, "assertion") {
			t.Errorf("Go's own words: %s", d.Problem)
		}
	}
	if found != 1 {
		t.Errorf("%d findings about the file", found)
	}
	st := must(s.Stat())
	if len(st.Damage) == 0 || !st.Streams[0].Damaged || st.Streams[0].File != int64(len(b)) {
		t.Errorf("stat: %+v", st)
	}
	if done := must(s.Compact(t.Context(), CompactOptions{All: true})); len(done) != 1 || done[0].Problem == "" || !strings.Contains(done[0].Remedy, "hub storage salvage") {
		t.Errorf("compacted: %+v", done)
	}
}

// One bad page leads to many findings about the structure of one file.
func TestStructureIsSaidOnce(t *testing.T) {
	r := &Report{salvage: "salvage"}
	for _, file := range []string{"a/msgs.db", "a/msgs.db", "b/msgs.db"} {
		for _, reason := range []string{storage.StructurePrefix + "page 1 is not what it should be", storage.StructurePrefix + "page 2: unreachable unfreed", "meta page 0 fails its checksum"} {
			r.add("S", file, &storage.CorruptError{File: file, Reason: reason})
		}
	}
	if len(r.Damage) != 4 || r.Damage[0].Remedy != "salvage" || r.Damage[2].File != "b/msgs.db" {
		t.Errorf("got %+v", r.Damage)
	}
}

// A backup is put in place as what it is of.
func TestBackupOfTheOtherProgram(t *testing.T) {
	s := open(t, fill(t, nil))
	for _, c := range []struct{ owner, program string }{{"edge", "hub"}, {"hub", "edge"}, {"edge", "edge"}} {
		from, to := filepath.Join(t.TempDir(), "copy"), filepath.Join(t.TempDir(), "store")
		must(s.Backup(t.Context(), from, BackupOptions{Owner: c.owner}))
		_, err := Restore(t.Context(), from, to, RestoreOptions{Program: c.program})
		if refused := errors.Is(err, ErrOtherProgram); refused != (c.owner != c.program) || !refused && err != nil {
			t.Errorf("of %s's to %s's: %v", c.owner, c.program, err)
		}
		if _, serr := os.Stat(to); (serr == nil) != (err == nil) {
			t.Errorf("of %s's to %s's: in place: %v", c.owner, c.program, serr)
		}
	}
}

// A backup with its end cut off says that, and what to do.
func TestCutBackup(t *testing.T) {
	s := open(t, fill(t, nil))
	from := filepath.Join(t.TempDir(), "copy")
	must(s.Backup(t.Context(), from, BackupOptions{}))
	size := must(os.Stat(from)).Size()
	for _, n := range []int64{size - 1, size / 2, size / 10} {
		if err := os.Truncate(from, n); err != nil {
			t.Fatal(err)
		}
		_, err := Restore(t.Context(), from, filepath.Join(t.TempDir(), "store"), RestoreOptions{})
		if err == nil || !strings.HasSuffix(err.Error(), "the file ends early; take another copy; nothing has been put in place") {
			t.Errorf("cut to %d of %d octets: %v", n, size, err)
		}
	}
}

func TestGroup(t *testing.T) {
	s := open(t, fill(t, nil))
	if g, err := s.Group("S"); g != 2 || err != nil {
		t.Errorf("got %d, %v", g, err)
	}
	if _, err := s.Group("T"); !errors.Is(err, ErrNoStream) {
		t.Errorf("no such stream: %v", err)
	}
}
