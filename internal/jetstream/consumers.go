package jetstream

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/consumer"
	"petiole/storage"
)

// sink carries out the effects of one consumer's machine. All of it runs under
// the stream's lock; the stream's publisher is flushed before that is released.
type sink struct {
	s     *Stream
	entry *consumerEntry
}

func (k *sink) Deliver(subject string, reply []byte, m *storage.Message) {
	k.s.pub.Deliver(subject, m.Subject, reply, m.Header, m.Data)
}

func (k *sink) Status(subject, reply string, header []byte) {
	k.s.pub.Publish(subject, reply, header, nil)
}

// A record for which the log has no room waits until there is, and those after it
// behind it: the machine's state is ahead of the log all the while, and whoever
// waits for its answer gets that when the log has the record.
func (k *sink) Record(cmd []byte, ackReply string) {
	c := k.entry
	if len(c.waiting) == 0 && !noSpace(k.s.record(cmd, ackReply)) {
		return // done, or the log has failed or is closed, which others report
	}
	c.waiting = append(c.waiting, waitingRecord{bytes.Clone(cmd), ackReply})
	c.octets += len(cmd) + len(ackReply)
	k.s.arm(k.s.e.moment().Add(spaceRetry))
}

// waitingRecord is a record of a consumer that waits for room in the log.
type waitingRecord struct {
	cmd   []byte
	reply string // who gets an answer when it is durable; empty: nobody
}

// maxWaiting is how many octets of records of a consumer may wait for room. Beyond
// it nothing is delivered, and no acknowledgement taken.
const maxWaiting = 1 << 20

func (c *consumerEntry) overdue() bool { return c.octets >= maxWaiting }

// record proposes a consumer's record.
func (s *Stream) record(cmd []byte, ackReply string) error {
	var tag any
	if ackReply != "" {
		tag = &ackTag{reply: ackReply}
	}
	err := s.e.prop.ProposeLazy(s.group, tag, cmd)
	if err == nil && tag != nil {
		s.e.prop.Kick()
	}
	return err
}

func (k *sink) Interest(subject string) bool { return k.s.e.account.HasInterest(subject) }

func (k *sink) Congested(subject string) bool {
	return k.s.e.async.full() || k.entry.overdue() || k.s.pub.Congested(subject)
}

func (k *sink) Advisory(subject string, a *api.ConsumerAdvisory) {
	if a.Reason == consumer.ReasonDamaged {
		k.s.e.log.Error("a consumer passes over a message that is damaged on disk; delete the message to be rid of it",
			"stream", a.Stream, "consumer", a.Consumer, "seq", a.StreamSeq)
	}
	a.ID, a.Time = rand.Text()[:22], time.Now().UTC()
	if b, err := json.Marshal(a); err == nil {
		k.s.pub.Publish(subject, "", nil, b)
	}
}

func (k *sink) Acked(seq uint64, logged bool) {
	if logged {
		k.s.acked = append(k.s.acked, seq)
		return
	}
	s := k.s
	s.unlogged = append(s.unlogged, seq)
}

// recordAgain proposes what has waited for room in the log. The caller holds the
// lock.
func (s *Stream) recordAgain() {
	for _, c := range s.consumers {
		n := 0
		for n < len(c.waiting) && !noSpace(s.record(c.waiting[n].cmd, c.waiting[n].reply)) {
			c.octets -= len(c.waiting[n].cmd) + len(c.waiting[n].reply)
			n++
		}
		c.waiting = slices.Delete(c.waiting, 0, n)
		if len(c.waiting) > 0 {
			s.arm(s.e.moment().Add(spaceRetry))
		} else {
			c.waiting = nil
		}
	}
}

// settleUnlogged has messages removed that consumers without durable state are
// done with; those for which the log has no room, later. The caller holds the
// lock, and is not within a machine.
func (s *Stream) settleUnlogged() {
	for len(s.unlogged) > 0 {
		seqs := s.unlogged
		s.unlogged = nil
		for i, seq := range seqs {
			if !s.unwanted(seq) {
				continue
			}
			rec := (&command.Acked{Seq: seq}).AppendTo(nil)
			if s.memory {
				if _, err := s.applyMemory(rec); err != nil {
					s.e.fail(err)
					return
				}
				continue
			}
			if err := s.e.prop.ProposeLazy(s.group, nil, rec); noSpace(err) {
				s.unlogged = seqs[i:] // nor is there for the others
				s.arm(s.e.moment().Add(spaceRetry))
				return
			} // else it fails with the log, which others report
		}
	}
}

