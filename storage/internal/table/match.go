package table

import (
	"slices"
	"sync"
	"weak"

	"petiole/storage"
)

// matchCache remembers, per pattern, which subjects it selects and, per
// filter, which sequences come next. Both only ever grow stale towards too
// much, which whoever uses them sorts out: a subject without messages is
// skipped, and so is a sequence that does not exist.
type matchCache struct {
	mu       sync.Mutex
	patterns map[string]*matched
	filters  map[string]*upcoming
}

type matched struct {
	gen  uint64 // of the list
	upto int    // how far into the list has been looked
	subs []*subj
}

type upcoming struct {
	from, through uint64 // seqs is complete for [from, through]
	seqs          []uint64
	loaded        weak.Pointer[run] // messages of some of them, read ahead
}

// selected returns the subjects of list that pattern selects.
func (c *matchCache) selected(pattern string, list []*subj, gen uint64) []*subj {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.patterns[pattern]
	if e == nil || e.gen != gen {
		if c.patterns == nil {
			c.patterns = make(map[string]*matched)
		}
		evict(c.patterns)
		e = &matched{gen: gen}
		c.patterns[pattern] = e
	}
	for ; e.upto < len(list); e.upto++ {
		if s := list[e.upto]; storage.MatchSubject(pattern, s.name) {
			e.subs = append(e.subs, s)
		}
	}
	return slices.Clip(e.subs)
}

// evict makes room for one more.
func evict[V any](m map[string]V) {
	for k := range m {
		if len(m) < matchCached {
			return
		}
		delete(m, k)
	}
}

// ahead returns the sequences known to come from seq on, the messages of them
// that have been loaded, and up to where that is all.
func (c *matchCache) ahead(key string, seq uint64) (seqs []uint64, loaded *run, through uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.filters[key]
	if u == nil || seq < u.from || seq > u.through {
		return nil, nil, 0, false
	}
	i, _ := slices.BinarySearch(u.seqs, seq)
	return u.seqs[i:], u.loaded.Value(), u.through, true
}

// setLoaded keeps loaded messages of what ahead has returned.
func (c *matchCache) setLoaded(key string, loaded *run) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if u := c.filters[key]; u != nil {
		u.loaded = weak.Make(loaded)
	}
}

func (c *matchCache) setAhead(key string, from, through uint64, seqs []uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.filters == nil {
		c.filters = make(map[string]*upcoming)
	}
	if c.filters[key] == nil {
		evict(c.filters)
	}
	c.filters[key] = &upcoming{from: from, through: through, seqs: seqs}
}

// match returns the subjects that f selects, some perhaps without messages.
// It takes the lock itself.
func (t *Table) match(f storage.Filter) ([]*subj, error) {
	var literals [1]*subj
	subs := literals[:0]
	whole := len(f.Patterns) == 0
	for _, p := range f.Patterns {
		if storage.HasWildcard(p) {
			whole = true
			continue
		}
		s, err := t.find(p)
		if err != nil {
			return nil, err
		}
		if s != nil {
			subs = append(subs, s)
		}
	}
	if whole {
		if err := t.all(); err != nil {
			return nil, err
		}
	}
	t.mu.RLock()
	list, gen := t.list, t.listGen
	t.mu.RUnlock()
	wild := 0
	if len(f.Patterns) == 0 {
		return list, nil
	}
	for _, p := range f.Patterns {
		switch {
		case p == "":
			return list, nil
		case storage.HasWildcard(p):
			wild++
			more := t.matches.selected(p, list, gen)
			if len(subs) == 0 {
				subs = more
			} else {
				subs = append(slices.Clip(subs), more...)
			}
		}
	}
	if wild == len(f.Patterns) && wild == 1 || len(subs) < 2 {
		return subs, nil
	}
	seen := make(map[*subj]struct{}, len(subs))
	out := make([]*subj, 0, len(subs))
	for _, s := range subs {
		if _, dup := seen[s]; !dup {
			seen[s] = struct{}{}
			out = append(out, s)
		}
	}
	return out, nil
}

// matchLocked is match for one pattern, by the writer who holds the lock.
func (t *Table) matchLocked(pattern string) ([]*subj, error) {
	if storage.HasWildcard(pattern) {
		if err := t.allLocked(); err != nil {
			return nil, err
		}
		return t.matches.selected(pattern, t.list, t.listGen), nil
	}
	s, err := t.lookup(pattern)
	if s == nil || err != nil {
		return nil, err
	}
	return []*subj{s}, nil
}
