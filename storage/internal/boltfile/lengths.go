package boltfile

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"unsafe"

	"go.etcd.io/bbolt"

	"petiole/storage"
)

// bbolt gives free the pages of whatever a transaction rewrites: as many as the
// header of the first says that there are behind it. Nothing else looks at that
// number. Too high by one, it gives free a page that is in use, and a later
// transaction destroys that; much too high, it keeps the commit busy for hours and
// eats all memory. So before a commit the number has to be what the content of
// the page needs, in all pages that will be given free:
//
//	nodes    of the buckets written to, which bbolt has in memory
//	siblings of nodes that something has been deleted from, which may be merged
//	buckets  that hold buckets: their pages are rewritten for those
//	list     of free pages
//
// Which those are bbolt does not tell. Its variables do, which are only read here;
// a test says if another version of it has others.

// checkLengths fails with storage.ErrCorrupt if the pages that committing tx gives
// free are not what their content says.
func checkLengths(tx *bbolt.Tx) error { return newLengths(tx).commit(tx) }

func (c *lengths) commit(tx *bbolt.Tx) error {
	t := reflect.ValueOf(tx).Elem()
	if err := c.bucket(t.FieldByName("root")); err != nil {
		return err
	}
	return c.freelist(tx, t.FieldByName("meta").Elem().FieldByName("freelist").Uint())
}

// DeleteBucket is tx.DeleteBucket, which gives all pages of the bucket free, for
// one with no buckets in it. It fails with storage.ErrCorrupt if those are not what
// their content says.
func DeleteBucket(tx *bbolt.Tx, name []byte) error {
	if b := tx.Bucket(name); b != nil && b.Root() != 0 {
		if err := newLengths(tx).tree(uint64(b.Root())); err != nil {
			return err
		}
	}
	return tx.DeleteBucket(name)
}

// CheckLengths is what a commit of all pages at once would be preceded by: for small
// files. Transactions that only read will do.
func CheckLengths(tx *bbolt.Tx) error {
	c := newLengths(tx)
	root := uint64(tx.Cursor().Bucket().Root())
	if err := c.tree(root); err != nil {
		return err
	}
	if err := tx.ForEach(func(_ []byte, b *bbolt.Bucket) error {
		if b == nil || b.Root() == 0 {
			return nil
		}
		return c.tree(uint64(b.Root()))
	}); err != nil {
		return err
	}
	return c.freelist(tx, reflect.ValueOf(tx).Elem().FieldByName("meta").Elem().FieldByName("freelist").Uint())
}

