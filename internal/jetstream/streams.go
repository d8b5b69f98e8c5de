package jetstream

import (
	"maps"
	"slices"
)

// Stream returns the stream of that name.
func (e *Engine) Stream(name string) (*Stream, bool) {
	s, ok := (*e.streams.Load())[name]
	return s, ok
}

// Streams returns all streams, by name.
func (e *Engine) Streams() []*Stream {
	m := *e.streams.Load()
	list := make([]*Stream, 0, len(m))
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, m[name])
	}
	return list
}

// WatchStreams calls fn, which must not block, after a stream was created or
// deleted, until cancel is called.
func (e *Engine) WatchStreams(fn func()) (cancel func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.watchID++
	id := e.watchID
	e.watchers[id] = fn
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.watchers, id)
	}
}

func (e *Engine) streamsChanged() {
	e.mu.Lock()
	fns := slices.Collect(maps.Values(e.watchers))
	e.mu.Unlock()
	for _, fn := range fns {
		fn()
	}
}

// addStream and removeStream replace the map of streams. They run on the
// goroutine that applies, one at a time.
func (e *Engine) addStream(s *Stream) {
	m := maps.Clone(*e.streams.Load())
	m[s.name] = s
	e.streams.Store(&m)
	e.groups[s.group] = s
}

func (e *Engine) removeStream(s *Stream) {
	m := maps.Clone(*e.streams.Load())
	delete(m, s.name)
	e.streams.Store(&m)
	delete(e.groups, s.group)
	s.uncount()
	e.wal.ForgetLast(s.group)
}
