package jetstream

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/subject"
	"petiole/internal/wire"
	"petiole/storage"
)

// APILevel is the JetStream API level that requests may require: that of the
// nats-server version whose fields are all known here, if only to be refused.
const APILevel = 5

// maxInflight bounds the requests served at a time that wait for the log.
const maxInflight = 256

const headerAPILevel = "Nats-Required-Api-Level"

// request is one request of the API.
type request struct {
	e      *Engine
	op     string   // "STREAM.CREATE"
	args   []string // tokens after the operation
	rest   string   // the same as one string
	reply  []byte
	header []byte
	data   []byte
	msg    *broker.Msg // nil if the request is served later than it came
}

// operation is how a request is served.
type operation struct {
	typ    string // type of the response
	args   int    // tokens after the operation; -1: any number
	inline bool   // served on the read loop: short, does not wait for the log
	serve  func(*request) (any, error)
}

// Names of operations, longest first where one begins another.
var operations = map[string]operation{
	"INFO":               {api.TypeAccountInfo, 0, true, (*request).accountInfo},
	"STREAM.CREATE":      {api.TypeStreamCreate, 1, false, (*request).streamCreate},
	"STREAM.UPDATE":      {api.TypeStreamUpdate, 1, false, (*request).streamUpdate},
	"STREAM.INFO":        {api.TypeStreamInfo, 1, true, (*request).streamInfo},
	"STREAM.NAMES":       {api.TypeStreamNames, 0, true, (*request).streamNames},
	"STREAM.LIST":        {api.TypeStreamList, 0, true, (*request).streamList},
	"STREAM.DELETE":      {api.TypeStreamDelete, 1, false, (*request).streamDelete},
	"STREAM.PURGE":       {api.TypeStreamPurge, 1, false, (*request).streamPurge},
	"STREAM.MSG.GET":     {api.TypeMsgGet, 1, true, (*request).msgGet},
	"STREAM.MSG.DELETE":  {api.TypeMsgDelete, 1, false, (*request).msgDelete},
	"STREAM.SNAPSHOT":    {api.TypeStreamSnapshot, 1, true, unsupportedOp("stream snapshot")},
	"STREAM.RESTORE":     {api.TypeStreamRestore, 1, true, unsupportedOp("stream restore")},
	"STREAM.PEER.REMOVE": {api.TypeStreamPeerRemove, 1, true, clusterOp},
	"STREAM.LEADER.STEPDOWN": {
		api.TypePrefix + "stream_leader_stepdown_response", 1, true, clusterOp,
	},
	"CONSUMER.LEADER.STEPDOWN": {
		api.TypePrefix + "consumer_leader_stepdown_response", 2, true, clusterOp,
	},
	"META.LEADER.STEPDOWN": {
		api.TypePrefix + "meta_leader_stepdown_response", 0, true, clusterOp,
	},
	"SERVER.REMOVE": {
		api.TypePrefix + "meta_server_remove_response", 0, true, clusterOp,
	},
	"CONSUMER.CREATE":         {api.TypeConsumerCreate, -1, false, (*request).consumerCreate},
	"CONSUMER.DURABLE.CREATE": {api.TypeConsumerCreate, 2, false, (*request).consumerCreateDurable},
	"CONSUMER.INFO":           {api.TypeConsumerInfo, 2, true, (*request).consumerInfo},
	"CONSUMER.NAMES":          {api.TypeConsumerNames, 1, true, (*request).consumerNames},
	"CONSUMER.LIST":           {api.TypeConsumerList, 1, true, (*request).consumerList},
	"CONSUMER.DELETE":         {api.TypeConsumerDelete, 2, false, (*request).consumerDelete},
	"CONSUMER.PAUSE":          {api.TypeConsumerPause, 2, false, (*request).consumerPause},
	"CONSUMER.UNPIN":          {api.TypeConsumerUnpin, 2, true, (*request).consumerUnpin},
	"CONSUMER.RESET":          {api.TypeConsumerReset, 2, false, (*request).consumerReset},
}

