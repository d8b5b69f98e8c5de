package jetstream

import (
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/wire"
	"petiole/storage"
)

// Headers of messages got directly (ADR-31).
const (
	headerStream     = "Nats-Stream"
	headerSubject    = "Nats-Subject"
	headerSequence   = "Nats-Sequence"
	headerTime       = "Nats-Time-Stamp"
	headerNumPending = "Nats-Num-Pending"
	headerLastSeq    = "Nats-Last-Sequence"
	headerUpToSeq    = "Nats-UpTo-Sequence"
)

const (
	maxMultiLast   = 1024     // messages that one request for last messages gets
	maxDirectBytes = 64 << 20 // octets that one request gets, if it names no limit
)

// status answers with a status line only.
func (r *request) status(code int, text string) { r.send(wire.AppendStatus(nil, code, text), nil) }

// directGet serves $JS.API.DIRECT.GET.<stream>[.<subject>]. Where the stream
// does not take such requests it answers as if nobody listened, which is what
// clients expect.
func (r *request) directGet(rest string) {
	if len(r.reply) == 0 {
		return
	}
	name, last, bySubject := strings.Cut(rest, ".")
	s, ok := r.e.Stream(name)
	if !ok || !s.cfg.Load().AllowDirect {
		r.send(wire.AppendStatus(nil, 503, ""), nil)
		return
	}
	if level, ok := wire.HeaderValue(r.header, headerAPILevel); ok {
		if v, err := strconv.Atoi(string(level)); err != nil || v > APILevel {
			r.status(412, "Required Api Level")
			return
		}
	}
	var req api.MsgGetRequest
	if len(r.data) > 0 {
		if err := json.Unmarshal(r.data, &req); err != nil {
			r.status(408, "Malformed Request")
			return
		}
	}
	if bySubject {
		if req.Seq > 0 || req.LastFor != "" || req.NextFor != "" || len(req.MultiLastFor) > 0 || req.Batch > 0 || !validOrEmpty(last) {
			r.status(408, "Bad Request")
			return
		}
		req.LastFor = last
	}
	multi := len(req.MultiLastFor) > 0
	switch {
	case req.Seq == 0 && req.LastFor == "" && req.NextFor == "" && !multi && req.StartTime == nil:
		r.status(408, "Empty Request")
		return
	case req.Seq > 0 && (req.LastFor != "" || req.StartTime != nil),
		req.LastFor != "" && (req.StartTime != nil || req.NextFor != "" || req.Batch > 0 || multi),
		req.NextFor != "" && multi,
		req.UpToSeq > 0 && req.UpToTime != nil,
		req.Batch < 0,
		!validOrEmpty(req.LastFor), !validOrEmpty(req.NextFor),
		slices.ContainsFunc(req.MultiLastFor, func(p string) bool { return p == "" || !validOrEmpty(p) }):
		r.status(408, "Bad Request")
		return
	}
	var err error
	switch {
	case multi:
		err = r.directMulti(s, &req)
	case req.Batch > 0:
		err = r.directBatch(s, &req)
	default:
		var m storage.Message
		if m, err = s.find(&req); err == nil {
			r.direct(s, &m, &req)
			return
		}
	}
	switch {
	case err == nil:
	case errors.Is(err, storage.ErrNotFound), errors.Is(err, storage.ErrEOF):
		r.status(404, "Message Not Found")
	case isDamaged(err):
		seq, _ := storage.Damaged(err)
		r.e.log.Error("a message asked for is damaged on disk; delete it to be rid of it", "stream", s.name, "seq", seq, "err", err)
		r.status(500, damagedText(seq))
	case errors.Is(err, storage.ErrCorrupt):
		r.e.log.Error("a message asked for cannot be read", "stream", s.name, "err", err)
		r.status(500, mendingText)
	default:
		r.e.log.Error("a direct get failed", "stream", s.name, "err", err)
		r.status(500, "Internal Server Error")
	}
}

// direct sends one message with headers that say what it is, and more (key,
// value) pairs.
func (r *request) direct(s *Stream, m *storage.Message, req *api.MsgGetRequest, more ...string) {
	kv := append([]string{
		headerStream, s.name,
		headerSubject, m.Subject,
		headerSequence, strconv.FormatUint(m.Seq, 10),
		headerTime, timeOf(m.Time).Format(time.RFC3339Nano),
	}, more...)
	header := m.Header
	if req.NoHeaders {
		header = nil
	}
	r.send(wire.WithHeader(nil, header, kv...), m.Data)
}

