package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	"petiole/storage"
	"petiole/storage/metadb"
)

// What the meta machine keeps in the meta database, beside streams' records.
const (
	// keyMetaApplied is the position in the log that the database reflects.
	keyMetaApplied = "applied"
	// prefixDeleted + group in decimal marks a stream that was deleted and
	// whose directory may still be there.
	prefixDeleted = "deleted/"
	// prefixConsumerRecord + group in decimal + "/" + name → JSON of consumerRecord
	prefixConsumerRecord = "consumer/"
)

// metaBook is the meta machine's state: which streams exist. What applying a
// record changes in it is written to the meta database later, on a goroutine of
// its own, and held by the log until then; nobody who commits waits for it.
type metaBook struct {
	saveMu sync.Mutex // one save at a time

	mu      sync.Mutex
	records map[uint64]*streamRecord // by group; records are replaced, not changed
	next    uint64                   // the group of the next stream, as of what was applied
	applied storage.LSN              // last record of the meta group applied
	from    storage.LSN              // first one the log has to keep, as the database does not reflect it; 0: none
	saving  storage.LSN              // the same, of what is being saved
	dirty   map[uint64]struct{}      // groups whose record changed
	// consumers are those with a state in their stream's store, by group and name.
	consumers map[uint64]map[string]*consumerRecord
	changed   map[consumerKey]struct{}
	dying     map[uint64]*Stream  // deleted; nil values were deleted before this start
	dead      map[uint64]struct{} // their directories are gone, the mark may go too
}

type consumerKey struct {
	group uint64
	name  string
}

func (k consumerKey) String() string {
	return prefixConsumerRecord + strconv.FormatUint(k.group, 10) + "/" + k.name
}

func newMetaBook() *metaBook {
	return &metaBook{
		consumers: map[uint64]map[string]*consumerRecord{}, changed: map[consumerKey]struct{}{},
		records: map[uint64]*streamRecord{}, dirty: map[uint64]struct{}{},
		dying: map[uint64]*Stream{}, dead: map[uint64]struct{}{},
		next: uint64(storage.MetaGroup) + 1,
	}
}

// noted says that the record at lsn has been applied, and that the log has to
// keep what follows from on until that is saved. The caller holds mu.
func (b *metaBook) noted(lsn, from storage.LSN) {
	b.from = earlier(b.from, from)
	b.applied = max(b.applied, lsn)
}

// earlier returns the lower of two positions of which 0 is none.
func earlier(a, b storage.LSN) storage.LSN {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// put takes a stream's record in, because of the record at lsn (0: none).
func (b *metaBook) put(r *streamRecord, lsn storage.LSN) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.records[r.Group] = r
	b.next = max(b.next, r.Group+1)
	b.dirty[r.Group] = struct{}{}
	b.noted(lsn, lsn)
}

// remove takes a stream out, because of the record at lsn. Its files go once
// the database no longer has it; up to then the log keeps its records from
// the position held on (0: none), or the next start would miss some of them.
func (b *metaBook) remove(group uint64, s *Stream, lsn, held storage.LSN) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.records[group]; ok {
		delete(b.records, group)
		for name := range b.consumers[group] {
			b.changed[consumerKey{group, name}] = struct{}{}
		}
		delete(b.consumers, group)
		b.dirty[group] = struct{}{}
		b.dying[group] = s
	}
	b.noted(lsn, earlier(lsn, held))
}

// putConsumer takes a consumer's record in, or out if r is nil.
func (b *metaBook) putConsumer(group uint64, name string, r *consumerRecord) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.records[group]; !ok {
		return
	}
	switch {
	case r == nil:
		delete(b.consumers[group], name)
	case b.consumers[group] == nil:
		b.consumers[group] = map[string]*consumerRecord{name: r}
	default:
		b.consumers[group][name] = r
	}
	b.changed[consumerKey{group, name}] = struct{}{}
}

// consumersOf returns the records of a stream's consumers.
func (b *metaBook) consumersOf(group uint64) map[string]*consumerRecord {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.consumers[group])
}

// record returns a stream's record.
func (b *metaBook) record(group uint64) (*streamRecord, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r, ok := b.records[group]
	return r, ok
}

// holds returns the first record that the log has to keep for the meta machine
// and for streams that the database does not know to be deleted; 0 if it needs
// none.
func (b *metaBook) holds() storage.LSN {
	b.mu.Lock()
	defer b.mu.Unlock()
	return earlier(b.from, b.saving)
}

// saveMeta writes what changed to the meta database, after which the log need
// not hold it any more, and dooms the streams deleted: their files may go now.
func (e *Engine) saveMeta() error {
	b := e.book
	b.saveMu.Lock()
	defer b.saveMu.Unlock()
	b.mu.Lock()
	if len(b.dirty) == 0 && len(b.changed) == 0 && len(b.dead) == 0 && b.from == 0 {
		b.mu.Unlock()
		return nil
	}
	dirty, dead, changed := b.dirty, b.dead, b.changed
	b.changed = map[consumerKey]struct{}{}
	b.saving, b.from = b.from, 0
	b.dirty, b.dead = map[uint64]struct{}{}, map[uint64]struct{}{}
	gone := map[uint64]*Stream{}
	var kvs []metadb.KV
	for g := range dirty {
		r, ok := b.records[g]
		if !ok {
			gone[g] = b.dying[g]
			kvs = append(kvs, metadb.KV{Key: streamKey(g)}, metadb.KV{Key: deletedKey(g), Value: []byte{}})
			continue
		}
		v, err := json.Marshal(r) // strings and numbers: always has a JSON form
		if err == nil {
			kvs = append(kvs, metadb.KV{Key: streamKey(g), Value: v})
		}
	}
	for k := range changed {
		kv := metadb.KV{Key: k.String()}
		if r := b.consumers[k.group][k.name]; r != nil {
			v, err := json.Marshal(r)
			if err != nil {
				continue
			}
			kv.Value = v
		}
		kvs = append(kvs, kv)
	}
	for g := range dead {
		kvs = append(kvs, metadb.KV{Key: deletedKey(g)})
	}
	kvs = append(kvs,
		metadb.KV{Key: keyNextGroup, Value: appendGroups(b.next, slices.Sorted(maps.Keys(b.records)))},
		metadb.KV{Key: keyMetaApplied, Value: strconv.AppendUint(nil, uint64(b.applied), 10)})
	b.mu.Unlock()

	// As with streams' stores: not ahead of the log.
	err := e.wal.SyncWritten()
	if err == nil {
		err = e.meta.Put(bucketMeta, kvs...)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil { // all of it is still to be saved
		maps.Copy(b.dirty, dirty)
		maps.Copy(b.dead, dead)
		maps.Copy(b.changed, changed)
		b.from, b.saving = earlier(b.from, b.saving), 0
		return fmt.Errorf("saving the list of streams: %w", err)
	}
	b.saving = 0
	e.mu.Lock()
	defer e.mu.Unlock()
	for g, s := range gone {
		delete(b.dying, g)
		e.doomed[g] = s
	}
	return nil
}

func deletedKey(g uint64) string { return prefixDeleted + strconv.FormatUint(g, 10) }

// close closes the files of streams that were deleted and are still there.
func (b *metaBook) close() error {
	b.saveMu.Lock()
	defer b.saveMu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	for _, s := range b.dying {
		if s != nil {
			errs = append(errs, s.store.Close())
		}
	}
	return errors.Join(errs...)
}
