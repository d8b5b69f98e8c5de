package consumer

import (
	"crypto/rand"
	"fmt"
	"math/big"
	"regexp"
	"strconv"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/subject"
)

// Defaults of a configuration.
const (
	DefaultAckWait       = 30 * time.Second
	DefaultMaxAckPending = 1000
	DefaultMaxWaiting    = 512
	DefaultPinnedTTL     = 2 * time.Minute
)

// Limits are bounds that the server sets beside those of the stream; 0 means
// none.
type Limits struct {
	MaxAckPending   int
	MaxRequestBatch int
}

// Other is another consumer of the stream, as far as work-queue retention is
// concerned.
type Other struct {
	Name    string
	Filters []string
}

// Defaults fills in what cfg leaves open. In pedantic mode a value that would
// have to be corrected is an error instead.
func Defaults(cfg *api.ConsumerConfig, stream *api.StreamConfig, lim Limits, pedantic bool) *api.Error {
	pedant := func(why string) *api.Error { return api.ErrPedantic.With("err", why) }
	for _, f := range []struct {
		v    *int
		min  int
		set  int
		text string
	}{
		{&cfg.MaxDeliver, -1, -1, "max_deliver must be set to -1"},
		{&cfg.MaxWaiting, 0, 0, "max_waiting must not be negative"},
		{&cfg.MaxAckPending, -1, -1, "max_ack_pending must be set to -1"},
		{&cfg.MaxRequestBatch, 0, 0, "max_batch must not be negative"},
		{&cfg.MaxRequestMaxBytes, 0, 0, "max_bytes must not be negative"},
	} {
		if *f.v < f.min {
			if pedantic {
				return pedant(f.text)
			}
			*f.v = f.set
		}
	}
	for _, f := range []struct {
		v    *time.Duration
		text string
	}{
		{&cfg.MaxRequestExpires, "max_expires must not be negative"},
		{&cfg.Heartbeat, "idle_heartbeat must not be negative"},
		{&cfg.InactiveThreshold, "inactive_threshold must not be negative"},
		{&cfg.PinnedTTL, "priority_timeout must not be negative"},
	} {
		if *f.v < 0 {
			if pedantic {
				return pedant(f.text)
			}
			*f.v = 0
		}
	}
	if cfg.MaxDeliver == 0 {
		cfg.MaxDeliver = -1
	}
	if !cfg.Push() && cfg.MaxWaiting == 0 {
		cfg.MaxWaiting = DefaultMaxWaiting
	}
	if cfg.AckWait == 0 && (cfg.AckPolicy == api.AckExplicit || cfg.AckPolicy == api.AckAll) {
		cfg.AckWait = DefaultAckWait
	}
	if len(cfg.BackOff) > 0 {
		if pedantic && cfg.AckWait != cfg.BackOff[0] {
			return pedant("first backoff value has to equal batch AckWait")
		}
		cfg.AckWait = cfg.BackOff[0]
	}
	if l := stream.ConsumerLimits; cfg.MaxAckPending == 0 {
		if pedantic && l.MaxAckPending > 0 {
			return pedant("max_ack_pending must be set if it's configured in stream limits")
		}
		cfg.MaxAckPending = l.MaxAckPending
	}
	if l := stream.ConsumerLimits; cfg.InactiveThreshold == 0 {
		if pedantic && l.InactiveThreshold > 0 {
			return pedant("inactive_threshold must be set if it's configured in stream limits")
		}
		cfg.InactiveThreshold = l.InactiveThreshold
	}
	if cfg.InactiveThreshold == 0 && cfg.Durable == "" {
		cfg.InactiveThreshold = defaultInactive
	}
	if cfg.MaxAckPending == 0 && cfg.AckPolicy != api.AckNone {
		cfg.MaxAckPending = DefaultMaxAckPending
		if lim.MaxAckPending > 0 {
			cfg.MaxAckPending = min(cfg.MaxAckPending, lim.MaxAckPending)
		}
	}
	if !cfg.Push() && cfg.MaxRequestBatch == 0 && lim.MaxRequestBatch > 0 {
		if pedantic {
			return pedant("max_request_batch must be set if it's JetStream limits are set")
		}
		cfg.MaxRequestBatch = lim.MaxRequestBatch
	}
	if cfg.PriorityPolicy == api.PriorityPinnedClient && cfg.PinnedTTL == 0 {
		cfg.PinnedTTL = DefaultPinnedTTL
	}
	if cfg.PauseUntil != nil {
		t := cfg.PauseUntil.UTC()
		cfg.PauseUntil = &t
	}
	return nil
}

