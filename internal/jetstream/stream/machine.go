// Package stream is the state machine of one stream: what a record of the log
// does to the messages, the window of message ids and the positions of edges.
// It is pure: the same records applied to the same store give the same state
// and the same results. It knows neither clocks nor connections.
package stream

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/subject"
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

// ErrFull says that a batch was refused because the stream refuses new
// messages when it is full.
var ErrFull = errors.New("stream is full")

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

// prepared is a message that may be stored.
type prepared struct {
	msg storage.Message
	h   headers
	ttl time.Duration
	cmd *command.Publish
}

// staged is what the messages of a batch before the one at hand would change.
type staged struct {
	subjects map[string]stagedSubject
	ids      map[string]struct{}
	msgs     uint64
	bytes    uint64
}

type stagedSubject struct{ last, msgs uint64 }

func (m *Machine) publish(c *command.Publish, r *Result) error {
	var p prepared
	if err := m.prepare(&p, c, nil, r); err != nil || r.Refused != nil || r.Duplicate {
		return err
	}
	return m.put(&p, r)
}

// batch stores several messages, if each may be stored after those before it.
func (m *Machine) batch(c *command.Batch, r *Result) error {
	b := &staged{subjects: map[string]stagedSubject{}, ids: map[string]struct{}{}}
	list := make([]prepared, len(c.Msgs))
	for i := range c.Msgs {
		p := &list[i]
		if err := m.prepare(p, &c.Msgs[i], b, r); err != nil || r.Refused != nil {
			return err
		}
		b.msgs++
		b.bytes += p.msg.Size()
		b.subjects[p.msg.Subject] = stagedSubject{m.store.State().Last + b.msgs, b.subjects[p.msg.Subject].msgs + 1}
		if p.h.msgID != "" {
			b.ids[p.h.msgID] = struct{}{}
		}
	}
	for i := range list {
		if err := m.put(&list[i], r); err != nil {
			return err
		}
	}
	if len(list) > 0 {
		r.Before = uint64(len(list)) - 1
	}
	return nil
}

// prepare decides whether a message may be stored; if not, it says so in r. b
// is nil unless the message belongs to a batch.
func (m *Machine) prepare(p *prepared, c *command.Publish, b *staged, r *Result) error {
	cfg := &m.cfg
	if cfg.Sealed {
		r.Refused = api.ErrStreamSealed
		return nil
	}
	if cfg.MaxMsgSize >= 0 && len(c.Header)+len(c.Data) > int(cfg.MaxMsgSize) {
		r.Refused = api.ErrStreamMessageExceedsMaximum
		return nil
	}
	if m.transform != nil {
		if mapped, ok := m.transform.Apply(c.Subject); ok {
			c.Subject = mapped
		}
	}
	if c.Subject == "" || len(c.Subject) > storage.MaxSubject {
		r.Refused = api.ErrBadRequest
		return nil
	}
	p.cmd = c
	p.msg = storage.Message{Time: max(c.Time, m.lastTime), Subject: c.Subject, Header: c.Header, Data: c.Data}
	if len(c.Header) > 0 {
		if len(c.Header) > maxHeader {
			r.Refused = api.ErrStreamHeaderExceedsMaximum
			return nil
		}
		p.h = parseHeaders(c.Header)
		if err := m.checkHeaders(p, b, r); err != nil || r.Refused != nil || r.Duplicate {
			return err
		}
	}
	refused, err := m.admit(&p.msg, b)
	r.Refused = refused
	return err
}

// put stores a message that prepare let pass, and what follows from it.
func (m *Machine) put(p *prepared, r *Result) error {
	subject := p.msg.Subject
	if m.cfg.RePublish != nil {
		if ss, ok := m.store.Subject(subject); ok {
			r.Prev = ss.Last
		}
	}
	if err := m.append(&p.msg, p.ttl); err != nil {
		return err
	}
	r.Seq = p.msg.Seq
	if p.h.msgID != "" {
		m.ids.add(dedupID(p.h.msgID), p.msg.Seq, m.ids.at)
	}
	if m.lastID != p.h.msgID {
		m.lastID, m.dirtyLastID = p.h.msgID, true
	}
	switch p.h.rollup {
	case "sub":
		if _, err := m.doPurge(subject, p.msg.Seq, 0); err != nil {
			return fmt.Errorf("rolling up %q: %w", subject, err)
		}
	case "all":
		if _, err := m.doPurge("", p.msg.Seq, 0); err != nil {
			return fmt.Errorf("rolling up: %w", err)
		}
	}
	return m.enforce(subject)
}

