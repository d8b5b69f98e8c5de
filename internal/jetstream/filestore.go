package jetstream

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"petiole/storage"
	"petiole/storage/msgstore"
	"petiole/storage/vfs"
)

// backing is what a fileStore opens: a msgstore.Store, or a test's.
type backing interface{ storage.Store }

// fileStore is a storage.Store whose file is open only while it is in use, so
// that a stream nobody uses costs neither a descriptor nor a memory map nor the
// summaries of its subjects:
//
//	closed ──any use but State, Applied, TableBytes──► open
//	   ▲                                                │
//	   └── rest: unused for a while, all checkpointed ──┘
//
// It may rest only when its durable image is all there is: what the table holds
// is lost with it. That is for the stream to know, see [Stream.rest].
type fileStore struct {
	dir    string
	fs     vfs.FS
	create bool // there may be no file yet; until the first opening
	accept bool // a file older than it has been is opened as it is; until the first opening
	ours   bool // this process has opened the files before
	open   func(dir string, o msgstore.Options) (backing, error)
	// withRoom runs fn, again with more room on the file system if it found none.
	withRoom func(fn func() error) error
	now      func() int64 // a coarse clock, for used
	// opened is told how many files more are open, damaged what message has been
	// found damaged, 0 if it is not one's. Neither may block or call the store.
	opened  func(n int64)
	damaged func(seq uint64, err error)
	stored  func(*storage.Message) // is told what is appended

	// refs counts those who use the file; it is far below zero while none is
	// open. used is when it was last used, by the coarse clock.
	refs atomic.Int64
	used atomic.Int64

	mu      sync.Mutex // opening and closing
	st      backing    // valid while refs is held; nil if closed
	shut    bool       // for good
	state   atomic.Pointer[storage.State]
	applied atomic.Uint64
}

// resting is what refs is less by while no file is open.
const resting = int64(1) << 40

func (e *Engine) newFileStore(g storage.GroupID, create bool) *fileStore {
	f := &fileStore{
		dir: filepath.Join(e.o.Dir, "streams", groupDir(g)), fs: e.o.FS, create: create,
		open: func(dir string, o msgstore.Options) (backing, error) {
			o.Log, o.Wrote = e.log, e.writes.file
			if o.WALOldest == 0 && !o.AcceptStale { // else the log is known not to do
				o.WALOldest = e.wal.Oldest()
				if floor, err := msgstore.ReadFloor(dir); err == nil && floor.Applied > e.wal.Written() {
					o.WALOldest = 0 // it ends before: it is a new one, or an older copy
				}
			}
			return e.o.openStore(dir, o)
		},
		stored:   e.writes.message,
		now:      e.ticks.Load,
		withRoom: e.withRoom,
		opened: func(n int64) {
			if open := e.openStores.Add(n); n > 0 && (open == 1 || open > int64(e.o.MaxOpenStores)) {
				e.wakeKeeper()
			}
		},
	}
	f.damaged = func(seq uint64, err error) {
		if seq == 0 {
			e.noteDamage(f, err)
		} else {
			e.noteLost(f, seq, err)
		}
	}
	f.state.Store(&storage.State{First: 1})
	f.refs.Store(-resting)
	return f
}

// acquire returns the open file, which stays open until release.
func (f *fileStore) acquire() (backing, error) {
	if f.refs.Add(1) <= 0 {
		f.refs.Add(-1)
		if err := f.wake(); err != nil {
			return nil, err
		}
	}
	if now := f.now(); f.used.Load() != now {
		f.used.Store(now)
	}
	return f.st, nil
}

// wake opens the file, if need be, and takes a reference.
func (f *fileStore) wake() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.shut {
		return storage.ErrClosed
	}
	if f.st != nil {
		f.refs.Add(1)
		return nil
	}
	o := msgstore.Options{AcceptStale: f.accept, Inherited: !f.ours, Damaged: func(err error) { f.damaged(0, err) }}
	if f.create {
		o.WALOldest = 1 // the log has all of it
	} else if _, err := os.Stat(filepath.Join(f.dir, msgstore.FileName)); errors.Is(err, fs.ErrNotExist) {
		if _, err := msgstore.ReadFloor(f.dir); errors.Is(err, fs.ErrNotExist) {
			// Opening would begin an empty store, and what is gone be missed by nobody.
			return f.note(&storage.CorruptError{File: filepath.Join(f.dir, msgstore.FileName), Reason: "the file is gone"})
		}
	}
	var st backing
	err := f.withRoom(func() (err error) { st, err = f.open(f.dir, o); return err })
	if err != nil {
		return f.note(err)
	}
	f.st, f.create, f.accept, f.ours = st, false, false, true
	f.refs.Add(resting + 1)
	f.opened(1)
	return nil
}

func (f *fileStore) release() { f.refs.Add(-1) }

// isOpen reports whether the file is open.
func (f *fileStore) isOpen() bool { return f.refs.Load() >= 0 }

// rest closes the file, if it is open and nobody uses it; it reports whether it
// has. The caller knows that nothing is lost with the table.
func (f *fileStore) rest() (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.st == nil || f.refs.Load() != 0 {
		return false, nil
	}
	f.remember() // for those who ask as soon as it rests
	if !f.refs.CompareAndSwap(0, -resting) {
		return false, nil
	}
	f.remember()
	err := f.st.Close()
	f.st = nil
	f.opened(-1)
	return true, err
}

// remember keeps what is asked of a closed store.
func (f *fileStore) remember() {
	st := f.st.State()
	f.state.Store(&st)
	f.applied.Store(uint64(f.st.Applied()))
}