func validName(s string) bool {
	return s != "" && !strings.ContainsAny(s, " \t\r\n\f.*>\\/\x00")
}

var validGroup = regexp.MustCompile(`^[a-zA-Z0-9/_=-]{1,16}$`)

// Validate checks a configuration with defaults filled in, for a consumer to be
// created or changed. others are the stream's other consumers. What this server does not
// do (replication, consumers between servers) is refused with an error that
// says so.
func Validate(cfg *api.ConsumerConfig, stream *api.StreamConfig, lim Limits, others []Other) *api.Error {
	if err := validate(cfg, stream, lim); err != nil {
		return err
	}
	if stream.Retention != api.WorkQueuePolicy {
		return nil
	}
	switch {
	case cfg.AckPolicy != api.AckExplicit:
		return api.ErrConsumerWQRequiresExplicitAck
	case cfg.DeliverPolicy != api.DeliverAll:
		return api.ErrConsumerWQConsumerNotDeliverAll
	case len(others) > 0 && len(cfg.Filters()) == 0:
		return api.ErrConsumerWQMultipleUnfiltered
	}
	return unique(cfg, others)
}

// unique checks that no other consumer of a work queue wants the same.
func unique(cfg *api.ConsumerConfig, others []Other) *api.Error {
	for _, o := range others {
		if len(o.Filters) == 0 && len(cfg.Filters()) > 0 {
			return api.ErrConsumerWQConsumerNotUnique
		}
		for _, a := range cfg.Filters() {
			for _, b := range o.Filters {
				if subject.Overlaps(a, b) {
					return api.ErrConsumerWQConsumerNotUnique
				}
			}
		}
	}
	return nil
}

func invalid(format string, args ...any) *api.Error {
	return api.ErrStreamInvalidConfig.With("err", fmt.Sprintf(format, args...))
}

func validate(cfg *api.ConsumerConfig, stream *api.StreamConfig, lim Limits) *api.Error {
	if cfg.Replicas > 1 {
		return api.ErrStreamReplicasNotSupported
	}
	if cfg.Name != "" && !validName(cfg.Name) {
		return invalid("consumer name can not contain '.', '*', '>', '\\', '/'")
	}
	if cfg.Durable != "" && !validName(cfg.Durable) {
		return invalid("consumer durable name can not contain '.', '*', '>', '\\', '/'")
	}
	for _, n := range []string{cfg.Name, cfg.Durable} {
		if len(n) > api.MaxNameLen {
			return api.ErrConsumerNameTooLong.With("max", api.MaxNameLen)
		}
	}
	switch {
	case cfg.Replicas < 0:
		return api.ErrReplicasCountCannotBeNegative
	case stream.Retention != api.LimitsPolicy && cfg.Replicas != 0 && cfg.Replicas != max(stream.Replicas, 1):
		return api.ErrConsumerReplicasShouldMatchStream
	case cfg.AckPolicy == api.AckFlowControl:
		return api.Unsupported("ack policy flow_control")
	case cfg.AckPolicy > api.AckFlowControl:
		return api.ErrConsumerAckPolicyInvalid
	case cfg.ReplayPolicy > api.ReplayOriginal:
		return api.ErrConsumerReplayPolicyInvalid
	}
	for _, b := range cfg.BackOff {
		if b < 0 {
			return api.ErrConsumerBackOffNegative
		}
	}
	if cfg.AckWait < 0 {
		return api.ErrConsumerAckWaitNegative
	}
	if n := len(cfg.BackOff); n > 0 && cfg.MaxDeliver != -1 && n > cfg.MaxDeliver {
		return api.ErrConsumerMaxDeliverBackoff
	}
	if len(cfg.Description) > api.MaxDescriptionLen {
		return api.ErrConsumerDescriptionTooLong.With("max", api.MaxDescriptionLen)
	}
	if cfg.Push() {
		if err := validatePush(cfg, stream); err != nil {
			return err
		}
	} else if err := validatePull(cfg, stream, lim); err != nil {
		return err
	}
	if l := lim.MaxAckPending; l > 0 && cfg.MaxAckPending > l {
		return api.ErrConsumerMaxPendingAckExcess.With("limit", l)
	}
	if l := stream.ConsumerLimits.MaxAckPending; l > 0 && cfg.MaxAckPending > l {
		return api.ErrConsumerMaxPendingAckExcess.With("limit", l)
	}
	if l := stream.ConsumerLimits.InactiveThreshold; l > 0 && cfg.InactiveThreshold > l {
		return api.ErrConsumerInactiveThresholdExcess.With("limit", l)
	}
	if cfg.Direct || cfg.Sourcing {
		if cfg.Direct && !cfg.Push() {
			return api.ErrConsumerDirectRequiresPush
		}
		if cfg.Direct && cfg.Durable != "" {
			return api.ErrConsumerDirectRequiresEphemeral
		}
		return api.Unsupported("a consumer for sourcing or mirroring")
	}
	if err := validateFilters(cfg); err != nil {
		return err
	}
	if err := validateStart(cfg); err != nil {
		return err
	}
	if cfg.SampleFrequency != "" {
		n, err := strconv.Atoi(strings.TrimSuffix(cfg.SampleFrequency, "%"))
		if err != nil {
			return api.ErrConsumerInvalidSampling.With("err", err)
		}
		if n < 0 {
			return api.ErrConsumerInvalidSampling.With("err", "negative")
		}
	}
	if cfg.FlowControl && cfg.Heartbeat == 0 {
		return api.ErrConsumerWithFlowControlNeedsHeartbeats
	}
	if cfg.Durable != "" && cfg.Name != "" && cfg.Name != cfg.Durable {
		return api.ErrConsumerCreateDurableAndNameMismatch
	}
	n := 0
	for k, v := range cfg.Metadata {
		n += len(k) + len(v)
	}
	if n > api.MaxMetadataLen {
		return api.ErrConsumerMetadataLength.With("limit", fmt.Sprintf("%dKB", api.MaxMetadataLen/1024))
	}
	return validatePriority(cfg)
}

