package jetstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"

	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/vfs"
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

// parker appends records to the file in a stream's directory, those that it
// does not have yet.
type parker struct {
	e     *Engine
	dir   string
	end   int64 // of the whole records in the file
	known map[parkedKey]struct{}
	buf   []byte
	open  vfs.File
	added int
}

type parkedKey struct {
	lsn storage.LSN
	sum uint32
}

func (e *Engine) newParker(dir string) *parker {
	return &parker{e: e, dir: dir}
}

func (p *parker) path() string { return filepath.Join(p.dir, parkedName) }

// begin looks at what the file has.
func (p *parker) begin() error {
	if p.known != nil {
		return nil
	}
	p.known = map[parkedKey]struct{}{}
	err := scanParked(p.path(), func(lsn storage.LSN, data []byte, sum uint32) error {
		p.known[parkedKey{lsn, sum}] = struct{}{}
		p.end += int64(parkedHead + len(data))
		return nil
	})
	if p.end > 0 {
		p.end += int64(len(parkedMagic))
	} else {
		p.buf = append(p.buf, parkedMagic...)
	}
	return err
}

// add takes a record.
func (p *parker) add(r *wal.Record) error {
	if err := p.begin(); err != nil {
		return err
	}
	at := len(p.buf)
	p.buf = binary.LittleEndian.AppendUint32(p.buf, uint32(len(r.Data)))
	p.buf = append(p.buf, 0, 0, 0, 0)
	p.buf = binary.LittleEndian.AppendUint64(p.buf, uint64(r.LSN))
	p.buf = append(p.buf, r.Data...)
	sum := crc32.Checksum(p.buf[at+8:], castagnoli)
	if _, has := p.known[parkedKey{r.LSN, sum}]; has {
		p.buf = p.buf[:at]
		return nil
	}
	binary.LittleEndian.PutUint32(p.buf[at+4:], sum)
	p.added++
	if len(p.buf) > 1<<20 {
		return p.flush()
	}
	return nil
}

func (p *parker) flush() (err error) {
	if p.open == nil {
		if err := p.e.o.FS.MkdirAll(p.dir); err != nil {
			return err
		}
		if p.open, err = p.e.o.FS.Open(p.path(), true); err != nil {
			return err
		}
	}
	_, err = p.open.WriteAt(p.buf, p.end)
	p.end += int64(len(p.buf))
	p.buf = p.buf[:0]
	return err
}

// finish brings what was added to disk.
func (p *parker) finish() (err error) {
	if p.added > 0 {
		if err = p.flush(); err == nil {
			err = p.open.Truncate(p.end) // what a write cut short left behind
		}
		if err == nil {
			err = p.open.Sync()
		}
	}
	if p.open != nil {
		err = errors.Join(err, p.open.Close())
		p.open = nil
		if err == nil {
			err = p.e.o.FS.SyncDir(p.dir)
		}
	}
	return err
}

// scanParked calls fn for the whole records in a file; data is fn's to keep.
// What a write cut short ends it, a file that is not there has none.
func scanParked(path string, fn func(lsn storage.LSN, data []byte, sum uint32) error) error {
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
		sum := binary.LittleEndian.Uint32(b[4:])
		if n > len(b)-parkedHead || crc32.Checksum(b[8:parkedHead+n], castagnoli) != sum {
			break
		}
		if err := fn(storage.LSN(binary.LittleEndian.Uint64(b[8:])), b[parkedHead:parkedHead+n:parkedHead+n], sum); err != nil {
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
	err := scanParked(path, func(lsn storage.LSN, data []byte, _ uint32) error {
		if lsn <= s.applied {
			return nil
		}
		n++
		return s.replay(&wal.Record{LSN: lsn, Group: s.group, Data: data})
	})
	if err != nil {
		return fmt.Errorf("applying %s: %w", path, err)
	}
	if n > 0 {
		e.log.Info("records of the log that were parked for a stream have been applied", "stream", s.name, "records", n)
	}
	return nil
}

// parkLogs parks the records of streams that are quarantined, or wait for room
// to be repaired, after which the log need not keep them.
func (e *Engine) parkLogs() error {
	for _, d := range *e.downNames.Load() {
		if !d.quarantined.Load() && d.full.Load() == nil || d.from.Load() == 0 || !d.repairing.TryLock() {
			continue
		}
		if err := e.parkLogOf(d); err != nil {
			return fmt.Errorf("parking the log's records of stream %q: %w", d.rec.Name, err)
		}
	}
	return nil
}

// parkLogOf parks the records of one of them, and ends its repairing.
func (e *Engine) parkLogOf(d *downStream) error {
	defer d.repairing.Unlock()
	if !d.quarantined.Load() && d.full.Load() == nil {
		return nil // repaired meanwhile
	}
	from := storage.LSN(d.from.Load())
	e.applyMu.Lock()
	after := d.records
	upTo := d.upTo
	e.applyMu.Unlock()
	if err := e.parkLog(d, from, upTo, after); vfs.IsNoSpace(err) {
		// The log keeps them until there is.
		e.log.Debug("the log's records of a stream out of service are not parked yet", "stream", d.rec.Name, "err", err)
		return nil
	} else if err != nil {
		return err
	}
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	d.records = d.records[len(after):]
	d.from.Store(0)
	if len(d.records) > 0 {
		d.upTo = d.records[0].LSN - 1
		d.from.Store(uint64(d.records[0].LSN))
	}
	return nil
}

// parkLog parks a stream's records: those that the log has from one position
// through another, and after. Where the log may have lost some, a record says
// how many sequences are to be left out.
func (e *Engine) parkLog(d *downStream, from, upTo storage.LSN, after []wal.Record) error {
	group := storage.GroupID(d.rec.Group)
	p := e.newParker(e.streamDir(group))
	skip, at := uint64(0), storage.LSN(0)
	leaveOut := func() error {
		if skip == 0 {
			return nil
		}
		c := command.Skip{More: skip}
		skip = 0
		return p.add(&wal.Record{LSN: at, Group: group, Data: c.AppendTo(nil)})
	}
	add := func(r *wal.Record) error {
		switch kind := command.KindOf(r.Data); {
		case kind == command.KindSkip:
			skip = 0
		case givesSequences(kind):
			if err := leaveOut(); err != nil {
				return err
			}
		}
		return p.add(r)
	}
	if from <= upTo {
		err := e.scanGroup(group, from, upTo, func(l *wal.Lost) { skip, at = skip+mayHaveHad(l, &d.rec.Config), l.Last }, add, func(*wal.Note) {})
		if err != nil {
			return err
		}
	}
	for i := range after {
		if err := add(&after[i]); err != nil {
			return err
		}
	}
	if err := leaveOut(); err != nil {
		return err
	}
	return p.finish()
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
