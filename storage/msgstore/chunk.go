package msgstore

import (
	"encoding/binary"
	"hash/crc32"
	"math"
	"unsafe"

	"petiole/storage"
	"petiole/storage/internal/crcspan"
)

// Messages are kept in chunks: a value of the bucket of messages holds several
// that follow one another, so that a page of the file is not a message or two.
// The key is the chunk's base (u64 BE), which is at or below its first sequence;
// chunks do not overlap. A large message has a chunk for itself.
//
//	0         1           5           13         15
//	┌─────────┬───────────┬───────────┬──────────┬───────────────┬─────────┐
//	│ version │ crc32c LE │ base      │ messages │ table, an     │ records │
//	│         │           │ u64 LE    │ u16 LE   │ entry a mess. │         │
//	└─────────┴───────────┴───────────┴──────────┴───────────────┴─────────┘
//	            covers the store's identity, the bucket, the length of the
//	            whole chunk as u64 BE, base to table
//
//	entry       0                     2
//	            ┌─────────────────────┬─────────────────────────────────┐
//	            │ seq - base, u16 LE  │ where in the records its record │
//	            │                     │ begins, u16 LE (ends: the next) │
//	            └─────────────────────┴─────────────────────────────────┘
//
//	record      0           4            6         14
//	            ┌───────────┬────────────┬─────────┬─────────┬──────────┬─────────┬─────────┬────────┬──────┐
//	            │ crc32c LE │ seq - base │ time    │ subject │ 1+header │ data    │ subject │ header │ data │
//	            │           │ u16 LE     │ i64 LE  │ length, │ length,  │ length, │         │        │      │
//	            │           │            │ Unix ns │ uvarint │ or 0, uv │ uvarint │         │        │      │
//	            └───────────┴────────────┴─────────┴─────────┴──────────┴─────────┴─────────┴────────┴──────┘
//	            covers the store's identity, the bucket, seq as u64 BE, time to data
//
// Sequences and lengths are there twice, in the table to find one message
// without reading the others, and in the records to find them if the table is
// damaged. A record proves by its checksum that it is what was stored under
// that sequence in that store; nothing is returned that does not. It does not
// depend on the base, so that records can move to other chunks as they are.
//
// A message that is deleted stays in its chunk until that is written anew: what
// exists the notes of deletions say (bucket gone), and the state's first and last.
//
// What follows packs and unpacks, and knows nothing of bbolt.

const (
	chunkHeader = 15 // octets before the table
	chunkEntry  = 4  // octets of an entry of the table
	recordFixed = 14 // octets of a record before the lengths
	// chunkSpan is by how much the sequences in one chunk may differ from its
	// base, which an entry has 16 bits for.
	chunkSpan = math.MaxUint16
	// chunkMax is the size of the largest chunk of more than one message: where
	// a record begins has 16 bits as well.
	chunkMax = math.MaxUint16
)

// recordSize returns the size of m's record.
func recordSize(m *storage.Message) int {
	header := 0
	if m.Header != nil {
		header = len(m.Header) + 1
	}
	return recordFixed + uvarintLen(len(m.Subject)) + uvarintLen(header) + uvarintLen(len(m.Data)) +
		len(m.Subject) + len(m.Header) + len(m.Data)
}

func uvarintLen(n int) int {
	l := 1
	for n >= 0x80 {
		n >>= 7
		l++
	}
	return l
}

// appendRecord appends the record of m, a message of the chunk with that base.
func appendRecord(v []byte, s sealer, base uint64, m *storage.Message) []byte {
	at := len(v)
	v = append(v, 0, 0, 0, 0)
	v = binary.LittleEndian.AppendUint16(v, uint16(m.Seq-base))
	v = binary.LittleEndian.AppendUint64(v, uint64(m.Time))
	v = binary.AppendUvarint(v, uint64(len(m.Subject)))
	if m.Header == nil {
		v = append(v, 0)
	} else {
		v = binary.AppendUvarint(v, uint64(len(m.Header))+1)
	}
	v = binary.AppendUvarint(v, uint64(len(m.Data)))
	v = append(v, m.Subject...)
	v = append(v, m.Header...)
	v = append(v, m.Data...)
	binary.LittleEndian.PutUint32(v[at:], s.record(m.Seq, v[at+6:]))
	return v
}

// record returns the checksum of a record whose content from the time on is c.
func (s sealer) record(seq uint64, c []byte) uint32 {
	return crc32.Update(crcUint64(uint32(s), seq), castagnoli, c)
}

// crcUint64 is crc32.Update with v as eight octets, big endian, which need not
// be in memory for it.
func crcUint64(crc uint32, v uint64) uint32 {
	crc = ^crc
	for shift := 56; shift >= 0; shift -= 8 {
		crc = castagnoli[byte(crc)^byte(v>>shift)] ^ crc>>8
	}
	return ^crc
}

