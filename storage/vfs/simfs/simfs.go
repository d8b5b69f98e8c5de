// Package simfs is a disk for tests: it keeps files in memory, forgets what was
// not synced when the power is cut, fails when told to, and flips bits. All
// choices come from a seed, so that a failure can be repeated.
//
// What a power cut leaves is as bad as a real disk could make it. Of the bytes
// written since a file's last sync any subset of 512-byte sectors may be kept,
// in no order; changes of the length likewise; of the directory operations
// since the last SyncDir any subset or a prefix. A sync that fails leaves the
// file's contents readable, but what it did not write will never be written by
// a later sync, as on Linux.
//
// Beyond that a test may fill the disk (SetCapacity), let operations fail, fall
// short or take time (Inject, SetHook), let power cuts tear sectors (TearSectors),
// and do damage to what the medium holds (Flip, FlipAny, Scramble, Lose).
package simfs

import (
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"path"
	"sort"
	"strings"
	"sync"
	"syscall"
	"time"

	"petiole/storage/vfs"
)

// ErrPowerOff is what every operation reports after the power was cut.
var ErrPowerOff = errors.New("power is off")

// Sector is what the disk writes at once, in bytes.
const Sector = 512

// Op is a kind of operation that changes the disk.
type Op int

// The operations that a Hook sees.
const (
	OpCreate Op = iota
	OpWrite
	OpTruncate
	OpPreallocate
	OpSync // Sync and Datasync
	OpRename
	OpRemove
	OpSyncDir
	OpRead // seen by faults only, not by a Hook
	OpAny  // in a Fault: all of the above but OpRead
)

// Hook is called before each operation, without locks held, by whoever uses the
// disk, hence also by several goroutines at once; it may block. An error fails
// the operation: a write may have written some of its sectors then, a sync some
// of what it had to.
type Hook func(op Op, name string) error

// FS is a simulated disk. It implements vfs.FS.
type FS struct {
	mu    sync.Mutex
	rng   *rand.Rand
	off   bool
	hook  Hook
	size  int64   // capacity; 0: no limit
	tear  float64 // odds that a sector not synced is half written after a cut
	rules []*Fault
	dirs  map[string]bool
	names map[string]*inode // as the operating system sees them
	kept  map[string]*inode // as the medium holds them
	ops   map[string][]dirOp
	locks map[string]bool
	files map[*file]bool // open
}

// dirOp sets names (nil: removed) in one step.
type dirOp []entry

type entry struct {
	name string
	node *inode
}

// inode is a file. stable is the medium's contents; pending has the changes
// since the last sync in order.
type inode struct {
	cur     []byte
	stable  []byte
	pending []change
}

// change is a write of data at off or, with nil data, a new length.
type change struct {
	off  int64
	data []byte
}

var _ vfs.FS = (*FS)(nil)

// New returns an empty disk with the root directory.
func New(seed uint64) *FS {
	return &FS{
		rng:  rand.New(rand.NewPCG(seed, 0x9e3779b97f4a7c15)),
		dirs: map[string]bool{"/": true, ".": true}, names: map[string]*inode{}, kept: map[string]*inode{},
		ops: map[string][]dirOp{}, locks: map[string]bool{}, files: map[*file]bool{},
	}
}

// SetHook installs h; nil removes it.
func (d *FS) SetHook(h Hook) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hook = h
}

// FailNth returns a Hook that fails the nth (from 1) operation of a kind, and
// no other, with err.
func FailNth(op Op, n int, err error) Hook {
	var mu sync.Mutex
	return func(o Op, _ string) error {
		mu.Lock()
		defer mu.Unlock()
		if o != op {
			return nil
		}
		if n--; n == 0 {
			return err
		}
		return nil
	}
}

// CutAtNth makes the power fail at the nth operation from now on (from 1):
// that one and all later ones fail, until PowerCut says what is left.
func (d *FS) CutAtNth(n int) {
	d.SetHook(func(Op, string) error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if n--; n <= 0 {
			d.off = true
			return ErrPowerOff
		}
		return nil
	})
}

// PowerCut turns d off for good and returns the disk as found when the power
// is back.
func (d *FS) PowerCut() *FS {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.off = true
	n := d.successor()
	for dir := range d.dirs {
		n.dirs[dir] = true
	}
	// The likelihood that something unsynced is kept differs between cuts:
	// nothing and everything are likely cases too.
	odds := func() float64 { return []float64{0, 1, 0.5, 0.1, 0.9}[d.rng.IntN(5)] }
	dirs := make([]string, 0, len(d.ops))
	for dir := range d.ops {
		dirs = append(dirs, dir)
	}
	sort.Strings(dirs) // map order would make a seed worthless
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
	names := make([]string, 0, len(d.kept))
	for name := range d.kept {
		names = append(names, name)
	}
	sort.Strings(names)
	seen := map[*inode]*inode{}
	for _, name := range names {
		node := d.kept[name]
		if seen[node] == nil {
			node.settle(d.rng, odds(), d.tear)
			b := append([]byte(nil), node.stable...)
			seen[node] = &inode{cur: b, stable: append([]byte(nil), b...)}
		}
		n.names[name], n.kept[name] = seen[node], seen[node]
	}
	return n
}

