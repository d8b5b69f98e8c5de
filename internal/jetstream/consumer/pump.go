package consumer

import (
	"errors"
	"strconv"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
)

// Pump delivers what can be delivered now, up to a bound (about 1000 messages
// or 4 MiB), and reports whether there is more to do at once: call it again
// after letting others have the lock. It is cheap when there is nothing to do.
// Call it after messages were appended and after the inputs that say so.
func (m *Machine) Pump(now time.Time) (more bool) {
	m.hold = 0
	if !m.live || m.paused {
		return false
	}
	t := now.UnixNano()
	if m.cfg.Push() {
		if !m.active || m.maxOut > 0 && m.out > m.maxOut {
			return false
		}
	} else if m.wait.len() == 0 {
		return false
	}
	stop := m.deliver(t)
	m.flush(t)
	if stop == stopBudget {
		return true
	}
	if !m.cfg.Push() {
		// Requests that do not wait have to, while acknowledgements are due.
		eos := (stop == stopEnd || stop == stopTaker) && m.wait.noWait > 0
		if eos || m.wait.next != 0 && t >= m.wait.next {
			m.tidy(t, eos, false)
		}
	}
	return false
}

// ReasonDamaged is the reason in the advisory about a message that cannot be
// delivered because it is damaged on disk.
const ReasonDamaged = "Message is damaged on disk"

// Reasons to stop delivering.
const (
	stopEnd     = iota // nothing left
	stopPending        // too many acknowledgements are due
	stopTaker          // nobody takes more
	stopHold           // not before hold
	stopBudget         // later
	stopError          // the store failed
)

// deliver sends messages until it has to stop, and says why.
func (m *Machine) deliver(now int64) int {
	m.runs++
	m.run.Ranges = m.run.Ranges[:0]
	m.run.DSeq = m.dseq
	m.run.Time = now
	m.ahead, m.aheadAt = m.ahead[:0], 0
	m.octets, m.asked = 0, -congestedEvery
	for n := 0; ; n++ {
		if n >= pumpMsgs || m.octets >= pumpBytes {
			return stopBudget
		}
		if m.cfg.Push() {
			if m.maxOut > 0 && m.out > m.maxOut {
				return stopTaker
			}
			if m.octets-m.asked >= congestedEvery {
				if m.env.Sink.Congested(m.cfg.DeliverSubject) {
					m.hold = now + congestedWait
					return stopHold
				}
				m.asked = m.octets
			}
		} else if m.wait.len() == 0 {
			return stopTaker
		}
		msg, attempt, stop := m.peek(now)
		if msg == nil {
			return stop
		}
		size, stop := m.send(now, msg, attempt)
		if size == 0 {
			return stop
		}
		m.octets += size
	}
}

// peek returns the next message and which attempt at it this would be.
func (m *Machine) peek(now int64) (*storage.Message, uint64, int) {
	for {
		seq := m.rdq.peek()
		if seq == 0 {
			break
		}
		attempt := m.redeliv[seq] + 2
		if m.cfg.MaxDeliver > 0 && attempt > uint64(m.cfg.MaxDeliver) {
			m.exhaust(now, seq)
			continue
		}
		msg, err := m.env.Messages.Load(seq)
		if m.passable(err) {
			if p, ok := m.pend[seq]; ok {
				m.lost(seq, p)
			}
			m.rdq.remove(seq)
			continue
		}
		if err != nil {
			return nil, 0, stopError
		}
		m.ahead, m.aheadAt = append(m.ahead[:0], msg), 0
		return &m.ahead[0], attempt, 0
	}
	if m.cfg.AckPolicy != api.AckNone && m.cfg.MaxAckPending > 0 && len(m.pend) >= m.cfg.MaxAckPending {
		return nil, 0, stopPending
	}
	for len(m.skip) > 0 {
		msg, err := m.env.Messages.Load(m.skip[0])
		if err == nil {
			m.ahead, m.aheadAt = append(m.ahead[:0], msg), 0
			return &m.ahead[0], 1, 0
		}
		if !m.passable(err) {
			return nil, 0, stopError
		}
		m.npc--
		if m.skip = m.skip[1:]; len(m.skip) == 0 {
			m.skip, m.sseq = nil, max(m.sseq, m.resume)
		}
	}
	if m.aheadAt < len(m.ahead) {
		if msg := &m.ahead[m.aheadAt]; msg.Seq >= m.sseq {
			return msg, 1, 0
		}
	}
	if err := m.fill(); err != nil {
		return nil, 0, stopError
	}
	if len(m.ahead) == 0 {
		// What was filtered out is not looked at again.
		m.sseq = max(m.sseq, m.env.Messages.State().Last+1)
		m.npc = 0
		m.pace = m.pace && m.sseq <= m.paceEnd
		return nil, 0, stopEnd
	}
	return &m.ahead[0], 1, 0
}

