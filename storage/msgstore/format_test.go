package msgstore

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"petiole/storage"
	"petiole/storage/internal/table"
)

func TestPostsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seqs := rapid.SliceOfN(rapid.Uint64(), 1, 300).Draw(t, "seqs")
		slices.Sort(seqs)
		got, err := decodePosts(appendPosts(nil, seqs[0], seqs), seqs[0], nil)
		if err != nil || !slices.Equal(got, seqs) {
			t.Fatalf("%v became %v, %v", seqs, got, err)
		}
	})
}

func TestStateRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		st := storage.State{
			Msgs: rapid.Uint64().Draw(t, "msgs"), Bytes: rapid.Uint64().Draw(t, "bytes"),
			First: rapid.Uint64().Draw(t, "first"), FirstTime: rapid.Int64().Draw(t, "first time"),
			Last: rapid.Uint64().Draw(t, "last"), LastTime: rapid.Int64().Draw(t, "last time"),
		}
		var spans []table.Span
		for range rapid.IntRange(0, 3).Draw(t, "spans") {
			from := rapid.Uint64Range(0, 1<<62).Draw(t, "from")
			spans = append(spans, table.Span{First: from, Last: from + rapid.Uint64Range(0, 1<<62).Draw(t, "length")})
		}
		id := rapid.Uint64().Draw(t, "id")
		lsn, got, gotID, gotSpans, err := decodeState(encodeState(7, st, id, spans)[overhead:])
		if err != nil || lsn != 7 || got != st || gotID != id || !slices.Equal(gotSpans, spans) {
			t.Fatalf("%+v became %+v, %v", st, got, err)
		}
	})
}

// Content that passes its checksum is trusted in no other way.
func FuzzDecode(f *testing.F) {
	f.Add(appendPosts(nil, 1, []uint64{1, 5, 500}))
	f.Add(encodeState(1, storage.State{First: 1, Last: 9}, 3, []table.Span{{First: 2, Last: 8}})[overhead:])
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 'x'})
	f.Add((&subjEntry{now: table.Subject{ID: 3, Msgs: 2, Bytes: 90, First: 5, Last: 9}}).encode(nil))
	f.Add((&subjEntry{tag: 7, now: table.Subject{ID: 3}, old: table.Subject{ID: 3, Msgs: 2, Bytes: 90, First: 5, Last: 9}}).encode(nil))
	f.Fuzz(func(t *testing.T, c []byte) {
		if seqs, err := decodePosts(c, 1, nil); err == nil && len(seqs) > len(c) {
			t.Fatalf("%d sequences out of %d octets", len(seqs), len(c))
		}
		if e, err := decodeEntry("s", c); err == nil {
			if again, err := decodeEntry("s", e.encode(nil)); err != nil || again != e {
				t.Fatalf("%+v became %+v, %v", e, again, err)
			}
		}
		if _, _, _, spans, err := decodeState(c); err == nil && len(spans) > len(c) {
			t.Fatalf("%d spans out of %d octets", len(spans), len(c))
		}
	})
}
