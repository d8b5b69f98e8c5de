package api

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"
)

// DeliverPolicy says with which message a consumer begins.
type DeliverPolicy uint8

// Deliver policies; the zero value is DeliverAll.
const (
	DeliverAll             DeliverPolicy = iota // the first one stored
	DeliverLast                                 // the last one stored
	DeliverNew                                  // the first one stored after the consumer's creation
	DeliverByStartSequence                      // ConsumerConfig.OptStartSeq
	DeliverByStartTime                          // the first one stored at or after ConsumerConfig.OptStartTime
	DeliverLastPerSubject                       // the last one of each matching subject
)

// AckPolicy says what acknowledging a message means.
type AckPolicy uint8

// Acknowledgement policies; the zero value is AckNone.
const (
	AckNone        AckPolicy = iota // a message is done when it is sent
	AckAll                          // an acknowledgement covers all messages before
	AckExplicit                     // every message is acknowledged by itself
	AckFlowControl                  // like AckAll, by answers to flow control
)

// ReplayPolicy says how fast stored messages are sent.
type ReplayPolicy uint8

// Replay policies; the zero value is ReplayInstant.
const (
	ReplayInstant  ReplayPolicy = iota // as fast as possible
	ReplayOriginal                     // at the pace at which they were stored
)

// PriorityPolicy says which of the waiting pull requests are served first
// (ADR-42).
type PriorityPolicy uint8

// Priority policies; the zero value is PriorityNone.
const (
	PriorityNone         PriorityPolicy = iota // in turn
	PriorityOverflow                           // only if thresholds are exceeded
	PriorityPinnedClient                       // one client, until it goes away
	PriorityPrioritized                        // lowest number first
)

// ConsumerAction says whether a create request may create, update or both.
type ConsumerAction uint8

// Actions; the zero value allows both.
const (
	ActionCreateOrUpdate ConsumerAction = iota
	ActionUpdate
	ActionCreate
)

var (
	deliverNames  = []string{"all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"}
	ackNames      = []string{"none", "all", "explicit", "flow_control"}
	replayNames   = []string{"instant", "original"}
	priorityNames = []string{"none", "overflow", "pinned_client", "prioritized"}
	actionNames   = []string{"", "update", "create"}
)

// enumJSON returns the number of the quoted name b.
func enumJSON(names []string, b []byte) (uint8, error) {
	for i, n := range names {
		if len(b) == len(n)+2 && b[0] == '"' && string(b[1:len(b)-1]) == n {
			return uint8(i), nil
		}
	}
	return 0, fmt.Errorf("can not unmarshal %q", b)
}

// MarshalText returns the name used in JSON.
func (p DeliverPolicy) MarshalText() ([]byte, error) {
	return enumText(deliverNames, uint8(p), "deliver policy")
}

// UnmarshalJSON sets p by its name. Errors read as clients know them.
func (p *DeliverPolicy) UnmarshalJSON(b []byte) error {
	v, err := enumJSON(deliverNames, b)
	*p = DeliverPolicy(v)
	return err
}

// MarshalText returns the name used in JSON.
func (p AckPolicy) MarshalText() ([]byte, error) {
	return enumText(ackNames, uint8(p), "ack policy")
}

// UnmarshalJSON sets p by its name. Errors read as clients know them.
func (p *AckPolicy) UnmarshalJSON(b []byte) error {
	v, err := enumJSON(ackNames, b)
	*p = AckPolicy(v)
	return err
}

// MarshalText returns the name used in JSON.
func (p ReplayPolicy) MarshalText() ([]byte, error) {
	return enumText(replayNames, uint8(p), "replay policy")
}

// UnmarshalJSON sets p by its name. Errors read as clients know them.
func (p *ReplayPolicy) UnmarshalJSON(b []byte) error {
	v, err := enumJSON(replayNames, b)
	*p = ReplayPolicy(v)
	return err
}

// MarshalText returns the name used in JSON.
func (p PriorityPolicy) MarshalText() ([]byte, error) {
	return enumText(priorityNames, uint8(p), "priority policy")
}

