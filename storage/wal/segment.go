package wal

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"petiole/storage"
	"petiole/storage/vfs"
)

const (
	liveSuffix    = ".wal"
	spareSuffix   = ".spare"    // preallocated or recycled
	newSuffix     = ".new"      // being created
	damagedSuffix = ".damaged-" // parked; Unix seconds follow
)

// segment is one live file of the log. All fields but pos, batches, damaged and
// file are fixed once a segment is sealed.
type segment struct {
	hdr    segmentHeader
	path   string
	size   int64 // of the file
	sealed bool
	end    int64       // where the batches end; of the active segment: ended when it was opened
	next   storage.LSN // the LSN that follows them
	gap    *Lost       // what is missing between the segment before and this one
	pieced bool        // the header has been put together from those of batches
	// unended: not sealed, though it is not the last; end is as far as it can
	// go then, and next is known from the segment behind.
	unended bool

	// damaged: it is parked when it has left the log. Set before the log is in
	// use, by Open and Replay.
	damaged bool

	// Of the active segment, used by whoever has the writer's role.
	file    vfs.File
	pos     int64 // where the next batch goes
	batches uint32
	blank   int64 // where what was preallocated and never written begins; size or beyond if nothing is
	full    bool  // takes no more: the next record is to begin a new segment
}

func segmentName(num uint64, suffix string) string { return fmt.Sprintf("%016x%s", num, suffix) }

// parseSegmentName is the reverse of segmentName.
func parseSegmentName(name, suffix string) (uint64, bool) {
	s, ok := strings.CutSuffix(name, suffix)
	if !ok || len(s) != 16 || s != strings.ToLower(s) {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 16, 64)
	return n, err == nil && n > 0
}

// tailRoom is what batches leave free at the end of a segment: for the mark that
// a start begins with, the closing mark, and the footer.
const tailRoom = 3 * sectorSize

// room returns where batches have to end.
func (s *segment) room() int64 {
	if s.sealed || s.full {
		return 0
	}
	return s.size - tailRoom
}

// fits says whether a batch of the given size can be written.
func (s *segment) fits(size int64) bool { return s.pos+size <= s.room() }

// fitsMark is fits for a mark.
func (s *segment) fitsMark(closing bool) bool {
	end := s.room() + sectorSize
	if closing {
		end += sectorSize
	}
	return s.room() > 0 && s.pos+sectorSize <= end
}

// minSegmentFor returns the length of a segment that takes a batch that big.
func minSegmentFor(batch int64) int64 { return segmentHeaderSize + batch + tailRoom }

// batchLimit returns where batches end at the latest in a file of the given
// size: before the place of the footer, unless the file has been cut.
func batchLimit(size int64, h *segmentHeader) int64 {
	if size < h.length {
		return size
	}
	return size - sectorSize
}

// errNoName says that a directory has no room for another name. Nothing has
// changed then that is not done again.
var errNoName = errors.New("no room in the log's directory")

// createSegment makes a segment of a spare. The header is synced before the
// file gets its live name, so that no live segment is ever without one; and
// because of the new epoch in it, nothing that a spare held before can be taken
// for part of the log. prev is the LSN that follows the segment before. note, if
// not nil, is written along with the header.
func (l *Log) createSegment(spare spareFile, num uint64, prev, first storage.LSN, note *Note) (*segment, error) {
	s := &segment{
		hdr: segmentHeader{
			version: formatVersion, num: num, first: first, prev: prev,
			logID: l.logID, length: spare.size, created: time.Now().UnixNano(),
		},
		path: filepath.Join(l.o.Dir, segmentName(num, liveSuffix)), size: spare.size,
		pos: segmentHeaderSize, end: segmentHeaderSize, next: first, blank: spare.size,
	}
	if spare.fresh {
		s.blank = s.pos
	}
	var epoch [8]byte
	rand.Read(epoch[:])
	s.hdr.epoch = binary.LittleEndian.Uint64(epoch[:])

	f, err := l.o.FS.Open(spare.path, false)
	if err != nil {
		return nil, err
	}
	closeOn := func(err error) (*segment, error) { return nil, errors.Join(err, f.Close()) }
	header := s.hdr.encode()
	if note != nil {
		copy(header[noteOffset:], note.encode(&s.hdr))
	}
	if _, err := f.WriteAt(header, 0); err != nil {
		return closeOn(err)
	}
	if err := f.Sync(); err != nil {
		return closeOn(err)
	}
	// Some systems do not rename open files.
	if err := f.Close(); err != nil {
		return nil, err
	}
	if err := l.o.FS.Rename(spare.path, s.path); err != nil {
		if vfs.IsNoSpace(err) {
			err = fmt.Errorf("%w: %w", errNoName, err)
		}
		return nil, err
	}
	if err := l.syncDir(); err != nil {
		return nil, err
	}
	if s.file, err = l.o.FS.Open(s.path, false); err != nil {
		return nil, err
	}
	return s, nil
}

