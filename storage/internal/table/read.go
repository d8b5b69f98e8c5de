package table

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"weak"

	"petiole/storage"
)

// Sizes of what is read from the image at once.
const (
	runMin      = 16
	runMax      = 256
	runBytes    = 128 << 10
	runsCached  = 8
	scanBudget  = 16   // messages tried before the index is asked
	fetchMax    = 32   // messages loaded at once that the index names
	lookAhead   = 1024 // sequences taken from the index at once
	rangeChunk  = 128  // messages copied from the table under one lock
	rangeMax    = 1024 // messages that Range loads at once
	rangeBytes  = 256 << 10
	matchCached = 32
)

// Load returns the message at seq; see storage.Store.
func (t *Table) Load(seq uint64) (storage.Message, error) {
	t.mu.RLock()
	if t.closed {
		t.mu.RUnlock()
		return storage.Message{}, storage.ErrClosed
	}
	if !t.exists(seq) {
		t.mu.RUnlock()
		return storage.Message{}, storage.ErrNotFound
	}
	if sl := t.slot(seq); sl != nil {
		m := sl.message(seq)
		t.mu.RUnlock()
		return m, nil
	}
	t.mu.RUnlock()
	if t.image == nil {
		return storage.Message{}, t.errMissing(seq)
	}
	if r := t.runs.get(seq); r != nil {
		if i, ok := r.find(seq); ok {
			return r.msgs[i], nil
		}
	}
	msgs, _, err := t.image.Run(seq, seq, 1, 0, nil)
	if err == nil && len(msgs) == 1 {
		return msgs[0], nil
	}
	// It may have been removed since, and a checkpoint have dropped it.
	t.mu.RLock()
	still := t.exists(seq)
	t.mu.RUnlock()
	switch {
	case !still:
		return storage.Message{}, storage.ErrNotFound
	case err != nil:
		return storage.Message{}, fmt.Errorf("load message %d: %w", seq, err)
	}
	return storage.Message{}, t.errMissing(seq)
}

// run is a stretch of messages read from the image: all it held in
// [from, through] at that time.
type run struct {
	from, through uint64
	msgs          []storage.Message
}

// find returns the index of the first message at or after seq, and whether it
// is at seq.
func (r *run) find(seq uint64) (int, bool) {
	return slices.BinarySearchFunc(r.msgs, seq, func(m storage.Message, q uint64) int {
		switch {
		case m.Seq < q:
			return -1
		case m.Seq > q:
			return 1
		}
		return 0
	})
}

// runCache keeps the runs read last: consumers read message by message, each
// at its own place. What has been removed since is for the table to know. The
// garbage collector takes back what is not in use: there may be thousands of
// streams that are read once in a while.
type runCache struct {
	mu   sync.Mutex
	runs [runsCached]cachedRun
	hand int
}

type cachedRun struct {
	from, through uint64 // through is 0 if there is none
	msgs          int
	run           weak.Pointer[run]
}

func (c *runCache) get(seq uint64) *run {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.runs {
		if r := &c.runs[i]; r.from <= seq && seq <= r.through {
			if p := r.run.Value(); p != nil {
				return p
			}
		}
	}
	return nil
}

// load returns a run from seq on, read ahead the further the longer reading
// has been sequential.
func (t *Table) load(seq, to uint64) (*run, error) {
	c := &t.runs
	c.mu.Lock()
	n, slot := runMin, -1
	for i, r := range c.runs {
		if r.through != 0 && r.through < seq && seq-r.through <= runMax {
			n = min(2*max(r.msgs, runMin/2), runMax)
			slot = i
		}
	}
	if slot < 0 {
		slot = c.hand
		c.hand = (c.hand + 1) % runsCached
	}
	c.mu.Unlock()
	msgs, through, err := t.image.Run(seq, to, n, runBytes, nil)
	if err != nil {
		return nil, err
	}
	r := &run{from: seq, through: min(through, to), msgs: msgs}
	c.mu.Lock()
	c.runs[slot] = cachedRun{from: r.from, through: r.through, msgs: len(r.msgs), run: weak.Make(r)}
	c.mu.Unlock()
	return r, nil
}