// checkHeaders decides by the headers whether a message may be stored. The
// order of the checks is what clients see when several would fail.
func (m *Machine) checkHeaders(p *prepared, b *staged, r *Result) error {
	h := &p.h
	if h.batch && b == nil {
		r.Refused = api.ErrAtomicPublishDisabled
		return nil
	}
	if h.refused != nil {
		r.Refused = h.refused
		return nil
	}
	if h.expectedStream != "" && h.expectedStream != m.cfg.Name {
		r.Refused = api.ErrStreamNotMatch
		return nil
	}
	if h.ttl != "" {
		d, ok := parseTTL(h.ttl)
		switch {
		case !m.cfg.AllowMsgTTL && (d != 0 || !ok):
			r.Refused = api.ErrMessageTTLDisabled
			return nil
		case !ok:
			r.Refused = api.ErrMessageTTLInvalid
			return nil
		}
		p.ttl = d
	}
	switch {
	case h.hasSubjSeq:
		subject := p.msg.Subject
		if h.expectedSubj != "" {
			subject = h.expectedSubj
		}
		last, err := m.lastOf(subject, b)
		if err != nil {
			return err
		}
		if last != h.subjSeq {
			r.Refused = api.ErrStreamWrongLastSequence.With("seq", last)
			return nil
		}
	case h.expectedSubj != "":
		r.Refused = api.ErrStreamExpectedLastSeqPerSubjectInvalid
		return nil
	}
	if h.hasLastSeq {
		last := m.store.State().Last
		if b != nil {
			last += b.msgs
		}
		if last != h.lastSeq {
			r.Refused = api.ErrStreamWrongLastSequence.With("seq", last)
			return nil
		}
	}
	if h.msgID != "" && m.cfg.Duplicates > 0 {
		m.ids.tick(p.cmd.Steady, p.cmd.Time)
		m.ids.prune(m.ids.at - int64(m.cfg.Duplicates))
		seq, known := m.ids.lookup(dedupID(h.msgID))
		switch {
		case b == nil && known:
			r.Seq, r.Duplicate = seq, true
			return nil
		case b != nil:
			if _, twice := b.ids[h.msgID]; twice || known {
				r.Refused = api.ErrAtomicPublishContainsDuplicateMessage
				return nil
			}
		}
	}
	if h.expectedLastID != "" {
		switch {
		case b != nil:
			r.Refused = api.ErrAtomicPublishUnsupportedHeaderBatch.With("header", HeaderExpectedLastID)
			return nil
		case h.expectedLastID != m.lastID:
			r.Refused = api.ErrStreamWrongLastMsgID.With("id", m.lastID)
			return nil
		}
	}
	if h.rollup != "" {
		switch {
		case !m.cfg.AllowRollup || m.cfg.DenyPurge:
			r.Refused = api.ErrStreamRollupFailed.With("err", "rollup not permitted")
		case h.rollup != "sub" && h.rollup != "all":
			r.Refused = api.ErrStreamRollupFailed.With("err", fmt.Sprintf("rollup value invalid: %q", h.rollup))
		}
	}
	return nil
}

// lastOf returns the sequence of the last message that matches a pattern; 0 if
// there is none.
func (m *Machine) lastOf(pattern string, b *staged) (uint64, error) {
	var last uint64
	if b != nil {
		for s, st := range b.subjects {
			if storage.MatchSubject(pattern, s) {
				last = max(last, st.last)
			}
		}
	}
	if last > 0 {
		return last, nil
	}
	msg, err := m.store.LoadLast(pattern, 0)
	if seq, damaged := storage.Damaged(err); damaged {
		return seq, nil
	}
	if err != nil && !errors.Is(err, storage.ErrNotFound) {
		return 0, fmt.Errorf("loading the last message of %q: %w", pattern, err)
	}
	return msg.Seq, nil
}

