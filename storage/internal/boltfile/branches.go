package boltfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// branchesMax is how many branch pages CheckBranches reads at most. The upper
// ones come first. They lie all over the file: more would take a cold disk longer
// than a start may.
const branchesMax = 1024

const (
	flagBranch = 1
	flagLeaf   = 2
	element    = 16 // octets of an entry in a page's table
)

// CheckBranches looks for pages that lead back to a page above them, by way of
// a flipped bit for instance: bbolt would follow them for ever, which nothing
// can stop. It reads branch pages, not leaves, and not all of them in a very
// large file. Errors are storage.ErrCorrupt; that other things are in order it
// does not say.
func CheckBranches(db *bbolt.DB) error {
	path := db.Path()
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("check %s: %w", path, err)
	}
	defer f.Close() // was only read
	_, err = checkBranches(db, f)
	return err
}

// checkBranches returns how many pages it has read.
func checkBranches(db *bbolt.DB, f *os.File) (int, error) {
	path := db.Path()
	c := &branches{f: f, path: path, size: int64(db.Info().PageSize), seen: map[uint64]bool{}}
	fi, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("check %s: %w", path, err)
	}
	c.pages = uint64(fi.Size() / c.size)
	var root uint64
	if err := Guard(path, func() error {
		return db.View(func(tx *bbolt.Tx) error {
			root = uint64(tx.Cursor().Bucket().Root())
			return nil
		})
	}); err != nil {
		return 0, err
	}
	// The root of all is a leaf with the buckets' roots, if it is no branch.
	flags, page, err := c.page(root)
	if err != nil {
		return c.reads, err
	}
	roots := []uint64{root}
	if flags == flagLeaf {
		roots = c.buckets(page)
	}
	err = c.walk(roots)
	return c.reads, err
}

type branches struct {
	f     *os.File
	path  string
	size  int64
	pages uint64
	seen  map[uint64]bool // branch pages
	reads int
}

func (c *branches) corrupt(no uint64, reason string) error {
	return &storage.CorruptError{File: c.path, Reason: fmt.Sprintf("page %d: %s", no, reason)}
}

// page reads a page; without those that it goes on over.
func (c *branches) page(no uint64) (flags uint16, b []byte, err error) {
	if no < 2 || no >= c.pages {
		return 0, nil, c.corrupt(no, "there is no such page")
	}
	b = make([]byte, c.size)
	c.reads++
	if _, err := c.f.ReadAt(b, int64(no)*c.size); err != nil {
		return 0, nil, c.corrupt(no, err.Error())
	}
	if binary.NativeEndian.Uint64(b) != no {
		return 0, nil, c.corrupt(no, "it says that it is another")
	}
	return binary.NativeEndian.Uint16(b[8:]), b, nil
}

// buckets returns the roots of the buckets in a leaf page.
func (c *branches) buckets(b []byte) (roots []uint64) {
	n := int(binary.NativeEndian.Uint16(b[10:]))
	for i := 0; i < n && pageHeader+element*(i+1) <= len(b); i++ {
		at := pageHeader + element*i
		e := b[at:]
		flags, pos, ksize := binary.NativeEndian.Uint32(e), binary.NativeEndian.Uint32(e[4:]), binary.NativeEndian.Uint32(e[8:])
		value := int64(at) + int64(pos) + int64(ksize)
		if flags != 1 || value+8 > int64(len(b)) {
			continue
		}
		if root := binary.NativeEndian.Uint64(b[value:]); root != 0 {
			roots = append(roots, root)
		}
	}
	return roots
}

// walk goes down level by level from roots.
func (c *branches) walk(roots []uint64) error {
	levels := make([][]uint64, len(roots)) // of each tree: what to look at next
	for i, no := range roots {
		levels[i] = []uint64{no}
	}
	var leaves []uint64 // or what should be
	for more := true; more; {
		more = false
		for i, level := range levels {
			children, err := c.children(level)
			if err == errEnough {
				return nil
			}
			if err != nil {
				return err
			}
			if c.leaves(children) {
				leaves = append(leaves, slices.Concat(children...)...)
				children = nil
			}
			levels[i] = slices.Concat(children...)
			more = more || len(levels[i]) > 0
		}
	}
	for _, no := range leaves {
		if c.seen[no] {
			return c.corrupt(no, "a page leads to it that is not above it")
		}
	}
	return nil
}

// errEnough says that branchesMax pages have been read.
var errEnough = errors.New("enough pages have been read")

// children returns what the branch pages of one level of a tree lead to.
func (c *branches) children(level []uint64) (list [][]uint64, err error) {
	for i, no := range level {
		if i%aheadPages == 0 && len(level) > 1 {
			for _, no := range level[i:min(i+aheadPages, len(level))] {
				willNeed(c.f, int64(no)*c.size, c.size)
			}
		}
		if c.seen[no] {
			return nil, c.corrupt(no, "more than one page leads to it")
		}
		if len(c.seen) >= branchesMax {
			return nil, errEnough
		}
		flags, b, err := c.page(no)
		if err != nil {
			return nil, err
		}
		if flags != flagBranch {
			continue
		}
		c.seen[no] = true
		n := int(binary.NativeEndian.Uint16(b[10:]))
		of := make([]uint64, 0, n)
		for i := 0; i < n && pageHeader+element*(i+1) <= len(b); i++ {
			of = append(of, binary.NativeEndian.Uint64(b[pageHeader+element*i+8:]))
		}
		if len(of) > 0 {
			list = append(list, of)
		}
	}
	return list, nil
}

// aheadPages is for how many pages the system is asked at a time.
const aheadPages = 64

// leaves reports whether the pages of one level of a tree, by their parents, are
// leaves. All leaves of a tree are as deep: a few that can be read tell it of
// all, or what they should be.
func (c *branches) leaves(children [][]uint64) (yes bool) {
	for i := range min(len(children), samples) {
		of := children[i*(len(children)-1)/max(min(len(children), samples)-1, 1)]
		flags, _, err := c.page(of[0])
		if err == nil && flags != flagLeaf {
			return false
		}
		yes = yes || err == nil
	}
	return yes
}

// samples is how many pages leaves looks at, from the first to the last.
const samples = 5
