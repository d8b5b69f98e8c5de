package storagetool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"petiole/internal/jetstream"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/metadb"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// Report is what Verify found.
type Report struct {
	StoreDir   string   `json:"store_dir"`
	Segments   int      `json:"segments"` // of the log, all read
	Records    uint64   `json:"records"`  // of the log, intact
	Streams    int      `json:"streams"`  // whose files have been read
	Messages   uint64   `json:"messages"` // in those, by their summaries
	MetaValues int      `json:"meta_entries"`
	Damage     []Damage `json:"damage"`
	Notes      []string `json:"notes,omitempty"` // what is no damage and worth knowing

	salvage string // remedy for streams' files
}

// Damage is one place that cannot be trusted.
type Damage struct {
	File    string `json:"file"`
	Stream  string `json:"stream,omitempty"`
	Offset  *int64 `json:"offset,omitempty"` // in the file, if known: always in the log
	Seq     uint64 `json:"seq,omitempty"`    // of the message, if it is one
	Problem string `json:"problem"`
	Remedy  string `json:"remedy"`
}

// What can be done about damage.
const (
	remedyRestore = "check the disk, then restore the whole store directory from a backup, or move it away to start empty"
	remedyLog     = "check the disk, then start the program: it goes on with all that is intact, and tells which messages are lost; or restore the whole store directory from a backup"
	remedyMessage = "the message is lost and readers pass over it: publish it again if it is to be had elsewhere; check the disk"
	remedyRebuilt = "nothing to do: it is made anew from the messages when the program starts or next checkpoints; check the disk"
	remedyMissing = "restore it from a backup, with the rest of the store directory that belongs to it"
	remedyFloor   = "nothing to do: the next checkpoint of the stream writes it anew; check the disk"
	remedyMeta    = "check the disk, then start the program: it keeps what is intact of the file and takes the streams from their directories; or restore the whole store directory from a backup"
)

// remedySalvage is what can be done about a stream's file.
func (s *Store) remedySalvage() string {
	return "check the disk, then run " + s.command("salvage") + ": it keeps everything whose checksum is right; or restore a backup"
}

// Verify reads everything that the store holds and checks it: the log's
// structure, the checksums of all its batches;
// every value of meta.db and of the streams' files; that summaries and indexes
// agree with the messages, and the files with each other. Octets that nothing
// depends on (padding, free pages, reserved space) are not checked.
func (s *Store) Verify() (*Report, error) {
	r := &Report{StoreDir: s.dir, Damage: []Damage{}, salvage: s.remedySalvage()}
	records, err := s.verifyMeta(r)
	if err != nil {
		return nil, err
	}
	oldest, newest, created, err := s.verifyLog(r)
	if err != nil {
		return nil, err
	}
	for _, rec := range records {
		if rec.Memory {
			continue
		}
		info, err := msgstore.Verify(s.path(rec.Dir), func(err error) {
			var stale *msgstore.StaleError
			if errors.As(err, &stale) && !stale.Foreign && oldest != 0 && oldest <= stale.Applied+1 {
				r.Notes = append(r.Notes, fmt.Sprintf("%s is older than it has been; the log goes on where it ends, and brings it up to date.", stale.File))
				return
			}
			r.add(rec.Name, s.file(rec), err)
		})
		switch {
		case err == nil:
			r.Streams++
			r.Messages += info.State.Msgs
		case errors.Is(err, storage.ErrCorrupt):
			r.add(rec.Name, s.file(rec), err)
		case errors.Is(err, fs.ErrNotExist):
			if !created[rec.Group] { // else the log gives it back
				r.Damage = append(r.Damage, Damage{
					File: s.file(rec), Stream: rec.Name,
					Problem: "the file is gone, and the log does not reach back to the stream's creation", Remedy: remedyMissing,
				})
			}
		default:
			return nil, fmt.Errorf("stream %q: %w", rec.Name, err)
		}
		if info.Applied > newest {
			r.Damage = append(r.Damage, Damage{
				File: s.path("wal"), Stream: rec.Name, Remedy: remedyMissing,
				Problem: fmt.Sprintf("the log ends at record %d, but the stream has been checkpointed at %d: this is not the log of this store, or its end is lost", newest, info.Applied),
			})
		}
	}
	return r, nil
}

// BeyondSalvage returns what is damaged and no repair of a stream's file mends.
func (s *Store) BeyondSalvage() ([]Damage, error) {
	r := &Report{salvage: s.remedySalvage()}
	if _, err := s.verifyMeta(r); err != nil {
		return nil, err
	}
	if _, _, _, err := s.verifyLog(r); err != nil {
		return nil, err
	}
	return r.Damage, nil
}

