package msgstore

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/time/rate"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
	"petiole/storage/vfs"
)

// How a file becomes smaller: what exists is copied into a new one in the order
// of sequences, in slices, each of which is brought to disk before the next.
//
//	old  [ 1 ···· 900 | 901 ·········· 5000 ]··· checkpoints go on behind
//	new  [ 870 891 ·· 900 ]                      what is deleted is not copied
//	                   ▲ copied so far
//
// When little is left, checkpoints have to wait while the rest is copied, then
// the indexes and the state, as they are; the new file takes the place of the
// old one. A message that is deleted after it has been copied stays in the new
// file and is deleted there by the same notes.

// ErrPostponed says that a compaction has not been done, for the reason that it
// is wrapped with: too little room on the file system, mostly. It is worth
// trying again later.
var ErrPostponed = errors.New("compaction postponed")

const (
	// worthMin is how many octets a compaction has to give back at least, and
	// worthPart which part of the file.
	worthMin  = 8 << 20
	worthPart = 4
	// spareRoom is how much a compaction leaves free on the file system.
	spareRoom = 64 << 20
)

// CompactOptions tune Compact. The zero value is ready for use.
type CompactOptions struct {
	// SliceBytes is how many octets are copied, and brought to disk, at once
	// (default 1 MiB).
	SliceBytes int64
	// BytesPerSecond limits how fast is copied (default 16 MiB; negative: as
	// fast as possible).
	BytesPerSecond int64
	// Free returns how much room the file system of a directory has, in octets
	// (default: what the system says).
	Free func(dir string) (int64, error)

	step func() // tests only: called between slices
}

// CompactReport says what a compaction did.
type CompactReport struct {
	Before   int64  `json:"before"` // length of the file in octets
	After    int64  `json:"after"`
	Copied   int64  `json:"copied"` // octets of keys and values
	Slices   int    `json:"slices"`
	Messages uint64 `json:"messages"` // copied
	// Duration is that of the whole, Blocked how long a checkpoint could not
	// have run, at the end.
	Duration time.Duration `json:"duration_ns"`
	Blocked  time.Duration `json:"blocked_ns"`
}

// Waste is how much of a store's file holds nothing. Sizes are in octets.
type Waste struct {
	File int64 `json:"file"` // length of the file
	Used int64 `json:"used"` // pages in use
	Live int64 `json:"live"` // of the messages, as limits count them
	Free int64 `json:"free"` // pages free for reuse, and what lies behind the last page used
	// After estimates the length of the file after compacting.
	After int64 `json:"after"`
	// Worth says that compacting gives back a quarter of the file at least, and
	// 8 MiB.
	Worth bool `json:"worth"`
}

// compacted remembers what the last compaction came to: the estimate may be
// wrong for what a store holds, and must not be for ever.
type compacted struct {
	size int64
	live int64
}

// Waste says, without reading messages, whether Compact is worth it.
func (s *Store) Waste() (Waste, error) {
	im := s.image
	if s.Closed() {
		return Waste{}, storage.ErrClosed
	}
	st := s.State()
	w := Waste{Live: int64(st.Bytes)}
	f, err := os.Open(im.path)
	if err != nil {
		return w, fmt.Errorf("look at message store: %w", err)
	}
	defer f.Close() // was only read
	fi, err := f.Stat()
	if err != nil {
		return w, fmt.Errorf("look at message store: %w", err)
	}
	w.File = fi.Size()
	p := boltpages.Open(f, w.File)
	if len(p.Metas()) == 0 {
		return w, &storage.CorruptError{File: im.path, Reason: "both meta pages are damaged"}
	}
	m := p.Metas()[0]
	free, err := p.FreeCount(m)
	if err != nil {
		free = 0 // it may just be being written: the next time
	}
	size := int64(p.PageSize())
	w.Used = max(min(int64(m.HighWater)*size, w.File)-int64(free)*size, 0)
	w.estimate(st, s.compacted.Load())
	return w, nil
}

// Waste is [Store.Waste] of a store that is not open, as of its last checkpoint.
func (i Info) Waste() Waste {
	w := Waste{Live: int64(i.State.Bytes), File: i.Size, Used: max(i.Size-i.Free-i.Ahead, 0)}
	w.estimate(i.State, nil)
	return w
}

// Need is how much room Compact wants on the file system, beside the file.
func (w Waste) Need() int64 { return w.After + w.After/4 + spareRoom }

