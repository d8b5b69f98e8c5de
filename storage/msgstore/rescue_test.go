package msgstore

import (
	"bytes"
	"math"
	"testing"
	"time"

	"petiole/storage"
)

// TestRescueTakesNoLonger: octets that make most places of a damaged chunk look
// like a record of 48 KiB do not make each of them a sum over so many, which
// would be some hundred times what it takes if they look like one of 20 octets.
func TestRescueTakesNoLonger(t *testing.T) {
	seal := newSealer([16]byte{1, 2, 3}, bucketMsgs)
	const base = 100
	rescue := func(pattern []byte) time.Duration {
		m := storage.Message{Seq: base + 1, Time: 5, Subject: "s", Data: []byte("intact")}
		b := chunkBuilder{seal: seal, max: chunkMax}
		b.reset(base)
		b.add(&storage.Message{Seq: base, Time: 4, Subject: "s", Data: bytes.Repeat(pattern, 60_000/len(pattern))})
		b.add(&m)
		v := b.appendTo(nil)
		v[chunkHeader] ^= 1                               // the table
		v[chunkHeader+2*chunkEntry+recordFixed+2] ^= 0x40 // lengths of the first message
		best := time.Duration(math.MaxInt64)
		for range 7 {
			found := 0
			began := time.Now()
			rescueChunk(seal, seqKey(base), v, func(got storage.Message, _ []byte) {
				found++
				if got.Seq != m.Seq || !bytes.Equal(got.Data, m.Data) {
					t.Fatalf("found %d: %.20q", got.Seq, got.Data)
				}
			})
			best = min(best, time.Since(began))
			if found != 1 {
				t.Fatalf("%d messages found", found)
			}
		}
		return best
	}
	short := rescue([]byte{1})
	long := rescue([]byte{1, 1, 0xff, 0xff, 2}) // lengths in three octets as often as can be
	t.Logf("%v, %v", short, long)
	if long > 60*short {
		t.Errorf("with long records %v, with short ones %v", long, short)
	}
}
