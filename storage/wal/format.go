package wal

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"

	"petiole/storage"
	"petiole/storage/internal/crcspan"
)

// The on-disk format, version 2. Numbers are little-endian.
//
// A log is a directory of segments, "<number, 16 hex digits>.wal". Numbers only
// rise. A segment under its ".wal" name always has a valid header, because the
// header is synced before the file gets that name. Every segment but the newest
// is sealed: a footer ends it, which is written once the next segment is on the
// medium under its name. A log that ends in a sealed segment therefore lacks one.
//
//	segment file                                offset
//	┌──────────────────────────────────────────┐ 0
//	│ segment header                           │
//	├──────────────────────────────────────────┤ 512
//	│ note: what all groups have come to       │
//	├──────────────────────────────────────────┤ 2048
//	│ the segment header again                 │
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
//	segment header, one sector
//	  0  8  magic "PETIOLEW"
//	  8  2  format version (2)
//	 10  2  cipher id (0: none; no other is defined yet)
//	 12  4  key id (0)
//	 16  8  segment number, as in the file name
//	 24  8  epoch: random, never used by another segment
//	 32  8  LSN of the first record
//	 40 16  log id: random, the same in all segments of a log
//	 56  8  length the file was preallocated with
//	 64  8  time of creation, Unix ns
//	 72  8  LSN that followed the segment before; lower than that of the first
//	        record if the numbers between were lost, or skipped for safety
//	508  4  CRC32C of bytes 0 to 507
//
//	note, up to three sectors
//	  0  4  magic "PWN\x02"
//	  4  4  CRC32C of bytes 8 to the end of the last entry
//	  8  8  epoch of the segment
//	 16  8  segment number
//	 24  8  LSN that follows the records it knows of: all below are durable
//	 32  8  LSN from which on none of them is of a group that is not listed,
//	        but for group 1
//	 40  4  number of entries, up to 186: the groups with the newest records
//	 44  4  zero
//	 48  …  entries, by group: group (4), lower half of its last sequence (4)
//
// The note is written with the header of a new segment, as far as groups are known
// then, and over again in its place when the log has been idle for a while, and
// when it is closed: so it is away from the end of the log, which it says how far
// it had come. Without it nothing would tell damage to the last batch from a batch
// torn by a power cut, nor which groups had lost something there. It is not synced
// for itself. A torn one is none, and nothing is lost with it.
//
//	batch header                     footer, where it differs
//	 0  4  magic "PWB\x02"
//	 4  1  kind: 1 (3: mark)         2
//	 5  1  flags of a mark: 1 closing, 2 a large batch follows
//	 6  2  zero
//	 8  8  epoch of the segment
//	16  8  LSN of the first record   LSN that follows the segment
//	24  8  durable LSN: every record up to it had been synced
//	       when this batch was written
//	32  8  length of the payload     offset at which the batches end
//	40  4  number of records         number of batches, marks included
//	44  4  CRC32C of all record      zero
//	       headers of the payload
//	48  8  segment number
//	56  4  first octets of the log id
//	60  4  CRC32C of bytes 0 to 59
//
// A mark is a batch without records, one sector. A closing mark
// is synced, and the last thing that a log writes: the next start goes on
// behind it in the same segment, after a mark that is synced before anything
// else follows. After any other end it goes on in a new segment. A mark before
// every batch above 4 MiB says that whoever looks for what follows a damaged
// header has to look further than 8 MiB.
//
//	record, in the payload
//	 0  4  CRC32C, started from that of the epoch, of bytes 4 and on, data
//	       included; XOR the lower half of LSN × lsnMix
//	 4  4  length of the data
//	 8  4  group
//	12  4  lower half of the group's last sequence behind the record, as far as
//	       it was known when the record was appended; see Log.SetLast
//	16  1  first octet of the data again: it tells what a record was whose data
//	       is damaged, because the checksum in the batch header covers it
//	17  …  data
//
// So a flipped bit costs the record that it hits, even if that is a length
// (the next record is found by its checksum), and one in a batch header the
// records of that batch. A record is valid in its place only, under its number.
const (
	sectorSize        = 512
	segmentHeaderSize = 4096
	secondHeader      = 2048 // offset of the segment header's copy
	batchHeaderSize   = 64
	recordHeaderSize  = 17

	noteOffset     = sectorSize
	noteSize       = secondHeader - noteOffset
	noteHeaderSize = 48
	noteGroups     = (noteSize - noteHeaderSize) / 8 // how many a note has room for

	segmentMagic  = "PETIOLEW"
	noteMagic     = "PWN\x02"
	batchMagic    = "PWB\x02"
	formatVersion = 2

	kindRecords = 1
	kindFooter  = 2
	kindMark    = 3

	markClosing = 1 // the log was closed here
	markLarge   = 2 // a batch above largeBatch follows

	largeBatch = 4 << 20
	// scanWindow is how far behind the last header the end of a log is looked
	// for; more than a batch that is not large, and what a cut may leave out.
	scanWindow = 8 << 20

	segmentHeaderCRC = sectorSize - 4
	batchHeaderCRC   = 60

	lsnMix   = 0x9e3779b1 // odd: LSNs that differ in the lower half stay different
	lsnUnmix = 0x0e8b2f51 // lsnMix × lsnUnmix = 1 (mod 2³²)
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrFormat says that a segment is intact, but written in a way that this
// program does not know: a newer format version, or encrypted.
var ErrFormat = storage.ErrFormat

// CorruptError says where a log is damaged. It wraps storage.ErrCorrupt.
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
	prev    storage.LSN // that followed the segment before
}

