package consumer

import "petiole/internal/jetstream/api"

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
	return nil
}

// Validate checks a configuration with defaults filled in. others are the
// stream's other consumers.
func Validate(cfg *api.ConsumerConfig, stream *api.StreamConfig, lim Limits, others []Other) *api.Error {
	return nil
}

// ValidateUpdate checks whether a consumer's configuration may change from old
// to cfg, both with defaults filled in. interest says whether anyone listens to
// old's deliver subject.
func ValidateUpdate(old, cfg *api.ConsumerConfig, interest bool) *api.Error { return nil }

// NewName returns a name for a consumer whose creator left it open.
func NewName() string { return "" }
