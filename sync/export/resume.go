package export

import (
	"fmt"

	"petiole/storage"
	"petiole/sync/frame"
)

// Action says how an export goes on.
type Action uint8

// Ways to go on.
const (
	// Start: the hub knows nothing of the incarnation; send from Base.
	Start Action = iota + 1
	// Continue: the hub's position stands; send what follows on it.
	Continue
	// Renew: the hub holds messages that this stream does not (any more), or
	// others under the same sequences. A new incarnation starts after the last
	// place where both agree.
	Renew
)

func (a Action) String() string {
	switch a {
	case Start:
		return "start"
	case Continue:
		return "continue"
	case Renew:
		return "new incarnation"
	}
	return "none"
}

// Decision is the outcome of Resume.
type Decision struct {
	Action Action
	// State replaces the export's state. If Persist is set it has to be
	// durable before anything is sent.
	State   State
	Persist bool
	// Next is the first sequence to send, Chain the chain before it.
	Next  uint64
	Chain frame.Chain
	// Verified says that the hub's position was proven to describe the
	// messages held here. It is false where nothing is left to prove it with.
	Verified bool
	// Reason says in words why, for the log.
	Reason string
}

// Recompute chains the stored messages after from up to through. It reports
// false if some of them are not stored any more, so that the chain cannot be
// told.
type Recompute func(from frame.Rung, through uint64) (frame.Chain, bool, error)

// Resume decides how an export goes on, given what the edge remembers, what
// its stream holds durably, and the hub's position (if known is set).
//
//	hub's position             edge                          action
//	none                       any                           Start at Base
//	earlier incarnation        any                           Start at Base
//	same incarnation           chain proven or not refuted   Continue
//	same incarnation           chain refuted                 Renew
//	same incarnation           stream ends before it         Renew
//	later incarnation          chain proven                  Continue (adopt)
//	later incarnation          otherwise                     Renew
//	any start                  stream ends before Base       Renew after its end
//
// The chain is proven by a rung that both have, or by recomputing the last of
// the hub's batches that are still stored whole. A batch stored whole whose
// chain differs refutes it.
func Resume(st State, have storage.State, hub frame.Position, known bool, re Recompute) (Decision, error) {
	st = st.clone()
	if !known || hub.Incarnation < st.Incarnation {
		reason := "the hub has no position of this export"
		if known {
			reason = fmt.Sprintf("the hub has seen incarnation %d only", hub.Incarnation)
		}
		if st.Base > have.Last+1 {
			return renew(st, max(st.Incarnation, hub.Incarnation), have.Last,
				fmt.Sprintf("the stream ends at %d, before the incarnation's first message %d", have.Last, st.Base)), nil
		}
		st.Ladder = nil
		return Decision{
			Action: Start, State: st, Next: st.Base, Verified: true,
			Chain: frame.Seed(st.UID, st.Incarnation, st.Base), Reason: reason,
		}, nil
	}

	ev, err := examine(st, have, hub, re)
	if err != nil {
		return Decision{}, err
	}
	same := hub.Incarnation == st.Incarnation
	proven := ev.common == hub.Through
	switch {
	case hub.Through > have.Last:
		return renew(st, hub.Incarnation, ev.fallback(st, have), fmt.Sprintf(
			"the stream ends at %d but the hub holds it up to %d: its tail was lost or an older copy restored",
			have.Last, hub.Through)), nil
	case ev.refuted && !proven:
		return renew(st, hub.Incarnation, ev.fallback(st, have), fmt.Sprintf(
			"the hub holds other messages up to %d than this stream", hub.Through)), nil
	case !same && !proven:
		return renew(st, hub.Incarnation, ev.fallback(st, have), fmt.Sprintf(
			"the hub has seen incarnation %d, this store only %d: an older copy was restored",
			hub.Incarnation, st.Incarnation)), nil
	}
	d := Decision{
		Action: Continue, Next: hub.Through + 1, Chain: hub.Chain,
		Verified: proven, Reason: "the hub's position stands",
	}
	if !same {
		d.Persist = true
		d.Reason = fmt.Sprintf("the hub's later incarnation %d describes this stream", hub.Incarnation)
		st.Incarnation = hub.Incarnation
		st.Ladder = nil
	} else if n := len(st.Ladder); n > 0 && st.Ladder[n-1].Through > hub.Through {
		d.Reason = fmt.Sprintf("the hub went back from %d to %d", st.Ladder[n-1].Through, hub.Through)
	}
	st.Acknowledge(frame.Rung{Through: hub.Through, Chain: hub.Chain})
	d.State = st
	return d, nil
}

