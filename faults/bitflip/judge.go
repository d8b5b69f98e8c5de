//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/faults/rig"
)

// judge starts the programs on a damaged store and compares what they do with
// what is demanded.
type judge struct {
	site     *rig.Site
	template *template
	damage   *damage
	rng      *rand.Rand

	failures   []string
	lost       int
	unreported int
	found      int
	refused    bool
	log        strings.Builder

	held      map[string]map[uint64]bool // by stream: sequences found by the first check
	published map[string]map[uint64]rig.Sum
}

func (j *judge) fail(format string, args ...any) {
	if len(j.failures) == maxExamples {
		format, args = "and more", nil
	}
	if len(j.failures) <= maxExamples {
		j.failures = append(j.failures, fmt.Sprintf(format, args...))
	}
}

const maxExamples = 12

// Bounds for a machine that does much else; none of them is waited for.
const (
	checkTimeout  = 3 * time.Minute  // of a check of all streams
	settleTimeout = 30 * time.Second // until a stream counts what it delivers
	hubTimeout    = time.Minute      // until the hub has everything
)

// run does everything. The error is the rig's own trouble; what the programs
// did wrong is in failures.
func (j *judge) run(ctx context.Context) error {
	j.held, j.published = map[string]map[uint64]bool{}, map[string]map[uint64]rig.Sum{}
	for _, name := range []string{"edge.log", "hub.log"} {
		if err := os.Remove(filepath.Join(j.site.Dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	defer func() {
		j.site.Close()
		b, _ := os.ReadFile(filepath.Join(j.site.Dir, "edge.log"))
		j.log.Write(b)
	}()
	file := j.damage.file.name
	withHub := j.rng.IntN(4) == 0 || !strings.Contains(file, "streams") && !strings.Contains(file, "wal") ||
		len(j.damage.file.extents) > 0 && j.damage.file.extents[0].msg != nil && j.damage.file.extents[0].msg.stream == exported
	if withHub {
		if err := j.site.StartHub(); err != nil {
			return err
		}
	}
	if !j.start("") {
		return nil
	}
	j.check(ctx, true)
	if withHub {
		j.checkHub(ctx)
	}
	if j.rng.IntN(2) == 0 {
		j.site.Edge.Kill()
	} else if err := j.site.Edge.Stop(rig.StopTimeout); err != nil {
		j.fail("%v", err)
	}
	if !j.start("again") {
		return nil
	}
	j.check(ctx, false)
	return nil
}

// start starts the edge. A program that ends may be started once more, as a
// supervisor does; no more than that.
func (j *judge) start(again string) bool {
	err := j.site.StartEdge()
	if err != nil {
		if second := j.site.StartEdge(); second == nil {
			return true
		}
		j.refused = true
		j.fail("the edge does not start %s: %v", again, err)
		return false
	}
	return true
}

// status asks the running edge for its status document.
func (j *judge) status(ctx context.Context) (map[string]any, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(j.site.EdgeStore, "admin.sock"))
		},
	}, Timeout: 30 * time.Second}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://edge/v1/status", nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var doc map[string]any
	return doc, json.NewDecoder(resp.Body).Decode(&doc)
}

// lostByStatus is how many messages of a stream the status calls lost or
// damaged; -1 if it says nothing of the kind.
func lostByStatus(doc map[string]any, stream string) int {
	js, _ := doc["jetstream"].(map[string]any)
	list, _ := js["streams"].([]any)
	n := -1
	for _, s := range list {
		s, _ := s.(map[string]any)
		if s["name"] != stream {
			continue
		}
		for k, v := range s {
			if v, ok := v.(float64); ok && (strings.Contains(k, "lost") || strings.Contains(k, "damaged")) {
				n = max(n, int(v))
			}
		}
	}
	return n
}

// logged reports whether a warning or error in the edge's log names one of the
// words.
func (j *judge) logged(words ...string) bool {
	b, err := os.ReadFile(filepath.Join(j.site.Dir, "edge.log"))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if !strings.Contains(line, "WRN") && !strings.Contains(line, "WARN") && !strings.Contains(line, "ERR") {
			continue
		}
		if slices.ContainsFunc(words, func(w string) bool { return strings.Contains(line, w) }) {
			return true
		}
	}
	return false
}

