// Package msgstore is the durable message store: an in-memory table of what is
// not checkpointed yet in front of one bbolt file per stream.
//
//	Append ─► active set ─Freeze─► frozen set ─Checkpoint─► msgs.db
//	            ▲                     ▲                        ▲
//	reads ──────┴─────────────────────┴────────────────────────┘
//
// A checkpoint adds messages a slice at a time, where nobody looks yet. The last
// of its transactions makes them, removals, summaries, keyed state and the LSN
// that all of it reflects visible and durable together, so that after a power
// cut the file is exactly the state at some LSN, from which the log is replayed.
// Then the floor file is told how far the store has come, and the space of
// deleted messages is given back. The file's layout is drawn in format.go.
//
// Space freed is used again; the file shrinks when it is compacted, or when a
// checkpoint finds nothing in it that lives and replaces it.
package msgstore

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/bits"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/boltfile"
	"petiole/storage/internal/table"
)

// FileName is the name of the store's file in its directory.
const FileName = "msgs.db"

const (
	// mmapSize is the address space (not memory) mapped at least. Whenever the
	// map has to grow, bbolt copies all that a transaction has in hand and
	// waits for readers: better not often.
	mmapSize = 256 << 20
	// mmapSize32 is the same where addresses are scarce.
	mmapSize32 = 8 << 20
	// pageSize is that of new files, in octets. Two chunks fill a page. With
	// more, a checkpoint takes less time, and a small one writes more.
	pageSize = 8192
	// allocSize is the step in which the file grows.
	allocSize = 2 << 20
)

// ErrFormat says that a file has been written by a program that knows more.
var ErrFormat = storage.ErrFormat

// Options tune a Store. The zero value is ready for use.
type Options struct {
	// Log receives what an operator should know (default: slog.Default()).
	Log *slog.Logger
	// WALOldest is the LSN of the oldest record that the log still has (0: not
	// known, or none): a store that is older than it has been is up to date
	// after replay if the log goes on where the store ends.
	WALOldest storage.LSN
	// AcceptStale opens a store that is older than it has been, and for which
	// the log does not make up, as it is: what is lost becomes a gap, so that
	// no sequence is assigned again. The store's Stale method tells.
	AcceptStale bool
	// Inherited says that another process may have left the files: they are
	// synced, and read from the disk rather than from the page cache, which
	// shows writes whose sync has failed. What a power cut could take back
	// must not have the log trimmed. It is for the first opening of a process.
	Inherited bool
	// Damaged is called when a removal has gone round damage, once until the
	// store is repaired: the store goes on, but Repair is due. It is called
	// from within the store, must not use it, and not block. Nil is nobody.
	Damaged func(error)
	// Wrote is told how many octets of pages each transaction has written, those of
	// compactions included, for whoever wants to know how much is written for a
	// message. It must not block. Nil is nobody.
	Wrote func(octets int64)

	noSync bool // tests only
	lazy   bool // tests only: no subject is read when opening
	slice  int  // tests only: instead of sliceBytes
}

// eagerSubjects is up to how many subjects a store takes in when it is opened.
// With more, each is looked up when it is used, and the whole is looked through
// beside everything else.
const eagerSubjects = 4096

// Store implements storage.Store on the file msgs.db of a directory.
type Store struct {
	*table.Table

	image      *image
	log        *slog.Logger
	noSync     bool // tests only
	applied    atomic.Uint64
	checkpoint sync.Mutex // one at a time
	// written is the frozen set if the file has it already, though a checkpoint
	// failed after that. Guarded by checkpoint.
	written table.Frozen
	after   *writer // what is to be cleared up after a staging; nil if nothing is

	audits   sync.WaitGroup
	auditing atomic.Bool // to go on

	compacting sync.Mutex // one at a time
	compacted  atomic.Pointer[compacted]
	floor      Floor // last written; guarded by checkpoint
	stale      *StaleError
}

var _ storage.Store = (*Store)(nil)