// scan tries up to budget messages from seq on and returns the first that f
// selects. Without one it returns where to go on, End if nothing is left.
func (t *Table) scan(f storage.Filter, all bool, seq uint64, budget int) (m storage.Message, next uint64, err error) {
	t.mu.RLock()
	for {
		if t.closed {
			t.mu.RUnlock()
			return m, 0, storage.ErrClosed
		}
		e, ok := t.gone.next(max(seq, t.first), t.last)
		if !ok || t.msgs == 0 {
			t.mu.RUnlock()
			return m, End, nil
		}
		if budget == 0 {
			t.mu.RUnlock()
			return m, e, nil
		}
		if sl := t.slot(e); sl != nil {
			budget--
			if all || f.Match(sl.subj.name) {
				m = sl.message(e)
				t.mu.RUnlock()
				return m, e, nil
			}
			seq = e + 1
			continue
		}
		end := t.diskEnd()
		t.mu.RUnlock()
		if e >= end {
			return m, 0, t.errMissing(e)
		}
		r := t.runs.get(e)
		if r == nil {
			if r, err = t.load(e, end-1); err != nil {
				t.mu.RLock()
				still := t.exists(e)
				t.mu.RUnlock()
				if still {
					return m, 0, fmt.Errorf("load message %d: %w", e, err)
				}
				t.mu.RLock()
				seq = e + 1
				continue
			}
		}
		t.mu.RLock()
		i, _ := r.find(e)
		seq = e
		for ; budget > 0 && seq <= r.through; i++ {
			// The run must hold all that exists.
			e, ok := t.gone.next(max(seq, t.first), min(t.last, r.through))
			for i < len(r.msgs) && (!ok || r.msgs[i].Seq < e) {
				i++
			}
			if !ok {
				seq = r.through + 1
				break
			}
			if i == len(r.msgs) || r.msgs[i].Seq != e {
				t.mu.RUnlock()
				return m, 0, t.errMissing(e)
			}
			budget--
			if all || f.Match(r.msgs[i].Subject) {
				m = r.msgs[i]
				t.mu.RUnlock()
				return m, e, nil
			}
			seq = e + 1
		}
	}
}

// LoadNext returns the next message that f selects; see storage.Store.
func (t *Table) LoadNext(f storage.Filter, seq uint64) (storage.Message, error) {
	all := f.All()
	var key string
	if !all {
		key = f.Patterns[0]
		if len(f.Patterns) > 1 {
			key = strings.Join(f.Patterns, "\x00")
		}
	}
	for from := seq; ; {
		budget := math.MaxInt
		if !all {
			// What the index has already said for this filter goes first.
			seqs, loaded, through, ok := t.matches.ahead(key, seq)
			m, err := t.firstOf(key, seqs, loaded)
			if err != nil || m.Seq != 0 {
				return m, err
			}
			if ok {
				seq = through + 1
			}
			budget = scanBudget
		}
		m, next, err := t.scan(f, all, seq, budget)
		switch {
		case err != nil:
			return m, err
		case m.Seq != 0:
			return m, nil
		case next == End:
			return m, storage.ErrEOF
		}
		seqs, through, err := t.collect(f, next)
		if err != nil {
			return m, err
		}
		// Nothing between from and next, so that all from from on is known.
		t.matches.setAhead(key, from, through, seqs)
		seq = from
	}
}