// check reads everything back and publishes to every stream.
func (j *judge) check(ctx context.Context, first bool) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	nc, err := nats.Connect(j.site.EdgeURL(), nats.NoReconnect(), nats.Timeout(30*time.Second))
	if err != nil {
		j.fail("connect: %v", err)
		return
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(30*time.Second))
	if err != nil {
		j.fail("connect: %v", err)
		return
	}
	lost := map[string][]uint64{}
	for _, name := range streamNames {
		lost[name] = j.checkStream(ctx, js, j.template.streams[name], first)
		if !j.site.Edge.Alive() {
			j.fail("the edge ended with status %d while stream %s was being read: %s", j.site.Edge.ExitCode(), name, j.site.Edge.Log(600))
			return
		}
	}
	if !first {
		return
	}
	doc, err := j.status(ctx)
	if err != nil {
		j.fail("status: %v", err)
		return
	}
	for _, name := range streamNames {
		if len(lost[name]) == 0 {
			continue
		}
		j.lost += len(lost[name])
		if told := lostByStatus(doc, name); told < len(lost[name]) {
			j.unreported += len(lost[name])
			logged := "the log does not name the stream either"
			if j.logged(name) {
				logged = "the log names the stream"
			}
			j.fail("%s: %d messages are missing (%d ...), the status tells of %d; %s", name, len(lost[name]), lost[name][0], told, logged)
		}
	}
}

// checkStream returns the sequences that are not there.
func (j *judge) checkStream(ctx context.Context, js jetstream.JetStream, t *streamTemplate, first bool) (lost []uint64) {
	name := t.name
	s, err := js.Stream(ctx, name)
	if err != nil && j.damage.op == "older" {
		j.checkKept(t)
		return nil
	}
	if err != nil {
		j.fail("%s: %v", name, err)
		return nil
	}
	state := s.CachedInfo().State
	if got := s.CachedInfo().Config; !slices.Equal(got.Subjects, t.config.Subjects) || got.MaxMsgsPerSubject != max(-1, t.config.MaxMsgsPerSubject) && t.config.MaxMsgsPerSubject != 0 {
		j.fail("%s: has another configuration: %+v", name, got)
	}
	last := t.last
	for seq := range j.published[name] {
		last = max(last, seq)
	}
	if state.LastSeq < last {
		j.fail("%s: the last sequence went back from %d to %d", name, last, state.LastSeq)
	}
	var found map[uint64]rig.Sum
	take := func(seq uint64, sum rig.Sum, subject string) {
		if _, twice := found[seq]; twice {
			j.fail("%s: sequence %d was delivered twice", name, seq)
		}
		found[seq] = sum
		e, pub := t.messages[seq], j.published[name][seq]
		switch {
		case e != nil && e.sum != sum:
			j.fail("%s: sequence %d has other bytes", name, seq)
		case e == nil && t.removed[seq]:
			if !j.logged(name, filepath.Base(j.damage.file.name)) {
				j.fail("%s: sequence %d, which was removed, is back, and the log says nothing", name, seq)
			}
		case e == nil && pub == (rig.Sum{}):
			j.fail("%s: sequence %d was never published (subject %s)", name, seq, subject)
		case e == nil && pub != sum:
			j.fail("%s: sequence %d, published after the damage, has other bytes", name, seq)
		}
	}
	// Whoever meets damage first finds it before the program does, which then
	// gives up what is lost, or repairs the stream. Soon the two have to agree.
	for wait, cancel := context.WithTimeout(ctx, settleTimeout); ; {
		found = map[uint64]rig.Sum{}
		err := readAll(wait, js.Conn(), s, take)
		if err == nil {
			var info *jetstream.StreamInfo
			if info, err = s.Info(wait); err == nil {
				state = info.State
			}
		}
		if err == nil && int(state.Msgs) == len(found) || idle(wait, 100*time.Millisecond) != nil {
			cancel()
			if err != nil {
				j.fail("%s: read: %v", name, err)
			}
			break
		}
	}
	for seq, e := range t.messages {
		if _, ok := found[seq]; ok {
			if first {
				j.found++
			}
			continue
		}
		lost = append(lost, seq)
		if !first && j.held[name][seq] {
			j.fail("%s: sequence %d was there after the first start and is not after the second", name, seq)
		}
		if first && !j.damage.hit[e] {
			j.fail("%s: sequence %d is missing, which the damage did not touch", name, seq)
		}
	}
	slices.Sort(lost)
	for seq := range j.published[name] {
		if _, ok := found[seq]; !ok {
			j.fail("%s: sequence %d, published after the damage and acknowledged, is missing", name, seq)
		}
	}
	if int(state.Msgs) != len(found) {
		j.fail("%s: counts %d messages and delivers %d", name, state.Msgs, len(found))
	}
	for seq := range found {
		if j.held[name] == nil {
			j.held[name] = map[uint64]bool{}
		}
		j.held[name][seq] = true
	}
	for i, seq := range lost {
		if i == 3 {
			break
		}
		if m, err := s.GetMsg(ctx, seq); err == nil {
			j.fail("%s: sequence %d is not delivered, but can be got (right bytes: %t)", name, seq, sumOf(m) == t.messages[seq].sum)
		}
	}
	some := 0
	for seq, sum := range found {
		if some++; some > 5 {
			break
		}
		m, err := s.GetMsg(ctx, seq)
		if err != nil {
			j.fail("%s: sequence %d is delivered, but cannot be got: %v", name, seq, err)
		} else if sumOf(m) != sum {
			j.fail("%s: sequence %d is got with other bytes than delivered", name, seq)
		}
		if e := t.messages[seq]; e != nil && name == values {
			if m, err := s.GetLastMsgForSubject(ctx, e.subject); err != nil || m.Sequence < seq {
				j.fail("%s: the last message of %s is not %d: %v", name, e.subject, seq, err)
			}
		}
	}
	for _, c := range slices.Sorted(maps.Keys(t.consumers)) {
		j.checkConsumer(ctx, s, name, c, t.consumers[c], found)
	}
	subject, data := name+".after", []byte(fmt.Sprintf("published after the damage to %s", name))
	ack, err := js.Publish(ctx, subject, data)
	if err != nil {
		j.fail("%s: publish: %v", name, err)
		return lost
	}
	if ack.Sequence != state.LastSeq+1 {
		j.fail("%s: a message published got sequence %d after %d", name, ack.Sequence, state.LastSeq)
	}
	if name == values { // one message a subject
		clear(j.published[name])
	}
	if j.published[name] == nil {
		j.published[name] = map[uint64]rig.Sum{}
	}
	j.published[name][ack.Sequence] = rig.SumOf(subject, nil, data)
	return lost
}

