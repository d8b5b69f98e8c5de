package msgstore

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/boltpages"
	"petiole/storage/internal/table"
)

// RepairReport says what a repair found and did.
type RepairReport struct {
	File   string `json:"file"`             // msgs.db, which is intact now
	Parked string `json:"parked,omitempty"` // where the damaged file is now; empty if there was none
	// Applied is the LSN that the repaired file reflects: the log has to be
	// replayed from the record behind it, as after any other opening. After
	// Repair of an open store, the store as such reflects what it did before.
	Applied storage.LSN `json:"applied"`
	// State is that of the repaired file.
	State storage.State `json:"state"`
	// Kept counts the messages in the repaired file; it is State.Msgs.
	Kept uint64 `json:"kept"`
	// Lost are the sequences whose messages existed and are no more, ascending
	// and disjoint. They are gaps now: reading passes over them.
	Lost []storage.Span `json:"lost,omitempty"`
	// Doubtful are sequences for which the notes of deletions are lost: of
	// those that had been deleted, some may be back, the others are in Lost.
	Doubtful []storage.Span `json:"doubtful,omitempty"`
	// LostKeys are the keys of the machine's state that are lost, as far as
	// they are known, StaleKeys those of which only an older value was left,
	// which is in place. KeysDoubtful says that there may be more of both. In
	// either case the machine, if it has its state in memory, has to bring all
	// of it with the next Freeze.
	LostKeys     []string `json:"lost_keys,omitempty"`
	StaleKeys    []string `json:"stale_keys,omitempty"`
	KeysDoubtful bool     `json:"keys_doubtful,omitempty"`
	// Damage says, for the operator, what was found where.
	Damage []string `json:"damage,omitempty"`
}

// LostMsgs counts the sequences in Lost.
func (r *RepairReport) LostMsgs() (n uint64) {
	for _, s := range r.Lost {
		n += s.Len()
	}
	return n
}

// SalvageOptions tune Salvage. The zero value is ready for use.
type SalvageOptions struct {
	// LogFrom is the LSN of the first record that the log still has, 0 if that
	// is not known. If an older state of the store is intact and the log goes
	// on from there, that state is better than any put together.
	LogFrom storage.LSN
	// Log receives what an operator should know (default: slog.Default()).
	Log *slog.Logger

	extents int // tests only: instead of maxExtents

	now  func() time.Time                // tests only
	free func(dir string) (int64, error) // tests only
	step func(step string) (goOn error)  // tests only: called between steps
}

// Salvage repairs the store in dir, which is not open: it reads whatever is
// intact in msgs.db, however damaged the file is, and puts it into a new one
// under the same name. The damaged one is parked beside it as
// msgs.db.damaged-TIME; of those that earlier repairs have parked, it removes the
// oldest (see [ParkedMax]). If power fails on the way, either file is in place,
// and Salvage may be called again. The file may be missing altogether.
//
// It fails with storage.ErrCorrupt if there is nothing to begin with: neither
// the identity of the store nor a state at any LSN can be found, in msgs.db or
// the floor file; and with an error for which errors.Is(err, syscall.ENOSPC)
// holds if there is too little room. Then nothing has been changed. A write or
// sync that failed is storage.ErrFailed.
func Salvage(dir string, o SalvageOptions) (RepairReport, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	path := filepath.Join(dir, FileName)
	r := &RepairReport{File: path}
	if err := repair(context.Background(), path, r, o, nil, func(tmp string) error {
		if r.Parked != "" {
			if err := parkFile(path, r.Parked); err != nil {
				return failure(err)
			}
		}
		if err := o.at("parked"); err != nil {
			return err
		}
		if err := boltfile.Rename(tmp, path); err != nil {
			return failure(err)
		}
		if err := boltfile.SyncDir(dir); err != nil {
			return failure(err)
		}
		return nil
	}); err != nil {
		return RepairReport{}, fmt.Errorf("repair %s: %w", path, err)
	}
	r.log(o.Log)
	forgetParked(path, r.Parked, o.Log)
	return *r, nil
}

