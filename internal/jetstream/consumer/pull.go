package consumer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"petiole/internal/jetstream/api"
)

// request is a pull request that waits for messages.
type request struct {
	reply    string
	n        int   // messages still wanted
	sent     int   // messages sent
	bytes    int   // octets still wanted; 0: no limit
	noWait   bool  // do not wait for more than there is
	expires  int64 // Unix ns; 0: never
	hb       int64 // heartbeat interval, ns; 0: none
	hbAt     int64 // next heartbeat
	group    api.PriorityGroup
	grouped  bool   // came as JSON, so that group means something
	listened uint64 // run in which someone was seen to listen
	asked    int    // octets delivered in that run when Congested was asked last
}

func (r *request) priority() int {
	if !r.grouped {
		return math.MaxInt32
	}
	return r.group.Priority
}

// waitQueue holds the requests in the order in which they are served.
type waitQueue struct {
	q      []*request
	head   int
	total  int   // sum of request.n
	noWait int   // requests with noWait
	next   int64 // no request expires or wants a heartbeat before; 0: never
	free   []*request
}

func (w *waitQueue) len() int        { return len(w.q) - w.head }
func (w *waitQueue) all() []*request { return w.q[w.head:] }
func (w *waitQueue) peek() *request  { return w.q[w.head] }

func (w *waitQueue) alloc() *request {
	if n := len(w.free); n > 0 {
		r := w.free[n-1]
		w.free = w.free[:n-1]
		return r
	}
	return new(request)
}

func (w *waitQueue) release(r *request) {
	*r = request{}
	if len(w.free) < 64 {
		w.free = append(w.free, r)
	}
}

func (w *waitQueue) account(r *request, sign int) {
	w.total += sign * max(r.n, 1)
	if r.noWait {
		w.noWait += sign
	}
}

func (w *waitQueue) append(r *request) {
	if w.head > 64 && w.head > len(w.q)/2 {
		n := copy(w.q, w.q[w.head:])
		clear(w.q[n:])
		w.q, w.head = w.q[:n], 0
	}
	w.q = append(w.q, r)
}

// add queues a request, behind all others or behind those of its priority.
func (w *waitQueue) add(r *request, sorted bool) {
	w.account(r, 1)
	w.wake(r.expires)
	w.wake(r.hbAt)
	w.append(r)
	if sorted {
		w.sink(len(w.q) - 1)
	}
}

// sink moves the request at i up to its place by priority.
func (w *waitQueue) sink(i int) {
	for ; i > w.head && w.q[i-1].priority() > w.q[i].priority(); i-- {
		w.q[i-1], w.q[i] = w.q[i], w.q[i-1]
	}
}

func (w *waitQueue) wake(at int64) {
	if at != 0 && (w.next == 0 || at < w.next) {
		w.next = at
	}
}

func (w *waitQueue) pop() *request {
	r := w.q[w.head]
	w.q[w.head] = nil
	if w.head++; w.head == len(w.q) {
		w.q, w.head = w.q[:0], 0
	}
	return r
}

// drop removes the first request.
func (w *waitQueue) drop() {
	r := w.pop()
	w.account(r, -1)
	w.release(r)
}

// cycle moves the first request to the end.
func (w *waitQueue) cycle() { w.append(w.pop()) }

// requeue moves the first request to the end of its priority.
func (w *waitQueue) requeue(sorted bool) {
	if w.len() == 1 {
		return
	}
	w.append(w.pop())
	if sorted {
		w.sink(len(w.q) - 1)
	}
}

func (w *waitQueue) reset() {
	*w = waitQueue{}
}

// status sends a header block made of line and, if n >= 0, what is left of a
// request.
func (m *Machine) status(reply, line string, n, octets int) {
	m.hdr = append(append(m.hdr[:0], "NATS/1.0 "...), line...)
	m.hdr = append(m.hdr, "\r\n"...)
	if n != noCounts {
		m.hdr = append(m.hdr, "Nats-Pending-Messages: "...)
		m.hdr = strconv.AppendInt(m.hdr, int64(n), 10)
		m.hdr = append(m.hdr, "\r\nNats-Pending-Bytes: "...)
		m.hdr = strconv.AppendInt(m.hdr, int64(octets), 10)
		m.hdr = append(m.hdr, "\r\n"...)
	}
	m.hdr = append(m.hdr, "\r\n"...)
	m.env.Sink.Status(reply, "", m.hdr)
}

// noCounts makes status leave out what is pending.
const noCounts = math.MinInt

// parseNext reads the payload of a pull request.
func parseNext(req []byte) (r api.NextRequest, formal bool, err error) {
	req = bytes.TrimSpace(req)
	switch {
	case len(req) == 0:
	case req[0] == '{':
		if err := json.Unmarshal(req, &r); err != nil {
			return r, true, err
		}
		if r.Heartbeat > 0 && r.Heartbeat > r.Expires/2 {
			return r, true, errors.New("heartbeat value too large")
		}
		return r, true, nil
	default:
		if n, err := strconv.Atoi(string(req)); err == nil {
			return api.NextRequest{Batch: n}, false, nil
		}
	}
	return api.NextRequest{Batch: 1}, false, nil
}

