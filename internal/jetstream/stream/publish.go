package stream

import (
	"errors"
	"fmt"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
)

// prepared is a message that may be stored.
type prepared struct {
	msg storage.Message
	h   headers
	ttl time.Duration
	cmd *command.Publish
}

// staged is what the messages of a batch before the one at hand would change.
type staged struct {
	subjects map[string]stagedSubject
	ids      map[string]struct{}
	msgs     uint64
	bytes    uint64
}

type stagedSubject struct{ last, msgs uint64 }

func (m *Machine) publish(c *command.Publish, r *Result) error {
	var p prepared
	if err := m.prepare(&p, c, nil, r); err != nil || r.Refused != nil || r.Duplicate {
		return err
	}
	return m.put(&p, r)
}

// batch stores several messages, if each may be stored after those before it.
func (m *Machine) batch(c *command.Batch, r *Result) error {
	b := &staged{subjects: map[string]stagedSubject{}, ids: map[string]struct{}{}}
	list := make([]prepared, len(c.Msgs))
	for i := range c.Msgs {
		p := &list[i]
		if err := m.prepare(p, &c.Msgs[i], b, r); err != nil || r.Refused != nil {
			return err
		}
		b.msgs++
		b.bytes += p.msg.Size()
		b.subjects[p.msg.Subject] = stagedSubject{m.store.State().Last + b.msgs, b.subjects[p.msg.Subject].msgs + 1}
		if p.h.msgID != "" {
			b.ids[p.h.msgID] = struct{}{}
		}
	}
	for i := range list {
		if err := m.put(&list[i], r); err != nil {
			return err
		}
	}
	if len(list) > 0 {
		r.Before = uint64(len(list)) - 1
	}
	return nil
}

// prepare decides whether a message may be stored; if not, it says so in r. b
// is nil unless the message belongs to a batch.
func (m *Machine) prepare(p *prepared, c *command.Publish, b *staged, r *Result) error {
	cfg := &m.cfg
	if cfg.Sealed {
		r.Refused = api.ErrStreamSealed
		return nil
	}
	if cfg.MaxMsgSize >= 0 && len(c.Header)+len(c.Data) > int(cfg.MaxMsgSize) {
		r.Refused = api.ErrStreamMessageExceedsMaximum
		return nil
	}
	if m.transform != nil {
		if mapped, ok := m.transform.Apply(c.Subject); ok {
			c.Subject = mapped
		}
	}
	if c.Subject == "" || len(c.Subject) > storage.MaxSubject {
		r.Refused = api.ErrBadRequest
		return nil
	}
	p.cmd = c
	p.msg = storage.Message{Time: max(c.Time, m.lastTime), Subject: c.Subject, Header: c.Header, Data: c.Data}
	if len(c.Header) > 0 {
		if len(c.Header) > maxHeader {
			r.Refused = api.ErrStreamHeaderExceedsMaximum
			return nil
		}
		p.h = parseHeaders(c.Header)
		if err := m.checkHeaders(p, b, r); err != nil || r.Refused != nil || r.Duplicate {
			return err
		}
	}
	refused, err := m.admit(&p.msg, b)
	r.Refused = refused
	return err
}

// checkHeaders decides by the headers whether a message may be stored. The
// order of the checks is what clients see when several would fail.
func (m *Machine) checkHeaders(p *prepared, b *staged, r *Result) error {
	h := &p.h
	if h.batch && b == nil {
		r.Refused = api.ErrAtomicPublishDisabled
		return nil
	}
	if h.refused != nil {
		r.Refused = h.refused
		return nil
	}
	if h.expectedStream != "" && h.expectedStream != m.cfg.Name {
		r.Refused = api.ErrStreamNotMatch
		return nil
	}
	if h.ttl != "" {
		d, ok := parseTTL(h.ttl)
		switch {
		case !m.cfg.AllowMsgTTL && (d != 0 || !ok):
			r.Refused = api.ErrMessageTTLDisabled
			return nil
		case !ok:
			r.Refused = api.ErrMessageTTLInvalid
			return nil
		}
		p.ttl = d
	}
	switch {
	case h.hasSubjSeq:
		subject := p.msg.Subject
		if h.expectedSubj != "" {
			subject = h.expectedSubj
		}
		last, err := m.lastOf(subject, b)
		if err != nil {
			return err
		}
		if last != h.subjSeq {
			r.Refused = api.ErrStreamWrongLastSequence.With("seq", last)
			return nil
		}
	case h.expectedSubj != "":
		r.Refused = api.ErrStreamExpectedLastSeqPerSubjectInvalid
		return nil
	}
	if h.hasLastSeq {
		last := m.store.State().Last
		if b != nil {
			last += b.msgs
		}
		if last != h.lastSeq {
			r.Refused = api.ErrStreamWrongLastSequence.With("seq", last)
			return nil
		}
	}
	if h.msgID != "" && m.cfg.Duplicates > 0 {
		m.ids.tick(p.cmd.Steady, p.cmd.Time)
		m.ids.prune(m.ids.at - int64(m.cfg.Duplicates))
		seq, known := m.ids.lookup(dedupID(h.msgID))
		switch {
		case b == nil && known:
			r.Seq, r.Duplicate = seq, true
			return nil
		case b != nil:
			if _, twice := b.ids[h.msgID]; twice || known {
				r.Refused = api.ErrAtomicPublishContainsDuplicateMessage
				return nil
			}
		}
	}
	if h.expectedLastID != "" {
		switch {
		case b != nil:
			r.Refused = api.ErrAtomicPublishUnsupportedHeaderBatch.With("header", HeaderExpectedLastID)
			return nil
		case h.expectedLastID != m.lastID:
			r.Refused = api.ErrStreamWrongLastMsgID.With("id", m.lastID)
			return nil
		}
	}
	if h.rollup != "" {
		switch {
		case !m.cfg.AllowRollup || m.cfg.DenyPurge:
			r.Refused = api.ErrStreamRollupFailed.With("err", "rollup not permitted")
		case h.rollup != "sub" && h.rollup != "all":
			r.Refused = api.ErrStreamRollupFailed.With("err", fmt.Sprintf("rollup value invalid: %q", h.rollup))
		}
	}
	return nil
}

