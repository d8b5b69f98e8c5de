package jetstream

import (
	"fmt"

	"petiole/internal/jetstream/api"
	"petiole/storage"
	"petiole/storage/wal"
)

// onCommit applies committed records. The log calls it, one call at a time.
func (e *Engine) onCommit(records []wal.Record) {
	if e.failed.Load() || len(records) == 0 {
		return
	}
	e.applyMu.Lock()
	defer e.applyMu.Unlock()
	touched := e.touched[:0]
	for i := 0; i < len(records); {
		j := i + 1
		for j < len(records) && records[j].Group == records[i].Group {
			j++
		}
		run := records[i:j]
		i = j
		if run[0].Group == storage.MetaGroup {
			for k := range run {
				if err := e.applyMeta(&run[k]); err != nil && !isDamage(err) {
					e.fail(fmt.Errorf("applying record %d: %w", run[k].LSN, err))
					return
				}
			}
			continue
		}
		s := e.groups[run[0].Group]
		if s == nil {
			d, refused := e.downs[run[0].Group], api.ErrStreamNotFound
			for k := range run {
				if d != nil {
					d.late(&run[k])
					refused = e.offline(d.rec.Name)
				}
				e.refuse(&run[k], refused)
			}
			continue
		}
		if n, err := s.applyRun(run); err != nil {
			if !isDamage(err) {
				e.fail(err)
				return
			}
			e.takeDown(s, err, run[n:])
			continue
		}
		if !s.touched {
			s.touched = true
			touched = append(touched, s)
		}
	}
	last := records[len(records)-1].LSN
	e.lastLSN.Store(uint64(last))
	for _, s := range touched {
		s.touched = false
		s.committed(last)
		e.sinceCheck += s.runBytes
		s.runBytes = 0
	}
	e.acks.Flush() // what is acknowledged is in DurableState
	clear(touched)
	e.touched = touched
	if e.sinceCheck >= e.checkEvery() {
		e.sinceCheck = 0
		e.regulate()
		e.wakeCheckpointer()
	}
}

// refuse answers a record of a stream that is gone, or does not serve.
func (e *Engine) refuse(r *wal.Record, refused *api.Error) {
	switch tag := e.prop.tag(r).(type) {
	case *pubReq:
		if len(tag.reply) > 0 {
			e.scratch = api.AppendPubErr(e.scratch[:0], "", refused)
			e.acks.PublishBytes(tag.reply, nil, nil, e.scratch)
		}
		tag.release()
	case *batchReq:
		if len(tag.reply) > 0 {
			e.scratch = api.AppendPubErr(e.scratch[:0], "", refused)
			e.acks.PublishBytes(tag.reply, nil, nil, e.scratch)
		}
	case *call:
		tag.fn(callResult{err: refused})
	}
}

// tag returns what a record was proposed with; nil in replay.
func (e *Engine) tag(r *wal.Record) any {
	if !e.live {
		return nil
	}
	return e.prop.tag(r)
}
