package wal

import (
	"errors"
	"fmt"
	"path/filepath"

	"petiole/storage"
)

// liveFile is a file under a segment's name, and what readSegment found.
type liveFile struct {
	path   string
	num    uint64
	s      *segment // nil: nothing of it can be used
	damage error    // what is wrong, if anything
	size   int64
}

// chain is what live files are to each other.
type chain struct {
	segs   []*segment // of the log, oldest first
	out    []liveFile // not usable, or of another log
	damage []error    // what is wrong with the files, in the order of the log
	logID  [16]byte
	num    uint64 // highest number
	// after is what is missing behind the last segment; its Last is not set, as
	// nothing tells it.
	after *Lost
}

// link puts live files, ordered by number, together. It changes fields of the
// segments: gap, and where one that should be sealed ends.
func link(files []liveFile) chain {
	c := chain{}
	c.logID = majority(files)
	var missing *liveFile // out since the last segment
	for i := range files {
		f := &files[i]
		c.num = max(c.num, f.num)
		if f.damage != nil {
			c.damage = append(c.damage, f.damage)
		}
		if f.s != nil {
			if err := c.join(f, missing); err == nil {
				missing = nil
				continue
			} else {
				c.damage = append(c.damage, err)
				f.damage = err
			}
		}
		c.out = append(c.out, *f)
		missing = f
	}
	last := (*segment)(nil)
	next := storage.LSN(1)
	if n := len(c.segs); n > 0 {
		last = c.segs[n-1]
		next = last.next // if it is not sealed, Open will know better
	}
	switch {
	case missing != nil:
		c.after = &Lost{First: next, Uncertain: true, File: missing.path, Reason: reason(missing.damage)}
	case last != nil && last.sealed:
		path := filepath.Join(filepath.Dir(last.path), segmentName(last.hdr.num+1, liveSuffix))
		c.after = &Lost{First: next, Uncertain: true, File: path, Reason: "the segment is missing"}
		c.damage = append(c.damage, &CorruptError{path, 0, "the segment is missing that follows " + filepath.Base(last.path)})
	}
	return c
}

// join adds a segment to the end of the chain, or says why it does not belong
// there. missing is what lies between.
func (c *chain) join(f, missing *liveFile) error {
	s := f.s
	if s.pieced && logWord(s.hdr.logID) == logWord(c.logID) {
		s.hdr.logID = c.logID
	}
	if s.hdr.logID != c.logID {
		return &CorruptError{s.path, 40, "the segment belongs to another log"}
	}
	if len(c.segs) == 0 {
		switch {
		case missing != nil && s.hdr.first > 1:
			// Where it began it does not say any more.
			s.gap = &Lost{First: 1, Last: s.hdr.first - 1, Uncertain: true, Before: true, File: missing.path, Reason: reason(missing.damage)}
		case s.hdr.first > s.hdr.prev:
			s.gap = &Lost{First: s.hdr.prev, Last: s.hdr.first - 1, Uncertain: true, Before: true, File: s.path, Offset: 72, Reason: earlierLoss}
		}
		c.segs = append(c.segs, s)
		return nil
	}
	last := c.segs[len(c.segs)-1]
	next := last.next // what the segment before says
	if !last.sealed {
		next = max(next, s.hdr.prev)
	}
	if s.hdr.first < next {
		return &CorruptError{s.path, 32, fmt.Sprintf("the segment starts with LSN %d where LSN %d has to follow", s.hdr.first, next)}
	}
	if !last.sealed {
		// Either the power failed between the creation of s and the footer, or
		// the footer is damaged. Its successor tells where it ends.
		last.unended, last.next, last.end = true, next, batchLimit(last.size, &last.hdr)
	}
	if s.hdr.first > next {
		// Numbers are skipped only where nothing tells how many were lost.
		s.gap = &Lost{First: next, Last: s.hdr.first - 1, Uncertain: s.hdr.prev == next, File: s.path, Offset: 72, Reason: earlierLoss}
		if s.hdr.prev != next {
			s.gap.Reason = "a segment is missing"
			if missing != nil {
				s.gap.File, s.gap.Offset, s.gap.Reason = missing.path, 0, reason(missing.damage)
			} else {
				c.damage = append(c.damage, &CorruptError{s.path, 32, fmt.Sprintf(
					"the segment starts with LSN %d where LSN %d has to follow: a segment is missing", s.hdr.first, next)})
			}
		}
	}
	c.segs = append(c.segs, s)
	return nil
}

const earlierLoss = "lost at an earlier start"

// reason returns what a CorruptError found.
func reason(err error) string {
	var ce *CorruptError
	if errors.As(err, &ce) {
		return ce.Reason
	}
	return err.Error()
}

// majority returns the log id of most segments, of the newest if there are as
// many of another.
func majority(files []liveFile) (id [16]byte) {
	votes := map[[16]byte]int{}
	for _, whole := range []bool{true, false} {
		for i := range files {
			if s := files[i].s; s != nil && s.pieced != whole {
				votes[s.hdr.logID]++
				if votes[s.hdr.logID] >= votes[id] {
					id = s.hdr.logID
				}
			}
		}
		if len(votes) > 0 {
			break
		}
	}
	return id
}
