package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"strings"
	"testing"

	"petiole/storage"
)

func TestSegmentHeader(t *testing.T) {
	good := segmentHeader{version: formatVersion, num: 7, epoch: 0xfeed, first: 42, prev: 40, logID: [16]byte{1, 2, 3}, length: 64 << 20, created: 99}
	h, err := decodeSegmentHeader("f", good.encode())
	if err != nil || h != good {
		t.Fatalf("got %+v, %v, want %+v", h, err, good)
	}
	// fix makes the checksum match what was changed.
	fix := func(b []byte) {
		binary.LittleEndian.PutUint32(b[segmentHeaderCRC:], crc32.Checksum(b[:segmentHeaderCRC], castagnoli))
	}
	for _, c := range []struct {
		name   string
		change func(b []byte) []byte
		is     error
		text   string
	}{
		{"empty", func(b []byte) []byte { return nil }, storage.ErrCorrupt, "too short"},
		{"magic", func(b []byte) []byte { b[0]++; return b }, storage.ErrCorrupt, "magic"},
		{"checksum", func(b []byte) []byte { b[17]++; return b }, storage.ErrCorrupt, "checksum"},
		{"version", func(b []byte) []byte { b[8] = 9; fix(b); return b }, ErrFormat, "version 9"},
		{"cipher", func(b []byte) []byte { b[10] = 1; fix(b); return b }, ErrFormat, "encrypted"},
		{"key", func(b []byte) []byte { b[12] = 1; fix(b); return b }, ErrFormat, "encrypted"},
		{"first", func(b []byte) []byte { b[32] = 0; fix(b); return b }, storage.ErrCorrupt, "no sense"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := decodeSegmentHeader("some.wal", c.change(good.encode()))
			if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "some.wal") {
				t.Fatalf("got %v, want %v with %q and the file", err, c.is, c.text)
			}
		})
	}
}

func TestBatchHeader(t *testing.T) {
	good := batchHeader{kind: kindRecords, epoch: 5, num: 6, first: 10, durable: 9, length: 100, count: 3, crc: 77, log: 5}
	for _, c := range []struct {
		name   string
		change func(h *batchHeader)
		ok     bool
	}{
		{"good", func(h *batchHeader) {}, true},
		{"another epoch", func(h *batchHeader) { h.epoch++ }, false},
		{"another segment", func(h *batchHeader) { h.num++ }, false},
		{"unknown kind", func(h *batchHeader) { h.kind = 9 }, false},
		{"no LSN", func(h *batchHeader) { h.first, h.durable = 0, 0 }, false},
		{"durable before written", func(h *batchHeader) { h.durable = 10 }, false},
		{"negative length", func(h *batchHeader) { h.length = -1 }, false},
		{"huge length", func(h *batchHeader) { h.length = 1 << 62 }, false},
		{"no records", func(h *batchHeader) { h.count = 0 }, false},
		{"more records than fit", func(h *batchHeader) { h.count = 9 }, false},
		{"footer", func(h *batchHeader) { h.kind, h.length = kindFooter, 8192 }, true},
		{"footer inside the header", func(h *batchHeader) { h.kind, h.length = kindFooter, 512 }, false},
		{"footer within a sector", func(h *batchHeader) { h.kind, h.length = kindFooter, 8191 }, false},
		{"mark", func(h *batchHeader) { h.kind, h.length, h.count = kindMark, 0, 0 }, true},
		{"mark with records", func(h *batchHeader) { h.kind = kindMark }, false},
		{"closing mark", func(h *batchHeader) { h.kind, h.length, h.count, h.flags = kindMark, 0, 0, markClosing }, true},
		{"closing batch", func(h *batchHeader) { h.flags = markClosing }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := good
			c.change(&h)
			b := make([]byte, batchHeaderSize)
			h.encode(b)
			got, ok := decodeBatchHeader(b, good.epoch, good.num)
			if ok != c.ok || ok && got != h {
				t.Fatalf("got %+v, %v", got, ok)
			}
			for i := range b {
				b[i] ^= 0x10
				if _, ok := decodeBatchHeader(b, good.epoch, good.num); ok {
					t.Fatalf("accepted with byte %d changed", i)
				}
				b[i] ^= 0x10
			}
		})
	}
}

// payloadOf makes the payload of a batch with records of groups 1 and on.
func payloadOf(first storage.LSN, seed uint32, data ...string) ([]byte, batchHeader) {
	var p []byte
	for i, d := range data {
		b := make([]byte, recordHeaderSize)
		putRecordHeader(b, len(d), storage.GroupID(i+1), uint32(100+i))
		p = append(append(p, b...), d...)
	}
	return p, batchHeader{
		kind: kindRecords, first: first, length: int64(len(p)), count: uint32(len(data)), crc: finishRecords(p, first, seed),
	}
}

