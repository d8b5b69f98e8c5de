package consumer

import (
	"slices"
	"time"

	"petiole/internal/jetstream/api"
)

// Deadline returns when Tick is to be called next; it may change with every
// call of another method, mostly to an earlier time. The zero time means never.
func (m *Machine) Deadline() time.Time {
	if !m.live {
		return time.Time{}
	}
	at := int64(0)
	soon := func(t int64) {
		if t != 0 && (at == 0 || t < at) {
			at = t
		}
	}
	if len(m.dues) > 0 {
		soon(m.dues[0].at)
	}
	soon(m.hold)
	soon(m.pinUntil)
	if m.paused {
		soon(m.pauseLook)
	}
	if m.cfg.Push() {
		if m.active && m.cfg.Heartbeat > 0 {
			soon(m.hbAt)
		}
		if !m.active && m.inactive > 0 {
			soon(m.idle + m.inactive)
		}
	} else {
		if m.wait.next != 0 {
			// One more nanosecond: a request expires when its time is over.
			soon(m.wait.next + 1)
		}
		if m.inactive > 0 && (m.wait.len() == 0 || m.wait.next == 0) {
			soon(m.idle + m.inactive)
		}
	}
	if at == 0 {
		return time.Time{}
	}
	return time.Unix(0, at)
}

// Tick does what has become due: redelivery, expiry of pull requests,
// heartbeats, end of a pause. It returns the new Deadline, and dead if the
// consumer was not used for its inactive threshold and is to be deleted (it
// says so again a little later, as long as it is not). Call Pump afterwards.
func (m *Machine) Tick(now time.Time) (next time.Time, dead bool) {
	if !m.live {
		return time.Time{}, false
	}
	t := now.UnixNano()
	if m.paused {
		m.pause(now)
	}
	m.expire(t)
	if m.pinID != "" && t >= m.pinUntil {
		g := m.pinGroup
		m.unpin()
		m.advise(api.AdvisoryUnpinned, api.AdvisoryUnpinnedSubject, api.ConsumerAdvisory{Group: g, Reason: "timeout"})
	}
	if m.cfg.Push() {
		if hb := span(m.cfg.Heartbeat); hb > 0 && t >= m.hbAt {
			if m.active {
				m.heartbeat(m.cfg.DeliverSubject)
			}
			m.hbAt = t + hb
		}
	} else if m.wait.next != 0 && t > m.wait.next {
		m.tidy(t, false, true)
	}
	if m.inactive > 0 && t >= m.idle+m.inactive {
		dead = m.abandoned(t)
	}
	return m.Deadline(), dead
}

// abandoned reports whether the consumer is to be deleted. If not, or not yet,
// it arranges for being asked again.
func (m *Machine) abandoned(now int64) bool {
	if m.cfg.Push() {
		if m.active {
			return false
		}
		m.idle = now - m.inactive + int64(time.Second)
		return true
	}
	m.tidy(now, false, true)
	if m.wait.len() > 0 {
		m.idle = now
		return false
	}
	if now < m.idle+m.inactive {
		return false // a request expired just now
	}
	// A client may be at work on what it got; the threshold counts from when
	// the last acknowledgement is due.
	last := int64(0)
	for seq, p := range m.pend {
		last = max(last, p.ts+m.ackWait(seq))
	}
	if last+m.inactive > now {
		m.idle = last
		return false
	}
	m.idle = now - m.inactive + int64(time.Second)
	return true
}

// expire queues what has waited long enough for its acknowledgement.
func (m *Machine) expire(now int64) {
	m.expired = m.expired[:0]
	for len(m.dues) > 0 && m.dues[0].at <= now {
		d := m.dues[0]
		m.dues.pop()
		p, ok := m.pend[d.seq]
		if !ok || p.due != d.at {
			continue
		}
		if m.rdq.has(d.seq) {
			// Nobody took it yet.
			p.due = 0
			m.pend[d.seq] = p
			continue
		}
		m.expired = append(m.expired, d.seq)
	}
	m.requeue(now)
}

// requeue queues the messages in m.expired for redelivery, or gives them up.
func (m *Machine) requeue(now int64) {
	slices.Sort(m.expired)
	for _, seq := range m.expired {
		p, ok := m.pend[seq]
		if !ok {
			continue
		}
		if m.live && m.cfg.MaxDeliver > 0 && m.redeliv[seq]+1 >= uint64(m.cfg.MaxDeliver) {
			m.exhaust(now, seq)
			continue
		}
		// The wait begins anew with the delivery.
		p.ts, p.due = now, 0
		m.pend[seq] = p
		m.rdq.push(seq)
	}
}

// schedule computes anew when each pending message is to be redelivered.
func (m *Machine) schedule() {
	m.dues = m.dues[:0]
	m.order.reset()
	for seq := range m.pend {
		m.order.push(seq)
	}
	slices.Sort(m.order.q)
	for _, seq := range m.order.q {
		p := m.pend[seq]
		if p.due = 0; m.rdq.has(seq) {
			m.pend[seq] = p
			continue
		}
		m.rearm(seq, p)
	}
}

// span returns d in nanoseconds; a span so long that a time plus it might not
// be representable, as a client asks for that means "never", is shortened.
func span(d time.Duration) int64 {
	const century = 100 * 365 * 24 * time.Hour
	return int64(min(d, century))
}

// ackWait returns how long the message's acknowledgement is waited for.
func (m *Machine) ackWait(seq uint64) int64 {
	if l := len(m.cfg.BackOff); l > 0 {
		return span(m.cfg.BackOff[min(m.redeliv[seq], uint64(l-1))])
	}
	return span(m.cfg.AckWait)
}

// rearm stores p with the due time that its ts asks for.
func (m *Machine) rearm(seq uint64, p pending) {
	p.due = 0
	if w := m.ackWait(seq); w > 0 {
		p.due = max(p.ts+w, 1)
		m.dues.push(due{p.due, seq})
	}
	m.pend[seq] = p
	if len(m.dues) > 2*len(m.pend)+1024 {
		m.dues.filter(func(d due) bool { q, ok := m.pend[d.seq]; return ok && q.due == d.at })
	}
}