// admit decides by the stream's limits whether a message may be stored.
func (m *Machine) admit(msg *storage.Message, b *staged) (*api.Error, error) {
	cfg := &m.cfg
	if cfg.Discard != api.DiscardNew {
		return nil, nil
	}
	var msgs, bytes uint64 // staged before this one
	var own stagedSubject
	if b != nil {
		msgs, bytes, own = b.msgs, b.bytes, b.subjects[msg.Subject]
	}
	// A message that replaces one of its own subject needs no room beyond
	// what that one leaves.
	var freed uint64
	full := false
	if cfg.MaxMsgsPer > 0 {
		ss, ok := m.store.Subject(msg.Subject)
		if ss.Msgs+own.msgs >= uint64(cfg.MaxMsgsPer) {
			if cfg.DiscardNewPer {
				return api.ErrStreamStoreFailed.With("err", "maximum messages per subject exceeded"), nil
			}
			full = true
			if ok {
				first, err := m.store.Load(ss.First)
				if _, damaged := storage.Damaged(err); err != nil && !damaged {
					return nil, fmt.Errorf("loading the first message of %q: %w", msg.Subject, err)
				}
				if err == nil {
					freed = first.Size()
				}
			}
		}
	}
	st := m.store.State()
	if cfg.MaxMsgs > 0 && st.Msgs+msgs >= uint64(cfg.MaxMsgs) && !full {
		return api.ErrStreamStoreFailed.With("err", "maximum messages exceeded"), nil
	}
	if cfg.MaxBytes > 0 && st.Bytes-freed+bytes+msg.Size() > uint64(cfg.MaxBytes) {
		return api.ErrStreamStoreFailed.With("err", "maximum bytes exceeded"), nil
	}
	return nil, nil
}

// append stores msg, and sets its sequence.
func (m *Machine) append(msg *storage.Message, ttl time.Duration) error {
	seq, err := m.store.Append(*msg)
	if err != nil {
		return fmt.Errorf("storing a message on %q: %w", msg.Subject, err)
	}
	msg.Seq = seq
	m.lastTime = msg.Time
	if ttl != 0 {
		m.ttls.add(seq, msg.Time, ttl)
		m.pruneTTLs()
	}
	if m.obs != nil {
		m.obs.Appended(seq, msg.Subject)
	}
	return nil
}

// enforce removes what exceeds the limits after a message on subject was
// stored.
func (m *Machine) enforce(subject string) error {
	cfg := &m.cfg
	if cfg.MaxMsgsPer > 0 {
		for {
			ss, ok := m.store.Subject(subject)
			if !ok || ss.Msgs <= uint64(cfg.MaxMsgsPer) {
				break
			}
			if err := m.remove(ss.First); err != nil {
				return err
			}
		}
	}
	return m.enforceTotals()
}

func (m *Machine) enforceTotals() error {
	cfg := &m.cfg
	if cfg.MaxMsgs <= 0 && cfg.MaxBytes <= 0 {
		return nil
	}
	for {
		st := m.store.State()
		over := cfg.MaxMsgs > 0 && st.Msgs > uint64(cfg.MaxMsgs) ||
			cfg.MaxBytes > 0 && st.Bytes > uint64(cfg.MaxBytes)
		if !over || st.Msgs == 0 {
			return nil
		}
		if err := m.remove(st.First); err != nil {
			return err
		}
	}
}

func (m *Machine) remove(seq uint64) error {
	var subject string
	var damaged bool
	if m.obs != nil {
		msg, err := m.store.Load(seq)
		// Where it was may be destroyed; what that means the store knows.
		if damaged = errors.Is(err, storage.ErrCorrupt); err != nil && !damaged {
			return fmt.Errorf("removing message %d: %w", seq, err)
		}
		subject = msg.Subject
	}
	if _, err := m.store.Remove(seq); err != nil {
		return fmt.Errorf("removing message %d: %w", seq, err)
	}
	switch {
	case m.obs == nil:
	case damaged: // whose it was cannot be told
		m.obs.Purged()
	default:
		m.obs.Removed(seq, subject)
	}
	return nil
}

func (m *Machine) doPurge(subject string, upto, keep uint64) (uint64, error) {
	n, err := m.store.Purge(subject, upto, keep)
	if n > 0 && m.obs != nil {
		m.obs.Purged()
	}
	return n, err
}