// Next takes in a pull request: req is the payload of a message to
// $JS.API.CONSUMER.MSG.NEXT.<stream>.<consumer>, whose reply subject is reply.
// Refusals go to reply as a status. Call Pump afterwards.
func (m *Machine) Next(now time.Time, reply string, req []byte) {
	if reply == "" || !m.live {
		return
	}
	refuse := func(line string) { m.status(reply, line, noCounts, 0) }
	if m.cfg.Push() {
		refuse("409 Consumer is push based")
		return
	}
	r, formal, err := parseNext(req)
	if err != nil {
		refuse("400 Bad Request - " + err.Error())
		return
	}
	if n := m.cfg.MaxRequestBatch; n > 0 && r.Batch > n {
		refuse(fmt.Sprintf("409 Exceeded MaxRequestBatch of %d", n))
		return
	}
	if d := m.cfg.MaxRequestExpires; d > 0 && r.Expires > d {
		refuse(fmt.Sprintf("409 Exceeded MaxRequestExpires of %v", d))
		return
	}
	if n := m.cfg.MaxRequestMaxBytes; n > 0 && r.MaxBytes > n {
		refuse(fmt.Sprintf("409 Exceeded MaxRequestMaxBytes of %v", n))
		return
	}
	t := now.UnixNano()
	if formal {
		if line := m.checkGroup(t, &r.PriorityGroup); line != "" {
			refuse(line)
			return
		}
	}
	full := func() bool { return m.cfg.MaxWaiting > 0 && m.wait.len() >= m.cfg.MaxWaiting }
	if full() {
		m.tidy(t, false, true)
	}
	if r.NoWait {
		have := uint64(max(m.npc, 0)) + uint64(m.rdq.len())
		if have == 0 && r.Expires == 0 {
			m.idle = t
			refuse("404 No Messages")
			return
		}
		if have > 0 {
			m.tidy(t, false, true)
			if have < uint64(m.wait.total) {
				m.idle = t
				refuse("408 Requests Pending")
				return
			}
		}
	}
	if full() {
		// A client that expects heartbeats notices their absence; telling it
		// would make it ask again at once, in a loop.
		if r.Heartbeat == 0 {
			refuse("409 Exceeded MaxWaiting")
		}
		return
	}
	w := m.wait.alloc()
	*w = request{
		reply: reply, n: r.Batch, bytes: r.MaxBytes, noWait: r.NoWait, hb: span(r.Heartbeat),
		group: r.PriorityGroup, grouped: formal,
	}
	if r.Expires != 0 {
		w.expires = t + span(r.Expires)
	}
	if w.hb > 0 {
		w.hbAt = t + w.hb
	}
	m.idle = t
	m.wait.add(w, m.cfg.PriorityPolicy == api.PriorityPrioritized)
}

// checkGroup returns the refusal of a request's priority group, or "".
func (m *Machine) checkGroup(now int64, g *api.PriorityGroup) string {
	p := m.cfg.PriorityPolicy
	switch {
	case (g.MinPending != 0 || g.MinAckPending != 0) && p != api.PriorityOverflow:
		return "400 Bad Request - Not a Overflow Priority consumer"
	case g.ID != "" && p != api.PriorityPinnedClient:
		return "400 Bad Request - Not a Pinned Client Priority consumer"
	case g.Priority < 0 || g.Priority > 9:
		return "400 Bad Request - Priority must be between 0 and 9"
	case p == api.PriorityNone:
		return ""
	case g.Group == "":
		return "400 Bad Request - Priority Group missing"
	case !slices.Contains(m.cfg.PriorityGroups, g.Group):
		return "400 Bad Request - Invalid Priority Group"
	case m.pinID == "" || g.ID == "":
		return ""
	case g.ID != m.pinID:
		return "423 Nats-Pin-Id mismatch"
	}
	m.pinUntil = now + span(m.cfg.PinnedTTL)
	return ""
}

// tidy removes the requests that have expired, those that do not wait (if the
// end of what there is was reached, eos), and (if listen) those that nobody
// listens for any more; it sends due heartbeats.
func (m *Machine) tidy(now int64, eos, listen bool) {
	if m.wait.len() == 0 {
		m.wait.next = 0
		return
	}
	m.wait.next = 0
	out := m.wait.q[:m.wait.head]
	for _, r := range m.wait.all() {
		switch {
		case r.expires != 0 && now > r.expires:
			m.status(r.reply, "408 Request Timeout", r.n, r.bytes)
			m.idle = max(m.idle, r.expires)
		case eos && r.noWait && (r.expires == 0 || r.sent > 0):
			m.status(r.reply, "404 No Messages", noCounts, 0)
			m.idle = max(m.idle, now)
		case listen && !m.env.Sink.Interest(r.reply):
		default:
			if r.hbAt != 0 {
				if now > r.hbAt {
					m.heartbeat(r.reply)
					r.hbAt = now + r.hb
				}
				m.wait.wake(r.hbAt)
			}
			m.wait.wake(r.expires)
			out = append(out, r)
			continue
		}
		m.wait.account(r, -1)
		m.wait.release(r)
	}
	clear(m.wait.q[len(out):])
	m.wait.q = out
	if len(out) == m.wait.head {
		m.wait.q, m.wait.head = out[:0], 0
	}
}