// encode returns the header block: two copies, padded to segmentHeaderSize.
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
	le.PutUint64(b[72:], uint64(h.prev))
	le.PutUint32(b[segmentHeaderCRC:], crc32.Checksum(b[:segmentHeaderCRC], castagnoli))
	copy(b[secondHeader:], b[:sectorSize])
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
		length: int64(le.Uint64(b[56:])), created: int64(le.Uint64(b[64:])), prev: storage.LSN(le.Uint64(b[72:])),
	}
	copy(h.logID[:], b[40:])
	switch {
	case h.version != formatVersion:
		return h, fmt.Errorf("log segment %s has version %d, this program knows version %d: %w", name, h.version, formatVersion, ErrFormat)
	case h.cipher != 0 || h.key != 0:
		return h, fmt.Errorf("log segment %s is encrypted (cipher %d, key %d): %w", name, h.cipher, h.key, ErrFormat)
	case h.first == 0 || h.prev == 0 || h.prev > h.first:
		return h, &CorruptError{name, 32, "segment header makes no sense"}
	}
	return h, nil
}

// batchHeader is the header of a batch, or a footer.
type batchHeader struct {
	kind    uint8
	flags   uint8 // of a mark
	epoch   uint64
	first   storage.LSN // footer: the LSN that follows
	durable storage.LSN
	length  int64  // of the payload; footer: where the batches end
	count   uint32 // records; footer: batches
	crc     uint32 // of the records' headers
	num     uint64
	log     uint32 // the first octets of the log id
}

func (h *batchHeader) last() storage.LSN { return h.first + storage.LSN(h.count) - 1 }

// batchRoom is what a batch of that size takes in a segment, with its mark.
func batchRoom(size int64) int64 {
	if size > largeBatch {
		return size + sectorSize
	}
	return size
}

// size is what a batch takes in the file.
func (h *batchHeader) size() int64 { return roundUp(batchHeaderSize + h.length) }

// encode writes the header to the first batchHeaderSize bytes of b.
func (h *batchHeader) encode(b []byte) {
	le := binary.LittleEndian
	b = b[:batchHeaderSize]
	clear(b)
	copy(b, batchMagic)
	b[4] = h.kind
	b[5] = h.flags
	le.PutUint64(b[8:], h.epoch)
	le.PutUint64(b[16:], uint64(h.first))
	le.PutUint64(b[24:], uint64(h.durable))
	le.PutUint64(b[32:], uint64(h.length))
	le.PutUint32(b[40:], h.count)
	le.PutUint32(b[44:], h.crc)
	le.PutUint64(b[48:], h.num)
	le.PutUint32(b[56:], h.log)
	le.PutUint32(b[batchHeaderCRC:], crc32.Checksum(b[:batchHeaderCRC], castagnoli))
}

