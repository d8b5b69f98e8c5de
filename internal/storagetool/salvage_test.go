package storagetool

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"petiole/storage"
)

// TestSalvageAndCompact repairs the one file that is damaged, and leaves
// others alone.
func TestSalvageAndCompact(t *testing.T) {
	dir := fill(t, nil)
	s := open(t, dir)
	if done := must(s.Salvage(t.Context(), SalvageOptions{})); len(done) != 0 {
		t.Errorf("of an intact store: %+v", done)
	}
	if done := must(s.Compact(t.Context(), CompactOptions{})); len(done) != 1 || done[0].Report != nil || done[0].Waste.Worth {
		t.Errorf("compacted: %+v", done)
	}
	if done := must(s.Compact(t.Context(), CompactOptions{All: true, Stream: "S"})); len(done) != 1 || done[0].Report == nil || done[0].Report.Messages != perStream-1 {
		t.Errorf("compacted: %+v", done)
	}
	if _, err := s.Salvage(t.Context(), SalvageOptions{Stream: "T"}); !errors.Is(err, ErrNoStream) {
		t.Errorf("no such stream: %v", err)
	}
	// One octet of one message, and a meta page.
	file := filepath.Join(dir, "streams", "0000000000000002", "msgs.db")
	b := must(os.ReadFile(file))
	hurt := 0
	for at := 0; ; hurt++ {
		i := bytes.Index(b[at:], []byte("payload number 5"))
		if i < 0 {
			break
		}
		at += i
		b[at] ^= 1
	}
	clear(b[:4096])
	if err := os.WriteFile(file, b, 0o600); err != nil || hurt == 0 {
		t.Fatal(hurt, err)
	}
	done := must(s.Salvage(t.Context(), SalvageOptions{}))
	if len(done) != 1 || done[0].Stream != "S" || done[0].Group != 2 || done[0].Found == 0 || done[0].Report == nil {
		t.Fatalf("salvaged: %+v", done)
	}
	r := done[0].Report
	if r.Kept != perStream-2 || r.LostMsgs() != 1 || r.Lost[0] != (storage.Span{First: 5, Last: 5}) || len(r.LostKeys) > 0 || r.KeysDoubtful && r.State.Last != perStream {
		t.Errorf("report: %+v", r)
	}
	if rep := must(s.Verify()); len(rep.Damage) > 0 || rep.Messages != perStream-2 {
		t.Errorf("verify: %+v", rep)
	}
	st := must(s.Stat())
	if st.ParkedBytes != int64(len(b)) || st.Total.PerContent <= 0 || st.Streams[0].Space <= 0 {
		t.Errorf("stat: %+v", st)
	}
}