// pick returns the request that the next message of size octets goes to, at
// the head of the queue, or nil.
func (m *Machine) pick(now int64, size int) *request {
	cycled := 0
	for m.wait.len() > 0 {
		r := m.wait.peek()
		if r.expires != 0 && now >= r.expires {
			m.status(r.reply, "408 Request Timeout", r.n, r.bytes)
			m.idle = max(m.idle, r.expires)
			m.wait.drop()
			continue
		}
		pinned := false
		if m.cfg.PriorityPolicy == api.PriorityPinnedClient {
			switch {
			case m.pinID != "" && r.group.ID == "":
				// Others stand by.
				m.wait.cycle()
				if cycled++; cycled >= m.wait.len() {
					return nil
				}
				continue
			case r.group.ID != m.pinID:
				m.status(r.reply, "423 Nats-Wrong-Pin-Id", r.n, r.bytes)
				m.wait.drop()
				continue
			case m.pinID == "" && r.group.Group != "":
				m.pin(now, r)
				pinned = true
			}
		}
		if m.cfg.PriorityPolicy == api.PriorityOverflow && (r.group.MinPending > 0 || r.group.MinAckPending > 0) &&
			!(r.group.MinPending > 0 && r.group.MinPending <= m.npc+1) &&
			!(r.group.MinAckPending > 0 && r.group.MinAckPending <= int64(len(m.pend))) {
			m.wait.cycle()
			if cycled++; cycled >= m.wait.len() {
				return nil
			}
			continue
		}
		if r.bytes > 0 && size > r.bytes {
			m.status(r.reply, "409 Message Size Exceeds MaxBytes", r.n, r.bytes)
			if pinned {
				m.unpin()
			}
			m.wait.drop()
			continue
		}
		if r.listened != m.runs && !m.env.Sink.Interest(r.reply) {
			if pinned {
				m.unpin()
			}
			m.wait.drop()
			continue
		}
		if r.listened != m.runs || m.octets-r.asked >= congestedEvery {
			r.listened, r.asked = m.runs, m.octets
			if m.env.Sink.Congested(r.reply) {
				r.listened = 0
				if pinned {
					m.unpin()
				}
				m.hold = now + congestedWait
				m.wait.cycle()
				if cycled++; cycled >= m.wait.len() {
					return nil
				}
				continue
			}
		}
		m.hold = 0
		return r
	}
	return nil
}

// serve notes that the request at the head of the queue got a message. It
// reports whether that was its last.
func (m *Machine) serve(now int64, r *request, size int) (done bool) {
	m.wait.account(r, -1)
	if r.bytes > 0 {
		if r.bytes -= size; r.bytes == 0 {
			r.n = 1 // this one, and no more
		}
	}
	r.sent++
	if r.n--; r.n <= 0 {
		m.wait.pop()
		return true
	}
	m.wait.account(r, 1)
	if r.hb > 0 {
		r.hbAt = now + r.hb
		m.wait.wake(r.hbAt)
	}
	m.wait.requeue(m.cfg.PriorityPolicy == api.PriorityPrioritized)
	return false
}

// pin makes the client of r the one that is served.
func (m *Machine) pin(now int64, r *request) {
	m.pinID = NewName() + NewName()
	m.pinID = m.pinID[:pinIDLen]
	m.pinGroup = r.group.Group
	m.pinSince = m.wall(time.Unix(0, now)).UTC()
	m.pinUntil = now + span(m.cfg.PinnedTTL)
	r.group.ID = m.pinID
	m.advise(api.AdvisoryPinned, api.AdvisoryPinnedSubject, api.ConsumerAdvisory{Group: m.pinGroup, PinnedID: m.pinID})
}

// pinIDLen is the length of the identifiers that clients know.
const pinIDLen = 22

func (m *Machine) unpin() {
	m.pinID, m.pinGroup, m.pinSince, m.pinUntil = "", "", time.Time{}, 0
}

// Unpin takes the pin of a priority group away from its client. Pump
// afterwards.
func (m *Machine) Unpin(now time.Time, group string) *api.Error {
	if m.cfg.PriorityPolicy != api.PriorityPinnedClient {
		return api.ErrBadRequest
	}
	if !slices.Contains(m.cfg.PriorityGroups, group) {
		return api.ErrConsumerInvalidPriorityGroup
	}
	if m.pinID != "" {
		m.unpin()
		m.advise(api.AdvisoryUnpinned, api.AdvisoryUnpinnedSubject, api.ConsumerAdvisory{Group: group, Reason: "admin"})
	}
	return nil
}
