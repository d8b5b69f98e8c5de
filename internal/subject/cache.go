package subject

import "hash/maphash"

// Entry is what a [Cache] knows about one literal subject.
type Entry[V comparable] struct {
	Result[V]
	// Note is what the owner of the cache derived from the subject when the
	// entry was made; see [NewCache].
	Note uint8

	key   string
	gen   uint64
	slot  uint32
	valid bool // gen is that of a lookup
}

// Cache remembers the results of lookups in an [Index] for one user, who must
// not use it concurrently. An entry is looked up anew, into the same memory,
// when the index has changed since where that can concern it; otherwise a lookup
// takes no lock.
//
// A subject gets an entry when it is looked up a second time, so that subjects
// used once, such as reply subjects, neither allocate nor displace others.
type Cache[V comparable] struct {
	index *Index[V]
	note  func(subject []byte) uint8
	max   int
	seed  maphash.Seed
	byKey map[string]*Entry[V]
	last  *Entry[V] // most recent
	once  Entry[V]  // for subjects without an entry
	seen  []uint32  // hashes of subjects looked up once, by slot
}

const seenSlots = 512

// NewCache returns a cache of at most max entries over index. note, if not
// nil, is asked once per entry and its answer kept as [Entry.Note].
func NewCache[V comparable](index *Index[V], max int, note func(subject []byte) uint8) *Cache[V] {
	return &Cache[V]{index: index, note: note, max: max, seed: maphash.MakeSeed()}
}

// Lookup returns what matches the literal subject now. The entry is valid
// until the next Lookup. With note's answer 0 the index is not asked and the
// entry is empty: note is where malformed subjects are kept out.
func (c *Cache[V]) Lookup(subject []byte) *Entry[V] {
	e := c.last
	if e == nil || e.key != string(subject) {
		e = c.entry(subject)
	}
	if gen := c.index.generation(e.slot); !e.valid || e.gen != gen {
		e.gen, e.valid = gen, true
		if c.note != nil && e.Note == 0 {
			e.reset()
		} else {
			c.index.MatchBytes(subject, &e.Result)
		}
	}
	return e
}

func (c *Cache[V]) entry(subject []byte) *Entry[V] {
	if e := c.byKey[string(subject)]; e != nil {
		c.last = e
		return e
	}
	h := maphash.Bytes(c.seed, subject)
	if c.seen == nil {
		c.seen = make([]uint32, seenSlots)
	}
	seen, tag := &c.seen[h%seenSlots], uint32(h>>32)|1
	if *seen != tag || len(subject) == 0 {
		*seen = tag
		e := &c.once
		e.valid, e.slot = false, slot(subject)
		if c.note != nil {
			e.Note = c.note(subject)
		}
		return e
	}
	e := new(Entry[V])
	if len(c.byKey) >= c.max {
		// Go walks maps in random order: a random victim needs no bookkeeping
		// and a subject in use is back with its second lookup.
		for k, v := range c.byKey {
			delete(c.byKey, k)
			e = v
			break
		}
	}
	if c.byKey == nil {
		c.byKey = make(map[string]*Entry[V])
	}
	e.key, e.valid, e.slot, e.Note = string(subject), false, slot(subject), 0
	if c.note != nil {
		e.Note = c.note(subject)
	}
	c.byKey[e.key] = e
	c.last = e
	return e
}

// Forget drops all entries.
func (c *Cache[V]) Forget() {
	c.byKey, c.last, c.once = nil, nil, Entry[V]{}
	clear(c.seen)
}
