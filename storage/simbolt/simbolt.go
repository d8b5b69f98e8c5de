// Package simbolt cuts the power under real files, for tests: the databases
// that bbolt maps into memory, and what stands beside them. (The log, which
// needs no real files, is tested on simfs.)
//
// A Disk watches the files below one directory through the seam in
// storage/internal/boltfile. It keeps two images of each: what the medium is
// sure to have, and what the operating system shows. bbolt commits in four
// steps (pages, fdatasync, meta page, fdatasync), so a power cut within a commit
// leaves the image before it with any subset of the pages that it wrote, in any
// order, but with the meta page only if all others are there:
//
//	before ── pages ── fdatasync ── meta ── fdatasync ── after
//	       any subset            all of them,
//	                             with or without meta
//
// A process that is killed leaves two different images: its successor is shown
// what was written, and what of that was synced is all that the medium has for
// sure. What could not be synced no later sync writes, but the successor is
// shown it, until it drops its cache (boltfile.Refresh).
//
// A commit that does not sync (bbolt's NoSync) has no such order: any subset of
// everything written since the last sync is left, meta pages included. Likewise
// of the renames, removals and creations since a directory was last synced.
// Files that are changed past the seam are taken for durable at once.
package simbolt

import (
	"bytes"
	"encoding/binary"
	"hash/fnv"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"go.etcd.io/bbolt"

	"petiole/storage/internal/boltfile"
)

// Page is the unit in which bbolt writes and in which a power cut decides, in
// octets.
const Page = 4096

// Fault is how an update fails.
type Fault int

// The faults that FailUpdate knows.
const (
	// FailWrite lets the first write fail: the file is as before.
	FailWrite Fault = iota
	// FailSync lets the last fdatasync fail: whoever reads the file sees the
	// new contents, and the medium may never get them.
	FailSync
)

// Disk is the simulated medium of the files below a directory.
type Disk struct {
	dir string

	mu      sync.Mutex
	rng     *rand.Rand
	off     bool
	names   map[string]*file // as the operating system sees them
	kept    map[string]*file // as the medium holds them
	ops     map[string][]dirOp
	renamed map[string]*file    // by the name that they had
	open    map[*bbolt.DB]*file // which bbolt knows by the name that they had when opened
	dirs    map[string]bool     // that have had files
	removed map[string]bool     // directories, while their parent is not synced
	past    map[string][]byte   // files changed past the seam, when the power failed
	scratch []byte
	updates int // since New
	cutAt   int // updates at which to cut
	onCut   func()
	failAt  int
	failHow Fault
	failErr error
	full    error // every update fails with it
	noSync  bool
}

// dirOp sets names (nil: removed) in one step.
type dirOp []entry

type entry struct {
	name string
	f    *file
}

// file is one file, under whatever names. Images are never changed.
type file struct {
	durable *image // as far as the medium has it for sure
	cur     *image // as the operating system shows it
	busy    bool   // an update is under way
	dirty   bool   // written to, and not synced
	failed  bool   // the sync of what cur has beyond durable has failed
	cut     bool   // and the power failed meanwhile
	stale   bool   // changed after the power failed
}

type image struct {
	size  int64
	meta  int      // pages, at the beginning, that are bbolt's two meta pages
	pages [][]byte // up to the last one in use
}

// registry finds the Disk of a file.
var registry struct {
	sync.RWMutex
	disks []*Disk
}

// New watches the files below dir, which must exist and be empty, until Close.
// All choices come from the seed.
func New(dir string, seed uint64) *Disk {
	d := &Disk{
		dir: filepath.Clean(dir), rng: rand.New(rand.NewPCG(seed, 0x51b0)),
		names: map[string]*file{}, kept: map[string]*file{}, ops: map[string][]dirOp{},
		dirs: map[string]bool{}, removed: map[string]bool{}, renamed: map[string]*file{}, open: map[*bbolt.DB]*file{},
	}
	registry.Lock()
	defer registry.Unlock()
	if len(registry.disks) == 0 {
		boltfile.SetTap(tap{})
	}
	registry.disks = append(registry.disks, d)
	return d
}

// Close ends watching. The files stay.
func (d *Disk) Close() {
	registry.Lock()
	defer registry.Unlock()
	registry.disks = slices.DeleteFunc(registry.disks, func(o *Disk) bool { return o == d })
	if len(registry.disks) == 0 {
		boltfile.SetTap(nil)
	}
}