// startConsumer makes a consumer live. The caller holds the lock.
func (s *Stream) startConsumer(c *consumerEntry, now time.Time) {
	if s.stopped {
		return
	}
	c.m.Start(now)
	s.watchInterest(c)
	if !s.pumping {
		s.pumping = true
		s.e.spawn(s.pump)
	}
	s.arm(c.m.Deadline())
	s.wakePump()
}

// watchInterest tells a push consumer when its deliver subject gains or loses
// listeners. The caller holds the lock.
func (s *Stream) watchInterest(c *consumerEntry) {
	subject := c.m.Config().DeliverSubject
	if c.cancel != nil {
		if c.watched == subject {
			return
		}
		c.cancel()
		c.cancel = nil
	}
	if subject == "" {
		return
	}
	c.watched = subject
	// Whoever changes interest may hold the lock of any stream, this one's too.
	c.cancel = s.e.account.WatchInterest(subject, func(bool) {
		s.e.interest.add(0, func() {
			s.withConsumer(c, func(now time.Time) {
				if c.watched == subject {
					c.m.InterestChanged(now, s.e.account.HasInterest(subject))
				}
			})
		})
	})
	c.m.InterestChanged(s.e.moment(), s.e.account.HasInterest(subject))
}

// withConsumer runs an input of a consumer and delivers what follows from it.
func (s *Stream) withConsumer(c *consumerEntry, input func(now time.Time)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !c.gone {
		s.input(c, input)
	}
}

// input is withConsumer for a caller that holds the lock.
func (s *Stream) input(c *consumerEntry, input func(now time.Time)) {
	if s.stopped || !s.live {
		return
	}
	now := s.e.moment()
	input(now)
	if c.m.Pump(now) {
		s.wakePump()
	}
	s.settleUnlogged()
	s.arm(c.m.Deadline())
	s.pub.Flush()
}

