package jetstream

import (
	"encoding/json"
	"errors"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/subject"
	"petiole/storage"
)

// How a stream comes to be.

// EnsureStream returns the stream of cfg's name, created by cfg if it does not
// exist. An existing one is returned as it is.
func (e *Engine) EnsureStream(cfg api.StreamConfig) (*Stream, error) {
	if s, ok := e.Stream(cfg.Name); ok {
		return s, nil
	}
	s, _, err := e.createStream(&cfg)
	if errors.Is(err, api.ErrStreamNameExist) {
		if s, ok := e.Stream(cfg.Name); ok {
			return s, nil
		}
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// createStream creates a stream, or returns the one that exists with the same
// configuration.
func (e *Engine) createStream(in *api.StreamConfig) (s *Stream, created bool, err error) {
	cfg, refused := normalize(in)
	if refused != nil {
		return nil, false, refused
	}
	e.apiMu.Lock()
	defer e.apiMu.Unlock()
	if e.closing.Load() {
		return nil, false, ErrClosed
	}
	if s, ok := e.Stream(cfg.Name); ok {
		if have := s.Config(); !sameConfig(&have, cfg) {
			return nil, false, api.ErrStreamNameExist
		}
		return s, false, nil
	}
	if down := e.offline(cfg.Name); down != nil {
		return nil, false, down
	}
	if cfg.Sealed {
		return nil, false, invalid("stream configuration for create can not be sealed")
	}
	if err := e.checkOverlap(cfg); err != nil {
		return nil, false, err
	}
	if err := e.checkReserve(cfg, nil); err != nil {
		return nil, false, err
	}
	b, err := json.Marshal(cfg)
	if err != nil {
		return nil, false, err
	}
	e.mu.Lock()
	group := storage.GroupID(e.nextGroup)
	e.nextGroup++
	e.mu.Unlock()
	store := e.newStore(group, cfg.Storage, true)
	if f, ok := store.(*fileStore); ok { // creates the file: not where records of all streams are applied
		if _, err := f.acquire(); noSpace(err) {
			e.discard(group, store)
			return nil, false, api.ErrInsufficientResources
		} else if err != nil {
			if errors.Is(err, storage.ErrFailed) {
				e.fail(err)
			}
			return nil, false, api.ErrStreamCreate.With("err", err)
		}
		f.release()
	}
	e.mu.Lock()
	e.prepared[group] = store
	e.mu.Unlock()
	cmd := command.StreamCreate{
		Group: uint64(group), UID: [16]byte(newUID()), Created: time.Now().UnixNano(),
		Name: cfg.Name, Config: b,
	}
	res, err := e.propose(storage.MetaGroup, cmd.AppendTo(nil))
	if err != nil {
		// The log has failed or is closed: the next start decides whether the
		// stream has come to be, and removes the directory if not.
		e.mu.Lock()
		store = e.prepared[group]
		delete(e.prepared, group)
		e.mu.Unlock()
		switch {
		case store == nil:
		case errors.Is(err, api.ErrInsufficientResources): // it has not come to be, and room is wanted
			e.discard(group, store)
		default: // nobody else is going to
			err = errors.Join(err, store.Close())
		}
		return nil, false, err
	}
	if res.err != nil {
		return nil, false, res.err
	}
	return res.stream, true, nil
}

// discard removes what was made for a stream that has not come to be.
func (e *Engine) discard(g storage.GroupID, store storage.Store) {
	if err := store.Destroy(); errors.Is(err, storage.ErrFailed) {
		e.fail(err)
	} else if err != nil {
		e.log.Warn("the directory of a stream that could not be created remains until the next start", "group", g, "err", err)
	}
}

// checkOverlap refuses subjects that another stream has.
func (e *Engine) checkOverlap(cfg *api.StreamConfig) error {
	has := map[string][]string{}
	for name, s := range *e.streams.Load() {
		has[name] = s.cfg.Load().Subjects
	}
	for name, d := range *e.downNames.Load() {
		has[name] = d.rec.Config.Subjects
	}
	delete(has, cfg.Name)
	for _, subjects := range has {
		for _, a := range subjects {
			for _, b := range cfg.Subjects {
				if subject.Overlaps(a, b) {
					return api.ErrStreamSubjectOverlap
				}
			}
		}
	}
	return nil
}

// SetLimits changes Options.MaxMemory and MaxStore. What is stored already
// stays, even if it is more.
func (e *Engine) SetLimits(memory, store int64) {
	e.maxMemory.Store(memory)
	e.maxStore.Store(store)
}

// checkReserve refuses a stream that asks for more than the server may hold.
func (e *Engine) checkReserve(cfg *api.StreamConfig, old *Stream) error {
	memory := cfg.Storage == api.MemoryStorage
	limit := e.maxStore.Load()
	if memory {
		limit = e.maxMemory.Load()
	}
	if limit <= 0 || cfg.MaxBytes <= 0 {
		return nil
	}
	sum := cfg.MaxBytes
	for _, s := range *e.streams.Load() {
		if c := s.cfg.Load(); s != old && s.memory == memory && c.MaxBytes > 0 {
			sum += c.MaxBytes
		}
	}
	switch {
	case sum <= limit:
		return nil
	case memory:
		return api.ErrMemoryResourcesExceeded
	}
	return api.ErrStorageResourcesExceeded
}
