package consumer

import (
	"fmt"
	"slices"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
)

// The logged state, and how records change it. What happens live is recorded here,
// too: it changes the state at once, in the same way.

// record hands an event to the log, or answers at once if there is none.
func (m *Machine) record(kind command.Kind, seq, dseq uint64, t int64, ackReply string) {
	m.dirty = true
	if !m.durable {
		if ackReply != "" {
			m.env.Sink.Status(ackReply, "", nil)
		}
		return
	}
	m.rev++
	e := command.ConsumerEvent{Kind: kind, Name: m.name, Rev: m.rev, Seq: seq, DSeq: dseq, Time: t}
	m.cmd = e.Append(m.cmd[:0])
	m.env.Sink.Record(m.cmd, ackReply)
}

// Apply carries out a logged command of the kinds Delivered, Ack, Nak,
// Progress, Term, Exhausted and Reset, when it becomes durable and when it is
// replayed. (Create and Delete are the owner's business: [New],
// [Machine.Update], [Machine.Deleted].) cmd is not retained. The error says
// that cmd is malformed.
func (m *Machine) Apply(cmd []byte) error {
	if rev := command.ConsumerRev(cmd); rev != 0 && rev <= m.rev && !m.retain {
		return nil // the usual case while live
	}
	if command.KindOf(cmd) == command.KindConsumerDelivered {
		var c command.ConsumerDelivered
		if err := c.Decode(cmd); err != nil {
			return fmt.Errorf("consumer %q: %w", m.name, err)
		}
		m.applyDelivered(&c)
		return nil
	}
	var e command.ConsumerEvent
	if err := e.Decode(cmd); err != nil {
		return fmt.Errorf("consumer %q: %w", m.name, err)
	}
	if e.Kind == command.KindConsumerReset {
		m.applyReset(e.Seq)
		return nil
	}
	if e.Rev > m.rev {
		m.rev = e.Rev
		m.dirty = true
		switch e.Kind {
		case command.KindConsumerAck, command.KindConsumerTerm:
			if e.DSeq > 0 {
				m.setAcked(e.Seq, e.Time)
			}
		case command.KindConsumerNak:
			m.setNak(e.Seq, e.Time)
		case command.KindConsumerProgress:
			m.setProgress(e.Seq, e.Time)
		case command.KindConsumerExhausted:
			m.setExhausted(e.Seq)
		}
	}
	if m.retain && e.DSeq > 0 && (e.Kind == command.KindConsumerAck || e.Kind == command.KindConsumerTerm) {
		m.settled(e.Seq)
		m.env.Sink.Acked(e.Seq, true)
	}
	return nil
}

func (m *Machine) applyDelivered(c *command.ConsumerDelivered) {
	if c.Rev > m.rev {
		m.rev = c.Rev
		m.dirty = true
		d := c.DSeq
		for _, r := range c.Ranges {
			for i := range r.Count {
				m.setDelivered(r.First+i, d, r.Attempt, c.Time)
				d++
			}
		}
	}
	if m.retain && m.cfg.AckPolicy == api.AckNone {
		for _, r := range c.Ranges {
			for i := range r.Count {
				m.settled(r.First + i)
				m.env.Sink.Acked(r.First+i, true)
			}
		}
	}
}

// unsettle notes that the stream will be told through the log that the message
// is done with.
func (m *Machine) unsettle(seq uint64) {
	if m.retain && m.durable {
		m.unsettled[seq] = struct{}{}
	}
}

func (m *Machine) settled(seq uint64) {
	if _, ok := m.unsettled[seq]; ok {
		delete(m.unsettled, seq)
		m.dirty = true
	}
}

// setDelivered notes a delivery, the attempt-th of the message.
func (m *Machine) setDelivered(seq, dseq, attempt uint64, t int64) {
	m.dseq = dseq + 1
	m.lastDlv = t
	if len(m.skip) > 0 && attempt == 1 {
		// Messages of the list that are gone were passed over.
		i, _ := slices.BinarySearch(m.skip, seq+1)
		if m.skip = m.skip[i:]; len(m.skip) == 0 {
			m.skip, m.sseq = nil, max(m.resume, seq+1)
		} else {
			m.sseq = seq + 1
		}
	} else {
		m.sseq = max(m.sseq, seq+1)
	}
	m.lastS = max(m.lastS, seq)
	if m.cfg.AckPolicy == api.AckNone {
		m.floorD, m.floorS = dseq, seq
		return
	}
	p, known := m.pend[seq]
	if attempt > 1 {
		m.rdq.remove(seq)
		m.redeliv[seq] = attempt - 1
	}
	if !known {
		p.dseq = dseq
		m.order.push(seq)
		if m.order.len() > 2*len(m.pend)+1024 {
			m.order.filter(func(s uint64) bool { _, ok := m.pend[s]; return ok || s == seq })
		}
	}
	p.ts = t
	m.rearm(seq, p)
}

