package subject

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// ErrInvalid says that a subject is not well-formed.
var ErrInvalid = errors.New("invalid subject")

// Index finds the subscriptions that match a literal subject. V is what a
// subscription is to the owner, typically a pointer. An Index may be used
// concurrently; lookups do not exclude each other. The zero value is an empty
// Index ready for use.
//
// Subjects form a tree of tokens, with "*" and ">" beside the literal ones, so
// that a lookup visits at most two branches per token and the cost does not
// depend on the number of subscriptions that do not match.
type Index[V comparable] struct {
	mu   sync.RWMutex
	root level[V]
	n    int

	// Numbers of changes: of subjects by their first token, and of those whose
	// first token is a wildcard.
	gens [genSlots]atomic.Uint64
	wild atomic.Uint64
}

// genSlots is into how many parts subjects fall by their first token. A change
// makes only its own part's results old, so that clients that come and go with
// their inboxes do not concern those who publish measurements.
const genSlots = 64

// slot returns the part of a literal subject, or of one with wildcards behind
// its first token.
func slot[T Chars](subject T) uint32 {
	h := uint32(2166136261) // FNV-1a
	for i := 0; i < len(subject) && subject[i] != '.'; i++ {
		h = (h ^ uint32(subject[i])) * 16777619
	}
	return (h ^ h>>16) % genSlots
}

// generation changes with every change that can concern literal subjects of
// the part. A result is up to date for as long as the generation read before
// its lookup stays.
func (x *Index[V]) generation(slot uint32) uint64 { return x.gens[slot].Load() + x.wild.Load() }

// changed notes a change of subject.
func (x *Index[V]) changed(subject string) {
	if tok, _, _ := next(subject); tok == "*" || tok == ">" {
		x.wild.Add(1)
	} else {
		x.gens[slot(subject)].Add(1)
	}
}

// level holds the nodes for one token position.
type level[V comparable] struct {
	lit  map[string]*node[V]
	star *node[V] // "*"
	tail *node[V] // ">"
}

// node holds what is subscribed to the subject that ends here.
type node[V comparable] struct {
	next   *level[V]
	plain  []V
	queues []Group[V]
	at     places[V] // of plain
}

// Group is a queue group: one of Members is to get a message.
type Group[V comparable] struct {
	Name    string
	Members []V
	at      places[V] // of a node's Members; nil in a Result
}

// places tells where in a long list its elements are, so that a crowd that
// leaves at once does not look through the list for each of its members. Of an
// element that is there several times it may have one place or none. It is nil
// for a list that is not long.
type places[V comparable] map[V]int

// longList is from how many elements on a list has places.
const longList = 256

// Result is the outcome of a lookup. A lookup into a Result reuses its memory.
type Result[V comparable] struct {
	Plain  []V        // subscriptions without queue group
	Queues []Group[V] // one per queue group with a matching member
}

// Empty reports whether nothing matched.
func (r *Result[V]) Empty() bool { return len(r.Plain) == 0 && len(r.Queues) == 0 }

// reset empties r but keeps its memory, also that of the groups.
func (r *Result[V]) reset() {
	clear(r.Plain)
	r.Plain = r.Plain[:0]
	for i := range r.Queues {
		clear(r.Queues[i].Members)
	}
	r.Queues = r.Queues[:0]
}

func (r *Result[V]) add(n *node[V]) {
	r.Plain = append(r.Plain, n.plain...)
next:
	for i := range n.queues {
		g := &n.queues[i]
		for j := range r.Queues {
			if r.Queues[j].Name == g.Name {
				r.Queues[j].Members = append(r.Queues[j].Members, g.Members...)
				continue next
			}
		}
		if k := len(r.Queues); k < cap(r.Queues) {
			r.Queues = r.Queues[:k+1]
			r.Queues[k].Name = g.Name
			r.Queues[k].Members = append(r.Queues[k].Members[:0], g.Members...)
		} else {
			r.Queues = append(r.Queues, Group[V]{Name: g.Name, Members: slices.Clone(g.Members)})
		}
	}
}

// Len returns the number of subscriptions.
func (x *Index[V]) Len() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.n
}

