//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/faults/rig"
)

// view is everything that a client can see, under a name for each thing.
type view struct {
	things   map[string]string
	messages int
	wrong    []string // sums that are not those of the messages
}

// look takes everything down. It fails if a message is not what was published.
func (w *work) look(ctx context.Context) (*view, error) {
	v := &view{things: map[string]string{}}
	list := w.js.ListStreams(ctx)
	var listed []string
	for i := range list.Info() {
		if i.Config.Name != barrierStream {
			listed = append(listed, i.Config.Name)
		}
	}
	if err := list.Err(); err != nil {
		return nil, err
	}
	slices.Sort(listed)
	v.note("streams", listed)
	for i := range streams {
		name := streamName(i)
		var one *view
		err := w.persist(func() (err error) {
			one, err = w.lookAt(ctx, name)
			return err
		})
		switch {
		case errors.Is(err, jetstream.ErrStreamNotFound):
			if slices.Contains(listed, name) {
				return nil, fmt.Errorf("stream %s is listed, and not found", name)
			}
			continue
		case err != nil:
			return nil, fmt.Errorf("look at stream %s: %w", name, err)
		case !slices.Contains(listed, name) && w.flips == 0:
			return nil, fmt.Errorf("stream %s is there, and not listed", name)
		}
		maps.Copy(v.things, one.things)
		v.messages += one.messages
		v.wrong = append(v.wrong, one.wrong...)
	}
	return v, nil
}

func (w *work) lookAt(ctx context.Context, name string) (*view, error) {
	v := &view{things: map[string]string{}}
	s, err := w.js.Stream(ctx, name)
	if err != nil {
		return nil, err
	}
	i, err := s.Info(ctx, jetstream.WithDeletedDetails(true), jetstream.WithSubjectFilter(">"))
	if err != nil {
		return nil, err
	}
	st := i.State
	v.note(name+" configuration", i.Config, i.Created)
	v.note(name+" state", st)
	sums := jetstream.StreamState{Subjects: map[string]uint64{}}
	for seq := st.FirstSeq; st.Msgs > 0 && seq <= st.LastSeq; seq++ {
		m, err := s.GetMsg(ctx, seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			sums.Deleted = append(sums.Deleted, seq)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", seq, err)
		}
		sum := rig.SumOf("", nil, m.Data)
		if want := w.published[m.Header.Get(rig.AttemptHeader)]; sum != want {
			return nil, fmt.Errorf("message %d on %s with the header %v has other bytes than were published", seq, m.Subject, m.Header)
		}
		v.note(messageOf(name, seq), m.Subject, m.Header, sum, m.Time)
		v.messages++
		sums.Msgs++
		sums.Bytes += size(m)
		sums.Subjects[m.Subject]++
	}
	if st.Msgs != sums.Msgs || st.Bytes != sums.Bytes || st.NumDeleted != len(sums.Deleted) || !slices.Equal(st.Deleted, sums.Deleted) || !maps.Equal(st.Subjects, sums.Subjects) {
		v.wrong = append(v.wrong, fmt.Sprintf("%s says %+v, and its messages are %+v", name, st, sums))
	}
	consumers := s.ListConsumers(ctx)
	for c := range consumers.Info() {
		c.Delivered.Last, c.AckFloor.Last = nil, nil // when they were last active is not kept
		if w.flips > 0 && st.FirstSeq > 0 {
			// A repair moves positions up to what there is.
			c.Delivered.Stream = max(c.Delivered.Stream, st.FirstSeq-1)
			c.AckFloor.Stream = max(c.AckFloor.Stream, st.FirstSeq-1)
		}
		v.note(consumerOf(name, c.Name), c.Config, c.Created, c.Delivered, c.AckFloor, c.NumAckPending, c.NumRedelivered, c.NumPending, c.Paused)
	}
	return v, consumers.Err()
}

func messageOf(stream string, seq uint64) string { return fmt.Sprintf("%s message %d", stream, seq) }

func consumerOf(stream, name string) string { return stream + " consumer " + name }

// size is what a message counts towards its stream's limits, without the headers
// that say where it was.
func size(m *jetstream.RawStreamMsg) uint64 {
	n := len(m.Subject) + len(m.Data) + 30
	header := len("NATS/1.0\r\n\r\n")
	for k, values := range m.Header {
		switch k {
		case jetstream.StreamHeader, jetstream.SubjectHeader, jetstream.SequenceHeader, jetstream.TimeStampHeaer:
			continue
		}
		for _, v := range values {
			header += len(k) + len(v) + len(": \r\n")
		}
	}
	return uint64(n + header + 4)
}

// note takes a thing down as JSON, in which maps are sorted.
func (v *view) note(what string, parts ...any) {
	text, err := json.Marshal(parts)
	if err != nil {
		text = []byte(err.Error()) // of what comes from JSON; it would be seen as a difference
	}
	v.things[what] = string(text)
}

// differences says what is in one of the views only, or not the same in both.
func (v *view) differences(after *view) []string {
	var d []string
	for what, was := range v.things {
		switch is, ok := after.things[what]; {
		case !ok:
			d = append(d, fmt.Sprintf("%s is gone: %s", what, was))
		case is != was:
			d = append(d, fmt.Sprintf("%s was %s\n\tand is %s", what, was, is))
		}
	}
	for what, is := range after.things {
		if _, ok := v.things[what]; !ok {
			d = append(d, fmt.Sprintf("%s is new: %s", what, is))
		}
	}
	slices.Sort(d)
	return d
}

// some is the first n of lines.
func some(lines []string, n int) string { return strings.Join(lines[:min(n, len(lines))], "\n") }

// settled returns what can be seen when nothing changes any more: what clients
// did not wait for has been done, repairs and the removal of what nobody needs
// have ended. All of it is safe by then: records that nobody waits for go to the
// log with the next that somebody does.
func (w *work) settled(ctx context.Context) (*view, error) {
	last := &view{}
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if err := w.barrier(ctx); err != nil {
			return nil, err
		}
		v, err := w.look(ctx)
		if err != nil {
			return nil, err
		}
		d := append(last.differences(v), v.wrong...)
		if len(d) == 0 {
			return v, nil
		}
		if time.Since(begun) > patience {
			return nil, fmt.Errorf("it still changes %v after the last operation:\n%s", patience, some(d, 12))
		}
		last = v
	}
}
