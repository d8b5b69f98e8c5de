package storage

// Span is a closed interval of sequences, First ≤ Last.
type Span struct {
	First uint64 `json:"first"`
	Last  uint64 `json:"last"`
}

// Len returns how many sequences the span has.
func (s Span) Len() uint64 { return s.Last - s.First + 1 }
