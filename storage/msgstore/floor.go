package msgstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/boltpages"
)

// FloorName is the name of the file that says how far a store has come at
// least. It lies beside the store's own, and outlives it: whoever finds the
// store older than that knows that something is lost (a disk that lied, a file
// from a backup, a meta page that a flipped bit has made invalid) instead of
// giving its sequences away again.
//
// It has two slots of 512 octets, written in turn, in place. A checkpoint
// writes one, and the log's records are given up only after that. Numbers are
// little endian:
//
//	0        4         8            16       32      40        48     56      64     72          76      84     508
//	┌────────┬─────────┬────────────┬────────┬───────┬─────────┬──────┬───────┬──────┬───────────┬───────┬──────┬────────┐
//	│ "PTFL" │ version │ generation │ store  │ file  │ applied │ txid │ first │ last │ crc32c of │ time  │ zero │ crc32c │
//	│        │ u32     │ u64        │ id     │ id    │ LSN u64 │ u64  │ u64   │ u64  │ free list │ of    │      │ of all │
//	│        │         │            │ [16]   │ u64   │         │      │       │      │ u32       │ last  │      │ before │
//	└────────┴─────────┴────────────┴────────┴───────┴─────────┴──────┴───────┴──────┴───────────┴───────┴──────┴────────┘
//
// The slot with the higher generation counts; the generation's lowest bit says
// which slot it is. txid is the transaction of msgs.db that the slot was written
// after. bbolt does not protect its list of free pages, and a page that is taken
// for free would be overwritten: while msgs.db is that very file, and at that
// transaction, the checksum is that of the pages that the list is in.
const FloorName = "floor"

const (
	floorVersion = 1
	floorSlot    = 512
	floorSum     = floorSlot - 4
)

var floorMagic = []byte("PTFL")

// Floor is what a floor file says.
type Floor struct {
	Store       [16]byte    // identity of the store
	File        uint64      // which file of the store it was; see keyFile
	Applied     storage.LSN // up to where the file reflects the log
	Txid        uint64      // bbolt's number of the transaction that was the last
	First, Last uint64      // as in the store's State
	FreeSum     uint32      // CRC32C of the pages with the list of free pages
	LastTime    int64       // as in the store's State
	Generation  uint64
}

