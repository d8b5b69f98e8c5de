package stream

import (
	"container/heap"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/memstore"
)

// unlimited is a normalized configuration without limits.
func unlimited() api.StreamConfig {
	return api.StreamConfig{
		Name: "S", Subjects: []string{">"}, MaxConsumers: -1, MaxMsgs: -1, MaxBytes: -1, MaxMsgsPer: -1, MaxMsgSize: -1,
		Replicas: 1, Duplicates: 2 * time.Minute,
	}
}

func newMachine(t testing.TB, tweak func(*api.StreamConfig)) *Machine {
	t.Helper()
	cfg := unlimited()
	if tweak != nil {
		tweak(&cfg)
	}
	m, err := New(cfg, [16]byte{1}, memstore.New())
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func header(kv ...string) []byte {
	if len(kv) == 0 {
		return nil
	}
	b := []byte("NATS/1.0\r\n")
	for i := 0; i < len(kv); i += 2 {
		b = append(b, kv[i]+": "+kv[i+1]+"\r\n"...)
	}
	return append(b, "\r\n"...)
}

func pub(at int64, subject, data string, hdr ...string) []byte {
	return (&command.Publish{Time: at, Steady: at, Subject: subject, Header: header(hdr...), Data: []byte(data)}).AppendTo(nil)
}

func apply(t testing.TB, m *Machine, rec []byte) Result {
	t.Helper()
	r := m.Apply(rec)
	if r.Fatal != nil {
		t.Fatal(r.Fatal)
	}
	return r
}

// seqs lists the sequences held.
func seqs(t testing.TB, m *Machine) []uint64 {
	t.Helper()
	list := []uint64{}
	if err := m.store.Range(0, func(msg storage.Message) bool {
		list = append(list, msg.Seq)
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return list
}

const sec = int64(time.Second)

// Where the wall clock leaps, message ids are known for as long as they would be
// without, and a restart keeps that.
func TestWindowAndLeaps(t *testing.T) {
	const year = 365 * 24 * 3600 * sec
	publish := func(wall, steady int64, id string) []byte {
		return (&command.Publish{Time: wall, Steady: steady, Subject: "a", Header: header("Nats-Msg-Id", id)}).AppendTo(nil)
	}
	for name, leap := range map[string]int64{"ahead": 50 * year, "back": -30 * year} {
		t.Run(name, func(t *testing.T) {
			store := memstore.New()
			open := func() *Machine {
				m, err := New(unlimited(), [16]byte{1}, store)
				if err != nil {
					t.Fatal(err)
				}
				return m
			}
			m := open()
			from := 40 * year
			apply(t, m, publish(from, from, "i"))
			for i, s := range []struct {
				after int64
				dup   bool
			}{{60 * sec, true}, {119 * sec, true}, {121 * sec, false}, {240 * sec, true}, {242 * sec, false}} {
				if r := apply(t, m, publish(from+leap+s.after, from+s.after, "i")); r.Duplicate != s.dup {
					t.Errorf("after %ds: duplicate %v", s.after/sec, r.Duplicate)
				}
				if !store.Freeze(storage.LSN(i+1), m.Changes()) {
					t.Fatal("not frozen")
				}
				m.Saved()
				if err := store.Checkpoint(); err != nil {
					t.Fatal(err)
				}
				m = open()
				if steady, wall := m.Window(); steady != from+s.after || wall != from+leap+s.after {
					t.Errorf("after %ds and a restart: %d, %d", s.after/sec, steady, wall)
				}
			}
			for i := range int64(1000) {
				apply(t, m, publish(from+leap+i*sec, from+i*sec, fmt.Sprint(i)))
			}
			if n := len(m.ids.byID); n > 122 {
				t.Errorf("%d ids are kept", n)
			}
		})
	}
}

func TestPublish(t *testing.T) {
	type step struct {
		rec  []byte
		seq  uint64 // expected sequence; 0: refused
		dup  bool
		code uint16 // expected error
		text string // expected description
	}
	for _, tc := range []struct {
		name  string
		cfg   func(*api.StreamConfig)
		steps []step
		held  []uint64
	}{
		{"plain", nil, []step{{rec: pub(1, "a", "x"), seq: 1}, {rec: pub(2, "a", ""), seq: 2}}, []uint64{1, 2}},
		{"first sequence", func(c *api.StreamConfig) { c.FirstSeq = 100 }, []step{{rec: pub(1, "a", ""), seq: 100}}, []uint64{100}},
		{"message id within the window", nil, []step{
			{rec: pub(1, "a", "x", "Nats-Msg-Id", "i"), seq: 1},
			{rec: pub(120*sec, "b", "y", "Nats-Msg-Id", "i"), seq: 1, dup: true},
			{rec: pub(120*sec+1, "b", "z", "Nats-Msg-Id", "i"), seq: 2},
		}, []uint64{1, 2}},
		{"expected stream", nil, []step{
			{rec: pub(1, "a", "", "Nats-Expected-Stream", "T"), code: 10060, text: "expected stream does not match"},
			{rec: pub(1, "a", "", "Nats-Expected-Stream", "S"), seq: 1},
		}, []uint64{1}},
		{"expected last sequence", nil, []step{
			{rec: pub(1, "a", "", "Nats-Expected-Last-Sequence", "1"), code: 10071, text: "wrong last sequence: 0"},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Sequence", "0"), seq: 1},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Sequence", "nonsense"), code: 10071, text: "wrong last sequence: 1"},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Sequence", "1"), seq: 2},
		}, []uint64{1, 2}},
		{"expected last sequence of the subject", nil, []step{
			{rec: pub(1, "a", ""), seq: 1},
			{rec: pub(1, "b", "", "Nats-Expected-Last-Subject-Sequence", "0"), seq: 2},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Subject-Sequence", "2"), code: 10071, text: "wrong last sequence: 1"},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Subject-Sequence", "1"), seq: 3},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Subject-Sequence", "2", "Nats-Expected-Last-Subject-Sequence-Subject", "b"), seq: 4},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Subject-Sequence", "4", "Nats-Expected-Last-Subject-Sequence-Subject", "*"), seq: 5},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Subject-Sequence-Subject", "b"), code: 10193, text: "missing sequence for expected last sequence per subject"},
		}, []uint64{1, 2, 3, 4, 5}},
		{"expected last message id", nil, []step{
			{rec: pub(1, "a", "", "Nats-Msg-Id", "i"), seq: 1},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Msg-Id", "j"), code: 10070, text: "wrong last msg ID: i"},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Msg-Id", "i", "Nats-Msg-Id", "j"), seq: 2},
			{rec: pub(1, "a", ""), seq: 3},
			{rec: pub(1, "a", "", "Nats-Expected-Last-Msg-Id", "j"), code: 10070, text: "wrong last msg ID: "},
		}, []uint64{1, 2, 3}},
		{"size", func(c *api.StreamConfig) { c.MaxMsgSize = 4 }, []step{
			{rec: pub(1, "a", "12345"), code: 10054, text: "message size exceeds maximum allowed"},
			{rec: pub(1, "a", "1234"), seq: 1},
		}, []uint64{1}},
		{"header size", nil, []step{
			{rec: pub(1, "a", "", "X", strings.Repeat("x", 64<<10)), code: 10097, text: "header size exceeds maximum allowed of 64k"},
		}, []uint64{}},
		{"sealed", func(c *api.StreamConfig) { c.Sealed = true }, []step{
			{rec: pub(1, "a", ""), code: 10109, text: "invalid operation on sealed stream"},
		}, []uint64{}},
		{"maximum messages, discard old", func(c *api.StreamConfig) { c.MaxMsgs = 2 }, []step{
			{rec: pub(1, "a", ""), seq: 1}, {rec: pub(1, "b", ""), seq: 2}, {rec: pub(1, "c", ""), seq: 3},
		}, []uint64{2, 3}},
		{"maximum messages, discard new", func(c *api.StreamConfig) { c.MaxMsgs, c.Discard = 2, api.DiscardNew }, []step{
			{rec: pub(1, "a", ""), seq: 1},
			{rec: pub(1, "b", ""), seq: 2},
			{rec: pub(1, "c", ""), code: 10077, text: "maximum messages exceeded"},
		}, []uint64{1, 2}},
		{"maximum octets, discard old", func(c *api.StreamConfig) { c.MaxBytes = 100 }, []step{
			{rec: pub(1, "a", "0123456789"), seq: 1}, {rec: pub(1, "b", "0123456789"), seq: 2}, {rec: pub(1, "c", "0123456789"), seq: 3},
		}, []uint64{2, 3}},
		{"maximum octets, discard new", func(c *api.StreamConfig) { c.MaxBytes, c.Discard = 100, api.DiscardNew }, []step{
			{rec: pub(1, "a", "0123456789"), seq: 1},
			{rec: pub(1, "b", "0123456789"), seq: 2},
			{rec: pub(1, "c", "0123456789"), code: 10077, text: "maximum bytes exceeded"},
		}, []uint64{1, 2}},
		{"maximum messages of a subject", func(c *api.StreamConfig) { c.MaxMsgsPer = 2 }, []step{
			{rec: pub(1, "a", ""), seq: 1}, {rec: pub(1, "b", ""), seq: 2}, {rec: pub(1, "a", ""), seq: 3}, {rec: pub(1, "a", ""), seq: 4},
		}, []uint64{2, 3, 4}},
		{"maximum messages of a subject, discard new", func(c *api.StreamConfig) {
			c.MaxMsgsPer, c.Discard, c.DiscardNewPer = 1, api.DiscardNew, true
		}, []step{
			{rec: pub(1, "a", ""), seq: 1},
			{rec: pub(1, "a", ""), code: 10077, text: "maximum messages per subject exceeded"},
			{rec: pub(1, "b", ""), seq: 2},
		}, []uint64{1, 2}},
		{"a full stream takes what replaces", func(c *api.StreamConfig) {
			c.MaxMsgs, c.MaxMsgsPer, c.Discard = 2, 1, api.DiscardNew
		}, []step{
			{rec: pub(1, "a", ""), seq: 1},
			{rec: pub(1, "b", ""), seq: 2},
			{rec: pub(1, "c", ""), code: 10077, text: "maximum messages exceeded"},
			{rec: pub(1, "a", ""), seq: 3},
		}, []uint64{2, 3}},
		{"rollup", func(c *api.StreamConfig) { c.AllowRollup = true }, []step{
			{rec: pub(1, "a", ""), seq: 1},
			{rec: pub(1, "b", ""), seq: 2},
			{rec: pub(1, "a", "", "Nats-Rollup", "sub"), seq: 3},
			{rec: pub(1, "a", "", "Nats-Rollup", "some"), code: 10111, text: `rollup value invalid: "some"`},
		}, []uint64{2, 3}},
		{"rollup of all", func(c *api.StreamConfig) { c.AllowRollup = true }, []step{
			{rec: pub(1, "a", ""), seq: 1}, {rec: pub(1, "b", ""), seq: 2}, {rec: pub(1, "a", "", "Nats-Rollup", "all"), seq: 3},
		}, []uint64{3}},
		{"rollup not allowed", nil, []step{
			{rec: pub(1, "a", "", "Nats-Rollup", "sub"), code: 10111, text: "rollup not permitted"},
		}, []uint64{}},
		{"time to live not allowed", nil, []step{
			{rec: pub(1, "a", "", "Nats-TTL", "5s"), code: 10166, text: "per-message TTL is disabled"},
		}, []uint64{}},
		{"time to live invalid", func(c *api.StreamConfig) { c.AllowMsgTTL = true }, []step{
			{rec: pub(1, "a", "", "Nats-TTL", "100ms"), code: 10165, text: "invalid per-message TTL"},
			{rec: pub(1, "a", "", "Nats-TTL", "soon"), code: 10165, text: "invalid per-message TTL"},
			{rec: pub(1, "a", "", "Nats-TTL", "1h"), seq: 1},
			{rec: pub(1, "a", "", "Nats-TTL", "30"), seq: 2},
			{rec: pub(1, "a", "", "Nats-TTL", "never"), seq: 3},
		}, []uint64{1, 2, 3}},
		{"features that are not there", nil, []step{
			{rec: pub(1, "a", "", "Nats-Incr", "1"), code: 10168, text: "message counters is disabled"},
			{rec: pub(1, "a", "", "Nats-Batch-Id", "1"), code: 10174, text: "atomic publish is disabled"},
			{rec: pub(1, "a", "", "Nats-Schedule", "@at 1"), code: 10188, text: "message schedules is disabled"},
		}, []uint64{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMachine(t, tc.cfg)
			for i, s := range tc.steps {
				r := apply(t, m, s.rec)
				var code uint16
				var text string
				if r.Refused != nil {
					code, text = r.Refused.ErrCode, r.Refused.Description
				}
				if r.Seq != s.seq || r.Duplicate != s.dup || code != s.code || text != s.text {
					t.Errorf("step %d: seq %d, duplicate %v, error %d %q; want %d, %v, %d %q",
						i, r.Seq, r.Duplicate, code, text, s.seq, s.dup, s.code, s.text)
				}
			}
			if got := seqs(t, m); !slices.Equal(got, tc.held) {
				t.Errorf("holds %v, want %v", got, tc.held)
			}
		})
	}
}