// passable reports whether err says that a message is gone for good. One that
// is damaged on disk is as good as gone; that is told.
func (m *Machine) passable(err error) bool {
	if seq, ok := storage.Damaged(err); ok {
		m.advise(api.AdvisoryTerminated, api.AdvisoryTerminatedSubject, api.ConsumerAdvisory{
			StreamSeq: seq, Reason: ReasonDamaged,
		})
		return true
	}
	return errors.Is(err, storage.ErrNotFound)
}

// fill reads the next messages from the store and passes over damaged ones.
func (m *Machine) fill() error {
	for {
		err := m.read()
		seq, damaged := storage.Damaged(err)
		switch {
		case !damaged || seq < m.sseq:
			return err
		case len(m.ahead) > 0:
			return nil // those before it first
		}
		m.passable(err)
		m.sseq = seq + 1
		m.npc = max(m.npc-1, 0)
		m.dirty = true
	}
}

// read reads the next messages from the store.
func (m *Machine) read() error {
	clear(m.ahead)
	m.ahead, m.aheadAt = m.ahead[:0], 0
	st := m.env.Messages.State()
	if m.sseq > st.Last {
		return nil
	}
	m.want, m.aheadSize = readAhead, 0
	if !m.cfg.Push() {
		m.want = min(m.want, m.wait.total)
	}
	if m.cfg.AckPolicy != api.AckNone && m.cfg.MaxAckPending > 0 {
		m.want = min(m.want, m.cfg.MaxAckPending-len(m.pend))
	}
	if len(m.filter.Patterns) == 0 && m.want > 1 {
		return m.env.Messages.Range(m.sseq, m.collect)
	}
	msg, err := m.env.Messages.LoadNext(m.filter, m.sseq)
	if errors.Is(err, storage.ErrEOF) || errors.Is(err, storage.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	m.ahead = append(m.ahead, msg)
	return nil
}

// send delivers msg and returns its size, or 0 and the reason not to.
func (m *Machine) send(now int64, msg *storage.Message, attempt uint64) (int, int) {
	seq := msg.Seq
	if attempt == 1 {
		m.npc--
	}
	undo := func() {
		if attempt == 1 {
			m.npc++
		}
	}
	b := append(m.buf[:0], m.ackPrefix...)
	b = strconv.AppendUint(b, attempt, 10)
	b = append(b, '.')
	b = strconv.AppendUint(b, seq, 10)
	b = append(b, '.')
	b = strconv.AppendUint(b, m.dseq, 10)
	b = append(b, '.')
	b = strconv.AppendInt(b, msg.Time, 10)
	b = append(b, '.')
	b = strconv.AppendUint(b, uint64(max(m.npc, 0)), 10)
	m.buf = b

	if m.cfg.HeadersOnly {
		m.msgHdr = appendHeader(m.msgHdr[:0], msg.Header, "Nats-Msg-Size", strconv.Itoa(len(msg.Data)))
		msg.Header, msg.Data = m.msgHdr, nil
	}
	size := len(msg.Subject) + len(b) + len(msg.Header) + len(msg.Data)

	// The original pace and the rate limit are looked at before a taker is
	// chosen: nothing has to be undone then.
	if m.pace && m.paceLast != 0 {
		if gap := msg.Time - m.paceLast; gap > int64(time.Millisecond) && now < m.lastDlv+gap {
			m.hold = m.lastDlv + gap
			undo()
			return 0, stopHold
		}
	}
	if at := m.rate.allow(size, now); at != 0 {
		m.hold = at
		undo()
		return 0, stopHold
	}

	subject := m.cfg.DeliverSubject
	var r *request
	if subject == "" {
		if r = m.pick(now, size); r == nil {
			undo()
			if m.hold != 0 {
				return 0, stopHold
			}
			return 0, stopTaker
		}
		subject = r.reply
		if m.pinID != "" {
			msg.Header = appendHeader(nil, msg.Header, "Nats-Pin-Id", m.pinID)
		}
	}

	m.rate.take(size)
	m.paceLast = msg.Time
	m.note(seq, attempt)
	m.setDelivered(seq, m.dseq, attempt, now)
	if m.retain && m.cfg.AckPolicy == api.AckNone {
		if m.unsettle(seq); !m.durable {
			m.acked = append(m.acked, seq)
		}
	}
	m.dirty = true
	m.idle = max(m.idle, now)
	m.hbAt = now + span(m.cfg.Heartbeat)
	m.env.Sink.Deliver(subject, b, msg)
	m.aheadAt++

	if r != nil {
		if m.serve(now, r, size) {
			if r.bytes > 0 {
				m.status(subject, "409 Batch Completed", r.n, r.bytes)
			}
			m.wait.release(r)
		}
	}
	if m.maxOut > 0 {
		n := len(subject) + len(b) + len(msg.Header) + len(msg.Data)
		m.out += n
		switch {
		case m.fcID == "" && m.out > m.maxOut/2:
			m.askFlow()
		case m.fcID != "" && m.out-m.fcSize >= m.maxOut:
			m.fcSize += n
		}
	}
	return max(size, 1), 0
}

// note adds a delivery to the record of the run.
func (m *Machine) note(seq, attempt uint64) {
	if !m.durable {
		return
	}
	if n := len(m.run.Ranges); n > 0 {
		if r := &m.run.Ranges[n-1]; r.Attempt == attempt && r.First+r.Count == seq {
			r.Count++
			return
		}
	}
	m.run.Ranges = append(m.run.Ranges, command.Range{First: seq, Count: 1, Attempt: attempt})
}

// flush records what the run has delivered so far.
func (m *Machine) flush(now int64) {
	clear(m.ahead)
	m.ahead, m.aheadAt = m.ahead[:0], 0
	if len(m.run.Ranges) > 0 {
		m.rev++
		m.run.Rev = m.rev
		m.cmd = m.run.Append(m.cmd[:0])
		m.run.Ranges = m.run.Ranges[:0]
		m.env.Sink.Record(m.cmd, "")
	}
	m.run.DSeq = m.dseq
	if len(m.acked) > 0 {
		for _, seq := range m.acked {
			m.env.Sink.Acked(seq, false)
		}
		m.acked = m.acked[:0]
	}
}

// exhaust ends the attempts to deliver a message.
func (m *Machine) exhaust(now int64, seq uint64) {
	if len(m.run.Ranges) > 0 {
		m.flush(now) // records keep the order of events
	}
	n := m.redeliv[seq] + 1
	m.setExhausted(seq)
	m.record(command.KindConsumerExhausted, seq, 0, now, "")
	m.advise(api.AdvisoryMaxDeliver, api.AdvisoryMaxDeliverSubject, api.ConsumerAdvisory{StreamSeq: seq, Deliveries: n})
}

// appendHeader appends to dst the header block hdr (which may be empty) with
// one more line.
func appendHeader(dst, hdr []byte, key, value string) []byte {
	if len(hdr) < 2 {
		dst = append(dst, "NATS/1.0\r\n"...)
	} else {
		dst = append(dst, hdr[:len(hdr)-2]...)
	}
	dst = append(dst, key...)
	dst = append(dst, ": "...)
	dst = append(dst, value...)
	return append(dst, "\r\n\r\n"...)
}

// heartbeat tells subject where the consumer is, and whether it waits for an
// answer to flow control.
func (m *Machine) heartbeat(subject string) {
	h := append(m.hdr[:0], "NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: "...)
	h = strconv.AppendUint(h, m.dseq-1, 10)
	h = append(h, "\r\nNats-Last-Stream: "...)
	h = strconv.AppendUint(h, m.sseq-1, 10)
	h = append(h, "\r\n"...)
	if m.fcID != "" {
		h = append(h, "Nats-Consumer-Stalled: "...)
		h = append(h, m.fcID...)
		h = append(h, "\r\n"...)
	}
	m.hdr = append(h, "\r\n"...)
	m.env.Sink.Status(subject, "", m.hdr)
}

// askFlow asks the client to say when it has got this far.
func (m *Machine) askFlow() {
	m.fcCount++
	// The last token only has to differ from those before.
	m.fcID = "$JS.FC." + m.env.Stream.Name + "." + m.name + "." + strconv.FormatUint(m.fcCount, 36)
	m.fcSize = m.out
	m.env.Sink.Status(m.cfg.DeliverSubject, m.fcID, []byte("NATS/1.0 100 FlowControl Request\r\n\r\n"))
}

// FlowReply takes in a message to a subject $JS.FC.<stream>.<consumer>.*: the
// client has processed what was sent before. Call Pump afterwards.
func (m *Machine) FlowReply(_ time.Time, subject string) {
	if subject == "" || subject != m.fcID {
		return
	}
	m.maxOut = min(2*m.maxOut, fcLimit)
	m.out = max(m.out-m.fcSize, 0)
	m.fcID, m.fcSize = "", 0
}

// InterestChanged says whether anyone listens to the deliver subject of a push
// consumer. Call Pump afterwards.
func (m *Machine) InterestChanged(now time.Time, interest bool) {
	if !m.live || !m.cfg.Push() || m.active == interest {
		return
	}
	m.active = interest
	m.idle = now.UnixNano()
	m.hbAt = now.UnixNano() + span(m.cfg.Heartbeat)
}