// at lets tests stop a repair.
func (o *SalvageOptions) at(step string) error {
	if o.step == nil {
		return nil
	}
	return o.step(step)
}

// repair reads the file at path and makes a new one, which replace puts in its
// place.
func repair(ctx context.Context, path string, r *RepairReport, o SalvageOptions, h *hints, replace func(tmp string) error) error {
	if err := removeLeftovers(path); err != nil {
		return err
	}
	f, size, err := openDamaged(path)
	if err != nil {
		return err
	}
	var in io.ReaderAt = bytes.NewReader(nil)
	if f != nil {
		defer f.Close() // was only read
		in = f
	} else {
		r.Damage = append(r.Damage, "the file is gone")
	}
	s := &salvage{
		ctx: ctx, path: path, f: boltpages.Open(in, size), size: size, report: r,
		logFrom: o.LogFrom, hint: h, most: cmp.Or(o.extents, maxExtents),
	}
	switch floor, err := ReadFloor(filepath.Dir(path)); {
	case err == nil:
		s.floor = &floor
	case errors.Is(err, fs.ErrNotExist):
	case errors.Is(err, storage.ErrCorrupt):
		s.damaged("%v", err)
	default:
		return err
	}
	s.im.path = path
	if err := s.read(); err != nil {
		return err
	}
	if err := roomFor(filepath.Dir(path), s.needs(), o.free); err != nil {
		return err
	}
	if f != nil {
		if r.Parked, err = parkedName(path, o.now); err != nil {
			return err
		}
	}
	if err := o.at("read"); err != nil {
		return err
	}
	tmp := path + repairSuffix
	err = s.write(tmp)
	if err == nil {
		err = o.at("written")
	}
	if err == nil {
		err = replace(tmp)
	}
	if err != nil {
		if rm := os.Remove(tmp); rm != nil && !errors.Is(rm, fs.ErrNotExist) {
			err = errors.Join(err, rm)
		}
	}
	return err
}

// needs estimates how much room the new file takes.
func (s *salvage) needs() int64 {
	n := int64(1 << 20)
	if s.walk {
		n += s.size
	}
	for i, x := range s.extents {
		if i == 0 || x.off != s.extents[i-1].off {
			n += int64(x.size)
		}
	}
	for k, v := range s.kvs {
		n += int64(len(k) + len(v.value))
	}
	return n + n/8
}

// parkedName returns under which name the damaged file is to be kept: the one
// that it has already if a repair before has not come to its end.
func parkedName(path string, now func() time.Time) (string, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	had, err := filepath.Glob(globQuote(path) + damagedInfix + "*")
	if err != nil {
		return "", err
	}
	for _, name := range had {
		if other, err := os.Stat(name); err == nil && os.SameFile(fi, other) {
			return name, nil
		}
	}
	if now == nil {
		now = time.Now
	}
	base := path + damagedInfix + now().UTC().Format(parkedTime)
	name, highest := base, 0
	for _, other := range had {
		n, err := 1, error(nil)
		if rest, ok := strings.CutPrefix(other, base); !ok {
			continue
		} else if rest != "" {
			n, err = strconv.Atoi(strings.TrimPrefix(rest, "-"))
		}
		if err == nil && n > highest {
			// Not one that has become free: names are in order of time.
			highest = n
			name = fmt.Sprintf("%s-%d", base, n+1)
		}
	}
	return name, nil
}

const (
	// ParkedMax is how many damaged files of a store are kept, and
	// ParkedBytes how many octets all but the newest may have together. The
	// newest is always kept.
	ParkedMax   = 3
	ParkedBytes = 1 << 30
)

