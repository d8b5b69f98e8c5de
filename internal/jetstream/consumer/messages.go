package consumer

import (
	"slices"

	"petiole/internal/jetstream/api"
	"petiole/internal/subject"
)

// What the stream tells of its messages, and asks about them.

// MsgAppended says that a message was stored. Pump delivers it.
func (m *Machine) MsgAppended(seq uint64, subject string) {
	if m.live && seq > m.npf && m.Wants(subject) {
		if seq >= m.sseq {
			m.npc++
		}
		m.npf = seq
	}
}

// MsgRemoved says that a message was removed from the stream, by a limit, by
// age, by a client, or because everybody acknowledged it. What awaited an
// acknowledgement of it counts as acknowledged.
func (m *Machine) MsgRemoved(seq uint64, subject string) {
	if i, ok := slices.BinarySearch(m.skip, seq); ok {
		m.skip = slices.Delete(m.skip, i, i+1)
		m.npc--
		if len(m.skip) == 0 {
			m.sseq = max(m.sseq, m.resume)
		}
		m.dirty = true
	} else if m.live && seq >= m.sseq && (len(m.skip) == 0 || seq >= m.resume) && m.Wants(subject) {
		m.npc--
	}
	if p, ok := m.pend[seq]; ok {
		m.lost(seq, p)
	} else if _, ok := m.redeliv[seq]; ok {
		delete(m.redeliv, seq)
		m.dirty = true
	}
}

// lost drops a pending message that the stream no longer has.
func (m *Machine) lost(seq uint64, p pending) {
	n := m.redeliv[seq] + 1
	m.forget(seq)
	delete(m.redeliv, seq)
	m.dirty = true
	if m.live {
		m.advise(api.AdvisoryTerminated, api.AdvisoryTerminatedSubject, api.ConsumerAdvisory{
			ConsumerSeq: p.dseq, StreamSeq: seq, Deliveries: n, Reason: "Unacknowledged message was deleted",
		})
	}
}

// MsgsPurged says that any number of messages were removed at once; it
// inspects the stream instead of being told which.
func (m *Machine) MsgsPurged() {
	m.reconcile()
	if st := m.env.Messages.State(); len(m.pend) == 0 && st.First > 0 && m.floorS < st.First-1 {
		// Nothing below the first message will ever be delivered.
		m.lastS = max(m.lastS, st.First-1)
		m.floorS = max(m.floorS, st.First-1)
	}
	if m.live {
		m.recount()
	}
}

// reconcile drops what refers to messages that the stream no longer has.
func (m *Machine) reconcile() {
	st := m.env.Messages.State()
	gone := func(seq uint64) bool {
		if seq < st.First {
			return true
		}
		_, err := m.env.Messages.Load(seq)
		return err != nil
	}
	m.expired = m.expired[:0]
	for seq := range m.pend {
		if gone(seq) {
			m.expired = append(m.expired, seq)
		}
	}
	slices.Sort(m.expired)
	for _, seq := range m.expired {
		m.forget(seq)
		delete(m.redeliv, seq)
	}
	for seq := range m.redeliv {
		if gone(seq) {
			delete(m.redeliv, seq)
		}
	}
	for seq := range m.unsettled {
		if gone(seq) {
			delete(m.unsettled, seq)
		}
	}
	if len(m.skip) > 0 {
		m.skip = slices.DeleteFunc(m.skip, gone)
		if len(m.skip) == 0 {
			m.sseq = max(m.sseq, m.resume)
		}
	}
	if m.sseq < st.First && len(m.skip) == 0 {
		m.sseq = st.First
	}
	m.dirty = true
}

// Wants reports whether the consumer's filter selects the subject.
func (m *Machine) Wants(subj string) bool {
	if len(m.filter.Patterns) == 0 {
		return true
	}
	for _, p := range m.filter.Patterns {
		if subject.Matches(p, subj) {
			return true
		}
	}
	return false
}

// NeedsAck reports whether the message is still wanted by this consumer: not
// yet delivered, or delivered and not acknowledged as far as the log goes, or
// given up after too many attempts. A stream with interest retention removes a message that no consumer
// needs.
func (m *Machine) NeedsAck(seq uint64, subj string) bool {
	if !m.Wants(subj) {
		return false
	}
	if _, ok := m.redeliv[seq]; ok {
		return true
	}
	if _, ok := m.unsettled[seq]; ok {
		return true
	}
	if m.cfg.AckPolicy == api.AckExplicit {
		if _, ok := m.pend[seq]; ok {
			return true
		}
		if len(m.skip) > 0 {
			_, ok := slices.BinarySearch(m.skip, seq)
			return ok || seq >= m.resume
		}
		return seq >= m.sseq
	}
	return seq > m.floorS
}
