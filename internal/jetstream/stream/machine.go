// Package stream is the state machine of one stream: what a record of the log
// does to the messages, the window of message ids and the positions of edges.
// It is pure: the same records applied to the same store give the same state
// and the same results. It knows neither clocks nor connections.
package stream

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
)

// Keys of the machine's keyed state in its store.
const (
	KeyConfig   = "config"    // JSON of api.StreamConfig
	KeyUID      = "uid"       // 16 octets
	KeyLastID   = "lastid"    // message id of the last message
	KeyWindow   = "window"    // latest time in the window of message ids: varint by the steady clock, varint by the wall clock
	PrefixDedup = "d/"        // + message id: uvarint sequence, varint time by the steady clock
	PrefixPos   = "i/"        // + edge "/" uid in hex: command.Position
	maxHeader   = 64*1024 - 1 // octets of a header block
)

// Result is the outcome of one record.
type Result struct {
	Kind      command.Kind
	Seq       uint64     // Publish: sequence stored (or that of the original)
	Duplicate bool       // Publish: already stored within the window
	Refused   *api.Error // the command was refused; nothing changed
	Before    uint64     // Batch: messages stored beside the one at Seq, right before it
	Prev      uint64     // Publish to a stream that republishes: sequence of the subject's message before
	Removed   uint64     // DeleteMsg, Purge, Expire: messages removed
	// Skipped is which sequences a Skip left out: none if Last is below First.
	Skipped storage.Span

	// Position and Err are the outcome of an Ingest: the position now held
	// (nil if none), and command.ErrStaleIncarnation, ErrOutOfOrder,
	// ErrDiverged or ErrFull.
	Position *command.Position
	Err      error

	// Fatal says that the store failed. The machine's state is unknown; the
	// process has to recover from disk.
	Fatal error
}

// Observer is told what happens to messages, while it happens. It must not call
// the machine back.
type Observer interface {
	// Appended says that a message was stored.
	Appended(seq uint64, subject string)
	// Removed says that one message was removed.
	Removed(seq uint64, subject string)
	// Purged says that any number of messages were removed.
	Purged()
}

// Machine is the state of one stream. It is not safe for concurrent use; its
// store's readers are.
type Machine struct {
	cfg   api.StreamConfig
	uid   [16]byte
	store storage.Store

	lastTime  int64  // time of the last message ever stored
	lastID    string // message id of the last message stored
	positions map[string]*command.Position

	ids  dedup
	ttls ttls
	obs  Observer // nil if nobody wants to know

	transform *Transform // of the subjects of messages published; nil if none

	// What the next checkpoint has to write.
	dirtyConfig, dirtyLastID bool
	dirtyPos                 map[string]struct{}

	unreadable []string
}

