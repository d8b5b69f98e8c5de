//go:build linux && (amd64 || arm64)

package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"petiole/faults/rig"
)

// published returns what a client knows after three acknowledged publishes and
// one whose answer never came, and what the stream holds.
func published() (*truth, map[string][]rig.Held) {
	t := newTruth()
	s := t.streams[keepStream]
	s.created = done
	var held []rig.Held
	for i, id := range []string{"a-0", "a-1", "a-2", "a-3"} {
		sum := rig.Sum{byte(i)}
		p := &sent{sum: sum}
		if i < 3 {
			p.seq = uint64(i + 1)
		}
		s.publishes[id] = p
		held = append(held, rig.Held{Seq: uint64(i + 1), Attempt: id, Sum: sum})
	}
	return t, map[string][]rig.Held{keepStream: held}
}

func TestSettle(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*truth, map[string][]rig.Held)
		wrong  string // part of the complaint; empty: none
		left   int    // publishes that have to be there from now on
	}{
		{"as it should", func(*truth, map[string][]rig.Held) {}, "", 4},
		{"the unanswered one was not stored", func(_ *truth, h map[string][]rig.Held) { h[keepStream] = h[keepStream][:3] }, "", 3},
		{"missing", func(_ *truth, h map[string][]rig.Held) { h[keepStream] = slices.Delete(h[keepStream], 1, 2) }, "a-1 was acknowledged with 2 and is not there", 4},
		{"twice", func(_ *truth, h map[string][]rig.Held) {
			h[keepStream] = append(h[keepStream], rig.Held{Seq: 5, Attempt: "a-0"})
		}, "twice", 4},
		{"altered", func(_ *truth, h map[string][]rig.Held) { h[keepStream][1].Sum[3]++ }, "other bytes", 4},
		{"elsewhere", func(_ *truth, h map[string][]rig.Held) { h[keepStream][2].Seq = 9 }, "at 9, acknowledged with 3", 4},
		{"foreign", func(_ *truth, h map[string][]rig.Held) { h[keepStream][3].Attempt = "b" }, "never published", 3},
		{"foreign stream", func(_ *truth, h map[string][]rig.Held) { h["X"] = nil }, "nobody created", 4},
		{"stream gone", func(_ *truth, h map[string][]rig.Held) { delete(h, keepStream) }, "is gone", 4},
		{"stream perhaps deleted", func(t *truth, h map[string][]rig.Held) {
			t.streams[keepStream].deleted = perhaps
			delete(h, keepStream)
		}, "", 0},
		{"stream still there", func(t *truth, _ map[string][]rig.Held) { t.streams[keepStream].deleted = done }, "was deleted", 4},
		{"message deleted", func(t *truth, h map[string][]rig.Held) {
			t.streams[keepStream].removed[2] = done
			h[keepStream] = slices.Delete(h[keepStream], 1, 2)
		}, "", 3},
		{"message perhaps deleted", func(t *truth, _ map[string][]rig.Held) { t.streams[keepStream].removed[2] = perhaps }, "", 4},
		{"deleted message still there", func(t *truth, _ map[string][]rig.Held) { t.streams[keepStream].removed[2] = done }, "which was deleted", 4},
		{"purged", func(t *truth, h map[string][]rig.Held) { purging(t, done); h[keepStream] = h[keepStream][3:] }, "", 1},
		{"perhaps purged, and was not", func(t *truth, _ map[string][]rig.Held) { purging(t, perhaps) }, "", 4},
		{"perhaps purged, and was", func(t *truth, h map[string][]rig.Held) { purging(t, perhaps); h[keepStream] = h[keepStream][3:] }, "", 1},
		{"half purged", func(t *truth, h map[string][]rig.Held) { purging(t, perhaps); h[keepStream] = h[keepStream][2:] }, "not there", 4},
		{"purged and still there", func(t *truth, _ map[string][]rig.Held) { purging(t, done) }, "which was purged", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			truth, held := published()
			tt.change(truth, held)
			y := &tally{}
			truth.settle(y, held)
			got := strings.Join(y.wrong, "; ")
			if tt.wrong == "" && got != "" || !strings.Contains(got, tt.wrong) {
				t.Errorf("got %q, want %q", got, tt.wrong)
			}
			if n := len(truth.streams[keepStream].publishes); n != tt.left {
				t.Errorf("%d publishes are left, want %d", n, tt.left)
			}
		})
	}
}

func purging(t *truth, f fate) {
	s := t.streams[keepStream]
	s.purged = f
	for _, id := range []string{"a-0", "a-1", "a-2"} {
		s.before[id] = true
	}
}

func TestLateAcknowledgement(t *testing.T) {
	truth := newTruth()
	truth.acknowledged("in time", func() {})
	truth.failedAt = time.Now().Add(-time.Millisecond)
	truth.acknowledged("too late", func() {})
	if len(truth.late) != 1 || !strings.Contains(truth.late[0], "too late") {
		t.Errorf("%q", truth.late)
	}
}