// decodeBatchHeader reads a header that belongs to the given segment and
// whose fields make sense; ok is false for anything else, such as a batch that
// a recycled file held before.
func decodeBatchHeader(b []byte, epoch, num uint64) (h batchHeader, ok bool) {
	if len(b) < batchHeaderSize || binary.LittleEndian.Uint64(b[8:]) != epoch {
		return h, false
	}
	return decodeAnyBatchHeader(b, num)
}

// decodeAnyBatchHeader is decodeBatchHeader for a segment whose epoch is not
// known. No number is used twice, so that it is enough to tell a segment's own.
func decodeAnyBatchHeader(b []byte, num uint64) (h batchHeader, ok bool) {
	le := binary.LittleEndian
	if len(b) < batchHeaderSize || !bytes.Equal(b[:4], []byte(batchMagic)) || le.Uint64(b[48:]) != num ||
		le.Uint32(b[batchHeaderCRC:]) != crc32.Checksum(b[:batchHeaderCRC], castagnoli) {
		return h, false
	}
	h = batchHeader{
		kind: b[4], flags: b[5], epoch: le.Uint64(b[8:]), num: num, first: storage.LSN(le.Uint64(b[16:])),
		durable: storage.LSN(le.Uint64(b[24:])), length: int64(le.Uint64(b[32:])),
		count: le.Uint32(b[40:]), crc: le.Uint32(b[44:]), log: le.Uint32(b[56:]),
	}
	switch {
	case h.first == 0 || h.durable >= h.first || h.length < 0 || h.length > math.MaxInt64/2 || h.flags != 0 && h.kind != kindMark:
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

// logWord is what batch headers have of a log id.
func logWord(id [16]byte) uint32 { return binary.LittleEndian.Uint32(id[:]) }

// epochSeed is what the checksums of a segment's records start from.
func epochSeed(epoch uint64) uint32 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], epoch)
	return crc32.Checksum(b[:], castagnoli)
}

// putRecordHeader writes all of a record's header but the checksum, and the
// octet of the data, to b, which the data follow.
func putRecordHeader(b []byte, n int, g storage.GroupID, last uint32) {
	binary.LittleEndian.PutUint32(b[4:], uint32(n))
	binary.LittleEndian.PutUint32(b[8:], uint32(g))
	binary.LittleEndian.PutUint32(b[12:], last)
}

// recordGroup and recordLast read what putRecordHeader wrote.
func recordGroup(b []byte) storage.GroupID {
	return storage.GroupID(binary.LittleEndian.Uint32(b[8:]))
}

func recordLast(b []byte) uint32 { return binary.LittleEndian.Uint32(b[12:]) }

// recordSum returns the checksum of the record in b.
func recordSum(b []byte, lsn storage.LSN, seed uint32) uint32 {
	return crc32.Update(seed, castagnoli, b[4:]) ^ uint32(lsn)*lsnMix
}

// recordIntact says whether b holds the record with that LSN.
func recordIntact(b []byte, lsn storage.LSN, seed uint32) bool {
	return binary.LittleEndian.Uint32(b) == recordSum(b, lsn, seed)
}

// finishRecords completes the headers of the records in payload, of which the
// first has the given LSN, and returns the checksum of the headers.
func finishRecords(payload []byte, first storage.LSN, seed uint32) uint32 {
	headers := uint32(0)
	for lsn := first; len(payload) > 0; lsn++ {
		n := recordHeaderSize + int(binary.LittleEndian.Uint32(payload[4:]))
		if n > recordHeaderSize {
			payload[16] = payload[recordHeaderSize]
		}
		binary.LittleEndian.PutUint32(payload, recordSum(payload[:n], lsn, seed))
		headers = crc32.Update(headers, castagnoli, payload[:recordHeaderSize])
		payload = payload[n:]
	}
	return headers
}

