package jetstream

import (
	"sync"
	"sync/atomic"

	"petiole/internal/jetstream/api"
	"petiole/internal/jetstream/command"
	"petiole/internal/jetstream/stream"
	"petiole/storage"
	"petiole/storage/wal"
)

// proposer is a storage.Proposer whose committed records come with their tags.
type proposer interface {
	storage.Proposer
	// KickOrCommit is Kick for a goroutine that may wait for the disk.
	KickOrCommit()
	// tag returns what r was proposed with on this node, once.
	tag(r *wal.Record) any
}

// localProposer is the proposer of a single node: the log itself, and the tags
// of lazy records, which the log does not carry.
type localProposer struct {
	log     *wal.Log
	waiting atomic.Int64 // lazy tags; keeps the lock out of the usual path
	mu      sync.Mutex
	tags    map[storage.LSN]any
}

func newLocalProposer(l *wal.Log) *localProposer {
	return &localProposer{log: l, tags: map[storage.LSN]any{}}
}

// Propose hands in one record.
func (p *localProposer) Propose(g storage.GroupID, tag any, parts ...[]byte) error {
	_, err := p.log.Append(g, tag, parts...)
	return err
}

// ProposeUrgent is Propose for a record that gets through when there is no room
// for others.
func (p *localProposer) ProposeUrgent(g storage.GroupID, tag any, parts ...[]byte) error {
	_, err := p.log.AppendUrgent(g, tag, parts...)
	return err
}

// ProposeLazy hands in a record for the next commit.
func (p *localProposer) ProposeLazy(g storage.GroupID, tag any, parts ...[]byte) error {
	if tag == nil {
		_, err := p.log.AppendLazy(g, parts...)
		return err
	}
	p.mu.Lock() // until the tag is there, tag waits
	defer p.mu.Unlock()
	p.waiting.Add(1)
	lsn, err := p.log.AppendLazy(g, parts...)
	if err != nil {
		p.waiting.Add(-1)
		return err
	}
	p.tags[lsn] = tag
	return nil
}

// Kick starts a commit.
func (p *localProposer) Kick() { p.log.Kick() }

// KickOrCommit starts a commit, or makes it.
func (p *localProposer) KickOrCommit() { p.log.KickOrCommit() }

func (p *localProposer) tag(r *wal.Record) any {
	if r.Tag != nil || p.waiting.Load() == 0 {
		return r.Tag
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t, ok := p.tags[r.LSN]
	if ok {
		delete(p.tags, r.LSN)
		p.waiting.Add(-1)
	}
	return t
}

// pubReq is a publish on its way through the log.
type pubReq struct {
	reply []byte
	head  []byte
	parts [3][]byte
}

var pubPool = sync.Pool{New: func() any { return new(pubReq) }}

func (p *pubReq) release() {
	p.parts = [3][]byte{}
	pubPool.Put(p)
}

// asyncQueue runs functions one after the other on a goroutine of its own. It
// is how messages published inside the process, possibly under a stream's lock,
// come to handlers that take locks or wait for the log.
type asyncQueue struct {
	mu     sync.Mutex
	cond   sync.Cond
	once   sync.Once
	fns    []asyncFn
	closed bool
	octets atomic.Int64 // of fns, and of those taken that have not run
}

type asyncFn struct {
	octets int
	fn     func()
}

// asyncLimit is how many octets a queue holds before whatever can wait should.
const asyncLimit = 16 << 20

// full reports whether what is queued takes more memory than it should. The
// queue still takes more: most of what fills it cannot wait.
func (q *asyncQueue) full() bool { return q.octets.Load() > asyncLimit }

// await waits until the queue is not full, or closed. It is for those who make
// others fill it, and hold no locks.
func (q *asyncQueue) await() {
	q.init()
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.full() && !q.closed {
		q.cond.Wait()
	}
}

func (q *asyncQueue) init() { q.once.Do(func() { q.cond.L = &q.mu }) }

// add queues fn, which holds on to so many octets.
func (q *asyncQueue) add(octets int, fn func()) {
	q.init()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.fns = append(q.fns, asyncFn{octets, fn})
	q.octets.Add(int64(octets))
	q.cond.Broadcast()
}

func (q *asyncQueue) run() {
	q.init()
	for {
		q.mu.Lock()
		for len(q.fns) == 0 && !q.closed {
			q.cond.Wait()
		}
		fns := q.fns
		q.fns = nil
		closed := q.closed
		q.mu.Unlock()
		if closed {
			return
		}
		for i := range fns {
			fns[i].fn()
			was := q.full()
			q.octets.Add(-int64(fns[i].octets))
			fns[i] = asyncFn{} // its message is not needed any more
			if was && !q.full() {
				q.mu.Lock()
				q.cond.Broadcast()
				q.mu.Unlock()
			}
		}
	}
}

func (q *asyncQueue) close() {
	q.init()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.cond.Broadcast()
}

// call is the tag of a command that an API request waits for. fn is called when
// it was applied, under the stream's lock: it must not block.
type call struct {
	fn func(callResult)
}

type callResult struct {
	stream.Result
	stream *Stream
	lsn    storage.LSN
	err    *api.Error
}

// ackTag is the tag of a lazy record; an empty message is sent to reply when
// it was applied.
type ackTag struct{ reply string }

// propose hands in a command and waits until it was applied.
func (s *Stream) propose(rec []byte) (callResult, error) {
	if s.memory {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.stopped {
			return callResult{err: api.ErrStreamNotFound}, nil
		}
		r, err := s.applyMemory(rec)
		return callResult{Result: r, stream: s}, err
	}
	return s.e.propose(s.group, rec)
}

// propose hands in a command and waits until it was applied.
func (e *Engine) propose(g storage.GroupID, rec []byte) (callResult, error) {
	ch := make(chan callResult, 1)
	propose := e.prop.ProposeUrgent // of all requests, creating a stream alone does not help one whose disk is full
	if command.KindOf(rec) == command.KindStreamCreate {
		propose = e.prop.Propose
	}
	if err := propose(g, &call{fn: func(r callResult) { ch <- r }}, rec); err != nil {
		if noSpace(err) {
			return callResult{}, api.ErrInsufficientResources
		}
		return callResult{}, err
	}
	e.prop.Kick()
	select {
	case r := <-ch:
		return r, nil
	case <-e.broken:
		return callResult{}, storage.ErrFailed
	case <-e.done:
		return callResult{}, ErrClosed
	}
}
