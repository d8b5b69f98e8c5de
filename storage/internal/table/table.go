// Package table is the in-memory half of a message store: which sequences hold
// a message, the summary of every subject, and the messages that the durable
// half (the [Image]) does not hold yet. Without an image it is a whole store.
//
//	            ┌ State, Subjects: sums kept up to date
//	reads ──────┤ gone: which sequences hold nothing (authoritative)
//	            └ message n: active set ─► frozen set ─► image
//
//	Append, Remove ──► active set ──Freeze──► frozen set ──Checkpoint──► image
//
// What decides whether message n exists is the table alone, never the image:
// the image's messages and postings may be more than what exists (removals
// reach it late), and never less.
//
// Locking: one writer calls the methods that change; the lock is held for
// memory only, except that removing may have to look up postings under it.
// An Image must not call back into the table.
package table

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"petiole/storage"
)

// Meta is what is known of a message without its contents.
type Meta struct {
	Seq     uint64
	Time    int64
	Subject string
	Size    uint64 // as storage.Message.Size; 0 if Err hides it
	Err     error  // a *storage.CorruptError: time and subject are best guesses
}

// End, as the end of what a look-up covers, says that nothing lies beyond.
const End = math.MaxUint64

// Image is the durable half. Its methods may be called from any goroutine.
type Image interface {
	// Run appends to dst the messages held in [from, to], ascending, but at
	// least one and not many more than max messages or maxBytes octets; through
	// says up to where the answer is complete. A damaged message ends the run
	// before it or, if it is the first, is the error.
	Run(from, to uint64, max, maxBytes int, dst []storage.Message) (msgs []storage.Message, through uint64, err error)
	// Fetch returns those of the messages with the sequences (ascending) that
	// are held, from the first on, as many as maxBytes allow but at least one.
	// A damaged message ends the answer before it or, if it is the first, is
	// the error.
	Fetch(seqs []uint64, maxBytes int) ([]storage.Message, error)
	// Metas is Run for metas, appended to dst; damaged messages are among them.
	Metas(from, to uint64, max int, dst []Meta) (metas []Meta, through uint64, err error)
	// Posts appends to dst the sequences from from on of the subject with that
	// id, ascending and at least n if there are as many; through says up to
	// where the answer is complete (End: there are no more).
	Posts(id, from uint64, n int, dst []uint64) (seqs []uint64, through uint64, err error)
	// Subject returns the summary of the subject of that name, false if it holds
	// none. An error that is storage.ErrCorrupt says that nobody knows.
	Subject(name string) (s Subject, ok bool, err error)
	// SubjectsAfter appends to dst, in the order of names, the n subjects whose
	// names come after the given one, or as many as there are.
	SubjectsAfter(name string, n int, dst []Subject) ([]Subject, error)
	// PostsBefore appends, ascending, some of the subject's highest sequences
	// up to upto; down says down to where the answer is complete (0: there
	// are none below).
	PostsBefore(id, upto uint64, dst []uint64) (seqs []uint64, down uint64, err error)
}

// Table implements the message half of storage.Store.
type Table struct {
	path  string
	image Image // nil: everything is in memory

	mu        sync.RWMutex
	closed    bool
	msgs      uint64
	bytes     uint64
	first     uint64 // last+1 if there are no messages
	last      uint64
	firstTime int64
	lastTime  int64
	gone      gone
	live      int // subjects with messages
	subjects  map[string]*subj
	// complete says that subjects has all that there are; thaws counts how often
	// some have been dropped, broken is why nothing may be changed. loading is
	// held while the rest is taken in.
	complete bool
	thaws    uint64
	broken   error
	loading  sync.Mutex
	// hurt is damage of the image that a removal has gone round; onHurt is told.
	// hidden is what sizes it hides, by subject, as far as anybody has asked.
	hurt   error
	onHurt func(error)
	hidden map[string]hidden
	// list holds all of subjects and some that are no longer, in the order in
	// which they came; it is only appended to within a list generation, so that
	// matching can go over a snapshot of it without the lock.
	list    []*subj
	listGen uint64
	nextID  uint64
	gen     uint64
	active  *set
	frozen  *set

	front        []Meta // of the image, from the front on (writer only)
	frontThrough uint64

	runs    runCache
	matches matchCache
}

