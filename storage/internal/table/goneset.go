package table

// Gone tells which sequences hold no message, for those who read an image
// without a table.
type Gone struct{ g gone }

// NewGone returns what pages and spans, as an image keeps them, say.
func NewGone(pages map[uint64]*Page, spans []Span) *Gone {
	return &Gone{gone{pages: pages, spans: spans}}
}

// Contains reports whether seq holds no message.
func (g *Gone) Contains(seq uint64) bool { return g.g.contains(seq) }

// Next returns the lowest sequence from seq up to last that holds a message.
func (g *Gone) Next(seq, last uint64) (uint64, bool) { return g.g.next(seq, last) }

// PageLen is how many sequences a Page is about.
const PageLen = pageBits

// NextSeq returns the lowest sequence of t from seq on that holds a message.
func NextSeq(t *Table, seq uint64) (uint64, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.msgs == 0 {
		return 0, false
	}
	return t.gone.next(max(seq, t.first), t.last)
}
