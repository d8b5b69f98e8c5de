package jetstream

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
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
	serve := func(serve func(*request) (any, error)) {
		defer func() { <-e.apiSlots }()
		defer e.apiInflight.Add(-1)
		res, err := serve(r)
		r.respond(op.typ, res, err)
	}
	// The engine's files are not closed, nor its directory given to another process,
	// while a request works on them.
	if !e.spawn(func() { serve(op.serve) }) {
		serve(func(*request) (any, error) { return nil, ErrClosed })
	}
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
			why := err.Error()
			if errors.Is(err, storage.ErrCorrupt) {
				why = mendingText
			}
			apiErr = api.ErrStreamGeneral.With("err", why)
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

func timeOf(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
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
