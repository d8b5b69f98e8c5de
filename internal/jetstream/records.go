package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/storage"
	"petiole/storage/metadb"
	"petiole/storage/msgstore"
)

// decodeConfig takes the configuration of a record of the log.
func (r *streamRecord) decodeConfig(b []byte) error {
	if err := json.Unmarshal(b, &r.Config); err != nil {
		return fmt.Errorf("%w: configuration of stream %q: %v", command.ErrMalformed, r.Name, err)
	}
	return nil
}

// metaContents is what the meta database knows of the streams.
type metaContents struct {
	records []streamRecord
	next    uint64      // group of the next stream; 0: a new database
	applied storage.LSN // of the meta group's records in the log
	deleted []uint64    // groups whose directories may still be there
	// consumers are by group and name.
	consumers map[uint64]map[string]*consumerRecord
	missing   map[uint64]bool // groups of streams whose records are lost
	damage    []error
	adopt     bool // any number of records may be missing
}

// readMeta returns what the meta database knows of the streams; what is damaged
// in it is in damage. It fails if the file as such cannot be read.
func readMeta(meta *metadb.DB) (*metaContents, error) {
	c := &metaContents{consumers: map[uint64]map[string]*consumerRecord{}, missing: map[uint64]bool{}}
	bad := func(key string, err error) {
		c.damage = append(c.damage, fmt.Errorf("%s in %s: %w", key, meta.Path(), err))
	}
	values := map[string][]byte{}
	err := meta.ForEachIntact(bucketMeta, "", func(key string, value []byte) error {
		values[key] = value
		return nil
	}, bad)
	if err != nil {
		return nil, err
	}
	listed, hasList := map[uint64]bool{}, false
	if b, ok := values[keyNextGroup]; ok {
		if c.next, listed, hasList, err = parseGroups(string(b)); err != nil {
			bad(keyNextGroup, fmt.Errorf("%w: %q", storage.ErrCorrupt, b))
		}
	} else if len(values) > 0 && len(c.damage) == 0 {
		bad(keyNextGroup, fmt.Errorf("%w: it is missing", storage.ErrCorrupt))
	}
	if b, ok := values[keyMetaApplied]; ok {
		n, err := strconv.ParseUint(string(b), 10, 64)
		if err != nil {
			bad(keyMetaApplied, fmt.Errorf("%w: %q", storage.ErrCorrupt, b))
		}
		c.applied = storage.LSN(n)
	}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		value := values[key]
		switch {
		case strings.HasPrefix(key, prefixDeleted):
			if g, err := strconv.ParseUint(strings.TrimPrefix(key, prefixDeleted), 10, 64); err == nil {
				c.deleted = append(c.deleted, g)
			}
		case strings.HasPrefix(key, prefixConsumerRecord):
			group, name, _ := strings.Cut(strings.TrimPrefix(key, prefixConsumerRecord), "/")
			g, err := strconv.ParseUint(group, 10, 64)
			r := new(consumerRecord)
			if err != nil || json.Unmarshal(value, r) != nil {
				break // is of use only if the consumer's stream is damaged as well
			}
			if c.consumers[g] == nil {
				c.consumers[g] = map[string]*consumerRecord{}
			}
			c.consumers[g][name] = r
		case strings.HasPrefix(key, prefixStream):
			var r streamRecord
			if err := json.Unmarshal(value, &r); err != nil || len(r.UID) != 16 || key != streamKey(r.Group) {
				bad(key, fmt.Errorf("%w: it makes no sense", storage.ErrCorrupt))
				break
			}
			if hasList && !listed[r.Group] {
				bad(key, fmt.Errorf("%w: stream %q, group %d, is not in the list of streams", storage.ErrCorrupt, r.Name, r.Group))
				break
			}
			c.records = append(c.records, r)
			c.next = max(c.next, r.Group+1)
			delete(listed, r.Group)
		}
	}
	for group := range listed {
		c.missing[group] = true
		bad(streamKey(group), fmt.Errorf("%w: the record of the stream of group %d is lost", storage.ErrCorrupt, group))
	}
	return c, nil
}

// StreamRecord is what a store's meta database tells of a stream.
type StreamRecord struct {
	Name   string
	Group  storage.GroupID
	Memory bool   // its messages are in memory only
	Dir    string // of its messages, within the store directory
}

// StreamRecords reads which streams a store has, for those who look at one that
// is not running. It fails with storage.ErrCorrupt if any of it is damaged.
func StreamRecords(meta *metadb.DB) ([]StreamRecord, error) {
	c, err := readMeta(meta)
	if err != nil {
		return nil, fmt.Errorf("read the list of streams: %w", err)
	}
	if len(c.damage) > 0 {
		return nil, fmt.Errorf("read the list of streams: %w", errors.Join(c.damage...))
	}
	var out []StreamRecord
	for _, r := range c.records {
		g := storage.GroupID(r.Group)
		out = append(out, StreamRecord{
			Name: r.Name, Group: g, Memory: r.Config.Storage == api.MemoryStorage,
			Dir: filepath.Join("streams", groupDir(g)),
		})
	}
	return out, nil
}