// estimate fills in what follows from the lengths and the state.
func (w *Waste) estimate(st storage.State, last *compacted) {
	w.Free = w.File - w.Used
	// A message costs about what limits count for it, a subject its summary
	// and a block of postings.
	w.After = min(w.Used, w.Live+w.Live/8+int64(st.Msgs)*8+int64(st.Subjects)*128+1<<20)
	if st.Msgs > 0 {
		// A page has up to three messages, whatever their size, and is written
		// anew for each that comes to it, where it finds room in one piece: behind
		// large ones the pages of one, two and three are free.
		w.After += 6 * w.Live / int64(st.Msgs)
	}
	if last != nil && last.live > 0 {
		w.After = max(w.After, int64(float64(last.size)*min(1, float64(w.Live)/float64(last.live))))
	}
	w.After = min(w.After, w.File)
	gain := w.File - w.After
	w.Worth = gain >= worthMin && gain >= w.File/worthPart
}

// Compact makes the file smaller: it copies what lives into a new one, beside
// readers, the writer and checkpoints, which wait for the last part only. It
// returns ErrPostponed if there is too little room for both, or another one is
// running, storage.ErrCorrupt if it meets damage (see Repair), storage.ErrFailed
// if a write or sync failed, be it of the new file, and ctx's error if that
// ends; the file is as it was then, except perhaps after storage.ErrFailed.
func (s *Store) Compact(ctx context.Context, o CompactOptions) (CompactReport, error) {
	im := s.image
	fail := func(err error) (CompactReport, error) {
		return CompactReport{}, fmt.Errorf("compact %s: %w", im.path, err)
	}
	if !s.compacting.TryLock() {
		return fail(fmt.Errorf("%w: another one is running", ErrPostponed))
	}
	defer s.compacting.Unlock()
	if o.SliceBytes <= 0 {
		o.SliceBytes = 1 << 20
	}
	if o.BytesPerSecond == 0 {
		o.BytesPerSecond = 16 << 20
	}
	if o.Free == nil {
		o.Free = vfs.OS.Free
	}
	begin := time.Now()
	waste, err := s.Waste()
	if err != nil {
		return fail(err)
	}
	room, err := o.Free(filepath.Dir(im.path))
	if err != nil {
		return fail(fmt.Errorf("ask how much room there is: %w", err))
	}
	if need := waste.Need(); room < need {
		return fail(fmt.Errorf("%w: it needs room for %d MiB beside the file, the file system has %d MiB", ErrPostponed, need>>20, room>>20))
	}
	path := im.path + compactSuffix
	fail = func(err error) (CompactReport, error) {
		switch {
		case s.Closed(): // and perhaps deleted, under the new file
			err = fmt.Errorf("%w: %w", storage.ErrClosed, err)
		case errors.Is(err, storage.ErrFailed):
			im.failed.Store(true)
		case full(err):
			err = fmt.Errorf("%w: the file system is full: %w", ErrPostponed, err)
		}
		return CompactReport{}, fmt.Errorf("compact %s: %w", im.path, err)
	}
	w, err := newRewriter(path, im.uid)
	if err != nil {
		return fail(err)
	}
	w.im.wrote = im.wrote
	c := &compaction{s: s, o: o, w: w, ctx: ctx, limit: rate.NewLimiter(rate.Inf, 0), had: map[uint64]int{}}
	if o.BytesPerSecond > 0 {
		c.limit = rate.NewLimiter(rate.Limit(o.BytesPerSecond), int(o.SliceBytes))
	}
	c.report.Before, c.report.After = waste.File, waste.After
	if err := w.guard(c.run); err != nil {
		if !c.closed {
			err = errors.Join(err, w.abort())
		} else if rm := os.Remove(path); rm != nil && !errors.Is(rm, fs.ErrNotExist) {
			err = errors.Join(err, rm)
		}
		return fail(err)
	}
	r := c.report
	s.compacted.Store(&compacted{size: r.After, live: int64(s.State().Bytes)})
	r.Copied = w.total
	r.Duration = time.Since(begin)
	return r, nil
}

// compaction is one under way.
type compaction struct {
	s      *Store
	o      CompactOptions
	w      *rewriter
	ctx    context.Context
	limit  *rate.Limiter
	report CompactReport
	next   uint64 // first sequence not looked at
	closed bool   // the new file has been closed
	// had says, by page of the bucket gone, how many of its sequences were gone
	// when the first message about it was copied.
	had  map[uint64]int
	page uint64 // the one noted last, and 1

	buf  []byte // records
	recs []located
}

