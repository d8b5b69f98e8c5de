package consumer

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/storage"
)

// snapshotVersion is the first octet of a snapshot.
const snapshotVersion = 1

// Snapshot encodes the machine for a checkpoint and clears Dirty. What is only
// live (pull requests, windows of flow control, pins) is not part of it.
func (m *Machine) Snapshot() []byte {
	cfg, err := json.Marshal(m.cfg)
	if err != nil {
		// A configuration came from JSON; only a programming error gets here.
		panic(fmt.Sprintf("consumer %q: encoding the configuration: %v", m.name, err))
	}
	b := make([]byte, 0, 128+len(cfg)+12*len(m.pend)+6*len(m.redeliv))
	u := func(v uint64) { b = binary.AppendUvarint(b, v) }
	i := func(v int64) { b = binary.AppendVarint(b, v) }
	bytes := func(v []byte) { u(uint64(len(v))); b = append(b, v...) }
	b = append(b, snapshotVersion)
	bytes([]byte(m.name))
	i(m.created.UnixNano())
	bytes(cfg)
	for _, v := range []uint64{m.rev, m.sseq, m.dseq, m.lastS, m.floorD, m.floorS, m.resume} {
		u(v)
	}
	i(m.lastDlv)
	i(m.lastAck)
	seqs := slices.Sorted(maps.Keys(m.pend))
	u(uint64(len(seqs)))
	prev, prevT := uint64(0), int64(0)
	for _, s := range seqs {
		p := m.pend[s]
		u(s - prev)
		u(p.dseq)
		i(p.ts - prevT)
		prev, prevT = s, p.ts
	}
	seqs = slices.Sorted(maps.Keys(m.redeliv))
	u(uint64(len(seqs)))
	prev = 0
	for _, s := range seqs {
		u(s - prev)
		u(m.redeliv[s])
		prev = s
	}
	q := m.rdq.all()
	u(uint64(len(q)))
	for _, s := range q {
		u(s)
	}
	u(uint64(len(m.skip)))
	prev = 0
	for _, s := range m.skip {
		u(s - prev)
		prev = s
	}
	seqs = slices.Sorted(maps.Keys(m.unsettled))
	u(uint64(len(seqs)))
	prev = 0
	for _, s := range seqs {
		u(s - prev)
		prev = s
	}
	m.dirty = false
	return b
}

// Restore makes a machine from what [Machine.Snapshot] returned. The snapshot
// carries name, configuration and time of creation with it. It fails with
// [storage.ErrCorrupt].
func Restore(snapshot []byte, env Env) (*Machine, error) {
	r := snapReader{b: snapshot}
	if len(r.b) == 0 || r.b[0] != snapshotVersion {
		return nil, fmt.Errorf("consumer snapshot: unknown version: %w", storage.ErrCorrupt)
	}
	r.b = r.b[1:]
	name := string(r.bytes())
	created := time.Unix(0, r.int()).UTC()
	var cfg api.ConsumerConfig
	if err := json.Unmarshal(r.bytes(), &cfg); err != nil {
		return nil, fmt.Errorf("configuration in snapshot of consumer %q: %v: %w", name, err, storage.ErrCorrupt)
	}
	m := newMachine(name, &cfg, created, env)
	m.durable = true
	for _, v := range []*uint64{&m.rev, &m.sseq, &m.dseq, &m.lastS, &m.floorD, &m.floorS, &m.resume} {
		*v = r.uint()
	}
	m.lastDlv, m.lastAck = r.int(), r.int()
	prev, prevT := uint64(0), int64(0)
	for range r.count() {
		prev += r.uint()
		p := pending{dseq: r.uint()}
		prevT += r.int()
		p.ts = prevT
		m.pend[prev] = p
	}
	prev = 0
	for range r.count() {
		prev += r.uint()
		m.redeliv[prev] = r.uint()
	}
	for range r.count() {
		if s := r.uint(); m.pend[s].dseq != 0 {
			m.rdq.push(s)
		}
	}
	prev = 0
	for range r.count() {
		prev += r.uint()
		m.skip = append(m.skip, prev)
	}
	if len(r.b) > 0 { // the first snapshots end here
		prev = 0
		for range r.count() {
			prev += r.uint()
			m.unsettled[prev] = struct{}{}
		}
	}
	if r.bad || len(r.b) != 0 || m.dseq == 0 {
		return nil, fmt.Errorf("snapshot of consumer %q: %w", name, storage.ErrCorrupt)
	}
	m.schedule()
	return m, nil
}

type snapReader struct {
	b   []byte
	bad bool
}

func (r *snapReader) uint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *snapReader) int() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *snapReader) bytes() []byte {
	n := r.uint()
	if n > uint64(len(r.b)) {
		r.b, r.bad = nil, true
		return nil
	}
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

// count reads how many items follow, each of an octet at least.
func (r *snapReader) count() uint64 {
	n := r.uint()
	if n > uint64(len(r.b)) {
		r.b, r.bad = nil, true
		return 0
	}
	return n
}
