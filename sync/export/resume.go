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
//	none                       first incarnation             Start at Base
//	none                       later incarnation             Renew at Origin
//	earlier incarnation        the one Base was chosen for   Start at Base
//	earlier incarnation        otherwise                     Renew
//	same incarnation           chain proven or not refuted   Continue
//	same incarnation           chain refuted                 Renew
//	same incarnation           stream ends before it         Renew
//	later incarnation          chain proven                  Continue (adopt)
//	later incarnation          otherwise                     Renew
//	any start                  stream ends before Base       Renew after its end
//
// Proof is always recomputed from what the stream holds now: a stream that lost
// its tail may have grown past it again, with other messages. A batch of the
// hub that is still stored whole and gives the hub's chain proves that both
// have the same up to its end; one that gives another chain refutes it. With
// neither (its messages are gone), an equal rung of the edge's own ladder has
// to do. A new incarnation starts after the last proven place, and without any
// at Origin: rather twice than never.
func Resume(st State, have storage.State, hub frame.Position, known bool, re Recompute) (Decision, error) {
	st = st.clone()
	var prior Prior
	var ev evidence
	if known {
		prior = Prior{hub.Incarnation, frame.Rung{Through: hub.Through, Chain: hub.Chain}}
		var err error
		if ev, err = examine(st, have, hub, re); err != nil {
			return Decision{}, err
		}
	}
	renew := func(format string, args ...any) (Decision, error) {
		return renew(st, have, prior, ev, fmt.Sprintf(format, args...)), nil
	}
	start := func(reason string) (Decision, error) {
		if st.Base > have.Last+1 {
			return renew("the stream ends at %d, before the incarnation's first message %d", have.Last, st.Base)
		}
		if ev.cut {
			return renew("the stream holds other messages before %d than when the incarnation was started", st.Base)
		}
		st.Ladder = nil
		return Decision{
			Action: Start, State: st, Next: st.Base, Verified: true,
			Chain: frame.Seed(st.UID, st.Incarnation, st.Base), Reason: reason,
		}, nil
	}
	same := hub.Incarnation == st.Incarnation
	proven := ev.proof[1].Through == hub.Through
	switch {
	case !known && st.Base > st.Origin && st.Prior != prior:
		return renew("the hub has lost the export's position: all that is held here is sent again")
	case !known:
		return start("the hub has no position of this export")
	case hub.Incarnation < st.Incarnation && st.Prior == prior:
		return start("the hub has not seen this incarnation yet")
	case hub.Incarnation < st.Incarnation:
		return renew("the hub went back to incarnation %d", hub.Incarnation)
	case hub.Through > have.Last:
		return renew("the stream ends at %d but the hub holds it up to %d: its tail was lost or an older copy restored", have.Last, hub.Through)
	case ev.refuted:
		return renew("the hub holds other messages up to %d than this stream: its tail was lost or an older copy restored", hub.Through)
	case !same && !proven:
		return renew("the hub has seen incarnation %d, this store only %d: an older copy was restored", hub.Incarnation, st.Incarnation)
	}
	d := Decision{
		Action: Continue, Next: hub.Through + 1, Chain: hub.Chain,
		Verified: proven || ev.equal, Reason: "the hub's position stands",
	}
	if !same {
		d.Persist = true
		d.Reason = fmt.Sprintf("the hub's later incarnation %d describes this stream", hub.Incarnation)
		st.Incarnation, st.Base, st.Adopted = hub.Incarnation, hub.Through+1, true
		st.Prior, st.Floor = prior, ev.proof
		st.Ladder = nil
	} else if n := len(st.Ladder); n > 0 && st.Ladder[n-1].Through > hub.Through {
		d.Reason = fmt.Sprintf("the hub went back from %d to %d", st.Ladder[n-1].Through, hub.Through)
	}
	st.Acknowledge(frame.Rung{Through: hub.Through, Chain: hub.Chain})
	d.State = st
	return d, nil
}

// maxRecompute bounds the messages chained for one comparison: more than a
// batch holds, so that only comparisons without a rung nearby are given up.
const maxRecompute = 1 << 17