// UnmarshalText sets p by the name used in JSON.
func (p *PriorityPolicy) UnmarshalText(b []byte) error {
	v, err := enumValue(priorityNames, b, "priority policy")
	*p = PriorityPolicy(v)
	return err
}

// MarshalText returns the name used in JSON.
func (a ConsumerAction) MarshalText() ([]byte, error) {
	return enumText(actionNames, uint8(a), "consumer action")
}

// UnmarshalText sets a by the name used in JSON.
func (a *ConsumerAction) UnmarshalText(b []byte) error {
	for i, n := range actionNames {
		if n == string(b) {
			*a = ConsumerAction(i)
			return nil
		}
	}
	return fmt.Errorf("unknown consumer action: %q", b)
}

// ConsumerConfig is what a client asks a consumer to be. A consumer with a
// DeliverSubject is a push consumer, one without a pull consumer; one with a
// Durable name outlives its clients. Durations are nanoseconds in JSON. Limits
// of 0 mean "default", -1 "none".
type ConsumerConfig struct {
	Durable         string          `json:"durable_name,omitempty"`
	Name            string          `json:"name,omitempty"`
	Description     string          `json:"description,omitempty"`
	DeliverPolicy   DeliverPolicy   `json:"deliver_policy"`
	OptStartSeq     uint64          `json:"opt_start_seq,omitempty"`
	OptStartTime    *time.Time      `json:"opt_start_time,omitempty"`
	AckPolicy       AckPolicy       `json:"ack_policy"`
	AckWait         time.Duration   `json:"ack_wait,omitempty"`    // redelivery if not acknowledged within; 30 s
	MaxDeliver      int             `json:"max_deliver,omitempty"` // attempts per message; -1
	BackOff         []time.Duration `json:"backoff,omitempty"`     // waits by attempt; overrides AckWait
	FilterSubject   string          `json:"filter_subject,omitempty"`
	FilterSubjects  []string        `json:"filter_subjects,omitempty"`
	ReplayPolicy    ReplayPolicy    `json:"replay_policy"`
	RateLimit       uint64          `json:"rate_limit_bps,omitempty"`  // bits per second
	SampleFrequency string          `json:"sample_freq,omitempty"`     // kept, without effect
	MaxWaiting      int             `json:"max_waiting,omitempty"`     // pull requests held; 512
	MaxAckPending   int             `json:"max_ack_pending,omitempty"` // messages awaiting acknowledgement; 1000
	FlowControl     bool            `json:"flow_control,omitempty"`
	HeadersOnly     bool            `json:"headers_only,omitempty"`

	MaxRequestBatch    int           `json:"max_batch,omitempty"`
	MaxRequestExpires  time.Duration `json:"max_expires,omitempty"`
	MaxRequestMaxBytes int           `json:"max_bytes,omitempty"`

	DeliverSubject string        `json:"deliver_subject,omitempty"`
	DeliverGroup   string        `json:"deliver_group,omitempty"`
	Heartbeat      time.Duration `json:"idle_heartbeat,omitempty"`

	InactiveThreshold time.Duration `json:"inactive_threshold,omitempty"` // removal if unused for; 5 s unless durable

	Replicas      int  `json:"num_replicas"`
	MemoryStorage bool `json:"mem_storage,omitempty"` // state does not survive a restart
	Direct        bool `json:"direct,omitempty"`      // used by servers among themselves
	Sourcing      bool `json:"sourcing,omitempty"`    // used by servers among themselves

	Metadata   map[string]string `json:"metadata,omitempty"`
	PauseUntil *time.Time        `json:"pause_until,omitempty"`

	PriorityGroups []string       `json:"priority_groups,omitempty"`
	PriorityPolicy PriorityPolicy `json:"priority_policy,omitempty"`
	PinnedTTL      time.Duration  `json:"priority_timeout,omitempty"`
}

// Filters returns the subjects that the consumer selects; none means all.
func (c *ConsumerConfig) Filters() []string {
	if c.FilterSubject != "" {
		return []string{c.FilterSubject}
	}
	return c.FilterSubjects
}

// Push reports whether messages are sent to a fixed subject.
func (c *ConsumerConfig) Push() bool { return c.DeliverSubject != "" }