func find(path string) *Disk {
	registry.RLock()
	defer registry.RUnlock()
	for _, d := range registry.disks {
		if rest, ok := strings.CutPrefix(path, d.dir); ok && (rest == "" || rest[0] == filepath.Separator) {
			return d
		}
	}
	return nil
}

// Updates returns how many transactions have been committed or tried.
func (d *Disk) Updates() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.updates
}

// CutAtUpdate makes the power fail in the middle of the nth update from now
// (from 1). onCut is called when that update begins; it must make everything
// else fail that is on the same power. n 0 takes the order back.
func (d *Disk) CutAtUpdate(n int, onCut func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cutAt, d.onCut = 0, onCut
	if n > 0 {
		d.cutAt = d.updates + n
	}
}

// FailUpdate makes the nth update from now (from 1) fail with err. n 0 takes the
// order back.
func (d *Disk) FailUpdate(n int, how Fault, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failAt, d.failHow, d.failErr = 0, how, err
	if n > 0 {
		d.failAt = d.updates + n
	}
}

// SetFull makes every update fail with err, having changed nothing, until it is
// called with nil.
func (d *Disk) SetFull(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.full = err
}

// SetNoSync makes commits as if bbolt did not sync: for tests of tests.
func (d *Disk) SetNoSync(v bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.noSync = v
}

// Off cuts the power, or ends the process: nothing that happens from now on
// counts, until PowerCut or Kill. It may be called from within any operation.
func (d *Disk) Off() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.off {
		return
	}
	d.off = true
	for name, f := range d.names {
		f.cut = f.busy
		if f.dirty { // written, and about to be synced
			if im, err := d.capture(name, f.cur, false); err == nil {
				f.cur = im
			}
		}
	}
	// What nobody told us of stays as it is now.
	d.past = map[string][]byte{}
	d.walk(func(path string) {
		if d.names[path] == nil {
			if b, err := os.ReadFile(path); err == nil { // or it has just gone
				d.past[path] = b
			}
		}
	})
}

func (d *Disk) walk(fn func(path string)) {
	_ = filepath.WalkDir(d.dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			fn(path)
		}
		return nil
	})
}

// PowerCut leaves in the directory what is found when the power is back. Nothing
// in it may be open any more. The Disk goes on watching.
func (d *Disk) PowerCut() error {
	d.Off()
	d.mu.Lock()
	defer d.mu.Unlock()
	odds := func() float64 { return []float64{0, 1, 0.5, 0.1, 0.9}[d.rng.IntN(5)] }
	dirs := make([]string, 0, len(d.ops))
	for dir := range d.ops {
		dirs = append(dirs, dir)
	}
	slices.Sort(dirs)
	for _, dir := range dirs {
		ops := d.ops[dir]
		p, prefix := odds(), d.rng.IntN(2) == 0
		if prefix {
			ops = ops[:d.rng.IntN(len(ops)+1)]
		}
		for _, op := range ops {
			if prefix || d.rng.Float64() < p {
				apply(d.kept, op)
			}
		}
	}
	clear(d.ops)
	for _, name := range sorted(d.kept) {
		f := d.kept[name]
		f.durable, f.failed = d.settle(f, odds()), false
		if f.cur != f.durable {
			f.cur, f.stale = f.durable, true
		}
	}
	clear(d.names)
	for name, f := range d.kept {
		d.names[name] = f
	}
	return d.rebuild()
}

// Kill leaves in the directory what the next process finds after the one that
// used it was killed: what it had written, whether or not it is on the medium.
func (d *Disk) Kill() error {
	d.Off()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rebuild()
}

// settle decides what of the changes since the last sync the medium has.
func (d *Disk) settle(f *file, odds float64) *image {
	if f.cur == f.durable {
		return f.durable
	}
	return d.mix(f.durable, f.cur, func(int) bool { return d.rng.Float64() < odds })
}

// mix returns a with those pages of b that pick chooses among the different
// ones. The length is that of b, which bbolt syncs before it writes.
func (d *Disk) mix(a, b *image, pick func(page int) bool) *image {
	m := &image{size: b.size, meta: b.meta}
	for i := range max(len(a.pages), len(b.pages)) {
		pa, pb := a.page(i), b.page(i)
		if !same(pa, pb) && pick(i) {
			pa = pb
		}
		m.pages = append(m.pages, pa)
	}
	return m
}

