package jetstream

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/consumer"
	"petiole/internal/wire"
)

// consumer returns the stream and the consumer that the arguments name.
func (r *request) consumer() (*Stream, *consumerEntry, error) {
	s, err := r.stream()
	if err != nil {
		return nil, nil, err
	}
	c := s.consumer(r.args[1])
	if c == nil {
		return nil, nil, api.ErrConsumerNotFound
	}
	return s, c, nil
}

// next serves $JS.API.CONSUMER.MSG.NEXT.<stream>.<consumer>. Without such a
// consumer it answers as if nobody listened, which is what clients expect.
func (r *request) next(rest string) {
	streamName, name, _ := strings.Cut(rest, ".")
	s, ok := r.e.Stream(streamName)
	var c *consumerEntry
	if ok {
		c = s.consumer(name)
	}
	if c == nil {
		r.send(wire.AppendStatus(nil, 503, ""), nil)
		return
	}
	if len(r.reply) == 0 {
		return
	}
	s.withConsumer(c, func(now time.Time) { c.m.Next(now, string(r.reply), r.data) })
}

// consumerCreate serves CONSUMER.CREATE.<stream>[.<consumer>[.<filter>]].
func (r *request) consumerCreate() (any, error) {
	req, err := r.consumerRequest(r.args[0])
	if err != nil {
		return nil, err
	}
	cfg := &req.Config
	if len(r.args) == 1 {
		if cfg.Durable != "" {
			return nil, api.ErrConsumerEphemeralWithDurableName
		}
		return r.createConsumer(req)
	}
	name := r.args[1]
	if strings.ContainsAny(name, `\/`) {
		return nil, api.ErrConsumerNameContainsPathSeparators
	}
	if cfg.Durable != "" && cfg.Durable != name {
		return nil, api.ErrConsumerDurableNameNotMatchSubject
	}
	cfg.Name = name
	if len(r.args) > 2 {
		filter := strings.Join(r.args[2:], ".")
		if len(cfg.FilterSubjects) > 0 {
			return nil, api.ErrConsumerMultipleFiltersNotAllowed
		}
		if cfg.FilterSubject != filter {
			return nil, api.ErrConsumerCreateFilterSubjectMismatch
		}
	}
	return r.createConsumer(req)
}

// consumerCreateDurable serves CONSUMER.DURABLE.CREATE.<stream>.<consumer>.
func (r *request) consumerCreateDurable() (any, error) {
	req, err := r.consumerRequest(r.args[0])
	if err != nil {
		return nil, err
	}
	name, cfg := r.args[1], &req.Config
	switch {
	case strings.ContainsAny(name, `\/`):
		return nil, api.ErrConsumerNameContainsPathSeparators
	case cfg.Durable == "":
		return nil, api.ErrConsumerDurableNameNotSet
	case cfg.Durable != name:
		return nil, api.ErrConsumerDurableNameNotMatchSubject
	}
	cfg.Name = name
	return r.createConsumer(req)
}

func (r *request) consumerRequest(streamName string) (*api.CreateConsumerRequest, error) {
	var req api.CreateConsumerRequest
	if len(r.data) == 0 {
		return nil, api.ErrInvalidJSON.With("err", "unexpected end of JSON input")
	}
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	if req.Stream != streamName {
		return nil, api.ErrStreamMismatch
	}
	return &req, nil
}

func (r *request) createConsumer(req *api.CreateConsumerRequest) (any, error) {
	s, err := r.stream()
	if err != nil {
		return nil, err
	}
	s.apiMu.Lock()
	defer s.apiMu.Unlock()
	cfg, streamCfg := &req.Config, s.Config()
	if cfg.Durable != "" && cfg.Name != "" && cfg.Durable != cfg.Name {
		return nil, api.ErrConsumerCreateDurableAndNameMismatch
	}
	name := cfg.Name
	if name == "" {
		name = cfg.Durable
	}
	switch {
	case name == "":
		name = consumer.NewName()
	case len(name) > api.MaxNameLen:
		return nil, api.ErrConsumerNameTooLong.With("max", api.MaxNameLen)
	case !validName(name):
		return nil, api.ErrConsumerBadDurableName
	}
	cfg.Name = name
	if refused := consumer.Defaults(cfg, &streamCfg, consumer.Limits{}, req.Pedantic); refused != nil {
		return nil, refused
	}
	s.mu.Lock()
	have := s.consumers[name]
	var others []consumer.Other
	for n, c := range s.consumers {
		if n != name {
			others = append(others, consumer.Other{Name: n, Filters: c.m.Config().Filters()})
		}
	}
	var old *api.ConsumerConfig
	created := time.Now().UTC()
	if have != nil {
		old, created = have.m.Config(), have.m.Created()
		cfg.PauseUntil = old.PauseUntil // CONSUMER.PAUSE alone changes it
	}
	s.mu.Unlock()
	switch {
	case have == nil && req.Action == api.ActionUpdate:
		return nil, api.ErrConsumerDoesNotExist
	case have != nil && old.Equal(cfg):
		return r.consumerDoc(s, name)
	case have != nil && req.Action == api.ActionCreate:
		return nil, api.ErrConsumerAlreadyExists
	case have == nil && streamCfg.MaxConsumers > 0 && len(others) >= streamCfg.MaxConsumers:
		return nil, api.ErrMaximumConsumersLimit
	}
	if refused := consumer.Validate(cfg, &streamCfg, consumer.Limits{}, others); refused != nil {
		return nil, refused
	}
	if have != nil {
		interest := old.DeliverSubject != "" && r.e.account.HasInterest(old.DeliverSubject)
		if refused := consumer.ValidateUpdate(old, cfg, interest); refused != nil {
			return nil, refused
		}
	}
	if err := r.putConsumer(s, name, cfg, created); err != nil {
		return nil, err
	}
	return r.consumerDoc(s, name)
}

