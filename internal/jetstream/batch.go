package jetstream

import (
	"bytes"
	"slices"
	"strconv"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/internal/wire"
)

// Headers and limits of atomic batch publishing (ADR-50).
const (
	headerBatchSeq    = "Nats-Batch-Sequence"
	headerBatchCommit = "Nats-Batch-Commit"

	maxBatchID       = 64               // octets of a batch's id
	maxBatchMsgs     = 1000             // messages of a batch
	maxBatches       = 50               // batches under way in a stream
	maxBatchedOctets = 64 << 20         // of all batches under way in a stream
	batchTimeout     = 10 * time.Second // without a further message a batch is given up
)

// stagedBatch is a batch whose commit has not come yet. It is in memory only:
// clients know that before the commit nothing has happened.
type stagedBatch struct {
	msgs   []command.Publish
	octets int
	last   time.Time
}

// batchReq is the tag of a batch.
type batchReq struct {
	reply []byte
	id    string
	msgs  int
}

// appendAck appends the answer to a batch.
func (b *batchReq) appendAck(dst []byte, s *Stream, r *stream.Result) []byte {
	if r.Refused != nil {
		return api.AppendPubErr(dst, s.name, r.Refused)
	}
	dst = api.AppendPubAck(dst, s.name, r.Seq, false)
	dst = append(dst[:len(dst)-1], `,"batch":`...)
	dst = strconv.AppendQuote(dst, b.id)
	dst = append(dst, `,"count":`...)
	dst = strconv.AppendInt(dst, int64(b.msgs), 10)
	return append(dst, '}')
}

var batchPrefix = []byte(stream.HeaderBatchID)

// publishBatched takes a message that belongs to a batch; it reports whether
// it does.
func (s *Stream) publishBatched(subj, reply, header, data []byte) bool {
	if !bytes.Contains(header, batchPrefix) {
		return false
	}
	id, ok := wire.HeaderValue(header, stream.HeaderBatchID)
	if !ok || len(id) == 0 {
		return false
	}
	req, msgs, refused := s.stage(string(id), subj, header, data)
	switch {
	case refused != nil:
		s.answer(reply, refused)
	case req == nil: // taken
		if len(reply) > 0 {
			s.e.account.PublishBytes(reply, nil, nil, nil)
		}
	default:
		req.reply = slices.Clone(reply)
		s.commitBatch(req, (&command.Batch{Msgs: msgs}).AppendTo(nil))
	}
	return true
}

// stage adds a message to its batch. If it is the last one, the batch is
// returned.
func (s *Stream) stage(id string, subj, header, data []byte) (*batchReq, []command.Publish, *api.Error) {
	if len(id) > maxBatchID || !printable(id) {
		return nil, nil, api.ErrAtomicPublishInvalidBatchID
	}
	v, _ := wire.HeaderValue(header, headerBatchSeq)
	seq, err := strconv.ParseUint(string(v), 10, 64)
	if err != nil {
		return nil, nil, api.ErrAtomicPublishMissingSeq
	}
	commit, committing := wire.HeaderValue(header, headerBatchCommit)
	eob := string(commit) == "eob"
	s.batchMu.Lock()
	defer s.batchMu.Unlock()
	now := time.Now()
	s.dropStale(now)
	b := s.batches[id]
	switch {
	case b == nil && seq != 1:
		return nil, nil, api.ErrAtomicPublishIncompleteBatch
	case b == nil && len(s.batches) >= maxBatches:
		return nil, nil, api.ErrAtomicPublishTooManyInflight
	case b == nil:
		b = &stagedBatch{}
		s.batches[id] = b
		if !s.reaping {
			s.reaping = true
			time.AfterFunc(batchTimeout, s.reapBatches)
		}
	}
	b.last = now
	size := len(subj) + len(header) + len(data)
	var refused *api.Error
	switch {
	case committing && !eob && string(commit) != "1":
		refused = api.ErrAtomicPublishInvalidBatchCommit
	case seq != uint64(len(b.msgs))+1, seq == 1 && eob:
		refused = api.ErrAtomicPublishIncompleteBatch
	case !eob && seq > maxBatchMsgs:
		refused = api.ErrAtomicPublishTooLargeBatch.With("size", maxBatchMsgs)
	case s.batched+size > maxBatchedOctets:
		refused = api.ErrAtomicPublishTooManyInflight
	}
	if refused != nil {
		s.dropBatch(id)
		return nil, nil, refused
	}
	if !eob {
		b.msgs = append(b.msgs, command.Publish{
			Time: now.UnixNano(), Steady: s.steady(now), Subject: string(subj), Header: slices.Clone(header), Data: slices.Clone(data),
		})
		b.octets += size
		s.batched += size
	}
	if !committing {
		return nil, nil, nil
	}
	s.dropBatch(id)
	return &batchReq{id: id, msgs: len(b.msgs)}, b.msgs, nil
}

// dropStale gives up batches that were not continued. The caller holds batchMu.
func (s *Stream) dropStale(now time.Time) {
	for k, b := range s.batches {
		if now.Sub(b.last) > batchTimeout {
			s.dropBatch(k)
		}
	}
}

// reapBatches gives up batches that were not continued, also if no other comes.
// It comes again as long as there are any, so that it ends by itself.
func (s *Stream) reapBatches() {
	s.batchMu.Lock()
	defer s.batchMu.Unlock()
	s.dropStale(time.Now())
	if s.reaping = len(s.batches) > 0; s.reaping {
		time.AfterFunc(batchTimeout, s.reapBatches)
	}
}

// dropBatch forgets a batch. The caller holds batchMu.
func (s *Stream) dropBatch(id string) {
	if b := s.batches[id]; b != nil {
		s.batched -= b.octets
		delete(s.batches, id)
	}
}

// printable reports whether an id can be put into JSON as it is.
func printable(id string) bool {
	for _, c := range []byte(id) {
		if c <= ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

// commitBatch hands a whole batch in.
func (s *Stream) commitBatch(req *batchReq, rec []byte) {
	if s.memory {
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
		if len(req.reply) > 0 {
			s.scratch = req.appendAck(s.scratch[:0], s, &r)
			s.pub.PublishBytes(req.reply, nil, nil, s.scratch)
		}
		s.pub.Flush()
		return
	}
	if err := s.e.prop.Propose(s.group, req, rec); err != nil {
		s.answer(req.reply, refused(err))
	}
}
