package jetstream

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/stream"
	"petiole/internal/subject"
)

// MetaIngest is the metadata key that marks, with the value "true", a stream
// that is filled by Ingest only and therefore needs no subjects.
const MetaIngest = "petiole.ingest"

const (
	defaultDuplicates = 2 * time.Minute
	minAge            = 100 * time.Millisecond
	maxReplicas       = 5
	// maxFirstSeq leaves a stream more sequences than it will ever need.
	maxFirstSeq = 1 << 63
)

// validName reports whether s may name a stream or consumer.
func validName(s string) bool {
	return s != "" && !strings.ContainsAny(s, ".*>\\/\"") && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsSpace(r) || unicode.IsControl(r)
	})
}

func invalid(format string, args ...any) *api.Error {
	return api.ErrStreamInvalidConfig.With("err", fmt.Sprintf(format, args...))
}

// normalize fills in what a client's configuration leaves open and checks it
// by itself. Texts are those that nats-server answers with.
func normalize(in *api.StreamConfig) (*api.StreamConfig, *api.Error) {
	cfg := *in
	if !validName(cfg.Name) {
		return nil, invalid("stream name is required and can not contain '.', '*', '>', '\\', '/'")
	}
	if len(cfg.Name) > api.MaxNameLen {
		return nil, invalid("stream name is too long, maximum allowed is %d", api.MaxNameLen)
	}
	if len(cfg.Description) > api.MaxDescriptionLen {
		return nil, invalid("stream description is too long, maximum allowed is %d", api.MaxDescriptionLen)
	}
	size := 0
	for k, v := range cfg.Metadata {
		size += len(k) + len(v)
	}
	if size > api.MaxMetadataLen {
		return nil, invalid("stream metadata exceeds maximum size of %d bytes", api.MaxMetadataLen)
	}
	switch {
	case cfg.Replicas < 0:
		return nil, api.ErrReplicasCountCannotBeNegative
	case cfg.Replicas > maxReplicas:
		return nil, invalid("maximum replicas is %d", maxReplicas)
	case cfg.Replicas > 1:
		return nil, api.ErrStreamReplicasNotSupported
	}
	cfg.Replicas = 1
	for _, limit := range []*int64{&cfg.MaxMsgs, &cfg.MaxMsgsPer, &cfg.MaxBytes} {
		if *limit <= 0 {
			*limit = -1
		}
	}
	if cfg.FirstSeq > maxFirstSeq {
		return nil, invalid("first sequence must not be above %d", uint64(maxFirstSeq))
	}
	if cfg.MaxMsgSize <= 0 {
		cfg.MaxMsgSize = -1
	}
	if cfg.MaxConsumers <= 0 {
		cfg.MaxConsumers = -1
	}
	if e := normalizeTimes(&cfg); e != nil {
		return nil, e
	}
	if cfg.DenyPurge && cfg.AllowRollup {
		return nil, invalid("roll-ups require the purge permission")
	}
	if cfg.DiscardNewPer {
		if cfg.Discard != api.DiscardNew {
			return nil, invalid("discard new per subject requires discard new policy to be set")
		}
		if cfg.MaxMsgsPer <= 0 {
			return nil, invalid("discard new per subject requires max msgs per subject > 0")
		}
	}
	if e := unsupported(&cfg); e != nil {
		return nil, e
	}
	if len(cfg.Subjects) == 0 && cfg.Metadata[MetaIngest] != "true" {
		cfg.Subjects = []string{cfg.Name}
	}
	if e := checkSubjects(&cfg); e != nil {
		return nil, e
	}
	if e := checkTransforms(&cfg); e != nil {
		return nil, e
	}
	return &cfg, nil
}

func normalizeTimes(cfg *api.StreamConfig) *api.Error {
	switch {
	case cfg.MaxAge < 0:
		return invalid("max age can not be negative")
	case cfg.MaxAge != 0 && cfg.MaxAge < minAge:
		return invalid("max age needs to be >= 100ms")
	}
	if cfg.Duplicates == 0 {
		cfg.Duplicates = defaultDuplicates
		if cfg.MaxAge != 0 && cfg.MaxAge < cfg.Duplicates {
			cfg.Duplicates = cfg.MaxAge
		}
	}
	switch {
	case cfg.Duplicates < 0:
		return invalid("duplicates window can not be negative")
	case cfg.MaxAge != 0 && cfg.Duplicates > cfg.MaxAge:
		return invalid("duplicates window can not be larger then max age")
	case cfg.Duplicates < minAge:
		return invalid("duplicates window needs to be >= 100ms")
	}
	if cfg.PersistMode == api.PersistAsync {
		switch {
		case cfg.Storage != api.FileStorage:
			return invalid("async persist mode is only supported on file storage")
		case cfg.AllowAtomicPublish:
			return invalid("async persist mode is not supported with atomic batch publish")
		}
	}
	switch {
	case cfg.SubjectDeleteMarkerTTL < 0:
		return invalid("subject delete marker TTL must not be negative")
	case cfg.SubjectDeleteMarkerTTL > 0 && cfg.SubjectDeleteMarkerTTL < time.Second:
		return invalid("subject delete marker TTL must be at least 1 second")
	case cfg.SubjectDeleteMarkerTTL > 0:
		cfg.AllowMsgTTL = true
		if !cfg.AllowRollup {
			cfg.AllowRollup, cfg.DenyPurge = true, false
		}
	}
	return nil
}

