package simfs

import (
	"io/fs"
	"path"
	"strings"
	"time"
)

// Fault is a rule by which operations fail, fall short, or take time. The
// fields up to Len select operations; those that are zero select all.
type Fault struct {
	Op     Op     // OpAny: every one but OpRead
	Suffix string // of the name
	Off    int64  // with Len: reads and writes that touch bytes Off to Off+Len-1
	Len    int64

	After int // so many selected operations pass first
	Times int // so many are hit then; 0: one, below zero: all

	Delay time.Duration // how long an operation that is hit takes
	// Err is what an operation that is hit fails with; nil: it does not fail. A
	// write may have written some of its bytes then, a sync some of what it had to.
	Err error
}

// Inject adds a fault, whose fields must not change any more. It stays until
// remove is called, and does not outlive a PowerCut or Kill.
func (d *FS) Inject(f Fault) (remove func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f.Times == 0 {
		f.Times = 1
	}
	r := &f
	d.rules = append(d.rules, r)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for i := range d.rules {
			if d.rules[i] == r {
				d.rules = append(d.rules[:i:i], d.rules[i+1:]...)
				return
			}
		}
	}
}

// runFaults returns the error of the first fault that fails the operation,
// after the delays of all that are hit.
func (d *FS) runFaults(op Op, name string, off, length int64) (err error) {
	var delay time.Duration
	d.mu.Lock()
	for _, r := range d.rules {
		switch {
		case r.Op == OpAny && op == OpRead, r.Op != OpAny && r.Op != op, !strings.HasSuffix(name, r.Suffix),
			r.Len > 0 && (off >= r.Off+r.Len || off+length <= r.Off):
			continue
		case r.After > 0:
			r.After--
			continue
		case r.Times == 0:
			continue
		case r.Times > 0:
			r.Times--
		}
		delay += r.Delay
		if err == nil {
			err = r.Err
		}
	}
	d.mu.Unlock()
	if delay > 0 {
		time.Sleep(delay)
	}
	return err
}

// SetCapacity limits the disk to so many bytes of file lengths; what would take
// more fails with ENOSPC, a write after as much as fits. 0 lifts the limit. It
// may be less than what is in use.
func (d *FS) SetCapacity(bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.size = bytes
}

// Used returns the sum of the lengths of all files.
func (d *FS) Used() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.used()
}

func (d *FS) used() int64 {
	n := int64(0)
	for _, i := range d.names {
		n += int64(len(i.cur))
	}
	return n
}

// free returns how many bytes files may grow by.
func (d *FS) free() int64 {
	if d.size == 0 {
		return 1 << 40
	}
	return max(d.size-d.used(), 0)
}

// Free implements vfs.FS.
func (d *FS) Free(dir string) (int64, error) {
	err := d.on("statfs", dir)
	defer d.mu.Unlock()
	if err == nil && !d.dirs[path.Clean(dir)] {
		err = &fs.PathError{Op: "statfs", Path: dir, Err: fs.ErrNotExist}
	}
	if err != nil {
		return 0, err
	}
	return d.free(), nil
}

// TearSectors makes power cuts write a random part of a sector that would
// otherwise not be written, with the given odds: disks do not all write whole
// sectors when the power fails. It holds for the disks that follow, too.
func (d *FS) TearSectors(odds float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tear = odds
}

// FlipAny inverts one random bit of a random file whose name has the suffix,
// on the medium, and says which; name is "" if all such files are empty.
func (d *FS) FlipAny(suffix string) (name string, bit int64) {
	names := d.Names(suffix)
	d.mu.Lock()
	total := int64(0)
	for _, n := range names {
		total += int64(len(d.names[n].cur))
	}
	if total == 0 {
		d.mu.Unlock()
		return "", 0
	}
	bit = d.rng.Int64N(total * 8)
	for _, name = range names {
		if n := int64(len(d.names[name].cur)) * 8; bit >= n {
			bit -= n
			continue
		}
		break
	}
	d.mu.Unlock()
	d.Flip(name, bit)
	return name, bit
}

// Scramble overwrites bytes off to off+n-1 of name, on the medium, with random
// ones, as a flash block that lost its charge.
func (d *FS) Scramble(name string, off, n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.names[path.Clean(name)]
	if i == nil {
		return
	}
	for at := off; at < off+n; at++ {
		x := byte(d.rng.Uint32())
		for _, b := range [][]byte{i.cur, i.stable} {
			if at < int64(len(b)) {
				b[at] = x
			}
		}
	}
}

// Lose takes the directory entry of name away, from the medium as well, as a
// repair of the file system may.
func (d *FS) Lose(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	name = path.Clean(name)
	delete(d.names, name)
	delete(d.kept, name)
	for dir, ops := range d.ops {
		for i, op := range ops {
			var left dirOp
			for _, e := range op {
				if e.name != name {
					left = append(left, e)
				}
			}
			d.ops[dir][i] = left
		}
	}
}