func TestBatch(t *testing.T) {
	msg := func(subject string, hdr ...string) command.Publish {
		return command.Publish{Time: 1, Subject: subject, Header: header(append(hdr, "Nats-Batch-Id", "b")...)}
	}
	for _, tc := range []struct {
		name string
		cfg  func(*api.StreamConfig)
		msgs []command.Publish
		code uint16
		held []uint64
	}{
		{"plain", nil, []command.Publish{msg("b"), msg("b"), msg("c")}, 0, []uint64{1, 2, 3, 4}},
		{"positions within", nil, []command.Publish{
			msg("b", "Nats-Expected-Last-Sequence", "1"),
			msg("b", "Nats-Expected-Last-Subject-Sequence", "2"),
			msg("a", "Nats-Expected-Last-Subject-Sequence", "1"),
		}, 0, []uint64{1, 2, 3, 4}},
		{"the last one is wrong", nil, []command.Publish{msg("b"), msg("b", "Nats-Expected-Last-Subject-Sequence", "9")}, 10071, []uint64{1}},
		{"a message id twice", nil, []command.Publish{msg("b", "Nats-Msg-Id", "i"), msg("b", "Nats-Msg-Id", "i")}, 10201, []uint64{1}},
		{"a message id known", nil, []command.Publish{msg("b"), msg("b", "Nats-Msg-Id", "first")}, 10201, []uint64{1}},
		{"a header that is not supported", nil, []command.Publish{msg("b", "Nats-Expected-Last-Msg-Id", "i")}, 10177, []uint64{1}},
		{"too many", func(c *api.StreamConfig) { c.MaxMsgs, c.Discard = 2, api.DiscardNew }, []command.Publish{msg("b"), msg("c")}, 10077, []uint64{1}},
		{"rollup", func(c *api.StreamConfig) { c.AllowRollup = true }, []command.Publish{msg("a"), msg("a", "Nats-Rollup", "sub")}, 0, []uint64{3}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMachine(t, tc.cfg)
			apply(t, m, pub(1, "a", "", "Nats-Msg-Id", "first"))
			r := apply(t, m, (&command.Batch{Msgs: tc.msgs}).AppendTo(nil))
			var code uint16
			if r.Refused != nil {
				code = r.Refused.ErrCode
			} else if want := uint64(1 + len(tc.msgs)); r.Seq != want || r.Before != want-2 {
				t.Errorf("stored through %d with %d before, want %d", r.Seq, r.Before, want)
			}
			if got := seqs(t, m); code != tc.code || !slices.Equal(got, tc.held) {
				t.Errorf("error %d, holds %v; want %d, %v", code, got, tc.code, tc.held)
			}
		})
	}
}