const (
	apiPrefix    = "$JS.API."
	nextPrefix   = "$JS.API.CONSUMER.MSG.NEXT."
	directPrefix = "$JS.API.DIRECT.GET."
)

func unsupportedOp(what string) func(*request) (any, error) {
	return func(*request) (any, error) { return nil, api.Unsupported(what) }
}

func clusterOp(*request) (any, error) { return nil, api.ErrClusterRequired }

// onAPI takes every message on $JS.API.>.
func (e *Engine) onAPI(m *broker.Msg) {
	if m.Client == nil {
		c := cloneMsg(m)
		e.async.add(msgSize(m), func() { e.serveAPI(c, nil) })
		return
	}
	e.serveAPI(m, m)
}

// serveAPI serves a request; msg is m while it may be responded to on the read
// loop, otherwise nil.
func (e *Engine) serveAPI(m, msg *broker.Msg) {
	name := string(m.Subject)
	r := &request{e: e, reply: m.Reply, header: m.Header, data: m.Data, msg: msg}
	switch {
	case strings.HasPrefix(name, nextPrefix):
		e.apiTotal.Add(1)
		r.next(name[len(nextPrefix):])
		return
	case strings.HasPrefix(name, directPrefix):
		e.apiTotal.Add(1)
		r.directGet(name[len(directPrefix):])
		return
	}
	op, ok := r.resolve(name[len(apiPrefix):])
	e.apiTotal.Add(1)
	e.apiInflight.Add(1)
	if !ok {
		defer e.apiInflight.Add(-1)
		r.respond(api.TypeSystem, nil, api.Unsupported("request "+strconv.Quote(name)))
		return
	}
	if op.inline {
		defer e.apiInflight.Add(-1)
		res, err := op.serve(r)
		r.respond(op.typ, res, err)
		return
	}
	c := cloneMsg(m)
	r.reply, r.header, r.data, r.msg = c.Reply, c.Header, c.Data, nil
	// A client that asks for more at a time waits on its read loop.
	e.apiSlots <- struct{}{}
	go func() {
		defer func() { <-e.apiSlots }()
		defer e.apiInflight.Add(-1)
		res, err := op.serve(r)
		r.respond(op.typ, res, err)
	}()
}

// resolve finds the operation that a subject names.
func (r *request) resolve(name string) (operation, bool) {
	tokens := strings.Split(name, ".")
	for n := min(3, len(tokens)); n > 0; n-- {
		op, ok := operations[strings.Join(tokens[:n], ".")]
		if !ok {
			continue
		}
		r.op = strings.Join(tokens[:n], ".")
		r.args = tokens[n:]
		r.rest = strings.Join(r.args, ".")
		if op.args >= 0 && len(r.args) != op.args || op.args < 0 && len(r.args) == 0 {
			op.serve = func(*request) (any, error) { return nil, api.ErrBadRequest }
			op.inline = true
		} else if level, ok := wire.HeaderValue(r.header, headerAPILevel); ok {
			if v, err := strconv.Atoi(string(level)); err != nil || v > APILevel {
				op.serve = func(*request) (any, error) { return nil, api.ErrRequiredApiLevel }
				op.inline = true
			}
		}
		return op, true
	}
	return operation{}, false
}

// responder is a document that begins with an api.Response.
type responder interface{ Head() *api.Response }

// respond sends the document, or the error.
func (r *request) respond(typ string, doc any, err error) {
	var b []byte
	if err == nil {
		if h, ok := doc.(responder); ok {
			h.Head().Type = typ
		}
		b, err = json.Marshal(doc)
	}
	if err != nil {
		r.e.apiErrors.Add(1)
		var apiErr *api.Error
		if !errors.As(err, &apiErr) {
			r.e.log.Error("a JetStream API request failed", "operation", r.op, "err", err)
			apiErr = api.ErrStreamGeneral.With("err", err)
		}
		b, _ = json.Marshal(&api.Response{Type: typ, Error: apiErr}) // strings and numbers
	}
	r.send(nil, b)
}

