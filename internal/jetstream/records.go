package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/metadb"
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
}

// readMeta returns what the meta database knows of the streams.
func readMeta(meta *metadb.DB) (*metaContents, error) {
	c := &metaContents{}
	listed, hasList := map[uint64]bool{}, false
	if b, err := meta.Get(bucketMeta, keyNextGroup); err == nil {
		if c.next, listed, hasList, err = parseGroups(string(b)); err != nil {
			return nil, fmt.Errorf("%w: next group %q in %s", storage.ErrCorrupt, b, meta.Path())
		}
	} else if !errors.Is(err, storage.ErrNotFound) {
		return nil, err
	}
	if b, err := meta.Get(bucketMeta, keyMetaApplied); err == nil {
		n, err := strconv.ParseUint(string(b), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: position %q in %s", storage.ErrCorrupt, b, meta.Path())
		}
		c.applied = storage.LSN(n)
	} else if !errors.Is(err, storage.ErrNotFound) {
		return nil, err
	}
	err := meta.ForEach(bucketMeta, prefixDeleted, func(key string, _ []byte) error {
		if g, err := strconv.ParseUint(strings.TrimPrefix(key, prefixDeleted), 10, 64); err == nil {
			c.deleted = append(c.deleted, g)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = meta.ForEach(bucketMeta, prefixStream, func(key string, value []byte) error {
		var r streamRecord
		if err := json.Unmarshal(value, &r); err != nil || len(r.UID) != 16 {
			return fmt.Errorf("%w: record of stream group %s: %v", storage.ErrCorrupt, key, err)
		}
		c.records = append(c.records, r)
		if hasList && (!listed[r.Group] || key != streamKey(r.Group)) {
			return fmt.Errorf("%w: %s has a record %s of stream %q, group %d, that its list of streams does not have",
				storage.ErrCorrupt, meta.Path(), key, r.Name, r.Group)
		}
		delete(listed, r.Group)
		return nil
	})
	if err != nil {
		return nil, err
	}
	for group := range listed {
		return nil, fmt.Errorf("%w: %s has lost its record of the stream of group %d: restore the file", storage.ErrCorrupt, meta.Path(), group)
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
// is not running. It fails with storage.ErrCorrupt where [Open] would.
func StreamRecords(meta *metadb.DB) ([]StreamRecord, error) {
	c, err := readMeta(meta)
	if err != nil {
		return nil, fmt.Errorf("read the list of streams: %w", err)
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
