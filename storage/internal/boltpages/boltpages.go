// Package boltpages reads what is left of a bbolt file, however damaged: its
// own walk over the pages, which takes nothing for granted. A page that makes no
// sense is reported, with the keys that it hides, and passed over; what it hid
// can be looked for in all pages of the file ([File.Scan]).
//
// The file is a row of pages; numbers are in the byte order of the machine:
//
//	page 0     1     2     3                         high water mark
//	┌───────┬───────┬─────┬─────┬─────┬─ ··· ─┬─────┐
//	│ meta  │ meta  │     │     │     │       │     │   page n at n * page size
//	└───────┴───────┴─────┴─────┴─────┴─ ··· ─┴─────┘
//
// All begin with a header. A page may go on over the overflow pages behind it,
// which have no header of their own:
//
//	0              8        10       12           16
//	┌──────────────┬────────┬────────┬────────────┬─────
//	│ id = n       │ flags  │ count  │ overflow   │ ···
//	│ u64          │ u16    │ u16    │ u32        │
//	└──────────────┴────────┴────────┴────────────┴─────
//	flags: 1 branch, 2 leaf, 4 meta, 16 free list
//
// The meta page with the higher transaction id counts, if its checksum (FNV-1a
// of what stands before it) is right; the other is the state one commit before,
// whose pages are all still there until the next commit:
//
//	16      20        24      28      32        48         56       64     72         80
//	┌───────┬─────────┬───────┬───────┬─────────┬──────────┬────────┬──────┬──────────┐
//	│ magic │ version │ page  │ flags │ root    │ free     │ high   │ txid │ checksum │
//	│       │ 2       │ size  │ 0     │ bucket  │ list     │ water  │      │          │
//	└───────┴─────────┴───────┴───────┴─────────┴──────────┴────────┴──────┴──────────┘
//
// Branch and leaf pages hold a table of elements, then the keys (and values),
// each found by its distance from the start of its element:
//
//	branch  ┌─────┬───────┬──────┐  key ──► child page, whose keys are not below
//	16      │ pos │ ksize │ page │
//	        │ u32 │ u32   │ u64  │
//	        └─────┴───────┴──────┘
//	leaf    ┌───────┬─────┬───────┬───────┐  key, value; flags 1: the value is a bucket
//	16      │ flags │ pos │ ksize │ vsize │
//	        │ u32   │ u32 │ u32   │ u32   │
//	        └───────┴─────┴───────┴───────┘
//	bucket  ┌──────┬──────────┬─────────────────────────────────────────┐
//	        │ root │ sequence │ if root is 0: a leaf page within the    │
//	        │ u64  │ u64      │ value, header and all                   │
//	        └──────┴──────────┴─────────────────────────────────────────┘
//	free    page ids u64, as many as count; if count is 65535, the first is the number
//	list
//
// Only meta pages have a checksum. What a leaf yields may therefore be wrong in
// any way that its own structure does not show: who reads values has to check
// them, and order.
package boltpages

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/bits"
	"slices"
)

const (
	headerSize  = 16
	elementSize = 16
	bucketSize  = 16
	metaSize    = 64 // behind the header, with the checksum
	magic       = 0xED0CDAED
	version     = 2
	maxKey      = 32768
	maxDepth    = 64
	noFreelist  = 1<<64 - 1

	flagBranch   = 1
	flagLeaf     = 2
	flagMeta     = 4
	flagFreelist = 16

	// windowSize is how much is read at once.
	windowSize = 128 << 10
	// scanFactor bounds the work that a file made to waste time can cause:
	// keys read, against its length.
	scanFactor = 4
	// vainFactor does the same for walks: pages counted as another's overflow
	// pages, against all.
	vainFactor = 16
)

// Kind tells what is damaged.
type Kind string

// The kinds of damage.
const (
	KindMeta     Kind = "meta page"
	KindBranch   Kind = "branch page"
	KindLeaf     Kind = "leaf page"
	KindPage     Kind = "page" // it does not even say what it is
	KindFreelist Kind = "free list"
)

