package stream

import (
	"bytes"
	"strconv"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/wire"
)

// Names of headers that a publish may carry (ADR-8, ADR-9, ADR-31, ADR-43).
const (
	HeaderMsgID           = "Nats-Msg-Id"
	HeaderExpectedStream  = "Nats-Expected-Stream"
	HeaderExpectedLastSeq = "Nats-Expected-Last-Sequence"
	HeaderExpectedSubjSeq = "Nats-Expected-Last-Subject-Sequence"
	HeaderExpectedSubject = "Nats-Expected-Last-Subject-Sequence-Subject"
	HeaderExpectedLastID  = "Nats-Expected-Last-Msg-Id"
	HeaderRollup          = "Nats-Rollup"
	HeaderTTL             = "Nats-TTL"
	HeaderIncr            = "Nats-Incr"
	HeaderBatchID         = "Nats-Batch-Id"
	HeaderSchedule        = "Nats-Schedule"
	HeaderStreamSource    = "Nats-Stream-Source"

	headerMarker = "Nats-Marker-Reason"
	headerKVOp   = "KV-Operation"
)

// headers is what a publish's header block asks of the stream.
type headers struct {
	msgID          string
	expectedStream string
	expectedLastID string
	expectedSubj   string // subject for the expected subject sequence
	rollup         string
	lastSeq        uint64
	subjSeq        uint64
	hasLastSeq     bool
	hasSubjSeq     bool
	ttl            string
	batch          bool       // says that it belongs to a batch
	refused        *api.Error // asks for what the server does not do
}

var (
	crlf       = []byte("\r\n")
	natsPrefix = []byte("Nats-")
)

// parseHeaders reads the block. Lines that do not begin with "Nats-" cost one
// comparison. Names are compared as they are written, as NATS servers do.
func parseHeaders(block []byte) (h headers) {
	for len(block) > 0 {
		line := block
		if i := bytes.Index(block, crlf); i >= 0 {
			line, block = block[:i], block[i+2:]
		} else {
			block = nil
		}
		if !bytes.HasPrefix(line, natsPrefix) {
			continue
		}
		i := bytes.IndexByte(line, ':')
		if i < 0 {
			continue
		}
		value := string(bytes.TrimSpace(line[i+1:]))
		if value == "" {
			continue
		}
		switch string(line[:i]) {
		case HeaderMsgID:
			h.msgID = value
		case HeaderExpectedStream:
			h.expectedStream = value
		case HeaderExpectedLastID:
			h.expectedLastID = value
		case HeaderExpectedSubject:
			h.expectedSubj = value
		case HeaderRollup:
			h.rollup = value
		case HeaderExpectedLastSeq:
			h.lastSeq, h.hasLastSeq = parseSeq(value)
		case HeaderExpectedSubjSeq:
			h.subjSeq, h.hasSubjSeq = parseSeq(value)
		case HeaderTTL:
			h.ttl = value
		case HeaderIncr:
			h.refused = api.ErrMessageIncrDisabled
		case HeaderSchedule:
			h.refused = api.ErrMessageSchedulesDisabled
		case HeaderBatchID:
			h.batch = true
		case HeaderStreamSource:
			h.refused = api.ErrMessageSourceHdrNotAllowed
		}
	}
	return h
}

// parseSeq reads a sequence; what is not a number never equals one.
func parseSeq(s string) (uint64, bool) {
	v, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return ^uint64(0), true
	}
	return v, true
}

// neverTTL is the time to live of a message that does not expire, not even by
// the stream's maximum age.
const neverTTL = time.Duration(-1)

// parseTTL reads a Nats-TTL value: "never", a duration, or whole seconds. The
// least is one second; zero means "none".
func parseTTL(s string) (time.Duration, bool) {
	if strings.EqualFold(s, "never") {
		return neverTTL, true
	}
	if d, err := time.ParseDuration(s); err == nil && s != "0" {
		if d < time.Second {
			return 0, false
		}
		return d.Truncate(time.Second), true
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, false
	}
	return time.Duration(n) * time.Second, true
}

// headerTTL returns the time to live in a stored message's header block.
func headerTTL(block []byte) time.Duration {
	if !bytes.Contains(block, []byte(HeaderTTL)) {
		return 0
	}
	if h := parseHeaders(block); h.ttl != "" {
		if d, ok := parseTTL(h.ttl); ok {
			return d
		}
	}
	return 0
}

// isMarker reports whether a message stands for the absence of others, so that
// no marker is due when it expires.
func isMarker(block []byte) bool {
	if _, ok := wire.HeaderValue(block, headerMarker); ok {
		return true
	}
	op, ok := wire.HeaderValue(block, headerKVOp)
	return ok && string(op) == "PURGE"
}
