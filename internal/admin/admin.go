// Package admin is the local window into a running program: HTTP and JSON over
// a unix socket in the store directory. Whoever may enter that directory may
// ask; nothing listens on the network for it.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"petiole/internal/broker"
	"petiole/sync/link"
)

// SocketName is the socket's name within the store directory.
const SocketName = "admin.sock"

// statusPath is the one document there is.
const statusPath = "/v1/status"

// Status is what a running program tells about itself.
type Status struct {
	Program    string        `json:"program"` // edge or hub
	Version    string        `json:"version"`
	ServerName string        `json:"server_name"`
	ServerID   string        `json:"server_id"`
	PID        int           `json:"pid"`
	Start      time.Time     `json:"start"`
	Ready      time.Duration `json:"ready_ns"` // from the start of the process until clients could connect
	ClientURL  string        `json:"client_url"`
	ConfigFile string        `json:"config_file,omitempty"`
	Refused    *Refused      `json:"reload_refused,omitempty"` // the last reload, if it failed
	Broker     Broker        `json:"broker"`
	JetStream  *JetStream    `json:"jetstream,omitempty"` // absent if it is off

	Hub   *link.EdgeStatus `json:"hub,omitempty"`   // edge: its link to the hub; absent if none is configured
	Edges *link.HubStatus  `json:"edges,omitempty"` // hub: the edges connected
}

// Refused is a reload of the configuration that failed: the program runs with
// what it had before.
type Refused struct {
	Time    time.Time `json:"time"`
	Reasons []string  `json:"reasons"` // each with file and line where it has one
}

// Broker summarises the clients' side.
type Broker struct {
	Connections   int    `json:"connections"`
	TotalConns    uint64 `json:"total_connections"`
	Subscriptions int    `json:"subscriptions"` // of clients
	InMsgs        uint64 `json:"in_msgs"`
	InBytes       uint64 `json:"in_bytes"`
	OutMsgs       uint64 `json:"out_msgs"`
	OutBytes      uint64 `json:"out_bytes"`
	SlowConsumers uint64 `json:"slow_consumers"`
	StaleConns    uint64 `json:"stale_connections"`
	AuthErrors    uint64 `json:"auth_errors"`
	ProtoErrors   uint64 `json:"protocol_errors"`
}

// FromBroker takes the broker's counters over.
func FromBroker(s broker.Stats) Broker {
	return Broker{
		Connections: s.Connections, TotalConns: s.TotalConns, Subscriptions: max(s.Subscriptions-s.Internal, 0),
		InMsgs: s.InMsgs, InBytes: s.InBytes, OutMsgs: s.OutMsgs, OutBytes: s.OutBytes,
		SlowConsumers: s.SlowConsumers, StaleConns: s.StaleConns, AuthErrors: s.AuthErrors, ProtoErrors: s.ProtoErrors,
	}
}

// JetStream summarises the store.
type JetStream struct {
	StoreDir     string        `json:"store_dir"`
	SyncInterval time.Duration `json:"sync_interval_ns"` // 0: fsync before every acknowledgement
	Streams      []Stream      `json:"streams"`
	OpenStores   int           `json:"open_stores"` // streams whose files are open
	Log          WAL           `json:"log"`
	Written      Written       `json:"written"`
	Damage       Damage        `json:"damage"`
	Space        Space         `json:"space"`
}

// Space is the room on the store's file system. Sizes are in octets.
type Space struct {
	Full    bool      `json:"full"` // messages are refused until there is room
	Since   time.Time `json:"since,omitzero"`
	Reason  string    `json:"reason,omitempty"`
	Free    int64     `json:"free"`    // -1: the system does not tell
	Ballast int64     `json:"ballast"` // a file that is given up when there is no room, apart from free
}

// WAL summarises the write-ahead log. Sizes are in octets. What was written
// and synced counts from the start of the program; records a sync is how many
// messages, acknowledgements and the like shared one.
type WAL struct {
	Bytes    int64         `json:"bytes"`
	Budget   int64         `json:"budget"`
	Records  uint64        `json:"records"`
	Batches  uint64        `json:"batches"`
	Written  uint64        `json:"written"`
	Syncs    uint64        `json:"syncs"`
	LastSync time.Duration `json:"last_sync_ns"`
}

// Written is what the store has written in its life, in octets, whatever process
// did; what one that was killed did last may be missing.
type Written struct {
	Since    time.Time `json:"since"`
	Messages uint64    `json:"messages"` // of messages stored in files
	Log      uint64    `json:"log"`      // of the write-ahead log
	Files    uint64    `json:"files"`    // of checkpoints and compactions
	// Amplification is Log and Files divided by Messages; 0 without messages.
	Amplification float64 `json:"write_amplification"`
}