// Acked removes a message that no consumer needs any more, for streams whose
// retention is by interest or as a work queue. A message that is gone already
// is no error. It is part of applying a consumer's logged command.
func (m *Machine) Acked(seq uint64) error {
	if m.cfg.Retention == api.LimitsPolicy {
		return nil
	}
	if err := m.remove(seq); err != nil && !errors.Is(err, storage.ErrNotFound) {
		return fmt.Errorf("stream %q: %w", m.cfg.Name, err)
	}
	return nil
}

// Unwanted removes all messages, as nobody needs any of them; it is for streams
// whose retention is by interest. Like Acked it is part of applying a command.
func (m *Machine) Unwanted() error {
	if _, err := m.doPurge("", 0, 0); err != nil {
		return fmt.Errorf("stream %q: %w", m.cfg.Name, err)
	}
	return nil
}

func (m *Machine) deleteMsg(c *command.DeleteMsg, r *Result) error {
	switch {
	case m.cfg.Sealed:
		r.Refused = api.ErrStreamSealed
		return nil
	case m.cfg.DenyDelete:
		r.Refused = api.ErrStreamMsgDeleteFailed.With("err", "message delete not permitted")
		return nil
	}
	err := m.remove(c.Seq)
	if errors.Is(err, storage.ErrNotFound) {
		r.Refused = api.ErrSequenceNotFound.With("seq", c.Seq)
		return nil
	}
	r.Removed = 1
	return err
}