// MetaApplied reads up to where the list of streams reflects the log, for those who
// look at a store that is not running.
func MetaApplied(meta *metadb.DB) (storage.LSN, error) {
	c, err := readMeta(meta)
	if err != nil {
		return 0, fmt.Errorf("read the list of streams: %w", err)
	}
	return c.applied, nil
}

// openMeta opens the meta database and reads it. A file that is damaged as such
// is put aside, and what is intact of it taken over.
func (e *Engine) openMeta() (*metaContents, error) {
	path := filepath.Join(e.o.Dir, "meta.db")
	adopt := false
	for {
		meta, err := metadb.Open(path)
		if err == nil {
			var c *metaContents
			if c, err = readMeta(meta); err == nil {
				err = meta.Walk() // others keep something there, too
			}
			if err == nil {
				e.meta = meta
				meta.OnFail(e.fail) // whoever asked: the link does too
				c.adopt = adopt || c.next == 0
				for _, d := range c.damage {
					e.log.Error("the list of streams is damaged; streams are taken from their directories", "err", d)
				}
				if len(c.damage) > 0 || c.adopt {
					c.applied = 0 // what the log tells of streams counts again
				}
				return c, nil
			}
			_ = meta.Close() // the first error counts
		}
		if !errors.Is(err, storage.ErrCorrupt) || adopt {
			return nil, err
		}
		adopt = true
		r, serr := metadb.Salvage(path)
		if serr != nil {
			return nil, errors.Join(err, serr)
		}
		e.damage.Parked.Add(1)
		e.log.Error("the meta database is damaged: it has been put aside, and what is intact of it is in a new one; streams are taken from their directories",
			"file", path, "parked", r.Parked, "kept", r.Kept, "err", err)
	}
}

// adoptStreams adds to c the streams whose records are lost and whose
// directories tell who they are.
func (e *Engine) adoptStreams(c *metaContents) error {
	if !c.adopt && len(c.missing) == 0 {
		return nil
	}
	known := map[uint64]bool{}
	for i := range c.records {
		known[c.records[i].Group] = true
	}
	for _, g := range c.deleted {
		known[g] = true
	}
	dirs, err := os.ReadDir(filepath.Join(e.o.Dir, "streams"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, d := range dirs {
		group := uint64(parseGroupDir(d.Name()))
		if group == 0 || known[group] || !c.adopt && !c.missing[group] {
			continue
		}
		c.next = max(c.next, group+1)
		dir := filepath.Join(e.o.Dir, "streams", d.Name())
		var r *streamRecord
		err := e.withRoom(func() (err error) { r, err = e.recordOf(group, dir); return err })
		if noSpace(err) { // put aside it would be lost with its part of the log
			return fmt.Errorf("there is no room to find out which stream %s is of, make room: %w", dir, err)
		}
		if err != nil {
			e.log.Error("a directory does not tell which stream it is of", "directory", dir, "err", err)
			continue
		}
		if r == nil {
			continue // never checkpointed: the log has its creation, if it came to be
		}
		e.log.Error("a stream that the list of streams had lost has been found by its directory", "stream", r.Name, "directory", dir)
		c.records = append(c.records, *r)
		e.book.dirty[group] = struct{}{}
	}
	return nil
}

// recordOf makes a stream's record of what its store keeps; nil if that is
// nothing.
func (e *Engine) recordOf(group uint64, dir string) (*streamRecord, error) {
	s, err := msgstore.Open(dir, msgstore.Options{Log: e.log})
	if err != nil && isDamage(err) {
		if _, err = e.salvageFile(dir); err == nil {
			s, err = msgstore.Open(dir, msgstore.Options{Log: e.log})
		}
	}
	if err != nil {
		return nil, err
	}
	r := &streamRecord{Group: group}
	var config []byte
	err = s.KVs("", func(key string, value []byte) error {
		switch key {
		case stream.KeyConfig:
			config = value
		case stream.KeyUID:
			r.UID = value
		}
		return nil
	})
	applied := s.Applied()
	if err = errors.Join(err, s.Close()); err != nil {
		return nil, err
	}
	if applied == 0 && config == nil {
		return nil, nil
	}
	if err := json.Unmarshal(config, &r.Config); err != nil || len(r.UID) != 16 {
		return nil, fmt.Errorf("%w: its configuration is lost", storage.ErrCorrupt)
	}
	r.Name, r.Created = r.Config.Name, time.Now().UnixNano()
	if fi, err := os.Stat(dir); err == nil {
		r.Created = fi.ModTime().UnixNano()
	}
	return r, nil
}