func (im *image) page(i int) []byte {
	if im == nil || i >= len(im.pages) {
		return nil
	}
	return im.pages[i]
}

func same(a, b []byte) bool {
	if len(a) > 0 && len(b) > 0 && &a[0] == &b[0] {
		return true
	}
	return bytes.Equal(a, b)
}

func sorted(m map[string]*file) []string {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// rebuild makes the directory show d.names, and what was past the seam.
func (d *Disk) rebuild() error {
	want := map[string]bool{}
	for _, name := range sorted(d.names) {
		want[name] = true
		f := d.names[name]
		if _, err := os.Stat(name); err != nil || f.stale {
			if err := f.cur.write(name); err != nil {
				return err
			}
		}
	}
	for name, b := range d.past {
		want[name] = true
		if err := os.WriteFile(name, b, 0o600); err != nil {
			return err
		}
	}
	d.walk(func(path string) {
		if !want[path] {
			_ = os.Remove(path) // a test's directory: a failure shows soon
		}
	})
	for _, f := range d.names {
		f.busy, f.cut, f.stale, f.dirty = false, false, false, false
		// After a kill f.failed stays: what could not be synced is shown, and no
		// later sync will write it.
	}
	clear(d.renamed)
	clear(d.open)
	for dir := range d.removed {
		if d.rng.IntN(2) == 0 {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return err
			}
		}
	}
	clear(d.removed)
	d.past, d.off, d.cutAt, d.failAt, d.full = nil, false, 0, 0, nil
	return nil
}

func (im *image) write(name string) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	if err := os.Remove(name); err != nil && !os.IsNotExist(err) {
		return err
	}
	out, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	for i, p := range im.pages {
		if _, err := out.WriteAt(p, int64(i)*Page); err != nil {
			return err
		}
	}
	return out.Truncate(im.size)
}

// File is a file that the medium holds.
type File struct {
	Name string
	Size int64 // octets up to the last page in use
}

// Files lists the files watched, by name.
func (d *Disk) Files() []File {
	d.mu.Lock()
	defer d.mu.Unlock()
	var list []File
	for _, name := range sorted(d.names) {
		im := d.names[name].cur
		list = append(list, File{name, min(int64(len(im.pages))*Page, im.size)})
	}
	return list
}

// Flip inverts one bit of a file on the medium; nobody may have it open.
func (d *Disk) Flip(name string, bit int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.names[name]
	page, at := int(bit/8/Page), bit/8%Page
	if f == nil || page >= len(f.cur.pages) || at >= int64(len(f.cur.pages[page])) {
		return &fs.PathError{Op: "flip", Path: name, Err: fs.ErrNotExist}
	}
	flip := func(im *image) *image {
		if page >= len(im.pages) {
			return im
		}
		n := &image{im.size, im.meta, slices.Clone(im.pages)}
		n.pages[page] = bytes.Clone(im.pages[page])
		n.pages[page][at] ^= 1 << (bit % 8)
		return n
	}
	if f.durable == f.cur {
		f.cur = flip(f.cur)
		f.durable = f.cur
	} else {
		f.cur, f.durable = flip(f.cur), flip(f.durable)
	}
	return f.cur.write(name)
}

func apply(m map[string]*file, op dirOp) {
	for _, e := range op {
		if e.f == nil {
			delete(m, e.name)
		} else {
			m[e.name] = e.f
		}
	}
}

func (d *Disk) dirOp(dir string, op dirOp) {
	d.dirs[dir] = true
	delete(d.removed, dir)
	apply(d.names, op)
	d.ops[dir] = append(d.ops[dir], op)
}

// capture reads a file, sharing with prev the pages that are as before.
func (d *Disk) capture(path string, prev *image, bolt bool) (*image, error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	fi, err := in.Stat()
	if err != nil {
		return nil, err
	}
	n := fi.Size()
	meta := 0
	if bolt {
		used, pageSize := used(in)
		if used > 0 {
			n, meta = min(n, used), int(2*pageSize/Page)
		}
	}
	if int64(cap(d.scratch)) < n {
		d.scratch = make([]byte, 2*n)
	}
	b := d.scratch[:n]
	if _, err := io.ReadFull(io.NewSectionReader(in, 0, n), b); err != nil {
		return nil, err
	}
	im := &image{size: fi.Size(), meta: meta, pages: make([][]byte, 0, (n+Page-1)/Page)}
	for i := 0; len(b) > 0; i++ {
		p := b[:min(Page, len(b))]
		b = b[len(p):]
		if old := prev.page(i); bytes.Equal(old, p) {
			im.pages = append(im.pages, old)
		} else {
			im.pages = append(im.pages, bytes.Clone(p))
		}
	}
	return im, nil
}