// Kill returns the disk as the next process finds it after the one that uses d
// was killed: nothing is lost, and nothing more is durable. d is off for good.
func (d *FS) Kill() *FS {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.off = true
	n := d.successor()
	// Copies, because goroutines of the dead process may still be at the
	// originals.
	copies := map[*inode]*inode{nil: nil}
	twin := func(i *inode) *inode {
		c, ok := copies[i]
		if !ok {
			c = &inode{
				cur: append([]byte(nil), i.cur...), stable: append([]byte(nil), i.stable...),
				pending: append([]change(nil), i.pending...),
			}
			copies[i] = c
		}
		return c
	}
	for name, i := range d.names {
		n.names[name] = twin(i)
	}
	for name, i := range d.kept {
		n.kept[name] = twin(i)
	}
	for dir, ops := range d.ops {
		for _, op := range ops {
			var c dirOp
			for _, e := range op {
				c = append(c, entry{e.name, twin(e.node)})
			}
			n.ops[dir] = append(n.ops[dir], c)
		}
	}
	for dir := range d.dirs {
		n.dirs[dir] = true
	}
	return n
}

// successor returns an empty disk of the same kind.
func (d *FS) successor() *FS {
	n := New(d.rng.Uint64())
	n.size, n.tear = d.size, d.tear
	return n
}

// Contents returns a copy of what a read of name yields, nil if there is none.
func (d *FS) Contents(name string) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.names[path.Clean(name)]; n != nil {
		return append([]byte{}, n.cur...)
	}
	return nil
}

// SetContents replaces what the medium holds of name, as damage does. Missing
// directories are made.
func (d *FS) SetContents(name string, b []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	name = path.Clean(name)
	n := &inode{cur: append([]byte{}, b...), stable: append([]byte{}, b...)}
	d.names[name], d.kept[name] = n, n
	for dir := path.Dir(name); !d.dirs[dir]; dir = path.Dir(dir) {
		d.dirs[dir] = true
	}
}

// Flip inverts one bit of name on the medium.
func (d *FS) Flip(name string, bit int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.names[path.Clean(name)]
	if n == nil {
		return
	}
	for _, b := range [][]byte{n.cur, n.stable} {
		if at := bit / 8; at < int64(len(b)) {
			b[at] ^= 1 << (bit % 8)
		}
	}
}

func apply(m map[string]*inode, op dirOp) {
	for _, e := range op {
		if e.node == nil {
			delete(m, e.name)
		} else {
			m[e.name] = e.node
		}
	}
}

// settle moves a random part of the pending changes to the medium, each sector
// with the given likelihood, and drops the rest.
func (n *inode) settle(rng *rand.Rand, odds, tear float64) {
	for _, c := range n.pending {
		if c.data == nil {
			if rng.Float64() < odds {
				n.stable = resize(n.stable, c.off)
			}
			continue
		}
		for at := int64(0); at < int64(len(c.data)); {
			end := min((c.off+at)/Sector*Sector+Sector-c.off, int64(len(c.data)))
			if rng.Float64() < odds {
				n.stable = write(n.stable, c.data[at:end], c.off+at)
			} else if tear > 0 && rng.Float64() < tear {
				n.stable = write(n.stable, c.data[at:at+rng.Int64N(end-at+1)], c.off+at)
			}
			at = end
		}
	}
	n.pending = nil
}

func (n *inode) sync() {
	for _, c := range n.pending {
		if c.data == nil {
			n.stable = resize(n.stable, c.off)
		} else {
			n.stable = write(n.stable, c.data, c.off)
		}
	}
	n.pending = nil
}

func resize(b []byte, size int64) []byte {
	if size <= int64(len(b)) {
		clear(b[size:])
		return b[:size]
	}
	if size <= int64(cap(b)) {
		old := len(b)
		b = b[:size]
		clear(b[old:])
		return b
	}
	n := make([]byte, size)
	copy(n, b)
	return n
}

func write(b, data []byte, off int64) []byte {
	if end := off + int64(len(data)); end > int64(len(b)) {
		b = resize(b, end)
	}
	copy(b[off:], data)
	return b
}

// before runs the hook and the faults and then takes the lock if the disk is on.
func (d *FS) before(op Op, verb, name string) error {
	return d.beforeAt(op, verb, name, 0, 0)
}