// firstOf returns the first of seqs that exists, or no message; loaded are
// some of them. It reads ahead what comes after one it has to load.
func (t *Table) firstOf(key string, seqs []uint64, loaded *run) (storage.Message, error) {
	for i, q := range seqs {
		t.mu.RLock()
		if t.closed {
			t.mu.RUnlock()
			return storage.Message{}, storage.ErrClosed
		}
		ok := t.exists(q)
		sl := t.slot(q)
		if ok && sl != nil {
			m := sl.message(q)
			t.mu.RUnlock()
			return m, nil
		}
		end := t.diskEnd()
		t.mu.RUnlock()
		if !ok {
			continue
		}
		if loaded != nil {
			if j, ok := loaded.find(q); ok {
				return loaded.msgs[j], nil
			}
		}
		if q >= end {
			return storage.Message{}, t.errMissing(q)
		}
		// Not what the table holds, which is there already.
		n, _ := slices.BinarySearch(seqs[i:], end)
		msgs, err := t.image.Fetch(seqs[i:i+min(n, fetchMax)], runBytes)
		if err == nil && len(msgs) > 0 && msgs[0].Seq == q {
			t.matches.setLoaded(key, &run{msgs: msgs})
			return msgs[0], nil
		}
		// Removed since, or damaged: Load knows.
		m, err := t.Load(q)
		if err == nil || !isNotFound(err) {
			return m, err
		}
	}
	return storage.Message{}, nil
}

// collect asks the index for sequences from from on that f selects; beyond
// through it does not know. Some may not exist any more.
func (t *Table) collect(f storage.Filter, from uint64) (seqs []uint64, through uint64, err error) {
	t.mu.RLock()
	through = t.last
	t.mu.RUnlock()
	subs, err := t.match(f)
	if err != nil {
		return nil, 0, err
	}
	n := max(lookAhead/max(len(subs), 1), 8)
	for _, s := range subs {
		had := len(seqs)
		var upto uint64
		if seqs, upto, err = t.postings(s, from, n, seqs); err != nil {
			return nil, 0, err
		}
		if len(seqs) > had {
			through = min(through, upto)
		}
	}
	slices.Sort(seqs)
	seqs = slices.Compact(seqs)
	i, found := slices.BinarySearch(seqs, through)
	if found {
		i++
	}
	return seqs[:i], through, nil
}

// postings appends sequences of s from from on, complete up to through. It
// takes the lock itself.
func (t *Table) postings(s *subj, from uint64, n int, dst []uint64) (seqs []uint64, through uint64, err error) {
	had := len(dst)
	t.mu.RLock()
	if s.msgs == 0 || s.last < from {
		t.mu.RUnlock()
		return dst, End, nil
	}
	from = max(from, s.first, t.first)
	through = End
	recent := s.recent[s.searchRecent(from):]
	whole := len(s.recent) > 0 && s.recent[0] <= from // recent is a complete tail
	if len(recent) > n {
		recent, through = recent[:n], recent[n-1]
	}
	disk := from < t.diskEnd() && !whole
	if !disk {
		dst = append(dst, recent...)
		t.mu.RUnlock()
		return dst, through, nil
	}
	recent = slices.Clone(recent)
	t.mu.RUnlock()
	dst, upto, err := t.image.Posts(s.id, from, n, dst)
	if err != nil {
		return dst[:had], 0, err
	}
	if upto != End {
		return dst, upto, nil
	}
	for _, q := range recent {
		if len(dst) == had || q > dst[len(dst)-1] {
			dst = append(dst, q)
		}
	}
	if through != End && len(dst) > had {
		through = max(through, dst[len(dst)-1])
	}
	return dst, through, nil
}

func isNotFound(err error) bool { return err == storage.ErrNotFound }

// LoadLast returns the last message that matches; see storage.Store.
func (t *Table) LoadLast(pattern string, upto uint64) (storage.Message, error) {
	for {
		seq, err := t.lastSeq(pattern, upto)
		if err != nil {
			return storage.Message{}, err
		}
		m, err := t.Load(seq)
		if err == nil || !isNotFound(err) {
			return m, err
		}
		// Removed in between: look again.
	}
}

