package jetstream

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/wal"
)

// The meta machine: which streams exist.

// What the meta machine keeps in the meta database.
const (
	bucketMeta   = "jetstream"
	prefixStream = "stream/" // + group in decimal → JSON of streamRecord
	// The group of the next stream, and after a space those of the streams there
	// are, with commas: "4 2,3". A damaged page that hides a record would else
	// look like a stream that was deleted. Without a space the writer was older.
	keyNextGroup = "next_group"
)

func streamKey(g uint64) string { return prefixStream + strconv.FormatUint(g, 10) }

// streamRecord is what the meta machine knows of a stream.
type streamRecord struct {
	Name    string           `json:"name"`
	Group   uint64           `json:"group"`
	UID     []byte           `json:"uid"`
	Created int64            `json:"created"` // Unix nanoseconds
	Config  api.StreamConfig `json:"config"`
	// Sequences held at the last stop, and the position in the log that they
	// are of: where the stream goes on should its files be lost.
	First  uint64 `json:"first,omitempty"`
	Last   uint64 `json:"last,omitempty"`
	LastAt uint64 `json:"last_at,omitempty"`
}

// consumerRecord is what the meta machine knows of a consumer whose state is in
// its stream's store: what it is created anew with should that be lost.
type consumerRecord struct {
	Config  api.ConsumerConfig `json:"config"`
	Created int64              `json:"created"` // Unix nanoseconds
}

// applyMeta applies a command of the meta group.
func (e *Engine) applyMeta(r *wal.Record) error {
	switch command.KindOf(r.Data) {
	case command.KindStreamCreate:
		var c command.StreamCreate
		if err := c.Decode(r.Data); err != nil {
			return err
		}
		return e.applyCreate(&c, r)
	case command.KindStreamDelete:
		var c command.StreamDelete
		if err := c.Decode(r.Data); err != nil {
			return err
		}
		e.applyDelete(&c, r)
		return nil
	}
	return command.Unknown(command.KindOf(r.Data), "the meta group's")
}

func (e *Engine) applyCreate(c *command.StreamCreate, r *wal.Record) error {
	group := storage.GroupID(c.Group)
	if e.groups[group] != nil || e.downs[group] != nil { // its directory was found without the list of streams
		return e.recreate(r)
	}
	rec := &streamRecord{Name: c.Name, Group: c.Group, UID: c.UID[:], Created: c.Created}
	if err := rec.decodeConfig(c.Config); err != nil {
		return err
	}
	e.mu.Lock()
	store := e.prepared[group]
	delete(e.prepared, group)
	e.nextGroup = max(e.nextGroup, c.Group+1)
	e.mu.Unlock()
	if store == nil {
		store = e.newStore(group, rec.Config.Storage, true)
	}
	s, err := e.newStream(rec, store)
	if err != nil && isDamage(err) {
		_ = store.Close() // the first error counts
		d := &downStream{rec: rec, cause: err, since: time.Now(), create: true}
		e.book.put(rec, r.LSN)
		e.setDown(d, true)
		e.refuseSubjects(d)
		if t, ok := e.tag(r).(*call); ok {
			t.fn(callResult{err: e.offline(rec.Name)})
		}
		if e.live {
			e.spawn(func() { e.repair(d) })
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("creating stream %q: %w", c.Name, err)
	}
	s.begins(r.LSN)
	e.book.put(rec, r.LSN)
	e.addStream(s)
	if !e.live {
		return nil
	}
	e.wakeKeeper()
	if err := s.start(); err != nil {
		return err
	}
	if t, ok := e.tag(r).(*call); ok {
		t.fn(callResult{stream: s})
	}
	e.streamsChanged()
	return nil
}

func (e *Engine) applyDelete(c *command.StreamDelete, r *wal.Record) {
	s := e.groups[storage.GroupID(c.Group)]
	if s != nil {
		e.book.remove(c.Group, s, r.LSN, s.holds()) // first: trim asks the streams, then the book
		e.removeStream(s)
		s.stop()
		s.deleted()
		if e.live {
			e.wakeKeeper()
			e.streamsChanged()
		}
	} else {
		held := storage.LSN(0)
		if d := e.downs[storage.GroupID(c.Group)]; d != nil {
			held = storage.LSN(d.from.Load())
			d.deleted = true
			defer e.setDown(d, false)
		}
		e.book.remove(c.Group, nil, r.LSN, held)
		e.wakeKeeper()
	}
	if t, ok := e.tag(r).(*call); ok {
		t.fn(callResult{})
	}
}

// appendGroups returns the value under keyNextGroup.
func appendGroups(next uint64, groups []uint64) []byte {
	b := append(strconv.AppendUint(nil, next, 10), ' ')
	for i, g := range groups {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, g, 10)
	}
	return b
}

// parseGroups reads what appendGroups wrote; listed is false for a value
// without a list.
func parseGroups(v string) (next uint64, groups map[uint64]bool, listed bool, err error) {
	head, list, listed := strings.Cut(v, " ")
	if next, err = strconv.ParseUint(head, 10, 64); err != nil {
		return 0, nil, false, err
	}
	groups = map[uint64]bool{}
	if list == "" {
		return next, groups, listed, nil
	}
	for _, f := range strings.Split(list, ",") {
		g, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, nil, false, err
		}
		groups[g] = true
	}
	return next, groups, listed, nil
}

func groupDir(g storage.GroupID) string { return fmt.Sprintf("%016x", uint64(g)) }

func parseGroupDir(name string) storage.GroupID {
	v, err := strconv.ParseUint(name, 16, 64)
	if err != nil || len(name) != 16 {
		return 0
	}
	return storage.GroupID(v)
}