func isDamaged(err error) bool {
	_, damaged := storage.Damaged(err)
	return damaged
}

// isMissing reports whether a message is not there, or is damaged.
func isMissing(err error) bool { return errors.Is(err, storage.ErrNotFound) || isDamaged(err) }

// directBatch sends several messages from a position on.
func (r *request) directBatch(s *Stream, req *api.MsgGetRequest) error {
	seq := req.Seq
	if req.StartTime != nil {
		seq = s.store.SeqAtTime(api.UnixNano(*req.StartTime))
	}
	var f storage.Filter
	if req.NextFor != "" {
		f.Patterns = []string{req.NextFor}
	}
	pending := s.store.NumPending(f, seq)
	budget := req.MaxBytes
	if budget <= 0 {
		budget = maxDirectBytes
	}
	var last uint64
	for i := range req.Batch {
		m, err := s.store.LoadNext(f, seq)
		for bad, damaged := storage.Damaged(err); damaged && bad >= seq; bad, damaged = storage.Damaged(err) {
			seq = bad + 1 // a batch passes over it, as consumers do
			m, err = s.store.LoadNext(f, seq)
		}
		if errors.Is(err, storage.ErrEOF) && i > 0 {
			break
		}
		if err != nil {
			return err
		}
		if pending > 0 {
			pending--
		}
		size := len(m.Subject) + len(m.Header) + len(m.Data)
		r.direct(s, &m, req, headerNumPending, strconv.FormatUint(pending, 10), headerLastSeq, strconv.FormatUint(last, 10))
		last, seq = m.Seq, m.Seq+1
		if budget -= size; budget <= 0 {
			break
		}
	}
	r.send(wire.AppendStatus(nil, 204, "EOB",
		headerNumPending, strconv.FormatUint(pending, 10), headerLastSeq, strconv.FormatUint(last, 10)), nil)
	return nil
}

// directMulti sends the last message of each subject that matches.
func (r *request) directMulti(s *Stream, req *api.MsgGetRequest) error {
	upTo := req.UpToSeq
	if req.UpToTime != nil {
		upTo = s.store.SeqAtTime(api.UnixNano(*req.UpToTime))
		if upTo <= s.store.State().First {
			r.status(404, "No Results")
			return nil
		}
		upTo--
	}
	if upTo == 0 {
		upTo = s.store.State().Last
	}
	found := map[string]uint64{} // the last sequences of subjects
	for _, p := range req.MultiLastFor {
		s.store.Subjects(p, func(subject string, st storage.SubjectState) bool {
			if st.First <= upTo {
				found[subject] = st.Last
			}
			return len(found) <= maxMultiLast
		})
	}
	if len(found) > maxMultiLast {
		r.status(413, "Too Many Results")
		return nil
	}
	// Only their sequences: the messages together may take any amount of memory.
	var seqs []uint64
	for subject, seq := range found {
		if seq > upTo {
			m, err := s.store.LoadLast(subject, upTo)
			if isMissing(err) {
				continue
			}
			if err != nil {
				return err
			}
			seq = m.Seq
		}
		if seq >= req.Seq {
			seqs = append(seqs, seq)
		}
	}
	slices.Sort(seqs)
	budget := req.MaxBytes
	if budget <= 0 {
		budget = maxDirectBytes
	}
	var last uint64
	pending, sent := uint64(len(seqs)), 0
	for _, seq := range seqs {
		pending--
		m, err := s.store.Load(seq)
		if isMissing(err) {
			continue
		}
		if err != nil {
			return err
		}
		r.direct(s, &m, req, headerNumPending, strconv.FormatUint(pending, 10), headerLastSeq, strconv.FormatUint(last, 10))
		last = m.Seq
		sent++
		budget -= len(m.Subject) + len(m.Header) + len(m.Data)
		if budget <= 0 || req.Batch > 0 && sent >= req.Batch {
			break
		}
	}
	if sent == 0 {
		r.status(404, "No Results")
		return nil
	}
	r.send(wire.AppendStatus(nil, 204, "EOB", headerNumPending, strconv.FormatUint(pending, 10),
		headerLastSeq, strconv.FormatUint(last, 10), headerUpToSeq, strconv.FormatUint(upTo, 10)), nil)
	return nil
}
