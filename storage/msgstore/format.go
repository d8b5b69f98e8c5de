package msgstore

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"unsafe"

	"petiole/storage"
)

// The file is a bbolt database with these buckets. Every value begins with a
// version octet and a CRC32C that covers the store's identity, the bucket, the
// key and the content, so that a value is neither damaged nor another's:
//
//	            0         1           5
//	            ┌─────────┬───────────┬──────────────┐
//	            │ version │ crc32c LE │ content      │
//	            └─────────┴───────────┴──────────────┘
//
//	bucket  key                    content
//	store   "identity"             uid [16]                           (once)
//	        "state"                numbers, see encodeState
//	msgs    seq u64 BE             message, see below
//	subj    subject                uvarint id, msgs, bytes, first, last-first
//	post    id u64 BE, base u64 BE uvarint distances: of the first sequence from
//	                               base, of each further one from the one before
//	gone    page u64 BE            32 × u64 LE, a bit per sequence without message
//	kv      key                    value
//
// A message is
//
//	0              8
//	┌──────────────┬──────────┬──────────────┬──────────┬─────────┬────────┐
//	│ time i64 LE  │ subject  │ 1 + header   │ subject  │ header  │ data   │
//	│ Unix ns      │ length   │ length, or 0 │          │         │ (rest) │
//	│              │ uvarint  │ uvarint      │          │         │        │
//	└──────────────┴──────────┴──────────────┴──────────┴─────────┴────────┘
//
// subj, post and gone say nothing that msgs does not: they are there to open
// and look up without reading messages, and are made anew if damaged. post may
// hold sequences that are gone.
const (
	version  = 1
	overhead = 5
)

var (
	bucketStore = []byte("store")
	bucketMsgs  = []byte("msgs")
	bucketSubj  = []byte("subj")
	bucketPost  = []byte("post")
	bucketGone  = []byte("gone")
	bucketKV    = []byte("kv")
	keyIdentity = []byte("identity")
	keyState    = []byte("state")
)

var buckets = [][]byte{bucketStore, bucketMsgs, bucketSubj, bucketPost, bucketGone, bucketKV}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sealer makes and checks the checksums of one bucket's values.
type sealer uint32

func newSealer(uid [16]byte, bucket []byte) sealer {
	return sealer(crc32.Update(crc32.Update(0, castagnoli, uid[:]), castagnoli, bucket))
}

// finish fills in the first octets of v, whose content is in place.
func (s sealer) finish(key, v []byte) []byte {
	v[0] = version
	sum := crc32.Update(crc32.Update(uint32(s), castagnoli, key), castagnoli, v[overhead:])
	binary.LittleEndian.PutUint32(v[1:], sum)
	return v
}

var (
	errVersion  = errors.New("its layout is of an unknown version")
	errChecksum = errors.New("it fails its checksum")
	errLayout   = errors.New("its content makes no sense")
)

// open returns the content of v.
func (s sealer) open(key, v []byte) ([]byte, error) {
	if len(v) < overhead {
		return nil, errLayout
	}
	sum := crc32.Update(crc32.Update(uint32(s), castagnoli, key), castagnoli, v[overhead:])
	if binary.LittleEndian.Uint32(v[1:]) != sum {
		return nil, errChecksum
	}
	if v[0] != version {
		return nil, errVersion
	}
	return v[overhead:], nil
}

func seqKey(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

func postKey(id, base uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(make([]byte, 0, 16), id), base)
}

// messageSize returns an upper bound of the encoded size of m.
func messageSize(m *storage.Message) int {
	return overhead + 8 + 2*binary.MaxVarintLen32 + len(m.Subject) + len(m.Header) + len(m.Data)
}

// appendMessage appends the content of m to v, which ends with the space for
// version and checksum.
func appendMessage(v []byte, m *storage.Message) []byte {
	v = binary.LittleEndian.AppendUint64(v, uint64(m.Time))
	v = binary.AppendUvarint(v, uint64(len(m.Subject)))
	if m.Header == nil {
		v = append(v, 0)
	} else {
		v = binary.AppendUvarint(v, uint64(len(m.Header))+1)
	}
	v = append(v, m.Subject...)
	v = append(v, m.Header...)
	return append(v, m.Data...)
}

// decodeMessage parses a content; the message aliases it, also its subject:
// c must not change any more.
func decodeMessage(seq uint64, c []byte) (m storage.Message, err error) {
	if len(c) < 8 {
		return m, errLayout
	}
	m.Seq, m.Time = seq, int64(binary.LittleEndian.Uint64(c))
	c = c[8:]
	subject, c, ok := uvarint(c)
	if !ok {
		return m, errLayout
	}
	header, c, ok := uvarint(c)
	if !ok || subject == 0 || subject > uint64(len(c)) {
		return m, errLayout
	}
	m.Subject = unsafe.String(&c[0], int(subject))
	c = c[subject:]
	if header > 0 {
		if header--; header > uint64(len(c)) {
			return m, errLayout
		}
		m.Header = c[:header:header]
		c = c[header:]
	}
	m.Data = c[:len(c):len(c)]
	return m, nil
}

func uvarint(b []byte) (uint64, []byte, bool) {
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, b, false
	}
	return v, b[n:], true
}

// appendPosts appends the content of a block of postings from base on.
func appendPosts(v []byte, base uint64, seqs []uint64) []byte {
	for _, q := range seqs {
		v = binary.AppendUvarint(v, q-base)
		base = q
	}
	return v
}

// decodePosts appends to dst what a block of postings holds.
func decodePosts(c []byte, base uint64, dst []uint64) ([]uint64, error) {
	for len(c) > 0 {
		d, rest, ok := uvarint(c)
		if !ok {
			return dst, errLayout
		}
		base += d
		dst, c = append(dst, base), rest
	}
	return dst, nil
}

// numbers encodes and decodes runs of uvarints.
func appendNumbers(v []byte, ns ...uint64) []byte {
	for _, n := range ns {
		v = binary.AppendUvarint(v, n)
	}
	return v
}

func decodeNumbers(c []byte, ns ...*uint64) ([]byte, error) {
	for _, n := range ns {
		v, rest, ok := uvarint(c)
		if !ok {
			return c, errLayout
		}
		*n, c = v, rest
	}
	return c, nil
}
