package jetstream

import (
	"encoding/json"
	"maps"
	"slices"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/subject"
	"petiole/storage"
)

// info describes the stream.
func (s *Stream) info() *api.StreamInfo {
	st := s.store.State()
	info := &api.StreamInfo{
		Config: s.Config(), Created: s.created, TimeStamp: time.Now().UTC(),
		State: api.StreamState{
			Msgs: st.Msgs, Bytes: st.Bytes, FirstSeq: st.First, LastSeq: st.Last,
			FirstTime: timeOf(st.FirstTime), LastTime: timeOf(st.LastTime),
			NumSubjects: st.Subjects, NumDeleted: int(st.Deleted), Consumers: s.NumConsumers(),
		},
	}
	if st.Last == 0 && st.Msgs == 0 {
		info.State.FirstSeq = 0
	}
	return info
}

func (r *request) streamCreate() (any, error) {
	var cfg api.StreamConfig
	if len(r.data) == 0 {
		return nil, api.ErrInvalidJSON.With("err", "unexpected end of JSON input")
	}
	if err := r.decode(&cfg); err != nil {
		return nil, err
	}
	if cfg.Name != r.args[0] {
		return nil, api.ErrStreamMismatch
	}
	s, created, err := r.e.createStream(&cfg)
	if err != nil {
		return nil, err
	}
	return &api.StreamCreateResponse{StreamInfo: s.info(), DidCreate: created}, nil
}

func (r *request) streamUpdate() (any, error) {
	var in api.StreamConfig
	if err := r.decode(&in); err != nil {
		return nil, err
	}
	if in.Name != r.args[0] {
		return nil, api.ErrStreamMismatch
	}
	e := r.e
	e.apiMu.Lock()
	defer e.apiMu.Unlock()
	s, err := r.stream()
	if err != nil {
		return nil, err
	}
	cfg, refused := normalize(&in)
	if refused != nil {
		return nil, refused
	}
	old := s.Config()
	if refused := checkUpdate(&old, cfg); refused != nil {
		return nil, refused
	}
	cfg.FirstSeq = old.FirstSeq
	if err := e.checkOverlap(cfg); err != nil {
		return nil, err
	}
	if err := e.checkReserve(cfg, s); err != nil {
		return nil, err
	}
	b, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	res, err := s.propose((&command.SetConfig{JSON: b}).AppendTo(nil))
	if err == nil && res.err != nil {
		err = res.err
	}
	if err == nil && cfg.Retention != old.Retention {
		s.awaitSweep()
		// Consumers that kept no state do from now on, and begin with this.
		err = s.checkpoint()
	}
	if err == nil && s.memory { // it has no record in the log
		err = r.e.saveMeta()
	}
	if err != nil {
		return nil, err
	}
	return &api.StreamCreateResponse{StreamInfo: s.info()}, nil
}

func (r *request) streamInfo() (any, error) {
	var req api.StreamInfoRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	s, err := r.stream()
	if err != nil {
		return nil, err
	}
	res := &api.StreamInfoResponse{StreamInfo: s.info(), Paged: &api.Paged{}}
	if req.DeletedDetails && res.State.NumDeleted > 0 {
		if res.State.Deleted, err = s.deletedSeqs(res.State.LastSeq); err != nil {
			return nil, err
		}
	}
	if req.SubjectsFilter != "" {
		totals := map[string]uint64{}
		s.store.Subjects(req.SubjectsFilter, func(subject string, st storage.SubjectState) bool {
			totals[subject] = st.Msgs
			return true
		})
		if len(totals) > 0 {
			names, p := page(slices.Sorted(maps.Keys(totals)), req.Offset, api.SubjectsLimit)
			res.Paged = &p
			res.State.Subjects = make(map[string]uint64, len(names))
			for _, n := range names {
				res.State.Subjects[n] = totals[n]
			}
		}
	}
	return res, nil
}

// deletedSeqs lists the sequences behind the first message, up to last, that
// are gone, those of damaged messages among them.
func (s *Stream) deletedSeqs(last uint64) ([]uint64, error) {
	var gone []uint64
	var next uint64
	err := storage.RangeIntact(s.store, 0, func(m storage.Message) bool {
		for ; next != 0 && next < min(m.Seq, last+1); next++ {
			gone = append(gone, next)
		}
		next = m.Seq + 1
		return m.Seq < last
	})
	// The newest messages may be gone, too.
	for ; next != 0 && next <= last; next++ {
		gone = append(gone, next)
	}
	return gone, err
}

// matching returns the streams whose subjects overlap the filter (all if
// empty), by name.
func (e *Engine) matching(filter string) []*Stream {
	list := e.Streams()
	if filter == "" {
		return list
	}
	return slices.DeleteFunc(list, func(s *Stream) bool {
		return !slices.ContainsFunc(s.cfg.Load().Subjects, func(subj string) bool {
			return subject.Valid(filter) && subject.Overlaps(subj, filter)
		})
	})
}

func (r *request) streamNames() (any, error) {
	var req api.StreamNamesRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	res := &api.StreamNamesResponse{Streams: []string{}}
	var list []*Stream
	list, res.Paged = page(r.e.matching(req.Subject), req.Offset, api.NamesLimit)
	for _, s := range list {
		res.Streams = append(res.Streams, s.name)
	}
	return res, nil
}

func (r *request) streamList() (any, error) {
	var req api.StreamNamesRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	res := &api.StreamListResponse{Streams: []*api.StreamInfo{}}
	for _, d := range r.e.DownStreams() {
		if res.Offline == nil {
			res.Offline = map[string]string{}
		}
		res.Offline[d.Name] = d.Reason
	}
	var list []*Stream
	list, res.Paged = page(r.e.matching(req.Subject), req.Offset, api.ListLimit)
	for _, s := range list {
		res.Streams = append(res.Streams, s.info())
	}
	return res, nil
}

func (r *request) streamDelete() (any, error) {
	if len(r.data) > 0 {
		return nil, api.ErrNotEmptyRequest
	}
	r.e.apiMu.Lock()
	defer r.e.apiMu.Unlock()
	var group uint64
	s, err := r.stream()
	switch d := (*r.e.downNames.Load())[r.args[0]]; {
	case err == nil:
		group = uint64(s.group)
	case d != nil: // the way to be rid of one that cannot be repaired
		group = d.rec.Group
	default:
		return nil, err
	}
	rec := (&command.StreamDelete{Group: group}).AppendTo(nil)
	if _, err := r.e.propose(storage.MetaGroup, rec); err != nil {
		return nil, err
	}
	return &api.SuccessResponse{Success: true}, nil
}

func (r *request) streamPurge() (any, error) {
	var req api.StreamPurgeRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	s, err := r.stream()
	if err != nil {
		return nil, err
	}
	if req.Sequence > 0 && req.Keep > 0 || req.Subject != "" && !subject.Valid(req.Subject) {
		return nil, api.ErrBadRequest
	}
	res, err := s.propose((&command.Purge{Subject: req.Subject, Seq: req.Sequence, Keep: req.Keep}).AppendTo(nil))
	if err := firstError(res, err); err != nil {
		return nil, err
	}
	return &api.StreamPurgeResponse{Success: true, Purged: res.Removed}, nil
}
