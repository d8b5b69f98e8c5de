package storagetool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"petiole/internal/jetstream"
	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// Stat is how much is where in a store. Sizes are in octets.
type Stat struct {
	StoreDir  string       `json:"store_dir"`
	Streams   []StreamStat `json:"streams"`
	Log       LogStat      `json:"log"`
	MetaBytes int64        `json:"meta_bytes"` // of meta.db
	// BallastBytes are set aside to be given up when the disk is full,
	// ParkedBytes those of the ParkedFiles damaged files that repairs have put
	// aside.
	BallastBytes int64    `json:"ballast_bytes"`
	ParkedBytes  int64    `json:"parked_bytes"`
	ParkedFiles  int      `json:"parked_files"`
	Total        Total    `json:"total"`
	Damage       []string `json:"damage,omitempty"` // met on the way; Verify looks for it
	// Written is what the store has written in its life, as of when it was last
	// saved; Amplification how many octets that is for one of messages.
	Written       jetstream.Written `json:"written"`
	Amplification float64           `json:"write_amplification"`
}

// StreamStat is what the file of a stream holds. Messages that are in the log
// only, as after a stop without a checkpoint, are not counted but in LogRecords.
type StreamStat struct {
	Name   string `json:"name"`
	Group  uint64 `json:"group"`
	Memory bool   `json:"memory,omitempty"` // kept in memory: no file
	// Damaged says that the file cannot be read, Pending that there is none yet
	// and the log gives it back; what follows is 0 then, but File and LogRecords.
	Damaged  bool    `json:"damaged,omitempty"`
	Pending  bool    `json:"pending,omitempty"`
	Messages uint64  `json:"messages"`
	First    uint64  `json:"first"`
	Last     uint64  `json:"last"`
	Bytes    uint64  `json:"bytes"`         // of the messages, as limits count them
	File     int64   `json:"file_bytes"`    // length of msgs.db
	Free     int64   `json:"free_bytes"`    // pages inside it that are free for reuse
	Reserved int64   `json:"ahead_bytes"`   // at its end, not used yet
	PerMsg   float64 `json:"bytes_per_msg"` // used pages, divided by messages; 0 without messages
	// Space is the length of the file divided by Bytes, and Wasted what is in it
	// beyond them; 0 without messages.
	Space   float64 `json:"space_amplification"`
	Wasted  int64   `json:"wasted_bytes"`
	Applied uint64  `json:"applied_lsn"`
	// Compact says that the file is worth compacting, which needs as much room
	// beside it as CompactNeeds says; the file system has DiskFree.
	Compact      bool  `json:"compaction_due"`
	CompactNeeds int64 `json:"compaction_needs_bytes,omitempty"`
	DiskFree     int64 `json:"disk_free_bytes,omitempty"`
	// LogRecords counts the stream's records that are in the log only.
	LogRecords uint64 `json:"log_records"`
}

// LogStat is what the write-ahead log takes.
type LogStat struct {
	Segments      int    `json:"segments"` // live ones
	Bytes         int64  `json:"bytes"`    // headers and batches in them
	Preallocated  int64  `json:"preallocated_bytes"`
	Spares        int    `json:"spare_segments"`
	SpareBytes    int64  `json:"spare_bytes"`
	Records       uint64 `json:"records"`
	Oldest        uint64 `json:"oldest_lsn"` // 0 without records
	Newest        uint64 `json:"newest_lsn"`
	CleanShutdown bool   `json:"clean_shutdown"`
}

// Total sums the store up.
type Total struct {
	Messages uint64 `json:"messages"`
	Content  uint64 `json:"content_bytes"` // of messages, as limits count them
	Used     int64  `json:"used_bytes"`    // by data, in all files
	Reserved int64  `json:"reserved_bytes"`
	Disk     int64  `json:"file_bytes"` // length of all files: used and reserved
	// PerContent is Used divided by Content: how many octets of files are in use
	// for one of messages; 0 without messages.
	PerContent float64 `json:"used_per_content"`
}

