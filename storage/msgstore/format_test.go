package msgstore

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"petiole/storage"
	"petiole/storage/internal/table"
)

func TestMessageRoundTrip(t *testing.T) {
	seal := newSealer([16]byte{1}, bucketMsgs)
	rapid.Check(t, func(t *rapid.T) {
		m := storage.Message{
			Seq:     rapid.Uint64().Draw(t, "seq"),
			Time:    rapid.Int64().Draw(t, "time"),
			Subject: rapid.StringN(1, 20, -1).Draw(t, "subject"),
			Data:    rapid.SliceOf(rapid.Byte()).Draw(t, "data"),
		}
		if rapid.Bool().Draw(t, "with header") {
			m.Header = rapid.SliceOf(rapid.Byte()).Draw(t, "header")
		}
		v := appendMessage(make([]byte, overhead), &m)
		if len(v) > messageSize(&m) {
			t.Fatalf("%d octets, bounded by %d", len(v), messageSize(&m))
		}
		key := seqKey(m.Seq)
		seal.finish(key, v)
		c, err := seal.open(key, v)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeMessage(m.Seq, c)
		if err != nil || got.Seq != m.Seq || got.Time != m.Time || got.Subject != m.Subject || !bytes.Equal(got.Header, m.Header) ||
			(got.Header == nil) != (m.Header == nil) || !bytes.Equal(got.Data, m.Data) {
			t.Fatalf("%+v became %+v, %v", m, got, err)
		}
		// Any changed bit, another key, bucket or store is found out.
		w := bytes.Clone(v)
		w[rapid.IntRange(0, len(w)-1).Draw(t, "octet")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		if _, err := seal.open(key, w); err == nil {
			t.Fatal("a flipped bit goes unnoticed")
		}
		for _, other := range []struct {
			s   sealer
			key []byte
		}{{seal, seqKey(m.Seq + 1)}, {newSealer([16]byte{2}, bucketMsgs), key}, {newSealer([16]byte{1}, bucketKV), key}} {
			if _, err := other.s.open(other.key, v); !errors.Is(err, errChecksum) {
				t.Fatalf("another's value is accepted: %v", err)
			}
		}
	})
}

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
	m := storage.Message{Time: 5, Subject: "a.b", Header: []byte("NATS/1.0\r\n\r\n"), Data: []byte("data")}
	f.Add(appendMessage(nil, &m))
	f.Add(appendPosts(nil, 1, []uint64{1, 5, 500}))
	f.Add(encodeState(1, storage.State{First: 1, Last: 9}, 3, []table.Span{{First: 2, Last: 8}})[overhead:])
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 'x'})
	f.Fuzz(func(t *testing.T, c []byte) {
		if m, err := decodeMessage(1, bytes.Clone(c)); err == nil {
			if m.Subject == "" || len(m.Subject)+len(m.Header)+len(m.Data) > len(c) {
				t.Fatalf("%+v out of %q", m, c)
			}
			again, err := decodeMessage(1, appendMessage(nil, &m))
			if err != nil || again.Subject != m.Subject || !bytes.Equal(again.Header, m.Header) || !bytes.Equal(again.Data, m.Data) || again.Time != m.Time {
				t.Fatalf("%+v became %+v, %v", m, again, err)
			}
		}
		_, _ = decodePosts(c, 1, nil)
		_, _, _, _, _ = decodeState(c)
	})
}