func TestDecodeRecords(t *testing.T) {
	const seed = 77
	p, h := payloadOf(5, seed, "one", "", "three")
	recs, lost := decodeRecords(nil, nil, p, &h, seed)
	if len(lost) > 0 || len(recs) != 3 || recs[2].LSN != 7 || recs[2].Group != 3 || !bytes.Equal(recs[2].Data, []byte("three")) {
		t.Fatalf("got %v, %v", recs, lost)
	}
	if cap(recs[0].Data) != 3 {
		t.Error("an append to a record's data would change the next record")
	}
	for n := range len(p) {
		if _, lost := decodeRecords(nil, nil, p[:n], &h, seed); len(lost) == 0 {
			t.Fatalf("accepted a payload cut to %d bytes", n)
		}
	}
	if _, lost := decodeRecords(nil, nil, p, &h, seed+1); len(lost) == 0 {
		t.Error("accepted records of another epoch")
	}
	moved := h
	moved.first++
	if recs, _ := decodeRecords(nil, nil, p, &moved, seed); len(recs) > 0 {
		t.Error("accepted records under other numbers")
	}
	p, h = payloadOf(5, seed, "x")
	clear(p[8:12])
	h.crc = finishRecords(p, 5, seed)
	if recs, _ := decodeRecords(nil, nil, p, &h, seed); len(recs) > 0 {
		t.Error("accepted group 0")
	}
}

// TestDamageCostsOneRecord flips every bit of a payload: the record that it hits
// is lost, under its number and, if its header is intact, with group and kind;
// all others are read.
func TestDamageCostsOneRecord(t *testing.T) {
	const seed = 99
	data := []string{"first", "", strings.Repeat("long ", 50), "x", "", strings.Repeat("\x00", 40), "last"}
	p, h := payloadOf(1000, seed, data...)
	at, hit := 0, 0
	for i, d := range data {
		end := at + recordHeaderSize + len(d)
		for bit := at * 8; bit < end*8; bit++ {
			p[bit/8] ^= 1 << (bit % 8)
			recs, lost := decodeRecords(nil, nil, p, &h, seed)
			p[bit/8] ^= 1 << (bit % 8)
			if len(lost) != 1 || lost[0].First != storage.LSN(1000+i) || lost[0].Last != lost[0].First || len(recs) != len(data)-1 {
				t.Fatalf("record %d, bit %d: lost %+v, %d records", i, bit, lost, len(recs))
			}
			for _, r := range recs {
				if k := int(r.LSN - 1000); k == i || string(r.Data) != data[k] || r.Group != storage.GroupID(k+1) || r.Last != uint32(100+k) {
					t.Fatalf("record %d, bit %d: got record %d with %q", i, bit, k, r.Data)
				}
			}
			if bit >= (at+recordHeaderSize)*8 {
				hit++
				if lost[0].Group != storage.GroupID(i+1) || lost[0].Kind != d[0] || lost[0].LastSeq != uint32(100+i) {
					t.Fatalf("record %d, bit %d: lost %+v", i, bit, lost[0])
				}
			} else if lost[0].Group != 0 {
				t.Fatalf("record %d, bit %d in the header: lost %+v", i, bit, lost[0])
			}
		}
		at = end
	}
	if hit == 0 {
		t.Fatal("no data hit")
	}
}

// TestDecodeRecordsHostile: a message that contains what looks like records, but
// for the epoch, does not become any when the record around it is damaged.
func TestDecodeRecordsHostile(t *testing.T) {
	fake, _ := payloadOf(6, 1, "evil", "evil")
	p, h := payloadOf(5, 2, string(fake), "good")
	p[4] ^= 1 // the length
	recs, lost := decodeRecords(nil, nil, p, &h, 2)
	if len(recs) != 1 || string(recs[0].Data) != "good" || recs[0].LSN != 6 || len(lost) != 1 || lost[0].First != 5 {
		t.Fatalf("got %v, lost %v", recs, lost)
	}
}

func FuzzDecodeRecords(f *testing.F) {
	p, h := payloadOf(5, 3, "one", "", "three")
	f.Add(p, h.count, h.crc)
	f.Add(p[:len(p)-1], h.count, uint32(0))
	f.Fuzz(func(t *testing.T, p []byte, count, crc uint32) {
		h := batchHeader{first: 5, count: 1 + count%64, crc: crc, length: int64(len(p))}
		recs, lost := decodeRecords(nil, nil, p, &h, 3)
		seen := map[storage.LSN]bool{}
		for _, r := range recs {
			seen[r.LSN] = true
		}
		n := len(recs)
		for _, x := range lost {
			for lsn := x.First; lsn <= x.Last; lsn++ {
				seen[lsn] = true
				n++
			}
		}
		if len(seen) != int(h.count) || n != int(h.count) || seen[4] || seen[h.last()+1] {
			t.Fatalf("records %v, lost %v of %d", recs, lost, h.count)
		}
	})
}

func TestSegmentNames(t *testing.T) {
	for name, want := range map[string]uint64{
		"0000000000000001.wal": 1, "00000000000000ff.wal": 255, "0000000000000000.wal": 0,
		"00000000000000FF.wal": 0, "1.wal": 0, "0000000000000001.spare": 0, "000000000000000g.wal": 0,
	} {
		if n, ok := parseSegmentName(name, liveSuffix); ok != (want > 0) || ok && n != want {
			t.Errorf("%s: got %d, %v", name, n, ok)
		}
	}
}
