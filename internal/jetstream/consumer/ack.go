package consumer

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
)

var (
	ackAck      = []byte("+ACK")
	ackOK       = []byte("+OK")
	ackNak      = []byte("-NAK")
	ackProgress = []byte("+WPI")
	ackNext     = []byte("+NXT")
	ackTerm     = []byte("+TERM")
)

// Ack takes in an acknowledgement: payload is that of a message to the subject
// that ref was parsed from (see [ParseAck]), replyTo its reply subject, if any,
// which is answered when the acknowledgement is durable. Call Pump afterwards.
func (m *Machine) Ack(now time.Time, ref AckRef, payload []byte, replyTo string) {
	if !m.live || m.cfg.AckPolicy == api.AckNone || ref.Seq == 0 {
		return
	}
	t := now.UnixNano()
	m.idle = max(m.idle, t)
	switch {
	case len(payload) == 0, bytes.Equal(payload, ackAck), bytes.Equal(payload, ackOK):
		m.ack(command.KindConsumerAck, t, ref.Seq, replyTo)
	case bytes.HasPrefix(payload, ackNext):
		m.ack(command.KindConsumerAck, t, ref.Seq, "")
		m.Next(now, replyTo, payload[len(ackNext):])
	case bytes.HasPrefix(payload, ackNak):
		m.nak(now, ref, payload[len(ackNak):], replyTo)
	case bytes.Equal(payload, ackProgress):
		if _, ok := m.pend[ref.Seq]; ok {
			m.setProgress(ref.Seq, t)
			m.record(command.KindConsumerProgress, ref.Seq, ref.ConsumerSeq, t, replyTo)
		} else {
			m.confirm(ref.Seq, t, replyTo)
		}
	case bytes.HasPrefix(payload, ackTerm):
		m.ack(command.KindConsumerTerm, t, ref.Seq, replyTo)
		m.advise(api.AdvisoryTerminated, api.AdvisoryTerminatedSubject, api.ConsumerAdvisory{
			ConsumerSeq: ref.ConsumerSeq, StreamSeq: ref.Seq, Deliveries: ref.Deliveries,
			Reason: string(bytes.TrimSpace(payload[len(ackTerm):])),
		})
	default:
		m.confirm(ref.Seq, t, replyTo)
	}
}

// confirm answers once everything recorded so far is durable.
func (m *Machine) confirm(seq uint64, t int64, replyTo string) {
	if replyTo != "" {
		m.record(command.KindConsumerAck, seq, 0, t, replyTo)
	}
}

// ack notes that the message is done.
func (m *Machine) ack(kind command.Kind, t int64, seq uint64, replyTo string) {
	if seq >= m.sseq && !m.delivered(seq) {
		return // never delivered
	}
	if m.cfg.AckPolicy == api.AckAll {
		if seq <= m.floorS {
			m.confirm(seq, t, replyTo)
			return
		}
		if m.retain {
			// The stream has to hear of every message; each gets a record. All
			// but the last are acknowledged for themselves and those before.
			m.expired = m.expired[:0]
			for _, s := range m.order.q[m.order.head:] {
				if _, ok := m.pend[s]; ok && s < seq {
					m.expired = append(m.expired, s)
				}
			}
			for _, s := range m.expired {
				m.ackOne(kind, t, s, "")
			}
		}
		m.ackOne(kind, t, seq, replyTo)
		return
	}
	_, pending := m.pend[seq]
	_, exhausted := m.redeliv[seq]
	if !pending && !exhausted {
		m.confirm(seq, t, replyTo)
		return
	}
	m.ackOne(kind, t, seq, replyTo)
}

// delivered reports whether the message was delivered though it lies ahead of
// the position, which a list of last messages per subject makes possible.
func (m *Machine) delivered(seq uint64) bool { _, ok := m.pend[seq]; return ok }

func (m *Machine) ackOne(kind command.Kind, t int64, seq uint64, replyTo string) {
	dseq := m.pend[seq].dseq
	m.setAcked(seq, t)
	m.unsettle(seq)
	// A record without consumer sequence has no effect.
	m.record(kind, seq, max(dseq, 1), t, replyTo)
	if m.retain && !m.durable {
		m.env.Sink.Acked(seq, false)
	}
}

// nak takes in a negative acknowledgement with the delay in arg, if any.
func (m *Machine) nak(now time.Time, ref AckRef, arg []byte, replyTo string) {
	t := now.UnixNano()
	if _, ok := m.pend[ref.Seq]; !ok || ref.ConsumerSeq <= m.floorD || ref.ConsumerSeq >= m.dseq {
		m.confirm(ref.Seq, t, replyTo)
		return
	}
	m.advise(api.AdvisoryNak, api.AdvisoryNakSubject, api.ConsumerAdvisory{
		ConsumerSeq: ref.ConsumerSeq, StreamSeq: ref.Seq, Deliveries: ref.Deliveries,
	})
	ts := int64(0) // now
	if arg = bytes.TrimSpace(arg); len(arg) > 0 {
		var d time.Duration
		var err error
		if arg[0] == '{' {
			var o api.NakOptions
			err = json.Unmarshal(arg, &o)
			d = o.Delay
		} else {
			d, err = time.ParseDuration(string(arg))
		}
		if err == nil {
			// The wait began so long ago that it ends after the delay.
			ts = t - span(m.cfg.AckWait) + span(d)
		}
	}
	m.setNak(ref.Seq, ts)
	m.record(command.KindConsumerNak, ref.Seq, ref.ConsumerSeq, ts, replyTo)
}

// ParseAck takes a subject $JS.ACK.<stream>.<consumer>.<deliveries>.<stream
// seq>.<consumer seq>.<ns>.<pending> apart, or the longer form with domain and
// account hash before the stream. The names alias subject.
func ParseAck(subj string) (stream, consumer string, ref AckRef, ok bool) {
	rest, ok := strings.CutPrefix(subj, "$JS.ACK.")
	if !ok {
		return "", "", AckRef{}, false
	}
	var tok [10]string
	n := 0
	for n < len(tok) {
		t, r, more := strings.Cut(rest, ".")
		tok[n] = t
		n++
		rest = r
		if !more {
			break
		}
	}
	t := tok[:n]
	switch {
	case n == 7 && rest == "":
	case n >= 9:
		t = t[2:]
	default:
		return "", "", AckRef{}, false
	}
	ref.Deliveries, _ = parseUint(t[2])
	ref.Seq, ok = parseUint(t[3])
	if !ok {
		return "", "", AckRef{}, false
	}
	ref.ConsumerSeq, ok = parseUint(t[4])
	ts, _ := parseUint(t[5])
	ref.Time = int64(ts)
	ref.Pending, _ = parseUint(t[6])
	return t[0], t[1], ref, ok
}

func parseUint(s string) (uint64, bool) {
	if len(s) == 0 || len(s) > 20 {
		return 0, false
	}
	var v uint64
	for i := 0; i < len(s); i++ {
		c := s[i] - '0'
		if c > 9 {
			return 0, false
		}
		v = v*10 + uint64(c)
	}
	return v, true
}