// Clone returns a deep copy.
func (c *ConsumerConfig) Clone() *ConsumerConfig {
	d := *c
	d.BackOff = slices.Clone(c.BackOff)
	d.FilterSubjects = slices.Clone(c.FilterSubjects)
	d.Metadata = maps.Clone(c.Metadata)
	d.PriorityGroups = slices.Clone(c.PriorityGroups)
	if c.OptStartTime != nil {
		t := *c.OptStartTime
		d.OptStartTime = &t
	}
	if c.PauseUntil != nil {
		t := *c.PauseUntil
		d.PauseUntil = &t
	}
	return &d
}

// Equal reports whether two configurations mean the same: empty and absent
// lists are equal, times are compared as instants, and metadata that servers
// add ("_nats." keys) does not count.
func (c *ConsumerConfig) Equal(o *ConsumerConfig) bool {
	norm := func(c *ConsumerConfig) *ConsumerConfig {
		d := c.Clone()
		if len(d.BackOff) == 0 {
			d.BackOff = nil
		}
		if len(d.FilterSubjects) == 0 {
			d.FilterSubjects = nil
		}
		if len(d.PriorityGroups) == 0 {
			d.PriorityGroups = nil
		}
		for k := range d.Metadata {
			if strings.HasPrefix(k, "_nats.") {
				delete(d.Metadata, k)
			}
		}
		if len(d.Metadata) == 0 {
			d.Metadata = nil
		}
		for _, t := range []*time.Time{d.OptStartTime, d.PauseUntil} {
			if t != nil {
				*t = time.Unix(0, t.UnixNano()).UTC()
			}
		}
		return d
	}
	return reflect.DeepEqual(norm(c), norm(o))
}

// SequenceInfo is a position of a consumer: its own count of deliveries and
// the stream's sequence.
type SequenceInfo struct {
	Consumer uint64     `json:"consumer_seq"`
	Stream   uint64     `json:"stream_seq"`
	Last     *time.Time `json:"last_active,omitempty"`
}

// PriorityGroupState is the state of one priority group.
type PriorityGroupState struct {
	Group          string    `json:"group"`
	PinnedClientID string    `json:"pinned_client_id,omitempty"`
	PinnedTS       time.Time `json:"pinned_ts,omitzero"`
}

// ConsumerInfo describes a consumer.
type ConsumerInfo struct {
	Stream         string               `json:"stream_name"`
	Name           string               `json:"name"`
	Created        time.Time            `json:"created"`
	Config         *ConsumerConfig      `json:"config,omitempty"`
	Delivered      SequenceInfo         `json:"delivered"`
	AckFloor       SequenceInfo         `json:"ack_floor"`
	NumAckPending  int                  `json:"num_ack_pending"`
	NumRedelivered int                  `json:"num_redelivered"`
	NumWaiting     int                  `json:"num_waiting"`
	NumPending     uint64               `json:"num_pending"`
	Cluster        *ClusterInfo         `json:"cluster,omitempty"`
	PushBound      bool                 `json:"push_bound,omitempty"`
	Paused         bool                 `json:"paused,omitempty"`
	PauseRemaining time.Duration        `json:"pause_remaining,omitempty"`
	TimeStamp      time.Time            `json:"ts"`
	PriorityGroups []PriorityGroupState `json:"priority_groups,omitempty"`
}

// CreateConsumerRequest is the body of CONSUMER.CREATE.
type CreateConsumerRequest struct {
	Stream   string         `json:"stream_name"`
	Config   ConsumerConfig `json:"config"`
	Action   ConsumerAction `json:"action"`
	Pedantic bool           `json:"pedantic,omitempty"`
}

// ConsumerInfoResponse answers CONSUMER.CREATE and CONSUMER.INFO.
type ConsumerInfoResponse struct {
	Response
	*ConsumerInfo
}

// ConsumersRequest is the optional body of CONSUMER.NAMES and CONSUMER.LIST.
type ConsumersRequest struct {
	PagedRequest
}

// ConsumerNamesResponse answers CONSUMER.NAMES.
type ConsumerNamesResponse struct {
	Response
	Paged
	Consumers []string `json:"consumers"`
}