func (m *Machine) purge(c *command.Purge, r *Result) error {
	switch {
	case m.cfg.Sealed:
		r.Refused = api.ErrStreamSealed
		return nil
	case m.cfg.DenyPurge:
		r.Refused = api.ErrStreamPurgeFailed.With("err", "stream purge not permitted")
		return nil
	}
	n, err := m.doPurge(c.Subject, c.Seq, c.Keep)
	if err != nil {
		return fmt.Errorf("purging: %w", err)
	}
	r.Removed = n
	return nil
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

// posKey is the key of an edge's stream, without PrefixPos.
func posKey(edge string, uid [16]byte) string { return edge + "/" + hex.EncodeToString(uid[:]) }

// Window returns the latest time in the window of message ids, by the steady
// clock and by the wall clock; zeros if there has been none.
func (m *Machine) Window() (steady, wall int64) { return m.ids.at, m.ids.wall }

// Position returns how far the stream has what an edge's stream holds. The
// position is immutable.
func (m *Machine) Position(edge string, uid [16]byte) (*command.Position, bool) {
	p, ok := m.positions[posKey(edge, uid)]
	return p, ok
}

// Positions calls fn for every edge's position, in no particular order.
func (m *Machine) Positions(fn func(edge string, uid [16]byte, p *command.Position)) {
	for k, p := range m.positions {
		i := strings.LastIndexByte(k, '/')
		var uid [16]byte
		if _, err := hex.Decode(uid[:], []byte(k[i+1:])); err == nil {
			fn(k[:i], uid, p)
		}
	}
}

// RestorePosition puts a copy of a position in the place of one that is missing,
// or is older; it reports whether it has. The key is without PrefixPos. It is
// for the time between New and the first record.
func (m *Machine) RestorePosition(key string, p *command.Position) bool {
	had := m.positions[key]
	if had != nil && (had.Incarnation > p.Incarnation || had.Incarnation == p.Incarnation && had.Through >= p.Through) {
		return false
	}
	m.positions[strings.Clone(key)] = p
	m.dirtyPos[key] = struct{}{}
	return true
}

func (m *Machine) ingest(c *command.Ingest, r *Result) error {
	key := posKey(c.Edge, c.UID)
	pos := m.positions[key]
	r.Position = pos
	switch {
	case pos != nil && c.Incarnation < pos.Incarnation:
		r.Err = command.ErrStaleIncarnation
		return nil
	case pos != nil && c.Incarnation == pos.Incarnation:
		switch {
		case c.Through <= pos.Through:
			r.Duplicate = true
			return nil
		case c.First != pos.Through+1:
			r.Err = command.ErrOutOfOrder
			return nil
		case c.PrevChain != pos.Chain:
			r.Err = command.ErrDiverged
			return nil
		}
	case c.First != c.Base || c.PrevChain != command.Seed(c.UID, c.Incarnation, c.Base):
		r.Err = command.ErrOutOfOrder
		return nil
	}
	for i := range c.Msgs {
		if s := c.Msgs[i].Subject; len(s) > storage.MaxSubject || !subject.Valid(s) || subject.HasWildcard(s) {
			r.Err = fmt.Errorf("%w: a message's subject is not valid", command.ErrMalformed)
			return nil
		}
	}
	if !covers(c) {
		r.Err = command.ErrOutOfOrder
		return nil
	}
	if m.cfg.Sealed {
		r.Err = ErrFull
		return nil
	}
	if m.cfg.Discard == api.DiscardNew {
		st := m.store.State()
		var size uint64
		for i := range c.Msgs {
			size += (&storage.Message{Subject: c.Msgs[i].Subject, Header: c.Msgs[i].Header, Data: c.Msgs[i].Data}).Size()
		}
		if m.cfg.MaxMsgs > 0 && st.Msgs+uint64(len(c.Msgs)) > uint64(m.cfg.MaxMsgs) ||
			m.cfg.MaxBytes > 0 && st.Bytes+size > uint64(m.cfg.MaxBytes) {
			r.Err = ErrFull
			return nil
		}
	}
	next := &command.Position{Incarnation: c.Incarnation, Through: c.Through, Chain: c.Chain}
	if pos != nil {
		next.Gaps, next.Msgs, next.Updated = pos.Gaps, pos.Msgs, pos.Updated
		if pos.Incarnation == c.Incarnation {
			next.Ladder = append(next.Ladder, pos.Ladder[max(0, len(pos.Ladder)-command.LadderSize+1):]...)
		}
	}
	next.Ladder = append(next.Ladder, command.Rung{Through: c.Through, Chain: c.Chain})
	for _, g := range c.Gaps {
		next.Gaps += g.Last - g.First + 1
	}
	for i := range c.Msgs {
		in := &c.Msgs[i]
		msg := storage.Message{Time: max(in.Time, m.lastTime), Subject: in.Subject, Header: in.Header, Data: in.Data}
		var ttl time.Duration
		if m.cfg.AllowMsgTTL {
			ttl = headerTTL(in.Header)
		}
		if err := m.append(&msg, ttl); err != nil {
			return err
		}
		next.Msgs++
		next.Updated = msg.Time
		if r.Seq == 0 {
			r.Seq = msg.Seq
		}
		if err := m.enforce(in.Subject); err != nil {
			return err
		}
	}
	if pos == nil {
		m.forgetLives(c.Edge)
	}
	m.positions[key] = next
	m.dirtyPos[key] = struct{}{}
	r.Position = next
	return nil
}

// maxLives bounds the positions kept of one edge: a stream that it creates anew
// over and over, or keeps in memory only, takes a new one each time.
const maxLives = 256

// forgetLives makes room for one more position of an edge: it drops those that
// have not moved for the longest time.
func (m *Machine) forgetLives(edge string) {
	var lives []string
	for key := range m.positions {
		if strings.HasPrefix(key, edge) && len(key) == len(edge)+1+2*16 {
			lives = append(lives, key)
		}
	}
	if len(lives) < maxLives {
		return
	}
	slices.SortFunc(lives, func(a, b string) int {
		if c := cmp.Compare(m.positions[a].Updated, m.positions[b].Updated); c != 0 {
			return c
		}
		return strings.Compare(a, b)
	})
	for _, key := range lives[:len(lives)-maxLives+1] {
		delete(m.positions, key)
		m.dirtyPos[key] = struct{}{}
	}
}

// covers reports whether gaps and messages together are every sequence from
// First through Through, once and in order.
func covers(c *command.Ingest) bool {
	next, g, i := c.First, 0, 0
	for next <= c.Through && next != 0 {
		switch {
		case i < len(c.Msgs) && c.Msgs[i].Seq == next:
			i++
			next++
		case g < len(c.Gaps) && c.Gaps[g].First == next && c.Gaps[g].Last >= next && c.Gaps[g].Last <= c.Through:
			next = c.Gaps[g].Last + 1
			g++
		default:
			return false
		}
	}
	return i == len(c.Msgs) && g == len(c.Gaps) && c.First <= c.Through
}

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