// decodeRecord checks and parses a record that begins v, of a message of the
// chunk with that base, and returns its length. Header, data and subject of
// the message alias v, which must not change any more. Of a damaged record the
// message is what it seems to be (Seq included), and nothing to be relied on.
func decodeRecord(s sealer, base uint64, v []byte) (m storage.Message, size int, err error) {
	size, err = parseRecord(&m, base, v)
	if err == nil && !noCRC && binary.LittleEndian.Uint32(v) != s.record(m.Seq, v[6:size]) {
		err = errChecksum
	}
	return m, size, err
}

// parseRecord is decodeRecord without the checksum.
func parseRecord(m *storage.Message, base uint64, v []byte) (size int, err error) {
	if len(v) < recordFixed {
		return 0, errLayout
	}
	m.Seq = base + uint64(binary.LittleEndian.Uint16(v[4:]))
	m.Time = int64(binary.LittleEndian.Uint64(v[6:]))
	var n [3]uint64 // lengths of subject, header + 1, data
	at := recordFixed
	for i := range n {
		l, k := binary.Uvarint(v[at:])
		if k <= 0 {
			return 0, errLayout
		}
		n[i] = l
		at += k
	}
	left := uint64(len(v) - at)
	header := n[1]
	if header > 0 {
		header--
	}
	if n[0] == 0 || n[0] > left || header > left-n[0] || n[2] > left-n[0]-header {
		return 0, errLayout
	}
	m.Subject = unsafe.String(&v[at], int(n[0]))
	at += int(n[0])
	if n[1] > 0 {
		m.Header = v[at : at+int(header) : at+int(header)]
		at += int(header)
	}
	size = at + int(n[2])
	m.Data = v[at:size:size]
	return size, nil
}

// chunkBuilder puts a chunk together. Reset it before use.
type chunkBuilder struct {
	seal  sealer
	max   int // size of the chunk that must not be exceeded by a second message
	base  uint64
	last  uint64 // sequence of the last message
	n     int
	table []byte
	recs  []byte
}

// reset begins the chunk with that base, which is its key.
func (b *chunkBuilder) reset(base uint64) {
	b.base, b.last, b.n = base, 0, 0
	b.table, b.recs = b.table[:0], b.recs[:0]
}

// size returns how large the chunk is so far.
func (b *chunkBuilder) size() int { return chunkHeader + len(b.table) + len(b.recs) }

// fits reports whether a message with a record of that size may be added.
func (b *chunkBuilder) fits(seq uint64, size int) bool {
	if seq-b.base > chunkSpan {
		return false
	}
	return b.n == 0 || b.size()+chunkEntry+size <= min(b.max, chunkMax)
}

func (b *chunkBuilder) entry(seq uint64) {
	b.table = binary.LittleEndian.AppendUint16(b.table, uint16(seq-b.base))
	b.table = binary.LittleEndian.AppendUint16(b.table, uint16(len(b.recs)))
	b.n++
	b.last = seq
}

// add appends a message, which fits and has a higher sequence than those before.
func (b *chunkBuilder) add(m *storage.Message) {
	b.entry(m.Seq)
	b.recs = appendRecord(b.recs, b.seal, b.base, m)
}

// move is add for a record out of another chunk of the same store. It is taken
// over as it is, with its checksum: damage stays damage.
func (b *chunkBuilder) move(seq uint64, rec []byte) {
	b.entry(seq)
	at := len(b.recs)
	b.recs = append(b.recs, rec...)
	if len(rec) >= 6 {
		binary.LittleEndian.PutUint16(b.recs[at+4:], uint16(seq-b.base))
	}
}

// appendTo appends the finished chunk, of at least one message, to v.
func (b *chunkBuilder) appendTo(v []byte) []byte {
	at := len(v)
	v = append(v, version, 0, 0, 0, 0)
	v = binary.LittleEndian.AppendUint64(v, b.base)
	v = binary.LittleEndian.AppendUint16(v, uint16(b.n))
	v = append(v, b.table...)
	head := len(v)
	v = append(v, b.recs...)
	binary.LittleEndian.PutUint32(v[at+1:], b.seal.chunk(v[at+overhead:head], len(v)-at))
	return v
}

// chunk returns the checksum of a chunk's header and table, which are h but for
// version and checksum, in a chunk of that size.
func (s sealer) chunk(h []byte, size int) uint32 {
	return crc32.Update(crcUint64(uint32(s), uint64(size)), castagnoli, h)
}

// chunk is a chunk whose header and table are intact. It aliases the value.
type chunk struct {
	base  uint64
	n     int
	table []byte
	recs  []byte
}

