//go:build linux

package main

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"go.etcd.io/bbolt"
)

const (
	sector = 512
	page   = 4096
	// Where a segment of the log has its note, and how much of it is in use here.
	note     = 512
	noteHead = 128
)

// extent is where a file holds a message: its data, with what may stand around
// it of subject, header and checksums.
type extent struct {
	from, to int64
	msg      *expected // nil for one that was removed
}

// unit is a part of a file that a program reads as one: a batch of the log, or
// the pages of a database that belong together.
type unit struct {
	from, to int64
}

// file is a file of a template store.
type file struct {
	name    string // relative to the store
	size    int64
	extents []extent // by from
	units   []unit   // by from
}

// place is a part of a file that has a class.
type place struct {
	file     *file
	from, to int64
}

// survey finds out what is where in the template.
func (t *template) survey() error {
	t.files, t.places = map[string]*file{}, map[string][]place{}
	err := filepath.WalkDir(t.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(t.dir, path)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f := &file{name: name, size: int64(len(b))}
		t.files[name] = f
		for _, m := range markers.FindAllSubmatchIndex(b, -1) {
			n, _ := strconv.ParseUint(string(b[m[4]:m[5]]), 10, 64)
			s := t.streams[string(b[m[2]:m[3]])]
			if s == nil || n == 0 || n > s.last {
				continue
			}
			e := extent{from: int64(m[0]) - 96, to: int64(m[1]), msg: s.messages[n]}
			if e.msg != nil {
				e.to = int64(m[0] + e.msg.size)
			}
			f.extents = append(f.extents, e)
		}
		switch base := filepath.Base(name); {
		case strings.HasPrefix(name, "wal"+string(filepath.Separator)):
			_, err := os.Stat(filepath.Join(filepath.Dir(path), next(base)))
			t.surveyLog(f, b, err != nil)
		case strings.HasSuffix(base, ".db"):
			return t.surveyDB(f, path)
		default:
			t.add(base, f, 0, f.size)
		}
		return nil
	})
	if t.name == "stopped" { // else the log tells of the streams
		t.add(older, t.files["meta.db"], 0, 1)
	}
	return err
}

func (t *template) add(class string, f *file, from, to int64) {
	if class == "LOCK" && to == 0 {
		to = 1 // an empty file can be written to
	}
	if to > from {
		t.places[class] = append(t.places[class], place{f, from, to})
	}
}

// next is the name of the segment of the log that follows the one with a name.
func next(name string) string {
	n, err := strconv.ParseUint(strings.TrimSuffix(name, ".wal"), 16, 64)
	if err != nil {
		return name
	}
	return fmt.Sprintf("%016x.wal", n+1)
}

// surveyLog finds batches by their magic, which stands at the start of a sector.
func (t *template) surveyLog(f *file, b []byte, newest bool) {
	if !strings.HasSuffix(f.name, ".wal") {
		t.add("wal spare", f, 0, f.size)
		return
	}
	t.add("wal header", f, 0, min(128, f.size))
	t.add("wal header padding", f, 128, min(note, f.size))
	t.add("wal note", f, note, min(note+noteHead, f.size))
	t.add("wal header padding", f, note+noteHead, min(page, f.size))
	end := int64(page) // of what was written
	for at := int64(page); at+sector <= f.size; at += sector {
		if !bytes.Equal(b[at:at+3], []byte("PWB")) {
			continue
		}
		u := unit{at, at + sector}
		kind, length := b[at+4], int64(binary.LittleEndian.Uint64(b[at+32:]))
		switch {
		case kind == 2:
			t.add("wal footer", f, at, at+sector)
			f.units = append(f.units, u)
			continue
		case kind == 1 && length > 0 && at+64+length <= f.size:
			u.to = (at + 64 + length + sector - 1) / sector * sector
			t.add("wal batch header", f, at, at+64)
			class := "wal records"
			if newest {
				class = "wal newest records"
			}
			t.add(class, f, at+64, at+64+length)
			t.add("wal padding", f, at+64+length, u.to)
		default:
			t.add("wal mark", f, at, at+sector)
		}
		f.units = append(f.units, u)
		at = u.to - sector
		end = u.to
	}
	last := f.size - sector
	if n := len(f.units); n > 0 && f.units[n-1].from == last {
		t.add("wal unused", f, end, last)
	} else {
		t.add("wal unused", f, end, f.size)
	}
}

// surveyDB asks bbolt what its pages are for.
func (t *template) surveyDB(f *file, path string) error {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true, PreLoadFreelist: true})
	if err != nil {
		return fmt.Errorf("survey %s: %w", f.name, err)
	}
	defer db.Close()
	base, size := filepath.Base(f.name), int64(db.Info().PageSize)
	return db.View(func(tx *bbolt.Tx) error {
		for id := 0; int64(id)*size < f.size; {
			from := int64(id) * size
			info, err := tx.Page(id)
			if err != nil || info == nil {
				t.add(base+" beyond", f, from, f.size)
				return err
			}
			n := 1
			if info.Type != "free" {
				n += info.OverflowCount
			}
			to := min(from+int64(n)*size, f.size)
			class := base + " " + info.Type
			if id < 2 {
				class, to = base+" meta", from+size
			}
			if n > 1 && info.Type == "leaf" {
				t.add(base+" overflow", f, from+size, to)
				t.add(class, f, from, from+size)
			} else {
				t.add(class, f, from, to)
			}
			if info.Type != "free" {
				f.units = append(f.units, unit{from, to})
			}
			id += n
		}
		return nil
	})
}