// New returns an empty table over an image, which is empty too or nil; path
// names the image's file in errors.
func New(image Image, path string) *Table {
	t := &Table{
		path:     path,
		image:    image,
		first:    1,
		subjects: make(map[string]*subj),
		complete: true,
		nextID:   1,
		gen:      1,
	}
	t.active = t.newSet(1)
	return t
}

func (t *Table) newSet(base uint64) *set {
	s := &set{gen: t.gen, base: base}
	if t.image != nil {
		s.pages = make(map[uint64]*Page)
	}
	return s
}

func (t *Table) exists(seq uint64) bool {
	return seq >= t.first && seq <= t.last && !t.gone.contains(seq)
}

// diskEnd returns the lowest sequence that need not be in the image.
func (t *Table) diskEnd() uint64 {
	switch {
	case t.image == nil:
		return 0
	case t.frozen != nil:
		return t.frozen.base
	}
	return t.active.base
}

// slot returns the message at seq if a set holds it.
func (t *Table) slot(seq uint64) *slot {
	if seq >= t.active.base {
		return t.active.slot(seq)
	}
	if t.frozen != nil && seq >= t.frozen.base {
		return t.frozen.slot(seq)
	}
	return nil
}

func (t *Table) touch(s *subj) {
	if s.gen == t.gen {
		return
	}
	if t.frozen != nil && s.gen == t.frozen.gen {
		s.snap = &snapshot{gen: s.gen, sums: s.sums}
	}
	s.gen = t.gen
	if t.image != nil {
		t.active.dirty = append(t.active.dirty, s)
	}
}

// State returns the summary.
func (t *Table) State() storage.State {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.state()
}

func (t *Table) state() storage.State {
	st := storage.State{
		Msgs: t.msgs, Bytes: t.bytes, First: t.first, FirstTime: t.firstTime,
		Last: t.last, LastTime: t.lastTime, Subjects: t.live,
	}
	if t.msgs > 0 {
		st.Deleted = t.last - t.first + 1 - t.msgs
	}
	return st
}

// Append stores m; see storage.Store.
func (t *Table) Append(m storage.Message) (uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.writable(); err != nil {
		return 0, err
	}
	if len(m.Subject) == 0 || len(m.Subject) > storage.MaxSubject {
		return 0, fmt.Errorf("store message: a subject of %d octets, allowed are 1 to %d", len(m.Subject), storage.MaxSubject)
	}
	return t.append(m)
}

func (t *Table) append(m storage.Message) (uint64, error) {
	s, err := t.lookup(m.Subject)
	if err != nil {
		return 0, err
	}
	seq := t.last + 1
	if m.Seq > seq {
		t.skip(m.Seq - 1)
		seq = m.Seq
	}
	if s == nil {
		s = &subj{name: strings.Clone(m.Subject), id: t.nextID, recent: make([]uint64, 0, 2)}
		t.nextID++
		t.subjects[s.name] = s
		t.list = append(t.list, s)
	}
	t.touch(s)
	sl := t.active.add(seq)
	sl.subj, sl.time, sl.header, sl.data = s, m.Time, m.Header, m.Data
	if len(sl.header) == 0 {
		sl.header = nil
	}
	t.active.bytes += sl.cost()
	size := m.Size()
	if s.msgs == 0 {
		s.first = seq
		t.live++
	}
	s.last = seq
	s.msgs++
	s.bytes += size
	s.recent = append(s.recent, seq)
	if t.msgs == 0 {
		t.first, t.firstTime = seq, m.Time
	}
	t.msgs++
	t.bytes += size
	t.last, t.lastTime = seq, m.Time
	return seq, nil
}