type located struct {
	seq      uint64
	from, to int // in buf
}

func (c *compaction) run() error {
	// Beside a writer that is faster than the limit there would be no end.
	patience := 2*c.report.After + 64<<20
	for copied := int64(0); ; {
		n, end, err := c.slice()
		if err != nil {
			return err
		}
		if c.o.step != nil {
			c.o.step()
		}
		if end {
			return c.finish()
		}
		switch copied += int64(n); {
		case copied > 4*patience:
			return fmt.Errorf("%w: what comes in comes in faster than it can be copied", ErrPostponed)
		case copied > patience:
			c.limit.SetLimit(rate.Inf)
		}
		if err := c.wait(n); err != nil {
			return err
		}
	}
}

// wait lets others have the disk.
func (c *compaction) wait(n int) error {
	for n > 0 && c.limit.Limit() != rate.Inf {
		k := min(n, c.limit.Burst())
		if err := c.limit.WaitN(c.ctx, k); err != nil {
			return err
		}
		n -= k
	}
	return c.ctx.Err()
}

// slice copies some messages, and brings them to disk. It returns how many
// octets it has read, and whether that was all there are.
func (c *compaction) slice() (n int, end bool, err error) {
	im := c.s.image
	err = im.view(func(tx *bbolt.Tx) error {
		n, end, err = c.collect(tx)
		return err
	})
	if err != nil {
		return n, end, err
	}
	for _, r := range c.recs {
		if err := c.w.record(r.seq, c.buf[r.from:r.to]); err != nil {
			return n, end, err
		}
		c.report.Messages++
		if err := c.w.slice(); err != nil {
			return n, end, err
		}
	}
	if len(c.recs) > 0 {
		c.report.Slices++
		if err := c.w.commit(); err != nil {
			return n, end, err
		}
		err = c.w.sync()
	}
	return n, end, err
}

// collect copies records out of the file.
func (c *compaction) collect(tx *bbolt.Tx) (n int, end bool, err error) {
	im := c.s.image
	c.buf, c.recs = c.buf[:0], c.recs[:0]
	live, err := im.liveness(tx)
	if err != nil {
		return 0, false, err
	}
	c.next = max(c.next, live.st.First)
	cur := tx.Bucket(bucketMsgs).Cursor()
	for k, v := seekChunk(cur, c.next); k != nil; k, v = cur.Next() {
		// Chunks of which nothing lives cost reading, too.
		if int64(len(c.buf)) >= c.o.SliceBytes || int64(n) >= 8*c.o.SliceBytes {
			return n, false, nil
		}
		base, err := im.chunkKey(k)
		if err != nil {
			return n, false, err
		}
		if base > live.st.Last {
			break
		}
		ck, err := parseChunk(im.msgs, k, v)
		if err != nil {
			return n, false, im.corruptIndex(fmt.Sprintf("messages from %d on", base), err)
		}
		if ck.last() < c.next {
			continue // it was the last one of the slice before
		}
		n += len(v)
		for i, _ := ck.find(c.next); i < ck.n && ck.seq(i) <= live.st.Last; i++ {
			seq := ck.seq(i)
			if ok, err := live.exists(seq); err != nil {
				return n, false, err
			} else if !ok {
				continue
			}
			if _, err := ck.message(im.msgs, i); err != nil {
				return n, false, im.corrupt(seq, err)
			}
			c.remember(live)
			at := len(c.buf)
			c.buf = append(c.buf, ck.record(i)...)
			c.recs = append(c.recs, located{seq, at, len(c.buf)})
		}
		c.next = max(c.next, min(ck.last(), live.st.Last)+1)
	}
	c.next = max(c.next, live.st.Last+1)
	return n, true, nil
}

