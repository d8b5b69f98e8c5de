package table

import (
	"math/bits"
	"sort"
)

// gone knows which sequences between a stream's first and last hold no
// message. It is what makes "is there a message at n" and "which is the next"
// answerable without reading a disk.
//
// Single sequences are bits of pages, present only where something is gone;
// long jumps in the numbering (which happen at the end only) are spans:
//
//	first                                                       last
//	  │ ·····│··x·x··x│········│xxxxxxxxxxxx span xxxxxxxxxx│··x··│
//	         └ page 1 ┘ no page └──────────────────────────┘ page
//
// Pages are copied before they change if a frozen set may still have to write
// them: the generation says so.
type gone struct {
	pages map[uint64]*Page
	spans []Span // ascending, disjoint; only appended to and cut at the head
	low   uint64 // no page has a smaller number
}

// Bits of a sequence that select the bit within a page.
const (
	pageShift = 11
	pageBits  = 1 << pageShift
	// minSpan is the shortest jump that becomes a span instead of bits.
	minSpan = 2 * pageBits
)

// Page holds one bit per sequence, set where there is no message: sequence
// number*2048+i is bit i%64 of word i/64.
type Page struct {
	gen  uint64
	Bits [pageBits / 64]uint64
}

// Span is a closed interval of sequences without messages.
type Span struct{ First, Last uint64 }

// Contains reports whether seq is gone.
func (g *gone) contains(seq uint64) bool {
	if len(g.pages) > 0 {
		if p := g.pages[seq>>pageShift]; p != nil && p.Bits[seq%pageBits/64]&(1<<(seq%64)) != 0 {
			return true
		}
	}
	_, in := g.span(seq)
	return in
}

// span returns the index of the first span that ends at or after seq, and
// whether seq is within it.
func (g *gone) span(seq uint64) (int, bool) {
	n := len(g.spans)
	if n == 0 || seq > g.spans[n-1].Last {
		return n, false
	}
	i := sort.Search(n, func(i int) bool { return g.spans[i].Last >= seq })
	return i, g.spans[i].First <= seq
}

// next returns the lowest sequence from seq up to last that is not gone.
func (g *gone) next(seq, last uint64) (uint64, bool) {
	for seq <= last {
		if i, in := g.span(seq); in {
			if g.spans[i].Last >= last {
				return 0, false
			}
			seq = g.spans[i].Last + 1
			continue
		}
		var p *Page
		if len(g.pages) > 0 {
			p = g.pages[seq>>pageShift]
		}
		if p == nil {
			return seq, true
		}
		w := seq % pageBits / 64
		word := ^p.Bits[w] & (^uint64(0) << (seq % 64))
		for word == 0 && w+1 < uint64(len(p.Bits)) {
			w++
			word = ^p.Bits[w]
		}
		found := seq&^(pageBits-1) + w*64 + uint64(bits.TrailingZeros64(word)) // 64 if none: the next page
		if word != 0 {
			if _, in := g.span(found); !in {
				if found > last {
					return 0, false
				}
				return found, true
			}
		}
		seq = found
	}
	return 0, false
}

// prev returns the highest sequence from seq down to first that is not gone.
func (g *gone) prev(seq, first uint64) (uint64, bool) {
	for seq >= first && seq > 0 {
		if i, in := g.span(seq); in {
			seq = g.spans[i].First - 1
			continue
		}
		var p *Page
		if len(g.pages) > 0 {
			p = g.pages[seq>>pageShift]
		}
		if p == nil {
			return seq, true
		}
		w := seq % pageBits / 64
		word := ^p.Bits[w] & (^uint64(0) >> (63 - seq%64))
		for word == 0 && w > 0 {
			w--
			word = ^p.Bits[w]
		}
		base := seq &^ (pageBits - 1)
		if word == 0 {
			if base == 0 {
				return 0, false
			}
			seq = base - 1
			continue
		}
		seq = base + w*64 + uint64(63-bits.LeadingZeros64(word))
		if _, in := g.span(seq); !in {
			if seq < first {
				return 0, false
			}
			return seq, true
		}
	}
	return 0, false
}

// count returns how many sequences in [from, to] are gone.
func (g *gone) count(from, to uint64) uint64 {
	if from > to {
		return 0
	}
	var n uint64
	in := func(no uint64, p *Page) {
		base := no << pageShift
		for w, word := range p.Bits {
			if word == 0 {
				continue
			}
			lo := base + uint64(w)*64
			hi := lo + 63
			if hi < from || lo > to {
				continue
			}
			if lo < from {
				word &= ^uint64(0) << (from - lo)
			}
			if hi > to {
				word &= ^uint64(0) >> (hi - to)
			}
			n += uint64(bits.OnesCount64(word))
		}
	}
	lo, hi := from>>pageShift, to>>pageShift
	if hi-lo < uint64(len(g.pages)) {
		for no := lo; no <= hi; no++ {
			if p := g.pages[no]; p != nil {
				in(no, p)
			}
		}
	} else {
		for no, p := range g.pages {
			if no >= lo && no <= hi {
				in(no, p)
			}
		}
	}
	for _, s := range g.spans {
		a, b := max(s.First, from), min(s.Last, to)
		if a <= b {
			n += b - a + 1
		}
	}
	return n
}

// mark notes that seq holds no message; dirty, unless nil, collects
// the changed page.
func (g *gone) mark(seq, gen uint64, dirty map[uint64]*Page) {
	no := seq >> pageShift
	p := g.pages[no]
	if p == nil || p.gen != gen {
		q := &Page{gen: gen}
		if p != nil {
			q.Bits = p.Bits
		}
		if g.pages == nil {
			g.pages = make(map[uint64]*Page)
		}
		if len(g.pages) == 0 || no < g.low {
			g.low = no
		}
		g.pages[no], p = q, q
		if dirty != nil {
			dirty[no] = q
		}
	}
	p.Bits[seq%pageBits/64] |= 1 << (seq % 64)
}

// skip notes that none of [from, to], which follow the last sequence, holds
// a message.
func (g *gone) skip(from, to, gen uint64, dirty map[uint64]*Page) {
	if to-from+1 >= minSpan {
		g.spans = append(g.spans, Span{from, to})
		return
	}
	for ; from <= to; from++ {
		g.mark(from, gen, dirty)
	}
}

// forget drops what lies below first, the new first sequence.
func (g *gone) forget(first uint64, dirty map[uint64]*Page) {
	i := 0
	for i < len(g.spans) && g.spans[i].Last < first {
		i++
	}
	if i == len(g.spans) {
		g.spans = nil
	} else {
		g.spans = g.spans[i:]
	}
	end := first >> pageShift
	if len(g.pages) == 0 || end <= g.low {
		return
	}
	drop := func(no uint64) {
		delete(g.pages, no)
		if dirty != nil {
			dirty[no] = nil
		}
	}
	if end-g.low <= uint64(len(g.pages)) {
		for no := g.low; no < end; no++ {
			if g.pages[no] != nil {
				drop(no)
			}
		}
	} else {
		for no := range g.pages {
			if no < end {
				drop(no)
			}
		}
	}
	g.low = end
}