// Skip assigns sequences without messages; see storage.Store.
func (t *Table) Skip(seq uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return storage.ErrClosed
	}
	t.skip(seq)
	return nil
}

func (t *Table) skip(seq uint64) {
	if seq <= t.last {
		return
	}
	if t.msgs == 0 {
		t.first = seq + 1
	} else {
		t.gone.skip(t.last+1, seq, t.gen, t.active.pages)
	}
	t.last = seq
}

// Remove deletes the message at seq; see storage.Store.
func (t *Table) Remove(seq uint64) (uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.writable(); err != nil {
		return 0, err
	}
	return t.remove(seq)
}

func (t *Table) remove(seq uint64) (uint64, error) {
	if !t.exists(seq) {
		return 0, storage.ErrNotFound
	}
	s, size, err := t.owner(seq)
	if err != nil {
		return 0, fmt.Errorf("remove message %d: %w", seq, err)
	}
	// A damaged message's size may be a guess, and it may be nobody's. By what guesses
	// were wrong goes with the last message of the subject, so that the sums of
	// subjects and of all stay the same.
	if s != nil {
		t.touch(s)
		if size = min(size, s.bytes); s.msgs == 1 {
			size = s.bytes
		}
		s.msgs--
		s.bytes -= size
	}
	t.msgs--
	t.bytes -= min(size, t.bytes)
	t.unlink(seq)
	if err := t.settleFirst(); err != nil || s == nil {
		return size, err
	}
	return size, t.settle(s, seq)
}

// unlink makes seq, which exists, not exist, wherever it is held.
func (t *Table) unlink(seq uint64) {
	if seq >= t.active.base {
		t.active.remove(seq)
	} else if seq != t.first {
		// What lies below first needs no remembering.
		t.active.removed = append(t.active.removed, seq)
		t.active.bytes += removedCost
	}
	switch {
	case t.msgs == 0:
		t.first, t.firstTime, t.bytes = t.last+1, 0, 0
		t.gone.forget(t.first, t.active.pages)
	case seq == t.first:
		t.first, _ = t.gone.next(seq+1, t.last)
		t.firstTime = 0
		t.gone.forget(t.first, t.active.pages)
	default:
		t.gone.mark(seq, t.gen, t.active.pages)
	}
}

// settleFirst looks up the time of the first message after it has changed.
func (t *Table) settleFirst() error {
	if t.msgs == 0 || t.firstTime != 0 {
		return nil
	}
	tm, err := t.timeOf(t.first)
	if err != nil && t.goRound(err) {
		// It cannot be told now. Nothing may expire before its time.
		tm, err = t.lastTime, nil
	}
	t.firstTime = tm
	return err
}

// errFewer says that a subject has fewer messages than counted: more than one
// damage has come together, and its remaining messages cannot be told.
var errFewer = fmt.Errorf("messages of a subject: %w", storage.ErrCorrupt)

// settle brings a subject's first and last up to date after seq was removed.
func (t *Table) settle(s *subj, seq uint64) error {
	err := t.settleEnds(s, seq)
	if err == errFewer {
		// Nothing can be found by this subject any more, until a repair.
		t.goRound(err)
		s.msgs, err = 0, nil
	}
	if err != nil {
		return err
	}
	if s.msgs == 0 {
		t.live--
		delete(t.hidden, s.name)
		s.first, s.last, s.bytes = 0, 0, 0
		s.recent, s.ahead = s.recent[:0], nil
		if t.image == nil {
			delete(t.subjects, s.name)
			t.prune()
		}
		return nil
	}
	s.cutRecent(s.first)
	if n := len(s.recent); n > 64 && uint64(n/2) > s.msgs {
		s.recent = slices.DeleteFunc(s.recent, func(q uint64) bool { return !t.exists(q) })
	}
	return nil
}