// Damage is a page that cannot be trusted, and what it hides.
type Damage struct { //nolint:errname // first of all it is a description
	Kind   Kind
	Page   uint64 // its number
	Reason string
	// Low and High bound the keys that may be missing because of it: they are
	// not below Low, and below High; nil is no bound.
	Low, High []byte
	// Whole says that nothing is missing because of it.
	Whole bool
}

// Error describes the damage; Damage is an error for convenience.
func (d *Damage) Error() string { return fmt.Sprintf("%s %d: %s", d.Kind, d.Page, d.Reason) }

// Meta is an intact meta page.
type Meta struct {
	Page      uint64 // 0 or 1
	Txid      uint64
	Root      uint64 // page
	Freelist  uint64 // page
	HighWater uint64 // pages from here on have never been used
}

// Persisted reports whether the free list is kept in the file.
func (m Meta) Persisted() bool { return m.Freelist != noFreelist }

// File is a bbolt file. It is not for concurrent use.
type File struct {
	r        io.ReaderAt
	size     int64
	pageSize int64
	metas    []Meta
	damage   []Damage
	scanned  int64 // octets of keys read by Scan

	window    []byte
	windowOff int64
}

// Open reads the meta pages. It does not fail: a file without any is one that
// only Scan finds anything in, or nothing.
func Open(r io.ReaderAt, size int64) *File {
	f := &File{r: r, size: max(size, 0), pageSize: 4096}
	m0, err0 := f.meta(0, 0)
	sizes := []int64{4096, 8192, 16384, 32768, 65536, 1024, 2048}
	switch {
	case err0 == nil:
		f.pageSize = m0.pageSize
	default:
		found := false
		for _, ps := range sizes {
			if m, err := f.meta(1, ps); err == nil && m.pageSize == ps {
				f.pageSize, found = ps, true
				break
			}
		}
		if !found {
			f.pageSize = f.guess(sizes)
		}
	}
	m1, err1 := f.meta(1, f.pageSize)
	if err1 == nil && m1.pageSize != f.pageSize {
		err1 = errors.New("its page size is not that of the other")
	}
	for i, err := range []error{err0, err1} {
		if err != nil {
			f.damage = append(f.damage, Damage{Kind: KindMeta, Page: uint64(i), Reason: err.Error()})
		}
	}
	if err0 == nil {
		f.metas = append(f.metas, m0.Meta)
	}
	if err1 == nil {
		f.metas = append(f.metas, m1.Meta)
	}
	slices.SortFunc(f.metas, func(a, b Meta) int {
		if a.Txid > b.Txid {
			return -1
		}
		return 1
	})
	return f
}

// guess takes the page size at which most pages know their own number.
func (f *File) guess(sizes []int64) int64 {
	best, most := sizes[0], 0
	for _, ps := range sizes {
		n := 0
		for p := int64(2); p < 512 && (p+1)*ps <= f.size; p++ {
			if h, err := f.header(p * ps); err == nil && h.id == uint64(p) && (h.flags == flagBranch || h.flags == flagLeaf) {
				n++
			}
		}
		if n > most {
			best, most = ps, n
		}
	}
	return best
}

type sizedMeta struct {
	Meta
	pageSize int64
}

func (f *File) meta(no uint64, pageSize int64) (m sizedMeta, err error) {
	var b [headerSize + metaSize]byte
	if err := f.read(b[:], int64(no)*pageSize); err != nil {
		return m, err
	}
	h := decodeHeader(b[:])
	c := b[headerSize:]
	u32, u64 := binary.NativeEndian.Uint32, binary.NativeEndian.Uint64
	sum := fnv.New64a()
	_, _ = sum.Write(c[:metaSize-8]) // never fails
	switch {
	case u32(c) != magic:
		return m, errors.New("it is no meta page")
	case sum.Sum64() != u64(c[metaSize-8:]):
		return m, errors.New("it fails its checksum")
	case u32(c[4:]) != version:
		return m, fmt.Errorf("it is of version %d, known is %d", u32(c[4:]), version)
	case h.flags != flagMeta || h.id != no:
		return m, errors.New("its header is not that of a meta page")
	}
	m.pageSize = int64(u32(c[8:]))
	if m.pageSize < 512 || m.pageSize > 1<<20 || bits.OnesCount64(uint64(m.pageSize)) != 1 {
		return m, fmt.Errorf("it says that pages have %d octets", m.pageSize)
	}
	m.Meta = Meta{Page: no, Root: u64(c[16:]), Freelist: u64(c[32:]), HighWater: u64(c[40:]), Txid: u64(c[48:])}
	return m, nil
}

