package table

import (
	"sort"
	"sync"

	"petiole/storage"
)

// chunkShift: a chunk holds 256 consecutive sequences.
const (
	chunkShift = 8
	chunkLen   = 1 << chunkShift
	// slotCost is what a message costs in memory beside its contents.
	slotCost = 64
	// removedCost is what remembering one removal costs.
	removedCost = 16
)

// slot is one message held in memory; subj is nil where there is none.
type slot struct {
	subj   *subj
	time   int64
	header []byte
	data   []byte
}

func (s *slot) message(seq uint64) storage.Message {
	return storage.Message{Seq: seq, Time: s.time, Subject: s.subj.name, Header: s.header, Data: s.data}
}

func (s *slot) size() uint64 {
	m := storage.Message{Subject: s.subj.name, Header: s.header, Data: s.data}
	return m.Size()
}

func (s *slot) cost() int64 {
	return slotCost + int64(len(s.header)+len(s.data))
}

type chunk struct {
	live  int
	slots [chunkLen]slot
}

var chunkPool = sync.Pool{New: func() any { return new(chunk) }}

func (c *chunk) release() {
	if c != nil {
		*c = chunk{}
		chunkPool.Put(c)
	}
}

type chunkRef struct {
	no uint64 // sequence >> chunkShift
	c  *chunk // nil once all its messages are removed
}

// sums is what is kept about one subject.
type sums struct {
	msgs, bytes, first, last uint64
}

// subj is one subject of the stream. A subject without messages stays until
// its removal has been checkpointed.
type subj struct {
	name string
	id   uint64 // names its postings in the image; never reused
	sums
	// recent holds, ascending, at least the sequences that the image does not
	// hold; sequences that are gone or in the image too may be among them.
	recent []uint64
	ahead  *ahead
	gen    uint64 // generation of the last change
	// snap holds the values at the last freeze, if they changed since.
	snap *snapshot
	mark int // of the checkpoint that runs
}

type snapshot struct {
	gen uint64
	sums
}

// ahead is a piece of a subject's postings, kept so that removing from the
// front does not look up one at a time.
type ahead struct {
	seqs          []uint64
	from, through uint64 // seqs holds all there are in [from, through]
}

// cutRecent cuts recent to what lies at or after seq.
func (s *subj) cutRecent(seq uint64) {
	i := 0
	for i < len(s.recent) && s.recent[i] < seq {
		i++
	}
	switch {
	case i == 0:
	case i == len(s.recent):
		if cap(s.recent) > 64 {
			s.recent = nil
		} else {
			s.recent = s.recent[:0]
		}
	case len(s.recent) <= 64:
		s.recent = s.recent[:copy(s.recent, s.recent[i:])]
	default:
		s.recent = s.recent[i:]
	}
}

// searchRecent returns the index of the first recent sequence at or after seq.
func (s *subj) searchRecent(seq uint64) int {
	return sort.Search(len(s.recent), func(i int) bool { return s.recent[i] >= seq })
}

// set is what has changed since a freeze: the messages, removals and
// everything derived that the next checkpoint has to write.
type set struct {
	gen     uint64
	base    uint64 // sequences from here on are this set's (or a later one's)
	chunks  []chunkRef
	bytes   int64
	removed []uint64 // sequences an earlier set or the image holds, removed in this
	dirty   []*subj
	pages   map[uint64]*Page // changed pages, nil if dropped; no map without an image
	purged  bool             // nothing of earlier sets and the image remains

	// Filled in by Freeze.
	lsn    storage.LSN
	kvs    []storage.KV
	state  storage.State
	nextID uint64
	spans  []Span
}

// find returns the index of the chunk that holds seq or would hold it.
func (s *set) find(no uint64) (int, bool) {
	n := len(s.chunks)
	if n == 0 || no > s.chunks[n-1].no {
		return n, false
	}
	if s.chunks[n-1].no == no {
		return n - 1, true
	}
	if no < s.chunks[0].no {
		return 0, false
	}
	if i := no - s.chunks[0].no; i < uint64(n) && s.chunks[i].no == no {
		return int(i), true
	}
	i := sort.Search(n, func(i int) bool { return s.chunks[i].no >= no })
	return i, s.chunks[i].no == no
}

// slot returns the message at seq, or nil.
func (s *set) slot(seq uint64) *slot {
	i, ok := s.find(seq >> chunkShift)
	if !ok || s.chunks[i].c == nil {
		return nil
	}
	if sl := &s.chunks[i].c.slots[seq%chunkLen]; sl.subj != nil {
		return sl
	}
	return nil
}

// add returns the empty slot for seq, which is higher than any before.
func (s *set) add(seq uint64) *slot {
	no := seq >> chunkShift
	n := len(s.chunks)
	if n == 0 || s.chunks[n-1].no != no {
		s.chunks = append(s.chunks, chunkRef{no: no, c: chunkPool.Get().(*chunk)})
		n++
	} else if s.chunks[n-1].c == nil {
		s.chunks[n-1].c = chunkPool.Get().(*chunk)
	}
	c := s.chunks[n-1].c
	c.live++
	return &c.slots[seq%chunkLen]
}

// remove empties the slot at seq, which holds a message.
func (s *set) remove(seq uint64) {
	i, _ := s.find(seq >> chunkShift)
	c := s.chunks[i].c
	sl := &c.slots[seq%chunkLen]
	s.bytes -= sl.cost()
	*sl = slot{}
	if c.live--; c.live > 0 {
		return
	}
	c.release()
	s.chunks[i].c = nil
	for len(s.chunks) > 0 && s.chunks[0].c == nil {
		s.chunks = s.chunks[1:]
	}
}

// release gives the chunks back; no one may read the set any more.
func (s *set) release() {
	for _, r := range s.chunks {
		r.c.release()
	}
	s.chunks = nil
}