func (t *Table) lastSeq(pattern string, upto uint64) (uint64, error) {
	if upto == 0 {
		upto = End - 1
	}
	if pattern == "" || pattern == ">" {
		t.mu.RLock()
		defer t.mu.RUnlock()
		if t.closed {
			return 0, storage.ErrClosed
		}
		if seq, ok := t.gone.prev(min(upto, t.last), t.first); ok && t.msgs > 0 {
			return seq, nil
		}
		return 0, storage.ErrNotFound
	}
	subs, err := t.match(storage.Filter{Patterns: []string{pattern}})
	if err != nil {
		return 0, err
	}
	t.mu.RLock()
	if t.closed {
		t.mu.RUnlock()
		return 0, storage.ErrClosed
	}
	best := uint64(0)
	var rest []*subj
	for _, s := range subs {
		switch {
		case s.msgs == 0 || s.first > upto:
		case s.last <= upto:
			best = max(best, s.last)
		default:
			best = max(best, s.first)
			rest = append(rest, s)
		}
	}
	t.mu.RUnlock()
	for _, s := range rest {
		seq, err := t.lastOf(s, upto, best)
		if err != nil {
			return 0, err
		}
		best = max(best, seq)
	}
	if best == 0 {
		return 0, storage.ErrNotFound
	}
	return best, nil
}

// lastOf returns the last existing sequence of s up to upto if it lies above
// floor, else 0. It takes the lock itself.
func (t *Table) lastOf(s *subj, upto, floor uint64) (uint64, error) {
	t.mu.RLock()
	for i := s.searchRecent(upto + 1); i > 0; i-- {
		if q := s.recent[i-1]; t.exists(q) {
			t.mu.RUnlock()
			return q, nil
		}
	}
	if len(s.recent) > 0 {
		upto = min(upto, s.recent[0]-1)
	}
	t.mu.RUnlock()
	var buf []uint64
	for t.image != nil && upto > floor {
		seqs, down, err := t.image.PostsBefore(s.id, upto, buf[:0])
		if err != nil {
			return 0, err
		}
		t.mu.RLock()
		for i := len(seqs); i > 0; i-- {
			if t.exists(seqs[i-1]) {
				t.mu.RUnlock()
				return seqs[i-1], nil
			}
		}
		t.mu.RUnlock()
		if down == 0 {
			break
		}
		buf, upto = seqs, down-1
	}
	return 0, nil
}

// Range calls fn for messages in order; see storage.Store.
func (t *Table) Range(seq uint64, fn func(storage.Message) bool) error {
	var buf []storage.Message
	for {
		t.mu.RLock()
		if t.closed {
			t.mu.RUnlock()
			return storage.ErrClosed
		}
		buf = buf[:0]
		e, ok := uint64(0), t.msgs > 0
		for ok && len(buf) < rangeChunk {
			if e, ok = t.gone.next(max(seq, t.first), t.last); !ok {
				break
			}
			sl := t.slot(e)
			if sl == nil {
				break
			}
			buf = append(buf, sl.message(e))
			seq = e + 1
		}
		end := t.diskEnd()
		t.mu.RUnlock()
		switch {
		case len(buf) > 0:
		case !ok:
			return nil
		case e >= end:
			return t.errMissing(e)
		default:
			var through uint64
			var err error
			if buf, through, err = t.image.Run(e, end-1, rangeMax, rangeBytes, buf); err != nil {
				t.mu.RLock()
				still := t.exists(e)
				t.mu.RUnlock()
				if still {
					return fmt.Errorf("load message %d: %w", e, err)
				}
				seq = e + 1
				continue
			}
			if buf, seq, err = t.keepExisting(buf, e, min(through, end-1)); err != nil {
				return err
			}
		}
		for i := range buf {
			if !fn(buf[i]) {
				return nil
			}
		}
		clear(buf)
	}
}

// keepExisting leaves of msgs, all that the image holds in [from, through], those
// that exist, in place, and returns where to go on. The image has to hold all
// that exists: what it lacks ends the answer before it or, if nothing comes
// before it, is the error.
func (t *Table) keepExisting(msgs []storage.Message, from, through uint64) (kept []storage.Message, next uint64, err error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	n := 0
	for i := 0; ; i++ {
		e, ok := t.gone.next(max(from, t.first), min(t.last, through))
		for i < len(msgs) && (!ok || msgs[i].Seq < e) {
			i++
		}
		switch {
		case !ok:
			return msgs[:n], through + 1, nil
		case i < len(msgs) && msgs[i].Seq == e:
		case n == 0:
			return nil, 0, t.errMissing(e)
		default:
			return msgs[:n], e, nil // found missing the next time
		}
		if n != i {
			msgs[n] = msgs[i]
		}
		n++
		from = e + 1
	}
}