// Metas returns the intact meta pages, that of the last commit first.
func (f *File) Metas() []Meta { return f.metas }

// MetaDamage returns what is wrong with meta pages.
func (f *File) MetaDamage() []Damage { return f.damage }

// PageSize returns the size of pages in octets.
func (f *File) PageSize() int { return int(f.pageSize) }

// Pages returns how many pages the file has; the last may be cut.
func (f *File) Pages() uint64 { return uint64((f.size + f.pageSize - 1) / f.pageSize) }

// read fills b with what stands at off.
func (f *File) read(b []byte, off int64) error {
	n := int64(len(b))
	if off < 0 || off > f.size || n > f.size-off {
		return errors.New("it lies beyond the end of the file")
	}
	if n == 0 {
		return nil
	}
	if n > windowSize/2 {
		return f.readAt(b, off)
	}
	if off < f.windowOff || off+n > f.windowOff+int64(len(f.window)) {
		if cap(f.window) == 0 {
			f.window = make([]byte, windowSize)
		}
		f.windowOff = off &^ 4095
		f.window = f.window[:min(windowSize, f.size-f.windowOff)]
		if f.readAt(f.window, f.windowOff) != nil {
			// Something in it cannot be read: perhaps not what is wanted.
			f.window = f.window[:0]
			return f.readAt(b, off)
		}
	}
	copy(b, f.window[off-f.windowOff:])
	return nil
}

func (f *File) readAt(b []byte, off int64) error {
	if n, err := f.r.ReadAt(b, off); n < len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read at offset %d: %w", off, err)
	}
	return nil
}

type header struct {
	id       uint64
	flags    uint16
	count    int
	overflow uint32
}

func decodeHeader(b []byte) header {
	return header{
		id:       binary.NativeEndian.Uint64(b),
		flags:    binary.NativeEndian.Uint16(b[8:]),
		count:    int(binary.NativeEndian.Uint16(b[10:])),
		overflow: binary.NativeEndian.Uint32(b[12:]),
	}
}

func (f *File) header(off int64) (header, error) {
	var b [headerSize]byte
	if err := f.read(b[:], off); err != nil {
		return header{}, err
	}
	return decodeHeader(b[:]), nil
}

// Entry is a key with its value, or with a bucket, as a leaf has it.
type Entry struct {
	Page     uint64 // the leaf
	Key      []byte // valid during the call
	IsBucket bool

	f    *File
	off  int64 // of the value
	size int
}

// Size returns the length of the value.
func (e *Entry) Size() int { return e.size }

// Offset returns where in the file the value stands.
func (e *Entry) Offset() int64 { return e.off }

// Value reads the value into dst, if it has room for it, and returns it.
func (e *Entry) Value(dst []byte) ([]byte, error) { return e.f.ReadAt(dst, e.off, e.size) }

// ReadAt reads size octets at off, into dst if it has room for them.
func (f *File) ReadAt(dst []byte, off int64, size int) ([]byte, error) {
	if size < 0 || off < 0 || int64(size) > f.size-min(off, f.size) {
		return nil, errors.New("it lies beyond the end of the file")
	}
	if cap(dst) < size {
		dst = make([]byte, size)
	}
	dst = dst[:size]
	return dst, f.read(dst, off)
}

// Bucket is where a bucket's tree begins.
type Bucket struct {
	root uint64
	off  int64 // of a page within a value, if root is 0
	size int64
}

// Root returns the bucket of buckets of the state that m is the meta page of.
func (f *File) Root(m Meta) Bucket { return Bucket{root: m.Root} }

// Bucket returns the bucket that is the value of e.
func (f *File) Bucket(e Entry) (Bucket, error) {
	var b [bucketSize]byte
	if !e.IsBucket || e.size < bucketSize {
		return Bucket{}, errors.New("it is no bucket")
	}
	if err := f.read(b[:], e.off); err != nil {
		return Bucket{}, err
	}
	root := binary.NativeEndian.Uint64(b[:])
	if root != 0 {
		return Bucket{root: root}, nil
	}
	if e.size < bucketSize+headerSize {
		return Bucket{}, errors.New("it is cut")
	}
	return Bucket{off: e.off + bucketSize, size: int64(e.size - bucketSize)}, nil
}