// recordLen returns how many octets the record takes that b begins with, going
// by its length; false if b is shorter than that.
func recordLen(b []byte) (int, bool) {
	if len(b) < recordHeaderSize {
		return 0, false
	}
	n := int64(binary.LittleEndian.Uint32(b[4:])) + recordHeaderSize
	return int(n), n <= int64(len(b))
}

// decodeRecords appends the intact records of a batch's payload, whose Data alias
// it, to recs, and those that are not to lost; both in order. Only numbers and
// what is known of the record are set in lost.
func decodeRecords(recs []Record, lost []Lost, payload []byte, h *batchHeader, seed uint32) ([]Record, []Lost) {
	whole := payload
	var sums *crcspan.Sums         // of whole
	trusted, asked := false, false // the headers' lengths
	end := h.first + storage.LSN(h.count)
	for lsn := h.first; lsn < end; lsn++ {
		n, ok := recordLen(payload)
		if ok && recordIntact(payload[:n], lsn, seed) {
			if g := recordGroup(payload); g != 0 {
				recs = append(recs, Record{LSN: lsn, Group: g, Last: recordLast(payload), Data: payload[recordHeaderSize:n:n]})
				payload = payload[n:]
				continue
			}
		}
		if !asked {
			trusted, asked = headersIntact(whole, h), true
		}
		if trusted {
			lost = append(lost, Lost{
				First: lsn, Last: lsn, Kind: payload[16], Reason: "the record fails its checksum",
				Group: recordGroup(payload), LastSeq: recordLast(payload),
			})
			payload = payload[n:]
			continue
		}
		if sums == nil {
			sums = crcspan.New(whole)
		}
		next, at := findRecord(whole, sums, len(whole)-len(payload), lsn+1, end, seed)
		lost = append(lost, Lost{First: lsn, Last: next - 1, Reason: "the record fails its checksum"})
		payload, lsn = whole[at:], next-1
	}
	return recs, lost
}

// headersIntact says whether the headers of all records in a payload are.
func headersIntact(payload []byte, h *batchHeader) bool {
	headers := uint32(0)
	for range h.count {
		n, ok := recordLen(payload)
		if !ok {
			return false
		}
		headers = crc32.Update(headers, castagnoli, payload[:recordHeaderSize])
		payload = payload[n:]
	}
	return len(payload) == 0 && headers == h.crc
}

// findRecord looks for the first intact record with an LSN from lo to before
// end that begins behind the octet of payload at from. It returns its LSN and
// place, or end and the length of payload. What somebody may have put into a
// message to look like a record does not, for want of the epoch; nor can it make
// the search long, which is the same for every octet, whatever length stands there.
func findRecord(payload []byte, sums *crcspan.Sums, from int, lo, end storage.LSN, seed uint32) (storage.LSN, int) {
	sum := func(at, n int) uint32 { // as recordSum, but for the LSN
		return binary.LittleEndian.Uint32(payload[at:]) ^ sums.Update(seed, at+4, at+n)
	}
	for at := from + 1; lo < end && at+recordHeaderSize <= len(payload); at++ {
		b := payload[at:]
		n, ok := recordLen(b)
		if !ok || recordGroup(b) == 0 {
			continue
		}
		lsn := lo + storage.LSN(sum(at, n)*lsnUnmix-uint32(lo))
		if lsn >= end {
			continue
		}
		// Among so many places and numbers a checksum may match by chance; what
		// follows has to match as well.
		rest := b[n:]
		if m, ok := recordLen(rest); lsn+1 == end && len(rest) == 0 || ok && sum(at+n, m) == uint32(lsn+1)*lsnMix {
			return lsn, at
		}
	}
	return end, len(payload)
}

// roundUp rounds n up to whole sectors.
func roundUp(n int64) int64 { return (n + sectorSize - 1) &^ (sectorSize - 1) }