// settleEnds finds a subject's first and last if seq was one of them.
func (t *Table) settleEnds(s *subj, seq uint64) error {
	if s.msgs == 0 {
		return nil
	}
	var err error
	if seq == s.first {
		if s.msgs == 1 {
			s.first = s.last
		} else {
			s.first, err = t.nextOf(s, seq+1)
		}
	}
	if seq == s.last && err == nil {
		if s.msgs == 1 {
			s.last = s.first
		} else {
			s.last, err = t.prevOf(s, seq-1)
		}
	}
	return err
}

// prune rebuilds the list of subjects once most of it are no longer.
func (t *Table) prune() {
	if len(t.list) < 64 || len(t.list)/2 < len(t.subjects) {
		return
	}
	list := make([]*subj, 0, len(t.subjects)+len(t.subjects)/4)
	for _, s := range t.list {
		if t.subjects[s.name] == s {
			list = append(list, s)
		}
	}
	t.list = list
	t.listGen++
}

// nextOf returns the first sequence of s at or after from that exists.
func (t *Table) nextOf(s *subj, from uint64) (uint64, error) {
	for end := t.diskEnd(); from < end && (len(s.recent) == 0 || from < s.recent[0]); {
		a := s.ahead
		if a == nil {
			a = &ahead{}
			s.ahead = a
		}
		if from < a.from || from > a.through {
			seqs, through, err := t.posts(s, from, end-1, 1, a.seqs[:0])
			if err != nil {
				s.ahead = nil
				return 0, err
			}
			// The image may be further than the table knows.
			*a = ahead{seqs: seqs, from: from, through: min(through, end-1)}
		}
		for i, q := range a.seqs {
			if q >= from && t.exists(q) {
				a.seqs, a.from = a.seqs[i:], from
				return q, nil
			}
		}
		from = a.through + 1
		s.ahead = nil
	}
	for _, q := range s.recent[s.searchRecent(from):] {
		if t.exists(q) {
			return q, nil
		}
	}
	return 0, errFewer
}

// prevOf returns the last sequence of s at or below upto that exists.
func (t *Table) prevOf(s *subj, upto uint64) (uint64, error) {
	for i := s.searchRecent(upto + 1); i > 0; i-- {
		if t.exists(s.recent[i-1]) {
			return s.recent[i-1], nil
		}
	}
	for t.image != nil && upto >= max(t.first, s.first) {
		seqs, down, err := t.postsBefore(s, upto)
		if err != nil {
			return 0, err
		}
		for i := len(seqs); i > 0; i-- {
			if t.exists(seqs[i-1]) {
				return seqs[i-1], nil
			}
		}
		if down == 0 {
			break
		}
		upto = down - 1
	}
	return 0, errFewer
}

// meta returns the meta of a message that the image holds.
func (t *Table) meta(seq uint64) (Meta, error) {
	if len(t.front) > 0 && t.front[0].Seq <= seq && seq <= t.frontThrough {
		if i, ok := slices.BinarySearchFunc(t.front, seq, func(m Meta, q uint64) int {
			switch {
			case m.Seq < q:
				return -1
			case m.Seq > q:
				return 1
			}
			return 0
		}); ok {
			return t.front[i], nil
		}
	}
	if seq != t.first {
		ms, _, err := t.image.Metas(seq, seq, 1, nil)
		if err != nil || len(ms) == 0 {
			return Meta{Seq: seq, Err: t.errMissing(seq)}, err
		}
		return ms[0], nil
	}
	var err error
	t.front, t.frontThrough, err = t.image.Metas(seq, t.diskEnd()-1, 256, t.front[:0])
	if err != nil && t.goRound(err) { // what is destroyed may lie behind it
		t.front, t.frontThrough, err = t.image.Metas(seq, seq, 1, t.front[:0])
	}
	if err != nil {
		t.front = nil
		return Meta{}, err
	}
	if len(t.front) == 0 || t.front[0].Seq != seq {
		return Meta{Seq: seq, Err: t.errMissing(seq)}, nil
	}
	return t.front[0], nil
}