// Walker walks trees that have no page in common: those of one state.
type Walker struct {
	f      *File
	seen   []uint64 // a bit per page
	entry  func(Entry) error
	damage func(Damage)
	vain   uint64 // pages looked at that were another's
}

// NewWalker returns a Walker. For what it cannot read it calls damage.
func (f *File) NewWalker(damage func(Damage)) *Walker {
	return &Walker{f: f, seen: make([]uint64, f.Pages()/64+1), damage: damage}
}

// Seen reports whether the walker has been on a page.
func (w *Walker) Seen(page uint64) bool {
	return page/64 < uint64(len(w.seen)) && w.seen[page/64]&(1<<(page%64)) != 0
}

// see marks the pages of a run; false if one has been seen, which then none is
// marked of.
func (w *Walker) see(page, n uint64) bool {
	if w.vain > vainFactor*w.f.Pages() {
		return false // a file made to waste time
	}
	for p := page; p < page+n; p++ {
		if w.Seen(p) {
			w.vain += p - page
			return false
		}
	}
	for p := page; p < page+n; p++ {
		if p/64 < uint64(len(w.seen)) {
			w.seen[p/64] |= 1 << (p % 64)
		}
	}
	return true
}

// Walk calls entry for all entries of b that can be read, until it returns an
// error, which Walk returns. They come in the order of their keys, but perhaps
// not where there is damage.
func (w *Walker) Walk(b Bucket, entry func(Entry) error) error {
	outer := w.entry // entry may walk in turn
	w.entry = entry
	defer func() { w.entry = outer }()
	if b.root != 0 {
		return w.page(b.root, nil, nil, 0)
	}
	h, err := w.f.header(b.off)
	if err == nil && h.flags != flagLeaf {
		err = errors.New("a bucket within a leaf is no leaf itself")
	}
	page := uint64(b.off / w.f.pageSize)
	if err != nil {
		w.damage(Damage{Kind: KindLeaf, Page: page, Reason: err.Error()})
		return nil
	}
	if h.count == 0 && b.size > headerSize {
		w.damage(Damage{Kind: KindLeaf, Page: page, Reason: "a bucket within a leaf holds something, and says that it has no elements"})
		return nil
	}
	return w.leaf(page, b.off, b.off+b.size, h, nil, nil)
}

// page walks the tree below a page, whose keys are to lie in [low, high).
func (w *Walker) page(no uint64, low, high []byte, depth int) error {
	f := w.f
	bad := func(kind Kind, format string, args ...any) {
		w.damage(Damage{
			Kind: kind, Page: no, Reason: fmt.Sprintf(format, args...),
			Low: bytes.Clone(low), High: bytes.Clone(high),
		})
	}
	if no < 2 || no >= f.Pages() {
		bad(KindPage, "there is no such page, the file has %d", f.Pages())
		return nil
	}
	if depth > maxDepth {
		bad(KindPage, "the tree is too deep")
		return nil
	}
	off := int64(no) * f.pageSize
	h, err := f.header(off)
	if err != nil {
		bad(KindPage, "%v", err)
		return nil
	}
	kind := KindLeaf
	switch h.flags {
	case flagLeaf:
	case flagBranch:
		kind = KindBranch
	default:
		bad(KindPage, "it is neither a branch nor a leaf")
		return nil
	}
	if h.id != no {
		bad(kind, "it takes itself for page %d", h.id)
		return nil
	}
	run := uint64(h.overflow) + 1
	if n, ok := f.run(off, h); ok && n != run {
		w.damage(Damage{Kind: kind, Page: no, Whole: true, Reason: fmt.Sprintf(
			"it says that it goes on over %d pages, and its content over %d", h.overflow, n-1)})
		run = n
	}
	if run > f.Pages()-no {
		if kind == KindBranch || f.Pages()-no < 1 {
			bad(kind, "it goes on beyond the end of the file")
			return nil
		}
		// A leaf cut by the end of the file still has what lies before.
		run = f.Pages() - no
	}
	end := min(off+int64(run)*f.pageSize, f.size)
	if first, err := w.firstKey(off, end, h); err == nil && first != nil && (bytes.Compare(first, low) < 0 && len(low) > 0 || high != nil && bytes.Compare(first, high) >= 0) {
		bad(kind, "it holds keys of another page")
		return nil
	}
	if !w.see(no, run) {
		bad(kind, "it belongs to another page already")
		return nil
	}
	if kind == KindLeaf {
		return w.leaf(no, off, end, h, low, high)
	}
	return w.branch(no, off, end, h, low, high, depth)
}