// putConsumer has a consumer created or changed, through the log if its state
// is kept there.
func (r *request) putConsumer(s *Stream, name string, cfg *api.ConsumerConfig, created time.Time) error {
	b, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	cmd := command.ConsumerCreate{Name: name, Created: created.UnixNano(), Config: b}
	s.mu.Lock()
	have := s.consumers[name]
	logged := have != nil && have.m.Durable() || consumer.Logged(cfg, s.m.Config())
	s.mu.Unlock()
	return firstError(s.changeConsumer(cmd.Append(nil), logged))
}

// consumerDoc is the answer to a request that made or looked for a consumer.
func (r *request) consumerDoc(s *Stream, name string) (any, error) {
	info := s.consumerInfo(name)
	if info == nil {
		return nil, api.ErrConsumerNotFound
	}
	return &api.ConsumerInfoResponse{ConsumerInfo: info}, nil
}

func (s *Stream) consumerInfo(name string) *api.ConsumerInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.consumers[name]
	if c == nil {
		return nil
	}
	return c.m.Info(s.e.moment())
}

// ConsumerInfos describes the stream's consumers, by name.
func (s *Stream) ConsumerInfos() []*api.ConsumerInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.e.moment()
	list := make([]*api.ConsumerInfo, 0, len(s.consumers))
	for _, name := range slices.Sorted(maps.Keys(s.consumers)) {
		list = append(list, s.consumers[name].m.Info(now))
	}
	return list
}

func (r *request) consumerInfo() (any, error) {
	s, _, err := r.consumer()
	if err != nil {
		return nil, err
	}
	return r.consumerDoc(s, r.args[1])
}

func (r *request) consumerNames() (any, error) {
	var req api.ConsumersRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	s, err := r.stream()
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	names := slices.Sorted(maps.Keys(s.consumers))
	s.mu.Unlock()
	res := &api.ConsumerNamesResponse{}
	res.Consumers, res.Paged = page(names, req.Offset, api.NamesLimit)
	if res.Consumers == nil {
		res.Consumers = []string{}
	}
	return res, nil
}

func (r *request) consumerList() (any, error) {
	var req api.ConsumersRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	s, err := r.stream()
	if err != nil {
		return nil, err
	}
	res := &api.ConsumerListResponse{}
	res.Consumers, res.Paged = page(s.ConsumerInfos(), req.Offset, api.ListLimit)
	return res, nil
}

func (r *request) consumerDelete() (any, error) {
	if len(r.data) > 0 {
		return nil, api.ErrNotEmptyRequest
	}
	s, _, err := r.consumer()
	if err != nil {
		return nil, err
	}
	s.apiMu.Lock()
	defer s.apiMu.Unlock()
	if err := r.e.removeConsumer(s, r.args[1], time.Time{}); err != nil {
		return nil, err
	}
	s.awaitSweep()
	return &api.SuccessResponse{Success: true}, nil
}

func (r *request) consumerPause() (any, error) {
	var req api.ConsumerPauseRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	s, c, err := r.consumer()
	if err != nil {
		return nil, err
	}
	s.apiMu.Lock()
	defer s.apiMu.Unlock()
	s.mu.Lock()
	cfg, created := c.m.Config().Clone(), c.m.Created()
	s.mu.Unlock()
	cfg.PauseUntil = nil
	if !req.PauseUntil.IsZero() {
		cfg.PauseUntil = &req.PauseUntil
	}
	if err := r.putConsumer(s, r.args[1], cfg, created); err != nil {
		return nil, err
	}
	res := &api.ConsumerPauseResponse{PauseUntil: req.PauseUntil}
	if left := time.Until(req.PauseUntil); left > 0 {
		res.Paused, res.PauseRemaining = true, left
	}
	return res, nil
}

func (r *request) consumerUnpin() (any, error) {
	var req api.ConsumerUnpinRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	s, c, err := r.consumer()
	if err != nil {
		return nil, err
	}
	var refused *api.Error
	s.withConsumer(c, func(now time.Time) { refused = c.m.Unpin(now, req.Group) })
	if refused != nil {
		return nil, refused
	}
	return &api.SuccessResponse{}, nil
}

func (r *request) consumerReset() (any, error) {
	var req api.ConsumerResetRequest
	if err := r.decode(&req); err != nil {
		return nil, err
	}
	s, c, err := r.consumer()
	if err != nil {
		return nil, err
	}
	s.apiMu.Lock()
	defer s.apiMu.Unlock()
	s.mu.Lock()
	rec, seq, refused := c.m.Reset(req.Seq)
	s.mu.Unlock()
	if refused != nil {
		return nil, refused
	}
	if err := firstError(s.changeConsumer(rec, c.m.Durable())); err != nil {
		return nil, err
	}
	s.withConsumer(c, func(time.Time) {})
	info := s.consumerInfo(r.args[1])
	if info == nil {
		return nil, api.ErrConsumerNotFound
	}
	return &api.ConsumerResetResponse{ConsumerInfo: info, ResetSeq: seq}, nil
}
