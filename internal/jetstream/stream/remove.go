package stream

import (
	"errors"
	"fmt"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
)

// enforce removes what exceeds the limits after a message on subject was
// stored.
func (m *Machine) enforce(subject string) error {
	cfg := &m.cfg
	if cfg.MaxMsgsPer > 0 {
		for {
			ss, ok := m.store.Subject(subject)
			if !ok || ss.Msgs <= uint64(cfg.MaxMsgsPer) {
				break
			}
			if err := m.remove(ss.First); err != nil {
				return err
			}
		}
	}
	return m.enforceTotals()
}

func (m *Machine) enforceTotals() error {
	cfg := &m.cfg
	if cfg.MaxMsgs <= 0 && cfg.MaxBytes <= 0 {
		return nil
	}
	for {
		st := m.store.State()
		over := cfg.MaxMsgs > 0 && st.Msgs > uint64(cfg.MaxMsgs) ||
			cfg.MaxBytes > 0 && st.Bytes > uint64(cfg.MaxBytes)
		if !over || st.Msgs == 0 {
			return nil
		}
		if err := m.remove(st.First); err != nil {
			return err
		}
	}
}

func (m *Machine) remove(seq uint64) error {
	var subject string
	var damaged bool
	if m.obs != nil {
		msg, err := m.store.Load(seq)
		// Where it was may be destroyed; what that means the store knows.
		if damaged = errors.Is(err, storage.ErrCorrupt); err != nil && !damaged {
			return fmt.Errorf("removing message %d: %w", seq, err)
		}
		subject = msg.Subject
	}
	if _, err := m.store.Remove(seq); err != nil {
		return fmt.Errorf("removing message %d: %w", seq, err)
	}
	switch {
	case m.obs == nil:
	case damaged: // whose it was cannot be told
		m.obs.Purged()
	default:
		m.obs.Removed(seq, subject)
	}
	return nil
}

func (m *Machine) doPurge(subject string, upto, keep uint64) (uint64, error) {
	n, err := m.store.Purge(subject, upto, keep)
	if n > 0 && m.obs != nil {
		m.obs.Purged()
	}
	return n, err
}

// Acked removes a message that no consumer needs any more, for streams whose
// retention is by interest or as a work queue. A message that is gone already
// is no error. It is part of applying a consumer's logged command.
func (m *Machine) Acked(seq uint64) error {
	if m.cfg.Retention == api.LimitsPolicy {
		return nil
	}
	if err := m.remove(seq); err != nil && !errors.Is(err, storage.ErrNotFound) {
		return fmt.Errorf("stream %q: %w", m.cfg.Name, err)
	}
	return nil
}

// Unwanted removes all messages, as nobody needs any of them; it is for streams
// whose retention is by interest. Like Acked it is part of applying a command.
func (m *Machine) Unwanted() error {
	if _, err := m.doPurge("", 0, 0); err != nil {
		return fmt.Errorf("stream %q: %w", m.cfg.Name, err)
	}
	return nil
}

func (m *Machine) deleteMsg(c *command.DeleteMsg, r *Result) error {
	switch {
	case m.cfg.Sealed:
		r.Refused = api.ErrStreamSealed
		return nil
	case m.cfg.DenyDelete:
		r.Refused = api.ErrStreamMsgDeleteFailed.With("err", "message delete not permitted")
		return nil
	}
	err := m.remove(c.Seq)
	if errors.Is(err, storage.ErrNotFound) {
		r.Refused = api.ErrSequenceNotFound.With("seq", c.Seq)
		return nil
	}
	r.Removed = 1
	return err
}

func (m *Machine) purge(c *command.Purge, r *Result) error {
	switch {
	case m.cfg.Sealed:
		r.Refused = api.ErrStreamSealed
		return nil
	case m.cfg.DenyPurge:
		r.Refused = api.ErrStreamPurgeFailed.With("err", "stream purge not permitted")
		return nil
	}
	n, err := m.doPurge(c.Subject, c.Seq, c.Keep)
	if err != nil {
		return fmt.Errorf("purging: %w", err)
	}
	r.Removed = n
	return nil
}
