package jetstream

import (
	"slices"
	"strconv"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/internal/subject"
	"petiole/internal/wire"
)

// onPublish takes a message on one of the stream's subjects.
func (s *Stream) onPublish(m *broker.Msg) {
	if m.Client == nil { // published inside: maybe under a lock, maybe within onCommit
		c := cloneMsg(m)
		s.e.async.add(msgSize(m), func() {
			s.publish(c.Subject, c.Reply, c.Header, c.Data)
			s.e.prop.Kick()
		})
		return
	}
	if s.cfg.Load().RePublish != nil && s.e.async.full() {
		// What is republished does not wait for a stream that takes it slowly.
		s.e.prop.Kick()
		s.e.async.await()
	}
	s.publish(m.Subject, m.Reply, m.Header, m.Data)
}

// msgSize returns the octets that a message takes while it is queued.
func msgSize(m *broker.Msg) int {
	return len(m.Subject) + len(m.Reply) + len(m.Header) + len(m.Data) + 256
}

func cloneMsg(m *broker.Msg) *broker.Msg {
	return &broker.Msg{
		Subject: slices.Clone(m.Subject), Reply: slices.Clone(m.Reply),
		Header: slices.Clone(m.Header), Data: slices.Clone(m.Data),
	}
}

// publish hands a message to the log. The slices are not retained.
func (s *Stream) publish(subj, reply, header, data []byte) {
	e := s.e
	cfg := s.cfg.Load()
	if cfg.NoAck {
		reply = nil
	}
	if subject.HasWildcard(subj) { // nobody could ask for it by subject
		s.answer(reply, api.ErrBadRequest)
		return
	}
	if refused := e.room(s, len(subj)+len(header)+len(data)); refused != nil {
		s.answer(reply, refused)
		return
	}
	if !s.memory {
		e.pass(s)
		s.warm()
	}
	if cfg.AllowAtomicPublish && len(header) > 0 && s.publishBatched(subj, reply, header, data) {
		return
	}
	if s.memory {
		s.publishMemory(subj, reply, header, data)
		return
	}
	p := pubPool.Get().(*pubReq)
	p.reply = append(p.reply[:0], reply...)
	now := s.e.o.now()
	p.head = command.AppendPublishHead(p.head[:0], now.UnixNano(), s.steady(now), subj, len(header))
	p.parts = [3][]byte{p.head, header, data}
	if err := e.prop.Propose(s.group, p, p.parts[:]...); err != nil {
		p.release()
		s.answer(reply, refused(err))
	}
}

// warm opens the stream's file, if it is closed, here rather than where records
// of all streams are applied. What goes wrong is met again there.
func (s *Stream) warm() {
	if f, ok := s.store.(*fileStore); ok && !f.isOpen() {
		if _, err := f.acquire(); err == nil {
			f.release()
		}
	}
}

// room answers whether the server's limits leave room for n octets more.
func (e *Engine) room(s *Stream, n int) *api.Error {
	limit, used := e.maxStore.Load(), &e.storeUsed
	if s.memory {
		limit, used = e.maxMemory.Load(), &e.memUsed
	}
	if limit > 0 && used.Load()+int64(n) > limit {
		return api.ErrInsufficientResources
	}
	if s.unsettled.Load() {
		return api.ErrInsufficientResources
	}
	if !s.memory && e.space.full.Load() { // what the log would take could not leave it again
		return api.ErrInsufficientResources
	}
	return nil
}

// answer refuses a publish.
func (s *Stream) answer(reply []byte, refused *api.Error) {
	if len(reply) > 0 {
		s.e.account.PublishBytes(reply, nil, nil, api.AppendPubErr(nil, s.name, refused))
	}
}

func (s *Stream) publishMemory(subject, reply, header, data []byte) {
	now := s.e.o.now()
	rec := command.AppendPublishHead(make([]byte, 0, len(subject)+len(header)+len(data)+32), now.UnixNano(), s.steady(now), subject, len(header))
	rec = append(append(rec, header...), data...)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	r, err := s.applyMemory(rec)
	if err != nil {
		s.e.fail(err)
		return
	}
	if s.republish != nil {
		s.sendAgain(s.pub, &r)
	}
	if len(reply) > 0 {
		s.scratch = s.appendAck(s.scratch[:0], &r)
		s.pub.PublishBytes(reply, nil, nil, s.scratch)
	}
	s.pub.Flush()
}

// appendAck appends the answer to a publish.
func (s *Stream) appendAck(dst []byte, r *stream.Result) []byte {
	if r.Refused != nil {
		return api.AppendPubErr(dst, s.name, r.Refused)
	}
	return api.AppendPubAck(dst, s.name, r.Seq, r.Duplicate)
}

// sendAgain republishes the message that a publish stored. The caller holds the
// lock.
func (s *Stream) sendAgain(pub *broker.Publisher, r *stream.Result) {
	if r.Seq == 0 || r.Duplicate {
		return
	}
	m, err := s.store.Load(r.Seq)
	if err != nil {
		return // a limit has removed it
	}
	to, ok := s.republish.Apply(m.Subject)
	if !ok {
		return
	}
	kv := []string{
		headerStream, s.name,
		headerSubject, m.Subject,
		headerSequence, strconv.FormatUint(m.Seq, 10),
		headerTime, timeOf(m.Time).Format(time.RFC3339Nano),
		headerLastSeq, strconv.FormatUint(r.Prev, 10),
	}
	data := m.Data
	if s.m.Config().RePublish.HeadersOnly {
		kv = append(kv, "Nats-Msg-Size", strconv.Itoa(len(data)))
		data = nil
	}
	pub.Publish(to, "", wire.WithHeader(nil, m.Header, kv...), data)
}
