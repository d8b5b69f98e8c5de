package jetstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/storage"
	"petiole/storage/metadb"
)

// How far a stream has what edges export is in its store, in the same step as
// the messages. If damage took a position, or left an older one, the edge would
// send again what the stream holds. So the meta database has a copy of each, as
// of two checkpoints, because it is written before the checkpoint that it is of
// and that may not come to its end:
//
//	key    group in decimal "/" edge "/" uid in hex
//	value  ┌────────────┬────────┬──────────┐┌────────────┬────────┬──────────┐
//	       │ LSN uvarint│ length │ position ││ the same of the one before      │
//	       └────────────┴────────┴──────────┘└────────────┴────────┴──────────┘
//
// The newest whose LSN the store has been checkpointed at is what the store had.
const bucketPositions = "positions"

// posCopy is the copy of a position as of a checkpoint.
type posCopy struct {
	lsn   storage.LSN
	value []byte // as in the store
}

func appendCopies(dst []byte, copies ...posCopy) []byte {
	for _, c := range copies {
		dst = binary.AppendUvarint(dst, uint64(c.lsn))
		dst = binary.AppendUvarint(dst, uint64(len(c.value)))
		dst = append(dst, c.value...)
	}
	return dst
}

func parseCopies(b []byte) (list []posCopy, err error) {
	for len(b) > 0 {
		lsn, n := binary.Uvarint(b)
		if n <= 0 {
			return nil, storage.ErrCorrupt
		}
		b = b[n:]
		size, n := binary.Uvarint(b)
		if n <= 0 || size > uint64(len(b)-n) {
			return nil, storage.ErrCorrupt
		}
		list = append(list, posCopy{storage.LSN(lsn), b[n : n+int(size)]})
		b = b[n+int(size):]
	}
	return list, nil
}

// newestCopy returns the newest copy as of at or before.
func newestCopy(list []posCopy, at storage.LSN) (best posCopy, ok bool) {
	for _, c := range list {
		if c.lsn <= at && (!ok || c.lsn > best.lsn) {
			best, ok = c, true
		}
	}
	return best, ok
}

func positionKey(g storage.GroupID, key string) string {
	return strconv.FormatUint(uint64(g), 10) + "/" + strings.TrimPrefix(key, stream.PrefixPos)
}

// positionsOf returns which of a checkpoint's keyed state are positions.
func positionsOf(kvs []storage.KV) (list []storage.KV) {
	for _, kv := range kvs {
		if strings.HasPrefix(kv.Key, stream.PrefixPos) {
			list = append(list, kv)
		}
	}
	return list
}

// copyPositions writes copies of the positions among the keyed state of a
// checkpoint at lsn, which the store, checkpointed at applied, is about to make.
func (e *Engine) copyPositions(g storage.GroupID, lsn, applied storage.LSN, positions []storage.KV) error {
	var kvs []metadb.KV
	for _, kv := range positions {
		put := metadb.KV{Key: positionKey(g, kv.Key)}
		if kv.Value != nil {
			list := []posCopy{{lsn, kv.Value}}
			b, err := e.meta.Get(bucketPositions, put.Key)
			if err == nil {
				if had, err := parseCopies(b); err == nil {
					if c, ok := newestCopy(had, applied); ok && c.lsn != lsn {
						list = append(list, c)
					}
				}
			} else if !errors.Is(err, storage.ErrNotFound) && !errors.Is(err, storage.ErrCorrupt) {
				return err
			}
			put.Value = appendCopies(nil, list...)
		}
		kvs = append(kvs, put)
	}
	err := e.meta.Put(bucketPositions, kvs...)
	if errors.Is(err, storage.ErrCorrupt) { // of the meta database: the next start salvages it
		err = fmt.Errorf("%w: %w", storage.ErrFailed, err)
	}
	if err != nil {
		return fmt.Errorf("copying the positions of exports: %w", err)
	}
	return nil
}

// restorePositions puts the copies of positions in place that the stream's store
// has lost, or of which it has an older one; before the log is replayed. The
// caller holds the lock.
func (e *Engine) restorePositions(s *Stream) error {
	if s.memory {
		return nil
	}
	prefix := positionKey(s.group, "")
	at := s.store.Applied()
	err := e.meta.ForEachIntact(bucketPositions, prefix, func(key string, value []byte) error {
		list, err := parseCopies(value)
		c, ok := newestCopy(list, at)
		p := new(command.Position)
		if err != nil || !ok || p.Decode(c.value) != nil {
			return nil
		}
		name := strings.TrimPrefix(key, prefix)
		if !s.m.RestorePosition(name, p) {
			return nil
		}
		if s.dirtyFrom == 0 {
			s.dirtyFrom = s.applied + 1
		}
		e.damage.Positions.Add(1)
		e.log.Error("the position of an export was damaged in the stream's files and has been restored from its copy",
			"stream", s.name, "export", name, "through", p.Through, "incarnation", p.Incarnation)
		return nil
	}, func(key string, err error) {
		e.log.Error("the copy of a position of an export is damaged; the one in the stream's files counts", "stream", s.name, "key", key, "err", err)
	})
	if errors.Is(err, storage.ErrCorrupt) { // of the meta database, not of this stream
		e.log.Error("the copies of positions of exports cannot be read", "stream", s.name, "err", err)
		return nil
	}
	return err
}

// dropPositions removes the copies of a deleted stream's positions.
func (e *Engine) dropPositions(g storage.GroupID) error {
	var kvs []metadb.KV
	drop := func(key string) { kvs = append(kvs, metadb.KV{Key: key}) }
	err := e.meta.ForEachIntact(bucketPositions, positionKey(g, ""),
		func(key string, _ []byte) error { drop(key); return nil }, func(key string, _ error) { drop(key) })
	if err != nil || len(kvs) == 0 {
		return err
	}
	return e.meta.Put(bucketPositions, kvs...)
}

// touchPositions has the next checkpoints copy all positions: the meta database
// has been lost.
func (e *Engine) touchPositions() {
	for _, s := range e.groups {
		s.mu.Lock()
		any := false
		s.m.Positions(func(string, [16]byte, *command.Position) { any = true })
		if any && !s.memory {
			s.m.Touch()
			if s.dirtyFrom == 0 {
				s.dirtyFrom = s.applied + 1
			}
		}
		s.mu.Unlock()
	}
}
