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
	// Until is the first sequence of the stream as of the checkpoint
	// after it was found, or what follows the span if that is higher: as soon as
	// the stream begins above it, limits have passed the place.
	Until uint64 `json:"until"`
}

// maxLost bounds how many spans a stream remembers: the oldest sequences go
// first.
const maxLost = 4096

// addLost notes lost sequences. The caller holds the lock.
func (s *Stream) addLost(span storage.Span, found time.Time) {
	s.lostSpans = append(s.lostSpans, lostSpan{First: span.First, Last: span.Last, Time: found.UnixNano()})
	slices.SortFunc(s.lostSpans, func(a, b lostSpan) int {
		switch {
		case a.First < b.First:
			return -1
		case a.First > b.First:
			return 1
		}
		return 0
	})
	s.forgetLost(len(s.lostSpans) - maxLost)
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

// forgetLost drops the first n spans, whose keys go with the next checkpoint.
func (s *Stream) forgetLost(n int) {
	for ; n > 0; n-- {
		s.lostGone = append(s.lostGone, lostKey(s.lostSpans[0].First))
		s.lostSpans = s.lostSpans[1:]
	}
}

func lostKey(first uint64) string { return fmt.Sprintf("%s%016x", prefixLost, first) }

// lostChanges returns what no checkpoint has of the notes: spans that limits have
// passed are dropped, there is nothing to tell of them any more. That the stream
// begins above one is not enough, for that damage alone may have done.
func (s *Stream) lostChanges() (kvs []storage.KV) {
	if len(s.lostSpans) > 0 {
		first, n := s.store.State().First, 0
		for i := range s.lostSpans {
			l := &s.lostSpans[i]
			if l.Until == 0 {
				l.Until = max(l.Last+1, first)
			}
			if i == n && l.Until < first {
				n++
			}
		}
		s.forgetLost(n)
	}
	for _, key := range s.lostGone {
		kvs = append(kvs, storage.KV{Key: key})
	}
	if !s.lostFresh {
		return kvs
	}
	for _, l := range s.lostSpans {
		b, err := json.Marshal(&l)
		if err == nil { // numbers
			kvs = append(kvs, storage.KV{Key: lostKey(l.First), Value: b})
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