func TestDeleteAndPurge(t *testing.T) {
	fill := func(t *testing.T, tweak func(*api.StreamConfig)) *Machine {
		m := newMachine(t, nil)
		for i := range 6 {
			apply(t, m, pub(int64(i), []string{"a", "b"}[i%2], ""))
		}
		cfg := *m.Config()
		if tweak != nil {
			tweak(&cfg)
		}
		b, err := json.Marshal(&cfg)
		if err != nil {
			t.Fatal(err)
		}
		apply(t, m, (&command.SetConfig{JSON: b}).AppendTo(nil))
		return m
	}
	del := func(seq uint64) []byte { return (&command.DeleteMsg{Seq: seq}).AppendTo(nil) }
	purge := func(subj string, seq, keep uint64) []byte {
		return (&command.Purge{Subject: subj, Seq: seq, Keep: keep}).AppendTo(nil)
	}
	for _, tc := range []struct {
		name    string
		cfg     func(*api.StreamConfig)
		rec     []byte
		removed uint64
		code    uint16
		held    []uint64
	}{
		{"delete", nil, del(3), 1, 0, []uint64{1, 2, 4, 5, 6}},
		{"delete what is not there", nil, del(7), 0, 10043, []uint64{1, 2, 3, 4, 5, 6}},
		{"delete denied", func(c *api.StreamConfig) { c.DenyDelete = true }, del(3), 0, 10057, []uint64{1, 2, 3, 4, 5, 6}},
		{"purge", nil, purge("", 0, 0), 6, 0, []uint64{}},
		{"purge a subject", nil, purge("a", 0, 0), 3, 0, []uint64{2, 4, 6}},
		{"purge below", nil, purge("", 4, 0), 3, 0, []uint64{4, 5, 6}},
		{"purge and keep", nil, purge("b", 0, 1), 2, 0, []uint64{1, 3, 5, 6}},
		{"purge denied", func(c *api.StreamConfig) { c.DenyPurge = true }, purge("", 0, 0), 0, 10110, []uint64{1, 2, 3, 4, 5, 6}},
		{"sealed", func(c *api.StreamConfig) { c.Sealed = true }, purge("", 0, 0), 0, 10109, []uint64{1, 2, 3, 4, 5, 6}},
		{"a lower limit", func(c *api.StreamConfig) { c.MaxMsgs = 4 }, del(3), 1, 0, []uint64{4, 5, 6}},
		{"a lower limit of subjects", func(c *api.StreamConfig) { c.MaxMsgsPer = 1 }, del(5), 1, 0, []uint64{6}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := fill(t, tc.cfg)
			r := apply(t, m, tc.rec)
			var code uint16
			if r.Refused != nil {
				code = r.Refused.ErrCode
			}
			if r.Removed != tc.removed || code != tc.code {
				t.Errorf("removed %d, error %d; want %d, %d", r.Removed, code, tc.removed, tc.code)
			}
			if got := seqs(t, m); !slices.Equal(got, tc.held) {
				t.Errorf("holds %v, want %v", got, tc.held)
			}
			if next := apply(t, m, pub(9, "z", "")); !m.cfg.Sealed && next.Seq != 7 {
				t.Errorf("sequences go on at %d", next.Seq)
			}
		})
	}
}