func validatePush(cfg *api.ConsumerConfig, stream *api.StreamConfig) *api.Error {
	if subject.HasWildcard(cfg.DeliverSubject) {
		return api.ErrConsumerDeliverToWildcards
	}
	if !subject.Valid(cfg.DeliverSubject) {
		return api.ErrConsumerInvalidDeliverSubject
	}
	for _, s := range stream.Subjects {
		if subject.Matches(s, cfg.DeliverSubject) {
			return api.ErrConsumerDeliverCycle
		}
	}
	switch {
	case cfg.MaxWaiting != 0:
		return api.ErrConsumerPushMaxWaiting
	case cfg.MaxAckPending > 0 && cfg.AckPolicy == api.AckNone:
		return api.ErrConsumerMaxPendingAckPolicyRequired
	case cfg.Heartbeat > 0 && cfg.Heartbeat < 100*time.Millisecond:
		return api.ErrConsumerSmallHeartbeat
	}
	return nil
}

func validatePull(cfg *api.ConsumerConfig, stream *api.StreamConfig, lim Limits) *api.Error {
	switch {
	case cfg.AckPolicy == api.AckNone && stream.Retention == api.WorkQueuePolicy:
		return api.ErrConsumerPullRequiresAck
	case cfg.RateLimit > 0:
		return api.ErrConsumerPullWithRateLimit
	case cfg.MaxWaiting < 0:
		return api.ErrConsumerMaxWaitingNegative
	case cfg.Heartbeat > 0:
		return api.ErrConsumerHBRequiresPush
	case cfg.FlowControl:
		return api.ErrConsumerFCRequiresPush
	case cfg.MaxRequestBatch < 0:
		return api.ErrConsumerMaxRequestBatchNegative
	case cfg.MaxRequestExpires != 0 && cfg.MaxRequestExpires < time.Millisecond:
		return api.ErrConsumerMaxRequestExpiresTooSmall
	case lim.MaxRequestBatch > 0 && cfg.MaxRequestBatch > lim.MaxRequestBatch:
		return api.ErrConsumerMaxRequestBatchExceeded.With("limit", lim.MaxRequestBatch)
	}
	return nil
}

func validateFilters(cfg *api.ConsumerConfig) *api.Error {
	if cfg.FilterSubject != "" && len(cfg.FilterSubjects) > 0 {
		return api.ErrConsumerDuplicateFilterSubjects
	}
	for _, f := range cfg.FilterSubjects {
		if f == "" {
			return api.ErrConsumerEmptyFilter
		}
	}
	fs := cfg.Filters()
	for _, f := range fs {
		if !subject.Valid(f) {
			return invalid("invalid subject")
		}
	}
	for i, f := range fs {
		for j, g := range fs {
			if i != j && subject.Subset(f, g) {
				return api.ErrConsumerOverlappingSubjectFilters
			}
		}
	}
	return nil
}

