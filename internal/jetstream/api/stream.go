package api

import (
	"fmt"
	"time"
)

// RetentionPolicy says which messages a stream keeps.
type RetentionPolicy uint8

// Retention policies; the zero value is LimitsPolicy.
const (
	LimitsPolicy    RetentionPolicy = iota // until a limit is reached
	InterestPolicy                         // until every consumer has acknowledged
	WorkQueuePolicy                        // until the one consumer has acknowledged
)

// DiscardPolicy says what happens when a stream is full.
type DiscardPolicy uint8

// Discard policies; the zero value is DiscardOld.
const (
	DiscardOld DiscardPolicy = iota // remove the oldest messages
	DiscardNew                      // refuse new messages
)

// StorageType says where messages are kept.
type StorageType uint8

// Storage types; the zero value is FileStorage.
const (
	FileStorage   StorageType = iota // on disk, survives a restart
	MemoryStorage                    // in memory, empty after a restart
)

// Compression names the compression of stored messages; it is recorded but has
// no effect on what clients see.
type Compression uint8

// Compression algorithms.
const (
	NoCompression Compression = iota
	S2Compression
)

// PersistMode says whether a publish acknowledgement waits for the disk.
type PersistMode uint8

// Persist modes. Petiole acknowledges after the disk in both.
const (
	PersistDefault PersistMode = iota
	PersistAsync
)

var (
	retentionNames   = []string{"limits", "interest", "workqueue"}
	discardNames     = []string{"old", "new"}
	storageNames     = []string{"file", "memory"}
	compressionNames = []string{"none", "s2"}
	persistNames     = []string{"default", "async"}
)

func enumText(names []string, v uint8, what string) ([]byte, error) {
	if int(v) >= len(names) {
		return nil, fmt.Errorf("unknown %s %d", what, v)
	}
	return []byte(names[v]), nil
}

func enumValue(names []string, text []byte, what string) (uint8, error) {
	if len(text) == 0 {
		return 0, nil
	}
	for i, n := range names {
		if n == string(text) {
			return uint8(i), nil
		}
	}
	return 0, fmt.Errorf("unknown %s %q", what, text)
}

// MarshalText returns the name used in JSON.
func (p RetentionPolicy) MarshalText() ([]byte, error) {
	return enumText(retentionNames, uint8(p), "retention policy")
}

// UnmarshalText sets p by the name used in JSON.
func (p *RetentionPolicy) UnmarshalText(b []byte) error {
	v, err := enumValue(retentionNames, b, "retention policy")
	*p = RetentionPolicy(v)
	return err
}

// MarshalText returns the name used in JSON.
func (p DiscardPolicy) MarshalText() ([]byte, error) {
	return enumText(discardNames, uint8(p), "discard policy")
}

// UnmarshalText sets p by the name used in JSON.
func (p *DiscardPolicy) UnmarshalText(b []byte) error {
	v, err := enumValue(discardNames, b, "discard policy")
	*p = DiscardPolicy(v)
	return err
}

// MarshalText returns the name used in JSON.
func (p StorageType) MarshalText() ([]byte, error) {
	return enumText(storageNames, uint8(p), "storage type")
}

// UnmarshalText sets p by the name used in JSON.
func (p *StorageType) UnmarshalText(b []byte) error {
	v, err := enumValue(storageNames, b, "storage type")
	*p = StorageType(v)
	return err
}

// MarshalText returns the name used in JSON.
func (p Compression) MarshalText() ([]byte, error) {
	return enumText(compressionNames, uint8(p), "compression")
}

// UnmarshalText sets p by the name used in JSON.
func (p *Compression) UnmarshalText(b []byte) error {
	v, err := enumValue(compressionNames, b, "compression")
	*p = Compression(v)
	return err
}

// MarshalText returns the name used in JSON.
func (p PersistMode) MarshalText() ([]byte, error) {
	return enumText(persistNames, uint8(p), "persist mode")
}

// UnmarshalText sets p by the name used in JSON.
func (p *PersistMode) UnmarshalText(b []byte) error {
	v, err := enumValue(persistNames, b, "persist mode")
	*p = PersistMode(v)
	return err
}