// Commit is tx.Commit of a transaction that Update does not run.
func Commit(tx *bbolt.Tx) error {
	if err := checkLengths(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// lengths checks pages in the memory map, within a transaction that writes.
type lengths struct {
	path  string
	data  []byte
	size  uint64 // of a page
	pages uint64 // below the high water mark

	checked map[uint64]bool // tests only
}

func newLengths(tx *bbolt.Tx) *lengths {
	db := tx.DB()
	info := db.Info()
	c := &lengths{path: db.Path(), size: uint64(info.PageSize)}
	n := min(tx.Size(), reflect.ValueOf(db).Elem().FieldByName("datasz").Int())
	c.data = unsafe.Slice(*(**byte)(unsafe.Pointer(&info.Data)), n)
	c.pages = uint64(n) / c.size
	return c
}

func (c *lengths) corrupt(no uint64, format string, args ...any) error {
	return &storage.CorruptError{File: c.path, Reason: fmt.Sprintf("%spage %d: ", storage.StructurePrefix, no) + fmt.Sprintf(format, args...)}
}

// lengthPage is a branch or leaf page whose length is right.
type lengthPage struct {
	b      []byte // with the pages that it goes on over
	end    int    // of its content
	branch bool
	count  int
}

// page returns a page whose length is right.
func (c *lengths) page(no uint64) (p lengthPage, err error) {
	if no < 2 || no >= c.pages {
		return p, c.corrupt(no, "there is no such page")
	}
	rest := c.data[no*c.size:]
	id, flags, count := binary.NativeEndian.Uint64(rest), binary.NativeEndian.Uint16(rest[8:]), binary.NativeEndian.Uint16(rest[10:])
	overflow := uint64(binary.NativeEndian.Uint32(rest[12:]))
	if id != no || flags != flagBranch && flags != flagLeaf {
		return p, c.corrupt(no, "it is not what it should be")
	}
	p = lengthPage{branch: flags == flagBranch, count: int(count)}
	end, ok := contentEnd(rest, p.branch, p.count)
	if !ok {
		return p, c.corrupt(no, "it has another number of elements than it says")
	}
	if n := (end + c.size - 1) / c.size; n != overflow+1 || n > c.pages-no {
		return p, c.corrupt(no, "it says that it goes on over %d pages, and its content over %d", overflow, n-1)
	}
	p.b, p.end = rest[:end], int(end)
	if c.checked != nil {
		c.checked[no] = true
	}
	return p, nil
}

// contentEnd returns where what is in a page ends: contents are in the order of
// the elements, one behind the other.
func contentEnd(b []byte, branch bool, count int) (end uint64, ok bool) {
	if count == 0 {
		return pageHeader, !branch
	}
	at := pageHeader + element*(count-1)
	if at+element > len(b) {
		return 0, false
	}
	u32 := func(at int) uint64 { return uint64(binary.NativeEndian.Uint32(b[at:])) }
	if branch {
		return uint64(at) + u32(at) + u32(at+4), u32(pageHeader) == uint64(element*count)
	}
	return uint64(at) + u32(at+4) + u32(at+8) + u32(at+12), u32(pageHeader+4) == uint64(element*count)
}

// children returns the pages that a branch leads to.
func (p *lengthPage) children() []uint64 {
	if !p.branch {
		return nil
	}
	list := make([]uint64, p.count)
	for i := range list {
		list[i] = binary.NativeEndian.Uint64(p.b[pageHeader+element*i+8:])
	}
	return list
}

// small reports whether a branch that loses the one or other child for being the
// neighbour of one that has changed may become so small that it is merged in turn.
func (p *lengthPage) small(size uint64) bool {
	if !p.branch {
		return false // only what is deleted there makes it so
	}
	const lost = 3
	longest := 0
	for i := range p.count {
		longest = max(longest, int(binary.NativeEndian.Uint32(p.b[pageHeader+element*i+4:])))
	}
	return p.count <= lost+2 || p.end-lost*(element+longest) <= int(size)/2
}

// tree checks all pages of a tree.
func (c *lengths) tree(root uint64) error {
	seen := make([]uint64, c.pages/64+1)
	level := []uint64{root}
	for len(level) > 0 {
		var next []uint64
		for _, no := range level {
			p, err := c.page(no)
			if err != nil {
				return err
			}
			if seen[no/64]&(1<<(no%64)) != 0 {
				return c.corrupt(no, "more than one page leads to it")
			}
			seen[no/64] |= 1 << (no % 64)
			next = append(next, p.children()...)
		}
		level = next
	}
	return nil
}

// bucket checks the pages of a bucket that are given free, b, and of those in it.
func (c *lengths) bucket(b reflect.Value) error {
	root := b.FieldByName("InBucket").Elem().FieldByName("root").Uint()
	nodes, buckets := b.FieldByName("nodes"), b.FieldByName("buckets")
	hot := map[uint64]bool{} // what something below has been deleted from
	for i := nodes.MapRange(); i.Next(); {
		no := i.Key().Uint()
		if no == 0 {
			continue // it is within another page
		}
		if _, err := c.page(no); err != nil {
			return err
		}
		n := i.Value()
		if !n.Elem().FieldByName("unbalanced").Bool() {
			continue
		}
		for ; !n.IsNil(); n = n.Elem().FieldByName("parent") {
			no := n.Elem().FieldByName("pgid").Uint()
			if hot[no] {
				break
			}
			hot[no] = true
		}
	}
	if root != 0 && buckets.Len() > 0 {
		if err := c.tree(root); err != nil {
			return err
		}
	} else if root != 0 && len(hot) > 0 {
		if err := c.siblings(root, hot); err != nil {
			return err
		}
	}
	for i := buckets.MapRange(); i.Next(); {
		if err := c.bucket(i.Value().Elem()); err != nil {
			return err
		}
	}
	return nil
}

// siblings checks the neighbours, on their level of a tree, of all pages that are
// hot: bbolt merges pages that have become small with one of those. Their parents
// may have been merged before, so that neighbours are also those of another parent.
func (c *lengths) siblings(root uint64, hot map[uint64]bool) error {
	level := []uint64{root}
	for depth := 0; len(level) > 0; depth++ {
		if depth > depthMax {
			return c.corrupt(root, "the tree below it is too deep")
		}
		visit := make([]*lengthPage, len(level))
		look := func(i int) (more bool, err error) {
			if i < 0 || i >= len(level) {
				return false, nil
			}
			if visit[i] == nil {
				p, err := c.page(level[i])
				if err != nil {
					return false, err
				}
				visit[i] = &p
			}
			return !hot[level[i]] && visit[i].small(c.size), nil
		}
		for i, no := range level {
			if !hot[no] {
				continue
			}
			if _, err := look(i); err != nil {
				return err
			}
			for _, step := range []int{-1, 1} {
				for j, more := i+step, true; more; j += step {
					var err error
					if more, err = look(j); err != nil {
						return err
					}
				}
			}
		}
		var next []uint64
		for _, p := range visit {
			if p != nil {
				next = append(next, p.children()...)
			}
		}
		level = next
	}
	return nil
}

// depthMax is more than the levels that any tree has.
const depthMax = 64

// noFreelist stands for the page of the list of free pages if there is none.
const noFreelist = 1<<64 - 1

const flagFreelist = 16

// freelist checks the page that the list of free pages begins on. bbolt reckons
// with the list as it is before it takes the pages for the list itself from it: so
// the last page may be empty.
func (c *lengths) freelist(tx *bbolt.Tx, no uint64) error {
	if no == noFreelist {
		return nil
	}
	if no < 2 || no >= c.pages {
		return c.corrupt(no, "there is no such page")
	}
	b := c.data[no*c.size:]
	overflow := uint64(binary.NativeEndian.Uint32(b[12:]))
	if binary.NativeEndian.Uint64(b) != no || binary.NativeEndian.Uint16(b[8:]) != flagFreelist {
		return c.corrupt(no, "it is no list of free pages")
	}
	n := uint64(binary.NativeEndian.Uint16(b[10:]))
	if n == 0xFFFF {
		if n = binary.NativeEndian.Uint64(b[pageHeader:]) + 1; n > c.pages+1 {
			return c.corrupt(no, "it says that it names more pages than there are")
		}
	}
	end := pageHeader + 8*n
	bad := func() error {
		return c.corrupt(no, "it says that it goes on over %d pages, and it names %d", overflow, n)
	}
	least := end / c.size
	before := end + 8*(overflow+1) + 8 // one entry more where the number needs one
	if overflow < least || overflow > before/c.size || overflow >= c.pages-no {
		return bad()
	}
	for i := uint64(1); i <= overflow; i++ {
		if p, _ := tx.Page(int(no + i)); p != nil && p.Type == "free" { // fails if that is not known
			return bad()
		}
	}
	for _, x := range b[(least+1)*c.size : (overflow+1)*c.size] {
		if x != 0 {
			return bad()
		}
	}
	return nil
}
