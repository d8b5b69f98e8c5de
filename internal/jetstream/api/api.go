package api

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Types of responses ("type" in JSON).
const (
	TypePrefix           = "io.nats.jetstream.api.v1."
	TypeSystem           = TypePrefix + "system_response"
	TypeAccountInfo      = TypePrefix + "account_info_response"
	TypeStreamCreate     = TypePrefix + "stream_create_response"
	TypeStreamUpdate     = TypePrefix + "stream_update_response"
	TypeStreamInfo       = TypePrefix + "stream_info_response"
	TypeStreamNames      = TypePrefix + "stream_names_response"
	TypeStreamList       = TypePrefix + "stream_list_response"
	TypeStreamDelete     = TypePrefix + "stream_delete_response"
	TypeStreamPurge      = TypePrefix + "stream_purge_response"
	TypeMsgDelete        = TypePrefix + "stream_msg_delete_response"
	TypeMsgGet           = TypePrefix + "stream_msg_get_response"
	TypeConsumerCreate   = TypePrefix + "consumer_create_response"
	TypeConsumerInfo     = TypePrefix + "consumer_info_response"
	TypeConsumerNames    = TypePrefix + "consumer_names_response"
	TypeConsumerList     = TypePrefix + "consumer_list_response"
	TypeConsumerDelete   = TypePrefix + "consumer_delete_response"
	TypeConsumerPause    = TypePrefix + "consumer_pause_response"
	TypeConsumerUnpin    = TypePrefix + "consumer_unpin_response"
	TypeStreamSnapshot   = TypePrefix + "stream_snapshot_response"
	TypeStreamRestore    = TypePrefix + "stream_restore_response"
	TypeStreamPeerRemove = TypePrefix + "stream_remove_peer_response"
)

// Limits of names, texts and pages.
const (
	MaxNameLen        = 255        // stream and consumer names
	MaxDescriptionLen = 4 * 1024   // descriptions, in octets
	MaxMetadataLen    = 128 * 1024 // sum of metadata keys and values, in octets
	NamesLimit        = 1024       // names per page
	ListLimit         = 256        // infos per page
	SubjectsLimit     = 100_000    // subjects per page of STREAM.INFO
)

// Response begins every answer of the API.
type Response struct {
	Type  string `json:"type"`
	Error *Error `json:"error,omitempty"`
}

// Head returns r, through which the type of any document that begins with a
// Response is set.
func (r *Response) Head() *Response { return r }

// Paged describes the page answered.
type Paged struct {
	Total  int `json:"total"`
	Offset int `json:"offset"`
	Limit  int `json:"limit"`
}

// PagedRequest asks for the page that begins at Offset.
type PagedRequest struct {
	Offset int `json:"offset"`
}

// Error is an error of the API. Its values are shared: use [Error.With] to fill
// in a text's placeholders, and errors.Is to compare (by ErrCode).
type Error struct {
	Code        int    `json:"code"`
	ErrCode     uint16 `json:"err_code,omitempty"`
	Description string `json:"description,omitempty"`
}

// Error returns the text that clients show.
func (e *Error) Error() string { return fmt.Sprintf("%s (%d)", e.Description, e.ErrCode) }

// Is reports whether target is an [Error] of the same ErrCode.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.ErrCode == e.ErrCode
}

// With returns a copy of e in which the text's placeholder "{name}" of each
// (name, value) pair is replaced by the value.
func (e *Error) With(pairs ...any) *Error {
	c := *e
	for i := 0; i+1 < len(pairs); i += 2 {
		c.Description = strings.ReplaceAll(c.Description, "{"+fmt.Sprint(pairs[i])+"}", fmt.Sprint(pairs[i+1]))
	}
	return &c
}

// Unsupported returns an error for what this server does not do: code 10003
// (bad request), with the feature named.
func Unsupported(what string) *Error {
	return &Error{Code: 400, ErrCode: ErrBadRequest.ErrCode, Description: "bad request: " + what + " is not supported by this server"}
}

// AccountInfo answers INFO.
type AccountInfo struct {
	Response
	AccountTier
	Domain string   `json:"domain,omitempty"`
	API    APIStats `json:"api"`
}

// AccountTier is an account's usage and limits.
type AccountTier struct {
	Memory         uint64        `json:"memory"`
	Store          uint64        `json:"storage"`
	ReservedMemory uint64        `json:"reserved_memory"`
	ReservedStore  uint64        `json:"reserved_storage"`
	Streams        int           `json:"streams"`
	Consumers      int           `json:"consumers"`
	Limits         AccountLimits `json:"limits"`
}

// AccountLimits are an account's limits; -1 means "none".
type AccountLimits struct {
	MaxMemory            int64 `json:"max_memory"`
	MaxStore             int64 `json:"max_storage"`
	MaxStreams           int   `json:"max_streams"`
	MaxConsumers         int   `json:"max_consumers"`
	MaxAckPending        int   `json:"max_ack_pending"`
	MemoryMaxStreamBytes int64 `json:"memory_max_stream_bytes"`
	StoreMaxStreamBytes  int64 `json:"storage_max_stream_bytes"`
	MaxBytesRequired     bool  `json:"max_bytes_required"`
}

// APIStats counts requests of the API.
type APIStats struct {
	Level    int    `json:"level"`
	Total    uint64 `json:"total"`
	Errors   uint64 `json:"errors"`
	Inflight uint64 `json:"inflight,omitempty"`
}

// PubAck is the answer to a message stored. [AppendPubAck] writes it without
// reflection.
type PubAck struct {
	Error     *Error `json:"error,omitempty"`
	Stream    string `json:"stream"`
	Sequence  uint64 `json:"seq"`
	Duplicate bool   `json:"duplicate,omitempty"`
}

// AppendPubAck appends the JSON of an acknowledgement to dst. The stream name
// must not need escaping (valid stream names do not contain quotes or
// backslashes; control characters are excluded by validation).
func AppendPubAck(dst []byte, stream string, seq uint64, duplicate bool) []byte {
	dst = append(dst, `{"stream":"`...)
	dst = append(dst, stream...)
	dst = append(dst, `","seq":`...)
	dst = strconv.AppendUint(dst, seq, 10)
	if duplicate {
		dst = append(dst, `,"duplicate":true`...)
	}
	return append(dst, '}')
}

// AppendPubErr appends the JSON of a refused publish to dst.
func AppendPubErr(dst []byte, stream string, e *Error) []byte {
	dst = append(dst, `{"error":{"code":`...)
	dst = strconv.AppendInt(dst, int64(e.Code), 10)
	dst = append(dst, `,"err_code":`...)
	dst = strconv.AppendUint(dst, uint64(e.ErrCode), 10)
	dst = append(dst, `,"description":`...)
	text, _ := json.Marshal(e.Description) // a string always has a JSON form
	dst = append(dst, text...)
	dst = append(dst, `},"stream":"`...)
	dst = append(dst, stream...)
	return append(dst, `","seq":0}`...)
}

// UnixNano returns t in Unix nanoseconds, or the nearest time that has such a
// form (the years 1678 to 2261). Clients send times of any year.
func UnixNano(t time.Time) int64 {
	const limit = math.MaxInt64/int64(time.Second) - 3600
	switch s := t.Unix(); {
	case s > limit:
		return limit * int64(time.Second)
	case s < -limit:
		return -limit * int64(time.Second)
	}
	return t.UnixNano()
}
