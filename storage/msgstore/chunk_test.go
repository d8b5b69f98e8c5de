package msgstore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"testing"

	"pgregory.net/rapid"

	"petiole/storage"
)

var chunkSeal = newSealer([16]byte{1, 2, 3}, bucketMsgs)

func sameMessage(a, b storage.Message) bool {
	return a.Seq == b.Seq && a.Time == b.Time && a.Subject == b.Subject && bytes.Equal(a.Header, b.Header) &&
		(a.Header == nil) == (b.Header == nil) && bytes.Equal(a.Data, b.Data)
}

// buildChunk packs as many of msgs as fit behind one another from base on.
func buildChunk(base uint64, max int, msgs []storage.Message) (v []byte, n int) {
	b := chunkBuilder{seal: chunkSeal, max: max}
	b.reset(base)
	for ; n < len(msgs) && b.fits(msgs[n].Seq, recordSize(&msgs[n])); n++ {
		b.add(&msgs[n])
	}
	return b.appendTo(nil), n
}

func drawMessages(t *rapid.T, base uint64) []storage.Message {
	msgs := make([]storage.Message, rapid.IntRange(1, 30).Draw(t, "n"))
	seq := base
	for i := range msgs {
		m := &msgs[i]
		if i > 0 {
			seq++
		}
		if rapid.IntRange(0, 4).Draw(t, "gap") == 0 {
			seq += uint64(rapid.IntRange(0, 3000).Draw(t, "by"))
		}
		m.Seq, m.Time = seq, rapid.Int64().Draw(t, "time")
		m.Subject = rapid.StringN(1, 20, -1).Draw(t, "subject")
		m.Data = rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(t, "data")
		if rapid.IntRange(0, 3).Draw(t, "with header") == 0 {
			m.Header = rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "header")
		}
	}
	return msgs
}

func TestChunkRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		base := rapid.Uint64Range(1, 1<<60).Draw(t, "base")
		msgs := drawMessages(t, base+uint64(rapid.IntRange(0, 2).Draw(t, "head")))
		v, n := buildChunk(base, rapid.SampledFrom([]int{1, 500, 2000, 1 << 20}).Draw(t, "max"), msgs)
		key := seqKey(base)
		c, err := parseChunk(chunkSeal, key, v)
		if err != nil || c.n != n || c.last() != msgs[n-1].Seq {
			t.Fatalf("%d messages became %+v, %v", n, c, err)
		}
		for i, want := range msgs[:n] {
			if m, err := c.message(chunkSeal, i); err != nil || !sameMessage(m, want) {
				t.Fatalf("%+v became %+v, %v", want, m, err)
			}
			if len(c.record(i)) != recordSize(&want) {
				t.Fatalf("a record of %d octets, expected are %d", len(c.record(i)), recordSize(&want))
			}
		}
		// Look-up agrees with a walk.
		for range 20 {
			seq := base - 1 + rapid.Uint64Range(0, c.last()-base+3).Draw(t, "seq")
			at, ok := 0, false
			for at < n && msgs[at].Seq < seq {
				at++
			}
			ok = at < n && msgs[at].Seq == seq
			if i, found := c.find(seq); i != at || found != ok {
				t.Fatalf("find(%d) = %d, %v, want %d, %v", seq, i, found, at, ok)
			}
		}
		// Records move to another chunk as they are.
		b := chunkBuilder{seal: chunkSeal, max: 1 << 20}
		b.reset(msgs[0].Seq)
		for i := range n {
			b.move(c.seq(i), c.record(i))
		}
		moved := b.appendTo(nil)
		c, err = parseChunk(chunkSeal, seqKey(msgs[0].Seq), moved)
		if err != nil || c.n != n {
			t.Fatalf("moved: %+v, %v", c, err)
		}
		for i, want := range msgs[:n] {
			if m, err := c.message(chunkSeal, i); err != nil || !sameMessage(m, want) {
				t.Fatalf("moved: %+v became %+v, %v", want, m, err)
			}
		}
		// Another key, bucket or store is found out.
		if _, err := parseChunk(chunkSeal, seqKey(base+1), v); err == nil {
			t.Fatal("a chunk under another key is accepted")
		}
		for _, other := range []sealer{newSealer([16]byte{2}, bucketMsgs), newSealer([16]byte{1, 2, 3}, bucketKV)} {
			if _, err := parseChunk(other, key, v); err == nil {
				t.Fatal("another's chunk is accepted")
			}
			rescueChunk(other, key, v, func(m storage.Message, _ []byte) { t.Fatalf("another's message is accepted: %+v", m) })
		}
	})
}

func TestCRCUint64(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		crc, v := rapid.Uint32().Draw(t, "crc"), rapid.Uint64().Draw(t, "v")
		if got, want := crcUint64(crc, v), crc32.Update(crc, castagnoli, binary.BigEndian.AppendUint64(nil, v)); got != want {
			t.Fatalf("%x, want %x", got, want)
		}
	})
}

