package broker

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"petiole/internal/subject"
)

// Account is a subject space: its clients and handlers see each other's
// messages. A server has one, "$G".
type Account struct {
	srv   *Server
	name  string
	index subject.Index[*subscription]
	own   atomic.Int64 // subscriptions in the index that are handlers
	pool  sync.Pool    // of *Publisher, for Publish

	watchMu sync.RWMutex
	watched map[string][]*watch
}

func newAccount(s *Server, name string) *Account {
	a := &Account{srv: s, name: name, watched: make(map[string][]*watch)}
	a.pool.New = func() any { return newPublisher(a, nil) }
	return a
}

// Name returns the account's name.
func (a *Account) Name() string { return a.name }

// Subscription is the registration of an internal handler.
type Subscription struct{ s *subscription }

// Close ends the registration. Calls of the handler that are under way are
// not waited for. Further calls of Close do nothing.
func (s *Subscription) Close() {
	if !s.s.closed.Swap(true) {
		s.s.acc.remove(s.s, true)
		s.s.acc.own.Add(-1)
	}
}

// Subject returns the subject subscribed to.
func (s *Subscription) Subject() string { return s.s.subject }

// Handle registers h for messages on subject, which may have wildcards. A
// handler counts as a responder. The error says that subject is not valid.
func (a *Account) Handle(subject string, h Handler) (*Subscription, error) {
	return a.HandleQueue(subject, "", h)
}

// HandleQueue is [Account.Handle] as a member of the queue group queue: of
// all members, client subscriptions included, one gets a message.
func (a *Account) HandleQueue(subj, queue string, h Handler) (*Subscription, error) {
	if !subject.Valid(subj) {
		return nil, fmt.Errorf("handle %q: %w", subj, subject.ErrInvalid)
	}
	s := &subscription{handler: h, acc: a, subject: subj, queue: queue}
	a.insert(s, true)
	a.own.Add(1)
	return &Subscription{s}, nil
}

// insert makes s, whose subject is valid, known. With async the caller may hold
// locks that watches take.
func (a *Account) insert(s *subscription, async bool) {
	_ = a.index.Insert(s.subject, s.queue, s)
	if s.closed.Load() { // ended meanwhile
		a.index.Remove(s.subject, s.queue, s)
	}
	a.changed(s.subject, async)
}

// remove takes s out; async is as for insert.
func (a *Account) remove(s *subscription, async bool) {
	a.index.Remove(s.subject, s.queue, s)
	a.changed(s.subject, async)
}

// bytesOf returns the octets of s, which must not be changed.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

// Publish sends a message to the clients and handlers that subscribe to
// subject. reply may be empty; hdr is a raw header block or empty. All
// arguments are copied. The message is in the clients' outbound queues when
// Publish returns; they are flushed in the background. It never blocks on a
// client. With much to publish a [Publisher] is cheaper.
func (a *Account) Publish(subject, reply string, hdr, data []byte) {
	a.PublishBytes(bytesOf(subject), bytesOf(reply), hdr, data)
}

// PublishBytes is [Account.Publish] without strings.
func (a *Account) PublishBytes(subject, reply, hdr, data []byte) {
	p := a.pool.Get().(*Publisher)
	p.PublishBytes(subject, reply, hdr, data)
	for _, c := range p.dirty {
		c.flushAsync()
	}
	p.endBatch()
	a.pool.Put(p)
}

// HasInterest reports whether any subscription or handler matches the literal
// subject.
func (a *Account) HasInterest(subject string) bool { return a.index.Any(subject) }

// watch is one call of WatchInterest.
type watch struct {
	subject string
	fn      func(bool)
	gone    atomic.Bool

	mu   sync.Mutex // serialises fn
	last bool
}

// WatchInterest calls fn whenever [Account.HasInterest] of the literal subject
// changes, from the time of the call on (ask HasInterest afterwards for the
// state at hand). Calls for one watch do not overlap and arrive in order, on
// the read loop of a client that (un)subscribed or a goroutine of their own,
// never on one that publishes or (un)registers handlers: the caller of
// WatchInterest, Handle, Publish and the like may hold locks that fn takes. fn
// must not block otherwise. cancel does not wait for a call that has begun or
// is just about to; fn may call cancel.
func (a *Account) WatchInterest(subject string, fn func(has bool)) (cancel func()) {
	w := &watch{subject: subject, fn: fn}
	// Locked before anyone knows it: whoever comes to tell it something must
	// not call fn, which may wait for the caller, before this is done.
	w.mu.Lock()
	a.watchMu.Lock()
	a.watched[subject] = append(a.watched[subject], w)
	a.watchMu.Unlock()
	w.last = a.index.Any(subject)
	w.mu.Unlock()
	return func() {
		if w.gone.Swap(true) {
			return
		}
		a.watchMu.Lock()
		defer a.watchMu.Unlock()
		list := a.watched[subject]
		kept := make([]*watch, 0, len(list))
		for _, o := range list {
			if o != w {
				kept = append(kept, o)
			}
		}
		if len(kept) == 0 {
			delete(a.watched, subject)
		} else {
			a.watched[subject] = kept
		}
	}
}

// changed tells the watches that a change under pattern concerns; with async
// another goroutine does.
func (a *Account) changed(pattern string, async bool) {
	var few [4]*watch
	ws := few[:0]
	a.watchMu.RLock()
	if len(a.watched) > 0 {
		if !subject.HasWildcard(pattern) {
			ws = append(ws, a.watched[pattern]...)
		} else {
			for subj, list := range a.watched {
				if subject.Matches(pattern, subj) {
					ws = append(ws, list...)
				}
			}
		}
	}
	a.watchMu.RUnlock()
	switch {
	case len(ws) == 0:
	case async:
		go a.tell(slices.Clone(ws))
	default:
		a.tell(ws)
	}
}

// tell calls the watches whose interest is not what they were told last. It
// looks at the state as it is, so it does not matter in which order the
// goroutines that changed it come here.
func (a *Account) tell(ws []*watch) {
	for _, w := range ws {
		w.mu.Lock()
		if has := a.index.Any(w.subject); has != w.last && !w.gone.Load() {
			w.last = has
			w.fn(has)
		}
		w.mu.Unlock()
	}
}
