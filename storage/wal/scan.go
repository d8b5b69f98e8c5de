package wal

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"petiole/storage"
	"petiole/storage/vfs"
)

const (
	// readChunk is how much a scan reads at once.
	readChunk = 1 << 20
	// badBlock is what is given up for each place that cannot be read.
	badBlock = 4096
	// maxBadBlocks is how many such places are taken for damage. With more the
	// disk does not work, which is no reason to give up what it holds.
	maxBadBlocks = 64
)

// scanner reads the batches of one segment in order.
type scanner struct {
	r     io.ReaderAt
	size  int64 // of the file
	limit int64 // where batches end at the latest
	num   uint64
	epoch uint64
	seed  uint32
	pos   int64       // of the next batch
	next  storage.LSN // its first LSN
	// fresh: payloads handed out stay valid, as every chunk is read into a
	// buffer of its own.
	fresh bool

	buf []byte // holds the file from off on
	off int64
	bad []int64 // blocks that could not be read, and are zeros in buf
	why error   // why
}

func newScanner(r io.ReaderAt, size int64, h *segmentHeader) *scanner {
	return &scanner{
		r: r, size: size, limit: batchLimit(size, h), num: h.num, epoch: h.epoch, seed: epochSeed(h.epoch),
		pos: segmentHeaderSize, next: h.first,
	}
}

// window returns the n bytes at pos, or fewer at the end of the file.
func (s *scanner) window(pos, n int64) ([]byte, error) {
	n = min(n, s.size-pos)
	if n <= 0 {
		return nil, nil
	}
	if at := pos - s.off; at >= 0 && at+n <= int64(len(s.buf)) {
		return s.buf[at : at+n : at+n], nil
	}
	want := min(max(n, readChunk), s.size-pos)
	if s.fresh || int64(cap(s.buf)) < want {
		s.buf = make([]byte, want)
	}
	s.buf, s.off = s.buf[:want], pos
	if m, err := s.r.ReadAt(s.buf, pos); int64(m) < want {
		if err == nil || err == io.EOF {
			s.buf = nil
			return nil, io.ErrUnexpectedEOF
		}
		if err := s.readAround(err); err != nil {
			s.buf = nil
			return nil, err
		}
	}
	return s.buf[:n:n], nil
}

// readAround fills buf block by block after a read error, with zeros for the
// blocks that cannot be read.
func (s *scanner) readAround(err error) error {
	if !vfs.IsMedium(err) {
		return err
	}
	s.why = err
	for at := int64(0); at < int64(len(s.buf)); {
		end := min(at+badBlock-(s.off+at)%badBlock, int64(len(s.buf)))
		if n, err := s.r.ReadAt(s.buf[at:end], s.off+at); int64(n) < end-at {
			if !vfs.IsMedium(err) {
				return err
			}
			clear(s.buf[at:end])
			if k := len(s.bad); k == 0 || s.bad[k-1] < s.off+at {
				s.bad = append(s.bad, s.off+at)
			}
			if len(s.bad) > maxBadBlocks {
				return fmt.Errorf("more than %d places cannot be read: %w", maxBadBlocks, errors.Join(err, s.why))
			}
		}
		at = end
	}
	return nil
}

// unreadable says whether a place from pos to before end could not be read.
func (s *scanner) unreadable(pos, end int64) bool {
	for _, b := range s.bad {
		if b < end && b+badBlock-b%badBlock > pos {
			return true
		}
	}
	return false
}

// step reads the batch at pos and moves behind it. bad says why there is no
// valid batch or footer with the next LSN; the position stays then. err is a
// read error. With a footer the payload is nil and the position stays. The
// records have not been verified.
func (s *scanner) step() (h batchHeader, payload []byte, bad string, err error) {
	b, err := s.window(s.pos, batchHeaderSize)
	if err != nil {
		return h, nil, "", err
	}
	h, ok := decodeBatchHeader(b, s.epoch, s.num)
	switch {
	case !ok && s.unreadable(s.pos, s.pos+batchHeaderSize):
		return h, nil, fmt.Sprintf("no valid batch header (%v)", s.why), nil
	case !ok:
		return h, nil, "no valid batch header", nil
	case h.first != s.next:
		return h, nil, "batch with an LSN out of order", nil
	case h.kind == kindFooter:
		if h.length > s.pos {
			return h, nil, "footer of a longer segment", nil
		}
		return h, nil, "", nil
	case h.length > s.limit-s.pos-batchHeaderSize || h.size() > s.limit-s.pos:
		return h, nil, "batch reaches beyond the end of the segment", nil
	}
	b, err = s.window(s.pos, batchHeaderSize+h.length)
	if err != nil {
		return h, nil, "", err
	}
	s.pos += h.size()
	s.next = h.last() + 1
	return h, b[batchHeaderSize:], "", nil
}

// resync moves the scanner from the damage at pos to the next header that
// belongs to the segment and continues it; false if there is none, and then it
// stays.
func (s *scanner) resync(pos int64) (bool, error) {
	for ; pos+batchHeaderSize <= s.limit; pos += sectorSize {
		b, err := s.window(pos, batchHeaderSize)
		if err != nil {
			return false, err
		}
		if h, ok := decodeBatchHeader(b, s.epoch, s.num); ok && h.kind != kindFooter && h.first >= s.next && h.size() <= s.limit-pos {
			s.pos, s.next = pos, h.first
			return true, nil
		}
	}
	return false, nil
}