// run returns how many pages a branch or leaf takes by its content, which is in
// the order of its elements, one behind the other; not ok if that is not so.
func (f *File) run(off int64, h header) (pages uint64, ok bool) {
	if h.count == 0 {
		return 1, h.flags == flagLeaf
	}
	elements, err := f.table(off, f.size, h, nil)
	if err != nil {
		return 0, false
	}
	end := int64(len(elements))
	for i := range h.count {
		e := elements[i*elementSize:]
		u32 := func(at int) int64 { return int64(binary.NativeEndian.Uint32(e[at:])) }
		pos, size := u32(0), u32(4)
		if h.flags == flagLeaf {
			pos, size = u32(4), u32(8)+u32(12)
		}
		if int64(i)*elementSize+pos != end {
			return 0, false
		}
		end += size
	}
	return uint64((headerSize + end + f.pageSize - 1) / f.pageSize), true
}

// firstKey returns the first key of a branch or leaf, nil if it has none.
func (w *Walker) firstKey(off, end int64, h header) ([]byte, error) {
	if h.count == 0 {
		return nil, nil
	}
	var b [elementSize]byte
	at := off + headerSize
	if at+elementSize > end {
		return nil, io.ErrUnexpectedEOF
	}
	if err := w.f.read(b[:], at); err != nil {
		return nil, err
	}
	pos, ksize := int64(binary.NativeEndian.Uint32(b[:])), int64(binary.NativeEndian.Uint32(b[4:]))
	if h.flags == flagLeaf {
		pos, ksize = int64(binary.NativeEndian.Uint32(b[4:])), int64(binary.NativeEndian.Uint32(b[8:]))
	}
	if ksize == 0 || ksize > maxKey || at+pos+ksize > end {
		return nil, errors.New("its first key lies outside")
	}
	return w.f.ReadAt(nil, at+pos, int(ksize))
}

// table reads the elements of a page that goes from off to end.
func (f *File) table(off, end int64, h header, buf []byte) ([]byte, error) {
	n := int64(h.count) * elementSize
	if off+headerSize+n > end {
		return buf, fmt.Errorf("it says that it has %d elements, and ends before", h.count)
	}
	return f.ReadAt(buf, off+headerSize, int(n))
}

// fits reports whether the number of elements is right: the content of the first,
// whose place stands at in it, begins where the elements end.
func (h *header) fits(elements []byte, at int) bool {
	return int64(binary.NativeEndian.Uint32(elements[at:])) == int64(h.count)*elementSize
}