// checkKept demands that the messages of a stream that is not served are still
// in some file of the store, and that the log says so.
func (j *judge) checkKept(t *streamTemplate) {
	kept := map[uint64]bool{}
	err := filepath.WalkDir(j.site.EdgeStore, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range markers.FindAllSubmatch(b, -1) {
			if n, _ := strconv.ParseUint(string(m[2]), 10, 64); string(m[1]) == t.name && t.messages[n] != nil {
				kept[n] = true
			}
		}
		return err
	})
	if err != nil {
		j.fail("%s: look for its messages: %v", t.name, err)
	}
	if len(kept) < len(t.messages) {
		j.fail("%s: is not served, and %d of its %d messages are in no file any more", t.name, len(t.messages)-len(kept), len(t.messages))
	}
	if !j.logged("put aside", "parked") {
		j.fail("%s: is not served, and the log says nothing", t.name)
	}
}

// checkConsumer demands that a consumer goes on where it was.
func (j *judge) checkConsumer(ctx context.Context, s jetstream.Stream, stream, name string, acked uint64, found map[uint64]rig.Sum) {
	c, err := s.Consumer(ctx, name)
	if err != nil {
		if !j.logged(stream, name) {
			j.fail("%s: consumer %s: %v, and the log says nothing", stream, name, err)
		}
		return
	}
	if floor := c.CachedInfo().AckFloor.Stream; floor < acked {
		if !j.logged(stream, name) {
			j.fail("%s: consumer %s has forgotten acknowledgements: its floor is %d, was %d, and the log says nothing", stream, name, floor, acked)
		}
	} else if floor > acked {
		for seq := range found {
			if seq > acked && seq <= floor {
				j.fail("%s: consumer %s takes sequence %d for acknowledged, which it was not", stream, name, seq)
				return
			}
		}
	}
}

// sumOf digests a message got by its sequence. Direct gets say in the header
// what the message is.
func sumOf(m *jetstream.RawStreamMsg) rig.Sum {
	h := maps.Clone(m.Header)
	for _, k := range []string{jetstream.StreamHeader, jetstream.SubjectHeader, jetstream.SequenceHeader, jetstream.TimeStampHeaer} {
		delete(h, k)
	}
	return rig.SumOf(m.Subject, h, m.Data)
}

// checkHub demands that the hub has what it had, and what was published since.
func (j *judge) checkHub(ctx context.Context) {
	t := j.template.streams[exported]
	if len(j.published[exported]) == 0 {
		return // said already
	}
	wait, cancel := context.WithTimeout(ctx, hubTimeout)
	defer cancel()
	if err := j.site.WaitHub(wait, exported, uint64(len(t.messages)+1)); err != nil {
		j.fail("the hub does not get what was published after the damage: %v", err)
		return
	}
	held, err := j.site.ReadHub(wait, exported, 1)
	if err != nil {
		j.fail("read the hub's stream: %v", err)
		return
	}
	counts := map[rig.Sum]int{}
	for _, h := range held {
		counts[h.Sum]++
	}
	missing, twice := 0, 0
	for _, e := range t.messages {
		switch n := counts[e.sum]; {
		case n == 0:
			missing++
		case n > 1:
			twice++
		}
		delete(counts, e.sum)
	}
	for _, sum := range j.published[exported] {
		if counts[sum] == 0 {
			missing++
		}
		delete(counts, sum)
	}
	if missing > 0 || len(counts) > 0 {
		j.fail("the hub's stream: %d messages missing, %d foreign", missing, len(counts))
	}
	if twice > 0 && !j.logged("incarnation") {
		j.fail("the hub's stream: %d messages are there twice, and the edge's log says nothing of a new incarnation", twice)
	}
}