// Stat reads the summaries of all files, and the log.
func (s *Store) Stat() (*Stat, error) {
	st := &Stat{StoreDir: s.dir, Streams: []StreamStat{}}
	records, err := s.streams()
	if err != nil {
		if !errors.Is(err, storage.ErrCorrupt) && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		st.Damage = append(st.Damage, err.Error())
	}
	if fi, err := os.Stat(s.path("meta.db")); err == nil {
		st.MetaBytes = fi.Size()
	}
	if fi, err := os.Stat(s.path("ballast")); err == nil {
		st.BallastBytes = fi.Size()
	}
	if st.ParkedFiles, st.ParkedBytes, err = s.parked(); err != nil {
		return nil, err
	}
	at := map[storage.GroupID]int{}
	gone := map[storage.GroupID]error{} // streams without a file
	for _, r := range records {
		ss := StreamStat{Name: r.Name, Group: uint64(r.Group), Memory: r.Memory}
		if !r.Memory {
			info, err := msgstore.Inspect(s.path(r.Dir))
			switch {
			case err == nil:
				if err := s.statCompaction(&ss, r, info); err != nil {
					return nil, err
				}
			case errors.Is(err, fs.ErrNotExist):
				gone[r.Group] = err
			case errors.Is(err, storage.ErrCorrupt):
				ss.Damaged = true
				st.Damage = append(st.Damage, err.Error())
			default:
				return nil, fmt.Errorf("stream %q: %w", r.Name, err)
			}
			if fi, err := os.Stat(s.file(r)); err == nil {
				info.Size = fi.Size()
			}
			ss.Messages, ss.First, ss.Last, ss.Bytes = info.State.Msgs, info.State.First, info.State.Last, info.State.Bytes
			ss.File, ss.Free, ss.Reserved, ss.Applied = info.Size, info.Free, info.Ahead, uint64(info.Applied)
			if ss.Messages > 0 {
				ss.PerMsg = float64(ss.File-ss.Free-ss.Reserved) / float64(ss.Messages)
				ss.Space = float64(ss.File) / float64(ss.Bytes)
				ss.Wasted = max(ss.File-int64(ss.Bytes), 0)
			}
		}
		at[r.Group] = len(st.Streams)
		st.Streams = append(st.Streams, ss)
	}
	created, err := s.statLog(st, at)
	if err != nil {
		return nil, err
	}
	for i := range st.Streams {
		ss := &st.Streams[i]
		err := gone[storage.GroupID(ss.Group)]
		ss.Pending = err != nil && created[storage.GroupID(ss.Group)]
		if ss.Damaged = ss.Damaged || err != nil && !ss.Pending; err != nil && ss.Damaged {
			st.Damage = append(st.Damage, err.Error())
		}
	}
	if w, err := s.written(); err == nil { // if not, that has been told
		st.Written, st.Amplification = w, w.Amplification()
	}
	t := &st.Total
	for i := range st.Streams {
		ss := &st.Streams[i]
		t.Messages += ss.Messages
		t.Content += ss.Bytes
		t.Reserved += ss.Free + ss.Reserved
		t.Disk += ss.File
	}
	t.Reserved += st.Log.Preallocated + st.Log.SpareBytes + st.BallastBytes
	t.Disk += st.Log.Bytes + st.Log.Preallocated + st.Log.SpareBytes + st.MetaBytes + st.BallastBytes + st.ParkedBytes
	t.Used = t.Disk - t.Reserved - st.ParkedBytes
	if t.Content > 0 {
		t.PerContent = float64(t.Used) / float64(t.Content)
	}
	return st, nil
}

// parked sums up the files that repairs have put aside.
func (s *Store) parked() (files int, n int64, err error) {
	err = s.walk(func(name string, fi fs.FileInfo) error {
		name = strings.TrimPrefix(name, "streams/") // parked there if that is another file system
		if fi.Mode().IsRegular() && (strings.HasPrefix(name, "parked/") || strings.Contains(path.Base(name), ".damaged-")) {
			files++
			n += fi.Size()
		}
		return nil
	})
	return files, n, err
}

// statCompaction looks whether a stream's file is to be compacted, and whether
// there is room for that.
func (s *Store) statCompaction(ss *StreamStat, r jetstream.StreamRecord, info msgstore.Info) error {
	w := info.Waste()
	if ss.Compact = w.Worth; !w.Worth {
		return nil
	}
	free, err := s.free(s.path(r.Dir))
	if err != nil {
		return fmt.Errorf("stream %q: ask how much room there is: %w", r.Name, err)
	}
	ss.CompactNeeds, ss.DiskFree = w.Need(), free
	return nil
}

// statLog also returns the groups whose creation the log holds.
func (s *Store) statLog(st *Stat, at map[storage.GroupID]int) (created map[storage.GroupID]bool, err error) {
	l := &st.Log
	created = map[storage.GroupID]bool{}
	info, err := wal.Scan(s.path("wal"), func(r wal.Record) error {
		if l.Oldest == 0 {
			l.Oldest = uint64(r.LSN)
		}
		l.Newest = uint64(r.LSN)
		l.Records++
		noteCreated(created, r)
		if i, ok := at[r.Group]; ok && uint64(r.LSN) > st.Streams[i].Applied {
			st.Streams[i].LogRecords++
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		st.Damage = append(st.Damage, err.Error())
		return created, nil
	}
	if err != nil {
		return created, err
	}
	for _, g := range info.Segments {
		l.Bytes += g.Used
		l.Preallocated += g.Size - g.Used
		l.CleanShutdown = g.Closed
	}
	for _, f := range info.Spares {
		l.SpareBytes += f.Size
	}
	l.Segments, l.Spares = len(info.Segments), len(info.Spares)
	for _, d := range info.Damage {
		st.Damage = append(st.Damage, d.Error())
	}
	return created, nil
}
