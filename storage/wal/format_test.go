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
	good := segmentHeader{version: 1, num: 7, epoch: 0xfeed, first: 42, logID: [16]byte{1, 2, 3}, length: 64 << 20, created: 99}
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
		{"version", func(b []byte) []byte { b[8] = 2; fix(b); return b }, ErrFormat, "version 2"},
		{"cipher", func(b []byte) []byte { b[10] = 1; fix(b); return b }, ErrFormat, "encrypted"},
		{"key", func(b []byte) []byte { b[12] = 1; fix(b); return b }, ErrFormat, "encrypted"},
		{"first", func(b []byte) []byte { b[32] = 0; fix(b); return b }, storage.ErrCorrupt, "first LSN"},
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
	good := batchHeader{kind: kindRecords, epoch: 5, num: 6, first: 10, durable: 9, length: 100, count: 3, crc: 77}
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

func TestDecodeRecords(t *testing.T) {
	var p []byte
	for i, data := range []string{"one", "", "three"} {
		b := make([]byte, recordHeaderSize, 20)
		putRecordHeader(b, len(data), storage.GroupID(i+1))
		p = append(p, append(b, data...)...)
	}
	h := batchHeader{first: 5, count: 3}
	recs, err := decodeRecords(nil, p, &h)
	if err != nil || len(recs) != 3 || recs[2].LSN != 7 || recs[2].Group != 3 || !bytes.Equal(recs[2].Data, []byte("three")) {
		t.Fatalf("got %v, %v", recs, err)
	}
	if cap(recs[0].Data) != 3 {
		t.Error("an append to a record's data would change the next record")
	}
	for n := range len(p) {
		if _, err := decodeRecords(nil, p[:n], &h); err == nil {
			t.Fatalf("accepted a payload cut to %d bytes", n)
		}
	}
	if _, err := decodeRecords(nil, append(p, 0), &h); err == nil {
		t.Error("accepted a byte too many")
	}
	clear(p[4:12])
	if _, err := decodeRecords(nil, p, &h); err == nil {
		t.Error("accepted group 0")
	}
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
