package msgstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/table"
)

// image is the durable half: what the file holds. It reads, and copies what it
// reads before the transaction ends; nothing of it points into the memory map.
type image struct {
	path string
	// mu guards the open file against being swapped: whoever uses it holds mu for
	// reading, not for long, and does not come back for it.
	mu sync.RWMutex
	*open
	uid    [16]byte
	store  sealer
	msgs   sealer
	subj   sealer
	post   sealer
	gone   sealer
	kv     sealer
	failed atomic.Bool
	slice  int   // sliceBytes, but in tests
	fresh  int64 // freshBytes, but in tests
	// cut is from which sequence on postings are passed over, as they are of a
	// staging that has not been done; 0 if there is none.
	cut atomic.Uint64
	// badPosts says that postings are damaged; the next checkpoint makes them
	// anew.
	badPosts atomic.Bool
	wrote    func(octets int64) // Options.Wrote; may be nil
}

// open is an open file.
type open struct {
	db *bbolt.DB
	// file is the database once more, for reading ahead; nil if it is not
	// open. Only in read transactions, which closing waits for.
	file     *os.File
	fileOnce sync.Once
	aheadEnd atomic.Int64 // up to where the file has been asked for last
	// stuck says that a transaction could not be ended, so that no other can
	// begin and the database cannot be closed.
	stuck atomic.Bool
}

var _ table.Image = (*image)(nil)

func newImage(path string, db *bbolt.DB) *image {
	return &image{path: path, open: &open{db: db}, slice: sliceBytes, fresh: freshBytes}
}

func (im *image) seals(uid [16]byte) {
	if im.uid == uid && im.store != 0 {
		return // others read them
	}
	im.uid = uid
	im.store = newSealer(uid, bucketStore)
	im.msgs = newSealer(uid, bucketMsgs)
	im.subj = newSealer(uid, bucketSubj)
	im.post = newSealer(uid, bucketPost)
	im.gone = newSealer(uid, bucketGone)
	im.kv = newSealer(uid, bucketKV)
}

// close closes the database first: once it is, no one reads ahead any more.
func (o *open) close() error {
	if o.stuck.Load() {
		return nil // the end of the process closes it
	}
	err := o.db.Close()
	if o.file != nil {
		err = errors.Join(err, o.file.Close())
	}
	return err
}

func (im *image) close() error {
	im.mu.RLock()
	defer im.mu.RUnlock()
	return im.open.close()
}

func (im *image) view(fn func(tx *bbolt.Tx) error) error {
	im.mu.RLock()
	defer im.mu.RUnlock()
	return boltfile.View(im.path, im.db, fn)
}

func (im *image) corrupt(seq uint64, err error) error {
	return &storage.CorruptError{File: im.path, Seq: seq, Reason: err.Error()}
}

// corruptIndex is corrupt for what is not a message.
func (im *image) corruptIndex(what string, err error) error {
	ce := &storage.CorruptError{File: im.path, Reason: what + ": " + err.Error()}
	if errors.Is(err, errDamagedIndex) {
		return fmt.Errorf("%w: %w", errDamagedIndex, ce)
	}
	return ce
}

// update runs a transaction that writes. What went wrong is told apart:
// storage.ErrCorrupt is a structure of the file that makes no sense (nothing
// has changed then), storage.ErrClosed, want of space (see full), and all else
// a write or sync that failed.
func (im *image) update(fn func(tx *bbolt.Tx) error) error {
	im.mu.RLock()
	defer im.mu.RUnlock()
	if im.stuck.Load() {
		return im.corruptIndex("structure of the file", errStuck)
	}
	var tx *bbolt.Tx
	stuck, err := boltfile.Change(im.path, im.db, func(t *bbolt.Tx) error {
		tx = t
		return fn(t)
	})
	if stuck {
		im.stuck.Store(true)
	}
	if err == nil {
		im.count(tx)
	}
	return err
}

// count tells what a transaction that has been committed has written: the pages it
// allocated, and the meta page.
func (im *image) count(tx *bbolt.Tx) {
	if im.wrote != nil {
		stats := tx.Stats()
		im.wrote(stats.GetPageAlloc() + int64(im.db.Info().PageSize))
	}
}

var errStuck = errors.New("it was found damaged before")