func validateStart(cfg *api.ConsumerConfig) *api.Error {
	bad := func(policy, start string) *api.Error {
		return api.ErrConsumerInvalidPolicy.With("err",
			fmt.Sprintf("consumer delivery policy is deliver %s, but optional start %s is also set", policy, start))
	}
	missing := func(policy, what string) *api.Error {
		return api.ErrConsumerInvalidPolicy.With("err",
			fmt.Sprintf("consumer delivery policy is deliver %s, but optional %s is not set", policy, what))
	}
	switch p := cfg.DeliverPolicy; p {
	case api.DeliverByStartSequence:
		if cfg.OptStartSeq == 0 {
			return missing("by start sequence", "start sequence")
		}
		if cfg.OptStartTime != nil {
			return bad("by start sequence", "time")
		}
	case api.DeliverByStartTime:
		if cfg.OptStartTime == nil {
			return missing("by start time", "start time")
		}
		if cfg.OptStartSeq != 0 {
			return bad("by start time", "start sequence")
		}
	default:
		name := map[api.DeliverPolicy]string{
			api.DeliverAll: "all", api.DeliverLast: "last", api.DeliverNew: "new",
			api.DeliverLastPerSubject: "last per subject",
		}[p]
		if cfg.OptStartSeq > 0 {
			return bad(name, "sequence")
		}
		if cfg.OptStartTime != nil {
			return bad(name, "time")
		}
		if p == api.DeliverLastPerSubject && len(cfg.Filters()) == 0 {
			return missing("last per subject", "filter subject")
		}
	}
	return nil
}

func validatePriority(cfg *api.ConsumerConfig) *api.Error {
	if cfg.PriorityPolicy == api.PriorityNone {
		if len(cfg.PriorityGroups) > 0 {
			return api.ErrConsumerPriorityGroupWithPolicyNone
		}
		if cfg.PinnedTTL > 0 {
			return api.ErrConsumerPinnedTTLWithoutPriorityPolicyNone
		}
		return nil
	}
	if cfg.Push() {
		return api.ErrConsumerPushWithPriorityGroup
	}
	if len(cfg.PriorityGroups) == 0 {
		return api.ErrConsumerPriorityPolicyWithoutGroup
	}
	for _, g := range cfg.PriorityGroups {
		if g == "" {
			return api.ErrConsumerEmptyGroupName
		}
		if !validGroup.MatchString(g) {
			return api.ErrConsumerInvalidGroupName
		}
	}
	return nil
}

// ValidateUpdate checks whether a consumer's configuration may change from old
// to cfg, both with defaults filled in; cfg has to be valid by itself
// ([Validate]). interest says whether anyone listens to old's deliver
// subject.
func ValidateUpdate(old, cfg *api.ConsumerConfig, interest bool) *api.Error {
	if old.Equal(cfg) {
		return nil
	}
	refuse := func(what string) *api.Error {
		return api.ErrConsumerCreate.With("err", what+" can not be updated")
	}
	sameTime := func(a, b *time.Time) bool {
		if a == nil || b == nil {
			return a == b
		}
		return a.Equal(*b)
	}
	switch {
	case old.DeliverPolicy != cfg.DeliverPolicy:
		return refuse("deliver policy")
	case old.MemoryStorage != cfg.MemoryStorage:
		return refuse("storage type")
	case old.Direct != cfg.Direct:
		return refuse("direct")
	case old.Sourcing != cfg.Sourcing:
		return refuse("sourcing")
	case old.OptStartSeq != cfg.OptStartSeq:
		return refuse("start sequence")
	case !sameTime(old.OptStartTime, cfg.OptStartTime):
		return refuse("start time")
	case old.AckPolicy != cfg.AckPolicy:
		return refuse("ack policy")
	case old.ReplayPolicy != cfg.ReplayPolicy:
		return refuse("replay policy")
	case old.Heartbeat != cfg.Heartbeat:
		return refuse("heart beats")
	case old.FlowControl != cfg.FlowControl:
		return refuse("flow control")
	}
	if old.DeliverSubject != cfg.DeliverSubject {
		switch {
		case old.DeliverSubject == "":
			return api.ErrConsumerCreate.With("err", "can not update pull consumer to push based")
		case cfg.DeliverSubject == "":
			return api.ErrConsumerCreate.With("err", "can not update push consumer to pull based")
		case interest:
			return api.ErrConsumerNameExist
		}
	}
	if old.MaxWaiting != cfg.MaxWaiting {
		return refuse("max waiting")
	}
	return nil
}

const nameDigits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// NewName returns a name for a consumer whose creator left it open: 12 random
// letters and digits.
func NewName() string {
	var b [12]byte
	for i := range b {
		n, err := rand.Int(rand.Reader, big.NewInt(int64(len(nameDigits))))
		if err != nil {
			panic(fmt.Sprintf("reading random numbers: %v", err)) // never returned by crypto/rand
		}
		b[i] = nameDigits[n.Int64()]
	}
	return string(b[:])
}