// syncDir makes what was created, renamed and removed in the log's directory
// durable.
func (l *Log) syncDir() error {
	if noDirSync {
		return nil
	}
	return l.o.FS.SyncDir(l.o.Dir)
}

// seal writes and syncs the footer and closes the file; next is the LSN that
// follows. All batches have been synced, and the next segment is on the medium.
// With shorten, the unused rest is given back.
func (s *segment) seal(next storage.LSN, shorten bool) error {
	if shorten && s.pos+sectorSize < s.size {
		if err := s.file.Truncate(s.pos + sectorSize); err != nil {
			return err
		}
		s.size = s.pos + sectorSize
	}
	s.size = max(s.size, s.pos+sectorSize) // it may have been cut behind the last batch
	s.end, s.next = s.pos, next
	b := make([]byte, sectorSize)
	footer := batchHeader{
		kind: kindFooter, epoch: s.hdr.epoch, num: s.hdr.num, log: logWord(s.hdr.logID),
		first: s.next, durable: s.next - 1, length: s.end, count: s.batches,
	}
	footer.encode(b)
	if _, err := s.file.WriteAt(b, s.size-sectorSize); err != nil {
		return err
	}
	if err := s.file.Sync(); err != nil {
		return err
	}
	s.sealed = true
	return s.closeFile()
}

// closeFile closes the file if it is open.
func (s *segment) closeFile() error {
	if s.file == nil {
		return nil
	}
	f := s.file
	s.file = nil
	return f.Close()
}

// readSegment reads header and footer of the file path of the given size, whose
// name says num. damage says what is wrong; the segment is nil if nothing of it
// can be used. err wraps ErrFormat, or is a read error.
func readSegment(r io.ReaderAt, path string, size int64, num uint64) (s *segment, damage, err error) {
	s = &segment{path: path, size: size &^ (sectorSize - 1)}
	s.hdr, damage, err = readHeader(r, path, s.size, num)
	switch {
	case err != nil:
		return nil, nil, err
	case damage != nil && s.hdr.epoch == 0:
		return nil, damage, nil
	case s.hdr.num != num:
		return nil, &CorruptError{path, 16, fmt.Sprintf("the header is that of segment %016x", s.hdr.num)}, nil
	case s.size < segmentHeaderSize+sectorSize:
		return nil, &CorruptError{path, size, "the file has been cut"}, nil
	case s.size != size && damage == nil:
		damage = &CorruptError{path, size, "the file has been cut"}
	}
	s.pieced = s.hdr.created == 0
	s.end, s.next, s.pos = segmentHeaderSize, s.hdr.first, segmentHeaderSize
	b := make([]byte, sectorSize)
	if _, err := readAt(r, b, s.size-sectorSize); err != nil {
		if !vfs.IsMedium(err) {
			return nil, nil, err
		}
		if damage == nil {
			damage = &CorruptError{path, s.size - sectorSize, "the footer cannot be read: " + err.Error()}
		}
		return s, damage, nil
	}
	if h, ok := decodeBatchHeader(b, s.hdr.epoch, num); ok && h.kind == kindFooter && h.length <= s.size-sectorSize && h.first >= s.hdr.first {
		s.sealed, s.end, s.next, s.batches = true, h.length, h.first, h.count
	}
	return s, damage, nil
}

// readHeader reads the segment header: the first copy, else the second, else it
// puts together what batch headers tell. The epoch is 0 if nothing does.
func readHeader(r io.ReaderAt, path string, size int64, num uint64) (h segmentHeader, damage, err error) {
	b := make([]byte, sectorSize)
	for _, off := range []int64{0, secondHeader} {
		n, err := readAt(r, b, off)
		var herr error
		if err != nil && !vfs.IsMedium(err) {
			return h, nil, err
		}
		if err != nil {
			herr = &CorruptError{path, off, "the segment header cannot be read: " + err.Error()}
		} else {
			h, herr = decodeSegmentHeader(path, b[:n])
		}
		switch {
		case errors.Is(herr, ErrFormat):
			return h, nil, herr
		case herr == nil && damage != nil:
			return h, fmt.Errorf("%w (its second copy is intact)", damage), nil
		case herr == nil:
			return h, nil, nil
		case damage == nil:
			damage = herr
		}
	}
	s := &scanner{r: r, size: size}
	for pos := int64(segmentHeaderSize); pos+batchHeaderSize <= size; pos += sectorSize {
		b, err := s.window(pos, batchHeaderSize)
		if err != nil {
			return segmentHeader{}, nil, err
		}
		if bh, ok := decodeAnyBatchHeader(b, num); ok {
			h = segmentHeader{version: formatVersion, num: num, epoch: bh.epoch, first: bh.first, prev: bh.first, length: size}
			binary.LittleEndian.PutUint32(h.logID[:], bh.log)
			return h, damage, nil
		}
	}
	return segmentHeader{}, damage, nil
}

// readAt is ReadAt that takes a short read at the end for success.
func readAt(r io.ReaderAt, b []byte, off int64) (int, error) {
	n, err := r.ReadAt(b, off)
	if err == io.EOF {
		err = nil
	}
	return n, err
}
