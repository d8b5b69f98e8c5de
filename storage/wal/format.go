package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"petiole/storage"
)

// The on-disk format, version 1. Numbers are little-endian.
//
// A log is a directory of segments, "<number, 16 hex digits>.wal". Numbers only
// rise. A segment under its ".wal" name always has a valid header, because the
// header is synced before the file gets that name.
//
//	segment file                                offset
//	┌──────────────────────────────────────────┐ 0
//	│ segment header, padded with zeros        │
//	├──────────────────────────────────────────┤ 4096
//	│ batch header │ record │ record │ … │ pad │   every batch starts on a
//	├──────────────────────────────────────────┤   512-byte sector of its own,
//	│ batch header │ record │ … │ pad          │   so that no write touches a
//	├──────────────────────────────────────────┤   sector that was synced before
//	│ unused: zeros, or what a recycled file   │
//	│ held before, under another epoch         │
//	├──────────────────────────────────────────┤ file size − 512
//	│ footer, once the segment is sealed       │
//	└──────────────────────────────────────────┘
//
//	segment header
//	 0  8  magic "PETIOLEW"
//	 8  2  format version (1)
//	10  2  cipher id (0: none; no other is defined yet)
//	12  4  key id (0)
//	16  8  segment number, as in the file name
//	24  8  epoch: random, never used by another segment
//	32  8  LSN of the first record
//	40 16  log id: random, the same in all segments of a log
//	56  8  length the file was preallocated with
//	64  8  time of creation, Unix ns
//	72  4  CRC32C of bytes 0 to 71
//
//	batch header                     footer, where it differs
//	 0  4  magic "PWB\x01"
//	 4  1  kind: 1 (3: mark)         2
//	 5  3  zero
//	 8  8  epoch of the segment
//	16  8  LSN of the first record   LSN that follows the segment
//	24  8  durable LSN: every record up to it had been synced
//	       when this batch was written
//	32  8  length of the payload     offset at which the batches end
//	40  4  number of records         number of batches
//	44  4  CRC32C of the payload     zero
//	48  8  segment number
//	56  4  zero
//	60  4  CRC32C of bytes 0 to 59
//
// A mark is a batch without records, one sector. It is written when the log has
// been idle for a while, for the durable LSN in it: without it nothing would
// tell damage to the last batch from a batch torn by a power cut.
//
//	record
//	 0  4  length of the data
//	 4  8  group
//	12  …  data
const (
	sectorSize        = 512
	segmentHeaderSize = 4096
	batchHeaderSize   = 64
	recordHeaderSize  = 12

	segmentMagic  = "PETIOLEW"
	batchMagic    = "PWB\x01"
	formatVersion = 1

	kindRecords = 1
	kindFooter  = 2
	kindMark    = 3

	segmentHeaderCRC = 72
	batchHeaderCRC   = 60
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrFormat says that a segment is intact, but written in a way that this
// program does not know: a newer format version, or encrypted.
var ErrFormat = errors.New("unsupported log format")

// CorruptError says where a log is damaged. It wraps storage.ErrCorrupt.
// Nothing has been changed on disk when it is returned.
type CorruptError struct {
	File   string
	Offset int64
	Reason string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("%v: log segment %s is damaged at offset %d: %s; records that were acknowledged cannot be read: "+
		"check the disk, then restore the store directory from a backup, or move it away to start empty",
		storage.ErrCorrupt, e.File, e.Offset, e.Reason)
}

// Unwrap returns storage.ErrCorrupt.
func (e *CorruptError) Unwrap() error { return storage.ErrCorrupt }

type segmentHeader struct {
	version uint16
	cipher  uint16
	key     uint32
	num     uint64
	epoch   uint64
	first   storage.LSN
	logID   [16]byte
	length  int64
	created int64
}

// encode returns the header block, padded to segmentHeaderSize.
func (h *segmentHeader) encode() []byte {
	b := make([]byte, segmentHeaderSize)
	le := binary.LittleEndian
	copy(b, segmentMagic)
	le.PutUint16(b[8:], h.version)
	le.PutUint16(b[10:], h.cipher)
	le.PutUint32(b[12:], h.key)
	le.PutUint64(b[16:], h.num)
	le.PutUint64(b[24:], h.epoch)
	le.PutUint64(b[32:], uint64(h.first))
	copy(b[40:], h.logID[:])
	le.PutUint64(b[56:], uint64(h.length))
	le.PutUint64(b[64:], uint64(h.created))
	le.PutUint32(b[segmentHeaderCRC:], crc32.Checksum(b[:segmentHeaderCRC], castagnoli))
	return b
}

// decodeSegmentHeader reads the header of file name. The magic, the version
// and the checksum keep their places in all versions to come.
func decodeSegmentHeader(name string, b []byte) (h segmentHeader, err error) {
	le := binary.LittleEndian
	switch {
	case len(b) < segmentHeaderCRC+4:
		return h, &CorruptError{name, 0, "the file is too short for a segment header"}
	case string(b[:8]) != segmentMagic:
		return h, &CorruptError{name, 0, "not a log segment (wrong magic)"}
	case le.Uint32(b[segmentHeaderCRC:]) != crc32.Checksum(b[:segmentHeaderCRC], castagnoli):
		return h, &CorruptError{name, 0, "segment header fails its checksum"}
	}
	h = segmentHeader{
		version: le.Uint16(b[8:]), cipher: le.Uint16(b[10:]), key: le.Uint32(b[12:]),
		num: le.Uint64(b[16:]), epoch: le.Uint64(b[24:]), first: storage.LSN(le.Uint64(b[32:])),
		length: int64(le.Uint64(b[56:])), created: int64(le.Uint64(b[64:])),
	}
	copy(h.logID[:], b[40:])
	switch {
	case h.version != formatVersion:
		return h, fmt.Errorf("%w: log segment %s has format version %d, this program reads version %d: "+
			"start the program version that wrote it", ErrFormat, name, h.version, formatVersion)
	case h.cipher != 0 || h.key != 0:
		return h, fmt.Errorf("%w: log segment %s is encrypted (cipher %d, key %d), which this program does not support: "+
			"start the program version that wrote it", ErrFormat, name, h.cipher, h.key)
	case h.first == 0:
		return h, &CorruptError{name, 32, "segment header has no first LSN"}
	}
	return h, nil
}

// batchHeader is the header of a batch, or a footer.
type batchHeader struct {
	kind    uint8
	epoch   uint64
	first   storage.LSN // footer: the LSN that follows
	durable storage.LSN
	length  int64  // of the payload; footer: where the batches end
	count   uint32 // records; footer: batches
	crc     uint32 // of the payload
	num     uint64
}

func (h *batchHeader) last() storage.LSN { return h.first + storage.LSN(h.count) - 1 }

// size is what a batch takes in the file.
func (h *batchHeader) size() int64 { return roundUp(batchHeaderSize + h.length) }

// encode writes the header to the first batchHeaderSize bytes of b.
func (h *batchHeader) encode(b []byte) {
	le := binary.LittleEndian
	b = b[:batchHeaderSize]
	clear(b)
	copy(b, batchMagic)
	b[4] = h.kind
	le.PutUint64(b[8:], h.epoch)
	le.PutUint64(b[16:], uint64(h.first))
	le.PutUint64(b[24:], uint64(h.durable))
	le.PutUint64(b[32:], uint64(h.length))
	le.PutUint32(b[40:], h.count)
	le.PutUint32(b[44:], h.crc)
	le.PutUint64(b[48:], h.num)
	le.PutUint32(b[batchHeaderCRC:], crc32.Checksum(b[:batchHeaderCRC], castagnoli))
}

// decodeBatchHeader reads a header that belongs to the given segment and
// whose fields make sense; ok is false for anything else, such as a batch that
// a recycled file held before.
func decodeBatchHeader(b []byte, epoch, num uint64) (h batchHeader, ok bool) {
	le := binary.LittleEndian
	if len(b) < batchHeaderSize || !bytes.Equal(b[:4], []byte(batchMagic)) ||
		le.Uint64(b[8:]) != epoch || le.Uint64(b[48:]) != num ||
		le.Uint32(b[batchHeaderCRC:]) != crc32.Checksum(b[:batchHeaderCRC], castagnoli) {
		return h, false
	}
	h = batchHeader{
		kind: b[4], epoch: epoch, num: num, first: storage.LSN(le.Uint64(b[16:])),
		durable: storage.LSN(le.Uint64(b[24:])), length: int64(le.Uint64(b[32:])),
		count: le.Uint32(b[40:]), crc: le.Uint32(b[44:]),
	}
	switch {
	case h.first == 0 || h.durable >= h.first || h.length < 0 || h.length > math.MaxInt64/2:
		return h, false
	case h.kind == kindRecords:
		// Every record has a header, so that the payload bounds the count.
		return h, h.count > 0 && int64(h.count) <= h.length/recordHeaderSize
	case h.kind == kindMark:
		return h, h.count == 0 && h.length == 0
	case h.kind == kindFooter:
		return h, h.length >= segmentHeaderSize && h.length%sectorSize == 0
	}
	return h, false
}

func putRecordHeader(b []byte, n int, g storage.GroupID) {
	binary.LittleEndian.PutUint32(b, uint32(n))
	binary.LittleEndian.PutUint64(b[4:], uint64(g))
}

var errRecords = errors.New("records do not fill the payload")

// decodeRecords appends the records of a payload, whose Data alias it, to recs.
func decodeRecords(recs []Record, payload []byte, h *batchHeader) ([]Record, error) {
	for i := range h.count {
		if len(payload) < recordHeaderSize {
			return recs, errRecords
		}
		n := int64(binary.LittleEndian.Uint32(payload))
		g := storage.GroupID(binary.LittleEndian.Uint64(payload[4:]))
		payload = payload[recordHeaderSize:]
		if n > int64(len(payload)) || g == 0 {
			return recs, errRecords
		}
		recs = append(recs, Record{LSN: h.first + storage.LSN(i), Group: g, Data: payload[:n:n]})
		payload = payload[n:]
	}
	if len(payload) > 0 {
		return recs, errRecords
	}
	return recs, nil
}

// roundUp rounds n up to whole sectors.
func roundUp(n int64) int64 { return (n + sectorSize - 1) &^ (sectorSize - 1) }