func (f *Floor) encode() []byte {
	b := make([]byte, 0, floorSlot)
	b = append(b, floorMagic...)
	b = binary.LittleEndian.AppendUint32(b, floorVersion)
	b = binary.LittleEndian.AppendUint64(b, f.Generation)
	b = append(b, f.Store[:]...)
	for _, n := range []uint64{f.File, uint64(f.Applied), f.Txid, f.First, f.Last} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	b = binary.LittleEndian.AppendUint32(b, f.FreeSum)
	b = binary.LittleEndian.AppendUint64(b, uint64(f.LastTime))
	b = b[:floorSum]
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func decodeFloor(b []byte) (f Floor, err error) {
	switch {
	case len(b) < floorSlot:
		return f, errLayout
	case binary.LittleEndian.Uint32(b[floorSum:]) != crc32.Checksum(b[:floorSum], castagnoli):
		return f, errChecksum
	case !bytes.Equal(b[:4], floorMagic):
		return f, errLayout
	case binary.LittleEndian.Uint32(b[4:]) != floorVersion:
		return f, fmt.Errorf("it has version %d, this program knows version %d: %w", binary.LittleEndian.Uint32(b[4:]), floorVersion, ErrFormat)
	}
	f.Generation = binary.LittleEndian.Uint64(b[8:])
	f.Store = [16]byte(b[16:])
	f.File = binary.LittleEndian.Uint64(b[32:])
	f.Applied = storage.LSN(binary.LittleEndian.Uint64(b[40:]))
	f.Txid = binary.LittleEndian.Uint64(b[48:])
	f.First = binary.LittleEndian.Uint64(b[56:])
	f.Last = binary.LittleEndian.Uint64(b[64:])
	f.FreeSum = binary.LittleEndian.Uint32(b[72:])
	f.LastTime = int64(binary.LittleEndian.Uint64(b[76:]))
	return f, nil
}

// ReadFloor reads the floor file in dir. It fails with fs.ErrNotExist if there
// is none, or one that has not been written to yet, and with
// storage.ErrCorrupt if neither slot can be trusted; one damaged slot is passed
// over, as a power cut during a checkpoint leaves it (of the first checkpoint:
// nothing but that).
func ReadFloor(dir string) (Floor, error) {
	path := filepath.Join(dir, FloorName)
	b, err := os.ReadFile(path)
	if err != nil {
		return Floor{}, fmt.Errorf("read floor: %w", err)
	}
	if len(bytes.Trim(b, "\x00")) == 0 {
		return Floor{}, fmt.Errorf("read floor: %s is empty: %w", path, fs.ErrNotExist)
	}
	var newest Floor
	var bad error
	fresh := false // a slot has never been written
	for i := range 2 {
		var f Floor
		err := errLayout
		if len(b) >= (i+1)*floorSlot {
			slot := b[i*floorSlot : (i+1)*floorSlot]
			fresh = fresh || len(bytes.Trim(slot, "\x00")) == 0
			f, err = decodeFloor(slot)
		}
		switch {
		case errors.Is(err, ErrFormat):
			// Whatever the other says: this one is as intact.
			return Floor{}, fmt.Errorf("%s: %w", path, err)
		case err != nil:
			bad = err
		case f.Generation >= newest.Generation:
			newest = f
		}
	}
	switch {
	case newest.Generation > 0:
		return newest, nil
	case fresh:
		// The first checkpoint writes both, one after the other.
		return Floor{}, fmt.Errorf("read floor: %s: the first write was cut short: %w", path, fs.ErrNotExist)
	}
	return Floor{}, &storage.CorruptError{File: path, Reason: "neither slot: " + bad.Error()}
}

// createFloor makes the file, with nothing in it, so that writing to it does
// not need space later.
func createFloor(dir string) error {
	path := filepath.Join(dir, FloorName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	fi, err := f.Stat()
	if err == nil && fi.Size() < 2*floorSlot {
		if _, err = f.WriteAt(make([]byte, 2*floorSlot-fi.Size()), fi.Size()); err == nil {
			err = boltfile.Sync(f)
		}
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return boltfile.SyncDir(dir)
}

// writeFloor writes what the file says now into the next slot; the first time,
// into both.
func (s *Store) writeFloor() error {
	first := s.floor.Generation == 0
	err := s.writeSlot()
	if err == nil && first {
		err = s.writeSlot()
	}
	return err
}

func (s *Store) writeSlot() error {
	im := s.image
	f := s.floor
	f.Generation++
	f.Store = im.uid
	err := im.view(func(tx *bbolt.Tx) error {
		lsn, st, _, _, err := im.readState(tx)
		if err != nil {
			return err
		}
		f.Applied, f.First, f.Last, f.LastTime = lsn, st.First, st.Last, st.LastTime
		f.Txid, f.File = uint64(tx.ID()), im.fileID(tx)
		f.FreeSum, err = im.freeSum(f.Txid)
		return err
	})
	if err != nil {
		return fmt.Errorf("write floor: %w", err)
	}
	if err := putFloor(filepath.Dir(im.path), f); err != nil {
		return fmt.Errorf("write floor: %w", err)
	}
	s.floor = f
	return nil
}

func putFloor(dir string, f Floor) error {
	path := filepath.Join(dir, FloorName)
	w, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if err = createFloor(dir); err == nil {
			w, err = os.OpenFile(path, os.O_RDWR, 0)
		}
	}
	if err != nil {
		return err
	}
	_, err = w.WriteAt(f.encode(), int64(f.Generation%2)*floorSlot)
	if err == nil {
		err = boltfile.Sync(w)
	}
	return errors.Join(err, w.Close())
}

// fileID returns what tells the file from others of the same store, earlier and
// later ones; 0 if that is not known.
func (im *image) fileID(tx *bbolt.Tx) uint64 {
	if c, err := im.store.open(keyFile, tx.Bucket(bucketStore).Get(keyFile)); err == nil && len(c) == 8 {
		return binary.LittleEndian.Uint64(c)
	}
	return 0
}

// freeSum returns the checksum of the pages that the list of free pages is in,
// as of transaction txid, which is a committed one; 0 if it is not known.
func (im *image) freeSum(txid uint64) (uint32, error) {
	f, err := os.Open(im.path)
	if err != nil {
		return 0, err
	}
	defer f.Close() // was only read
	fi, err := f.Stat()
	if err != nil {
		return 0, err
	}
	p := boltpages.Open(f, fi.Size())
	for _, m := range p.Metas() {
		if m.Txid != txid || !m.Persisted() {
			continue
		}
		size := int64(p.PageSize())
		at := int64(m.Freelist) * size
		head := make([]byte, 16)
		if _, err := f.ReadAt(head, at); err != nil {
			return 0, im.corruptIndex("list of free pages", err)
		}
		size *= 1 + int64(binary.NativeEndian.Uint32(head[12:]))
		if at+size > fi.Size() {
			return 0, im.corruptIndex("list of free pages", errLayout)
		}
		sum := crc32.New(castagnoli)
		if _, err := io.Copy(sum, io.NewSectionReader(f, at, size)); err != nil {
			return 0, err
		}
		return sum.Sum32(), nil
	}
	return 0, nil
}

// ErrStale says that a store's file is older than it has been; see StaleError.
var ErrStale = errors.New("the store is older than it has been")

// StaleError says that a store has been further than its file is, by its
// floor, and that the log does not reach back to where the file ends.
// errors.Is of ErrStale and storage.ErrCorrupt hold.
type StaleError struct {
	File    string      // the store's
	Missing bool        // there is no such file
	Foreign bool        // it is another store's
	Applied storage.LSN // where the file is
	Floor   Floor       // where it has been
	// Lost are the sequences that may have held messages which are gone; more
	// may have been assigned after the floor was written, and are in the log
	// if its end is there. Empty (Last < First) if there are none.
	Lost storage.Span
}

// Error says what is wrong.
func (e *StaleError) Error() string {
	what := fmt.Sprintf("it reflects the log up to record %d, and has been at %d", e.Applied, e.Floor.Applied)
	switch {
	case e.Missing:
		what = fmt.Sprintf("it is gone, and has been at record %d", e.Floor.Applied)
	case e.Foreign:
		what = "it belongs to another store"
	}
	return fmt.Sprintf("%s: %v: %s; messages %d to %d may be lost: restore the whole store directory, or accept the loss",
		e.File, ErrStale, what, e.Lost.First, e.Lost.Last)
}

// Unwrap makes errors.Is hold for both.
func (e *StaleError) Unwrap() []error { return []error{ErrStale, storage.ErrCorrupt} }

// checkFloor compares what the file says with the floor; st is the state at
// applied, txid the transaction that the file is at.
func (s *Store) checkFloor(o Options, missing bool) error {
	im := s.image
	var lsn storage.LSN
	var st storage.State
	var txid, file uint64
	if err := im.view(func(tx *bbolt.Tx) (err error) {
		txid, file = uint64(tx.ID()), im.fileID(tx)
		lsn, st, _, _, err = im.readState(tx)
		return err
	}); err != nil {
		return err
	}
	foreign := im.uid != s.floor.Store
	if !missing && !foreign && lsn >= s.floor.Applied {
		if txid != s.floor.Txid || file != s.floor.File || file == 0 {
			return nil
		}
		if sum, err := im.freeSum(txid); err != nil {
			return err
		} else if sum != s.floor.FreeSum {
			return im.corruptIndex("list of free pages", errChecksum)
		}
		return nil
	}
	if !foreign && o.WALOldest != 0 && o.WALOldest <= lsn+1 {
		s.log.Warn("A message store is older than it has been, and comes up to date from the log.",
			"file", im.path, "applied_lsn", lsn, "was_lsn", s.floor.Applied)
		return nil
	}
	e := &StaleError{
		File: im.path, Missing: missing, Foreign: foreign && !missing, Applied: lsn, Floor: s.floor,
		Lost: storage.Span{First: st.Last + 1, Last: s.floor.Last},
	}
	if e.Missing || e.Foreign {
		e.Lost.First = s.floor.First
	}
	if !o.AcceptStale {
		return e
	}
	s.stale = e
	// Never give a sequence away again.
	if err := s.Skip(s.floor.Last); err != nil {
		return err
	}
	if !s.Freeze(lsn, nil) {
		return storage.ErrClosed
	}
	return s.Checkpoint()
}

// Stale returns what was found, and accepted, when the store was opened; nil if
// it was up to date.
func (s *Store) Stale() *StaleError { return s.stale }