// raw is the record of a message.
type raw struct {
	base uint64 // of its chunk
	seq  uint64
	rec  []byte
}

// whole reports whether the lengths that the record says are those that its place
// in the chunk, which has a checksum of its own, has room for: then they are right,
// whatever else is damaged.
func (r raw) whole() bool {
	var m storage.Message
	size, err := parseRecord(&m, r.base, r.rec)
	return err == nil && size == len(r.rec)
}

// raws are records that point into the map until copyOut.
type raws struct {
	rs    []raw
	total int // octets
}

func (r *raws) add(base, seq uint64, rec []byte) {
	r.rs = append(r.rs, raw{base, seq, rec})
	r.total += len(rec)
}

// full reports whether another record of that size would be too much.
func (r *raws) full(max, maxBytes, size int) bool {
	return len(r.rs) > 0 && (len(r.rs) >= max || r.total+size > maxBytes)
}

// copyOut copies the records, all into one piece of memory.
func (r *raws) copyOut() {
	buf := make([]byte, 0, r.total)
	for i := range r.rs {
		n := len(buf)
		buf = append(buf, r.rs[i].rec...)
		r.rs[i].rec = buf[n:len(buf):len(buf)]
	}
}

var rawsPool = sync.Pool{New: func() any { return new(raws) }}

func (r *raws) release() {
	clear(r.rs)
	r.rs, r.total = r.rs[:0], 0
	rawsPool.Put(r)
}

// seekChunk moves c, a cursor over messages, to the chunk that holds seq if any
// does, else to one before or behind it: the last one with a base at or below
// seq or, without such a one, the first.
func seekChunk(c *bbolt.Cursor, seq uint64) (k, v []byte) {
	var key [8]byte
	binary.BigEndian.PutUint64(key[:], seq)
	if k, v = c.Seek(key[:]); bytes.Equal(k, key[:]) {
		return k, v
	}
	if k == nil {
		return c.Last()
	}
	if k, v = c.Prev(); k != nil {
		return k, v
	}
	return c.First()
}

// chunkKey returns the base that a key stands for.
func (im *image) chunkKey(k []byte) (uint64, error) {
	if len(k) != 8 {
		return 0, im.corruptIndex("bucket of messages", errLayout)
	}
	return binary.BigEndian.Uint64(k), nil
}

const (
	// aheadMin is how many messages a reader must want for it to be reading
	// through.
	aheadMin = 64
	// aheadBytes is how much of the file is asked for at once.
	aheadBytes = 2 << 20
)

// prefetch asks the system for what follows v, a value in the map, in the
// file. bbolt tells it not to read ahead at all, and messages that were stored
// one after another lie one after another.
func (im *image) prefetch(v []byte) {
	im.fileOnce.Do(func() { im.file, _ = os.Open(im.path) }) // a slow read is no error
	if im.file == nil {
		return
	}
	at := int64(uintptr(unsafe.Pointer(&v[0])) - im.db.Info().Data)
	end := im.aheadEnd.Load()
	if at >= end-aheadBytes-aheadBytes/2 && at < end-aheadBytes/2 {
		return // asked for already
	}
	from := at
	if at < end && at >= end-aheadBytes/2 {
		from = end
	}
	im.aheadEnd.Store(from + aheadBytes)
	readAhead(im.file, from, aheadBytes)
}

// read copies the records in [from, to] out of the file, at least one and then
// no more than max or maxBytes allow.
func (im *image) read(from, to uint64, max, maxBytes int, out *raws) (through uint64, err error) {
	err = im.view(func(tx *bbolt.Tx) error {
		out.rs, out.total = out.rs[:0], 0
		if through, err = im.collect(tx, from, to, max, maxBytes, out); err == nil {
			out.copyOut()
		}
		return err
	})
	return through, err
}