// Spans that reach beyond the end of time last until then, instead of being
// over at once.
func TestExpiryFarAway(t *testing.T) {
	m := newMachine(t, func(c *api.StreamConfig) { c.MaxAge, c.AllowMsgTTL = math.MaxInt64, true })
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano()
	apply(t, m, pub(now, "a", "", "Nats-TTL", "2562047h"))
	apply(t, m, pub(now, "a", ""))
	if r := apply(t, m, (&command.Expire{Now: now + 1}).AppendTo(nil)); r.Removed != 0 {
		t.Errorf("removed %d", r.Removed)
	}
	if at, ok := m.NextExpiry(); !ok || at != math.MaxInt64 {
		t.Errorf("next expiry %d", at)
	}
}

func TestExpiry(t *testing.T) {
	m := newMachine(t, func(c *api.StreamConfig) { c.MaxAge, c.AllowMsgTTL = 10*time.Second, true })
	expire := func(now int64) Result { return apply(t, m, (&command.Expire{Now: now}).AppendTo(nil)) }
	next := func(want int64) {
		t.Helper()
		if at, ok := m.NextExpiry(); at != want || ok != (want != 0) {
			t.Errorf("next expiry %d (%v), want %d", at, ok, want)
		}
	}
	next(0)
	apply(t, m, pub(1*sec, "a", ""))                      // 1, at 11 s
	apply(t, m, pub(2*sec, "a", "", "Nats-TTL", "3s"))    // 2, at 5 s
	apply(t, m, pub(3*sec, "a", "", "Nats-TTL", "never")) // 3
	apply(t, m, pub(4*sec, "a", ""))                      // 4, at 14 s
	next(5 * sec)
	if r := expire(5*sec - 1); r.Removed != 0 {
		t.Errorf("removed %d too early", r.Removed)
	}
	if r := expire(5 * sec); r.Removed != 1 {
		t.Errorf("removed %d", r.Removed)
	}
	next(11 * sec)
	if r := expire(11 * sec); r.Removed != 1 {
		t.Errorf("removed %d", r.Removed)
	}
	next(14 * sec)
	expire(100 * sec)
	if got := seqs(t, m); !slices.Equal(got, []uint64{3}) {
		t.Errorf("holds %v, want what never expires", got)
	}
	next(0)
}