func (s *Store) file(rec jetstream.StreamRecord) string {
	return filepath.Join(s.path(rec.Dir), msgstore.FileName)
}

// add notes an error of a storage package about file. What is wrong with the
// structure of a file is said once for each: one bad page leads to another.
func (r *Report) add(stream, file string, err error) {
	d := Damage{File: file, Stream: stream, Problem: err.Error(), Remedy: remedyRestore}
	var ce *storage.CorruptError
	var le *wal.CorruptError
	var stale *msgstore.StaleError
	switch {
	case errors.As(err, &stale):
		d.Remedy = remedyMissing
	case errors.As(err, &le):
		d.File, d.Offset, d.Problem, d.Remedy = le.File, &le.Offset, le.Reason, remedyLog
	case errors.As(err, &ce):
		d.File, d.Seq, d.Problem = ce.File, ce.Seq, ce.Reason
		if ce.Seq != 0 {
			d.Remedy = remedyMessage
		}
		if msgstore.Rebuilt(err) {
			d.Remedy = remedyRebuilt
		}
		switch filepath.Base(ce.File) {
		case "meta.db":
			d.Remedy = remedyMeta
		case msgstore.FloorName:
			d.Remedy = remedyFloor
		case msgstore.FileName:
			if d.Remedy == remedyRestore {
				d.Remedy = r.salvage
			}
		}
	case errors.Is(err, wal.ErrFormat):
		d.Remedy = "verify with the program version that wrote it"
	}
	if slices.ContainsFunc(r.Damage, func(o Damage) bool {
		return o.File == d.File && o.Seq == d.Seq && (o.Problem == d.Problem && d.Offset == nil || storage.StructureDamage(o.Problem) && storage.StructureDamage(d.Problem))
	}) {
		return
	}
	r.Damage = append(r.Damage, d)
}

func (s *Store) verifyMeta(r *Report) ([]jetstream.StreamRecord, error) {
	path := s.path("meta.db")
	meta, err := metadb.OpenReadOnly(path)
	switch {
	case errors.Is(err, storage.ErrCorrupt):
		r.add("", path, err)
		return nil, nil
	case errors.Is(err, fs.ErrNotExist):
		r.Damage = append(r.Damage, Damage{File: path, Problem: "the file is gone: nothing tells which streams there are", Remedy: remedyMeta})
		return nil, nil
	case err != nil:
		return nil, err
	}
	before := len(r.Damage)
	r.MetaValues = meta.Verify(func(err error) { r.add("", path, err) })
	records, err := jetstream.StreamRecords(meta)
	if err != nil && len(r.Damage) == before {
		r.Damage = append(r.Damage, Damage{File: path, Problem: err.Error(), Remedy: remedyMeta})
	}
	if err != nil {
		r.Notes = append(r.Notes, "The streams' files have not been read, because meta.db does not tell which there are.")
	}
	return records, meta.Close()
}

// noteCreated notes the group that a record creates, if it does.
func noteCreated(created map[storage.GroupID]bool, rec wal.Record) {
	var c command.StreamCreate
	if rec.Group == storage.MetaGroup && c.Decode(rec.Data) == nil {
		created[storage.GroupID(c.Group)] = true
	}
}

// verifyLog returns the LSNs of the first record (0: there is none) and of the
// last, and the groups whose creation the log holds.
func (s *Store) verifyLog(r *Report) (oldest, newest storage.LSN, created map[storage.GroupID]bool, err error) {
	created = map[storage.GroupID]bool{}
	dir := s.path("wal")
	info, err := wal.Scan(dir, func(rec wal.Record) error {
		if r.Records++; oldest == 0 {
			oldest = rec.LSN
		}
		noteCreated(created, rec)
		return nil
	})
	if errors.Is(err, os.ErrNotExist) {
		r.Damage = append(r.Damage, Damage{File: dir, Problem: "the log is gone", Remedy: remedyLog})
		return 0, ^storage.LSN(0), created, nil // said once
	}
	if err != nil {
		return 0, 0, nil, err
	}
	r.Segments = len(info.Segments)
	for _, d := range info.Damage {
		r.add("", dir, d)
	}
	for _, g := range info.Segments {
		newest = max(newest, g.Next-1)
		if g.Torn {
			r.Notes = append(r.Notes, fmt.Sprintf("%s ends in a batch that a stop tore at offset %d; no one was told that it is safe, the next start cuts it off.", g.File, g.Used))
		}
	}
	if len(info.Damage) > 0 {
		newest = ^storage.LSN(0) // the end cannot be told for sure
	}
	return oldest, newest, created, nil
}
