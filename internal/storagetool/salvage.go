package storagetool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/wal"
)

// ErrNoStream says that a store has no stream of that name.
var ErrNoStream = errors.New("no such stream in the store")

// directory is that of one stream's messages.
type directory struct {
	path  string
	group storage.GroupID
	name  string // of the stream; empty if the list of streams does not have it
}

// directories returns those of all streams with files, or of the one named.
// They are looked up on the disk, for the list of streams may be damaged.
func (s *Store) directories(stream string) ([]directory, error) {
	records, err := s.streams()
	if err != nil && !errors.Is(err, storage.ErrCorrupt) && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var out []directory
	for _, r := range records {
		if !r.Memory && (stream == "" || r.Name == stream) {
			out = append(out, directory{s.path(r.Dir), r.Group, r.Name})
		}
	}
	if stream != "" {
		if len(out) == 0 {
			return nil, fmt.Errorf("%w: %q", ErrNoStream, stream)
		}
		return out, nil
	}
	entries, err := os.ReadDir(s.path("streams"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		g, err := strconv.ParseUint(e.Name(), 16, 64)
		path := s.path(filepath.Join("streams", e.Name()))
		if err == nil && e.IsDir() && !slices.ContainsFunc(out, func(d directory) bool { return d.path == path }) {
			out = append(out, directory{path: path, group: storage.GroupID(g)})
		}
	}
	return out, nil
}

// SalvageOptions tune Salvage.
type SalvageOptions struct {
	Stream string // only this one
	All    bool   // also what is not damaged
	Log    *slog.Logger
}

// Salvaged is what has become of one stream's file.
type Salvaged struct {
	Stream string                 `json:"stream,omitempty"`
	Group  uint64                 `json:"group"`
	Found  int                    `json:"found"` // findings of Verify
	Report *msgstore.RepairReport `json:"report,omitempty"`
	// Problem says why nothing could be done; the file is as it was.
	Problem string `json:"problem,omitempty"`
}

// Salvage repairs the files of streams that are damaged (see msgstore.Salvage).
// Those that are not are left alone.
func (s *Store) Salvage(ctx context.Context, o SalvageOptions) ([]Salvaged, error) {
	if err := s.forChange(); err != nil {
		return nil, err
	}
	dirs, err := s.directories(o.Stream)
	if err != nil {
		return nil, err
	}
	oldest, created, err := s.logReach()
	if err != nil {
		return nil, err
	}
	out := []Salvaged{}
	for _, d := range dirs {
		if err := ctx.Err(); err != nil {
			return out, err
		}
		v := Salvaged{Stream: d.name, Group: uint64(d.group)}
		_, err := msgstore.Verify(d.path, func(err error) {
			if !msgstore.Rebuilt(err) {
				v.Found++
			}
		})
		switch {
		case err == nil:
		case errors.Is(err, fs.ErrNotExist):
			if created[d.group] {
				continue // the log gives it back
			}
			v.Found++
		case errors.Is(err, storage.ErrCorrupt):
			v.Found++
		default:
			return out, err
		}
		if v.Found == 0 && !o.All {
			continue
		}
		r, err := msgstore.Salvage(d.path, msgstore.SalvageOptions{LogFrom: oldest, Log: o.Log})
		switch {
		case err == nil:
			v.Report = &r
		case errors.Is(err, storage.ErrCorrupt):
			v.Problem = reason(err)
		default:
			return out, err
		}
		out = append(out, v)
	}
	return out, nil
}

// logReach returns the LSN of the oldest record in the log, and the groups whose
// creation it holds.
func (s *Store) logReach() (oldest storage.LSN, created map[storage.GroupID]bool, err error) {
	created = map[storage.GroupID]bool{}
	info, err := wal.Scan(s.path("wal"), func(r wal.Record) error {
		if oldest == 0 {
			oldest = r.LSN
		}
		noteCreated(created, r)
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return 0, created, nil
	}
	if err == nil && oldest == 0 && len(info.Segments) > 0 {
		oldest = info.Segments[0].First
	}
	if err == nil && len(info.Damage) > 0 {
		oldest = 0 // it does not reach anywhere for sure
	}
	return oldest, created, err
}

// CompactOptions tune Compact.
type CompactOptions struct {
	Stream string // only this one
	All    bool   // also where it is not worth it
}

// Compacted is what has become of one stream's file.
type Compacted struct {
	Stream  string                  `json:"stream,omitempty"`
	Group   uint64                  `json:"group"`
	Waste   msgstore.Waste          `json:"waste"` // before
	Report  *msgstore.CompactReport `json:"report,omitempty"`
	Problem string                  `json:"problem,omitempty"` // why nothing has been done
	Remedy  string                  `json:"remedy,omitempty"`
}

// Compact makes the files of streams smaller where it is worth it. It is as
// good while the program runs, which does it by itself.
func (s *Store) Compact(ctx context.Context, o CompactOptions) ([]Compacted, error) {
	if err := s.forChange(); err != nil {
		return nil, err
	}
	dirs, err := s.directories(o.Stream)
	if err != nil {
		return nil, err
	}
	out := []Compacted{}
	for _, d := range dirs {
		if _, err := os.Stat(filepath.Join(d.path, msgstore.FileName)); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		c, err := s.compact(ctx, d, o.All)
		if err != nil {
			return out, err
		}
		out = append(out, c)
	}
	return out, nil
}

func (s *Store) compact(ctx context.Context, d directory, all bool) (c Compacted, err error) {
	c = Compacted{Stream: d.name, Group: uint64(d.group)}
	st, err := msgstore.Open(d.path, msgstore.Options{})
	if errors.Is(err, storage.ErrCorrupt) {
		c.Problem, c.Remedy = reason(err), s.remedySalvage()
		return c, nil
	}
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	if c.Waste, err = st.Waste(); errors.Is(err, storage.ErrCorrupt) {
		c.Problem, c.Remedy = reason(err), s.remedySalvage()
		return c, nil
	}
	if err != nil || !c.Waste.Worth && !all {
		return c, err
	}
	r, err := st.Compact(ctx, msgstore.CompactOptions{BytesPerSecond: -1, SliceBytes: 4 << 20})
	switch {
	case err == nil:
		c.Report = &r
	case errors.Is(err, storage.ErrCorrupt):
		c.Problem, c.Remedy, err = reason(err), s.remedySalvage(), nil
	case errors.Is(err, msgstore.ErrPostponed):
		c.Problem, c.Remedy, err = err.Error(), "make room on the file system", nil
	}
	return c, err
}

// reason says which file is damaged and why, of an error about that.
func reason(err error) string {
	var ce *storage.CorruptError
	if !errors.As(err, &ce) || ce.Seq != 0 {
		return err.Error()
	}
	return ce.File + ": " + ce.Reason
}