// ConsumerListResponse answers CONSUMER.LIST.
type ConsumerListResponse struct {
	Response
	Paged
	Consumers []*ConsumerInfo `json:"consumers"`
}

// ConsumerPauseRequest is the body of CONSUMER.PAUSE; a zero or past time
// resumes.
type ConsumerPauseRequest struct {
	PauseUntil time.Time `json:"pause_until,omitzero"`
}

// ConsumerPauseResponse answers CONSUMER.PAUSE.
type ConsumerPauseResponse struct {
	Response
	Paused         bool          `json:"paused"`
	PauseUntil     time.Time     `json:"pause_until"`
	PauseRemaining time.Duration `json:"pause_remaining,omitempty"`
}

// ConsumerResetRequest is the optional body of CONSUMER.RESET; sequence 0
// means "back to the acknowledgement floor".
type ConsumerResetRequest struct {
	Seq uint64 `json:"seq,omitempty"`
}

// TypeConsumerReset is the type of [ConsumerResetResponse].
const TypeConsumerReset = TypePrefix + "consumer_reset_response"

// ConsumerResetResponse answers CONSUMER.RESET.
type ConsumerResetResponse struct {
	Response
	*ConsumerInfo
	ResetSeq uint64 `json:"reset_seq"`
}

// ConsumerUnpinRequest is the body of CONSUMER.UNPIN.
type ConsumerUnpinRequest struct {
	Group string `json:"group"`
}

// PriorityGroup is the part of a pull request that priority groups look at.
type PriorityGroup struct {
	Group         string `json:"group,omitempty"`
	MinPending    int64  `json:"min_pending,omitempty"`
	MinAckPending int64  `json:"min_ack_pending,omitempty"`
	ID            string `json:"id,omitempty"`
	Priority      int    `json:"priority,omitempty"`
}

// NextRequest is the body of CONSUMER.MSG.NEXT. An empty body asks for one
// message, a bare number for so many.
type NextRequest struct {
	Expires   time.Duration `json:"expires,omitempty"`
	Batch     int           `json:"batch,omitempty"`
	MaxBytes  int           `json:"max_bytes,omitempty"`
	NoWait    bool          `json:"no_wait,omitempty"`
	Heartbeat time.Duration `json:"idle_heartbeat,omitempty"`
	PriorityGroup
}

// NakOptions is the optional body of a negative acknowledgement.
type NakOptions struct {
	Delay time.Duration `json:"delay"`
}

// Types of consumer advisories, and the subjects they are published on, to
// which ".<stream>.<consumer>" is appended.
const (
	AdvisoryMaxDeliver        = "io.nats.jetstream.advisory.v1.max_deliver"
	AdvisoryMaxDeliverSubject = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
	AdvisoryTerminated        = "io.nats.jetstream.advisory.v1.terminated"
	AdvisoryTerminatedSubject = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"
	AdvisoryNak               = "io.nats.jetstream.advisory.v1.nak"
	AdvisoryNakSubject        = "$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED"
	AdvisoryPinned            = "io.nats.jetstream.advisory.v1.consumer_group_pinned"
	AdvisoryPinnedSubject     = "$JS.EVENT.ADVISORY.CONSUMER.PINNED"
	AdvisoryUnpinned          = "io.nats.jetstream.advisory.v1.consumer_group_unpinned"
	AdvisoryUnpinnedSubject   = "$JS.EVENT.ADVISORY.CONSUMER.UNPINNED"
)

// ConsumerAdvisory is an event of a consumer for whoever watches advisories.
// Whoever publishes it adds ID and Time.
type ConsumerAdvisory struct {
	Type        string    `json:"type"`
	ID          string    `json:"id"`
	Time        time.Time `json:"timestamp"`
	Stream      string    `json:"stream"`
	Consumer    string    `json:"consumer"`
	ConsumerSeq uint64    `json:"consumer_seq,omitempty"`
	StreamSeq   uint64    `json:"stream_seq,omitempty"`
	Deliveries  uint64    `json:"deliveries,omitempty"`
	Reason      string    `json:"reason,omitempty"`
	Group       string    `json:"group,omitempty"`
	PinnedID    string    `json:"pinned_id,omitempty"`
}
