package wal

import (
	"bytes"
	"hash/crc32"
	"io"

	"petiole/storage"
)

// readChunk is how much a scan reads at once.
const readChunk = 1 << 20

// scanner reads the batches of one segment in order.
type scanner struct {
	r     io.ReaderAt
	size  int64 // of the file
	limit int64 // where batches end at the latest
	num   uint64
	epoch uint64
	pos   int64       // of the next batch
	next  storage.LSN // its first LSN
	// fresh: payloads handed out stay valid, as every chunk is read into a
	// buffer of its own.
	fresh bool

	buf []byte // holds the file from off on
	off int64
}

func newScanner(r io.ReaderAt, size int64, h *segmentHeader) *scanner {
	return &scanner{r: r, size: size, limit: size - sectorSize, num: h.num, epoch: h.epoch, pos: segmentHeaderSize, next: h.first}
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
		s.buf = nil
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return s.buf[:n:n], nil
}

// step reads the batch at pos and moves behind it. bad says why there is no
// valid batch or footer with the next LSN; the position stays then. err is a
// read error. With a footer the payload is nil and the position stays.
func (s *scanner) step() (h batchHeader, payload []byte, bad string, err error) {
	b, err := s.window(s.pos, batchHeaderSize)
	if err != nil {
		return h, nil, "", err
	}
	h, ok := decodeBatchHeader(b, s.epoch, s.num)
	switch {
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
	payload = b[batchHeaderSize:]
	if crc32.Checksum(payload, castagnoli) != h.crc {
		return h, nil, "batch fails its checksum", nil
	}
	s.pos += h.size()
	s.next = h.last() + 1
	return h, payload, "", nil
}

// tail is what scanTail found out about a segment that was not sealed.
type tail struct {
	end     int64       // where the complete batches end
	next    storage.LSN // the LSN that follows them
	batches uint32
	// durable is the highest LSN known to have been synced: what lies above
	// it may be in the page cache only, and has to be written again.
	durable storage.LSN
	redo    int64 // offset of the first batch with records above durable
	torn    bool  // there are remains of an incomplete batch at end
}

// scanTail finds the end of a segment that was not sealed, which is the last
// of its log and was written to when the program or the machine stopped.
//
// Batches after the first incomplete one were either lost to a power cut, and
// no one was told that they are safe, or the file has been damaged. The
// durable LSN that every batch header carries tells the two apart: a batch
// whose LSN any intact header behind it knows to have been synced cannot have
// been torn by a power cut. That is reported as a *CorruptError, never cut off.
func scanTail(name string, r io.ReaderAt, size int64, h *segmentHeader) (tail, error) {
	s := newScanner(r, size, h)
	t := tail{durable: h.first - 1}
	type mark struct {
		pos  int64
		last storage.LSN
	}
	var unsynced []mark // batches above t.durable
	reason := ""
	for {
		pos := s.pos
		b, _, bad, err := s.step()
		if err != nil {
			return t, err
		}
		if bad != "" {
			reason = bad
			break
		}
		if b.kind == kindFooter {
			// Sealed, but the file was not shortened to the footer.
			t.durable = b.durable
			t.end, t.next, t.redo = s.pos, s.next, s.pos
			return t, nil
		}
		t.batches++
		t.durable = max(t.durable, b.durable)
		if b.kind == kindRecords {
			unsynced = append(unsynced, mark{pos, b.last()})
		}
		for len(unsynced) > 0 && unsynced[0].last <= t.durable {
			unsynced = unsynced[1:]
		}
	}
	t.end, t.next, t.redo = s.pos, s.next, s.pos

	// What lies behind decides whether this is the end of the log. The first
	// sector counts as well: its batch may have a good header and a torn payload.
	for pos := t.end; pos+batchHeaderSize <= size; pos += sectorSize {
		b, err := s.window(pos, batchHeaderSize)
		if err != nil {
			return t, err
		}
		if !bytes.Equal(b[:4], []byte(batchMagic)) {
			continue
		}
		b2, ok := decodeBatchHeader(b, s.epoch, s.num)
		if !ok {
			continue
		}
		if b2.kind == kindFooter && pos+sectorSize != size {
			continue // not where footers are
		}
		t.torn = true
		if b2.durable >= t.next {
			return t, &CorruptError{name, t.end, reason + ", but what follows shows that it had been written and synced"}
		}
		t.durable = max(t.durable, b2.durable)
	}
	for len(unsynced) > 0 && unsynced[0].last <= t.durable {
		unsynced = unsynced[1:]
	}
	if len(unsynced) > 0 {
		t.redo = unsynced[0].pos
	}
	return t, nil
}
