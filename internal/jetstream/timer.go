package jetstream

import (
	"time"

	"petiole/internal/jetstream/command"
)

// armExpiry sets the timer for the next message to expire. The caller holds
// the lock.
func (s *Stream) armExpiry() {
	if s.expiring || !s.live {
		return
	}
	if at, ok := s.m.NextExpiry(); ok {
		// One record for all that expire within a slack, not one for each.
		slack := 100 * time.Millisecond
		if age := s.m.Config().MaxAge; age > 0 {
			slack = min(max(age/20, 5*time.Millisecond), slack)
		}
		s.arm(s.e.moment().Add(time.Duration(at-s.aged(s.e.o.now())) + slack))
	}
}

// arm makes the timer fire at t, by the clock of [Engine.moment], or before. The
// caller holds the lock.
func (s *Stream) arm(t time.Time) {
	if t.IsZero() || s.stopped || !s.timerAt.IsZero() && !t.Before(s.timerAt) {
		return
	}
	s.timerAt = t
	in := t.Sub(s.e.moment())
	if s.timer == nil {
		s.timer = time.AfterFunc(in, s.onTimer)
		return
	}
	s.timer.Reset(in)
}

// onTimer does what has become due: expiry of messages, and the consumers'
// deadlines.
func (s *Stream) onTimer() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || s.e.failed.Load() || s.e.closing.Load() {
		return
	}
	s.timerAt = time.Time{}
	now := s.e.moment()
	for name, c := range s.consumers {
		next := c.m.Deadline()
		if !next.IsZero() && !next.After(now) {
			if _, dead := c.m.Tick(now); dead {
				created := c.m.Created()
				s.e.async.add(0, func() { _ = s.e.removeConsumer(s, name, created) })
			} else if c.m.Pump(now) {
				s.wakePump()
			}
			next = c.m.Deadline()
		}
		s.arm(next)
	}
	if at, ok := s.m.NextExpiry(); ok && !s.expiring {
		if aged := s.aged(s.e.o.now()); at <= aged {
			s.expire(aged)
		} else {
			s.armExpiry()
		}
	}
	s.recordAgain()
	s.settleUnlogged()
	s.pub.Flush()
}

// expire has messages removed that are due. The caller holds the lock.
func (s *Stream) expire(now int64) {
	rec := (&command.Expire{Now: now}).AppendTo(nil)
	s.expiring = true
	if s.memory {
		if _, err := s.applyMemory(rec); err != nil {
			s.e.fail(err)
		}
		return
	}
	if err := s.e.prop.ProposeLazy(s.group, nil, rec); err != nil {
		// There is no room, and perhaps nobody publishes who would bring the
		// timer back.
		s.expiring = false
		s.arm(s.e.moment().Add(spaceRetry))
		return
	}
	s.e.prop.Kick()
}
