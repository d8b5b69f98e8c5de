package msgstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"go.etcd.io/bbolt"
	"golang.org/x/time/rate"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
	"petiole/storage/internal/table"
)

const (
	// scrubBytes is how much a scrub reads in one transaction.
	scrubBytes = 256 << 10
	// scrubTries is how often a page that may just be being written is read
	// before it counts as damaged.
	scrubTries = 3
)

// ScrubReport says what a scrub has read.
type ScrubReport struct {
	Bytes    int64  // of keys and values
	Messages uint64 // that exist, intact
	Damaged  uint64 // calls of report
}

// Scrub reads everything in the file, pages and values, and compares it with
// its checksums, at no more than bytesPerSecond (0: no limit). It calls report
// for each damage, which is a *storage.CorruptError or wraps one; those of
// messages have their sequence. Where a page that leads to others is damaged,
// what it leads to is not read: [Store.Repair] finds out what is left of it.
//
// It runs beside everything else and changes nothing; ctx ends it early, with
// ctx's error. What the system has in memory it takes from there: damage to the
// medium is found once that has been evicted.
func (s *Store) Scrub(ctx context.Context, bytesPerSecond int, report func(error)) (ScrubReport, error) {
	sc := &scrub{s: s, ctx: ctx, limit: rate.NewLimiter(rate.Inf, 0)}
	if bytesPerSecond > 0 {
		sc.limit = rate.NewLimiter(rate.Limit(bytesPerSecond), scrubBytes)
	}
	sc.found = func(err error) {
		sc.report.Damaged++
		report(err)
	}
	im := s.image
	err := sc.messages()
	for _, b := range []struct {
		name []byte
		seal sealer
	}{{bucketSubj, im.subj}, {bucketPost, im.post}, {bucketGone, im.gone}, {bucketKV, im.kv}} {
		if err == nil {
			err = sc.bucket(b.name, b.seal)
		}
	}
	if err == nil {
		err = sc.metas()
	}
	if err != nil {
		err = fmt.Errorf("scrub %s: %w", im.path, err)
	}
	return sc.report, err
}

type scrub struct {
	s      *Store
	ctx    context.Context
	limit  *rate.Limiter
	found  func(error)
	report ScrubReport
}

// slice runs fn, which reads some octets, in a transaction. Damage to the
// structure is reported, and ends a bucket.
func (sc *scrub) slice(fn func(tx *bbolt.Tx) (n int, err error)) (goOn bool, err error) {
	if sc.s.Closed() {
		return false, storage.ErrClosed
	}
	n := 0
	err = sc.s.image.view(func(tx *bbolt.Tx) error {
		n, err = fn(tx)
		return err
	})
	sc.report.Bytes += int64(n)
	if errors.Is(err, storage.ErrCorrupt) {
		sc.found(err)
		return false, sc.ctx.Err()
	}
	for err == nil && n > 0 && sc.limit.Limit() != rate.Inf {
		k := min(n, sc.limit.Burst())
		err = sc.limit.WaitN(sc.ctx, k)
		n -= k
	}
	if err == nil {
		err = sc.ctx.Err()
	}
	return err == nil, err
}

// finding is damage that a scrub has found: a message, or one that is missing,
// or with seq 0 something else.
type finding struct {
	seq uint64
	err error
}

func (sc *scrub) messages() error {
	im := sc.s.image
	next := uint64(0)
	for end := false; !end; {
		// Told outside of the transaction: whoever is told may want to read.
		var damage []finding
		goOn, err := sc.slice(func(tx *bbolt.Tx) (n int, err error) {
			n, next, end, damage, err = sc.chunks(tx, next)
			return n, err
		})
		for _, d := range damage {
			if d.seq != 0 {
				// It may have been deleted meanwhile.
				if q, still := table.NextSeq(sc.s.Table, d.seq); !still || q != d.seq {
					continue
				}
				if ms, err := im.Fetch([]uint64{d.seq}, 0); err == nil && len(ms) == 1 {
					continue
				}
			}
			sc.found(d.err)
		}
		if err != nil || !goOn {
			return err
		}
	}
	return nil
}

