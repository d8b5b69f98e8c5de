package boltfile

import (
	"encoding/binary"
	"fmt"
	"os"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// branchesMax is how many branch pages CheckBranches reads at most. The upper
// ones come first.
const branchesMax = 2048

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
	c := &branches{f: f, path: path, size: int64(db.Info().PageSize), seen: map[uint64]bool{}}
	fi, err := f.Stat()
	if err != nil {
		return fmt.Errorf("check %s: %w", path, err)
	}
	c.pages = uint64(fi.Size() / c.size)
	var root uint64
	if err := Guard(path, func() error {
		return db.View(func(tx *bbolt.Tx) error {
			root = uint64(tx.Cursor().Bucket().Root())
			return nil
		})
	}); err != nil {
		return err
	}
	// The root of all is a leaf with the buckets' roots, if it is no branch.
	flags, page, err := c.page(root)
	if err != nil {
		return err
	}
	roots := []uint64{root}
	if flags == flagLeaf {
		roots = c.buckets(page)
	}
	return c.walk(roots)
}

type branches struct {
	f     *os.File
	path  string
	size  int64
	pages uint64
	seen  map[uint64]bool // branch pages
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
	var leaves []uint64 // or what should be
	for level := roots; len(level) > 0; {
		var next []uint64
		for _, no := range level {
			if c.seen[no] {
				return c.corrupt(no, "more than one page leads to it")
			}
			if len(c.seen) >= branchesMax {
				return nil
			}
			flags, b, err := c.page(no)
			if err != nil {
				return err
			}
			if flags != flagBranch {
				continue
			}
			c.seen[no] = true
			var children []uint64
			n := int(binary.NativeEndian.Uint16(b[10:]))
			for i := 0; i < n && pageHeader+element*(i+1) <= len(b); i++ {
				children = append(children, binary.NativeEndian.Uint64(b[pageHeader+element*i+8:]))
			}
			if len(children) == 0 {
				continue
			}
			// All leaves are as deep: one child tells what all are, or should be.
			flags, _, err = c.page(children[0])
			if err == nil && flags == flagLeaf {
				leaves = append(leaves, children...)
			} else {
				next = append(next, children...)
			}
		}
		level = next
	}
	for _, no := range leaves {
		if c.seen[no] {
			return c.corrupt(no, "a page leads to it that is not above it")
		}
	}
	return nil
}