// send answers the request.
func (r *request) send(header, data []byte) {
	switch {
	case len(r.reply) == 0:
	case r.msg != nil:
		r.msg.Respond(header, data)
	default:
		r.e.account.PublishBytes(r.reply, nil, header, data)
	}
}

// decode reads the body into v; an empty body leaves it as it is.
func (r *request) decode(v any) error {
	if len(r.data) == 0 {
		return nil
	}
	if err := json.Unmarshal(r.data, v); err != nil {
		return api.ErrInvalidJSON.With("err", err)
	}
	return nil
}

// stream returns the stream that the first argument names.
func (r *request) stream() (*Stream, error) {
	s, ok := r.e.Stream(r.args[0])
	if !ok {
		if down := r.e.offline(r.args[0]); down != nil {
			return nil, down
		}
		return nil, api.ErrStreamNotFound
	}
	return s, nil
}

// page cuts a page out of a list.
func page[T any](list []T, offset, limit int) ([]T, api.Paged) {
	offset = min(max(offset, 0), len(list))
	p := api.Paged{Total: len(list), Offset: offset, Limit: limit}
	return list[offset:min(offset+limit, len(list))], p
}

func (r *request) accountInfo() (any, error) {
	e := r.e
	info := &api.AccountInfo{API: api.APIStats{
		Level: APILevel, Total: e.apiTotal.Load(), Errors: e.apiErrors.Load(),
		Inflight: uint64(max(e.apiInflight.Load(), 0)),
	}}
	info.Memory, info.Store = uint64(max(e.memUsed.Load(), 0)), uint64(max(e.storeUsed.Load(), 0))
	for _, s := range *e.streams.Load() {
		info.Streams++
		info.Consumers += s.NumConsumers()
		if cfg := s.cfg.Load(); cfg.MaxBytes > 0 {
			if s.memory {
				info.ReservedMemory += uint64(cfg.MaxBytes)
			} else {
				info.ReservedStore += uint64(cfg.MaxBytes)
			}
		}
	}
	unlimited := func(v int64) int64 {
		if v <= 0 {
			return -1
		}
		return v
	}
	info.Limits = api.AccountLimits{
		MaxMemory: unlimited(e.maxMemory.Load()), MaxStore: unlimited(e.maxStore.Load()),
		MaxStreams: -1, MaxConsumers: -1, MaxAckPending: -1,
		MemoryMaxStreamBytes: -1, StoreMaxStreamBytes: -1,
	}
	return info, nil
}

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

