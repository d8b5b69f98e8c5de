package stream

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"petiole/storage"
)

// maxID is the length in octets of the longest message id that is kept as it is.
const maxID = 256

// dedupID returns what stands for a message id in the window and in keys,
// which have to be short: of a long one, its hash.
func dedupID(id string) string {
	if len(id) <= maxID {
		return id
	}
	h := sha256.Sum256([]byte(id))
	return "\x00" + string(h[:])
}

// ddEntry is one message id in the window.
type ddEntry struct {
	id   string
	seq  uint64
	time int64 // by the steady clock
}

// dedup is the window of message ids: a map to find them, a queue by time to
// forget them, and what the next checkpoint has to write. Its time is that of the
// steady clock, see [command.Publish].
type dedup struct {
	// at is the latest time that there has been, wall what the wall clock said
	// then: from them the steady clock goes on after a restart.
	at, wall int64
	ticked   bool // no checkpoint has them

	byID  map[string]uint64 // id → sequence
	queue []ddEntry         // by time, from head
	head  int
	// fresh is the index in queue of the first entry that no checkpoint has;
	// entries before it are forgotten with a deletion.
	fresh   int
	deleted []string
}

func (d *dedup) init() { d.byID = map[string]uint64{} }

func (d *dedup) load(saved []ddEntry) {
	slices.SortFunc(saved, func(a, b ddEntry) int {
		return cmp.Or(cmp.Compare(a.time, b.time), cmp.Compare(a.seq, b.seq))
	})
	d.queue, d.fresh = saved, len(saved)
	for _, e := range saved {
		d.byID[e.id] = e.seq
	}
	if n := len(saved); n > 0 && saved[n-1].time > d.at { // what was kept beside them is lost
		d.at, d.wall = saved[n-1].time, saved[n-1].time
	}
}

// tick says what time it is by both clocks. Messages may come in another order
// than their times.
func (d *dedup) tick(steady, wall int64) {
	if steady > d.at {
		d.at, d.wall, d.ticked = steady, wall, true
	}
}

func (d *dedup) lookup(id string) (uint64, bool) {
	seq, ok := d.byID[id]
	return seq, ok
}

func (d *dedup) add(id string, seq uint64, time int64) {
	if _, ok := d.byID[id]; ok { // only without a window
		return
	}
	d.byID[id] = seq
	d.queue = append(d.queue, ddEntry{id: id, seq: seq, time: time})
}

// prune forgets ids stored at or before t.
func (d *dedup) prune(t int64) {
	for d.head < len(d.queue) && d.queue[d.head].time <= t {
		e := &d.queue[d.head]
		delete(d.byID, e.id)
		if d.head < d.fresh {
			d.deleted = append(d.deleted, e.id)
		}
		*e = ddEntry{}
		d.head++
	}
	d.fresh = max(d.fresh, d.head)
	if d.head > 1024 && d.head > len(d.queue)/2 {
		n := copy(d.queue, d.queue[d.head:])
		clear(d.queue[n:])
		d.queue = d.queue[:n]
		d.fresh -= d.head
		d.head = 0
	}
}

func (d *dedup) changes(kvs []storage.KV) []storage.KV {
	if d.ticked {
		v := binary.AppendVarint(nil, d.at)
		kvs = append(kvs, storage.KV{Key: KeyWindow, Value: binary.AppendVarint(v, d.wall)})
	}
	for _, id := range d.deleted {
		if _, again := d.byID[id]; !again {
			kvs = append(kvs, storage.KV{Key: PrefixDedup + id})
		}
	}
	for _, e := range d.queue[d.fresh:] {
		v := binary.AppendUvarint(nil, e.seq)
		kvs = append(kvs, storage.KV{Key: PrefixDedup + e.id, Value: binary.AppendVarint(v, e.time)})
	}
	return kvs
}

func (d *dedup) saved() {
	d.fresh = len(d.queue)
	d.deleted = nil
	d.ticked = false
}
