package simtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing/synctest"
	"time"

	"petiole/internal/jetstream"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
)

// streamNames are the streams that there may be. What each is like is decided by
// its name, and in its details by the seed.
var streamNames = []string{"KEEP", "RING", "KV", "BYTES", "NEW", "WORK", "AGED", "HUB", "WANT"}

func (s *sim) config(name string) api.StreamConfig {
	s.count++
	c := api.StreamConfig{
		Name: name, Subjects: []string{strings.ToLower(name) + ".*"}, Description: fmt.Sprint("version ", s.count),
		MaxMsgs: -1, MaxBytes: -1, MaxMsgsPer: -1, MaxMsgSize: -1, MaxConsumers: -1, Replicas: 1,
		Duplicates: []time.Duration{time.Second, 2 * time.Minute, 20 * time.Minute}[s.count%3],
	}
	switch name {
	case "RING":
		c.MaxMsgs = int64(3 + s.rng.IntN(40))
	case "KV":
		c.MaxMsgsPer, c.AllowRollup, c.AllowDirect = int64(1+s.rng.IntN(3)), true, true
	case "BYTES":
		c.MaxBytes = int64(1000 + s.rng.IntN(40_000))
	case "NEW":
		c.MaxMsgs, c.Discard = int64(5+s.rng.IntN(30)), api.DiscardNew
	case "WORK":
		c.Retention = api.WorkQueuePolicy
	case "WANT":
		c.Retention = api.InterestPolicy
	case "AGED":
		c.MaxAge = time.Duration(1+s.rng.IntN(300)) * time.Minute
		c.Duplicates = time.Minute
	case "HUB":
		c.Subjects, c.Metadata = nil, map[string]string{jetstream.MetaIngest: "true"}
		if s.rng.IntN(2) == 0 {
			c.MaxMsgs = int64(10 + s.rng.IntN(100))
		}
	}
	return c
}