// errMissing says that a message is not where it should be. That is no damage of
// the message: what leads to it may be destroyed, so that a repair finds it, and
// nobody may pass over it before that.
func (t *Table) errMissing(seq uint64) error {
	return &storage.CorruptError{File: t.path, Reason: fmt.Sprintf("message %d should be there and is not", seq)}
}

func (t *Table) timeOf(seq uint64) (int64, error) {
	if sl := t.slot(seq); sl != nil {
		return sl.time, nil
	}
	if t.image == nil {
		return 0, t.errMissing(seq)
	}
	m, err := t.meta(seq)
	if err == nil && m.Time == 0 {
		err = m.Err // not rescued
	}
	return m.Time, err
}

// owner returns the subject and the size of the message at seq; no subject if
// damage has gone so far that it cannot be told.
func (t *Table) owner(seq uint64) (*subj, uint64, error) {
	if sl := t.slot(seq); sl != nil {
		return sl.subj, sl.size(), nil
	}
	if t.image == nil {
		return nil, 0, t.errMissing(seq)
	}
	m, err := t.meta(seq)
	if err != nil {
		if !t.goRound(err) {
			return nil, 0, err
		}
		m = Meta{Seq: seq, Err: err}
	}
	if m.Err == nil {
		s, err := t.lookup(m.Subject)
		if err != nil || s != nil {
			return s, m.Size, err
		}
	}
	if err := t.allLocked(); err != nil {
		return nil, 0, err
	}
	s := t.subjects[m.Subject]
	// The message is damaged, and must be removable all the same. Whose it
	// is, the postings know.
	size := func(s *subj) uint64 {
		if m.Size > 0 {
			return m.Size
		}
		t.goRound(m.Err)
		return t.guess(s)
	}
	has := func(s *subj) (bool, error) {
		if s == nil || s.msgs == 0 || seq < s.first || seq > s.last {
			return false, nil
		}
		if i := s.searchRecent(seq); i < len(s.recent) && s.recent[i] == seq {
			return true, nil
		}
		seqs, _, err := t.image.Posts(s.id, seq, 1, nil)
		return err == nil && len(seqs) > 0 && seqs[0] == seq, err
	}
	if ok, err := has(s); err != nil {
		return s, m.Size, err
	} else if ok {
		return s, size(s), nil
	}
	for _, s := range t.list {
		if t.subjects[s.name] != s {
			continue
		}
		if ok, err := has(s); err != nil {
			return s, m.Size, err
		} else if ok {
			return s, size(s), nil
		}
	}
	// Nobody's, as the index is damaged too.
	t.goRound(m.Err)
	return nil, m.Size, nil
}