// evidence is what comparing the hub's ladder with the edge's, and both with
// what is stored, shows.
type evidence struct {
	proof   [2]frame.Rung // the highest batch proven; proof[1] is its end
	refuted bool          // some batch of the hub differs from what is stored
	equal   bool          // the edge's own ladder has the hub's position
	cut     bool          // what is stored before Base differs from what it was
}

func examine(st State, have storage.State, hub frame.Position, re Recompute) (ev evidence, err error) {
	same := hub.Incarnation == st.Incarnation
	rungs := hub.Ladder
	if n := len(rungs); n == 0 || rungs[n-1].Through != hub.Through {
		rungs = append(append([]frame.Rung(nil), rungs...), frame.Rung{Through: hub.Through, Chain: hub.Chain})
	}
	mine := make(map[uint64]frame.Chain, len(st.Ladder))
	for _, r := range st.Ladder {
		mine[r.Through] = r.Chain
	}
	// compare tells whether what is stored leads from one rung to the other:
	// yes, no, or (both false) that it cannot be told.
	compare := func(from, to frame.Rung) (yes, no bool) {
		if err != nil || to.Through > have.Last || to.Through <= from.Through || to.Through-from.Through > maxRecompute {
			return false, false
		}
		c, whole, rerr := re(from, to.Through)
		if rerr != nil {
			err = fmt.Errorf("recompute the chain of %d to %d: %w", from.Through+1, to.Through, rerr)
			return false, false
		}
		return whole && c == to.Chain, whole && c != to.Chain
	}
	found := func() bool { return ev.proof[1].Through > 0 }

	lowest := uint64(1<<64 - 1) // lowest rung known to differ
	// From the newest down: the first proof settles everything below it.
	for i := len(rungs) - 1; i >= 0 && !found(); i-- {
		r := rungs[i]
		if from, ok := anchor(st, rungs, i, same); ok {
			yes, no := compare(from, r)
			if yes {
				ev.proof = [2]frame.Rung{from, r}
				continue
			}
			if no {
				ev.refuted, lowest = true, r.Through
				continue
			}
		}
		if c, ok := mine[r.Through]; ok && same {
			if c != r.Chain {
				ev.refuted, lowest = true, r.Through
			} else if r.Through == hub.Through {
				ev.equal = true
			}
		}
	}
	floor := st.Floor[1].Through > 0
	if hub.Incarnation >= st.Incarnation {
		// What the hub acknowledged before, it still has.
		for j := len(st.Ladder) - 1; j >= 0 && !found(); j-- {
			r := st.Ladder[j]
			if r.Through >= lowest || same && r.Through > hub.Through {
				continue
			}
			var from frame.Rung
			switch {
			case j > 0:
				from = st.Ladder[j-1]
			case st.Adopted:
				continue
			default:
				from = frame.Rung{Through: st.Base - 1, Chain: frame.Seed(st.UID, st.Incarnation, st.Base)}
			}
			if yes, _ := compare(from, r); yes {
				ev.proof = [2]frame.Rung{from, r}
			}
		}
		if floor && !found() {
			if yes, _ := compare(st.Floor[0], st.Floor[1]); yes {
				ev.proof = st.Floor
			}
		}
	} else if floor && st.Floor[1].Through <= have.Last {
		_, ev.cut = compare(st.Floor[0], st.Floor[1])
	}
	return ev, err
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
	if !ok && st.Base <= rungs[i].Through && !st.Adopted {
		from, ok = frame.Rung{Through: st.Base - 1, Chain: frame.Seed(st.UID, st.Incarnation, st.Base)}, true
	}
	return from, ok
}

// renew starts an incarnation after the highest one seen.
func renew(st State, have storage.State, prior Prior, ev evidence, reason string) Decision {
	common := ev.proof[1].Through
	if common == 0 {
		common = min(max(st.Origin, 1)-1, have.Last)
	}
	st.Incarnation = max(st.Incarnation, prior.Incarnation)
	if !sameIncarnation {
		st.Incarnation++
	}
	st.Base = common + 1
	st.Origin = min(st.Origin, st.Base)
	st.Prior, st.Floor, st.Adopted = prior, ev.proof, false
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
	first := max(have.First, 1)
	return State{UID: uid, Incarnation: 1, Base: first, Origin: first}
}