// collect is read within a transaction, whose map the records point into.
func (im *image) collect(tx *bbolt.Tx, from, to uint64, max, maxBytes int, out *raws) (through uint64, err error) {
	c := tx.Bucket(bucketMsgs).Cursor()
	for k, v := seekChunk(c, from); k != nil; k, v = c.Next() {
		base, err := im.chunkKey(k)
		if err != nil || base > to {
			return to, err
		}
		if len(out.rs) == 0 && max >= aheadMin && len(v) > 0 {
			im.prefetch(v)
		}
		ck, err := parseChunk(im.msgs, k, v)
		if err != nil {
			// What proves to be a message is one all the same; what does not is
			// missing, and whoever knows that it should be there will say so.
			rescueChunk(im.msgs, k, v, func(m storage.Message, rec []byte) {
				switch {
				case m.Seq < from || m.Seq > to || through != 0:
				case out.full(max, maxBytes, len(rec)):
					through = m.Seq - 1
				default:
					out.add(m.Seq-uint64(binary.LittleEndian.Uint16(rec[4:])), m.Seq, rec)
				}
			})
			if through != 0 {
				return through, nil
			}
			continue
		}
		for i, _ := ck.find(from); i < ck.n; i++ {
			seq, rec := ck.seq(i), ck.record(i)
			if seq > to {
				return to, nil
			}
			if out.full(max, maxBytes, len(rec)) {
				return seq - 1, nil
			}
			out.add(base, seq, rec)
			if seq == to {
				return to, nil
			}
		}
	}
	return to, nil
}

func (im *image) decode(r raw) (storage.Message, error) {
	m, size, err := decodeRecord(im.msgs, r.base, r.rec)
	if err == nil && (size != len(r.rec) || m.Seq != r.seq) {
		err = errLayout
	}
	if m.Seq = r.seq; err != nil {
		return m, im.corrupt(r.seq, err)
	}
	return m, nil
}

// Run implements table.Image.
func (im *image) Run(from, to uint64, max, maxBytes int, dst []storage.Message) ([]storage.Message, uint64, error) {
	out := rawsPool.Get().(*raws)
	defer out.release()
	through, err := im.read(from, to, max, maxBytes, out)
	if err != nil {
		return dst, 0, fmt.Errorf("read %s: %w", im.path, err)
	}
	if dst == nil {
		dst = make([]storage.Message, 0, len(out.rs))
	}
	for i, r := range out.rs {
		m, err := im.decode(r)
		switch {
		case err == nil:
			dst = append(dst, m)
		case i == 0:
			return dst, 0, err
		default:
			return dst, r.seq - 1, nil
		}
	}
	return dst, through, nil
}