// Damage counts what was found damaged on disk since the start.
type Damage struct {
	Repairs     uint64 `json:"repairs"`      // of streams' files
	LostMsgs    uint64 `json:"lost_msgs"`    // messages lost in them: gaps now
	Consumers   uint64 `json:"consumers"`    // created anew, since their state was lost
	Quarantines uint64 `json:"quarantines"`  // streams that could not be repaired
	LostRecords uint64 `json:"lost_records"` // records of the log
	Parked      uint64 `json:"parked"`       // files and directories put aside
	Positions   uint64 `json:"positions"`    // of exports, restored from their copies
}

// Stream summarises one stream by what a power cut cannot take.
type Stream struct {
	Name  string `json:"name"`
	Msgs  uint64 `json:"msgs"`
	Bytes uint64 `json:"bytes"`
	First uint64 `json:"first_seq"`
	Last  uint64 `json:"last_seq"`

	// State is "" for a stream that serves, otherwise "repairing", "waiting" for
	// room to be repaired, or "quarantined", with the reason; nothing else is
	// known of it then.
	State  string `json:"state,omitempty"`
	Reason string `json:"reason,omitempty"`
	// LostMsgs counts sequences whose messages damage has taken.
	LostMsgs uint64 `json:"lost_msgs,omitempty"`
	// CompactionPostponed is why its files are not made smaller yet, though
	// they hold little for their size.
	CompactionPostponed string `json:"compaction_postponed,omitempty"`
}

// Server answers on a socket.
type Server struct {
	http   *http.Server
	path   string
	opened io.Closer // the directory, while a short name for it is in use
	done   chan struct{}
}

// Serve listens on the socket at path and answers with what status returns.
// A socket left over by a process that was killed is replaced; one that somebody
// listens on is not, nor is anything else.
func Serve(path string, status func() Status, log *slog.Logger) (*Server, error) {
	name, dir, err := shortName(path)
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	err = removeLeftover(path, name)
	if err != nil {
		dir.Close()
		return nil, err
	}
	ln, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", name)
	if err != nil {
		dir.Close()
		return nil, fmt.Errorf("admin socket %s: %w", path, err)
	}
	// Removed by path in Close: the short name may be gone by then.
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil && runtime.GOOS != "windows" {
		ln.Close()
		dir.Close()
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+statusPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		if err := enc.Encode(status()); err != nil {
			log.Debug("admin answer not sent", "error", err)
		}
	})
	s := &Server{
		http:   &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)},
		path:   path,
		opened: dir,
		done:   make(chan struct{}),
	}
	go func() {
		defer close(s.done)
		if err := s.http.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			log.Warn("admin socket stopped answering", "error", err)
		}
	}()
	return s, nil
}

// removeLeftover removes the socket at path, if nobody listens on it. name is a
// short name for path.
func removeLeftover(path, name string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("admin socket: %w", err)
	}
	// Windows does not call its sockets so.
	if fi.Mode()&(fs.ModeSocket|fs.ModeIrregular) == 0 {
		return fmt.Errorf("admin socket %s: there is something else of that name: move it away, or name another with --socket", path)
	}
	if c, err := (&net.Dialer{Timeout: time.Second}).Dial("unix", name); err == nil {
		c.Close()
		return fmt.Errorf("admin socket %s: another program listens on it: stop that, or name another with --socket", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("admin socket: %w", err)
	}
	return nil
}

// Close stops answering and removes the socket.
func (s *Server) Close() error {
	err := s.http.Close()
	<-s.done
	s.opened.Close()
	return errors.Join(err, os.Remove(s.path))
}

// ErrNotRunning says that no program answers on a socket.
var ErrNotRunning = errors.New("no running program answers")

// Ask returns the status of the program whose socket is at path, or an error
// that wraps ErrNotRunning.
func Ask(ctx context.Context, path string) (Status, error) {
	var st Status
	name, dir, err := shortName(path)
	if err != nil {
		return st, fmt.Errorf("%w on %s: %w", ErrNotRunning, path, err)
	}
	defer dir.Close()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", name)
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://petiole"+statusPath, nil)
	if err != nil {
		return st, err
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
			return st, fmt.Errorf("%w on %s: %w", ErrNotRunning, path, err)
		}
		return st, fmt.Errorf("ask on %s: %w", path, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return st, fmt.Errorf("ask on %s: the program answers %s", path, resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(&st); err != nil {
		return st, fmt.Errorf("ask on %s: %w", path, err)
	}
	return st, nil
}

// maxSocketName is what fits into a socket address on every system.
const maxSocketName = 100

// shortName returns a name for the socket at path that fits into a socket
// address, and what has to stay open while the name is in use.
func shortName(path string) (string, io.Closer, error) {
	if len(path) <= maxSocketName || runtime.GOOS != "linux" {
		return path, io.NopCloser(nil), nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, err
	}
	return filepath.Join("/proc/self/fd", strconv.Itoa(int(dir.Fd())), filepath.Base(path)), dir, nil
}