// Purge deletes messages; see storage.Store.
func (t *Table) Purge(pattern string, upto, keep uint64) (uint64, error) {
	if pattern != "" && pattern != ">" && storage.HasWildcard(pattern) {
		if err := t.all(); err != nil {
			return 0, fmt.Errorf("purge: %w", err)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if upto == 0 || upto > t.last {
		upto = t.last + 1
	}
	everything := pattern == "" || pattern == ">"
	if err := t.writable(); err != nil && (t.closed || !everything || keep > 0 || upto <= t.last) {
		return 0, err // of a purge nothing remains that could be damaged
	}
	if t.msgs == 0 {
		return 0, nil
	}
	if everything {
		return t.purgeFront(upto, keep)
	}
	subs, err := t.matchLocked(pattern)
	if err != nil {
		return 0, fmt.Errorf("purge: %w", err)
	}
	var whole []*subj // purged altogether
	var part []*subj
	for _, s := range subs {
		switch {
		case s.msgs == 0 || s.first >= upto:
		case s.last < upto && keep == 0:
			whole = append(whole, s)
		default:
			part = append(part, s)
		}
	}
	if len(whole) == t.live && len(whole) > 0 {
		return t.purgeAll(), nil
	}
	var n uint64
	for _, s := range whole {
		k, err := t.purgeSubject(s)
		n += k
		if err != nil {
			return n, err
		}
	}
	var seqs []uint64
	for _, s := range part {
		var err error
		if seqs, err = t.seqsOf(s, upto, seqs); err != nil {
			return n, err
		}
	}
	if len(part) > 1 {
		slices.Sort(seqs)
	}
	if uint64(len(seqs)) <= keep {
		return n, nil
	}
	for _, q := range seqs[:uint64(len(seqs))-keep] {
		if _, err := t.remove(q); err != nil {
			return n, fmt.Errorf("purge: %w", err)
		}
		n++
	}
	return n, nil
}

// purgeFront deletes the messages below upto but the last keep of them.
func (t *Table) purgeFront(upto, keep uint64) (uint64, error) {
	if upto <= t.first {
		return 0, nil
	}
	below := upto - t.first - t.gone.count(t.first, upto-1)
	if below <= keep {
		return 0, nil
	}
	if below -= keep; below == t.msgs {
		return t.purgeAll(), nil
	}
	for n := range below {
		// Let readers in between.
		if n%256 == 255 {
			t.mu.Unlock()
			t.mu.Lock()
		}
		if _, err := t.remove(t.first); err != nil {
			return n, fmt.Errorf("purge: %w", err)
		}
	}
	return below, nil
}

func (t *Table) purgeAll() uint64 {
	n := t.msgs
	t.msgs, t.bytes, t.live = 0, 0, 0
	t.first, t.firstTime = t.last+1, 0
	t.gone = gone{}
	t.subjects = make(map[string]*subj)
	t.complete = true // whatever the image has
	t.broken, t.hurt, t.hidden = nil, nil, nil
	t.thaws++
	t.list = nil
	t.listGen++
	t.front = nil
	t.active.release()
	a := t.newSet(t.first)
	a.purged = true
	t.active = a
	return n
}

// purgeSubject deletes all messages of s, of which there is at least one.
func (t *Table) purgeSubject(s *subj) (uint64, error) {
	seqs, err := t.seqsOf(s, s.last+1, nil)
	if err != nil {
		return 0, err
	}
	t.touch(s)
	t.bytes -= min(s.bytes, t.bytes)
	for _, q := range seqs {
		t.msgs--
		t.unlink(q)
	}
	s.msgs = 0
	if err := t.settle(s, s.last); err != nil {
		return uint64(len(seqs)), err
	}
	return uint64(len(seqs)), t.settleFirst()
}

// seqsOf appends the sequences of s below upto that exist, ascending.
func (t *Table) seqsOf(s *subj, upto uint64, dst []uint64) ([]uint64, error) {
	from, had := s.first, len(dst)
	recent := s.recent[s.searchRecent(from):]
	end := t.diskEnd()
	if len(recent) > 0 {
		end = min(end, recent[0])
	}
	for from < min(end, upto) {
		n := len(dst)
		var through uint64
		var err error
		if dst, through, err = t.posts(s, from, min(end, upto)-1, 1024, dst); err != nil {
			return dst[:had], err
		}
		kept := dst[:n]
		for _, q := range dst[n:] {
			if q < upto && q < end && t.exists(q) {
				kept = append(kept, q)
			}
		}
		dst = kept
		if through == End {
			break
		}
		from = through + 1
	}
	for _, q := range recent {
		if q < upto && t.exists(q) {
			dst = append(dst, q)
		}
	}
	return dst, nil
}

// TableBytes returns the memory held for what is not checkpointed.
func (t *Table) TableBytes() int64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	n := t.active.bytes
	if t.frozen != nil {
		n += t.frozen.bytes
	}
	return n
}

// Close makes all later calls fail with storage.ErrClosed.
func (t *Table) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
}

// Closed reports whether Close has been called.
func (t *Table) Closed() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.closed
}