// StreamConfig is what a client asks a stream to be. Limits of -1 (0 in a
// request) mean "none"; durations are nanoseconds in JSON.
type StreamConfig struct {
	Name         string          `json:"name"`
	Description  string          `json:"description,omitempty"`
	Subjects     []string        `json:"subjects,omitempty"`
	Retention    RetentionPolicy `json:"retention"`
	MaxConsumers int             `json:"max_consumers"`
	MaxMsgs      int64           `json:"max_msgs"`
	MaxBytes     int64           `json:"max_bytes"`
	MaxAge       time.Duration   `json:"max_age"`
	MaxMsgsPer   int64           `json:"max_msgs_per_subject"`
	MaxMsgSize   int32           `json:"max_msg_size,omitempty"`
	Discard      DiscardPolicy   `json:"discard"`
	Storage      StorageType     `json:"storage"`
	Replicas     int             `json:"num_replicas"`
	NoAck        bool            `json:"no_ack,omitempty"`
	Duplicates   time.Duration   `json:"duplicate_window,omitempty"`
	Placement    *Placement      `json:"placement,omitempty"`
	Mirror       *StreamSource   `json:"mirror,omitempty"`
	Sources      []*StreamSource `json:"sources,omitempty"`
	Compression  Compression     `json:"compression"`
	FirstSeq     uint64          `json:"first_seq,omitempty"`

	SubjectTransform *SubjectTransform `json:"subject_transform,omitempty"`
	RePublish        *RePublish        `json:"republish,omitempty"`

	AllowDirect   bool `json:"allow_direct"`
	MirrorDirect  bool `json:"mirror_direct"`
	DiscardNewPer bool `json:"discard_new_per_subject,omitempty"`
	Sealed        bool `json:"sealed"`
	DenyDelete    bool `json:"deny_delete"`
	DenyPurge     bool `json:"deny_purge"`
	AllowRollup   bool `json:"allow_rollup_hdrs"`

	ConsumerLimits         ConsumerLimits    `json:"consumer_limits"`
	AllowMsgTTL            bool              `json:"allow_msg_ttl"`
	SubjectDeleteMarkerTTL time.Duration     `json:"subject_delete_marker_ttl,omitempty"`
	AllowMsgCounter        bool              `json:"allow_msg_counter,omitempty"`
	AllowAtomicPublish     bool              `json:"allow_atomic,omitempty"`
	AllowMsgSchedules      bool              `json:"allow_msg_schedules,omitempty"`
	PersistMode            PersistMode       `json:"persist_mode,omitempty"`
	AllowBatchPublish      bool              `json:"allow_batched,omitempty"`
	Metadata               map[string]string `json:"metadata,omitempty"`
}

// ConsumerLimits are defaults and bounds for the stream's consumers.
type ConsumerLimits struct {
	InactiveThreshold time.Duration `json:"inactive_threshold,omitempty"`
	MaxAckPending     int           `json:"max_ack_pending,omitempty"`
}

// Placement asks for servers of a cluster; Petiole records it only.
type Placement struct {
	Cluster   string   `json:"cluster,omitempty"`
	Tags      []string `json:"tags,omitempty"`
	Preferred string   `json:"preferred,omitempty"`
}

// SubjectTransform rewrites subjects before storing.
type SubjectTransform struct {
	Source      string `json:"src"`
	Destination string `json:"dest"`
}

// RePublish publishes stored messages again.
type RePublish struct {
	Source      string `json:"src,omitempty"`
	Destination string `json:"dest"`
	HeadersOnly bool   `json:"headers_only,omitempty"`
}

// StreamSource names a stream to copy from.
type StreamSource struct {
	Name              string             `json:"name"`
	OptStartSeq       uint64             `json:"opt_start_seq,omitempty"`
	OptStartTime      *time.Time         `json:"opt_start_time,omitempty"`
	FilterSubject     string             `json:"filter_subject,omitempty"`
	SubjectTransforms []SubjectTransform `json:"subject_transforms,omitempty"`
	External          *ExternalStream    `json:"external,omitempty"`
	Domain            string             `json:"domain,omitempty"`
}

// ExternalStream says how the API of another account or domain is reached.
type ExternalStream struct {
	APIPrefix     string `json:"api"`
	DeliverPrefix string `json:"deliver"`
}

// StreamState is the summary of a stream's contents.
type StreamState struct {
	Msgs        uint64            `json:"messages"`
	Bytes       uint64            `json:"bytes"`
	FirstSeq    uint64            `json:"first_seq"`
	FirstTime   time.Time         `json:"first_ts"`
	LastSeq     uint64            `json:"last_seq"`
	LastTime    time.Time         `json:"last_ts"`
	NumSubjects int               `json:"num_subjects,omitempty"`
	Subjects    map[string]uint64 `json:"subjects,omitempty"`
	NumDeleted  int               `json:"num_deleted,omitempty"`
	Deleted     []uint64          `json:"deleted,omitempty"`
	Consumers   int               `json:"consumer_count"`
}

// StreamInfo describes a stream.
type StreamInfo struct {
	Config    StreamConfig `json:"config"`
	Created   time.Time    `json:"created"`
	State     StreamState  `json:"state"`
	Domain    string       `json:"domain,omitempty"`
	Cluster   *ClusterInfo `json:"cluster,omitempty"`
	TimeStamp time.Time    `json:"ts"`
}

// ClusterInfo names the leader of a replicated stream or consumer.
type ClusterInfo struct {
	Name   string `json:"name,omitempty"`
	Leader string `json:"leader,omitempty"`
}