// forgetParked removes damaged files of the store at path that repairs have
// parked, beyond ParkedMax and ParkedBytes, the oldest first, and newest never.
// It is called when the file at path is intact again.
func forgetParked(path, newest string, log *slog.Logger) {
	names, err := filepath.Glob(globQuote(path) + damagedInfix + "*")
	if err != nil {
		return // a pattern that has been quoted
	}
	names = slices.DeleteFunc(names, func(name string) bool { return name == newest })
	// By time, and by number within a second, whatever the clock was.
	slices.SortFunc(names, func(a, b string) int {
		n := min(len(a), len(b), len(path)+len(damagedInfix)+len(parkedTime))
		return cmp.Or(strings.Compare(b[:n], a[:n]), len(b)-len(a), strings.Compare(b, a))
	})
	total := int64(0)
	for i, name := range names {
		if newest != "" {
			i++
		}
		fi, err := os.Lstat(name)
		if err != nil || i == 0 {
			continue
		}
		if total += fi.Size(); i < ParkedMax && total <= ParkedBytes {
			continue
		}
		if err := boltfile.Remove(name); err != nil {
			log.Warn("An old damaged file that a repair has kept could not be removed.", "file", name, "error", err)
			continue
		}
		log.Warn("An old damaged file that a repair had kept has been removed, as there are newer ones.",
			"file", name, "bytes", fi.Size(), "kept_at_most", ParkedMax, "bytes_at_most", ParkedBytes)
	}
}

// parkedTime is the form of the time in the names of parked files.
const parkedTime = "20060102T150405Z"

// damagedInfix stands between the name of a file that has been parked and the
// time.
const damagedInfix = ".damaged-"

// globQuote makes a path a pattern that matches it alone.
func globQuote(path string) string {
	if runtime.GOOS == "windows" {
		return path // there is no quoting there, nor can names have stars
	}
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

func (r *RepairReport) log(l *slog.Logger) {
	level := slog.LevelWarn
	if len(r.Lost) > 0 {
		level = slog.LevelError
	}
	l.Log(context.Background(), level, "A damaged message store has been repaired.", "file", r.File, "parked", r.Parked,
		"kept", r.Kept, "lost", r.LostMsgs(), "lost_keys", len(r.LostKeys), "damage", r.Damage)
}

// Repair is [Salvage] of an open store, beside readers and the writer, whose
// messages in memory are kept. Checkpoints wait for it. When it is done, the
// owner should checkpoint (Freeze and Checkpoint) at once, with all of the
// keyed state if the report names lost or stale keys, or says that there may
// be some. Until then a restart does not find everything as it is now.
//
// The last step, by which lost messages cease to exist, is run by alone, which
// returns what it returns: the owner can keep its own from being surprised. Nil
// runs it as it is.
//
// After an error the store is as damaged as before, and still open.
func (s *Store) Repair(ctx context.Context, alone func(step func() error) error) (RepairReport, error) {
	if alone == nil {
		alone = func(step func() error) error { return step() }
	}
	s.checkpoint.Lock()
	defer s.checkpoint.Unlock()
	if s.Closed() {
		return RepairReport{}, storage.ErrClosed
	}
	im := s.image
	r := &RepairReport{File: im.path}
	k := table.Know(s.Table)
	h := &hints{
		uid: im.uid, applied: s.Applied(), first: k.First, last: k.Last, pages: k.Pages, spans: k.Spans,
		nextID: k.NextID, ids: k.IDs,
	}
	if err := repair(ctx, im.path, r, SalvageOptions{}, h, func(tmp string) error {
		return s.swapFile(tmp, r.Parked)
	}); err != nil {
		if errors.Is(err, storage.ErrFailed) {
			im.failed.Store(true)
		}
		return RepairReport{}, fmt.Errorf("repair %s: %w", im.path, err)
	}
	next := &Store{Table: table.New(im, im.path), image: im, log: s.log}
	err := next.load(false)
	if err == nil {
		err = alone(func() (err error) {
			r.Lost, err = table.Rebase(s.Table, next.Table, r.Applied, r.Lost)
			return err
		})
	}
	if err != nil {
		return RepairReport{}, fmt.Errorf("repair %s: bring what is in memory into the new file: %w", im.path, err)
	}
	s.applied.Store(uint64(r.Applied))
	im.badPosts.Store(false)
	im.cut.Store(0)
	r.log(s.log)
	forgetParked(im.path, r.Parked, s.log)
	return *r, nil
}
