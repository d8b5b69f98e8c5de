package jetstream

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/storage"
)

// A message that turns out to be damaged when it is read is given up by a command,
// so that its stream does not count what it cannot deliver. Where there are many,
// the file as a whole is repaired instead.

// lostMsg is a message found damaged.
type lostMsg struct {
	store *fileStore
	seq   uint64
}

const (
	// maxLosing is how many messages found damaged are remembered until they
	// have been given up; with more their streams are repaired.
	maxLosing = 4096
	// losingAtOnce is how many of them are given up in one commit.
	losingAtOnce = 64
)

// noteLost has a message given up, soon, that was found damaged.
func (e *Engine) noteLost(f *fileStore, seq uint64, err error) {
	x := lostMsg{f, seq}
	e.mu.Lock()
	_, known := e.losing[x]
	full := !known && len(e.losing) >= maxLosing
	if !known && !full {
		e.losing[x] = struct{}{}
	}
	e.mu.Unlock()
	switch {
	case full:
		e.noteDamage(f, err)
	case !known:
		e.wakeKeeper()
	}
}

// giveUpLost gives up the messages that were found damaged and still are. Those
// for which there is no room in the log are given up later.
func (e *Engine) giveUpLost() {
	e.mu.Lock()
	list := slices.Collect(maps.Keys(e.losing))
	e.mu.Unlock()
	if len(list) == 0 {
		return
	}
	slices.SortFunc(list, func(a, b lostMsg) int { return cmp.Compare(a.seq, b.seq) })
	streams := map[*fileStore]*Stream{}
	for _, s := range *e.streams.Load() {
		if f, ok := s.store.(*fileStore); ok {
			streams[f] = s
		}
	}
	for part := range slices.Chunk(list, losingAtOnce) {
		if !e.giveUp(part, streams) {
			return
		}
	}
}

// giveUp gives up some messages, in one commit. It reports false if it cannot now.
func (e *Engine) giveUp(list []lostMsg, streams map[*fileStore]*Stream) bool {
	type outcome struct {
		s      *Stream
		msg    lostMsg
		damage error
		res    chan callResult
	}
	now, goOn := time.Now(), true
	var pending []outcome
	for _, x := range list {
		s := streams[x.store]
		if s == nil || s.mending.Load() { // what the repair does not find is met again
			e.forgetLost(x)
			continue
		}
		_, err := x.store.Load(x.seq) // read twice: it may have been the bus
		if seq, ok := storage.Damaged(err); !ok || seq != x.seq {
			e.forgetLost(x)
			continue
		}
		o := outcome{s, x, err, make(chan callResult, 1)}
		rec := (&command.Lost{Seq: x.seq, Time: now.UnixNano()}).AppendTo(nil)
		if err := e.prop.ProposeUrgent(s.group, &call{fn: func(r callResult) { o.res <- r }}, rec); err != nil {
			if noSpace(err) {
				e.trySpace()
			}
			goOn = false
			break
		}
		pending = append(pending, o)
	}
	e.prop.Kick()
	for _, o := range pending {
		select {
		case r := <-o.res:
			e.forgetLost(o.msg)
			if r.err == nil && r.Removed > 0 {
				e.gaveUp(o.s, o.msg.seq, now, o.damage)
			}
		case <-e.broken:
			return false
		case <-e.done:
			return false
		}
	}
	return goOn
}

func (e *Engine) forgetLost(x lostMsg) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.losing, x)
}

// gaveUp tells of a message given up.
func (e *Engine) gaveUp(s *Stream, seq uint64, now time.Time, damage error) {
	e.damage.LostMsgs.Add(1)
	e.log.Error("a message is damaged on disk and is given up: its sequence is a gap. Check the disk", "stream", s.name, "seq", seq, "err", damage)
	adv := api.StreamDamagedAdvisory{
		Type: api.AdvisoryStreamDamaged, ID: rand.Text()[:22], Time: now.UTC(), Stream: s.name, Reason: damage.Error(),
		LostMsgs: 1, Lost: []api.SeqSpan{{First: seq, Last: seq}},
	}
	if b, err := json.Marshal(&adv); err == nil {
		e.account.Publish(api.AdvisoryStreamDamagedSubject+"."+s.name, "", nil, b)
	}
}