// New returns the machine over store, with the state that the store holds
// durably; what of it makes no sense is left out, see [Machine.Unreadable]. cfg and uid are used if the store holds none, that is before its
// first checkpoint.
func New(cfg api.StreamConfig, uid [16]byte, store storage.Store) (*Machine, error) {
	m := &Machine{
		cfg: cfg, uid: uid, store: store,
		positions: map[string]*command.Position{}, dirtyPos: map[string]struct{}{},
		dirtyConfig: true,
	}
	m.ids.init()
	var saved []ddEntry
	err := store.KVs("", func(key string, value []byte) error {
		switch {
		case key == KeyConfig:
			var c api.StreamConfig
			if err := json.Unmarshal(value, &c); err != nil {
				m.unreadable = append(m.unreadable, key)
				break
			}
			m.cfg, m.dirtyConfig = c, false
		case key == KeyUID && len(value) == 16:
			m.uid = [16]byte(value)
		case key == KeyLastID:
			m.lastID = string(value)
		case key == KeyWindow:
			at, n := binary.Varint(value)
			wall, k := binary.Varint(value[max(n, 0):])
			if n <= 0 || k <= 0 {
				m.unreadable = append(m.unreadable, key)
				break
			}
			m.ids.at, m.ids.wall = at, wall
		case strings.HasPrefix(key, PrefixDedup):
			seq, n := binary.Uvarint(value)
			t, k := binary.Varint(value[max(n, 0):])
			if n <= 0 || k <= 0 {
				m.unreadable = append(m.unreadable, key)
				break
			}
			saved = append(saved, ddEntry{id: strings.Clone(key[len(PrefixDedup):]), seq: seq, time: t})
		case strings.HasPrefix(key, PrefixPos):
			p := new(command.Position)
			if err := p.Decode(value); err != nil {
				m.unreadable = append(m.unreadable, key)
				break
			}
			m.positions[strings.Clone(key[len(PrefixPos):])] = p
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the keyed state of stream %q: %w", cfg.Name, err)
	}
	m.ids.load(saved)
	st := store.State()
	m.lastTime = st.LastTime
	if st.Last == 0 && m.cfg.FirstSeq > 1 {
		if err := store.Skip(m.cfg.FirstSeq - 1); err != nil {
			return nil, fmt.Errorf("setting the first sequence of stream %q: %w", cfg.Name, err)
		}
	}
	if err := m.scanTTLs(); err != nil {
		return nil, fmt.Errorf("reading the times to live of stream %q: %w", cfg.Name, err)
	}
	if err := m.setTransform(); err != nil {
		return nil, fmt.Errorf("stream %q: %w", cfg.Name, err)
	}
	return m, nil
}

// Observe sets who is told about messages from now on; nil for nobody, which
// saves looking up the subjects of messages that are removed.
func (m *Machine) Observe(o Observer) { m.obs = o }

// Config returns the configuration in force. Its slices and maps are shared and
// not to be changed.
func (m *Machine) Config() *api.StreamConfig { return &m.cfg }

// UID returns the stream's identity.
func (m *Machine) UID() [16]byte { return m.uid }

// Apply does what a record says. The record may be retained: message contents
// alias it.
func (m *Machine) Apply(record []byte) Result {
	r := Result{Kind: command.KindOf(record)}
	var err error
	switch r.Kind {
	case command.KindPublish:
		var c command.Publish
		if err = c.Decode(record); err == nil {
			err = m.publish(&c, &r)
		}
	case command.KindBatch:
		var c command.Batch
		if err = c.Decode(record); err == nil {
			err = m.batch(&c, &r)
		}
	case command.KindDeleteMsg:
		var c command.DeleteMsg
		if err = c.Decode(record); err == nil {
			err = m.deleteMsg(&c, &r)
		}
	case command.KindPurge:
		var c command.Purge
		if err = c.Decode(record); err == nil {
			err = m.purge(&c, &r)
		}
	case command.KindSetConfig:
		var c command.SetConfig
		if err = c.Decode(record); err == nil {
			err = m.setConfig(&c)
		}
	case command.KindExpire:
		var c command.Expire
		if err = c.Decode(record); err == nil {
			err = m.expire(&c, &r)
		}
	case command.KindLost:
		var c command.Lost
		if err = c.Decode(record); err == nil {
			if err = m.remove(c.Seq); err == nil {
				r.Removed, r.Seq = 1, c.Seq
			} else if errors.Is(err, storage.ErrNotFound) {
				err = nil // removed meanwhile
			}
		}
	case command.KindSkip:
		var c command.Skip
		if err = c.Decode(record); err == nil {
			last := m.store.State().Last
			r.Skipped = storage.Span{First: last + 1, Last: max(c.To, last) + c.More}
			err = m.store.Skip(r.Skipped.Last)
		}
	case command.KindAcked:
		var c command.Acked
		if err = c.Decode(record); err == nil {
			err = m.Acked(c.Seq)
		}
	case command.KindSweep: // its owner's business, who knows the consumers
		var c command.Sweep
		err = c.Decode(record)
	case command.KindIngest:
		var c command.Ingest
		if err = c.Decode(record); err == nil {
			err = m.ingest(&c, &r)
		}
	default:
		err = command.Unknown(r.Kind, "a stream's")
	}
	if err != nil {
		r.Fatal = fmt.Errorf("stream %q: %w", m.cfg.Name, err)
	}
	return r
}

func (m *Machine) setConfig(c *command.SetConfig) error {
	var cfg api.StreamConfig
	if err := json.Unmarshal(c.JSON, &cfg); err != nil {
		return fmt.Errorf("%w: configuration: %v", command.ErrMalformed, err)
	}
	old := m.cfg
	m.cfg, m.dirtyConfig = cfg, true
	if err := m.setTransform(); err != nil {
		return err
	}
	if cfg.AllowMsgTTL && !old.AllowMsgTTL {
		if err := m.scanTTLs(); err != nil {
			return err
		}
	}
	if cfg.MaxMsgsPer > 0 && (old.MaxMsgsPer <= 0 || cfg.MaxMsgsPer < old.MaxMsgsPer) {
		var over []string
		m.store.Subjects("", func(subject string, s storage.SubjectState) bool {
			if s.Msgs > uint64(cfg.MaxMsgsPer) {
				over = append(over, subject)
			}
			return true
		})
		slices.Sort(over)
		for _, s := range over {
			if _, err := m.doPurge(s, 0, uint64(cfg.MaxMsgsPer)); err != nil {
				return fmt.Errorf("purging %q to its new limit: %w", s, err)
			}
		}
	}
	return m.enforceTotals()
}

// setTransform makes the configured subject transform, which was checked
// before the configuration was accepted.
func (m *Machine) setTransform() (err error) {
	m.transform = nil
	if t := m.cfg.SubjectTransform; t != nil {
		m.transform, err = NewTransform(t.Source, t.Destination)
	}
	return err
}

// Window returns the latest time in the window of message ids, by the steady
// clock and by the wall clock; zeros if there has been none.
func (m *Machine) Window() (steady, wall int64) { return m.ids.at, m.ids.wall }

// Changes returns the keyed state that changed since the last [Machine.Saved].
func (m *Machine) Changes() []storage.KV {
	var kvs []storage.KV
	if m.dirtyConfig {
		// A configuration is made of strings and numbers: it always has a JSON form.
		b, _ := json.Marshal(&m.cfg)
		kvs = append(kvs, storage.KV{Key: KeyConfig, Value: b}, storage.KV{Key: KeyUID, Value: slices.Clone(m.uid[:])})
	}
	if m.dirtyLastID {
		kvs = append(kvs, storage.KV{Key: KeyLastID, Value: []byte(m.lastID)})
	}
	for key := range m.dirtyPos {
		kv := storage.KV{Key: PrefixPos + key}
		if p := m.positions[key]; p != nil {
			kv.Value = p.AppendTo(nil)
		}
		kvs = append(kvs, kv)
	}
	return m.ids.changes(kvs)
}

// Touch has the next Changes return all of the keyed state.
func (m *Machine) Touch() {
	m.dirtyConfig, m.dirtyLastID = true, true
	for key := range m.positions {
		m.dirtyPos[key] = struct{}{}
	}
	m.ids.fresh = m.ids.head
	m.ids.ticked = m.ids.at != 0
}

// Unreadable returns the keys of the keyed state that made no sense and were
// left out, though their checksums were right.
func (m *Machine) Unreadable() []string { return m.unreadable }

// Saved says that what Changes returned is part of a frozen set of the store.
func (m *Machine) Saved() {
	m.dirtyConfig, m.dirtyLastID = false, false
	clear(m.dirtyPos)
	m.ids.saved()
}