type batch struct {
	inc, base, first uint64
	msgs             []uint64
	gaps             []command.Gap
	prev, chain      byte // 0: the seed of inc and base
}

func (b batch) command() *command.Ingest {
	uid := [16]byte{9}
	c := &command.Ingest{Edge: "E", UID: uid, Incarnation: b.inc, Base: b.base, First: b.first, Gaps: b.gaps}
	c.PrevChain = command.Seed(uid, b.inc, b.base)
	if b.prev != 0 {
		c.PrevChain = [16]byte{b.prev}
	}
	c.Chain = [16]byte{b.chain}
	for _, seq := range b.msgs {
		c.Through = max(c.Through, seq)
		c.Msgs = append(c.Msgs, command.IngestMsg{Seq: seq, Time: int64(seq), Subject: "e", Data: fmt.Append(nil, seq)})
	}
	for _, g := range b.gaps {
		c.Through = max(c.Through, g.Last)
	}
	return c
}

func TestIngest(t *testing.T) {
	gap := func(first, last uint64) []command.Gap { return []command.Gap{{First: first, Last: last, Reason: 1}} }
	type step struct {
		batch
		err     error
		dup     bool
		through uint64 // of the position afterwards; 0: none
		held    uint64 // messages afterwards
	}
	first := step{batch{inc: 1, base: 1, first: 1, msgs: []uint64{1, 2, 3}, chain: 3}, nil, false, 3, 3}
	for _, tc := range []struct {
		name  string
		steps []step
	}{
		{"in order", []step{first, {batch{inc: 1, base: 1, first: 4, msgs: []uint64{4}, prev: 3, chain: 4}, nil, false, 4, 4}}},
		{"again", []step{first, {first.batch, nil, true, 3, 3}}},
		{"part of it again", []step{first, {batch{inc: 1, base: 1, first: 2, msgs: []uint64{2, 3}, prev: 1, chain: 3}, nil, true, 3, 3}}},
		{"a hole", []step{first, {batch{inc: 1, base: 1, first: 5, msgs: []uint64{5}, prev: 4, chain: 5}, command.ErrOutOfOrder, false, 3, 3}}},
		{"overlapping", []step{first, {batch{inc: 1, base: 1, first: 3, msgs: []uint64{3, 4}, prev: 2, chain: 4}, command.ErrOutOfOrder, false, 3, 3}}},
		{"another history", []step{first, {batch{inc: 1, base: 1, first: 4, msgs: []uint64{4}, prev: 9, chain: 4}, command.ErrDiverged, false, 3, 3}}},
		{"not from the base", []step{{batch{inc: 1, base: 1, first: 2, msgs: []uint64{2}, chain: 2}, command.ErrOutOfOrder, false, 0, 0}}},
		{"not from the seed", []step{{batch{inc: 1, base: 1, first: 1, msgs: []uint64{1}, prev: 7, chain: 2}, command.ErrOutOfOrder, false, 0, 0}}},
		{"a later incarnation", []step{
			first,
			{batch{inc: 2, base: 2, first: 2, msgs: []uint64{2, 3}, chain: 33}, nil, false, 3, 5},
			{batch{inc: 1, base: 1, first: 4, msgs: []uint64{4}, prev: 3, chain: 4}, command.ErrStaleIncarnation, false, 3, 5},
			{batch{inc: 2, base: 2, first: 4, msgs: []uint64{4}, prev: 33, chain: 34}, nil, false, 4, 6},
		}},
		{"gaps", []step{
			{batch{inc: 1, base: 1, first: 1, msgs: []uint64{1, 4}, gaps: gap(2, 3), chain: 4}, nil, false, 4, 2},
			{batch{inc: 1, base: 1, first: 5, gaps: gap(5, 9), prev: 4, chain: 9}, nil, false, 9, 2},
		}},
		{"a sequence left out", []step{{batch{inc: 1, base: 1, first: 1, msgs: []uint64{1, 3}, chain: 3}, command.ErrOutOfOrder, false, 0, 0}}},
		{"a gap over a message", []step{{batch{inc: 1, base: 1, first: 1, msgs: []uint64{1, 2}, gaps: gap(2, 3), chain: 3}, command.ErrOutOfOrder, false, 0, 0}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMachine(t, nil)
			for i, s := range tc.steps {
				r := apply(t, m, s.command().AppendTo(nil))
				if !errors.Is(r.Err, s.err) || r.Duplicate != s.dup {
					t.Errorf("step %d: duplicate %v, %v; want %v, %v", i, r.Duplicate, r.Err, s.dup, s.err)
				}
				var through uint64
				if p, ok := m.Position("E", [16]byte{9}); ok {
					through = p.Through
					if n := len(p.Ladder); p.Ladder[n-1] != (command.Rung{Through: p.Through, Chain: p.Chain}) {
						t.Errorf("step %d: the ladder does not end at the position", i)
					}
				}
				if held := m.store.State().Msgs; through != s.through || held != s.held {
					t.Errorf("step %d: through %d with %d messages; want %d, %d", i, through, held, s.through, s.held)
				}
			}
		})
	}
}