func (w *Walker) branch(no uint64, off, end int64, h header, low, high []byte, depth int) error {
	report := func(reason string) {
		w.damage(Damage{Kind: KindBranch, Page: no, Reason: reason, Low: bytes.Clone(low), High: bytes.Clone(high)})
	}
	elements, err := w.f.table(off, end, h, nil)
	if err == nil && h.count == 0 {
		err = errors.New("it has no elements")
	}
	if err != nil {
		report(err.Error())
		return nil
	}
	type child struct {
		key  []byte
		page uint64
	}
	children := make([]child, 0, h.count)
	used, sound := int64(0), h.fits(elements, 0)
	for i := range h.count {
		e := elements[i*elementSize:]
		pos, ksize := int64(binary.NativeEndian.Uint32(e)), int64(binary.NativeEndian.Uint32(e[4:]))
		c := child{page: binary.NativeEndian.Uint64(e[8:])}
		at := off + headerSize + int64(i)*elementSize + pos
		used += ksize
		if pos < int64(h.count-i)*elementSize || ksize == 0 || ksize > maxKey || at+ksize > end || used > end-off {
			sound = false
		} else if c.key, err = w.f.ReadAt(nil, at, int(ksize)); err != nil {
			c.key, sound = nil, false
		}
		if n := len(children); n > 0 && c.key != nil && bytes.Compare(children[n-1].key, c.key) >= 0 {
			sound = false
		}
		children = append(children, c)
	}
	if !sound {
		// Which keys are whose cannot be told: the children may still do.
		report("its keys make no sense")
	}
	for i, c := range children {
		from, to := low, high
		if sound {
			if i > 0 || low != nil {
				from = c.key
			}
			if i+1 < len(children) {
				to = children[i+1].key
			}
		}
		if err := w.page(c.page, from, to, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (w *Walker) leaf(no uint64, off, end int64, h header, low, high []byte) error {
	outside := ""
	bad, err := w.f.leaf(no, off, end, h, func(e Entry) error {
		if bytes.Compare(e.Key, low) < 0 || high != nil && bytes.Compare(e.Key, high) >= 0 {
			outside = "it holds a key that belongs on another page"
		}
		return w.entry(e)
	})
	if bad == "" {
		bad = outside
	}
	if bad != "" {
		w.damage(Damage{Kind: KindLeaf, Page: no, Reason: bad, Low: bytes.Clone(low), High: bytes.Clone(high)})
	}
	return err
}

// leaf calls entry for what a leaf holds. It says what makes no sense.
func (f *File) leaf(no uint64, off, end int64, h header, entry func(Entry) error) (bad string, err error) {
	elements, err := f.table(off, end, h, nil)
	if err != nil {
		return err.Error(), nil
	}
	if h.count > 0 && !h.fits(elements, 4) {
		bad = "it has another number of elements than it says"
	}
	used := int64(0)
	var last, key []byte
	for i := range h.count {
		e := elements[i*elementSize:]
		u32 := func(at int) int64 { return int64(binary.NativeEndian.Uint32(e[at:])) }
		flags, pos, ksize, vsize := u32(0), u32(4), u32(8), u32(12)
		at := off + headerSize + int64(i)*elementSize + pos
		if flags > 1 || pos < int64(h.count-i)*elementSize || ksize == 0 || ksize > maxKey || at+ksize+vsize > end || used+ksize+vsize > end-off {
			bad = fmt.Sprintf("element %d makes no sense", i)
			continue
		}
		used += ksize + vsize
		if key, err = f.ReadAt(key, at, int(ksize)); err != nil {
			bad = err.Error()
			continue
		}
		if last != nil && bytes.Compare(last, key) >= 0 {
			bad = fmt.Sprintf("the key of element %d is out of order", i)
		}
		last = append(last[:0], key...)
		if err := entry(Entry{Page: no, Key: key, IsBucket: flags == 1, f: f, off: at + ksize, size: int(vsize)}); err != nil {
			return bad, err
		}
	}
	return bad, nil
}

// Scan calls entry for whatever looks like the entry of a leaf anywhere in the
// file, used or free, until it returns an error, which Scan returns; buckets
// are not among them. What a page went on to say in its overflow pages may be
// another's by now. progress, if not nil, is called now and then with how many
// octets have been gone through since the last call.
func (f *File) Scan(ctx context.Context, progress func(int), entry func(Entry) error) error {
	f.scanned = 0
	errSpent := errors.New("spent")
	pages := f.Pages()
	since := 0
	for no := uint64(2); no < pages; no++ {
		if since += int(f.pageSize); since >= 1<<20 {
			if progress != nil {
				progress(since)
			}
			since = 0
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		off := int64(no) * f.pageSize
		h, err := f.header(off)
		if err != nil || h.flags != flagLeaf || h.count == 0 {
			continue
		}
		run := uint64(h.overflow) + 1
		if n, ok := f.run(off, h); ok {
			run = n
		}
		run = min(run, pages-no)
		end := min(off+int64(run)*f.pageSize, f.size)
		_, err = f.leaf(no, off, end, h, func(e Entry) error {
			if f.scanned += int64(len(e.Key) + elementSize); f.scanned > scanFactor*f.size+1<<20 {
				return errSpent
			}
			if e.IsBucket {
				// Small ones are within, and nowhere else.
				return f.inline(e, entry)
			}
			return entry(e)
		})
		if err != nil {
			if errors.Is(err, errSpent) {
				return fmt.Errorf("pages lie about each other, given up at page %d", no)
			}
			return err
		}
	}
	return nil
}

func (f *File) inline(e Entry, entry func(Entry) error) error {
	b, err := f.Bucket(e)
	if err != nil || b.root != 0 {
		return nil
	}
	h, err := f.header(b.off)
	if err != nil || h.flags != flagLeaf || h.count == 0 {
		return nil
	}
	_, err = f.leaf(e.Page, b.off, b.off+b.size, h, func(e Entry) error {
		if f.scanned += int64(len(e.Key) + elementSize); f.scanned > scanFactor*f.size+1<<20 || e.IsBucket {
			return nil
		}
		return entry(e)
	})
	return err
}

// FreeCount returns how many pages the list of free pages has in the state that
// m is the meta page of, without reading it all. The error is a *Damage.
func (f *File) FreeCount(m Meta) (uint64, error) {
	n, _, err := f.freeCount(m)
	return n, err
}

// freeCount returns also where the list begins.
func (f *File) freeCount(m Meta) (n uint64, at int64, err error) {
	bad := func(format string, args ...any) error {
		return &Damage{Kind: KindFreelist, Page: m.Freelist, Reason: fmt.Sprintf(format, args...)}
	}
	if m.Freelist < 2 || m.Freelist >= f.Pages() {
		return 0, 0, bad("there is no such page, the file has %d", f.Pages())
	}
	off := int64(m.Freelist) * f.pageSize
	h, err := f.header(off)
	if err != nil {
		return 0, 0, bad("%v", err)
	}
	if h.flags != flagFreelist || h.id != m.Freelist {
		return 0, 0, bad("it is none")
	}
	end := min(off+(int64(h.overflow)+1)*f.pageSize, f.size)
	at, n = off+headerSize, uint64(h.count)
	if h.count == 0xFFFF {
		var b [8]byte
		if err := f.read(b[:], at); err != nil {
			return 0, 0, bad("%v", err)
		}
		at, n = at+8, binary.NativeEndian.Uint64(b[:])
	}
	if n > uint64(max(end-at, 0))/8 {
		return 0, 0, bad("it says that it names %d pages, and ends before", n)
	}
	return n, at, nil
}

// Freelist reads the list of free pages of the state that m is the meta page
// of. The error is a *Damage.
func (f *File) Freelist(m Meta) ([]uint64, error) {
	bad := func(format string, args ...any) error {
		return &Damage{Kind: KindFreelist, Page: m.Freelist, Reason: fmt.Sprintf(format, args...)}
	}
	n, at, err := f.freeCount(m)
	if err != nil {
		return nil, err
	}
	b, err := f.ReadAt(nil, at, int(n)*8)
	if err != nil {
		return nil, bad("%v", err)
	}
	ids := make([]uint64, n)
	for i := range ids {
		ids[i] = binary.NativeEndian.Uint64(b[8*i:])
		if ids[i] < 2 || ids[i] >= m.HighWater || i > 0 && ids[i] <= ids[i-1] {
			return nil, bad("it names page %d, out of order or out of range", ids[i])
		}
	}
	return ids, nil
}

// PageInfo is what a page says of itself.
type PageInfo struct {
	Page     uint64
	Kind     Kind // KindMeta, KindBranch, KindLeaf, KindFreelist, or KindPage: nothing that makes sense
	Overflow uint32
}

// Info reads the header of a page.
func (f *File) Info(no uint64) PageInfo {
	i := PageInfo{Page: no, Kind: KindPage}
	if no >= f.Pages() {
		return i
	}
	h, err := f.header(int64(no) * f.pageSize)
	if err != nil || h.id != no {
		return i
	}
	switch h.flags {
	case flagBranch:
		i.Kind = KindBranch
	case flagLeaf:
		i.Kind = KindLeaf
	case flagMeta:
		i.Kind = KindMeta
	case flagFreelist:
		i.Kind = KindFreelist
	default:
		return i
	}
	i.Overflow = h.overflow
	return i
}