// pick returns one of the streams there are that f selects; nil if none.
func (s *sim) pick(f func(*mstream) bool) *mstream {
	var list []*mstream
	for _, name := range slices.Sorted(maps.Keys(s.tail.streams)) {
		if st := s.tail.streams[name]; f(st) {
			list = append(list, st)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return list[s.rng.IntN(len(list))]
}

func whatever(*mstream) bool { return true }

func takes(st *mstream) bool { return len(st.cfg.Subjects) > 0 }

func consumed(st *mstream) bool { return len(st.consumers) > 0 }

// work runs n operations.
func (s *sim) work(n int) {
	sweepAt := -1
	if s.midSweep {
		sweepAt = s.rng.IntN(n)
	}
	for i := range n {
		if s.over() {
			return
		}
		if i == sweepAt {
			s.sweep()
			continue
		}
		if was := s.m.full.Load(); i > 0 {
			if s.m.space(i); was != s.m.full.Load() {
				s.logf("the disk is full: %v", !was)
			}
		}
		if len(s.tail.streams) < 3 {
			s.create()
			continue
		}
		switch s.rng.IntN(40) {
		case 0:
			s.create()
		case 1:
			if s.rng.IntN(3) == 0 {
				s.deleteStream()
			}
		case 2:
			s.update()
		case 3, 4:
			s.purge()
		case 5, 6, 7:
			s.deleteMsg()
		case 8, 9, 10:
			s.ingest()
		case 11:
			s.consumer()
		case 12, 13, 14:
			s.fetch()
		case 15, 16, 17, 18:
			s.acks()
		case 19:
			s.checkpoint(true)
		case 20:
			if st := s.pick(consumed); st != nil {
				s.acks()
			}
		case 21:
			s.checkpoint(false)
		case 22:
			s.sleep()
		case 23:
			s.verify()
		case 24:
			s.sync()
		case 25, 26, 27:
			s.quiesce()
		case 28:
			if s.rng.IntN(6) == 0 {
				s.sweep()
			}
		default:
			for range 1 + s.rng.IntN(8) {
				s.publish()
			}
			if s.rng.IntN(3) == 0 {
				s.settle()
			}
		}
	}
	s.settle()
}

// issue notes an operation, in the order in which they come to the log.
func (s *sim) issue(o *op, format string, args ...any) string {
	s.count++
	o.id, o.text = s.count, fmt.Sprintf(format, args...)
	s.logf("op %d: %s", o.id, o.text)
	s.ops = append(s.ops, o)
	s.counts.Ops++
	s.mu.Lock()
	s.waiting[o.id] = o
	s.mu.Unlock()
	return fmt.Sprint("_SIM.R.", o.id)
}

func (s *sim) send(subject, reply string, header, data []byte) {
	s.pub.Publish(subject, reply, header, data)
	s.pub.Flush()
}

// request issues a request of the API and waits for the answer.
func (s *sim) request(o *op, subject string, body any, format string, args ...any) {
	b := []byte{}
	if body != nil {
		b, _ = json.Marshal(body)
	}
	if o.check == nil {
		o.check = func(o *op, a *answer) string {
			got := uint16(0)
			if a.Error != nil {
				got = a.Error.ErrCode
			}
			if got != o.want.code {
				return fmt.Sprintf("want error %d", o.want.code)
			}
			return ""
		}
	}
	synctest.Wait() // what was issued before goes first
	reply := s.issue(o, format, args...)
	s.send("$JS.API."+subject, reply, nil, b)
	for range 600 {
		s.settle()
		if o.replied || s.over() {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	s.fail("op %d (%s) is not answered within a minute", o.id, o.text)
}

func (s *sim) create() {
	if name := streamNames[s.rng.IntN(len(streamNames))]; s.tail.streams[name] == nil {
		s.createStream(name)
	}
}

func (s *sim) createStream(name string) {
	cfg := s.config(name)
	s.life++
	life := s.life
	s.request(&op{meta: true, apply: func(w *world) result { return w.create(cfg, life) }}, "STREAM.CREATE."+name, &cfg, "create %s %s", name, cfg.Description)
	if name == "HUB" {
		clear(s.edges)
	}
}

func (s *sim) update() {
	st := s.pick(whatever)
	cfg := s.config(st.cfg.Name)
	cfg.MaxAge, cfg.Duplicates = st.cfg.MaxAge, st.cfg.Duplicates
	s.request(&op{apply: func(w *world) result { return w.update(cfg) }}, "STREAM.UPDATE."+cfg.Name, &cfg, "update %s %s", cfg.Name, cfg.Description)
}

func (s *sim) deleteStream() {
	name := s.pick(whatever).cfg.Name
	s.request(&op{meta: true, apply: func(w *world) result { return w.deleteStream(name) }}, "STREAM.DELETE."+name, nil, "delete %s", name)
	s.deliver = slices.DeleteFunc(s.deliver, func(d delivery) bool { return d.stream == name })
}

func (s *sim) purge() {
	st := s.pick(whatever)
	name := st.cfg.Name
	req := &api.StreamPurgeRequest{}
	if name != "AGED" {
		switch s.rng.IntN(5) {
		case 0:
			req.Subject = s.subject(st)
		case 1:
			req.Sequence = s.someSeq(st)
		case 2:
			req.Keep = uint64(s.rng.IntN(6))
		case 3:
			req.Subject, req.Keep = s.subject(st), uint64(s.rng.IntN(3))
		}
	}
	o := &op{apply: func(w *world) result { return w.purge(name, req) }}
	if name != "AGED" && name != "WORK" && name != "WANT" { // there some may have gone by themselves
		o.check = func(o *op, a *answer) string {
			if a.Error != nil || a.Purged != o.want.removed {
				return fmt.Sprintf("want %d purged", o.want.removed)
			}
			return ""
		}
	} else {
		o.check = func(*op, *answer) string { return "" }
	}
	s.request(o, "STREAM.PURGE."+name, req, "purge %s %+v", name, *req)
}

func (s *sim) someSeq(st *mstream) uint64 {
	if st.last == 0 {
		return 1
	}
	if len(st.msgs) > 0 && s.rng.IntN(4) > 0 {
		return st.msgs[s.rng.IntN(len(st.msgs))].Seq
	}
	return 1 + s.rng.Uint64N(st.last+1)
}

func (s *sim) deleteMsg() {
	st := s.pick(whatever)
	name, seq := st.cfg.Name, s.someSeq(st)
	o := &op{apply: func(w *world) result { return w.deleteMsg(name, seq) }}
	if name == "AGED" || name == "WORK" || name == "WANT" {
		o.check = func(*op, *answer) string { return "" }
	}
	s.request(o, "STREAM.MSG.DELETE."+name, &api.MsgDeleteRequest{Seq: seq}, "delete message %d of %s", seq, name)
}

func (s *sim) subject(st *mstream) string {
	return strings.ToLower(st.cfg.Name) + "." + string(rune('a'+s.rng.IntN(6)))
}

// data makes contents that nothing else has.
func (s *sim) data() []byte {
	s.count++
	n := s.rng.IntN(200)
	switch s.rng.IntN(40) {
	case 0:
		n = s.rng.IntN(40_000) // larger than a segment of the log
	case 1, 2, 3:
		n = s.rng.IntN(4000)
	}
	b := fmt.Appendf(nil, "content %d ", s.count)
	fill := byte(s.rng.Uint32())
	for i := range n {
		b = append(b, fill+byte(i*7))
	}
	return b
}

func (s *sim) publish() {
	if st := s.pick(takes); st != nil {
		s.publishTo(st)
	}
}

func (s *sim) publishTo(st *mstream) {
	p := &pub{
		stream: st.cfg.Name, subject: s.subject(st), expLast: -1, expSubj: -1, data: s.data(), time: time.Now().UnixNano(),
	}
	switch s.rng.IntN(12) {
	case 0, 1, 2:
		s.count++
		p.id = fmt.Sprint("id-", s.count)
	case 3, 4:
		p.id = fmt.Sprint("id-", s.count-s.rng.IntN(30)) // perhaps used before
	case 5:
		p.expLast = int64(st.last) + int64(s.rng.IntN(3))
	case 6:
		if st.cfg.MaxAge == 0 { // or it may have expired
			p.expSubj = int64(st.lastOf(p.subject))
		}
	case 7:
		p.rollup = st.cfg.AllowRollup
	}
	p.header = p.block()
	o := &op{apply: func(w *world) result { return w.publish(p) }}
	o.check = func(o *op, a *answer) string {
		code := uint16(0)
		if a.Error != nil {
			code = a.Error.ErrCode
		}
		if code != o.want.code || code == 0 && (a.Seq != o.want.seq || a.Duplicate != o.want.dup) {
			return fmt.Sprintf("want %+v", o.want)
		}
		return ""
	}
	reply := s.issue(o, "publish %s %q, %d octets", p.subject, strings.ReplaceAll(string(p.header), "\r\n", "|"), len(p.data))
	s.send(p.subject, reply, p.header, p.data)
}

// ingest hands in a batch of an edge.
func (s *sim) ingest() {
	st := s.tail.streams["HUB"]
	if st == nil {
		return
	}
	es, ok := s.e.Stream("HUB")
	if !ok {
		return
	}
	name := fmt.Sprint("EDGE", s.rng.IntN(2))
	e := s.edges[name]
	if e == nil {
		s.count++
		e = &edge{inc: 1}
		copy(e.uid[:], fmt.Sprint("uid of ", name, " ", st.life))
		if pos, ok := st.positions[name]; ok {
			e.inc, e.through, e.chain = pos.Incarnation, pos.Through, pos.Chain
		} else {
			e.chain = command.Seed(e.uid, 1, 1)
		}
		s.edges[name] = e
	}
	synctest.Wait() // what was published before goes first
	in := &command.Ingest{Edge: name, UID: e.uid, Incarnation: e.inc, Base: 1, First: e.through + 1, PrevChain: e.chain}
	if s.rng.IntN(8) == 0 && e.through > 0 {
		in.First = e.through // comes again, or out of order
	}
	in.Through = in.First - 1
	for range 1 + s.rng.IntN(6) {
		in.Through++
		if s.rng.IntN(6) == 0 {
			in.Gaps = append(in.Gaps, command.Gap{First: in.Through, Last: in.Through, Reason: command.GapDeleted})
			continue
		}
		in.Msgs = append(in.Msgs, command.IngestMsg{
			Seq: in.Through, Time: time.Now().UnixNano(), Subject: "plant." + string(rune('a'+s.rng.IntN(4))), Data: s.data(),
		})
	}
	s.count++
	copy(in.Chain[:], fmt.Sprint("chain ", s.count))
	if in.First == e.through+1 {
		e.through, e.chain = in.Through, in.Chain
	}
	o := &op{apply: func(w *world) result { return w.ingest("HUB", in) }}
	o.check = func(o *op, a *answer) string {
		if !errors.Is(a.in.err, o.want.posErr) || a.in.pos.Through != o.want.pos.Through || a.in.pos.Chain != o.want.pos.Chain {
			return fmt.Sprintf("want position %+v, %v", o.want.pos, o.want.posErr)
		}
		return ""
	}
	o.refused = func() { delete(s.edges, name) } // goes on from the position
	s.issue(o, "ingest %s %d to %d, %d messages", name, in.First, in.Through, len(in.Msgs))
	es.Ingest(in, func(pos command.Position, err error) {
		if s.m.off.Load() {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waiting, o.id)
		s.replies = append(s.replies, reply{op: o, in: &ingested{pos, err}, at: time.Now()})
	})
	s.e.Kick()
}

// consumer creates or deletes one.
func (s *sim) consumer() {
	st := s.pick(func(st *mstream) bool {
		return slices.Contains([]string{"KEEP", "RING", "KV", "WORK", "WANT"}, st.cfg.Name)
	})
	if st == nil {
		return
	}
	stream, name := st.cfg.Name, []string{"C1", "C2"}[s.rng.IntN(2)]
	if stream == "WORK" {
		name = "C1" // a work queue has one only
	}
	if st.consumers[name] == nil {
		s.createConsumer(st, name)
	} else if s.rng.IntN(4) == 0 {
		s.deleteConsumer(st, name)
	}
}

func (s *sim) createConsumer(st *mstream, name string) {
	stream := st.cfg.Name
	if stream == "WANT" && s.m.wasFull.Load() {
		return // what one that was deleted has left may not be gone yet, and would be its
	}
	cfg := api.ConsumerConfig{Durable: name, AckPolicy: api.AckExplicit}
	if !st.wants(name, "want.f") {
		cfg.FilterSubjects = []string{"want.a", "want.b"}
	}
	s.inbox(stream, name)
	s.request(&op{apply: func(w *world) result { return w.createConsumer(stream, name) }},
		"CONSUMER.DURABLE.CREATE."+stream+"."+name, &api.CreateConsumerRequest{Stream: stream, Config: cfg}, "create consumer %s of %s", name, stream)
}

func (s *sim) deleteConsumer(st *mstream, name string) {
	stream := st.cfg.Name
	s.deliver = slices.DeleteFunc(s.deliver, func(d delivery) bool { return d.stream == stream && d.consumer == name })
	for key := range s.sent {
		if strings.HasPrefix(key, ackKey(stream, st.life, name, 0)[:len(ackKey(stream, st.life, name, 0))-1]) {
			delete(s.sent, key)
		}
	}
	s.request(&op{apply: func(w *world) result { return w.deleteConsumer(stream, name) }},
		"CONSUMER.DELETE."+stream+"."+name, nil, "delete consumer %s of %s", name, stream)
}

// sweep deletes a consumer that keeps many messages, all of which have to go. A
// checkpoint may come in between, and the end of this life.
func (s *sim) sweep() {
	want := func() *mstream { return s.tail.streams["WANT"] }
	if want() == nil {
		s.createStream("WANT")
	}
	for _, name := range []string{"C1", "C2"} {
		if !s.over() && want() != nil && want().consumers[name] == nil {
			s.createConsumer(want(), name)
		}
	}
	if s.over() || want() == nil || len(want().consumers) < 2 {
		return // the disk is full
	}
	for range 5 + s.rng.IntN(15) {
		s.publishTo(want())
	}
	if s.quiesce(); s.over() {
		return
	}
	s.counts.Sweeps++
	n := 4 + 2*len(want().msgs)/s.slice // operations of the disk that it takes: a write and a sync for each slice
	if s.midSweep {
		s.m.cutWithin(n)
	}
	if s.relaxed == 0 && s.rng.IntN(2) == 0 {
		e := s.e
		defer s.m.callWithin(n, func() { s.running.Go(func() { s.checkpointNow(e) }) })()
	}
	s.deleteConsumer(want(), "C1")
}

func (s *sim) fetch() {
	st := s.pick(consumed)
	if st == nil {
		s.consumer()
		return
	}
	names := slices.Sorted(maps.Keys(st.consumers))
	s.fetchFrom(st.cfg.Name, names[s.rng.IntN(len(names))], 1+s.rng.IntN(30))
}

func (s *sim) fetchFrom(stream, consumer string, n int) {
	s.logf("fetch %d of %s/%s", n, stream, consumer)
	body, _ := json.Marshal(&api.NextRequest{Batch: n, NoWait: true})
	s.send("$JS.API.CONSUMER.MSG.NEXT."+stream+"."+consumer, s.inbox(stream, consumer), nil, body)
	s.settle()
}

// acks acknowledges and rejects some of what was delivered.
func (s *sim) acks() {
	for range 1 + s.rng.IntN(6) {
		if len(s.deliver) == 0 || s.over() {
			return
		}
		i := s.rng.IntN(len(s.deliver))
		d := s.deliver[i]
		s.deliver = slices.Delete(s.deliver, i, i+1)
		st := s.tail.streams[d.stream]
		if st == nil || st.consumers[d.consumer] == nil {
			continue
		}
		if s.rng.IntN(6) == 0 {
			s.logf("reject %d of %s/%s", d.msg.Seq, d.stream, d.consumer)
			s.send(d.reply, "", nil, []byte("-NAK"))
			continue
		}
		s.sent[ackKey(d.stream, st.life, d.consumer, d.msg.Seq)] = true
		s.counts.Acks++
		o := &op{apply: func(w *world) result { return w.ack(d.stream, d.consumer, d.msg.Seq) }}
		reply := s.issue(o, "acknowledge %d of %s/%s", d.msg.Seq, d.stream, d.consumer)
		s.send(d.reply, reply, nil, []byte("+ACK"))
	}
}

// checkpoint makes one, waiting for it or not.
func (s *sim) checkpoint(wait bool) {
	e := s.e
	s.logf("checkpoint")
	if wait {
		s.settle()
		s.checkpointNow(e)
		s.settle()
	} else {
		s.running.Go(func() { s.checkpointNow(e) })
	}
}

func (s *sim) checkpointNow(e *jetstream.Engine) {
	err := e.Checkpoint()
	if err == nil || s.m.off.Load() || s.m.wasFull.Load() && errors.Is(err, syscall.ENOSPC) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checkErr = errors.Join(s.checkErr, err)
}

// sleep lets time pass, so that things expire and are redelivered.
func (s *sim) sleep() {
	d := time.Duration(s.rng.Int64N(int64(time.Millisecond) << s.rng.IntN(26)))
	if s.m.full.Load() { // everything is tried again each second
		d = min(d, 3*time.Second)
	}
	s.logf("%v pass", d)
	time.Sleep(d)
	s.settle()
}

// verify compares what the engine holds with the model.
func (s *sim) verify() {
	s.quiesce()
	if s.over() {
		return
	}
	s.running.Wait()
	time.Sleep(2 * s.relaxed) // what is read is what is safe
	o := s.observe()
	if o == nil {
		return
	}
	if s.settle(); s.over() {
		return
	}
	if d := s.tail.differs(o, s.slack(), true); d != "" {
		s.fail("while running: %s", d)
	}
	for _, st := range s.e.Streams() {
		if m := s.tail.streams[st.Name()]; m != nil && !s.m.off.Load() {
			s.durable[st.Name()] = durable{m.life, st.DurableState().Last}
		}
	}
}

// sync makes everything that is acknowledged safe, where that takes time.
func (s *sim) sync() {
	if s.relaxed == 0 {
		return
	}
	s.quiesce()
	time.Sleep(2 * s.relaxed)
	if s.settle(); s.over() {
		return
	}
	s.logf("synced")
	s.takeAcked()
}

// drain has every consumer deliver everything that it has not acknowledged.
func (s *sim) drain() {
	s.verify()
	time.Sleep(time.Hour) // what is under way is due again
	s.deliver = nil
	for _, name := range slices.Sorted(maps.Keys(s.tail.streams)) {
		st := s.tail.streams[name]
		for consumer, acked := range st.consumers {
			got := map[uint64]bool{}
			for {
				s.fetchFrom(name, consumer, 500)
				n := len(got)
				for _, d := range s.deliver {
					got[d.msg.Seq] = true
				}
				s.deliver = nil
				if len(got) == n {
					break
				}
			}
			if s.over() {
				return
			}
			for i := range st.msgs {
				seq := st.msgs[i].Seq
				if st.wants(consumer, st.msgs[i].Subject) && !got[seq] && !acked[seq] && !s.sent[ackKey(name, st.life, consumer, seq)] {
					s.fail("consumer %s of %s never got message %d, which it has not acknowledged", consumer, name, seq)
				}
				delete(got, seq)
			}
			for seq := range got {
				s.fail("consumer %s of %s got message %d, which is not in the stream", consumer, name, seq)
			}
		}
	}
}