// evidence is what comparing the hub's ladder with the edge's shows.
type evidence struct {
	common  uint64 // highest sequence at which both are proven equal; 0: none
	refuted bool   // some batch of the hub is proven to differ
	own     uint64 // highest rung of the edge that the hub does not contradict
}

func examine(st State, have storage.State, hub frame.Position, re Recompute) (evidence, error) {
	var ev evidence
	same := hub.Incarnation == st.Incarnation
	rungs := hub.Ladder
	if n := len(rungs); n == 0 || rungs[n-1].Through != hub.Through {
		rungs = append(append([]frame.Rung(nil), rungs...), frame.Rung{Through: hub.Through, Chain: hub.Chain})
	}
	mine := make(map[uint64]frame.Chain, len(st.Ladder))
	for _, r := range st.Ladder {
		mine[r.Through] = r.Chain
	}
	lowest := uint64(1<<64 - 1) // lowest rung known to differ
	// From the newest down: the first proof settles everything below it.
	for i := len(rungs) - 1; i >= 0 && ev.common == 0; i-- {
		r := rungs[i]
		if r.Through > have.Last {
			continue
		}
		if c, ok := mine[r.Through]; ok && same {
			if c == r.Chain {
				ev.common = r.Through
			} else {
				ev.refuted, lowest = true, r.Through
			}
			continue
		}
		from, ok := anchor(st, rungs, i, same)
		if !ok {
			continue
		}
		c, whole, err := re(from, r.Through)
		if err != nil {
			return ev, fmt.Errorf("recompute the chain of %d to %d: %w", from.Through+1, r.Through, err)
		}
		switch {
		case !whole:
		case c == r.Chain:
			ev.common = r.Through
		default:
			ev.refuted, lowest = true, r.Through
		}
	}
	for _, r := range st.Ladder {
		if r.Through <= have.Last && r.Through < lowest && (r.Through <= hub.Through || !same) {
			ev.own = max(ev.own, r.Through)
		}
	}
	return ev, nil
}

// anchor returns the nearest place below rung i from which its chain can be
// recomputed.
func anchor(st State, rungs []frame.Rung, i int, same bool) (frame.Rung, bool) {
	var from frame.Rung
	ok := false
	if i > 0 {
		from, ok = rungs[i-1], true
	}
	if !same {
		return from, ok
	}
	for _, r := range st.Ladder {
		if r.Through < rungs[i].Through && (!ok || r.Through > from.Through) {
			from, ok = r, true
		}
	}
	if !ok && st.Base <= rungs[i].Through {
		from, ok = frame.Rung{Through: st.Base - 1, Chain: frame.Seed(st.UID, st.Incarnation, st.Base)}, true
	}
	return from, ok
}

// fallback returns the last sequence that need not be sent again: proven
// equal, or else acknowledged before and not contradicted, or else none.
func (ev evidence) fallback(st State, have storage.State) uint64 {
	c := max(ev.common, ev.own)
	if c == 0 && st.Base > 0 {
		c = st.Base - 1
	}
	return min(c, have.Last)
}

// renew starts an incarnation after the highest one seen.
func renew(st State, seen, common uint64, reason string) Decision {
	st.Incarnation = max(st.Incarnation, seen) + 1
	st.Base = common + 1
	st.Ladder = nil
	st.Regressions++
	return Decision{
		Action: Renew, State: st, Persist: true, Next: st.Base,
		Chain: frame.Seed(st.UID, st.Incarnation, st.Base), Verified: true, Reason: reason,
	}
}

// Begin returns the state of an export that never ran: it starts with the
// first message that the stream holds, or will hold.
func Begin(uid frame.UID, have storage.State) State {
	return State{UID: uid, Incarnation: 1, Base: max(have.First, 1)}
}