func TestIngestLadderAndCounts(t *testing.T) {
	m := newMachine(t, nil)
	prev := byte(0)
	for i := range uint64(100) {
		b := batch{inc: 1, base: 1, first: i + 1, msgs: []uint64{i + 1}, prev: prev, chain: byte(i + 1)}
		apply(t, m, b.command().AppendTo(nil))
		prev = byte(i + 1)
	}
	p, _ := m.Position("E", [16]byte{9})
	if len(p.Ladder) != command.LadderSize || p.Ladder[0].Through != 100-command.LadderSize+1 || p.Msgs != 100 || p.Updated != 100 {
		t.Errorf("position %+v", p)
	}
}

func TestIngestIntoAFullStream(t *testing.T) {
	m := newMachine(t, func(c *api.StreamConfig) { c.MaxMsgs, c.Discard = 2, api.DiscardNew })
	r := apply(t, m, batch{inc: 1, base: 1, first: 1, msgs: []uint64{1, 2, 3}, chain: 1}.command().AppendTo(nil))
	if !errors.Is(r.Err, ErrFull) || m.store.State().Msgs != 0 {
		t.Errorf("%v, %+v", r.Err, m.store.State())
	}
}

// Random records give the same results and the same state in a machine that
// runs through and in one that is checkpointed and restored in between.
func TestRestoredMachineGoesOnAlike(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := unlimited()
		cfg.AllowRollup = true
		cfg.AllowMsgTTL = rapid.Bool().Draw(t, "ttl")
		if cfg.AllowMsgTTL && rapid.Bool().Draw(t, "markers") {
			cfg.SubjectDeleteMarkerTTL = 2 * time.Second
		}
		cfg.Duplicates = 20 * time.Nanosecond
		cfg.MaxAge = time.Duration(rapid.SampledFrom([]int{0, 30}).Draw(t, "age"))
		cfg.MaxMsgs = rapid.SampledFrom([]int64{-1, 5}).Draw(t, "msgs")
		cfg.MaxMsgsPer = rapid.SampledFrom([]int64{-1, 2}).Draw(t, "per subject")
		cfg.Discard = rapid.SampledFrom([]api.DiscardPolicy{api.DiscardOld, api.DiscardNew}).Draw(t, "discard")
		a, err := New(cfg, [16]byte{1}, memstore.New())
		if err != nil {
			t.Fatal(err)
		}
		b, err := New(cfg, [16]byte{1}, memstore.New())
		if err != nil {
			t.Fatal(err)
		}
		subject := rapid.SampledFrom([]string{"a", "b", "c.d"})
		id := rapid.SampledFrom([]string{"", "1", "2", "3"})
		now, through, prev := int64(1), uint64(0), byte(0)
		n := rapid.IntRange(1, 60).Draw(t, "records")
		for lsn := 1; lsn <= n; lsn++ {
			now += rapid.Int64Range(0, 9).Draw(t, "step")
			if rapid.IntRange(0, 4).Draw(t, "long") == 0 {
				now += sec
			}
			var rec []byte
			switch rapid.IntRange(0, 9).Draw(t, "kind") {
			default:
				var kv []string
				if id := id.Draw(t, "id"); id != "" {
					kv = append(kv, "Nats-Msg-Id", id)
				}
				switch rapid.IntRange(0, 9).Draw(t, "header") {
				case 0:
					kv = append(kv, "Nats-Rollup", rapid.SampledFrom([]string{"sub", "all"}).Draw(t, "rollup"))
				case 1:
					kv = append(kv, "Nats-Expected-Last-Msg-Id", "1")
				case 2:
					kv = append(kv, "Nats-TTL", rapid.SampledFrom([]string{"never", "1s", "2s"}).Draw(t, "ttl"))
				case 3:
					kv = append(kv, "Nats-Expected-Last-Subject-Sequence", fmt.Sprint(lsn/2))
				}
				rec = pub(now, subject.Draw(t, "subject"), fmt.Sprint(lsn), kv...)
			case 0:
				rec = (&command.DeleteMsg{Seq: rapid.Uint64Range(1, 60).Draw(t, "seq")}).AppendTo(nil)
			case 1:
				rec = (&command.Purge{Subject: subject.Draw(t, "subject"), Keep: 1}).AppendTo(nil)
			case 2:
				rec = (&command.Expire{Now: now}).AppendTo(nil)
			case 3, 4:
				c := batch{inc: 1, base: 1, first: through + 1, msgs: []uint64{through + 1, through + 2}, prev: prev, chain: byte(lsn)}
				rec = c.command().AppendTo(nil)
			case 5:
				cfg.MaxMsgs = rapid.SampledFrom([]int64{-1, 3, 9}).Draw(t, "new msgs")
				j, err := json.Marshal(&cfg)
				if err != nil {
					t.Fatal(err)
				}
				rec = (&command.SetConfig{JSON: j}).AppendTo(nil)
			}
			x, y := a.Apply(rec), b.Apply(rec)
			if x.Fatal != nil || y.Fatal != nil {
				t.Fatal(x.Fatal, y.Fatal)
			}
			if !reflect.DeepEqual(x, y) {
				t.Fatalf("record %d: %+v in the one, %+v in the other", lsn, x, y)
			}
			if p := x.Position; p != nil {
				through, prev = p.Through, p.Chain[0]
			}
			if rapid.IntRange(0, 4).Draw(t, "restore") == 0 {
				if !b.store.Freeze(storage.LSN(lsn), b.Changes()) {
					t.Fatal("not frozen")
				}
				b.Saved()
				if err := b.store.Checkpoint(); err != nil {
					t.Fatal(err)
				}
				if b, err = New(unlimited(), [16]byte{}, b.store); err != nil {
					t.Fatal(err)
				}
			}
			check(t, a, b)
		}
	})
}

