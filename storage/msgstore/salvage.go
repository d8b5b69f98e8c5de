package msgstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
	"petiole/storage/internal/table"
	"petiole/storage/vfs"
)

// How a damaged file is read:
//
//	1  identity   from the tree, the floor file, or any page that proves to hold it
//	2  state      from the tree of the last commit; failing that, what the floor
//	              file says was durable; failing that, any that can be found
//	3  deletions  from the tree; where it is damaged, all notes of deletions found
//	              anywhere in the file, together: what is deleted stays deleted
//	4  messages   from the tree, record by record; those that are missing then, from
//	              chunks found anywhere: a message never changes, so that an older
//	              copy of it is as good, and whether it still exists 2 and 3 say
//	5  keys       from the tree; where it is damaged, the newest that is found
//
// Whatever is used has proved by its checksum to belong where it is used.

// salvage is the reading of one damaged file.
type salvage struct {
	ctx  context.Context
	path string
	f    *boltpages.File // nil: there is none
	size int64

	floor   *Floor // nil: there is none
	logFrom storage.LSN
	hint    *hints

	im   image // for its seals only
	meta int   // whose tree is used: index of f.Metas(), -1 for none

	lsn    storage.LSN
	st     storage.State
	nextID uint64
	spans  []table.Span
	whole  bool // the state is that of the tree
	pages  map[uint64]*table.Page
	gone   *table.Gone

	buckets map[string]boltpages.Bucket
	hidden  map[string][]boltpages.Damage // by bucket: what damage hides of it
	ids     map[string]uint64             // of subjects
	kvs     map[string]keyed
	have    present
	extents []extent
	most    int // maxExtents, but in tests
	orphans []extent
	// Of a large file it takes much to remember where everything is, and the
	// tree says it again as long as it is in order: then extents has only what
	// has been found elsewhere.
	walk    bool
	ordered bool   // the tree, as far as it has been read
	highest uint64 // sequence in it

	report  *RepairReport
	damages int
}

// hints is what an open store knows, for where the file does not.
type hints struct {
	uid     [16]byte
	applied storage.LSN
	first   uint64 // no message below it exists
	last    uint64 // in the file
	pages   map[uint64]*table.Page
	spans   []table.Span
	nextID  uint64
	ids     map[string]uint64 // as far as memory has them
}

// maxDamages bounds how much of what was found the report says.
const maxDamages = 100

func (s *salvage) damaged(format string, args ...any) {
	if s.damages++; s.damages <= maxDamages {
		s.report.Damage = append(s.report.Damage, fmt.Sprintf(format, args...))
	}
}

// read finds out all that can be found out. Nothing is changed.
func (s *salvage) read() error {
	s.hidden = map[string][]boltpages.Damage{}
	s.buckets = map[string]boltpages.Bucket{}
	s.pages = map[uint64]*table.Page{}
	s.ids = map[string]uint64{}
	s.kvs = map[string]keyed{}
	s.have = present{}
	for _, d := range s.f.MetaDamage() {
		s.damaged("%v", &d)
	}
	if err := s.identity(); err != nil {
		return err
	}
	if err := s.state(); err != nil {
		return err
	}
	steps := []func() error{s.deletions, s.subjects, s.messages, s.keys}
	for _, step := range steps {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		if err := step(); err != nil {
			return err
		}
	}
	if s.damages > maxDamages {
		s.report.Damage = append(s.report.Damage, fmt.Sprintf("and %d more", s.damages-maxDamages))
	}
	return nil
}

// openDamaged opens the file at path for salvage, which may be missing.
func openDamaged(path string) (io *os.File, size int64, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, fi.Size(), nil
}

// roomFor fails if the file system of dir has not so many octets.
func roomFor(dir string, n int64, free func(string) (int64, error)) error {
	if free == nil {
		free = vfs.OS.Free
	}
	has, err := free(dir)
	if err != nil {
		return fmt.Errorf("ask how much room there is: %w", err)
	}
	if has < n {
		return fmt.Errorf("%d octets are needed beside the file, the file system has %d: %w", n, has, syscall.ENOSPC)
	}
	return nil
}
