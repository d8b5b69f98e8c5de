package consumer

import (
	"time"

	"petiole/internal/jetstream/api"
)

// Info describes the consumer.
func (m *Machine) Info(now time.Time) *api.ConsumerInfo {
	in := &api.ConsumerInfo{
		Stream:         m.env.Stream.Name,
		Name:           m.name,
		Created:        m.created.UTC(),
		Config:         m.cfg.Clone(),
		Delivered:      api.SequenceInfo{Consumer: m.dseq - 1, Stream: m.lastS, Last: m.instant(m.lastDlv)},
		AckFloor:       api.SequenceInfo{Consumer: m.floorD, Stream: m.floorS, Last: m.instant(m.lastAck)},
		NumAckPending:  len(m.pend),
		NumRedelivered: len(m.redeliv),
		TimeStamp:      m.wall(now).UTC(),
		PushBound:      m.cfg.Push() && m.active,
	}
	if m.cfg.MaxDeliver == 1 {
		in.NumRedelivered = 0 // there are no redeliveries, only messages given up
	}
	if m.paused {
		in.Paused, in.PauseRemaining = true, m.cfg.PauseUntil.Sub(m.wall(now))
	}
	if st := m.env.Messages.State(); m.sseq <= st.Last && m.npc > 0 {
		in.NumPending = min(uint64(m.npc), st.Msgs)
	}
	if !m.cfg.Push() {
		if m.live {
			m.tidy(now.UnixNano(), false, true)
		}
		in.NumWaiting = m.wait.len()
	}
	if len(m.cfg.PriorityGroups) > 0 {
		in.PriorityGroups = []api.PriorityGroupState{
			{Group: m.cfg.PriorityGroups[0], PinnedClientID: m.pinID, PinnedTS: m.pinSince},
		}
	}
	return in
}

func (m *Machine) instant(ns int64) *time.Time {
	if ns == 0 {
		return nil
	}
	t := m.wall(time.Unix(0, ns)).UTC()
	return &t
}
