//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// flip overwrites a place in the file of one of the streams behind its meta
// pages, while the program has it open.
func (w *work) flip(store string) error {
	files, err := filepath.Glob(filepath.Join(store, "streams", "*", "msgs.db"))
	if err != nil || len(files) == 0 {
		return err
	}
	const page = 4096
	name := files[w.r.IntN(len(files))]
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil // its stream was deleted meanwhile
	}
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	n := []int64{1, 8, 512, page}[w.r.IntN(4)]
	room := fi.Size() - 2*page - n
	if room <= 0 {
		return nil
	}
	at := 2*page + w.r.Int64N(room)
	b := make([]byte, n)
	if _, err := f.ReadAt(b, at); err != nil {
		return fmt.Errorf("read %s at %d: %w", name, at, err)
	}
	for i := range b {
		b[i] ^= byte(1 + w.r.IntN(255))
	}
	if _, err := f.WriteAt(b, at); err != nil {
		return err
	}
	w.flips++
	w.history = append(w.history, fmt.Sprintf("overwrite %d octets of %s at %d", n, name, at))
	return nil
}

// damaged is what is answered to who asks for a damaged message, until it is given
// up or found again, or for one that damage hides.
var damaged = regexp.MustCompile(`message [0-9]+ is damaged on disk$|the stream's files are damaged and are being repaired; try again$`)

// passing reports whether an error is an answer that the program gives while it
// deals with damage, and no longer.
func (w *work) passing(err error) bool {
	if w.flips == 0 || err == nil {
		return false
	}
	const streamOffline = 10194
	var refused *jetstream.APIError
	if errors.As(err, &refused) && refused.ErrorCode == streamOffline {
		return strings.Contains(refused.Description, "its files are damaged and are being repaired")
	}
	return damaged.MatchString(err.Error())
}

// persist asks again while the answer is one that has to pass.
func (w *work) persist(ask func() error) error {
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		err := ask()
		if !w.passing(err) {
			return err
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("the answer is still the same after %v: %w", patience, err)
		}
	}
}

// span is a closed interval of sequences, as an advisory names it.
type span struct {
	First uint64 `json:"first"`
	Last  uint64 `json:"last"`
}

// heed takes note of what is told to be lost.
func (w *work) heed() error {
	const advisories = "$JS.EVENT.ADVISORY.STREAM.DAMAGED."
	_, err := w.nc.Subscribe(advisories+"*", func(m *nats.Msg) {
		var a struct {
			Lost []span `json:"lost"`
		}
		if json.Unmarshal(m.Data, &a) != nil {
			return // it will be missed
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.lost == nil {
			w.lost = map[string][]span{}
		}
		name := strings.TrimPrefix(m.Subject, advisories)
		w.lost[name] = append(w.lost[name], a.Lost...)
	})
	return err
}

// told reports whether a message was told to be lost.
func (w *work) told(stream string, seq uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.lost[stream], func(s span) bool { return s.First <= seq && seq <= s.Last })
}

// rot overwrites places while nothing else is done, and returns what can be seen
// then. Messages may be missing that are told to be lost, and their stream's sums
// have to be those of the rest; everything else is as it was.
func (w *work) rot(ctx context.Context, store string, places int, before *view) (*view, error) {
	for range places {
		if err := w.flip(store); err != nil {
			return nil, err
		}
	}
	after, err := w.settled(ctx)
	if err != nil {
		return nil, err
	}
	if err := w.barrier(ctx); err != nil { // behind it the advisories are here
		return nil, err
	}
	lost := map[string]int{}
	for what := range before.things {
		var stream string
		var seq uint64
		if _, err := fmt.Sscanf(what, "%s message %d", &stream, &seq); err != nil {
			continue
		}
		if _, ok := after.things[what]; !ok && w.told(stream, seq) {
			lost[stream]++
			delete(before.things, what)
		}
	}
	for what := range before.things {
		stream, rest, _ := strings.Cut(what, " ")
		// What it says is checked against the messages that there are.
		if lost[stream] > 0 && (rest == "state" || strings.HasPrefix(rest, "consumer ")) && after.things[what] != "" {
			before.things[what] = after.things[what]
		}
	}
	if d := before.differences(after); len(d) > 0 {
		return nil, fmt.Errorf("%d things are not as they were before places were overwritten (lost, and told of, by stream: %v):\n%s", len(d), lost, some(d, 12))
	}
	for _, n := range lost {
		w.missing += n
	}
	return after, nil
}