// remains looks at all headers of the segment from pos on, until none comes for
// so many bytes: whether there are any, and the highest durable LSN in them.
func (s *scanner) remains(pos, window int64) (any bool, durable storage.LSN, err error) {
	for end := pos + window; pos+batchHeaderSize <= min(end, s.size); pos += sectorSize {
		b, err := s.window(pos, batchHeaderSize)
		if err != nil {
			return any, durable, err
		}
		if !bytes.Equal(b[:4], []byte(batchMagic)) {
			continue
		}
		h, ok := decodeBatchHeader(b, s.epoch, s.num)
		if !ok || h.kind == kindFooter && pos+sectorSize != s.size {
			continue // another's, or not where footers are
		}
		any, durable = true, max(durable, h.durable)
		end = pos + min(h.length, s.size) + window
		if h.flags&markLarge != 0 {
			end = s.size
		}
	}
	return any, durable, nil
}

// tail is what scanTail found out about a segment that was not sealed.
type tail struct {
	end     int64       // where the batches end that belong to the log
	next    storage.LSN // the LSN that follows them
	batches uint32
	// durable is the highest LSN known to have been synced: what lies above
	// it may be in the page cache only, and has to be written again.
	durable storage.LSN
	redo    int64  // offset of the first batch with records above durable
	torn    bool   // there are remains of an incomplete batch at end
	closed  bool   // the last batch is a closing mark, nothing is torn
	empty   bool   // there is no batch, and nothing is torn
	damage  string // what was found that a power cut does not explain
	at      int64  // and where the first of it is
	// more is how many records may have followed, in a part of the segment that
	// cannot be read.
	more int64
}

// scanTail finds the end of a segment that was not sealed, which is the last
// of its log and was written to when the program or the machine stopped.
//
// Batches after the first incomplete one were either lost to a power cut, and
// no one was told that they are safe, or the file has been damaged. The
// durable LSN that every batch header carries tells the two apart: a batch
// whose LSN any intact header behind it knows to have been synced cannot have
// been torn by a power cut. That is damage, which Replay reports, and the log
// goes on behind it; the other is cut off. The segment's note tells of it as well,
// also where nothing is left behind.
func scanTail(r io.ReaderAt, size int64, h *segmentHeader) (tail, error) {
	s := newScanner(r, size, h)
	t := tail{durable: h.first - 1}
	note, err := readNote(r, h)
	if err != nil {
		return t, err
	}
	if note != nil {
		t.durable = max(t.durable, note.Next-1)
	}
	type mark struct {
		pos  int64
		last storage.LSN
	}
	var unsynced []mark // batches above t.durable
	seen := func(durable storage.LSN) {
		t.durable = max(t.durable, durable)
		for len(unsynced) > 0 && unsynced[0].last <= t.durable {
			unsynced = unsynced[1:]
		}
	}
	damaged := func(pos int64, reason string) {
		if t.damage == "" {
			t.damage, t.at = reason, pos
		}
	}
	var recs []Record
	var lost []Lost
	large := false                     // such a batch follows
	looked, behind := false, t.durable // the highest durable LSN behind the first trouble
	for {
		pos, next := s.pos, s.next
		b, payload, bad, err := s.step()
		if err != nil {
			return t, err
		}
		complete := bad == ""
		if complete && b.kind == kindFooter {
			// Sealed, but the file was not shortened to the footer.
			t.durable = b.durable
			t.end, t.next, t.redo = s.pos, s.next, s.pos
			return t, nil
		}
		if complete && b.kind == kindRecords {
			recs, lost = decodeRecords(recs[:0], lost[:0], payload, &b, s.seed)
			complete = len(lost) == 0
			clear(recs)
		}
		if complete {
			t.batches++
			t.closed, large = b.flags&markClosing != 0, b.flags&markLarge != 0
			if b.kind == kindRecords {
				unsynced = append(unsynced, mark{pos, b.last()})
			}
			seen(b.durable)
			continue
		}
		if !looked {
			looked = true
			// Nothing follows a closing mark but what begins with another mark,
			// which is synced before that. So there is no need to read the whole
			// rest, only as much as shows that this mark is not just damaged.
			window := int64(scanWindow)
			switch {
			case t.closed:
				window = readChunk
			case large:
				window = size
			}
			torn, durable, err := s.remains(pos, window)
			if err != nil {
				return t, err
			}
			t.torn, behind = torn, max(behind, durable)
		}
		// A batch that cannot be read is not one that was torn.
		gone := s.unreadable(pos, max(s.pos, pos+batchHeaderSize))
		if !truncateBad && (behind >= next || gone) {
			if bad == "" {
				damaged(pos, lost[0].Reason)
				t.batches++
				unsynced = append(unsynced, mark{pos, b.last()})
				seen(b.durable)
				continue
			}
			damaged(pos, bad)
			found, err := s.resync(pos)
			if err != nil {
				return t, err
			}
			if found && (s.next <= behind+1 || gone) {
				continue
			}
			// What else follows is not known to be safe, and has no place behind
			// a gap.
			if next = max(next, behind+1); gone && !found {
				t.more = (size - pos) / recordHeaderSize
			}
		}
		seen(behind)
		t.end, t.next, t.redo = pos, next, pos
		t.empty = t.batches == 0 && !t.torn
		t.closed = t.closed && !t.torn
		if len(unsynced) > 0 {
			t.redo = unsynced[0].pos
		}
		return t, nil
	}
}
