package broker

import (
	"strings"
	"time"

	"petiole/internal/subject"
)

// perms is a user's Permissions made ready for one client.
type perms struct {
	pub, sub  SubjectPermission
	responses *ResponsePermission

	// Reply subjects that the client may publish to, with what is left of the
	// permission. Guarded by the client's out.mu.
	replies map[string]response
	pruned  time.Time // when those that have expired were last taken out
}

type response struct {
	left    int // negative: unlimited
	expires time.Time
}

// maxReplies bounds the reply subjects remembered for one client. Looking
// through them for expired ones is done this often at most: requests that are
// never answered must not make each further one expensive.
const (
	maxReplies = 64 << 10
	pruneEvery = time.Second
)

func newPerms(p *Permissions) *perms {
	if p == nil {
		return nil
	}
	return &perms{pub: p.Publish, sub: p.Subscribe, responses: p.Responses}
}

func (p *perms) mayPublish(subj []byte) bool {
	if p == nil {
		return true
	}
	if len(p.pub.Allow) > 0 && !anyMatches(p.pub.Allow, subj) {
		return false
	}
	// With a permission for responses and nothing listed as permitted, only
	// responses are.
	if len(p.pub.Allow) == 0 && p.responses != nil {
		return false
	}
	return !anyMatches(p.pub.Deny, subj)
}

func anyMatches(list []string, subj []byte) bool {
	for _, pattern := range list {
		if subject.Matches(pattern, subj) {
			return true
		}
	}
	return false
}

// maySubscribe also says whether part of what subj matches is denied, so that
// deliveries have to be checked. Where entries with queue groups concern subj, a
// group has to be one of theirs: entries without do not permit others.
func (p *perms) maySubscribe(subj, queue string) (ok, filter bool) {
	if len(p.sub.Allow) > 0 {
		grouped := false // whether it is the group that decides, and ok is what it decides
		for _, entry := range p.sub.Allow {
			s, q, hasQ := strings.Cut(entry, " ")
			switch {
			case hasQ && queue == "" || !hasQ && grouped || !subject.Subset(subj, s):
			case !hasQ:
				ok = true
			default:
				ok = grouped && ok || queueMatches(strings.TrimSpace(q), queue)
				grouped = true
			}
		}
		if !ok {
			return false, false
		}
	}
	for _, entry := range p.sub.Deny {
		s, q, hasQ := strings.Cut(entry, " ")
		q = strings.TrimSpace(q)
		if hasQ && (queue == "" || !queueMatches(q, queue)) {
			continue
		}
		if subject.Subset(subj, s) {
			return false, false
		}
		if subject.Overlaps(subj, s) {
			filter = true
		}
	}
	return true, filter
}

func queueMatches(pattern, queue string) bool {
	return subject.Valid(pattern) && subject.Valid(queue) && subject.Matches(pattern, queue) || pattern == queue
}

// denied reports whether the client must not get a message on subj although a
// subscription of it matches.
func (p *perms) denied(subj []byte, queue string) bool {
	if p == nil {
		return false
	}
	for _, entry := range p.sub.Deny {
		s, q, hasQ := strings.Cut(entry, " ")
		if hasQ && (queue == "" || !queueMatches(strings.TrimSpace(q), queue)) {
			continue
		}
		if subject.Matches(s, subj) {
			return true
		}
	}
	return false
}

// expect permits publishing to reply. The client's out.mu is held.
func (p *perms) expect(reply []byte) {
	now := time.Now()
	if len(p.replies) >= maxReplies/16 && now.Sub(p.pruned) > pruneEvery {
		p.pruned = now
		for k, r := range p.replies {
			if !r.expires.IsZero() && now.After(r.expires) {
				delete(p.replies, k)
			}
		}
	}
	if len(p.replies) >= maxReplies {
		for k := range p.replies { // any one
			delete(p.replies, k)
			break
		}
	}
	r := response{left: p.responses.Max}
	if r.left == 0 {
		r.left = 1
	}
	switch d := p.responses.Expires; {
	case d == 0:
		r.expires = now.Add(2 * time.Minute)
	case d > 0:
		r.expires = now.Add(d)
	}
	if p.replies == nil {
		p.replies = make(map[string]response)
	}
	p.replies[string(reply)] = r
}

// mayRespond reports whether subj is a reply subject that the client may
// still publish to, and counts it.
func (c *client) mayRespond(subj []byte) bool {
	if p := c.perms.Load(); p == nil || p.responses == nil {
		return false
	}
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	p := c.perms.Load() // does not change under the lock
	if p == nil {
		return false
	}
	r, ok := p.replies[string(subj)]
	if !ok {
		return false
	}
	if !r.expires.IsZero() && time.Now().After(r.expires) {
		delete(p.replies, string(subj))
		return false
	}
	if r.left > 0 {
		if r.left--; r.left == 0 {
			delete(p.replies, string(subj))
		} else {
			p.replies[string(subj)] = r
		}
	}
	return true
}