// beforeAt is before for an operation on length bytes at off.
func (d *FS) beforeAt(op Op, verb, name string, off, length int64) error {
	d.mu.Lock()
	h := d.hook
	d.mu.Unlock()
	var err error
	if h != nil && op != OpRead {
		err = h(op, name)
	}
	if ferr := d.runFaults(op, name, off, length); err == nil {
		err = ferr
	}
	d.mu.Lock()
	if d.off {
		err = ErrPowerOff
	}
	if err != nil {
		return &fs.PathError{Op: verb, Path: name, Err: err}
	}
	return nil
}

// on takes the lock if the disk is on.
func (d *FS) on(verb, name string) error {
	d.mu.Lock()
	if d.off {
		return &fs.PathError{Op: verb, Path: name, Err: ErrPowerOff}
	}
	return nil
}

func (d *FS) dirOp(dir string, op dirOp) {
	apply(d.names, op)
	d.ops[dir] = append(d.ops[dir], op)
}

// Open implements vfs.FS.
func (d *FS) Open(name string, create bool) (vfs.File, error) {
	name = path.Clean(name)
	d.mu.Lock()
	exists := d.names[name] != nil
	d.mu.Unlock()
	if create && !exists {
		if err := d.before(OpCreate, "open", name); err != nil {
			d.mu.Unlock()
			return nil, err
		}
	} else if err := d.on("open", name); err != nil {
		d.mu.Unlock()
		return nil, err
	}
	defer d.mu.Unlock()
	n := d.names[name]
	if n == nil {
		if !create || !d.dirs[path.Dir(name)] {
			return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
		}
		n = &inode{}
		d.dirOp(path.Dir(name), dirOp{{name, n}})
	}
	f := &file{d: d, n: n, name: name}
	d.files[f] = true
	return f, nil
}

// Remove implements vfs.FS.
func (d *FS) Remove(name string) error {
	name = path.Clean(name)
	err := d.before(OpRemove, "remove", name)
	defer d.mu.Unlock()
	if err != nil {
		return err
	}
	if d.names[name] == nil {
		return &fs.PathError{Op: "remove", Path: name, Err: fs.ErrNotExist}
	}
	d.dirOp(path.Dir(name), dirOp{{name, nil}})
	return nil
}

// Rename implements vfs.FS within one directory.
func (d *FS) Rename(oldname, newname string) error {
	oldname, newname = path.Clean(oldname), path.Clean(newname)
	err := d.before(OpRename, "rename "+oldname+" to", newname)
	defer d.mu.Unlock()
	if err != nil {
		return err
	}
	n := d.names[oldname]
	if n == nil || path.Dir(oldname) != path.Dir(newname) {
		return &fs.PathError{Op: "rename " + oldname + " to", Path: newname, Err: fs.ErrNotExist}
	}
	d.dirOp(path.Dir(newname), dirOp{{oldname, nil}, {newname, n}})
	return nil
}

// MkdirAll implements vfs.FS. Directories are durable at once.
func (d *FS) MkdirAll(dir string) error {
	err := d.on("mkdir", dir)
	defer d.mu.Unlock()
	if err != nil {
		return err
	}
	for dir = path.Clean(dir); !d.dirs[dir]; dir = path.Dir(dir) {
		d.dirs[dir] = true
	}
	return nil
}

// List implements vfs.FS.
func (d *FS) List(dir string) ([]string, error) {
	dir = path.Clean(dir)
	err := d.on("open", dir)
	defer d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if !d.dirs[dir] {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: fs.ErrNotExist}
	}
	names := []string{}
	for name := range d.names {
		if path.Dir(name) == dir {
			names = append(names, path.Base(name))
		}
	}
	for name := range d.dirs {
		if name != dir && path.Dir(name) == dir {
			names = append(names, path.Base(name))
		}
	}
	sort.Strings(names)
	return names, nil
}

// Stat implements vfs.FS.
func (d *FS) Stat(name string) (fs.FileInfo, error) {
	name = path.Clean(name)
	err := d.on("stat", name)
	defer d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if n := d.names[name]; n != nil {
		return info{path.Base(name), int64(len(n.cur)), false}, nil
	}
	if d.dirs[name] {
		return info{path.Base(name), 0, true}, nil
	}
	return nil, &fs.PathError{Op: "stat", Path: name, Err: fs.ErrNotExist}
}

// SyncDir implements vfs.FS.
func (d *FS) SyncDir(dir string) error {
	dir = path.Clean(dir)
	err := d.before(OpSyncDir, "sync", dir)
	defer d.mu.Unlock()
	if err != nil {
		return err
	}
	for _, op := range d.ops[dir] {
		apply(d.kept, op)
	}
	delete(d.ops, dir)
	return nil
}

