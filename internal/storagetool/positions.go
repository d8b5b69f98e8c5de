package storagetool

import (
	"cmp"
	"errors"
	"io/fs"
	"slices"

	"petiole/internal/jetstream"
	"petiole/storage"
	"petiole/storage/metadb"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// Positions is how far the records of a store have come, in the states that a
// position in the log has, one after another:
//
//	appended ─► written ─► durable ─► applied
//
// Of what was appended only and not written, files know nothing: nobody has been
// told that it is safe.
type Positions struct {
	Oldest  storage.LSN `json:"oldest_lsn"`  // of the log's records; 0 without any
	Written storage.LSN `json:"written_lsn"` // the last record in the log's files
	// Durable is up to where the files say that all had been synced: batches name
	// what was synced when they were written, a footer and the mark of a clean stop
	// all before them. Records up to Written may have been synced, too.
	Durable storage.LSN `json:"durable_lsn"`
	// End says how the log ends: "clean" is the mark of a clean stop, "torn" a batch
	// that is not complete, which nobody was told to be safe, "open" neither.
	End    string          `json:"end"`
	Groups []GroupPosition `json:"groups"`
	Damage []string        `json:"damage,omitempty"` // met on the way; Verify looks for it
}

// GroupPosition is how far one group has come: the streams' list, or a stream.
type GroupPosition struct {
	Group   storage.GroupID `json:"group"`
	Stream  string          `json:"stream"`      // "(meta)" for the list; "" if not known any more
	Written storage.LSN     `json:"written_lsn"` // its last record in the log; 0 without any
	Durable storage.LSN     `json:"durable_lsn"` // the last known to be synced
	// Applied is up to where its file reflects the log: that is the last
	// checkpoint. What a process had applied beyond it in memory, the next start
	// applies again. Floor is what the floor file says of it: a file that is older
	// has been put in the place of a newer one. 0 for the list of streams.
	Applied storage.LSN `json:"applied_lsn"`
	Floor   storage.LSN `json:"floor_lsn"`
	// Pending counts its records behind Applied.
	Pending uint64 `json:"pending_records"`
}

// Positions reads how far everything has come.
func (s *Store) Positions() (*Positions, error) {
	p := &Positions{Groups: []GroupPosition{}}
	met := func(err error) error {
		if errors.Is(err, storage.ErrCorrupt) || errors.Is(err, fs.ErrNotExist) {
			p.Damage = append(p.Damage, err.Error())
			return nil
		}
		return err
	}
	at := map[storage.GroupID]*GroupPosition{storage.MetaGroup: {Group: storage.MetaGroup, Stream: "(meta)"}}
	records, err := s.streams()
	if err := met(err); err != nil {
		return nil, err
	}
	if err == nil {
		if at[storage.MetaGroup].Applied, err = s.metaApplied(); met(err) != nil {
			return nil, err
		}
	}
	for _, r := range records {
		g := &GroupPosition{Group: r.Group, Stream: r.Name}
		at[r.Group] = g
		if r.Memory {
			continue
		}
		info, err := msgstore.Inspect(s.path(r.Dir))
		if err := met(err); err != nil {
			return nil, err
		}
		g.Applied = info.Applied
		floor, err := msgstore.ReadFloor(s.path(r.Dir))
		if errors.Is(err, fs.ErrNotExist) && g.Applied == 0 {
			err = nil // the first checkpoint writes it
		}
		if err := met(err); err != nil {
			return nil, err
		}
		g.Floor = floor.Applied
	}
	// How far the log is durable is known only when it has been read.
	lsns := map[storage.GroupID][]storage.LSN{}
	info, err := wal.Scan(s.path("wal"), func(r wal.Record) error {
		if p.Oldest == 0 {
			p.Oldest = r.LSN
		}
		p.Written = r.LSN
		g := at[r.Group]
		if g == nil {
			g = &GroupPosition{Group: r.Group}
			at[r.Group] = g
		}
		g.Written = r.LSN
		if r.LSN > g.Applied {
			g.Pending++
		}
		// Those that may turn out not to be known to be durable: the last few.
		if l := append(lsns[r.Group], r.LSN); len(l) > maxUnsure {
			lsns[r.Group] = append(l[:0], l[len(l)-maxUnsure/2:]...)
		} else {
			lsns[r.Group] = l
		}
		return nil
	})
	if met(err) != nil {
		return nil, err
	}
	p.End = "open"
	if info != nil {
		for i, g := range info.Segments {
			last := i == len(info.Segments)-1
			p.Durable = max(p.Durable, g.Durable)
			if g.Sealed || last && g.Closed {
				p.Durable = max(p.Durable, g.Next-1)
			}
			if last && g.Closed {
				p.End = "clean"
			} else if last && g.Torn {
				p.End = "torn"
			}
		}
		for _, d := range info.Damage {
			p.Damage = append(p.Damage, d.Error())
		}
	}
	for id, g := range at {
		if n, _ := slices.BinarySearch(lsns[id], p.Durable+1); n > 0 {
			g.Durable = lsns[id][n-1]
		}
		p.Groups = append(p.Groups, *g)
	}
	slices.SortFunc(p.Groups, func(a, b GroupPosition) int { return cmp.Compare(a.Group, b.Group) })
	return p, nil
}

// maxUnsure is how many of a group's last records are looked at for the last one
// that is durable: there are not so many in what a process has in hand at once.
const maxUnsure = 1 << 17

func (s *Store) metaApplied() (storage.LSN, error) {
	meta, err := metadb.OpenReadOnly(s.path("meta.db"))
	if err != nil {
		return 0, err
	}
	lsn, err := jetstream.MetaApplied(meta)
	return lsn, errors.Join(err, meta.Close())
}
