package jetstream

import (
	"fmt"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/storage"
	"petiole/storage/wal"
)

// applyMemory applies a record of a memory stream at once. The caller holds
// the lock.
func (s *Stream) applyMemory(rec []byte) (stream.Result, error) {
	r, err := s.applyStream(rec)
	if err != nil {
		return r, err
	}
	s.afterApply()
	st := s.store.State()
	s.durable.Store(&st)
	s.notify()
	return r, nil
}

// applyRun applies committed records of this stream; it returns how many, if
// not all.
func (s *Stream) applyRun(run []wal.Record) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range run {
		if err := s.apply(&run[i]); err != nil {
			return i, fmt.Errorf("applying record %d: %w", run[i].LSN, err)
		}
		s.runBytes += int64(len(run[i].Data))
	}
	s.afterApply()
	return len(run), nil
}

// apply applies one record, live or in replay. The caller holds the lock.
func (s *Stream) apply(r *wal.Record) error {
	s.applied = r.LSN
	if s.dirtyFrom == 0 {
		s.dirtyFrom = r.LSN
	}
	var tag any
	if s.live {
		tag = s.e.prop.tag(r)
	}
	if command.IsConsumer(command.KindOf(r.Data)) {
		return s.applyConsumer(r.Data, tag)
	}
	res, err := s.applyStream(r.Data)
	if err != nil {
		return err
	}
	if s.live && uint32(res.Seq) != r.Last && command.Messages(r.Data) > 0 {
		s.e.wal.CorrectLast(r, s.store.State().Last)
	}
	if s.republish != nil && res.Kind == command.KindPublish && s.live {
		s.sendAgain(s.e.acks, &res)
	}
	switch tag := tag.(type) {
	case *pubReq:
		if len(tag.reply) > 0 {
			s.e.scratch = s.appendAck(s.e.scratch[:0], &res)
			s.e.acks.PublishBytes(tag.reply, nil, nil, s.e.scratch)
		}
		tag.release()
	case *batchReq:
		if len(tag.reply) > 0 {
			s.e.scratch = tag.appendAck(s.e.scratch[:0], s, &res)
			s.e.acks.PublishBytes(tag.reply, nil, nil, s.e.scratch)
		}
	case *call:
		tag.fn(callResult{Result: res, stream: s, lsn: r.LSN})
	}
	return nil
}

// applyStream applies a record to the stream's machine.
func (s *Stream) applyStream(rec []byte) (stream.Result, error) {
	r := s.m.Apply(rec)
	if r.Fatal != nil {
		return r, r.Fatal
	}
	switch r.Kind {
	case command.KindPublish, command.KindBatch:
		if r.Seq != 0 && !r.Duplicate && s.m.Config().Retention == api.InterestPolicy {
			for seq := r.Seq - r.Before; seq <= r.Seq; seq++ {
				if err := s.dropUnwanted(seq); err != nil {
					return r, err
				}
			}
		}
	case command.KindIngest:
		if r.Seq != 0 && s.m.Config().Retention == api.InterestPolicy {
			for seq, last := r.Seq, s.store.State().Last; seq <= last; seq++ {
				if err := s.dropUnwanted(seq); err != nil {
					return r, err
				}
			}
		}
	case command.KindSetConfig:
		was := s.cfg.Load().Retention
		s.setConfig()
		for _, c := range s.consumers {
			c.m.StreamUpdated()
		}
		if was != s.m.Config().Retention { // to interest, or nothing is swept
			if err := s.beginSweep(); err != nil {
				return r, err
			}
		}
		if s.live {
			if err := s.subscribe(); err != nil {
				return r, err
			}
		}
		if old, ok := s.e.book.record(uint64(s.group)); ok {
			rec := *old
			rec.Config = *s.m.Config()
			s.e.book.put(&rec, 0)
			s.e.wakeKeeper()
		}
	case command.KindLost:
		var c command.Lost
		if r.Removed > 0 && c.Decode(rec) == nil {
			s.addLost(storage.Span{First: c.Seq, Last: c.Seq}, time.Unix(0, c.Time))
		}
	case command.KindSkip:
		s.skip, s.missed = 0, false
		s.unsettled.Store(false)
		var c command.Skip
		if r.Skipped.First <= r.Skipped.Last && c.Decode(rec) == nil {
			s.leftOut(r.Skipped, time.Unix(0, c.Time))
		}
	case command.KindSweep:
		var c command.Sweep
		if c.Decode(rec) == nil {
			if err := s.sweepSlice(c.Max); err != nil {
				return r, err
			}
		}
	case command.KindExpire:
		s.expiring = false
	}
	return r, nil
}

// unwanted reports whether no consumer needs a message (any more). One that is
// gone already is not unwanted.
func (s *Stream) unwanted(seq uint64) bool {
	if s.m.Config().Retention == api.WorkQueuePolicy {
		return true // it was the only consumer that may have it
	}
	msg, err := s.store.Load(seq)
	if err != nil {
		return false
	}
	return s.m.Config().Retention != api.InterestPolicy || !s.needed(seq, msg.Subject)
}

// dropUnwanted removes a message if no consumer needs it.
func (s *Stream) dropUnwanted(seq uint64) error {
	if !s.unwanted(seq) {
		return nil
	}
	return s.m.Acked(seq)
}

// afterApply wakes what follows from applied records. The caller holds the
// lock.
func (s *Stream) afterApply() {
	s.account(s.store.State().Bytes)
	s.measure()
	s.wakePump()
	s.armExpiry()
}