// forget takes a message out of pend and moves the floor if it was the lowest.
func (m *Machine) forget(seq uint64) bool {
	m.rdq.remove(seq)
	if _, ok := m.pend[seq]; !ok {
		return false
	}
	low := m.lowest()
	delete(m.pend, seq)
	if len(m.pend) == 0 {
		m.settle()
	} else if low == seq {
		low = m.lowest()
		m.floorD, m.floorS = m.pend[low].dseq-1, low-1
	}
	return true
}

// settle puts the floor where nothing is pending.
func (m *Machine) settle() {
	m.order.reset()
	m.dues = m.dues[:0]
	m.floorD, m.floorS = m.dseq-1, m.lastS
}

// lowest returns the lowest pending sequence, or 0.
func (m *Machine) lowest() uint64 {
	for m.order.len() > 0 {
		seq := m.order.peek()
		if _, ok := m.pend[seq]; ok {
			return seq
		}
		m.order.pop()
	}
	return 0
}

// setAcked notes an acknowledgement according to the policy.
func (m *Machine) setAcked(seq uint64, t int64) {
	m.lastAck = t
	if m.cfg.AckPolicy != api.AckAll {
		m.forget(seq)
		delete(m.redeliv, seq)
		return
	}
	if seq <= m.floorS {
		return
	}
	d := uint64(0)
	for m.order.len() > 0 {
		s := m.order.peek()
		if p, ok := m.pend[s]; ok {
			if s > seq {
				break
			}
			d = p.dseq
			delete(m.pend, s)
			delete(m.redeliv, s)
			m.rdq.remove(s)
		}
		m.order.pop()
	}
	switch {
	case len(m.pend) == 0:
		m.settle()
	case d > 0:
		m.floorD, m.floorS = d, seq
	}
}

func (m *Machine) setNak(seq uint64, ts int64) {
	p, ok := m.pend[seq]
	if !ok {
		return
	}
	if ts == 0 {
		p.due = 0
		m.pend[seq] = p
		m.rdq.push(seq)
		return
	}
	m.rdq.remove(seq)
	p.ts = ts
	m.rearm(seq, p)
}

func (m *Machine) setProgress(seq uint64, ts int64) {
	if p, ok := m.pend[seq]; ok {
		p.ts = ts
		m.rearm(seq, p)
	}
}

// setExhausted ends the attempts to deliver a message, but remembers it: the
// stream keeps it (see NeedsAck). The floor stays until the next
// acknowledgement, since this was none.
func (m *Machine) setExhausted(seq uint64) {
	m.redeliv[seq]++
	delete(m.pend, seq)
	m.rdq.remove(seq)
}

func (m *Machine) applyReset(seq uint64) {
	m.rev += resetRevs
	m.dirty = true
	clear(m.pend)
	clear(m.redeliv)
	m.rdq.reset()
	m.order.reset()
	m.dues = m.dues[:0]
	m.skip, m.resume = nil, 0
	m.sseq, m.dseq, m.lastS = seq, 1, seq-1
	m.floorD, m.floorS = 0, seq-1
	m.lastDlv, m.lastAck = 0, 0
	if m.live {
		m.recount()
	}
}

// Reset makes the command that moves the consumer to the sequence, or (0) back
// to its acknowledgement floor, for the owner to propose and wait for; Pump
// after it was applied. The error is the API's.
func (m *Machine) Reset(seq uint64) (cmd []byte, resetSeq uint64, err *api.Error) {
	refuse := func(why string) ([]byte, uint64, *api.Error) {
		return nil, 0, api.ErrConsumerInvalidReset.With("err", why)
	}
	if seq == 0 {
		seq = m.floorS + 1
	} else {
		switch m.cfg.DeliverPolicy {
		case api.DeliverAll:
		case api.DeliverByStartSequence:
			if seq < m.cfg.OptStartSeq {
				return refuse("below start seq")
			}
		case api.DeliverByStartTime:
			if seq < m.env.Messages.SeqAtTime(api.UnixNano(*m.cfg.OptStartTime)) {
				return refuse("below start time")
			}
		default:
			return refuse("not allowed")
		}
	}
	e := command.ConsumerEvent{Kind: command.KindConsumerReset, Name: m.name, Seq: max(seq, 1)}
	return e.Append(nil), e.Seq, nil
}