// unsupported refuses what this server does not do, rather than pretend.
func unsupported(cfg *api.StreamConfig) *api.Error {
	for _, f := range []struct {
		asked bool
		what  string
	}{
		{cfg.Mirror != nil, "a mirror"},
		{len(cfg.Sources) > 0, "sourcing from other streams"},
		{cfg.AllowMsgCounter, "a counter stream"},
		{cfg.AllowAtomicPublish && cfg.RePublish != nil, "atomic batch publishing with republishing"},
		{cfg.AllowBatchPublish, "batch publishing"},
		{cfg.AllowMsgSchedules, "message scheduling"},
	} {
		if f.asked {
			return api.Unsupported(f.what)
		}
	}
	return nil
}

func checkSubjects(cfg *api.StreamConfig) *api.Error {
	for i, subj := range cfg.Subjects {
		if !subject.Valid(subj) {
			return invalid("invalid subject")
		}
		for _, other := range cfg.Subjects[:i] {
			if other == subj {
				return invalid("duplicate subjects detected")
			}
			if subject.Overlaps(subj, other) {
				return invalid("subject %q overlaps with %q", other, subj)
			}
		}
		if cfg.NoAck {
			continue
		}
		if subj == ">" {
			return invalid("capturing all subjects requires no-ack to be true")
		}
		for _, space := range []string{"$JS.>", "$JSC.>", "$NRG.>"} {
			if subject.Overlaps(subj, space) && !subject.Subset(subj, "$JS.EVENT.>") {
				return invalid("subjects that overlap with jetstream api require no-ack to be true")
			}
		}
		if subject.Overlaps(subj, "$SYS.>") && !subject.Subset(subj, "$SYS.ACCOUNT.>") {
			return invalid("subjects that overlap with system api require no-ack to be true")
		}
	}
	return nil
}

// checkTransforms checks the subject transform and republishing.
func checkTransforms(cfg *api.StreamConfig) *api.Error {
	if t := cfg.SubjectTransform; t != nil {
		if t.Source != "" && !subject.Valid(t.Source) {
			return api.ErrStreamTransformInvalidSource.With("err", "invalid subject "+t.Source)
		}
		if _, err := stream.NewTransform(t.Source, t.Destination); err != nil {
			return api.ErrStreamTransformInvalidDestination.With("err", err)
		}
	}
	if cfg.RePublish == nil {
		return nil
	}
	r := *cfg.RePublish
	if r.Source == "" {
		r.Source = ">"
	}
	cfg.RePublish = &r
	t, err := stream.NewTransform(r.Source, r.Destination)
	if err != nil {
		return invalid("stream configuration for republish with transform from '%s' to '%s' not valid", r.Source, r.Destination)
	}
	for _, subj := range cfg.Subjects {
		if t.Overlaps(subj) {
			return invalid("stream configuration for republish destination forms a cycle")
		}
	}
	return nil
}

// checkUpdate checks whether a stream's configuration may change.
func checkUpdate(old, cfg *api.StreamConfig) *api.Error {
	switch {
	case cfg.Name != old.Name:
		return invalid("stream configuration name must match original")
	case cfg.Storage != old.Storage:
		return invalid("stream configuration update can not change storage type")
	case cfg.Retention != old.Retention && (old.Retention == api.WorkQueuePolicy || cfg.Retention == api.WorkQueuePolicy):
		return invalid("stream configuration update can not change retention policy to/from workqueue")
	case !cfg.Sealed && old.Sealed:
		return invalid("stream configuration update can not unseal a sealed stream")
	case !cfg.DenyDelete && old.DenyDelete:
		return invalid("stream configuration update can not cancel deny message deletes")
	case !cfg.DenyPurge && old.DenyPurge:
		return invalid("stream configuration update can not cancel deny purge")
	case old.AllowMsgTTL && !cfg.AllowMsgTTL:
		return invalid("message TTL status can not be disabled")
	case old.PersistMode != cfg.PersistMode:
		return invalid("stream configuration update can not change persist mode")
	}
	if cfg.Sealed {
		cfg.MaxAge = 0
		cfg.Discard = api.DiscardNew
		cfg.DenyDelete, cfg.DenyPurge = true, true
		cfg.AllowRollup = false
	}
	return nil
}

// sameConfig reports whether two normalized configurations mean the same.
func sameConfig(a, b *api.StreamConfig) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}
