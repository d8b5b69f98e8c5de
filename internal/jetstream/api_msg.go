package jetstream

import (
	"errors"
	"strconv"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/subject"
	"petiole/storage"
)

func (r *request) msgDelete() (any, error) {
	var req api.MsgDeleteRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	if len(r.data) == 0 {
		return nil, api.ErrBadRequest
	}
	s, err := r.stream()
	if err != nil {
		return nil, err
	}
	res, err := s.propose((&command.DeleteMsg{Seq: req.Seq}).AppendTo(nil))
	if err := firstError(res, err); err != nil {
		return nil, err
	}
	return &api.SuccessResponse{Success: true}, nil
}

func (r *request) msgGet() (any, error) {
	var req api.MsgGetRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	s, err := r.stream()
	if err != nil {
		return nil, err
	}
	if req.Batch > 0 || req.MaxBytes > 0 || len(req.MultiLastFor) > 0 ||
		req.Seq > 0 && (req.LastFor != "" || req.StartTime != nil) ||
		req.Seq == 0 && req.LastFor == "" && req.NextFor == "" && req.StartTime == nil ||
		req.LastFor != "" && (req.NextFor != "" || req.StartTime != nil) ||
		!validOrEmpty(req.LastFor) || !validOrEmpty(req.NextFor) {
		return nil, api.ErrBadRequest
	}
	m, err := s.find(&req)
	if errors.Is(err, storage.ErrNotFound) || errors.Is(err, storage.ErrEOF) {
		return nil, api.ErrNoMessageFound
	}
	if seq, damaged := storage.Damaged(err); damaged {
		r.e.log.Error("a message asked for is damaged on disk; delete it to be rid of it", "stream", s.name, "seq", seq, "err", err)
		return nil, api.ErrStreamGeneral.With("err", damagedText(seq))
	}
	if err != nil {
		return nil, err
	}
	stored := &api.StoredMsg{Subject: m.Subject, Sequence: m.Seq, Data: m.Data, Time: timeOf(m.Time)}
	if !req.NoHeaders {
		stored.Header = m.Header
	}
	return &api.MsgGetResponse{Message: stored}, nil
}

// damagedText is what a client is told that asks for a damaged message.
func damagedText(seq uint64) string {
	return "message " + strconv.FormatUint(seq, 10) + " is damaged on disk"
}

// mendingText is what a client is told whose request met damage that is not one
// message's: it has had the repair begin (see fileStore.note).
const mendingText = "the stream's files are damaged and are being repaired; try again"

func validOrEmpty(subj string) bool { return subj == "" || subject.Valid(subj) }

// find loads the one message that a request asks for.
func (s *Stream) find(req *api.MsgGetRequest) (storage.Message, error) {
	seq := req.Seq
	if req.StartTime != nil {
		seq = s.store.SeqAtTime(api.UnixNano(*req.StartTime))
	}
	switch {
	case req.LastFor != "":
		return s.store.LoadLast(req.LastFor, 0)
	case req.NextFor != "":
		return s.store.LoadNext(storage.Filter{Patterns: []string{req.NextFor}}, seq)
	case req.StartTime != nil:
		return s.store.LoadNext(storage.Filter{}, seq)
	}
	return s.store.Load(seq)
}