// Lock implements vfs.FS.
func (d *FS) Lock(name string) (io.Closer, error) {
	name = path.Clean(name)
	err := d.on("lock", name)
	defer d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if d.locks[name] {
		return nil, &fs.PathError{Op: "lock", Path: name, Err: vfs.ErrLocked}
	}
	if d.names[name] == nil {
		d.dirOp(path.Dir(name), dirOp{{name, &inode{}}})
	}
	d.locks[name] = true
	return closer(func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.locks, name)
		return nil
	}), nil
}

type closer func() error

func (c closer) Close() error { return c() }

type info struct {
	name string
	size int64
	dir  bool
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) IsDir() bool        { return i.dir }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) Sys() any           { return nil }

func (i info) Mode() fs.FileMode {
	if i.dir {
		return fs.ModeDir | 0o700
	}
	return 0o600
}

type file struct {
	d      *FS
	n      *inode
	name   string
	closed bool
}

func (f *file) alive(verb string, err error) error {
	if err == nil && f.closed {
		err = &fs.PathError{Op: verb, Path: f.name, Err: fs.ErrClosed}
	}
	return err
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	err := f.alive("read", f.d.beforeAt(OpRead, "read", f.name, off, int64(len(p))))
	defer f.d.mu.Unlock()
	if err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, &fs.PathError{Op: "read", Path: f.name, Err: syscall.EINVAL}
	}
	if off >= int64(len(f.n.cur)) {
		return 0, io.EOF
	}
	n := copy(p, f.n.cur[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	err := f.alive("write", f.d.beforeAt(OpWrite, "write", f.name, off, int64(len(p))))
	defer f.d.mu.Unlock()
	if err != nil {
		// Some of it may have been written.
		n := f.d.rng.IntN(len(p) + 1)
		if !f.closed && n > 0 {
			f.write(p[:n], off)
		}
		return n, err
	}
	n := len(p)
	if grow := off + int64(n) - int64(len(f.n.cur)); grow > 0 {
		if free := f.d.free(); grow > free {
			n = max(n-int(grow-free), 0)
			err = &fs.PathError{Op: "write", Path: f.name, Err: syscall.ENOSPC}
		}
	}
	if n > 0 {
		f.write(p[:n], off)
	}
	return n, err
}

func (f *file) write(p []byte, off int64) {
	f.n.cur = write(f.n.cur, p, off)
	f.n.pending = append(f.n.pending, change{off, append([]byte{}, p...)})
}

func (f *file) Close() error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.closed {
		return &fs.PathError{Op: "close", Path: f.name, Err: fs.ErrClosed}
	}
	f.closed = true
	delete(f.d.files, f)
	return nil
}

func (f *file) Size() (int64, error) {
	err := f.alive("stat", f.d.on("stat", f.name))
	defer f.d.mu.Unlock()
	return int64(len(f.n.cur)), err
}

func (f *file) Truncate(size int64) error {
	err := f.alive("truncate", f.d.before(OpTruncate, "truncate", f.name))
	defer f.d.mu.Unlock()
	if err == nil && size-int64(len(f.n.cur)) > f.d.free() {
		err = &fs.PathError{Op: "truncate", Path: f.name, Err: syscall.ENOSPC}
	}
	if err == nil {
		f.setSize(size)
	}
	return err
}

func (f *file) setSize(size int64) {
	f.n.cur = resize(f.n.cur, size)
	f.n.pending = append(f.n.pending, change{off: size})
}

func (f *file) Preallocate(size int64) error {
	err := f.alive("fallocate", f.d.before(OpPreallocate, "fallocate", f.name))
	defer f.d.mu.Unlock()
	if err == nil && size-int64(len(f.n.cur)) > f.d.free() {
		err = &fs.PathError{Op: "fallocate", Path: f.name, Err: syscall.ENOSPC}
	}
	if err == nil && size > int64(len(f.n.cur)) {
		f.setSize(size)
	}
	return err
}

func (f *file) Sync() error     { return f.sync("fsync") }
func (f *file) Datasync() error { return f.sync("fdatasync") }

func (f *file) sync(verb string) error {
	err := f.alive(verb, f.d.before(OpSync, verb, f.name))
	defer f.d.mu.Unlock()
	switch {
	case err == nil:
		f.n.sync()
	case !f.closed && !f.d.off:
		f.n.settle(f.d.rng, 0.5, 0)
	}
	return err
}

// OpenFiles returns the names, with the given suffix, that files were opened
// under which are open, sorted.
func (d *FS) OpenFiles(suffix string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var names []string
	for f := range d.files {
		if strings.HasSuffix(f.name, suffix) {
			names = append(names, f.name)
		}
	}
	sort.Strings(names)
	return names
}

// Names returns the names of all files with the given suffix, sorted.
func (d *FS) Names(suffix string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var names []string
	for name := range d.names {
		if strings.HasSuffix(name, suffix) {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	return names
}
