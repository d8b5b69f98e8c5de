package jetstream

import (
	"bytes"
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
//	┌ head ┐┌ record ┐┌ record ┐ …
//
//	0                   15           16                       20
//	┌───────────────────┬────────────┬────────────────────────┐
//	│ "petiole parked\n" │ version u8 │ crc32c of all before   │   head
//	│                   │            │ u32 LE                 │
//	└───────────────────┴────────────┴────────────────────────┘
//
//	0         4           8            16         20
//	┌─────────┬───────────┬────────────┬──────────┬────────┐
//	│ length  │ crc32c of │ LSN u64 LE │ last     │ data   │
//	│ of data │ all that  │            │ sequence │        │   record
//	│ u32 LE  │ follows   │            │ u32 LE   │        │
//	│         │ u32 LE    │            │          │        │
//	└─────────┴───────────┴────────────┴──────────┴────────┘
//
// A head that is damaged costs nothing: records begin behind it all the same. The
// same record may be in it twice: the later ones of those are passed over.
// The last sequence is that of the log (see wal.Record), so that what lies behind
// damage tells which sequences it took. What cannot be read may also be what a
// stop left of a record that was being added: the log still has it then.
const (
	parkedName    = "parked.log"
	parkedMagic   = "petiole parked\n"
	parkedVersion = 1
	parkedHead    = 20 // octets of the head, and of a record before its data
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// parkedBegin makes the head of a file of some version.
func parkedBegin(version byte) []byte {
	b := append([]byte(parkedMagic), version)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// parkedIs returns the version of a file that begins with b, of parkedHead octets
// at least; false if they are damaged.
func parkedIs(b []byte) (version byte, ok bool) {
	sum := parkedHead - 4
	version = b[sum-1]
	return version, bytes.Equal(b[:parkedHead], parkedBegin(version))
}

// parker appends records to the file in a stream's directory, those that it
// does not have yet.
type parker struct {
	e     *Engine
	dir   string
	had   int64 // octets in the file at the beginning
	end   int64 // what has been written to
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
	var err error
	// What is behind damage, and the damage, stays where it is.
	p.had, err = scanParked(p.path(), func(r *wal.Record, sum uint32) error {
		p.known[parkedKey{r.LSN, sum}] = struct{}{}
		return nil
	}, func(parkedGap) {})
	if p.end = p.had; p.end == 0 {
		p.buf = append(p.buf, parkedBegin(parkedVersion)...)
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
	p.buf = binary.LittleEndian.AppendUint32(p.buf, r.Last)
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
	if _, err = p.open.WriteAt(p.buf, p.end); err != nil {
		return err
	}
	p.end += int64(len(p.buf))
	p.buf = p.buf[:0]
	return nil
}

// finish brings what was added to disk.
func (p *parker) finish() (err error) {
	if p.added > 0 {
		if err = p.flush(); err == nil {
			err = p.open.Sync()
		}
	}
	return p.close(err)
}

// close closes the file. After an error, which it returns, nothing has been added.
func (p *parker) close(err error) error {
	if err != nil && p.open != nil {
		err = errors.Join(err, p.open.Truncate(p.had))
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

// parkedGap is a place in a file that cannot be read.
type parkedGap struct {
	offset        int64
	after, before storage.LSN // records, 0 if there is none
	room          uint64      // for so many records at most; 0: it is the head
}

// scanParked calls fn for the records in a file, whose data is fn's to keep, and
// lost where some may be missing between them, or behind the last one. It returns
// the length of the file; one that is not there has no records.
func scanParked(path string, fn func(r *wal.Record, sum uint32) error, lost func(parkedGap)) (size int64, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	at := parkedHead
	if len(b) < at {
		return 0, nil // it was being made
	}
	switch version, ok := parkedIs(b); {
	case !ok:
		lost(parkedGap{})
	case version != parkedVersion:
		return 0, fmt.Errorf("%s is of version %d, this program knows version %d: %w", path, version, parkedVersion, storage.ErrFormat)
	}
	last, bad := storage.LSN(0), at // of the record before; where what cannot be read begins
	miss := func(end int, next storage.LSN) {
		if bad < end {
			lost(parkedGap{int64(bad), last, next, uint64(max(1, (end-bad)/parkedHead))})
		}
	}
	for at < len(b) {
		n, ok := parkedRecord(b[at:], last)
		if !ok {
			at++
			continue
		}
		r := wal.Record{
			LSN: storage.LSN(binary.LittleEndian.Uint64(b[at+8:])), Last: binary.LittleEndian.Uint32(b[at+16:]),
			Data: b[at+parkedHead : at+n : at+n],
		}
		miss(at, r.LSN)
		if err := fn(&r, binary.LittleEndian.Uint32(b[at+4:])); err != nil {
			return int64(len(b)), err
		}
		at += n
		last, bad = r.LSN, at
	}
	miss(len(b), 0)
	return int64(len(b)), nil
}

// parkedRecord returns the length of the record that b begins with, and whether
// there is one; last is the LSN of the one before, 0 if that is not known.
func parkedRecord(b []byte, last storage.LSN) (n int, ok bool) {
	if len(b) < parkedHead {
		return 0, false
	}
	data := int64(binary.LittleEndian.Uint32(b))
	if data > int64(len(b)-parkedHead) || data > wal.MaxRecord {
		return 0, false
	}
	// Most of what does not begin here need not be summed up.
	lsn := storage.LSN(binary.LittleEndian.Uint64(b[8:]))
	if lsn == 0 || last != 0 && (lsn > last+1<<32 || last > lsn+1<<32) {
		return 0, false
	}
	n = parkedHead + int(data)
	return n, crc32.Checksum(b[8:n], castagnoli) == binary.LittleEndian.Uint32(b[4:])
}

// readParked applies what was parked for a stream when it was quarantined, and
// takes note of what is missing of it. The caller holds the lock.
func (e *Engine) readParked(s *Stream) error {
	path := filepath.Join(e.streamDir(s.group), parkedName)
	n := 0
	size, err := scanParked(path, func(r *wal.Record, _ uint32) error {
		if r.LSN <= s.applied {
			return nil
		}
		n++
		return s.replay(&wal.Record{LSN: r.LSN, Group: s.group, Last: r.Last, Data: r.Data})
	}, func(g parkedGap) {
		if g.room == 0 {
			e.log.Warn("the head of what was parked of the log for a stream is damaged; nothing is lost with it", "stream", s.name, "file", path)
			return
		}
		l := wal.Lost{First: max(g.after, s.applied) + 1}
		l.Last = l.First + storage.LSN(g.room) - 1
		if g.before > g.after {
			l.Last = min(l.Last, g.before-1)
		}
		if g.before != 0 && g.before <= s.applied+1 || l.Last < l.First || g.before == 0 && g.after != 0 && g.after <= s.store.Applied() {
			return // the store has had it
		}
		s.parkedLost = true
		e.log.Error("what was parked of the log for a stream cannot all be read", "stream", s.name, "file", path, "offset", g.offset, "records_at_most", l.Last-l.First+1)
		s.miss(&l)
	})
	if err != nil {
		return fmt.Errorf("applying %s: %w", path, err)
	}
	s.parked = size > 0
	if n > 0 {
		e.log.Info("records of the log that were parked for a stream have been applied", "stream", s.name, "records", n)
	}
	return nil
}

// parkLogs parks the records of streams that are quarantined, or wait for room
// to be repaired, after which the log need not keep them.
func (e *Engine) parkLogs() error {
	for _, d := range *e.downNames.Load() {
		if d.quarantined.Load() == nil && d.full.Load() == nil || d.from.Load() == 0 || !d.repairing.TryLock() {
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
	if d.quarantined.Load() == nil && d.full.Load() == nil {
		return nil // repaired meanwhile
	}
	return e.parkRecords(d)
}

// parkAhead parks the records of a stream whose repair takes long before that
// begins: the log, which all streams share, does without them.
func (e *Engine) parkAhead(d *downStream) error {
	if long, err := e.takesLong(storage.GroupID(d.rec.Group)); err != nil || !long {
		return nil // what is gone takes no time
	}
	defer e.wakeCheckpointer()
	return e.parkRecords(d)
}

// parkRecords parks the records of a stream that is out of service, if there is
// room. The caller holds d.repairing.
func (e *Engine) parkRecords(d *downStream) error {
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
			return p.close(err)
		}
	}
	for i := range after {
		if err := add(&after[i]); err != nil {
			return p.close(err)
		}
	}
	if err := leaveOut(); err != nil {
		return p.close(err)
	}
	return p.finish()
}

// loseParked removes the parked records of a stream, which a checkpoint has. A
// file of which not all could be read is kept, under another name.
func (e *Engine) loseParked(s *Stream, lost bool) error {
	path := filepath.Join(e.streamDir(s.group), parkedName)
	var err error
	if !lost {
		err = e.o.FS.Remove(path)
	} else if name, nerr := vfs.FreeName(e.o.FS, path+".damaged-"); nerr != nil {
		err = nerr
	} else {
		err = e.o.FS.Rename(path, name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return e.o.FS.SyncDir(filepath.Dir(path))
}
