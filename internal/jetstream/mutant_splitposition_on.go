//go:build mutant_splitposition

package jetstream

import (
	"crypto/rand"
	"slices"
	"sync"

	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
)

var (
	splitMu     sync.Mutex
	splitQueues = map[*Stream]chan func(){}
)

func splitPosition(s *Stream, in *command.Ingest, finish func(callResult)) bool {
	splitMu.Lock()
	queue := splitQueues[s]
	if queue == nil {
		queue = make(chan func(), 1<<16)
		splitQueues[s] = queue
		go func() {
			for propose := range queue {
				propose()
			}
		}()
	}
	splitMu.Unlock()
	fail := func(err error) { finish(callResult{Result: stream.Result{Err: err}}) }

	// The messages, under a position that nobody will ask for.
	first := *in
	first.Edge = "split"
	rand.Read(first.UID[:])
	first.Incarnation, first.Base = 1, in.First
	first.PrevChain = command.Seed(first.UID, 1, in.First)

	// The position, with gaps for messages.
	second := *in
	second.Msgs, second.Gaps = nil, []command.Gap{{First: in.First, Last: in.Through}}
	record := second.AppendTo(nil)

	stored := &call{fn: func(callResult) {
		queue <- func() {
			if err := s.e.prop.Propose(s.group, &call{fn: finish}, record); err != nil {
				fail(err)
			}
			s.e.Kick()
		}
	}}
	if err := s.e.prop.Propose(s.group, stored, slices.Clone(first.AppendTo(nil))); err != nil {
		fail(err)
	}
	return true
}