func timeOf(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
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

// EnsureStream returns the stream of cfg's name, created by cfg if it does not
// exist. An existing one is returned as it is.
func (e *Engine) EnsureStream(cfg api.StreamConfig) (*Stream, error) {
	if s, ok := e.Stream(cfg.Name); ok {
		return s, nil
	}
	s, _, err := e.createStream(&cfg)
	if errors.Is(err, api.ErrStreamNameExist) {
		if s, ok := e.Stream(cfg.Name); ok {
			return s, nil
		}
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// createStream creates a stream, or returns the one that exists with the same
// configuration.
func (e *Engine) createStream(in *api.StreamConfig) (s *Stream, created bool, err error) {
	cfg, refused := normalize(in)
	if refused != nil {
		return nil, false, refused
	}
	e.apiMu.Lock()
	defer e.apiMu.Unlock()
	if e.closing.Load() {
		return nil, false, ErrClosed
	}
	if s, ok := e.Stream(cfg.Name); ok {
		if have := s.Config(); !sameConfig(&have, cfg) {
			return nil, false, api.ErrStreamNameExist
		}
		return s, false, nil
	}
	if down := e.offline(cfg.Name); down != nil {
		return nil, false, down
	}
	if cfg.Sealed {
		return nil, false, invalid("stream configuration for create can not be sealed")
	}
	if err := e.checkOverlap(cfg); err != nil {
		return nil, false, err
	}
	if err := e.checkReserve(cfg, nil); err != nil {
		return nil, false, err
	}
	b, err := json.Marshal(cfg)
	if err != nil {
		return nil, false, err
	}
	e.mu.Lock()
	group := storage.GroupID(e.nextGroup)
	e.nextGroup++
	e.mu.Unlock()
	store := e.newStore(group, cfg.Storage, true)
	if f, ok := store.(*fileStore); ok { // creates the file: not where records of all streams are applied
		if _, err := f.acquire(); noSpace(err) {
			e.discard(group, store)
			return nil, false, api.ErrInsufficientResources
		} else if err != nil {
			if errors.Is(err, storage.ErrFailed) {
				e.fail(err)
			}
			return nil, false, api.ErrStreamCreate.With("err", err)
		}
		f.release()
	}
	e.mu.Lock()
	e.prepared[group] = store
	e.mu.Unlock()
	cmd := command.StreamCreate{
		Group: uint64(group), UID: [16]byte(newUID()), Created: time.Now().UnixNano(),
		Name: cfg.Name, Config: b,
	}
	res, err := e.propose(storage.MetaGroup, cmd.AppendTo(nil))
	if err != nil {
		// The log has failed or is closed: the next start decides whether the
		// stream has come to be, and removes the directory if not.
		e.mu.Lock()
		store = e.prepared[group]
		delete(e.prepared, group)
		e.mu.Unlock()
		switch {
		case store == nil:
		case errors.Is(err, api.ErrInsufficientResources): // it has not come to be, and room is wanted
			e.discard(group, store)
		default: // nobody else is going to
			err = errors.Join(err, store.Close())
		}
		return nil, false, err
	}
	if res.err != nil {
		return nil, false, res.err
	}
	return res.stream, true, nil
}

// discard removes what was made for a stream that has not come to be.
func (e *Engine) discard(g storage.GroupID, store storage.Store) {
	if err := store.Destroy(); errors.Is(err, storage.ErrFailed) {
		e.fail(err)
	} else if err != nil {
		e.log.Warn("the directory of a stream that could not be created remains until the next start", "group", g, "err", err)
	}
}

// checkOverlap refuses subjects that another stream has.
func (e *Engine) checkOverlap(cfg *api.StreamConfig) error {
	has := map[string][]string{}
	for name, s := range *e.streams.Load() {
		has[name] = s.cfg.Load().Subjects
	}
	for name, d := range *e.downNames.Load() {
		has[name] = d.rec.Config.Subjects
	}
	delete(has, cfg.Name)
	for _, subjects := range has {
		for _, a := range subjects {
			for _, b := range cfg.Subjects {
				if subject.Overlaps(a, b) {
					return api.ErrStreamSubjectOverlap
				}
			}
		}
	}
	return nil
}

// SetLimits changes Options.MaxMemory and MaxStore. What is stored already
// stays, even if it is more.
func (e *Engine) SetLimits(memory, store int64) {
	e.maxMemory.Store(memory)
	e.maxStore.Store(store)
}

// checkReserve refuses a stream that asks for more than the server may hold.
func (e *Engine) checkReserve(cfg *api.StreamConfig, old *Stream) error {
	memory := cfg.Storage == api.MemoryStorage
	limit := e.maxStore.Load()
	if memory {
		limit = e.maxMemory.Load()
	}
	if limit <= 0 || cfg.MaxBytes <= 0 {
		return nil
	}
	sum := cfg.MaxBytes
	for _, s := range *e.streams.Load() {
		if c := s.cfg.Load(); s != old && s.memory == memory && c.MaxBytes > 0 {
			sum += c.MaxBytes
		}
	}
	switch {
	case sum <= limit:
		return nil
	case memory:
		return api.ErrMemoryResourcesExceeded
	}
	return api.ErrStorageResourcesExceeded
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

// firstError returns what kept a command from being carried out.
func firstError(res callResult, err error) error {
	switch {
	case err != nil:
		return err
	case res.err != nil:
		return res.err
	case res.Refused != nil:
		return res.Refused
	}
	return nil
}

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
