package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"

	"petiole/internal/jetstream/api"
	"petiole/storage"
	"petiole/storage/metadb"
)

// readRecords returns what the meta database knows of the streams, and the
// group of the next one (0: a new database).
func readRecords(meta *metadb.DB) (records []streamRecord, next uint64, err error) {
	listed, hasList := map[uint64]bool{}, false
	if b, err := meta.Get(bucketMeta, keyNextGroup); err == nil {
		if next, listed, hasList, err = parseGroups(string(b)); err != nil {
			return nil, 0, fmt.Errorf("%w: next group %q in %s", storage.ErrCorrupt, b, meta.Path())
		}
	} else if !errors.Is(err, storage.ErrNotFound) {
		return nil, 0, err
	}
	err = meta.ForEach(bucketMeta, prefixStream, func(key string, value []byte) error {
		var r streamRecord
		if err := json.Unmarshal(value, &r); err != nil || len(r.UID) != 16 {
			return fmt.Errorf("%w: record of stream group %s: %v", storage.ErrCorrupt, key, err)
		}
		records = append(records, r)
		if hasList && (!listed[r.Group] || key != streamKey(r.Group)) {
			return fmt.Errorf("%w: %s has a record %s of stream %q, group %d, that its list of streams does not have",
				storage.ErrCorrupt, meta.Path(), key, r.Name, r.Group)
		}
		delete(listed, r.Group)
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	for group := range listed {
		return nil, 0, fmt.Errorf("%w: %s has lost its record of the stream of group %d: restore the file", storage.ErrCorrupt, meta.Path(), group)
	}
	return records, next, nil
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
	records, _, err := readRecords(meta)
	if err != nil {
		return nil, fmt.Errorf("read the list of streams: %w", err)
	}
	var out []StreamRecord
	for _, r := range records {
		g := storage.GroupID(r.Group)
		out = append(out, StreamRecord{
			Name: r.Name, Group: g, Memory: r.Config.Storage == api.MemoryStorage,
			Dir: filepath.Join("streams", groupDir(g)),
		})
	}
	return out, nil
}