// used returns how long the part of a bbolt file is that the newer of its meta
// pages knows of, 0 if neither is intact, and the size of bbolt's pages.
func used(in *os.File) (end, pageSize int64) {
	var best uint64
	var b [80]byte
	for at, i := int64(0), 0; i < 2; i++ {
		if _, err := in.ReadAt(b[:], at); err != nil {
			return 0, 0
		}
		// A page header of 16 octets; magic, version, page size, flags, root
		// (page, sequence), freelist, end, transaction, checksum.
		h := fnv.New64a()
		h.Write(b[16:72])
		if h.Sum64() == binary.NativeEndian.Uint64(b[72:]) {
			pageSize = int64(binary.NativeEndian.Uint32(b[24:]))
			if txid := binary.NativeEndian.Uint64(b[64:]); txid >= best {
				best, end = txid, int64(binary.NativeEndian.Uint64(b[56:]))*pageSize
			}
		}
		if at = pageSize; at == 0 {
			at = Page
		}
	}
	return end, pageSize
}

// Moved says that a directory was renamed, past the seam: it is taken for
// durable at once.
func (d *Disk) Moved(oldname, newname string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	move := func(name string) string {
		if rest, ok := strings.CutPrefix(name, oldname+string(filepath.Separator)); ok {
			return filepath.Join(newname, rest)
		}
		if name == oldname {
			return newname
		}
		return name
	}
	if d.off {
		for name, f := range d.names {
			f.stale = f.stale || move(name) != name
		}
		return
	}
	for _, m := range []map[string]*file{d.names, d.kept} {
		for _, name := range sorted(m) {
			if to := move(name); to != name {
				m[to] = m[name]
				delete(m, name)
			}
		}
	}
	for dir, ops := range d.ops {
		for _, op := range ops {
			for i := range op {
				op[i].name = move(op[i].name)
			}
		}
		if to := move(dir); to != dir {
			d.ops[to] = ops
			delete(d.ops, dir)
		}
	}
}

// tap connects the seam with the registry.
type tap struct{}

func (tap) Update(db *bbolt.DB, fn func(*bbolt.Tx) error) error {
	if d := find(db.Path()); d != nil {
		return d.update(db, fn)
	}
	return db.Update(fn)
}