// finish copies what is left while no checkpoint runs, and replaces the file.
func (c *compaction) finish() error {
	s := c.s
	s.checkpoint.Lock()
	defer s.checkpoint.Unlock()
	begin := time.Now()
	if s.Closed() {
		return storage.ErrClosed
	}
	for end := false; !end; {
		var err error
		if _, end, err = c.slice(); err != nil {
			return err
		}
	}
	if err := c.w.flush(); err != nil {
		return err
	}
	im := s.image
	for _, b := range []struct {
		name []byte
		seal sealer
	}{{bucketSubj, im.subj}, {bucketPost, im.post}, {bucketGone, im.gone}, {bucketKV, im.kv}} {
		if err := c.bucket(b.name, b.seal); err != nil {
			return err
		}
	}
	var state, staged []byte
	if err := im.view(func(tx *bbolt.Tx) error {
		if _, _, _, _, err := im.readState(tx); err != nil {
			return err
		}
		state = bytes.Clone(tx.Bucket(bucketStore).Get(keyState))
		staged = bytes.Clone(tx.Bucket(bucketStore).Get(keyStaged))
		return nil
	}); err != nil {
		return err
	}
	if err := c.w.put(bucketStore, keyState, state); err != nil {
		return err
	}
	if staged != nil {
		if err := c.w.put(bucketStore, keyStaged, staged); err != nil {
			return err
		}
	}
	if err := c.w.commit(); err != nil {
		return err
	}
	if err := c.noteSparse(); err != nil {
		return err
	}
	c.closed = true
	if err := c.w.close(); err != nil {
		return err
	}
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if err := s.swapFile(im.path+compactSuffix, ""); err != nil {
		return err
	}
	c.report.Blocked = time.Since(begin)
	if fi, err := os.Stat(im.path); err == nil {
		c.report.After = fi.Size()
	}
	if err := s.writeFloor(); err != nil {
		return failure(err)
	}
	return nil
}

// remember notes what live has said of the page at hand.
func (c *compaction) remember(live *liveness) {
	if c.page == live.no+1 {
		return
	}
	c.page = live.no + 1
	if _, ok := c.had[live.no]; !ok {
		c.had[live.no] = ones(live.page)
	}
}

// ones counts the bits that are set.
func ones(b []byte) (n int) {
	for ; len(b) >= 8; b = b[8:] {
		n += bits.OnesCount64(binary.LittleEndian.Uint64(b))
	}
	return n
}

// noteSparse notes the chunks of the new file with messages that have been
// deleted since they were copied. The old file's list knows nothing of them: what
// it has named may have been written anew there.
func (c *compaction) noteSparse() error {
	b, err := c.w.bucket(bucketStore)
	if err != nil {
		return err
	}
	im, tx := c.w.im, b.Tx()
	live, err := im.liveness(tx)
	if err != nil {
		return err
	}
	var keys []uint64
	through := uint64(0) // of the chunk before
	gone, msgs := tx.Bucket(bucketGone).Cursor(), tx.Bucket(bucketMsgs).Cursor()
	for k, v := gone.First(); k != nil; k, v = gone.Next() {
		no := binary.BigEndian.Uint64(k)
		if had, ok := c.had[no]; !ok || ones(v[overhead:]) <= had {
			continue
		}
		end := no*uint64(pageSeqs) + uint64(pageSeqs) - 1
		for k, v := seekChunk(msgs, no*uint64(pageSeqs)); k != nil; k, v = msgs.Next() {
			base, err := im.chunkKey(k)
			if err != nil || base > end {
				if err != nil {
					return err
				}
				break
			}
			ck, err := parseChunk(im.msgs, k, v)
			if err != nil {
				return im.corruptIndex(fmt.Sprintf("messages from %d on", base), err)
			}
			if ck.last() <= through {
				continue
			}
			through = ck.last()
			for i := range ck.n {
				if ok, err := live.exists(ck.seq(i)); err != nil {
					return err
				} else if !ok {
					keys = append(keys, base)
					break
				}
			}
		}
	}
	return im.putSparse(tx, keys)
}

// bucket copies a bucket as it is, in slices.
func (c *compaction) bucket(name []byte, seal sealer) error {
	im := c.s.image
	var kvs []storage.KV
	for from := []byte{}; from != nil; {
		if err := im.view(func(tx *bbolt.Tx) error {
			kvs = kvs[:0]
			n := 0
			cur := tx.Bucket(name).Cursor()
			k, v := cur.Seek(from)
			for ; k != nil && n < rewriteSlice; k, v = cur.Next() {
				if _, err := seal.open(k, v); err != nil {
					return im.corruptIndex(fmt.Sprintf("bucket %q, key %x", name, k), err)
				}
				kvs = append(kvs, storage.KV{Key: string(k), Value: bytes.Clone(v)})
				n += len(k) + len(v)
			}
			from = bytes.Clone(k) // nil at the end
			return nil
		}); err != nil {
			return err
		}
		for _, kv := range kvs {
			if err := c.w.putOwned(name, []byte(kv.Key), kv.Value); err != nil {
				return err
			}
		}
		if err := c.w.commit(); err != nil {
			return err
		}
	}
	return nil
}
