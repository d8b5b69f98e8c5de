package wal

import (
	"container/heap"

	"petiole/storage"
)

// holds is a heap of what groups need of the log, the oldest record first.
type holds struct {
	list  []hold
	index map[storage.GroupID]int // place in list
}

type hold struct {
	group storage.GroupID
	from  storage.LSN
}

// Len implements heap.Interface.
func (h *holds) Len() int { return len(h.list) }

// Less implements heap.Interface.
func (h *holds) Less(i, j int) bool { return h.list[i].from < h.list[j].from }

// Swap implements heap.Interface.
func (h *holds) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.index[h.list[i].group], h.index[h.list[j].group] = i, j
}

// Push implements heap.Interface.
func (h *holds) Push(x any) {
	e := x.(hold)
	h.index[e.group] = len(h.list)
	h.list = append(h.list, e)
}

// Pop implements heap.Interface.
func (h *holds) Pop() any {
	e := h.list[len(h.list)-1]
	h.list = h.list[:len(h.list)-1]
	delete(h.index, e.group)
	return e
}

// Hold says that group g needs the log from record from on: TrimHeld keeps that
// record and later ones. 0 says that it needs nothing (any more): all its
// records so far are checkpointed, or the group is deleted, or it begins empty
// after every start. It takes logarithmic time in the number of groups that
// hold something. Nothing is kept on disk: after Open, whoever replays the log
// says again what is needed.
func (l *Log) Hold(g storage.GroupID, from storage.LSN) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := &l.holds
	i, ok := h.index[g]
	switch {
	case ok && from == 0:
		heap.Remove(h, i)
	case ok && h.list[i].from != from:
		h.list[i].from = from
		heap.Fix(h, i)
	case !ok && from != 0:
		if h.index == nil {
			h.index = map[storage.GroupID]int{}
		}
		heap.Push(h, hold{g, from})
	}
}

// Holders returns the groups that keep the oldest segment from being trimmed,
// at most limit, beginning with the one that needs the oldest record. The first
// takes constant time, more take time in proportion to their number, however
// many groups and records there are. If there are none, only records that have
// not been applied may keep the segment, or that it is the active one.
func (l *Log) Holders(limit int) []storage.GroupID {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.segs) == 1 {
		return nil
	}
	next := l.segs[0].next
	h := &l.holds
	var groups []storage.GroupID
	// The part of the heap that lies below next is a tree of its own.
	var front holdFront
	if len(h.list) > 0 {
		front = append(front, frontHold{h.list[0], 0})
	}
	for len(front) > 0 && len(groups) < limit {
		e := heap.Pop(&front).(frontHold)
		if e.from >= next {
			break
		}
		groups = append(groups, e.group)
		for child := 2*e.at + 1; child <= 2*e.at+2 && child < len(h.list); child++ {
			heap.Push(&front, frontHold{h.list[child], child})
		}
	}
	return groups
}

// frontHold is a hold and its place in the heap.
type frontHold struct {
	hold
	at int
}

// holdFront is a heap of holds none of which is above another.
type holdFront []frontHold

func (f holdFront) Len() int           { return len(f) }
func (f holdFront) Less(i, j int) bool { return f[i].from < f[j].from }
func (f holdFront) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }
func (f *holdFront) Push(x any)        { *f = append(*f, x.(frontHold)) }
func (f *holdFront) Pop() any {
	e := (*f)[len(*f)-1]
	*f = (*f)[:len(*f)-1]
	return e
}

// TrimHeld is Trim below the oldest record that any group holds. It is not
// called before Replay has ended.
func (l *Log) TrimHeld() error {
	l.mu.Lock()
	below := storage.LSN(l.applied.Load()) + 1
	if h := &l.holds; len(h.list) > 0 {
		below = min(below, h.list[0].from)
	}
	l.mu.Unlock()
	return l.Trim(below)
}