// Insert adds v under subject, which may have wildcards, in queue group queue
// (empty: none). The strings are copied.
func (x *Index[V]) Insert(subject, queue string, v V) error {
	if !Valid(subject) {
		return fmt.Errorf("subscribe to %q: %w", subject, ErrInvalid)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	n := x.root.node(subject)
	if queue == "" {
		n.plain = n.at.add(n.plain, v)
	} else {
		i := slices.IndexFunc(n.queues, func(g Group[V]) bool { return g.Name == queue })
		if i < 0 {
			i = len(n.queues)
			n.queues = append(n.queues, Group[V]{Name: string([]byte(queue))})
		}
		n.queues[i].Members = n.queues[i].at.add(n.queues[i].Members, v)
	}
	x.n++
	x.changed(subject)
	return nil
}

// node returns the node of subject, made if need be.
func (l *level[V]) node(subject string) *node[V] {
	for {
		tok, rest, more := next(subject)
		var n *node[V]
		switch tok {
		case "*":
			if l.star == nil {
				l.star = new(node[V])
			}
			n = l.star
		case ">":
			if l.tail == nil {
				l.tail = new(node[V])
			}
			n = l.tail
		default:
			n = l.lit[tok]
			if n == nil {
				if l.lit == nil {
					l.lit = make(map[string]*node[V])
				}
				n = new(node[V])
				l.lit[string([]byte(tok))] = n
			}
		}
		if !more {
			return n
		}
		if n.next == nil {
			n.next = new(level[V])
		}
		l, subject = n.next, rest
	}
}

// Remove takes v under subject and queue out again and reports whether it was
// there.
func (x *Index[V]) Remove(subject, queue string, v V) bool {
	if !Valid(subject) {
		return false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.root.remove(subject, queue, v) {
		return false
	}
	x.n--
	x.changed(subject)
	return true
}

// remove also prunes what has become empty on the way back.
func (l *level[V]) remove(subject, queue string, v V) bool {
	tok, rest, more := next(subject)
	var n *node[V]
	switch tok {
	case "*":
		n = l.star
	case ">":
		n = l.tail
	default:
		n = l.lit[tok]
	}
	if n == nil {
		return false
	}
	if more {
		if n.next == nil || !n.next.remove(rest, queue, v) {
			return false
		}
		if n.next.empty() {
			n.next = nil
		}
	} else if !n.remove(queue, v) {
		return false
	}
	if n.next == nil && len(n.plain) == 0 && len(n.queues) == 0 {
		switch tok {
		case "*":
			l.star = nil
		case ">":
			l.tail = nil
		default:
			delete(l.lit, tok)
		}
	}
	return true
}

func (l *level[V]) empty() bool { return len(l.lit) == 0 && l.star == nil && l.tail == nil }

func (n *node[V]) remove(queue string, v V) (found bool) {
	if queue == "" {
		n.plain, found = n.at.remove(n.plain, v)
		return found
	}
	gi := slices.IndexFunc(n.queues, func(g Group[V]) bool { return g.Name == queue })
	if gi < 0 {
		return false
	}
	g := &n.queues[gi]
	if g.Members, found = g.at.remove(g.Members, v); len(g.Members) == 0 {
		n.queues = slices.Delete(n.queues, gi, gi+1)
	}
	return found
}

// add appends v to s, whose places p has.
func (p places[V]) add(s []V, v V) []V {
	if p != nil {
		p[v] = len(s)
	}
	return append(s, v)
}

// remove takes v out of s, whose places p has, and reports whether it was there.
func (p *places[V]) remove(s []V, v V) ([]V, bool) {
	if len(s) < longList {
		*p = nil
	} else if *p == nil {
		*p = make(places[V], len(s))
		for i, o := range s {
			(*p)[o] = i
		}
	}
	i, ok := (*p)[v]
	if !ok {
		if i = slices.Index(s, v); i < 0 {
			return s, false
		}
	}
	if *p != nil {
		if last := len(s) - 1; i != last {
			(*p)[s[last]] = i
		}
		delete(*p, v)
	}
	return cut(s, i), true
}

// cut removes s[i] without keeping the order, and gives memory back that a
// crowd long gone has left.
func cut[V any](s []V, i int) []V {
	last := len(s) - 1
	s[i] = s[last]
	clear(s[last:])
	s = s[:last]
	if cap(s) > 64 && len(s) < cap(s)/4 {
		return append(make([]V, 0, cap(s)/2), s...)
	}
	return s
}

// Match looks the literal subject up and puts what matches into r.
func (x *Index[V]) Match(subject string, r *Result[V]) {
	r.reset()
	x.mu.RLock()
	x.root.match(subject, r)
	x.mu.RUnlock()
}

// MatchBytes is [Index.Match] for bytes; subject is not kept.
func (x *Index[V]) MatchBytes(subject []byte, r *Result[V]) {
	x.Match(unsafe.String(unsafe.SliceData(subject), len(subject)), r)
}

func (l *level[V]) match(subject string, r *Result[V]) {
	for {
		if l.tail != nil {
			r.add(l.tail)
		}
		tok, rest, more := next(subject)
		lit := l.lit[tok]
		if l.star != nil {
			if !more {
				r.add(l.star)
			} else if l.star.next != nil {
				l.star.next.match(rest, r)
			}
		}
		if lit == nil {
			return
		}
		if !more {
			r.add(lit)
			return
		}
		if lit.next == nil {
			return
		}
		l, subject = lit.next, rest
	}
}

// Any reports whether anything matches the literal subject.
func (x *Index[V]) Any(subject string) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.root.any(subject)
}

func (l *level[V]) any(subject string) bool {
	for {
		if l.tail != nil {
			return true
		}
		tok, rest, more := next(subject)
		if l.star != nil {
			if !more {
				if l.star.here() {
					return true
				}
			} else if l.star.next != nil && l.star.next.any(rest) {
				return true
			}
		}
		lit := l.lit[tok]
		if lit == nil {
			return false
		}
		if !more {
			return lit.here()
		}
		if lit.next == nil {
			return false
		}
		l, subject = lit.next, rest
	}
}

func (n *node[V]) here() bool { return len(n.plain) > 0 || len(n.queues) > 0 }
