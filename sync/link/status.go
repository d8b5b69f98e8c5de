package link

import "time"

// EdgeStatus is a snapshot of an edge's side of the link.
type EdgeStatus struct {
	EdgeID        string         `json:"edge_id"`
	Connected     bool           `json:"connected"`
	Since         time.Time      `json:"since,omitzero"` // connected or disconnected since
	URL           string         `json:"url,omitempty"`
	HubName       string         `json:"hub_name,omitempty"`
	HubID         string         `json:"hub_id,omitempty"`
	HubVersion    string         `json:"hub_version,omitempty"`
	RTT           time.Duration  `json:"rtt_ns,omitempty"`
	Attempts      uint64         `json:"attempts"` // since the last connection
	Connects      uint64         `json:"connects"` // connections so far
	LastError     string         `json:"last_error,omitempty"`
	LastErrorTime time.Time      `json:"last_error_time,omitzero"`
	Exports       []ExportStatus `json:"exports"`
}

// ExportStatus is a snapshot of one export at the edge.
type ExportStatus struct {
	Stream      string `json:"stream"`
	To          string `json:"to"`
	Active      bool   `json:"active"`      // accepted by the hub, batches flow
	First       uint64 `json:"first"`       // first sequence held here
	Last        uint64 `json:"last"`        // last durable sequence here
	Through     uint64 `json:"through"`     // hub holds everything up to here
	Incarnation uint64 `json:"incarnation"` // 0: not started
	Base        uint64 `json:"base"`
	Regressions uint64 `json:"regressions"` // new incarnations after a lost tail
	LagMsgs     uint64 `json:"lag_msgs"`    // sequences the hub does not have yet
	// LagBytes estimates their bytes from the stream's average message.
	LagBytes uint64 `json:"lag_bytes"`
	// LagAge is the age of the oldest message that the hub does not have.
	LagAge        time.Duration `json:"lag_age_ns"`
	InFlight      int64         `json:"in_flight_bytes"`
	MsgRate       float64       `json:"msgs_per_second"`
	ByteRate      float64       `json:"bytes_per_second"`
	Sent          uint64        `json:"msgs_acknowledged"` // by this process
	Gaps          uint64        `json:"gaps"`              // runs of messages lost before replay
	GapMsgs       uint64        `json:"gap_msgs"`          // sequences in them
	DamagedMsgs   uint64        `json:"damaged_msgs"`      // of these, damaged on disk
	Failing       bool          `json:"failing"`           // it does not proceed, because of LastError; otherwise that is past
	LastError     string        `json:"last_error,omitempty"`
	LastErrorTime time.Time     `json:"last_error_time,omitzero"`
}

// HubStatus is a snapshot of a hub's side of all links.
type HubStatus struct {
	Addr        string     `json:"addr"`
	Fingerprint string     `json:"fingerprint"` // "sha256:…" of the certificate
	Refused     uint64     `json:"refused"`     // connections refused so far
	LastError   string     `json:"last_error,omitempty"`
	ErrorTime   time.Time  `json:"last_error_time,omitzero"`
	Edges       []EdgeConn `json:"edges"`
}

// EdgeConn is one edge connected to a hub.
type EdgeConn struct {
	EdgeID  string        `json:"edge_id"`
	Name    string        `json:"name"`
	User    string        `json:"user,omitempty"`
	Version string        `json:"version,omitempty"`
	Addr    string        `json:"addr"`
	Since   time.Time     `json:"since"`
	RTT     time.Duration `json:"rtt_ns"`
	Exports []EdgeExport  `json:"exports"`
}

// EdgeExport is one export of a connected edge, as the hub sees it.
type EdgeExport struct {
	Stream      string  `json:"stream"` // the edge's stream
	To          string  `json:"to"`     // the hub's
	UID         string  `json:"uid"`
	Incarnation uint64  `json:"incarnation"`
	Through     uint64  `json:"through"`
	Msgs        uint64  `json:"msgs"`     // received in all
	GapMsgs     uint64  `json:"gap_msgs"` // sequences received as gaps
	MsgRate     float64 `json:"msgs_per_second"`
	ByteRate    float64 `json:"bytes_per_second"`
	Error       string  `json:"error,omitempty"`
}