// wakePump has the consumers deliver. The caller holds the lock.
func (s *Stream) wakePump() {
	if len(s.consumers) == 0 || s.stopped {
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// pump delivers to the consumers of a stream as messages come in, beside the
// goroutine that commits.
func (s *Stream) pump() {
	for range s.wake {
		for more := true; more; {
			s.mu.Lock()
			if s.stopped {
				s.mu.Unlock()
				return
			}
			more = false
			now := s.e.moment()
			for _, c := range s.consumers {
				if c.m.Pump(now) {
					more = true
				}
				s.arm(c.m.Deadline())
			}
			s.settleUnlogged()
			s.pub.Flush()
			s.mu.Unlock()
		}
	}
}

// applyConsumer applies a consumer's command. The caller holds the lock.
func (s *Stream) applyConsumer(rec []byte, tag any) error {
	var res callResult
	res.stream = s
	switch command.KindOf(rec) {
	case command.KindConsumerCreate:
		var c command.ConsumerCreate
		if err := c.Decode(rec); err != nil {
			return err
		}
		var cfg api.ConsumerConfig
		if err := json.Unmarshal(c.Config, &cfg); err != nil {
			return fmt.Errorf("%w: configuration of consumer %q: %v", command.ErrMalformed, c.Name, err)
		}
		s.putConsumer(c.Name, &cfg, time.Unix(0, c.Created).UTC())
		s.noteConsumer(c.Name)
	case command.KindConsumerDelete:
		var c command.ConsumerDelete
		if err := c.Decode(rec); err != nil {
			return err
		}
		if err := s.dropConsumer(c.Name, c.Created, &res); err != nil {
			return err
		}
	default:
		name, err := command.ConsumerName(rec)
		if err != nil {
			return err
		}
		c := s.consumers[string(name)]
		if c == nil {
			break // deleted meanwhile
		}
		if err := c.m.Apply(rec); err != nil {
			return err
		}
		if err := s.settleAcked(); err != nil {
			return err
		}
		if s.live {
			s.arm(c.m.Deadline())
		}
	}
	switch tag := tag.(type) {
	case *call:
		tag.fn(res)
	case *ackTag:
		s.e.acks.Publish(tag.reply, "", nil, nil)
	}
	return nil
}

// settleAcked removes messages that logged acknowledgements made superfluous.
func (s *Stream) settleAcked() error {
	for _, seq := range s.acked {
		if err := s.dropUnwanted(seq); err != nil {
			return err
		}
	}
	s.acked = s.acked[:0]
	return nil
}

// noteConsumer brings the meta machine's record of a consumer up to date. The
// caller holds the lock.
func (s *Stream) noteConsumer(name string) {
	if s.memory {
		return
	}
	var r *consumerRecord
	if c := s.consumers[name]; c != nil {
		if !c.m.Durable() {
			return
		}
		r = &consumerRecord{Config: *c.m.Config(), Created: c.m.Created().UnixNano()}
	}
	s.e.book.putConsumer(uint64(s.group), name, r)
	s.e.wakeKeeper()
}

// putConsumer creates a consumer or gives it a new configuration. The caller
// holds the lock.
func (s *Stream) putConsumer(name string, cfg *api.ConsumerConfig, created time.Time) {
	now := s.e.moment()
	if c := s.consumers[name]; c != nil {
		c.m.Update(now, cfg)
		if s.live {
			s.watchInterest(c)
			s.arm(c.m.Deadline())
			s.wakePump()
		}
		return
	}
	c := s.newEntry()
	c.m = consumer.New(name, cfg, created, s.env(c.sink))
	s.consumers[name] = c
	s.observe()
	if s.live {
		s.startConsumer(c, now)
	}
}

// dropConsumer deletes a consumer, if it is the one created at that time (0:
// whichever). The caller holds the lock.
func (s *Stream) dropConsumer(name string, created int64, res *callResult) error {
	c := s.consumers[name]
	if c == nil || created != 0 && c.m.Created().UnixNano() != created {
		res.err = api.ErrConsumerNotFound
		return nil
	}
	c.gone = true
	if c.cancel != nil {
		c.cancel()
	}
	if s.live {
		c.m.Deleted()
		s.pub.Flush()
	}
	delete(s.consumers, name)
	s.lost[name] = struct{}{}
	if c.m.Durable() {
		s.noteConsumer(name)
	}
	s.observe()
	return s.beginSweep()
}

// changeConsumer creates, updates or deletes a consumer by a command, through
// the log if its state is kept there.
func (s *Stream) changeConsumer(rec []byte, logged bool) (callResult, error) {
	if logged {
		return s.e.propose(s.group, rec)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var res callResult
	if s.stopped {
		res.err = api.ErrStreamNotFound
		return res, nil
	}
	err := s.applyConsumer(rec, &call{fn: func(r callResult) { res = r }})
	if err == nil {
		s.afterApply()
	}
	return res, err
}

// removeConsumer deletes a consumer, if it is the one created at that time
// (zero: whichever).
func (e *Engine) removeConsumer(s *Stream, name string, created time.Time) error {
	s.mu.Lock()
	c := s.consumers[name]
	s.mu.Unlock()
	if c == nil {
		return api.ErrConsumerNotFound
	}
	cmd := command.ConsumerDelete{Name: name}
	if !created.IsZero() {
		cmd.Created = created.UnixNano()
	}
	r, err := s.changeConsumer(cmd.Append(nil), c.m.Durable())
	if err == nil && r.err != nil {
		err = r.err
	}
	return err
}

// consumer returns the consumer of that name.
func (s *Stream) consumer(name string) *consumerEntry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.consumers[name]
}

// view returns b as a string that must not outlive it.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// onAck takes acknowledgements: messages to the reply subjects of messages
// delivered.
func (e *Engine) onAck(m *broker.Msg) {
	if m.Client == nil {
		c := cloneMsg(m)
		e.async.add(msgSize(m), func() { e.ack(c) })
		return
	}
	e.ack(m)
	if e.ackCount.Add(1)%64 == 0 && e.wal.Unapplied() > ackBacklog {
		_ = e.wal.Commit() // a log that has failed says so itself
	}
}

// ackBacklog is how many records may wait to be applied before those who
// acknowledge have to: their records are so small that MaxPending does not hold
// them back, and each publish waits until those before it have been applied.
const ackBacklog = 1024

func (e *Engine) ack(m *broker.Msg) {
	streamName, consumerName, ref, ok := consumer.ParseAck(view(m.Subject))
	if !ok {
		return
	}
	s, ok := e.Stream(streamName)
	if !ok {
		return
	}
	reply := string(m.Reply) // "+NXT" carries a pull request, which is kept
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.consumers[consumerName]; c != nil && !c.overdue() {
		s.input(c, func(now time.Time) { c.m.Ack(now, ref, m.Data, reply) })
	}
}

// onFlow takes answers to flow control.
func (e *Engine) onFlow(m *broker.Msg) {
	c := cloneMsg(m)
	if m.Client == nil {
		e.async.add(msgSize(m), func() { e.flow(c) })
		return
	}
	e.flow(c)
}

func (e *Engine) flow(m *broker.Msg) {
	tokens := bytes.Split(m.Subject, []byte{'.'})
	if len(tokens) < 5 {
		return
	}
	s, ok := e.Stream(string(tokens[2]))
	if !ok {
		return
	}
	if c := s.consumer(string(tokens[3])); c != nil {
		subject := string(m.Subject)
		s.withConsumer(c, func(now time.Time) { c.m.FlowReply(now, subject) })
	}
}