// lastOf returns the sequence of the last message that matches a pattern; 0 if
// there is none.
func (m *Machine) lastOf(pattern string, b *staged) (uint64, error) {
	var last uint64
	if b != nil {
		for s, st := range b.subjects {
			if storage.MatchSubject(pattern, s) {
				last = max(last, st.last)
			}
		}
	}
	if last > 0 {
		return last, nil
	}
	msg, err := m.store.LoadLast(pattern, 0)
	if seq, damaged := storage.Damaged(err); damaged {
		return seq, nil
	}
	if err != nil && !errors.Is(err, storage.ErrNotFound) {
		return 0, fmt.Errorf("loading the last message of %q: %w", pattern, err)
	}
	return msg.Seq, nil
}

// admit decides by the stream's limits whether a message may be stored.
func (m *Machine) admit(msg *storage.Message, b *staged) (*api.Error, error) {
	cfg := &m.cfg
	if cfg.Discard != api.DiscardNew {
		return nil, nil
	}
	var msgs, bytes uint64 // staged before this one
	var own stagedSubject
	if b != nil {
		msgs, bytes, own = b.msgs, b.bytes, b.subjects[msg.Subject]
	}
	// A message that replaces one of its own subject needs no room beyond
	// what that one leaves.
	var freed uint64
	full := false
	if cfg.MaxMsgsPer > 0 {
		ss, ok := m.store.Subject(msg.Subject)
		if ss.Msgs+own.msgs >= uint64(cfg.MaxMsgsPer) {
			if cfg.DiscardNewPer {
				return api.ErrStreamStoreFailed.With("err", "maximum messages per subject exceeded"), nil
			}
			full = true
			if ok {
				first, err := m.store.Load(ss.First)
				if _, damaged := storage.Damaged(err); err != nil && !damaged {
					return nil, fmt.Errorf("loading the first message of %q: %w", msg.Subject, err)
				}
				if err == nil {
					freed = first.Size()
				}
			}
		}
	}
	st := m.store.State()
	if cfg.MaxMsgs > 0 && st.Msgs+msgs >= uint64(cfg.MaxMsgs) && !full {
		return api.ErrStreamStoreFailed.With("err", "maximum messages exceeded"), nil
	}
	if cfg.MaxBytes > 0 && st.Bytes-freed+bytes+msg.Size() > uint64(cfg.MaxBytes) {
		return api.ErrStreamStoreFailed.With("err", "maximum bytes exceeded"), nil
	}
	return nil, nil
}

// put stores a message that prepare let pass, and what follows from it.
func (m *Machine) put(p *prepared, r *Result) error {
	subject := p.msg.Subject
	if m.cfg.RePublish != nil {
		if ss, ok := m.store.Subject(subject); ok {
			r.Prev = ss.Last
		}
	}
	if err := m.append(&p.msg, p.ttl); err != nil {
		return err
	}
	r.Seq = p.msg.Seq
	if p.h.msgID != "" {
		m.ids.add(dedupID(p.h.msgID), p.msg.Seq, m.ids.at)
	}
	if m.lastID != p.h.msgID {
		m.lastID, m.dirtyLastID = p.h.msgID, true
	}
	switch p.h.rollup {
	case "sub":
		if _, err := m.doPurge(subject, p.msg.Seq, 0); err != nil {
			return fmt.Errorf("rolling up %q: %w", subject, err)
		}
	case "all":
		if _, err := m.doPurge("", p.msg.Seq, 0); err != nil {
			return fmt.Errorf("rolling up: %w", err)
		}
	}
	return m.enforce(subject)
}

// append stores msg, and sets its sequence.
func (m *Machine) append(msg *storage.Message, ttl time.Duration) error {
	seq, err := m.store.Append(*msg)
	if err != nil {
		return fmt.Errorf("storing a message on %q: %w", msg.Subject, err)
	}
	msg.Seq = seq
	m.lastTime = msg.Time
	if ttl != 0 {
		m.ttls.add(seq, msg.Time, ttl)
		m.pruneTTLs()
	}
	if m.obs != nil {
		m.obs.Appended(seq, msg.Subject)
	}
	return nil
}
