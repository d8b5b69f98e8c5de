package wal

import (
	"bytes"
	"testing"

	"petiole/storage"
)

// TestFindTakesNoLonger: where a batch is damaged, octets that make every fourth
// place look like a record of 2 MiB do not make each of them a sum over so many.
// (Added up it would be 2 TB, which takes longer than a test may.)
func TestFindTakesNoLonger(t *testing.T) {
	const first, seed = 1000, 0xabcdef
	record := func(data []byte) []byte {
		b := make([]byte, recordHeaderSize+len(data))
		copy(b[recordHeaderSize:], data)
		putRecordHeader(b, len(data), 7, 1)
		return b
	}
	hostile := bytes.Repeat([]byte{0, 0, 0x20, 0}, 1<<20)
	payload := bytes.Join([][]byte{record([]byte("one")), record(hostile), record([]byte("three")), record([]byte("four"))}, nil)
	h := &batchHeader{first: first, count: 4, crc: finishRecords(payload, first, seed)}
	second := recordHeaderSize + len("one")
	payload[second+5] ^= 1 // its length
	recs, lost := decodeRecords(nil, nil, payload, h, seed)
	if len(lost) != 1 || lost[0].First != first+1 || lost[0].Last != first+1 {
		t.Errorf("lost: %+v", lost)
	}
	want := map[storage.LSN]string{first: "one", first + 2: "three", first + 3: "four"}
	for _, r := range recs {
		if want[r.LSN] != string(r.Data) {
			t.Errorf("record %d: %.20q", r.LSN, r.Data)
		}
		delete(want, r.LSN)
	}
	if len(want) > 0 {
		t.Errorf("not found: %v", want)
	}
}
