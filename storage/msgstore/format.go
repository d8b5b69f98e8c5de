package msgstore

import (
	"encoding/binary"
	"errors"
	"hash/crc32"

	"petiole/storage"
)

// The file is a bbolt database with these buckets. Every value begins with a
// version octet and a CRC32C that covers the store's identity, the bucket, the
// key and the content, so that a value is neither damaged nor another's. But for
// chunks it covers the version, too: of another one that is intact the file has
// been written by a program that knows more. The identity's says so of the file,
// and has to be the highest of those in it:
//
//	            0         1           5
//	            ┌─────────┬───────────┬──────────────┐
//	            │ version │ crc32c LE │ content      │
//	            └─────────┴───────────┴──────────────┘
//
//	bucket  key                    content
//	store   "identity"             uid [16], cipher u8, key id u32 LE   (once)
//	        "file"                 random u64, made with the file, not with the store
//	        "state"                numbers, see encodeState
//	        "sparse"               uvarint distances of the bases of chunks of
//	                               which little lives, if there are any
//	        "staged"               three uvarints: numbers of the stagings begun, done
//	                               and cleared up after, see subjects.go
//	msgs    base u64 BE            several messages: a chunk, see chunk.go
//	subj    subject                uvarint number of the staging (0: none), id, msgs,
//	                               bytes, first, last-first; of one of a staging the
//	                               latter five once more, as they were before
//	post    id u64 BE, base u64 BE uvarint distances: of the first sequence from
//	                               base, of each further one from the one before
//	gone    page u64 BE            32 × u64 LE, a bit per sequence without message
//	kv      key                    uvarint LSN, value
//
// uid is random, made with the store, and never changes. The cipher says how
// contents are encrypted: 0, not at all, is the only one there is; key id then
// is 0, too. What the identity says is sealed with no identity.
//
// The state decides what exists: messages below its first or above its last
// sequence, and those with a bit in gone or within one of the state's spans, do
// not, whatever msgs holds.
//
// subj, post and gone say nothing that msgs does not: they are there to open
// and look up without reading messages, and are made anew if damaged. post may
// hold sequences that are gone.
//
// The LSN beside a keyed value is that of the checkpoint that wrote it: of two
// copies that are found of a key, it tells the newer one.
//
// Beside the file is another, see floor.go.
const (
	version = 2
	// firstVersion is what the versions in checksums are relative to.
	firstVersion = 2
	overhead     = 5
	// identitySize is the length of the content under "identity".
	identitySize = 16 + 1 + 4
	// cipherNone is the cipher of contents that are not encrypted.
	cipherNone = 0
)

var (
	bucketStore = []byte("store")
	bucketMsgs  = []byte("msgs")
	bucketSubj  = []byte("subj")
	bucketPost  = []byte("post")
	bucketGone  = []byte("gone")
	bucketKV    = []byte("kv")
	keyIdentity = []byte("identity")
	keyFile     = []byte("file")
	keyState    = []byte("state")
	keySparse   = []byte("sparse")
	keyStaged   = []byte("staged")
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
	return s.finishAs(version, key, v)
}

func (s sealer) finishAs(version byte, key, v []byte) []byte {
	v[0] = version
	binary.LittleEndian.PutUint32(v[1:], s.sum(version, key, v[overhead:]))
	return v
}

// sum returns a value's checksum. It depends on the version, so that a flipped
// bit there is damage, and another version than ours one that wrote the value.
func (s sealer) sum(version byte, key, content []byte) uint32 {
	return crc32.Update(crc32.Update(uint32(s)^uint32(version^firstVersion), castagnoli, key), castagnoli, content)
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
	if binary.LittleEndian.Uint32(v[1:]) != s.sum(v[0], key, v[overhead:]) {
		return nil, errChecksum
	}
	if v[0] != version {
		return nil, errVersion
	}
	return v[overhead:], nil
}

// openKV returns a keyed value, and the LSN of the checkpoint that wrote it.
func (im *image) openKV(key, v []byte) ([]byte, storage.LSN, error) {
	c, err := im.kv.open(key, v)
	if err != nil {
		return nil, 0, err
	}
	lsn, c, ok := uvarint(c)
	if !ok {
		return nil, 0, errLayout
	}
	return c, storage.LSN(lsn), nil
}

func seqKey(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

func postKey(id, base uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(make([]byte, 0, 16), id), base)
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
