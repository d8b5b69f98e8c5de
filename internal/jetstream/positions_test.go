package jetstream

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"testing"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/storage"
)

// ingestOne has a stream take messages of an edge, from the position it has.
func ingestOne(t *testing.T, n *node, s *Stream, edge string, uid [16]byte, first, through uint64) (command.Position, error) {
	t.Helper()
	in := &command.Ingest{Edge: edge, UID: uid, Incarnation: 1, Base: 1, First: first, Through: through}
	if pos, ok := s.Position(edge, uid); ok {
		in.PrevChain = pos.Chain
	} else {
		in.PrevChain = command.Seed(uid, 1, 1)
	}
	in.Chain = [16]byte{byte(through)}
	for seq := first; seq <= through; seq++ {
		in.Msgs = append(in.Msgs, command.IngestMsg{Seq: seq, Subject: "s", Data: fmt.Append(nil, seq)})
	}
	type answer struct {
		pos command.Position
		err error
	}
	ch := make(chan answer, 1)
	s.Ingest(in, func(p command.Position, err error) { ch <- answer{p, err} })
	n.e.Kick()
	a := <-ch
	return a.pos, a.err
}

// An edge does not send again what the stream holds because damage has taken the
// note of how far that is.
func TestDamagedPosition(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	s := must(n.e.EnsureStream(api.StreamConfig{Name: "PLANT", Metadata: map[string]string{MetaIngest: "true"}}))
	uid := [16]byte{7}
	must(ingestOne(t, n, s, "EDGE", uid, 1, 3))
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	must(ingestOne(t, n, s, "EDGE", uid, 4, 6))
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	path := n.e.storePath(s.group)
	must(ingestOne(t, n, s, "EDGE", uid, 7, 8)) // in the log only
	n.crash()
	b := must(os.ReadFile(path))
	key := []byte(stream.PrefixPos + "EDGE/" + hex.EncodeToString(uid[:]))
	hits := 0
	for at := 0; ; hits++ {
		i := bytes.Index(b[at:], key)
		if i < 0 {
			break
		}
		at += i + len(key)
		b[at+12] ^= 1 // the value follows its key
	}
	if hits == 0 {
		t.Fatal("the position is not in the file")
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	for start := range 2 {
		n = startNode(t, dir)
		s, ok := n.e.Stream("PLANT")
		if !ok {
			t.Fatal("the stream does not serve")
		}
		if d := n.e.Damage(); start == 0 && (d.Repairs != 1 || d.Positions != 1) {
			t.Fatalf("%+v", d)
		}
		if pos, ok := s.Position("EDGE", uid); !ok || pos.Through != uint64(8+start) || pos.Msgs != uint64(8+start) {
			t.Fatalf("start %d: the position is %+v", start, pos)
		}
		if st := s.State(); st.Msgs != uint64(8+start) {
			t.Fatalf("start %d: %+v", start, st)
		}
		must(ingestOne(t, n, s, "EDGE", uid, uint64(9+start), uint64(9+start)))
		n.stop()
	}
}

// Copies of positions go with the stream.
func TestPositionsOfDeletedStream(t *testing.T) {
	n := startNode(t, t.TempDir())
	_, js := n.connect()
	s := must(n.e.EnsureStream(api.StreamConfig{Name: "PLANT", Metadata: map[string]string{MetaIngest: "true"}}))
	must(ingestOne(t, n, s, "EDGE", [16]byte{7}, 1, 3))
	if err := n.e.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	count := func() (k int) {
		if err := n.e.meta.ForEach(bucketPositions, "", func(string, []byte) error { k++; return nil }); err != nil {
			t.Fatal(err)
		}
		return k
	}
	if count() != 1 {
		t.Fatalf("there are %d copies", count())
	}
	if err := js.DeleteStream(testContext(t), "PLANT"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the copy goes", func() bool { return count() == 0 })
}

func TestNewestCopy(t *testing.T) {
	list, err := parseCopies(appendCopies(nil, posCopy{30, []byte("new")}, posCopy{20, []byte("old")}))
	if err != nil {
		t.Fatal(err)
	}
	for at, want := range map[storage.LSN]string{19: "", 20: "old", 29: "old", 30: "new", 99: "new"} {
		if c, ok := newestCopy(list, at); string(c.value) != want || ok != (want != "") {
			t.Errorf("as of %d: %q", at, c.value)
		}
	}
	for _, bad := range []string{"\x80", "\x01", "\x01\x02x"} {
		if _, err := parseCopies([]byte(bad)); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}