// Subject returns the summary of one subject; see storage.Store.
func (t *Table) Subject(subject string) (storage.SubjectState, bool) {
	s, err := t.find(subject)
	if err != nil {
		return storage.SubjectState{}, false // whatever follows from that will not be stored
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if s == nil || s.msgs == 0 {
		return storage.SubjectState{}, false
	}
	return storage.SubjectState{Msgs: s.msgs, First: s.first, Last: s.last}, true
}

// Subjects calls fn for matching subjects; see storage.Store.
func (t *Table) Subjects(pattern string, fn func(string, storage.SubjectState) bool) {
	type entry struct {
		name string
		st   storage.SubjectState
	}
	subs, err := t.match(storage.Filter{Patterns: []string{pattern}})
	if err != nil {
		return
	}
	var buf [64]entry
	for len(subs) > 0 {
		part := subs[:min(len(buf), len(subs))]
		subs = subs[len(part):]
		n := 0
		t.mu.RLock()
		for _, s := range part {
			if s.msgs > 0 && t.subjects[s.name] == s {
				buf[n] = entry{s.name, storage.SubjectState{Msgs: s.msgs, First: s.first, Last: s.last}}
				n++
			}
		}
		t.mu.RUnlock()
		for _, e := range buf[:n] {
			if !fn(e.name, e.st) {
				return
			}
		}
	}
}

// NumPending counts messages; see storage.Store.
func (t *Table) NumPending(f storage.Filter, seq uint64) uint64 {
	if f.All() {
		t.mu.RLock()
		defer t.mu.RUnlock()
		switch {
		case t.msgs == 0 || seq > t.last:
			return 0
		case seq <= t.first:
			return t.msgs
		case t.last-t.first+1 == t.msgs:
			return t.last - seq + 1
		}
		return t.last - seq + 1 - t.gone.count(seq, t.last)
	}
	var n uint64
	var part []*subj
	subs, err := t.match(f)
	if err != nil {
		return 0 // reading will say why
	}
	t.mu.RLock()
	for _, s := range subs {
		switch {
		case s.msgs == 0 || s.last < seq:
		case s.first >= seq:
			n += s.msgs
		default:
			part = append(part, s)
		}
	}
	t.mu.RUnlock()
	var buf []uint64
	for _, s := range part {
		for from := seq; ; {
			seqs, through, err := t.postings(s, from, lookAhead, buf[:0])
			if err != nil {
				break // the messages themselves will say so when read
			}
			t.mu.RLock()
			for _, q := range seqs {
				if q >= seq && t.exists(q) {
					n++
				}
			}
			t.mu.RUnlock()
			if through == End {
				break
			}
			buf, from = seqs, through+1
		}
	}
	return n
}

// SeqAtTime finds a sequence by time; see storage.Store.
func (t *Table) SeqAtTime(at int64) uint64 {
	t.mu.RLock()
	lo, hi, none := t.first, t.last+1, t.last+1
	empty := t.msgs == 0 || at > t.lastTime
	t.mu.RUnlock()
	if empty {
		return none
	}
	// Invariant: existing messages below lo are older, those from hi on not.
	for lo < hi {
		mid := lo + (hi-lo)/2
		t.mu.RLock()
		e, ok := t.gone.next(max(mid, t.first), min(hi-1, t.last))
		var sl *slot
		var tm int64
		if ok {
			if sl = t.slot(e); sl != nil {
				tm = sl.time
			}
		}
		t.mu.RUnlock()
		if !ok {
			hi = mid
			continue
		}
		if sl == nil && t.image != nil {
			ms, _, err := t.image.Metas(e, e, 1, nil)
			if err != nil || len(ms) == 0 || ms[0].Err != nil {
				// Damaged or just removed: as old as what is below it.
				lo = e + 1
				continue
			}
			tm = ms[0].Time
		}
		if tm >= at {
			hi = mid
		} else {
			lo = e + 1
		}
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if e, ok := t.gone.next(max(lo, t.first), t.last); ok && t.msgs > 0 {
		return e
	}
	return t.last + 1
}