// parseChunk checks a chunk's header and table. The records are not looked at.
func parseChunk(s sealer, key, v []byte) (c chunk, err error) {
	if len(v) < chunkHeader {
		return c, errLayout
	}
	c.base = binary.LittleEndian.Uint64(v[overhead:])
	c.n = int(binary.LittleEndian.Uint16(v[overhead+8:]))
	head := chunkHeader + chunkEntry*c.n
	if c.n == 0 || head > len(v) || len(key) != 8 {
		return c, errLayout
	}
	if binary.LittleEndian.Uint32(v[1:]) != s.chunk(v[overhead:head], len(v)) {
		return c, errChecksum
	}
	if v[0] != version {
		return c, errVersion
	}
	c.table, c.recs = v[chunkHeader:head], v[head:]
	if c.base != binary.BigEndian.Uint64(key) || !c.ordered() {
		return c, errLayout
	}
	return c, nil
}

// ordered reports whether the table is ascending and within the chunk.
func (c *chunk) ordered() bool {
	if c.start(0) != 0 || c.base > math.MaxUint64-chunkSpan {
		return false
	}
	for i := 1; i < c.n; i++ {
		if c.delta(i) <= c.delta(i-1) || c.start(i) <= c.start(i-1) {
			return false
		}
	}
	return c.start(c.n-1) < len(c.recs)
}

func (c *chunk) delta(i int) int { return int(binary.LittleEndian.Uint16(c.table[chunkEntry*i:])) }
func (c *chunk) start(i int) int { return int(binary.LittleEndian.Uint16(c.table[chunkEntry*i+2:])) }

// seq returns the sequence of entry i.
func (c *chunk) seq(i int) uint64 { return c.base + uint64(c.delta(i)) }

// last returns the highest sequence.
func (c *chunk) last() uint64 { return c.seq(c.n - 1) }

// record returns the octets of entry i.
func (c *chunk) record(i int) []byte {
	end := len(c.recs)
	if i+1 < c.n {
		end = c.start(i + 1)
	}
	return c.recs[c.start(i):end:end]
}

// find returns the index of the first entry at or after seq (n if there is
// none), and whether it is seq's.
func (c *chunk) find(seq uint64) (int, bool) {
	if seq <= c.base {
		return 0, seq == c.seq(0)
	}
	if seq-c.base > chunkSpan {
		return c.n, false
	}
	d := int(seq - c.base)
	// Without gaps, which is usual, it is where it would be.
	if at := d - c.delta(0); at >= 0 && at < c.n && c.delta(at) == d {
		return at, true
	}
	lo, hi := 0, c.n
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if c.delta(mid) < d {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < c.n && c.delta(lo) == d
}

// message decodes entry i; the message aliases the chunk. The error says why
// the message of that sequence cannot be trusted.
func (c *chunk) message(s sealer, i int) (storage.Message, error) {
	rec := c.record(i)
	m, size, err := decodeRecord(s, c.base, rec)
	if err == nil && (size != len(rec) || m.Seq != c.seq(i)) {
		err = errLayout
	}
	m.Seq = c.seq(i)
	return m, err
}

// rescueChunk finds the records in a chunk whose header or table is damaged,
// or whose key: it goes through the octets and calls fn for whatever proves by
// its checksum to be a message of this store, ascending, with the record. A
// base that is right is needed for that; key, if it is not nil, and what the
// header says are tried. The message aliases v.
func rescueChunk(s sealer, key, v []byte, fn func(m storage.Message, rec []byte)) {
	if len(v) < chunkHeader {
		return
	}
	bases := make([]uint64, 0, 2)
	if len(key) == 8 {
		bases = append(bases, binary.BigEndian.Uint64(key))
	}
	if b := binary.LittleEndian.Uint64(v[overhead:]); len(bases) == 0 || bases[0] != b {
		bases = append(bases, b)
	}
	sums := crcspan.New(v)
	for _, base := range bases {
		// The first record stands behind as many entries as there are: with a
		// damaged count, anywhere. After a damaged record the next one is
		// anywhere as well.
		found := false
		last := uint64(0)
		end := len(v)
		if end > chunkHeader+chunkEntry+chunkMax {
			// A single message, so large that trying every octet is out of the
			// question: it stands where it has to.
			end = chunkHeader + chunkEntry + 1
		}
		for at := chunkHeader + chunkEntry; at < end; {
			var m storage.Message
			size, err := parseRecord(&m, base, v[at:])
			if err != nil || m.Seq <= last && found ||
				!noCRC && binary.LittleEndian.Uint32(v[at:]) != sums.Update(crcUint64(uint32(s), m.Seq), at+6, at+size) {
				at++
				continue
			}
			found, last = true, m.Seq
			fn(m, v[at:at+size:at+size])
			at += size
		}
		if found {
			return
		}
	}
}