// Whatever single bit flips, no message reads wrong, at most one is lost, and
// none if the bit is outside the records.
func TestChunkFlippedBit(t *testing.T) {
	const base = 1000
	msgs := make([]storage.Message, 12)
	for i := range msgs {
		msgs[i] = storage.Message{Seq: base + uint64(i*i), Time: int64(i) * 1e9, Subject: fmt.Sprintf("s.%d", i), Data: bytes.Repeat([]byte{byte(i)}, 10*i)}
		if i%3 == 0 {
			msgs[i].Header = []byte("NATS/1.0\r\nA: b\r\n\r\n")
		}
	}
	v, n := buildChunk(base, 1<<14, msgs)
	if n != len(msgs) {
		t.Fatal(n)
	}
	records := chunkHeader + chunkEntry*n
	for bit := range 8 * len(v) {
		w := bytes.Clone(v)
		w[bit/8] ^= 1 << (bit % 8)
		intact := map[uint64]storage.Message{}
		c, err := parseChunk(chunkSeal, seqKey(base), w)
		if bit/8 < records {
			if err == nil {
				t.Fatalf("bit %d of the header goes unnoticed", bit)
			}
			rescueChunk(chunkSeal, seqKey(base), w, func(m storage.Message, _ []byte) { intact[m.Seq] = m })
		} else {
			if err != nil {
				t.Fatalf("bit %d of a record makes the chunk unreadable: %v", bit, err)
			}
			for i := range c.n {
				if m, err := c.message(chunkSeal, i); err == nil {
					intact[m.Seq] = m
				}
			}
		}
		lost := 0
		for _, m := range msgs {
			got, ok := intact[m.Seq]
			if !ok {
				lost++
			} else if !sameMessage(got, m) {
				t.Fatalf("bit %d: message %d reads %+v", bit, m.Seq, got)
			}
		}
		want := 0
		if bit/8 >= records {
			want = 1
		}
		if lost != want {
			t.Fatalf("bit %d: %d messages are lost, want %d", bit, lost, want)
		}
	}
	// The key that the file has it under may be what is damaged.
	found := 0
	rescueChunk(chunkSeal, seqKey(base^64), v, func(m storage.Message, _ []byte) {
		if !sameMessage(m, msgs[found]) {
			t.Fatalf("message %d reads %+v", m.Seq, m)
		}
		found++
	})
	if found != n {
		t.Fatalf("under a damaged key %d messages are found", found)
	}
}

// Octets that nobody made are never a message, and never make a panic.
func FuzzChunk(f *testing.F) {
	msgs := []storage.Message{
		{Seq: 7, Time: 5, Subject: "a.b", Header: []byte("NATS/1.0\r\n\r\n"), Data: []byte("data")},
		{Seq: 9, Time: 6, Subject: "c", Data: make([]byte, 300)},
		{Seq: 600, Subject: "d"},
	}
	v, _ := buildChunk(7, 1<<14, msgs)
	f.Add(v, uint64(7), uint16(0), uint16(0))
	f.Add(v, uint64(8), uint16(13), uint16(1))
	f.Add(v[:30], uint64(7), uint16(16), uint16(0xff))
	f.Add([]byte{}, uint64(0), uint16(0), uint16(0))
	v, _ = buildChunk(1, 1, msgs[1:])
	f.Add(v, uint64(1), uint16(20), uint16(4))
	f.Fuzz(func(t *testing.T, v []byte, base uint64, at, xor uint16) {
		key := seqKey(base)
		check := func(m storage.Message, rec []byte) {
			if m.Subject == "" || len(m.Subject)+len(m.Header)+len(m.Data) > len(rec) {
				t.Fatalf("%+v out of %q", m, rec)
			}
		}
		walk := func(v []byte) {
			c, err := parseChunk(chunkSeal, key, v)
			if err != nil {
				rescueChunk(chunkSeal, key, v, check)
				return
			}
			for i := range c.n {
				if j, ok := c.find(c.seq(i)); !ok || j != i {
					t.Fatalf("find(%d) = %d, %v", c.seq(i), j, ok)
				}
				if m, err := c.message(chunkSeal, i); err == nil {
					check(m, c.record(i))
				}
			}
		}
		walk(v)
		// With checksums that are right, content is trusted in no other way.
		if len(v) >= chunkHeader {
			w := bytes.Clone(v)
			binary.LittleEndian.PutUint64(w[overhead:], base)
			w[0] = version
			if n := int(at) % len(w); n > overhead {
				w[n] ^= byte(xor)
			}
			head := chunkHeader + chunkEntry*int(binary.LittleEndian.Uint16(w[overhead+8:]))
			if head <= len(w) {
				binary.LittleEndian.PutUint32(w[1:], chunkSeal.chunk(w[overhead:head], len(w)))
			}
			walk(w)
		}
		rec := bytes.Clone(v)
		if len(rec) >= recordFixed {
			if _, size, err := decodeRecord(chunkSeal, 1, rec); err != nil && size > 0 {
				seq := 1 + uint64(binary.LittleEndian.Uint16(rec[4:]))
				binary.LittleEndian.PutUint32(rec, chunkSeal.record(seq, rec[6:size]))
				m, size, err := decodeRecord(chunkSeal, 1, rec)
				if err != nil {
					t.Fatal(err)
				}
				check(m, rec[:size])
				again, _, err := decodeRecord(chunkSeal, 1, appendRecord(nil, chunkSeal, 1, &m))
				if err != nil || !sameMessage(again, m) {
					t.Fatalf("%+v became %+v, %v", m, again, err)
				}
			}
		}
	})
}