func (d *Disk) update(db *bbolt.DB, fn func(*bbolt.Tx) error) error {
	d.mu.Lock()
	d.updates++
	off := d.off
	if !off && d.cutAt != 0 && d.updates >= d.cutAt {
		d.cutAt = 0
		onCut := d.onCut
		d.of(db).busy = true
		d.mu.Unlock()
		if onCut != nil {
			onCut()
		}
		d.Off()
		d.mu.Lock()
	}
	var fail error
	how := FailWrite
	switch {
	case off:
	case d.full != nil:
		fail = d.full
	case d.failAt != 0 && d.updates >= d.failAt:
		d.failAt = 0
		fail, how = d.failErr, d.failHow
	}
	f := d.of(db)
	if off {
		f.stale = true
	} else {
		f.busy = true
	}
	d.mu.Unlock()

	var err error
	if fail != nil && how == FailWrite {
		err = try(db, fn)
		if err == nil {
			err = &fs.PathError{Op: "write", Path: db.Path(), Err: fail}
		}
	} else {
		err = db.Update(fn)
	}
	if off {
		return err
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	f.busy = false
	noSync := db.NoSync || d.noSync
	path := d.nameOf(f)
	if path == "" {
		return err // replaced meanwhile
	}
	after, cerr := d.capture(path, f.cur, true)
	if cerr != nil {
		return cerr
	}
	switch {
	case f.cut:
		// The power failed meanwhile, or the process was killed.
		f.cut, f.stale = false, true
		f.cur, f.durable = d.within(f.durable, f.cur, after, noSync)
		return err
	case fail != nil && how == FailSync:
		// The sync before that of the meta page did not fail.
		f.durable = d.mix(f.cur, after, func(page int) bool { return page >= after.meta })
		f.cur, f.failed = after, true
		if err == nil {
			err = &fs.PathError{Op: "fdatasync", Path: db.Path(), Err: fail}
		}
		return err
	}
	f.cur = after
	if err == nil && !noSync {
		f.durable = after
	}
	return err
}

// within returns what the operating system would show, and what the medium has
// for sure, when a commit that leads from before to after was cut short.
func (d *Disk) within(durable, before, after *image, noSync bool) (cur, sure *image) {
	meta := func(page int) bool { return page < after.meta }
	odds := d.rng.Float64()
	if noSync {
		return d.mix(before, after, func(int) bool { return d.rng.Float64() < odds }), durable
	}
	synced := d.mix(before, after, func(i int) bool { return !meta(i) })
	switch d.rng.IntN(4) {
	case 0: // some pages are written
		return d.mix(before, after, func(i int) bool { return !meta(i) && d.rng.Float64() < odds }), durable
	case 1: // all pages, which are synced
		return synced, synced
	case 2: // the meta page as well, which is not synced
		return after, synced
	}
	return before, durable // nothing yet
}

// try runs fn in a transaction that is taken back.
func try(db *bbolt.DB, fn func(*bbolt.Tx) error) error {
	tx, err := db.Begin(true)
	if err != nil {
		return err
	}
	err = fn(tx)
	if rerr := tx.Rollback(); err == nil {
		err = rerr
	}
	return err
}

// of returns the file of a database.
func (d *Disk) of(db *bbolt.DB) *file {
	f := d.open[db]
	if f == nil {
		if f = d.names[db.Path()]; f == nil {
			if _, err := os.Stat(db.Path()); err != nil {
				f = d.renamed[db.Path()] // since it was opened
			}
		}
		if f == nil {
			f = d.file(db.Path())
		}
		d.open[db] = f
	}
	return f
}

// nameOf returns the name of a file; "" if it has none any more.
func (d *Disk) nameOf(f *file) string {
	for name, o := range d.names {
		if o == f {
			return name
		}
	}
	return ""
}

// file returns the file at path, which the operating system has just created if
// it is not known yet.
func (d *Disk) file(path string) *file {
	f := d.names[path]
	if f == nil {
		empty := &image{}
		f = &file{durable: empty, cur: empty}
		if !d.off {
			d.dirOp(filepath.Dir(path), dirOp{{path, f}})
		}
	}
	return f
}

func (tap) Before(op boltfile.Op, name string) error {
	if d := find(name); d != nil && op == boltfile.OpSync {
		d.mu.Lock()
		defer d.mu.Unlock()
		if !d.off {
			d.file(name).dirty = true
		}
	}
	return nil
}

func (tap) Done(op boltfile.Op, name, newname string) {
	d := find(name)
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.off {
		// The names have to be put back.
		for _, name := range []string{name, newname} {
			if f := d.names[name]; f != nil {
				f.stale = true
			}
		}
		return
	}
	dir := filepath.Dir(name)
	switch op {
	case boltfile.OpRename:
		f := d.names[name]
		if f == nil {
			// Nothing has been written to it through the seam.
			im, err := d.capture(newname, nil, false)
			if err != nil {
				return
			}
			f = &file{durable: im, cur: im}
		}
		d.dirOp(dir, dirOp{{name, nil}, {newname, f}})
		d.renamed[name] = f
	case boltfile.OpRemove:
		if d.names[name] != nil {
			d.dirOp(dir, dirOp{{name, nil}})
		} else if d.dirs[name] {
			d.removed[name] = true
		}
	case boltfile.OpSyncDir:
		for _, op := range d.ops[name] {
			apply(d.kept, op)
		}
		delete(d.ops, name)
		for gone := range d.removed {
			if filepath.Dir(gone) == name {
				delete(d.removed, gone)
				// With the directory its entries are gone for good.
				for _, op := range d.ops[gone] {
					apply(d.kept, op)
				}
				delete(d.ops, gone)
			}
		}
	case boltfile.OpRefresh:
		f := d.names[name]
		if f == nil {
			return
		}
		if !f.failed { // what was not synced before is now
			f.durable = f.cur
			return
		}
		f.cur, f.failed = f.durable, false
		if err := f.cur.write(name); err != nil {
			panic(err) // a test's directory
		}
	case boltfile.OpSync:
		f := d.file(name)
		if im, err := d.capture(name, f.cur, false); err == nil {
			f.cur, f.durable, f.dirty = im, im, false
		}
	}
}
