package stream

import (
	"cmp"
	"encoding/hex"
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

// ErrFull says that a batch was refused because the stream refuses new
// messages when it is full.
var ErrFull = errors.New("stream is full")

// posKey is the key of an edge's stream, without PrefixPos.
func posKey(edge string, uid [16]byte) string { return edge + "/" + hex.EncodeToString(uid[:]) }

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