// note passes an error on, and tells of damage that is not one message's.
func (f *fileStore) note(err error) error {
	if err != nil && errors.Is(err, storage.ErrCorrupt) {
		seq, _ := storage.Damaged(err)
		f.damaged(seq, err)
	}
	return err
}

// with runs fn on the open file.
func (f *fileStore) with(fn func(backing) error) error {
	st, err := f.acquire()
	if err != nil {
		return err
	}
	defer f.release()
	return f.note(fn(st))
}

// State implements storage.Store; it does not open the file.
func (f *fileStore) State() storage.State {
	if f.refs.Add(1) <= 0 {
		f.refs.Add(-1)
		return *f.state.Load()
	}
	defer f.refs.Add(-1)
	return f.st.State()
}

// Applied implements storage.Store; it does not open the file.
func (f *fileStore) Applied() storage.LSN {
	if f.refs.Add(1) <= 0 {
		f.refs.Add(-1)
		return storage.LSN(f.applied.Load())
	}
	defer f.refs.Add(-1)
	return f.st.Applied()
}

// TableBytes implements storage.Store; it does not open the file.
func (f *fileStore) TableBytes() int64 {
	if f.refs.Add(1) <= 0 {
		f.refs.Add(-1)
		return 0
	}
	defer f.refs.Add(-1)
	return f.st.TableBytes()
}

// Append implements storage.Store.
func (f *fileStore) Append(m storage.Message) (uint64, error) {
	st, err := f.acquire()
	if err != nil {
		return 0, err
	}
	defer f.release()
	f.stored(&m)
	return st.Append(m)
}

// Skip implements storage.Store.
func (f *fileStore) Skip(seq uint64) error {
	return f.with(func(st backing) error { return st.Skip(seq) })
}

// Load implements storage.Store.
func (f *fileStore) Load(seq uint64) (m storage.Message, err error) {
	st, err := f.acquire()
	if err != nil {
		return m, err
	}
	defer f.release()
	m, err = st.Load(seq)
	return m, f.note(err)
}

// LoadNext implements storage.Store.
func (f *fileStore) LoadNext(filter storage.Filter, seq uint64) (m storage.Message, err error) {
	st, err := f.acquire()
	if err != nil {
		return m, err
	}
	defer f.release()
	m, err = st.LoadNext(filter, seq)
	return m, f.note(err)
}

// LoadLast implements storage.Store.
func (f *fileStore) LoadLast(pattern string, max uint64) (m storage.Message, err error) {
	st, err := f.acquire()
	if err != nil {
		return m, err
	}
	defer f.release()
	m, err = st.LoadLast(pattern, max)
	return m, f.note(err)
}

// Range implements storage.Store.
func (f *fileStore) Range(seq uint64, fn func(storage.Message) bool) error {
	return f.with(func(st backing) error { return st.Range(seq, fn) })
}

// Subject implements storage.Store.
func (f *fileStore) Subject(subject string) (s storage.SubjectState, ok bool) {
	st, err := f.acquire()
	if err != nil {
		return s, false
	}
	defer f.release()
	return st.Subject(subject)
}

// Subjects implements storage.Store.
func (f *fileStore) Subjects(pattern string, fn func(subject string, s storage.SubjectState) bool) {
	if st, err := f.acquire(); err == nil {
		defer f.release()
		st.Subjects(pattern, fn)
	}
}

// NumPending implements storage.Store.
func (f *fileStore) NumPending(filter storage.Filter, seq uint64) uint64 {
	if f.State().Last < seq {
		return 0
	}
	st, err := f.acquire()
	if err != nil {
		return 0
	}
	defer f.release()
	return st.NumPending(filter, seq)
}

// SeqAtTime implements storage.Store.
func (f *fileStore) SeqAtTime(t int64) uint64 {
	st, err := f.acquire()
	if err != nil {
		return f.State().Last + 1
	}
	defer f.release()
	return st.SeqAtTime(t)
}

// Remove implements storage.Store.
func (f *fileStore) Remove(seq uint64) (n uint64, err error) {
	st, err := f.acquire()
	if err != nil {
		return 0, err
	}
	defer f.release()
	n, err = st.Remove(seq)
	return n, f.note(err)
}

// Purge implements storage.Store.
func (f *fileStore) Purge(pattern string, upto, keep uint64) (n uint64, err error) {
	st, err := f.acquire()
	if err != nil {
		return 0, err
	}
	defer f.release()
	n, err = st.Purge(pattern, upto, keep)
	return n, f.note(err)
}

// Freeze implements storage.Store.
func (f *fileStore) Freeze(lsn storage.LSN, kvs []storage.KV) bool {
	st, err := f.acquire()
	if err != nil {
		return false
	}
	defer f.release()
	return st.Freeze(lsn, kvs)
}

// Checkpoint implements storage.Store.
func (f *fileStore) Checkpoint() error {
	return f.with(func(st backing) error { return st.Checkpoint() })
}

// KVs implements storage.Store.
func (f *fileStore) KVs(prefix string, fn func(key string, value []byte) error) error {
	return f.with(func(st backing) error { return st.KVs(prefix, fn) })
}

// Close implements storage.Store.
func (f *fileStore) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.shut {
		return nil
	}
	f.shut = true
	if f.st == nil {
		return nil
	}
	f.remember()
	f.refs.Add(-resting) // those who use it come to storage.ErrClosed
	f.opened(-1)
	return f.st.Close()
}

// Destroy implements storage.Store: everything in the store's directory goes.
func (f *fileStore) Destroy() error {
	if err := f.Close(); err != nil {
		return err
	}
	return removeDir(f.fs, f.dir)
}