func check(t *rapid.T, a, b *Machine) {
	if !reflect.DeepEqual(a.cfg, b.cfg) || a.uid != b.uid || a.lastID != b.lastID || !reflect.DeepEqual(a.positions, b.positions) {
		t.Fatalf("the machines differ:\n%+v\n%+v", a, b)
	}
	if !maps.Equal(a.ids.byID, b.ids.byID) {
		t.Fatalf("message ids %v and %v", a.ids.byID, b.ids.byID)
	}
	if x, y := a.store.State(), b.store.State(); x != y {
		t.Fatalf("states %+v and %+v", x, y)
	}
	at1, ok1 := a.NextExpiry()
	at2, ok2 := b.NextExpiry()
	if at1 != at2 || ok1 != ok2 {
		t.Fatalf("next expiry %d %v and %d %v", at1, ok1, at2, ok2)
	}
	st := a.store.State()
	switch {
	case a.cfg.MaxMsgs > 0 && st.Msgs > uint64(a.cfg.MaxMsgs):
		t.Fatalf("%d messages, limit %d", st.Msgs, a.cfg.MaxMsgs)
	case a.cfg.MaxMsgsPer > 0:
		a.store.Subjects("", func(subject string, s storage.SubjectState) bool {
			if s.Msgs > uint64(a.cfg.MaxMsgsPer) && a.cfg.Discard == api.DiscardOld {
				t.Fatalf("%d messages on %q, limit %d", s.Msgs, subject, a.cfg.MaxMsgsPer)
			}
			return true
		})
	}
}