// Open opens or creates the store in dir, which it creates too. It fails with
// storage.ErrLocked if another process has it open and with
// storage.ErrCorrupt if msgs.db is not a message store or damaged beyond use,
// or a *StaleError, which is that too, if it is older than it has been. Making
// a new one fails with storage.ErrFailed unless space is wanting.
// It reads no messages, and of the subjects' summaries no more than a few
// thousand, however many there are.
func Open(dir string, o Options) (*Store, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		if err := errors.Join(os.MkdirAll(dir, 0o700), boltfile.SyncDir(filepath.Dir(dir))); err != nil {
			return nil, fmt.Errorf("open message store: %w", failure(err))
		}
	}
	if o.Inherited {
		for _, name := range []string{FileName, FloorName} {
			if err := boltfile.Refresh(filepath.Join(dir, name)); err != nil {
				return nil, fmt.Errorf("open message store: %w", failure(err))
			}
		}
	}
	floor, floorErr := ReadFloor(dir)
	switch {
	case floorErr == nil:
	case errors.Is(floorErr, fs.ErrNotExist):
		if err := createFloor(dir); err != nil {
			return nil, fmt.Errorf("open message store: %w", failure(err))
		}
	case errors.Is(floorErr, storage.ErrCorrupt):
		o.Log.Error("Nobody can tell whether a message store is as new as it has been.", "error", floorErr)
	default:
		return nil, fmt.Errorf("open message store: %w", floorErr)
	}
	path := filepath.Join(dir, FileName)
	_, statErr := os.Stat(path)
	missing := errors.Is(statErr, fs.ErrNotExist)
	if missing && floorErr == nil && o.WALOldest != 1 && !o.AcceptStale {
		// Do not make a new one: it would look as if nothing had been.
		return nil, fmt.Errorf("open message store: %w", &StaleError{
			File: path, Missing: true, Floor: floor, Lost: storage.Span{First: floor.First, Last: floor.Last},
		})
	}
	if missing && errors.Is(floorErr, storage.ErrCorrupt) && o.WALOldest != 1 && !o.AcceptStale {
		return nil, fmt.Errorf("open message store: %s is gone: %w", path, floorErr)
	}
	var uid [16]byte
	_, _ = rand.Read(uid[:]) // never fails
	if missing && floorErr == nil {
		uid = floor.Store
	}
	db, err := openFile(path, o.noSync, layout(uid))
	if err != nil && missing {
		err = failure(err)
	}
	if err != nil {
		return nil, err
	}
	s := &Store{image: newImage(path, db), log: o.Log, noSync: o.noSync, floor: floor}
	s.image.wrote = o.Wrote
	if o.slice > 0 {
		s.image.slice = o.slice
	}
	s.Table = table.New(s.image, path)
	if err = boltfile.CheckBranches(db); err == nil {
		err = s.load(o.lazy)
	}
	if errors.Is(err, errDamagedIndex) {
		if err = s.rebuild(err); err == nil {
			s.Table = table.New(s.image, path)
			err = s.load(o.lazy)
		}
	}
	if err == nil && floorErr == nil {
		err = s.checkFloor(o, missing)
	}
	if err != nil {
		return nil, errors.Join(err, s.image.close())
	}
	if o.Damaged != nil {
		table.OnHurt(s.Table, o.Damaged)
	}
	if err := removeLeftovers(path); err != nil {
		s.log.Warn("What a repair or compaction that was cut short has left could not be removed.", "error", err)
	}
	for _, left := range []string{s.image.freshPath(), s.image.freshPath() + ".new"} {
		if err := boltfile.Remove(left); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.log.Warn("What a checkpoint that was cut short has left could not be removed.", "file", left, "error", err)
		}
	}
	if st := s.State(); st.Subjects > eagerSubjects && !o.lazy {
		s.auditing.Store(true)
		s.audits.Go(s.audit)
	}
	return s, nil
}

// openFile opens the file at path; if there is none, init (nil: an empty
// database) lays it out.
func openFile(path string, noSync bool, init func(*bbolt.Tx) error) (*bbolt.DB, error) {
	mmap := mmapSize
	if bits.UintSize == 32 {
		mmap = mmapSize32
	}
	db, err := boltfile.Open(path, bbolt.Options{
		// The list of free pages is part of every commit (8 octets a free
		// page), or opening would have to walk the whole file.
		NoFreelistSync:  false,
		FreelistType:    bbolt.FreelistMapType,
		InitialMmapSize: mmap,
		NoStatistics:    true,
		NoSync:          noSync,
		PageSize:        pageSize,
	}, init)
	if err != nil {
		return nil, err
	}
	db.AllocSize = allocSize
	return db, nil
}

// layout returns what lays out the file of a new store with that identity.
func layout(uid [16]byte) func(tx *bbolt.Tx) error {
	return func(tx *bbolt.Tx) error {
		for _, b := range buckets {
			if _, err := tx.CreateBucket(b); err != nil {
				return err
			}
		}
		v := append(make([]byte, overhead, overhead+identitySize), uid[:]...)
		v = append(v, cipherNone, 0, 0, 0, 0)
		b := tx.Bucket(bucketStore)
		// The identity is sealed with no identity: it is what says which.
		if err := b.Put(keyIdentity, newSealer([16]byte{}, bucketStore).finish(keyIdentity, v)); err != nil {
			return err
		}
		v = make([]byte, overhead+8)
		_, _ = rand.Read(v[overhead:]) // never fails
		if err := b.Put(keyFile, newSealer(uid, bucketStore).finish(keyFile, v)); err != nil {
			return err
		}
		state := encodeState(0, storage.State{First: 1}, 1, nil)
		return b.Put(keyState, newSealer(uid, bucketStore).finish(keyState, state))
	}
}