// Fetch implements table.Image.
func (im *image) Fetch(seqs []uint64, maxBytes int) ([]storage.Message, error) {
	out := rawsPool.Get().(*raws)
	defer out.release()
	err := im.view(func(tx *bbolt.Tx) error {
		out.rs, out.total = out.rs[:0], 0
		c := tx.Bucket(bucketMsgs).Cursor()
		var ck chunk // of the message before
		for _, seq := range seqs {
			if ck.n == 0 || seq > ck.last() {
				k, v := seekChunk(c, seq)
				if k == nil {
					continue
				}
				if _, err := im.chunkKey(k); err != nil {
					return err
				}
				var err error
				if ck, err = parseChunk(im.msgs, k, v); err != nil {
					ck = chunk{}
					rescueChunk(im.msgs, k, v, func(m storage.Message, rec []byte) {
						if m.Seq == seq {
							out.add(seq-uint64(binary.LittleEndian.Uint16(rec[4:])), seq, rec)
						}
					})
					continue
				}
			}
			if i, ok := ck.find(seq); ok {
				out.add(ck.base, seq, ck.record(i))
			}
			if out.total > maxBytes {
				break
			}
		}
		out.copyOut()
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", im.path, err)
	}
	msgs := make([]storage.Message, 0, len(out.rs))
	for _, r := range out.rs {
		m, err := im.decode(r)
		if err != nil {
			if len(msgs) == 0 {
				return nil, err
			}
			break
		}
		msgs = append(msgs, m)
	}
	return msgs, nil
}

// metaBytes bounds what one call of Metas copies.
const metaBytes = 256 << 10

// Metas implements table.Image.
func (im *image) Metas(from, to uint64, max int, dst []table.Meta) ([]table.Meta, uint64, error) {
	out := rawsPool.Get().(*raws)
	defer out.release()
	through, err := im.read(from, to, max, metaBytes, out)
	if err != nil {
		return dst, 0, fmt.Errorf("read %s: %w", im.path, err)
	}
	had := len(dst)
	subjects := 0
	for _, r := range out.rs {
		m, err := im.decode(r) // as good as it gets if it is damaged
		size := m.Size()
		if err != nil && !r.whole() {
			size = 0
		}
		dst = append(dst, table.Meta{Seq: r.seq, Time: m.Time, Subject: m.Subject, Size: size, Err: err})
		subjects += len(m.Subject)
	}
	// Metas are kept for a while: they must not hold on to the contents.
	var names strings.Builder
	names.Grow(subjects)
	for i := range dst[had:] {
		m := &dst[had+i]
		n := names.Len()
		names.WriteString(m.Subject)
		m.Subject = names.String()[n:]
	}
	return dst, through, nil
}

// block is a cursor over the blocks of postings of one subject.
type block struct {
	c    *bbolt.Cursor
	id   uint64
	k, v []byte
}

// at moves to the last block with a base at or below seq; failing that, to the
// first. It reports whether there is one.
func (b *block) at(seq uint64) bool {
	key := postKey(b.id, seq)
	b.k, b.v = b.c.Seek(key)
	if b.ok() && b.base() == seq {
		return true
	}
	k, v := b.k, b.v
	if k == nil {
		b.k, b.v = b.c.Last()
	} else {
		b.k, b.v = b.c.Prev()
	}
	if b.ok() {
		return true
	}
	b.k, b.v = k, v
	if k != nil {
		b.k, b.v = b.c.Seek(key)
	}
	return b.ok()
}

func (b *block) ok() bool {
	return len(b.k) == 16 && binary.BigEndian.Uint64(b.k) == b.id
}

func (b *block) base() uint64 { return binary.BigEndian.Uint64(b.k[8:]) }

func (b *block) next() bool {
	b.k, b.v = b.c.Next()
	return b.ok()
}

func (b *block) prev() bool {
	b.k, b.v = b.c.Prev()
	return b.ok()
}

func (im *image) posts(b *block, dst []uint64) ([]uint64, error) {
	had := len(dst)
	dst, err := im.allPosts(b, dst)
	if cut := im.cut.Load(); cut != 0 && err == nil {
		n, _ := slices.BinarySearch(dst[had:], cut)
		dst = dst[:had+n]
	}
	return dst, err
}

// allPosts is posts with those that a staging has left.
func (im *image) allPosts(b *block, dst []uint64) ([]uint64, error) {
	c, err := im.post.open(b.k, b.v)
	if err == nil {
		dst, err = decodePosts(c, b.base(), dst)
	}
	if err != nil {
		im.badPosts.Store(true)
		return dst, im.corruptIndex(fmt.Sprintf("index of subject number %d", b.id), err)
	}
	return dst, nil
}

// Posts implements table.Image.
func (im *image) Posts(id, from uint64, n int, dst []uint64) ([]uint64, uint64, error) {
	through := uint64(table.End)
	had := len(dst)
	err := im.view(func(tx *bbolt.Tx) error {
		dst, through = dst[:had], table.End
		b := &block{c: tx.Bucket(bucketPost).Cursor(), id: id}
		for ok := b.at(from); ok; ok = b.next() {
			if len(dst)-had >= n {
				through = b.base() - 1
				return nil
			}
			at := len(dst)
			var err error
			if dst, err = im.posts(b, dst); err != nil {
				return err
			}
			skip := at
			for skip < len(dst) && dst[skip] < from {
				skip++
			}
			dst = append(dst[:at], dst[skip:]...)
		}
		return nil
	})
	if err != nil {
		return dst[:had], 0, fmt.Errorf("read %s: %w", im.path, err)
	}
	return dst, through, nil
}

// PostsBefore implements table.Image.
func (im *image) PostsBefore(id, upto uint64, dst []uint64) ([]uint64, uint64, error) {
	var down uint64
	had := len(dst)
	err := im.view(func(tx *bbolt.Tx) error {
		b := &block{c: tx.Bucket(bucketPost).Cursor(), id: id}
		if !b.at(upto) || b.base() > upto {
			return nil
		}
		var err error
		if dst, err = im.posts(b, dst); err != nil {
			return err
		}
		for len(dst) > had && dst[len(dst)-1] > upto {
			dst = dst[:len(dst)-1]
		}
		if base := b.base(); b.prev() {
			down = base
		}
		return nil
	})
	if err != nil {
		return dst[:had], 0, fmt.Errorf("read %s: %w", im.path, err)
	}
	return dst, down, nil
}