// TestExpiryAtTheSameTime has messages of several subjects expire at the same
// time, in a machine that took them in and in one that found them in its store:
// the markers have to come in the same order.
func TestExpiryAtTheSameTime(t *testing.T) {
	a := newMachine(t, func(c *api.StreamConfig) {
		c.AllowMsgTTL, c.AllowRollup, c.SubjectDeleteMarkerTTL = true, true, time.Minute
	})
	// The clock went back: they are all stored at the time of the first.
	const n = 12
	apply(t, a, pub(9*sec, "early", "", "Nats-TTL", "1s"))
	for i := range n {
		apply(t, a, pub(int64(i), fmt.Sprint("s", i), "", "Nats-TTL", "5s"))
	}
	apply(t, a, (&command.Expire{Now: 10 * sec}).AppendTo(nil))
	b, err := New(a.cfg, a.uid, a.store)
	if err != nil {
		t.Fatal(err)
	}
	order := func(m *Machine) (list []uint64) {
		h := m.ttls
		h.heap = slices.Clone(h.heap)
		for len(h.heap) > 0 {
			list = append(list, heap.Pop(&h.heap).(ttlEntry).seq)
		}
		return list
	}
	if x, y := order(a), order(b); !slices.Equal(x, y) || !slices.IsSorted(x) {
		t.Errorf("messages expire in the order %v in the one, %v in the other", x, y)
	}
}

// TestTTLsOfMessagesGone replaces the messages of one subject again and again:
// what is remembered of them must not pile up until their time has come.
func TestTTLsOfMessagesGone(t *testing.T) {
	m := newMachine(t, func(c *api.StreamConfig) { c.AllowMsgTTL, c.MaxMsgsPer = true, 1 })
	for i := range 20_000 {
		ttl := "8760h"
		if i%2 == 0 {
			ttl = "never"
		}
		apply(t, m, pub(int64(i), "a", "", "Nats-TTL", ttl))
	}
	if h, n := len(m.ttls.heap), len(m.ttls.never); h > 5000 || n > 5000 {
		t.Errorf("%d and %d times to live are remembered for one message", h, n)
	}
	apply(t, m, pub(20_000, "b", "", "Nats-TTL", "1s"))
	apply(t, m, (&command.Expire{Now: 100 * sec}).AppendTo(nil))
	if got := seqs(t, m); !slices.Equal(got, []uint64{20_000}) {
		t.Errorf("holds %v", got)
	}
}

// An edge that comes with a new stream over and over does not fill the memory
// of the hub, nor push out the positions of other edges.
func TestIngestForgetsLives(t *testing.T) {
	m := newMachine(t, nil)
	ingest := func(edge string, life int, at int64) {
		t.Helper()
		uid := [16]byte{byte(life), byte(life >> 8)}
		c := &command.Ingest{
			Edge: edge, UID: uid, Incarnation: 1, Base: 1, First: 1, Through: 1, PrevChain: command.Seed(uid, 1, 1),
			Msgs: []command.IngestMsg{{Seq: 1, Time: at, Subject: "e"}},
		}
		if r := m.Apply(c.AppendTo(nil)); r.Err != nil || r.Fatal != nil {
			t.Fatal(r.Err, r.Fatal)
		}
	}
	ingest("OTHER", 1, 1)
	for life := range maxLives + 10 {
		ingest("E", life, int64(life+2))
		if life == maxLives-1 {
			m.Changes()
			m.Saved()
		}
	}
	var mine, others int
	m.Positions(func(edge string, uid [16]byte, _ *command.Position) {
		if edge == "OTHER" {
			others++
			return
		}
		mine++
		if life := int(uid[0]) | int(uid[1])<<8; life < 10 {
			t.Errorf("life %d is known still", life)
		}
	})
	if mine != maxLives || others != 1 {
		t.Errorf("%d positions of the edge, %d of the other", mine, others)
	}
	var set, deleted int
	for _, kv := range m.Changes() {
		switch {
		case !strings.HasPrefix(kv.Key, PrefixPos):
		case kv.Value == nil:
			deleted++
		default:
			set++
		}
	}
	if set != 10 || deleted != 10 {
		t.Errorf("a checkpoint sets %d positions and deletes %d", set, deleted)
	}
}