// chunks checks chunks from the one of sequence next on.
func (sc *scrub) chunks(tx *bbolt.Tx, next uint64) (n int, after uint64, end bool, damage []finding, err error) {
	im := sc.s.image
	live, err := im.liveness(tx)
	if err != nil {
		return 0, next, false, nil, err
	}
	next = max(next, live.st.First)
	missing := func(upto uint64) error {
		for seq := next; seq < upto; {
			// The table knows of more deletions than the file, and how to pass
			// over long gaps.
			q, ok := table.NextSeq(sc.s.Table, seq)
			if !ok || q >= upto {
				break
			}
			if ok, err := live.exists(q); err != nil {
				return err
			} else if ok {
				// As of a reader's: what leads to it may be what is damaged.
				damage = append(damage, finding{q, &storage.CorruptError{File: im.path, Reason: fmt.Sprintf("message %d should be there and is not", q)}})
			}
			seq = q + 1
		}
		return nil
	}
	cur := tx.Bucket(bucketMsgs).Cursor()
	for k, v := seekChunk(cur, next); k != nil; k, v = cur.Next() {
		base, err := im.chunkKey(k)
		if err != nil {
			return n, next, false, damage, err
		}
		if base > live.st.Last {
			break
		}
		if n >= scrubBytes {
			return n, next, false, damage, nil
		}
		n += len(k) + len(v)
		ck, err := parseChunk(im.msgs, k, v)
		if err != nil {
			damage = append(damage, finding{err: im.corruptIndex(fmt.Sprintf("messages from %d on", base), err)})
			rescueChunk(im.msgs, k, v, func(m storage.Message, _ []byte) {
				if m.Seq >= next && m.Seq <= live.st.Last {
					_ = missing(m.Seq) // an error comes again
					next = m.Seq + 1
					sc.report.Messages++
				}
			})
			continue
		}
		for i, _ := ck.find(next); i < ck.n && ck.seq(i) <= live.st.Last; i++ {
			seq := ck.seq(i)
			if err := missing(seq); err != nil {
				return n, next, false, damage, err
			}
			next = seq + 1
			if ok, err := live.exists(seq); err != nil {
				return n, next, false, damage, err
			} else if !ok {
				continue
			}
			if _, err := ck.message(im.msgs, i); err != nil {
				damage = append(damage, finding{seq, im.corrupt(seq, err)})
				continue
			}
			sc.report.Messages++
		}
	}
	if live.st.Msgs > 0 {
		err = missing(live.st.Last + 1)
	}
	return n, live.st.Last + 1, true, damage, err
}

// bucket checks all values of a bucket.
func (sc *scrub) bucket(name []byte, seal sealer) error {
	im := sc.s.image
	for from := []byte{}; from != nil; {
		var damage []error
		goOn, err := sc.slice(func(tx *bbolt.Tx) (n int, err error) {
			c := tx.Bucket(name).Cursor()
			k, v := c.Seek(from)
			for ; k != nil && n < scrubBytes; k, v = c.Next() {
				n += len(k) + len(v)
				if _, err := seal.open(k, v); err != nil {
					damage = append(damage, im.corruptIndex(fmt.Sprintf("bucket %q, key %x", name, k), err))
				}
			}
			from = bytes.Clone(k)
			return n, nil
		})
		for _, d := range damage {
			sc.found(d)
		}
		if err != nil || !goOn {
			return err
		}
	}
	return nil
}

// metas checks what no transaction looks at: both meta pages, and the list of
// free pages.
func (sc *scrub) metas() error {
	var damage []boltpages.Damage
	for range scrubTries {
		damage = nil
		f, err := os.Open(sc.s.image.path)
		if err != nil {
			return err
		}
		fi, err := f.Stat()
		if err == nil {
			p := boltpages.Open(f, fi.Size())
			damage = append(damage, p.MetaDamage()...)
			if len(p.Metas()) > 0 && p.Metas()[0].Persisted() {
				var d *boltpages.Damage
				if _, err := p.Freelist(p.Metas()[0]); errors.As(err, &d) {
					damage = append(damage, *d)
				}
			}
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		if len(damage) == 0 {
			break
		}
	}
	for _, d := range damage {
		sc.found(&storage.CorruptError{File: sc.s.image.path, Reason: "structure of the file: " + d.Error()})
	}
	return nil
}