// load fills the table with what the file says it holds; lazy leaves out all
// subjects, whatever their number.
func (s *Store) load(lazy bool) error {
	im := s.image
	var subjects int
	err := im.view(func(tx *bbolt.Tx) error {
		if err := im.identify(tx); err != nil {
			return err
		}
		lsn, st, nextID, spans, err := im.readState(tx)
		if err != nil {
			return err
		}
		s.applied.Store(uint64(lsn))
		stg, err := im.readStaging(tx)
		if err != nil {
			return err
		}
		if stg.begun > stg.done {
			im.cut.Store(st.Last + 1)
		}
		subjects = st.Subjects
		table.Restore(s.Table, st, nextID, spans)
		if err := s.loadPages(tx); err != nil {
			return err
		}
		if !table.Consistent(s.Table) {
			return im.corruptIndex("index of deleted messages", fmt.Errorf("%w: it leaves another number of messages", errDamagedIndex))
		}
		return nil
	})
	if err == nil && subjects <= eagerSubjects && !lazy {
		if err = table.Complete(s.Table); errors.Is(err, storage.ErrCorrupt) && !errors.Is(err, errDamagedIndex) {
			err = fmt.Errorf("%w: %w", errDamagedIndex, err)
		}
	}
	if err != nil {
		return fmt.Errorf("open message store: %w", err)
	}
	return nil
}

// identify checks that the file is a message store and reads whose.
func (im *image) identify(tx *bbolt.Tx) error {
	for _, b := range buckets {
		if tx.Bucket(b) == nil {
			return &storage.CorruptError{File: im.path, Reason: fmt.Sprintf("not a message store, it has no bucket %q", b)}
		}
	}
	c, err := newSealer([16]byte{}, bucketStore).open(keyIdentity, tx.Bucket(bucketStore).Get(keyIdentity))
	switch {
	case errors.Is(err, errVersion):
		return im.newer(tx.Bucket(bucketStore).Get(keyIdentity))
	case err != nil || len(c) != identitySize:
		return im.corruptIndex("identity of the store", errors.Join(err, errLayout))
	case c[16] != cipherNone:
		return fmt.Errorf("%s: %w: its contents are encrypted, with cipher %d and key %d", im.path, ErrFormat, c[16], binary.LittleEndian.Uint32(c[17:]))
	}
	im.seals([16]byte(c))
	return nil
}

// newer is the error of a file whose identity is of a version not ours.
func (im *image) newer(identity []byte) error {
	return fmt.Errorf("%s: its layout is of version %d, this program knows version %d: %w", im.path, identity[0], version, ErrFormat)
}

func (s *Store) loadPages(tx *bbolt.Tx) error {
	var first error
	pages, _ := s.image.readPages(tx, func(_ []byte, err error) {
		if first == nil {
			first = s.image.corruptIndex("index of deleted messages", fmt.Errorf("%w: %w", errDamagedIndex, err))
		}
	})
	for no, p := range pages {
		table.AddPage(s.Table, no, p)
	}
	return first
}

// Applied returns the LSN that the file reflects; see storage.Store.
func (s *Store) Applied() storage.LSN { return storage.LSN(s.applied.Load()) }

// KVs calls fn for the durable keyed state; see storage.Store.
func (s *Store) KVs(prefix string, fn func(key string, value []byte) error) error {
	if s.Closed() {
		return storage.ErrClosed
	}
	im := s.image
	var kvs []storage.KV
	err := im.view(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucketKV).Cursor()
		for k, v := c.Seek([]byte(prefix)); bytes.HasPrefix(k, []byte(prefix)) && k != nil; k, v = c.Next() {
			content, _, err := im.openKV(k, v)
			if err != nil {
				return im.corruptIndex(fmt.Sprintf("state under key %q", k), err)
			}
			kvs = append(kvs, storage.KV{Key: string(k), Value: bytes.Clone(content)})
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read %s: %w", im.path, err)
	}
	// fn is free to do what it likes: no transaction is open.
	for _, kv := range kvs {
		if err := fn(kv.Key, kv.Value); err != nil {
			return err
		}
	}
	return nil
}

// Close releases the file without a checkpoint; it waits for one that runs.
func (s *Store) Close() error {
	s.Table.Close()
	s.auditing.Store(false)
	s.audits.Wait()
	s.checkpoint.Lock()
	defer s.checkpoint.Unlock()
	if err := s.image.close(); err != nil {
		return fmt.Errorf("close %s: %w", s.image.path, err)
	}
	return nil
}

// Destroy closes the store and removes its files, and its directory if nothing
// else is in it.
func (s *Store) Destroy() error {
	if err := s.Close(); err != nil {
		return err
	}
	dir := filepath.Dir(s.image.path)
	for _, path := range []string{filepath.Join(dir, FloorName), s.image.path} {
		if err := boltfile.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("destroy message store: %w", err)
		}
	}
	if boltfile.Remove(dir) == nil {
		dir = filepath.Dir(dir)
	}
	if err := boltfile.SyncDir(dir); err != nil {
		return fmt.Errorf("destroy message store: %w", err)
	}
	return nil
}
