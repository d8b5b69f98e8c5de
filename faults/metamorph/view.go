//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
}

// look takes everything down. It fails if a message is not what was published.
func (w *work) look(ctx context.Context) (*view, error) {
	v := &view{things: map[string]string{}}
	list := w.js.ListStreams(ctx)
	for i := range list.Info() {
		if i.Config.Name == barrierStream {
			continue
		}
		if err := w.lookAt(ctx, v, i.Config.Name); err != nil {
			return nil, fmt.Errorf("look at stream %s: %w", i.Config.Name, err)
		}
	}
	return v, list.Err()
}

func (w *work) lookAt(ctx context.Context, v *view, name string) error {
	s, err := w.js.Stream(ctx, name)
	if err != nil {
		return err
	}
	i, err := s.Info(ctx, jetstream.WithDeletedDetails(true), jetstream.WithSubjectFilter(">"))
	if err != nil {
		return err
	}
	st := i.State
	if w.flips > 0 {
		st.Bytes = 0 // the size of a message that was damaged is guessed until the next start
	}
	v.note(name+" configuration", i.Config, i.Created)
	v.note(name+" state", st)
	if st.Msgs > 0 {
		for seq := st.FirstSeq; seq <= st.LastSeq; seq++ {
			m, err := s.GetMsg(ctx, seq)
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				continue
			}
			if err != nil {
				return fmt.Errorf("message %d: %w", seq, err)
			}
			sum := rig.SumOf("", nil, m.Data)
			if want := w.published[m.Header.Get(rig.AttemptHeader)]; sum != want {
				return fmt.Errorf("message %d on %s with the header %v has other bytes than were published", seq, m.Subject, m.Header)
			}
			v.note(fmt.Sprintf("%s message %d", name, seq), m.Subject, m.Header, sum, m.Time)
			v.messages++
		}
	}
	consumers := s.ListConsumers(ctx)
	for c := range consumers.Info() {
		c.Delivered.Last, c.AckFloor.Last = nil, nil // when they were last active is not kept
		v.note(name+" consumer "+c.Name, c.Config, c.Created, c.Delivered, c.AckFloor, c.NumAckPending, c.NumRedelivered, c.NumPending, c.Paused)
	}
	return consumers.Err()
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
		d := last.differences(v)
		if len(d) == 0 {
			return v, nil
		}
		if time.Since(begun) > patience {
			return nil, fmt.Errorf("it still changes %v after the last operation:\n%s", patience, some(d, 12))
		}
		last = v
	}
}
