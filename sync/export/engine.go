package export

import (
	"errors"
	"fmt"
	"slices"

	"petiole/internal/jetstream"
	"petiole/storage"
	"petiole/storage/metadb"
)

// Engine returns the streams of a JetStream engine as Sources.
func Engine(e *jetstream.Engine) Sources { return engine{e} }

type engine struct{ e *jetstream.Engine }

var _ Repairer = engine{}

func (s engine) Stream(name string) (Source, bool) {
	st, ok := s.e.Stream(name)
	if !ok {
		return nil, false
	}
	return st, true
}

func (s engine) Repairing(name string) bool {
	return slices.ContainsFunc(s.e.DownStreams(), func(d jetstream.DownStream) bool { return d.Name == name })
}

func (s engine) WatchStreams(fn func()) func() { return s.e.WatchStreams(fn) }

// bucket is where a meta database keeps the states of exports.
const bucket = "export"

// Meta returns a store directory's meta database as a StateStore.
func Meta(db *metadb.DB) StateStore { return meta{db} }

type meta struct{ db *metadb.DB }

func (m meta) Get(key string) ([]byte, error) {
	b, err := m.db.Get(bucket, key)
	if errors.Is(err, storage.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("export state %s: %w", key, err)
	}
	return b, nil
}

func (m meta) Put(key string, value []byte) error {
	return m.db.Put(bucket, metadb.KV{Key: key, Value: value})
}
