package jetstream

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"petiole/storage"
)

// prefixLost begins the keys under which a stream keeps which of its sequences
// damage has taken: 16 hexadecimal digits of the first follow, the value is
// JSON of a lostSpan.
const prefixLost = "x/"

// lostSpan is a run of sequences whose messages were lost to damage.
type lostSpan struct {
	First uint64 `json:"first"`
	Last  uint64 `json:"last"`
	Time  int64  `json:"time"` // when it was found, Unix ns
}

// maxLost bounds how many spans a stream remembers: the oldest sequences go
// first.
const maxLost = 4096

// addLost notes lost sequences. The caller holds the lock.
func (s *Stream) addLost(span storage.Span, found time.Time) {
	s.lostSpans = append(s.lostSpans, lostSpan{span.First, span.Last, found.UnixNano()})
	slices.SortFunc(s.lostSpans, func(a, b lostSpan) int {
		switch {
		case a.First < b.First:
			return -1
		case a.First > b.First:
			return 1
		}
		return 0
	})
	if n := len(s.lostSpans); n > maxLost {
		s.lostSpans = s.lostSpans[n-maxLost:]
	}
	s.lostFresh = true
	if s.dirtyFrom == 0 && !s.memory {
		s.dirtyFrom = s.applied + 1
	}
}

func (s *Stream) restoreLost(value []byte) error {
	var l lostSpan
	if err := json.Unmarshal(value, &l); err != nil || l.First == 0 || l.Last < l.First {
		return fmt.Errorf("%w: a note of lost messages: %q", storage.ErrCorrupt, value)
	}
	s.lostSpans = append(s.lostSpans, l) // the keys are in order
	return nil
}

// lostChanges returns the notes that no checkpoint has.
func (s *Stream) lostChanges() (kvs []storage.KV) {
	if !s.lostFresh {
		return nil
	}
	for _, l := range s.lostSpans {
		b, err := json.Marshal(&l)
		if err == nil { // numbers
			kvs = append(kvs, storage.KV{Key: fmt.Sprintf("%s%016x", prefixLost, l.First), Value: b})
		}
	}
	return kvs
}

// Lost returns the sequences at or after from whose messages damage has taken,
// ascending, as far as they are remembered.
func (s *Stream) Lost(from uint64) []storage.Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	var spans []storage.Span
	for _, l := range s.lostSpans {
		if l.Last >= from {
			spans = append(spans, storage.Span{First: max(l.First, from), Last: l.Last})
		}
	}
	return spans
}
