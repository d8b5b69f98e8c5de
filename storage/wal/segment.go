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
	liveSuffix  = ".wal"
	spareSuffix = ".spare" // recycled
	newSuffix   = ".new"   // being created
	maxSpares   = 2
)

// segment is one live file of the log. All fields but pos and file are fixed
// once a segment is sealed.
type segment struct {
	hdr    segmentHeader
	path   string
	size   int64 // of the file
	sealed bool
	end    int64       // sealed: where the batches end
	next   storage.LSN // sealed: the LSN that follows

	// Of the active segment, used by whoever has the writer's role.
	file    vfs.File
	pos     int64 // where the next batch goes
	batches uint32
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

// fits says whether a batch of the given size can be written before the footer.
func (s *segment) fits(size int64) bool { return s.pos+size <= s.size-sectorSize }

// minSegmentFor returns the length of a segment that takes a batch that big.
func minSegmentFor(batch int64) int64 { return segmentHeaderSize + batch + sectorSize }

// createSegment makes the next active segment: from a spare if size is the
// usual one, else from a new file. The header is synced before the file gets
// its live name, so that no live segment is ever without one; and because of
// the new epoch in it, nothing that a spare held before can be taken for part
// of the log.
func (l *Log) createSegment(num uint64, first storage.LSN, size int64) (*segment, error) {
	s := &segment{
		hdr: segmentHeader{
			version: formatVersion, num: num, first: first,
			logID: l.logID, length: size, created: time.Now().UnixNano(),
		},
		path: filepath.Join(l.o.Dir, segmentName(num, liveSuffix)), size: size, pos: segmentHeaderSize,
	}
	var epoch [8]byte
	rand.Read(epoch[:])
	s.hdr.epoch = binary.LittleEndian.Uint64(epoch[:])

	spare := ""
	if size == l.o.SegmentSize {
		spare = l.takeSpare()
	}
	create := spare == ""
	if create {
		spare = filepath.Join(l.o.Dir, segmentName(num, newSuffix))
	}
	f, err := l.o.FS.Open(spare, create)
	if err != nil {
		return nil, err
	}
	closeOn := func(err error) (*segment, error) { return nil, errors.Join(err, f.Close()) }
	if create {
		if err := f.Preallocate(size); err != nil {
			return closeOn(fmt.Errorf("reserve %d bytes for a log segment (if the disk is full, make room): %w", size, err))
		}
	}
	if _, err := f.WriteAt(s.hdr.encode(), 0); err != nil {
		return closeOn(err)
	}
	if err := f.Sync(); err != nil {
		return closeOn(err)
	}
	// Some systems do not rename open files.
	if err := f.Close(); err != nil {
		return nil, err
	}
	if err := l.o.FS.Rename(spare, s.path); err != nil {
		return nil, err
	}
	if err := l.o.FS.SyncDir(l.o.Dir); err != nil {
		return nil, err
	}
	if s.file, err = l.o.FS.Open(s.path, false); err != nil {
		return nil, err
	}
	return s, nil
}

// seal writes and syncs the footer of the active segment and closes its file;
// next is the LSN that follows. With shorten, the unused rest is given back.
func (s *segment) seal(next storage.LSN, shorten bool) error {
	// A footer, or a file cut to where the footer goes, says that all batches
	// are safe.
	if err := s.file.Datasync(); err != nil {
		return err
	}
	if shorten && s.pos+sectorSize < s.size {
		if err := s.file.Truncate(s.pos + sectorSize); err != nil {
			return err
		}
		s.size = s.pos + sectorSize
	}
	s.end, s.next = s.pos, next
	if err := s.writeFooter(s.file); err != nil {
		return err
	}
	s.sealed = true
	return s.closeFile()
}

// writeFooter writes and syncs the footer.
func (s *segment) writeFooter(f vfs.File) error {
	b := make([]byte, sectorSize)
	footer := batchHeader{
		kind: kindFooter, epoch: s.hdr.epoch, num: s.hdr.num,
		first: s.next, durable: s.next - 1, length: s.end, count: s.batches,
	}
	footer.encode(b)
	if _, err := f.WriteAt(b, s.size-sectorSize); err != nil {
		return err
	}
	return f.Sync()
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

// loadSegment opens a live segment and reads its header and footer. The file
// stays open.
func loadSegment(fs vfs.FS, dir, name string, num uint64) (_ *segment, err error) {
	s := &segment{path: filepath.Join(dir, name)}
	if s.file, err = fs.Open(s.path, false); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.closeFile())
		}
	}()
	if s.size, err = s.file.Size(); err != nil {
		return nil, err
	}
	b := make([]byte, sectorSize)
	n, err := readAt(s.file, b, 0)
	if err != nil {
		return nil, err
	}
	if s.hdr, err = decodeSegmentHeader(s.path, b[:n]); err != nil {
		return nil, err
	}
	if s.hdr.num != num {
		return nil, &CorruptError{s.path, 16, fmt.Sprintf("the header is that of segment %016x", s.hdr.num)}
	}
	if s.size < minSegmentFor(0) || s.size%sectorSize != 0 {
		return nil, &CorruptError{s.path, s.size, "the file has been cut"}
	}
	if _, err = readAt(s.file, b, s.size-sectorSize); err != nil {
		return nil, err
	}
	if h, ok := decodeBatchHeader(b, s.hdr.epoch, num); ok && h.kind == kindFooter && h.length <= s.size-sectorSize && h.first >= s.hdr.first {
		s.sealed, s.end, s.next, s.batches = true, h.length, h.first, h.count
	}
	return s, nil
}

// readAt is ReadAt that takes a short read at the end for success.
func readAt(r io.ReaderAt, b []byte, off int64) (int, error) {
	n, err := r.ReadAt(b, off)
	if err == io.EOF {
		err = nil
	}
	return n, err
}