// damage is one thing done to one file.
type damage struct {
	class string
	op    string
	file  *file
	off   int64
	n     int64 // octets changed; truncate: cut off
	bit   uint8
	noise uint64
	older string             // file that takes the place
	hit   map[*expected]bool // what may be lost because of it
}

func (d *damage) String() string {
	switch d.op {
	case "bit":
		return fmt.Sprintf("bit %d of octet %d of %s flipped", d.bit, d.off, d.file.name)
	case "older":
		return fmt.Sprintf("%s replaced by its copy of when there was one stream", d.file.name)
	case "truncate":
		return fmt.Sprintf("%s cut from %d to %d octets", d.file.name, d.file.size, d.off)
	}
	return fmt.Sprintf("%d octets of %s from %d on overwritten with %s", d.n, d.file.name, d.off, d.op)
}

// older is the class of the one damage that is another file: what a restored
// part of a backup leaves. All streams but one are then unknown; nothing of
// them may go.
const older = "meta.db older"

// choose draws a damage of one of the classes: first the class, so that rare ones
// get their share, then the place in it. With a turn of 0 and up the classes take
// turns. It returns nil if the store has no place of the class.
func (t *template) choose(r *rand.Rand, classes []string, turn int) *damage {
	class := classes[r.IntN(len(classes))]
	if turn >= 0 {
		class = classes[turn%len(classes)]
	}
	if len(t.places[class]) == 0 {
		return nil
	}
	d := &damage{class: class, noise: r.Uint64(), older: t.older}
	places := t.places[d.class]
	total := int64(0)
	for _, p := range places {
		total += p.to - p.from
	}
	at := r.Int64N(total)
	for _, p := range places {
		if at < p.to-p.from {
			d.file, d.off = p.file, p.from+at
			break
		}
		at -= p.to - p.from
	}
	switch k := r.IntN(20); {
	case d.class == older:
		d.op, d.off, d.n = "older", 0, d.file.size
		d.hit = map[*expected]bool{}
		return d
	case k < 12:
		d.op, d.bit, d.n = "bit", uint8(r.IntN(8)), 1
	case k < 15:
		d.op, d.n = "noise", sector
	case k < 16:
		d.op, d.n = "noise", page
	case k < 18:
		d.op, d.n = "zeros", sector
	case k < 19:
		d.op, d.n = "zeros", page
	default:
		d.op, d.n = "truncate", d.file.size-d.off
	}
	if d.op == "noise" || d.op == "zeros" {
		d.off = d.off / d.n * d.n
		d.n = max(1, min(d.n, d.file.size-d.off))
	}
	d.findHit()
	return d
}

// findHit notes the messages that the damage may cost: those it touches; and if
// it touches what a unit needs to be read at all, all that the unit holds.
func (d *damage) findHit() {
	d.hit = map[*expected]bool{}
	from, to := d.off, d.off+d.n
	touch := func(from, to int64) (any bool, first, last int64) {
		first, last = -1, -1
		i, _ := slices.BinarySearchFunc(d.file.extents, from, func(e extent, at int64) int { return cmp.Compare(e.to, at) })
		for ; i < len(d.file.extents) && d.file.extents[i].from < to; i++ {
			e := d.file.extents[i]
			if first < 0 {
				first = e.from
			}
			last = e.to
			any = true
			if e.msg != nil {
				d.hit[e.msg] = true
			}
		}
		return any, first, last
	}
	any, _, _ := touch(from, to)
	for _, u := range d.file.units {
		if u.to <= from || u.from >= to {
			continue
		}
		// The bounds of what the unit holds, without noting it.
		first, last := int64(-1), int64(-1)
		for _, e := range d.file.extents {
			if e.to > u.from && e.from < u.to {
				if first < 0 {
					first = max(e.from, u.from)
				}
				last = e.to
			}
		}
		if first < 0 {
			continue
		}
		isLog := strings.HasSuffix(d.file.name, ".wal")
		if isLog || !any || from < first || to > last {
			touch(u.from, u.to)
		}
	}
}

// do damages the store in dir.
func (d *damage) do(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, d.file.name), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	switch d.op {
	case "truncate":
		return f.Truncate(d.off)
	case "older":
		return copyFile(d.older, filepath.Join(dir, d.file.name))
	}
	b := make([]byte, d.n)
	if _, err := f.ReadAt(b, d.off); err != nil && d.file.size > 0 {
		return err
	}
	switch d.op {
	case "bit":
		b[0] ^= 1 << d.bit
	case "zeros":
		clear(b)
	case "noise":
		r := rand.New(rand.NewPCG(d.noise, 1))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
	}
	_, err = f.WriteAt(b, d.off)
	return err
}

// classes returns those that some of the stores have, and that begin with one of
// the prefixes, which commas part.
func classes(ts []*template, prefixes string) []string {
	found := map[string]bool{}
	for _, t := range ts {
		for c := range t.places {
			if slices.ContainsFunc(strings.Split(prefixes, ","), func(p string) bool { return strings.HasPrefix(c, p) }) {
				found[c] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}
