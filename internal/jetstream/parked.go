package jetstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"

	"petiole/storage"
	"petiole/storage/wal"
)

// parkedName is the file in a stream's directory that keeps its records of the
// log while the stream is quarantined. It is read, before the log, when the
// stream serves again:
//
//	┌ "petiole parked 1\n" ┐┌ record ┐┌ record ┐ …
//
//	0         4           8            16
//	┌─────────┬───────────┬────────────┬────────┐
//	│ length  │ crc32c of │ LSN u64 LE │ data   │
//	│ of data │ LSN, data │            │        │
//	│ u32 LE  │ u32 LE    │            │        │
//	└─────────┴───────────┴────────────┴────────┘
//
// The same record may be in it twice: the later ones of those are passed over.
const (
	parkedName  = "parked.log"
	parkedMagic = "petiole parked 1\n"
	parkedHead  = 16
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// writeParked appends records to the file in a stream's directory, durably.
func (e *Engine) writeParked(dir string, recs []wal.Record) (err error) {
	if len(recs) == 0 {
		return nil
	}
	path := filepath.Join(dir, parkedName)
	if err := e.o.FS.MkdirAll(dir); err != nil {
		return err
	}
	f, err := e.o.FS.Open(path, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	end, err := parkedEnd(path)
	if err != nil {
		return err
	}
	var buf []byte
	if end == 0 {
		buf = append(buf, parkedMagic...)
	}
	flush := func() error {
		_, err := f.WriteAt(buf, end)
		end += int64(len(buf))
		buf = buf[:0]
		return err
	}
	for i := range recs {
		r := &recs[i]
		at := len(buf)
		buf = binary.LittleEndian.AppendUint32(buf, uint32(len(r.Data)))
		buf = append(buf, 0, 0, 0, 0)
		buf = binary.LittleEndian.AppendUint64(buf, uint64(r.LSN))
		buf = append(buf, r.Data...)
		binary.LittleEndian.PutUint32(buf[at+4:], crc32.Checksum(buf[at+8:], castagnoli))
		if len(buf) > 1<<20 {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	if err := f.Truncate(end); err != nil { // what a write cut short left behind
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return e.o.FS.SyncDir(dir)
}

// parkedEnd returns where the whole records in a file end; 0 if there are none.
func parkedEnd(path string) (int64, error) {
	end := int64(0)
	err := scanParked(path, func(_ storage.LSN, data []byte) error {
		end += int64(parkedHead + len(data))
		return nil
	})
	if end > 0 {
		end += int64(len(parkedMagic))
	}
	return end, err
}

// scanParked calls fn for the whole records in a file; data is fn's to keep.
// What a write cut short ends it, a file that is not there has none.
func scanParked(path string, fn func(lsn storage.LSN, data []byte) error) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if len(b) < len(parkedMagic) || string(b[:len(parkedMagic)]) != parkedMagic {
		return nil
	}
	for b = b[len(parkedMagic):]; len(b) >= parkedHead; {
		n := int(binary.LittleEndian.Uint32(b))
		if n > len(b)-parkedHead || crc32.Checksum(b[8:parkedHead+n], castagnoli) != binary.LittleEndian.Uint32(b[4:]) {
			break
		}
		if err := fn(storage.LSN(binary.LittleEndian.Uint64(b[8:])), b[parkedHead:parkedHead+n:parkedHead+n]); err != nil {
			return err
		}
		b = b[parkedHead+n:]
	}
	return nil
}

// readParked applies what was parked for a stream when it was quarantined. The
// caller holds the lock.
func (e *Engine) readParked(s *Stream) error {
	path := filepath.Join(e.streamDir(s.group), parkedName)
	n := 0
	err := scanParked(path, func(lsn storage.LSN, data []byte) error {
		if lsn <= s.applied {
			return nil
		}
		n++
		return s.apply(&wal.Record{LSN: lsn, Group: s.group, Data: data})
	})
	if err != nil {
		return fmt.Errorf("applying %s: %w", path, err)
	}
	if n > 0 {
		e.log.Info("records of the log that were parked for a stream have been applied", "stream", s.name, "records", n)
	}
	return nil
}

// parkLogs parks the records of quarantined streams, after which the log need
// not keep them.
func (e *Engine) parkLogs() error {
	for _, d := range *e.downNames.Load() {
		from := storage.LSN(d.from.Load())
		if !d.quarantined.Load() || from == 0 {
			continue
		}
		e.applyMu.Lock()
		after := d.records
		upTo := d.upTo
		e.applyMu.Unlock()
		group := storage.GroupID(d.rec.Group)
		var recs []wal.Record
		if from <= upTo {
			e.trimMu.Lock()
			_, err := wal.Scan(filepath.Join(e.o.Dir, "wal"), func(r wal.Record) error {
				if r.LSN > upTo {
					return errScanned
				}
				if r.Group == group && r.LSN >= from {
					recs = append(recs, r)
				}
				return nil
			})
			e.trimMu.Unlock()
			if err != nil && err != errScanned {
				return fmt.Errorf("reading the log: %w", err)
			}
		}
		recs = append(recs, after...)
		if err := e.writeParked(e.streamDir(group), recs); err != nil {
			// Where the stream is, nothing can be written: the log keeps them.
			e.log.Warn("the log's records of a quarantined stream are not parked yet", "stream", d.rec.Name, "err", err)
			continue
		}
		e.applyMu.Lock()
		d.records = d.records[len(after):]
		d.from.Store(0)
		if len(d.records) > 0 {
			d.upTo = d.records[0].LSN - 1
			d.from.Store(uint64(d.records[0].LSN))
		}
		e.applyMu.Unlock()
	}
	return nil
}

// loseParked removes the parked records of a stream whose checkpoint has them.
func (e *Engine) loseParked(s *Stream) error {
	path := filepath.Join(e.streamDir(s.group), parkedName)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := e.o.FS.Remove(path); err != nil {
		return err
	}
	return e.o.FS.SyncDir(filepath.Dir(path))
}