// StreamCreateResponse answers STREAM.CREATE and STREAM.UPDATE.
type StreamCreateResponse struct {
	Response
	*StreamInfo
	DidCreate bool `json:"did_create,omitempty"`
}

// StreamInfoRequest is the optional body of STREAM.INFO.
type StreamInfoRequest struct {
	PagedRequest
	DeletedDetails bool   `json:"deleted_details,omitempty"`
	SubjectsFilter string `json:"subjects_filter,omitempty"`
}

// StreamInfoResponse answers STREAM.INFO.
type StreamInfoResponse struct {
	Response
	*Paged
	*StreamInfo
}

// StreamNamesRequest is the optional body of STREAM.NAMES and STREAM.LIST.
type StreamNamesRequest struct {
	PagedRequest
	Subject string `json:"subject,omitempty"`
}

// StreamNamesResponse answers STREAM.NAMES.
type StreamNamesResponse struct {
	Response
	Paged
	Streams []string `json:"streams"`
}

// StreamListResponse answers STREAM.LIST.
type StreamListResponse struct {
	Response
	Paged
	Streams []*StreamInfo `json:"streams"`
	// Offline are the streams that do not serve, and why.
	Offline map[string]string `json:"offline,omitempty"`
}

// SuccessResponse answers requests that have nothing else to say.
type SuccessResponse struct {
	Response
	Success bool `json:"success,omitempty"`
}

// StreamPurgeRequest is the optional body of STREAM.PURGE.
type StreamPurgeRequest struct {
	Sequence uint64 `json:"seq,omitempty"`    // delete below this sequence
	Subject  string `json:"filter,omitempty"` // only what matches
	Keep     uint64 `json:"keep,omitempty"`   // but the last so many
}

// StreamPurgeResponse answers STREAM.PURGE.
type StreamPurgeResponse struct {
	Response
	Success bool   `json:"success,omitempty"`
	Purged  uint64 `json:"purged"`
}

// MsgDeleteRequest is the body of STREAM.MSG.DELETE.
type MsgDeleteRequest struct {
	Seq     uint64 `json:"seq"`
	NoErase bool   `json:"no_erase,omitempty"`
}

// MsgGetRequest is the body of STREAM.MSG.GET and DIRECT.GET.
type MsgGetRequest struct {
	Seq          uint64     `json:"seq,omitempty"`
	LastFor      string     `json:"last_by_subj,omitempty"`
	NextFor      string     `json:"next_by_subj,omitempty"`
	Batch        int        `json:"batch,omitempty"`
	MaxBytes     int        `json:"max_bytes,omitempty"`
	StartTime    *time.Time `json:"start_time,omitempty"`
	MultiLastFor []string   `json:"multi_last,omitempty"`
	UpToSeq      uint64     `json:"up_to_seq,omitempty"`
	UpToTime     *time.Time `json:"up_to_time,omitempty"`
	NoHeaders    bool       `json:"no_hdr,omitempty"`
}

// StoredMsg is a message in the answer to STREAM.MSG.GET.
type StoredMsg struct {
	Subject  string    `json:"subject"`
	Sequence uint64    `json:"seq"`
	Header   []byte    `json:"hdrs,omitempty"`
	Data     []byte    `json:"data,omitempty"`
	Time     time.Time `json:"time"`
}

// MsgGetResponse answers STREAM.MSG.GET.
type MsgGetResponse struct {
	Response
	Message *StoredMsg `json:"message,omitempty"`
}

// Advisories of damage are the project's own: nats-server has none.
const (
	AdvisoryStreamDamaged = "io.petiole.jetstream.advisory.v1.stream_damaged"
	// AdvisoryStreamDamagedSubject is followed by "." and the stream's name.
	AdvisoryStreamDamagedSubject = "$JS.EVENT.ADVISORY.STREAM.DAMAGED"
)

// SeqSpan is a closed interval of sequences.
type SeqSpan struct {
	First uint64 `json:"first"`
	Last  uint64 `json:"last"`
}

// StreamDamagedAdvisory says that a stream's files were found damaged, and what
// it has lost by that. Sequences do not change: those lost are gaps.
type StreamDamagedAdvisory struct {
	Type        string    `json:"type"`
	ID          string    `json:"id"`
	Time        time.Time `json:"timestamp"`
	Stream      string    `json:"stream"`
	Reason      string    `json:"reason"`                // what was found
	Quarantined bool      `json:"quarantined,omitempty"` // it could not be repaired and does not serve
	LostMsgs    uint64    `json:"lost_msgs"`
	Lost        []SeqSpan `json:"lost,omitempty"`
	LostKeys    []string  `json:"lost_keys,omitempty"` // of the stream's state beside messages
	Parked      []string  `json:"parked,omitempty"`    // the damaged files, at the server
}
