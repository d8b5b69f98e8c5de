package msgstore

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"slices"
	"syscall"

	"petiole/storage"
	"petiole/storage/internal/boltpages"
	"petiole/storage/internal/table"
	"petiole/storage/vfs"
)

// How a damaged file is read:
//
//	1  identity   from the tree, the floor file, or any page that proves to hold it
//	2  state      from the tree of the last commit; failing that, what the floor
//	              file says was durable; failing that, any that can be found
//	3  deletions  from the tree; where it is damaged, all notes of deletions found
//	              anywhere in the file, together: what is deleted stays deleted
//	4  messages   from the tree, record by record; those that are missing then, from
//	              chunks found anywhere: a message never changes, so that an older
//	              copy of it is as good, and whether it still exists 2 and 3 say
//	5  keys       from the tree; where it is damaged, the newest that is found
//
// Whatever is used has proved by its checksum to belong where it is used.

// salvage is the reading of one damaged file.
type salvage struct {
	ctx  context.Context
	path string
	f    *boltpages.File // nil: there is none
	size int64

	floor   *Floor // nil: there is none
	logFrom storage.LSN
	hint    *hints

	im   image // for its seals only
	meta int   // whose tree is used: index of f.Metas(), -1 for none

	lsn    storage.LSN
	st     storage.State
	nextID uint64
	spans  []table.Span
	whole  bool // the state is that of the tree
	pages  map[uint64]*table.Page
	gone   *table.Gone

	buckets map[string]boltpages.Bucket
	hidden  map[string][]boltpages.Damage // by bucket: what damage hides of it
	ids     map[string]uint64             // of subjects
	kvs     map[string]keyed
	have    present
	extents []extent
	most    int // maxExtents, but in tests
	orphans []extent
	// Of a large file it takes much to remember where everything is, and the
	// tree says it again as long as it is in order: then extents has only what
	// has been found elsewhere.
	walk    bool
	ordered bool   // the tree, as far as it has been read
	highest uint64 // sequence in it

	report  *RepairReport
	damages int
}

// hints is what an open store knows, for where the file does not.
type hints struct {
	uid     [16]byte
	applied storage.LSN
	first   uint64 // no message below it exists
	last    uint64 // in the file
	pages   map[uint64]*table.Page
	spans   []table.Span
	nextID  uint64
	ids     map[string]uint64 // as far as memory has them
}

// keyed is a value of the machine's state; lsn says how new it is.
type keyed struct {
	value []byte // as it is in the file
	lsn   storage.LSN
	stale bool
}

// maxExtents is how many extents are remembered of a tree in order.
const maxExtents = 1 << 17

// extent is where messages are: all that exist in [first, last] are in the
// chunk at that place. Extents have no sequence in common.
type extent struct {
	first, last uint64
	off         int64
	size        uint32
	key         [8]byte
}

// present notes which sequences have been found.
type present map[uint64]*[table.PageLen / 64]uint64

func (p present) has(seq uint64) bool {
	w := p[seq/table.PageLen]
	return w != nil && w[seq%table.PageLen/64]&(1<<(seq%64)) != 0
}

func (p present) add(seq uint64) {
	w := p[seq/table.PageLen]
	if w == nil {
		w = new([table.PageLen / 64]uint64)
		p[seq/table.PageLen] = w
	}
	w[seq%table.PageLen/64] |= 1 << (seq % 64)
}

// maxDamages bounds how much of what was found the report says.
const maxDamages = 100

func (s *salvage) damaged(format string, args ...any) {
	if s.damages++; s.damages <= maxDamages {
		s.report.Damage = append(s.report.Damage, fmt.Sprintf(format, args...))
	}
}

// read finds out all that can be found out. Nothing is changed.
func (s *salvage) read() error {
	s.hidden = map[string][]boltpages.Damage{}
	s.buckets = map[string]boltpages.Bucket{}
	s.pages = map[uint64]*table.Page{}
	s.ids = map[string]uint64{}
	s.kvs = map[string]keyed{}
	s.have = present{}
	for _, d := range s.f.MetaDamage() {
		s.damaged("%v", &d)
	}
	if err := s.identity(); err != nil {
		return err
	}
	if err := s.state(); err != nil {
		return err
	}
	steps := []func() error{s.deletions, s.subjects, s.messages, s.keys}
	for _, step := range steps {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		if err := step(); err != nil {
			return err
		}
	}
	if s.damages > maxDamages {
		s.report.Damage = append(s.report.Damage, fmt.Sprintf("and %d more", s.damages-maxDamages))
	}
	return nil
}

// root reads the names of the buckets of the state of a meta page.
func (s *salvage) root(m boltpages.Meta) (buckets map[string]boltpages.Bucket, damage []boltpages.Damage) {
	buckets = map[string]boltpages.Bucket{}
	w := s.f.NewWalker(func(d boltpages.Damage) { damage = append(damage, d) })
	// The callback never fails.
	_ = w.Walk(s.f.Root(m), func(e boltpages.Entry) error {
		b, err := s.f.Bucket(e)
		if err != nil {
			damage = append(damage, boltpages.Damage{Kind: boltpages.KindLeaf, Page: e.Page, Reason: fmt.Sprintf("bucket %q: %v", e.Key, err)})
			return nil
		}
		if _, twice := buckets[string(e.Key)]; !twice {
			buckets[string(e.Key)] = b
		}
		return nil
	})
	return buckets, damage
}

// each calls fn for the entries of a bucket of the tree, and notes what damage
// hides of it. fn reports whether it believes the entry; if not, the key may be
// another's, and all between its neighbours is hidden.
func (s *salvage) each(bucket []byte, fn func(key, value []byte, e boltpages.Entry) bool) {
	b, ok := s.buckets[string(bucket)]
	if !ok {
		if s.meta >= 0 {
			s.damaged("bucket %q is nowhere", bucket)
		}
		s.hidden[string(bucket)] = append(s.hidden[string(bucket)], boltpages.Damage{Kind: boltpages.KindPage, Reason: "the bucket is nowhere"})
		return
	}
	w := s.f.NewWalker(func(d boltpages.Damage) {
		s.damaged("bucket %q: %v", bucket, &d)
		if !d.Whole {
			s.hidden[string(bucket)] = append(s.hidden[string(bucket)], d)
		}
	})
	var buf, low []byte // low is what may be the next key
	doubt := false
	hide := func(high []byte) {
		if doubt {
			s.hidden[string(bucket)] = append(s.hidden[string(bucket)], boltpages.Damage{Kind: boltpages.KindLeaf, Low: low, High: high})
		}
		doubt = false
	}
	_ = w.Walk(b, func(e boltpages.Entry) error {
		v, err := e.Value(buf)
		if err != nil {
			s.damaged("bucket %q, page %d: value of key %x: %v", bucket, e.Page, e.Key, err)
			doubt = true
			return nil
		}
		buf = v
		if fn(e.Key, v, e) {
			key := bytes.Clone(e.Key)
			hide(key)
			low = append(key, 0)
		} else {
			doubt = true
		}
		return s.ctx.Err()
	})
	hide(nil)
}

// hides reports whether damage may hide a key.
func hides(damage []boltpages.Damage, key []byte) bool {
	for _, d := range damage {
		if bytes.Compare(d.Low, key) <= 0 && (d.High == nil || bytes.Compare(key, d.High) < 0) {
			return true
		}
	}
	return false
}

func (s *salvage) scan(fn func(e boltpages.Entry) error) error {
	err := s.f.Scan(s.ctx, nil, fn)
	if err != nil && s.ctx.Err() == nil {
		s.damaged("%v", err)
		return nil
	}
	return err
}

// identity finds out whose file it is.
func (s *salvage) identity() error {
	if s.hint != nil {
		s.im.seals(s.hint.uid)
		return nil
	}
	seal := newSealer([16]byte{}, bucketStore)
	var newer error
	parse := func(v []byte) ([16]byte, bool) {
		c, err := seal.open(keyIdentity, v)
		if errors.Is(err, errVersion) && newer == nil {
			newer = s.im.newer(v)
		}
		if err != nil || len(c) != identitySize || c[16] != cipherNone {
			return [16]byte{}, false
		}
		return [16]byte(c), true
	}
	for _, m := range s.f.Metas() {
		buckets, _ := s.root(m)
		b, ok := buckets[string(bucketStore)]
		if !ok {
			continue
		}
		var uid [16]byte
		found := false
		w := s.f.NewWalker(func(boltpages.Damage) {})
		_ = w.Walk(b, func(e boltpages.Entry) error {
			if bytes.Equal(e.Key, keyIdentity) && !found {
				if v, err := e.Value(nil); err == nil {
					uid, found = parse(v)
				}
			}
			return nil
		})
		if newer != nil {
			return newer // what it says cannot be known, let alone repaired
		}
		if found && (s.floor == nil || s.floor.Store == uid) {
			s.im.seals(uid)
			return nil
		}
	}
	if s.floor != nil {
		s.im.seals(s.floor.Store)
		return nil
	}
	found := map[[16]byte]int{}
	if err := s.scan(func(e boltpages.Entry) error {
		if bytes.Equal(e.Key, keyIdentity) {
			if v, err := e.Value(nil); err == nil {
				if uid, ok := parse(v); ok {
					found[uid]++
				}
			}
		}
		return nil
	}); err != nil {
		return err
	}
	if len(found) != 1 {
		return &storage.CorruptError{File: s.path, Reason: "nothing tells which store it is of, so that nothing in it can be believed; restore the store from a backup"}
	}
	for uid := range found {
		s.im.seals(uid)
	}
	return nil
}

type summary struct {
	lsn    storage.LSN
	st     storage.State
	nextID uint64
	spans  []table.Span
}

// summary reads the state in the tree of a meta page.
func (s *salvage) summary(buckets map[string]boltpages.Bucket) (sum summary, ok bool) {
	b, ok := buckets[string(bucketStore)]
	if !ok {
		return sum, false
	}
	ok = false
	w := s.f.NewWalker(func(d boltpages.Damage) { s.damaged("bucket %q: %v", bucketStore, &d) })
	_ = w.Walk(b, func(e boltpages.Entry) error {
		if bytes.Equal(e.Key, keyState) && !ok {
			if v, err := e.Value(nil); err == nil {
				sum, ok = s.parseState(v)
			}
		}
		return nil
	})
	return sum, ok
}

func (s *salvage) parseState(v []byte) (sum summary, ok bool) {
	c, err := s.im.store.open(keyState, v)
	if err == nil {
		sum.lsn, sum.st, sum.nextID, sum.spans, err = decodeState(c)
	}
	if err == nil && (sum.st.Last == math.MaxUint64 || sum.st.First > sum.st.Last+1 || sum.st.Msgs > 0 && sum.st.First == 0) {
		err = errLayout
	}
	return sum, err == nil
}

// state decides which state of the store is put together again.
func (s *salvage) state() error {
	s.meta = -1
	var sum summary
	found := false
	for i, m := range s.f.Metas() {
		buckets, damage := s.root(m)
		got, ok := s.summary(buckets)
		if i == 0 {
			for _, d := range damage {
				s.damaged("bucket of buckets: %v", &d)
			}
			// Even without a state its messages count.
			s.meta, s.buckets = i, buckets
		}
		if ok && (!found || got.lsn > sum.lsn) {
			sum, found = got, true
			s.whole = i == 0
			if len(s.buckets) == 0 {
				s.meta, s.buckets = i, buckets
			}
		}
		if s.whole {
			break
		}
	}
	want := storage.LSN(0) // what is known to have been durable
	if s.floor != nil {
		want = s.floor.Applied
	}
	if s.hint != nil {
		want = s.hint.applied
	}
	// The tree's own state is exact. An older one is too, if the log goes on
	// from there.
	if s.whole && (sum.lsn >= want || s.hint == nil && s.logFrom > 0 && sum.lsn+1 >= s.logFrom) {
		s.lsn, s.st, s.nextID, s.spans = sum.lsn, sum.st, sum.nextID, sum.spans
		return nil
	}
	s.whole = false
	if s.hint != nil {
		s.damaged("the state of the store in the file is lost or old; memory has it")
		h := s.hint
		s.lsn, s.nextID, s.spans = h.applied, h.nextID, h.spans
		s.st = storage.State{First: h.first, Last: h.last}
		return nil
	}
	if !found || sum.lsn < want {
		// A newer one may stand somewhere, if only the way to it is destroyed.
		if err := s.scan(func(e boltpages.Entry) error {
			if bytes.Equal(e.Key, keyState) {
				if v, err := e.Value(nil); err == nil {
					if got, ok := s.parseState(v); ok && (!found || got.lsn > sum.lsn) && (s.floor == nil || got.lsn <= s.floor.Applied) {
						sum, found = got, true
					}
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	switch {
	case found && sum.lsn >= want:
		s.damaged("the state of the store at the last commit is lost; that at LSN %d is used", sum.lsn)
		s.lsn, s.st, s.nextID, s.spans = sum.lsn, sum.st, sum.nextID, sum.spans
	case s.floor != nil:
		s.damaged("the state of the store is lost; that at LSN %d is put together, which the floor file knows", s.floor.Applied)
		s.lsn = s.floor.Applied
		s.st = storage.State{First: max(s.floor.First, 1), Last: s.floor.Last}
		if found {
			// Long jumps in the numbering are nowhere else.
			s.spans, s.nextID = sum.spans, sum.nextID
		}
	default:
		return &storage.CorruptError{File: s.path, Reason: "no state of the store can be found in it, and there is no floor file that knows one; restore the store from a backup"}
	}
	return nil
}

// deletions finds out which sequences hold no message.
func (s *salvage) deletions() error {
	parse := func(k, v []byte) (uint64, *table.Page, bool) {
		p := &table.Page{}
		if len(k) != 8 || len(v) != overhead+8*len(p.Bits) {
			return 0, nil, false
		}
		c, err := s.im.gone.open(k, v)
		if err != nil {
			return 0, nil, false
		}
		for i := range p.Bits {
			p.Bits[i] = binary.LittleEndian.Uint64(c[8*i:])
		}
		return binary.BigEndian.Uint64(k), p, true
	}
	add := func(no uint64, p *table.Page) {
		if q := s.pages[no]; q != nil {
			for i := range q.Bits {
				q.Bits[i] |= p.Bits[i]
			}
			return
		}
		s.pages[no] = p
	}
	s.each(bucketGone, func(k, v []byte, e boltpages.Entry) bool {
		no, p, ok := parse(k, v)
		if ok {
			add(no, p)
		} else {
			s.damaged("notes of deletions, page %d: those under key %x fail their checksum", e.Page, k)
		}
		return ok
	})
	hidden := s.hidden[string(bucketGone)]
	switch {
	case len(hidden) == 0 && s.whole:
	case s.hint != nil:
		for no, p := range s.hint.pages {
			if !s.whole || hides(hidden, seqKey(no)) {
				add(no, p)
			}
		}
	default:
		if err := s.scan(func(e boltpages.Entry) error {
			if len(e.Key) != 8 || s.whole && !hides(hidden, e.Key) {
				return nil
			}
			if v, err := e.Value(nil); err == nil {
				if no, p, ok := parse(e.Key, v); ok {
					add(no, p)
				}
			}
			return nil
		}); err != nil {
			return err
		}
		if !s.whole {
			hidden = []boltpages.Damage{{}}
		}
		for _, d := range hidden {
			from, to := uint64(0), uint64(math.MaxUint64)
			if len(d.Low) >= 8 {
				if from = binary.BigEndian.Uint64(d.Low); len(d.Low) > 8 && from < math.MaxUint64 {
					from++
				}
			}
			if len(d.High) >= 8 {
				if to = binary.BigEndian.Uint64(d.High); len(d.High) == 8 && to > 0 {
					to--
				}
			}
			from, to = max(from, s.st.First/table.PageLen), min(to, s.st.Last/table.PageLen)
			if from <= to && s.st.First <= s.st.Last {
				s.report.Doubtful = append(s.report.Doubtful, storage.Span{
					First: max(from*table.PageLen, s.st.First), Last: min(to*table.PageLen+table.PageLen-1, s.st.Last),
				})
			}
		}
		s.report.Doubtful = merge(s.report.Doubtful)
	}
	s.gone = table.NewGone(s.pages, s.spans)
	return nil
}

// merge sorts spans and joins those that touch.
func merge(spans []storage.Span) []storage.Span {
	slices.SortFunc(spans, func(a, b storage.Span) int { return cmp.Compare(a.First, b.First) })
	out := spans[:0]
	for _, s := range spans {
		if n := len(out); n > 0 && (s.First <= out[n-1].Last || s.First == out[n-1].Last+1) {
			out[n-1].Last = max(out[n-1].Last, s.Last)
		} else {
			out = append(out, s)
		}
	}
	return out
}

// subjects reads the numbers of subjects, which are kept.
func (s *salvage) subjects() error {
	used := map[uint64]bool{}
	if s.hint != nil {
		s.nextID = max(s.nextID, s.hint.nextID)
		for name, id := range s.hint.ids {
			s.ids[name], used[id] = id, true
		}
	}
	s.each(bucketSubj, func(k, v []byte, e boltpages.Entry) bool {
		x, err := s.im.parseSubject(k, v)
		// Whether it is staged does not matter: messages are counted anew.
		sub := x.now
		if sub.Msgs == 0 {
			sub = x.old
		}
		switch _, known := s.ids[sub.Name]; {
		case err == nil && (known || sub.Msgs == 0): // memory knows, or there is none
		case err != nil || used[sub.ID]:
			s.damaged("summary of subject %q, page %d: it fails its checksum", k, e.Page)
		default:
			used[sub.ID] = true
			s.ids[sub.Name] = sub.ID
			s.nextID = max(s.nextID, sub.ID+1)
		}
		return true
	})
	s.nextID = max(s.nextID, 1)
	return nil
}

// records calls fn for the intact messages in a chunk, ascending.
func (s *salvage) records(key, v []byte, fn func(m storage.Message, rec []byte)) (whole bool) {
	c, err := parseChunk(s.im.msgs, key, v)
	if err != nil {
		rescueChunk(s.im.msgs, key, v, fn)
		return false
	}
	whole = true
	for i := range c.n {
		if m, err := c.message(s.im.msgs, i); err == nil {
			fn(m, c.record(i))
		} else {
			whole = false
		}
	}
	return whole
}

// exists reports whether there is a message at seq in the state.
func (s *salvage) exists(seq uint64) bool {
	return seq >= s.st.First && seq <= s.st.Last && !s.gone.Contains(seq)
}

// take notes the messages in a chunk that exist and have not been found yet.
func (s *salvage) take(key, v []byte, off int64) (whole bool) {
	x := extent{off: off, size: uint32(len(v))}
	copy(x.key[:], key)
	whole = s.records(key, v, func(m storage.Message, _ []byte) {
		if !s.exists(m.Seq) || s.have.has(m.Seq) {
			return
		}
		s.have.add(m.Seq)
		if x.first != 0 {
			// All between that exist have to be of this chunk too.
			if next, ok := s.gone.Next(x.last+1, m.Seq); ok && next == m.Seq {
				x.last = m.Seq
				return
			}
			s.extents = append(s.extents, x)
		}
		x.first, x.last = m.Seq, m.Seq
	})
	if x.first != 0 {
		s.extents = append(s.extents, x)
	}
	return whole
}

// missing calls fn for the runs of sequences that exist and have not been
// found, until it returns false.
func (s *salvage) missing(fn func(storage.Span) bool) {
	var run storage.Span
	if s.st.First > s.st.Last {
		return
	}
	for seq, ok := s.gone.Next(s.st.First, s.st.Last); ok; seq, ok = s.gone.Next(seq+1, s.st.Last) {
		switch {
		case s.have.has(seq):
		case run.First != 0 && run.Last+1 == seq:
			run.Last = seq
		default:
			if run.First != 0 && !fn(run) {
				return
			}
			run = storage.Span{First: seq, Last: seq}
		}
	}
	if run.First != 0 {
		fn(run)
	}
}

// messages finds the messages.
func (s *salvage) messages() error {
	again := false
	chunk := func(k, v []byte, e boltpages.Entry) bool {
		if len(k) == 8 && binary.BigEndian.Uint64(k) > s.st.Last {
			if _, err := parseChunk(s.im.msgs, k, v); err != nil {
				s.orphan(e.Offset(), len(v))
			}
			return true // of a checkpoint that was not finished
		}
		n := len(s.extents)
		if !s.take(k, v, e.Offset()) && !again {
			s.damaged("messages, page %d: the chunk under key %x is damaged", e.Page, k)
			if len(s.extents) == n {
				s.orphan(e.Offset(), len(v))
			}
		}
		for _, x := range s.extents[n:] {
			s.ordered = s.ordered && x.first > s.highest
			s.highest = max(s.highest, x.last)
		}
		if len(s.extents) > s.most && s.ordered && !again {
			s.walk, s.extents = true, s.extents[:0]
		}
		return true
	}
	s.ordered = true
	s.each(bucketMsgs, chunk)
	if s.walk && !s.ordered {
		// Then there is no other way.
		s.walk, s.extents, s.have, again = false, nil, present{}, true
		hidden := s.hidden[string(bucketMsgs)]
		s.each(bucketMsgs, chunk)
		s.hidden[string(bucketMsgs)] = hidden
	}
	if s.walk {
		s.extents = s.extents[:0]
	}
	if err := s.ctx.Err(); err != nil {
		return err
	}
	var lost []storage.Span
	find := func() {
		lost = lost[:0]
		s.missing(func(r storage.Span) bool {
			lost = append(lost, r)
			return true
		})
	}
	find()
	if len(lost) > 0 {
		var buf []byte
		if err := s.scan(func(e boltpages.Entry) error {
			if len(e.Key) != 8 || e.Size() < chunkHeader {
				return nil
			}
			base := binary.BigEndian.Uint64(e.Key)
			i, _ := slices.BinarySearchFunc(lost, base, func(r storage.Span, b uint64) int { return cmp.Compare(r.Last, b) })
			if i == len(lost) || base <= math.MaxUint64-chunkSpan && lost[i].First > base+chunkSpan {
				return nil
			}
			v, err := e.Value(buf)
			if err != nil {
				return nil
			}
			buf = v
			s.take(e.Key, v, e.Offset())
			return nil
		}); err != nil {
			return err
		}
		find()
		s.adopt(lost)
	}
	slices.SortFunc(s.extents, func(a, b extent) int { return cmp.Compare(a.first, b.first) })
	return nil
}

// keys finds the machine's keyed state.
func (s *salvage) keys() error {
	s.each(bucketKV, func(k, v []byte, e boltpages.Entry) bool {
		_, lsn, err := s.im.openKV(k, v)
		if err != nil {
			s.damaged("state, page %d: the value under key %q fails its checksum", e.Page, k)
			s.report.LostKeys = append(s.report.LostKeys, string(k))
			return false
		}
		s.kvs[string(k)] = keyed{value: bytes.Clone(v), lsn: lsn}
		return true
	})
	hidden := s.hidden[string(bucketKV)]
	if len(hidden) == 0 && s.whole {
		return s.ctx.Err()
	}
	// More than the one value: who knows what else there was. Nor whether the
	// key is what is damaged.
	s.report.KeysDoubtful = true
	if err := s.scan(func(e boltpages.Entry) error {
		if s.whole && !hides(hidden, e.Key) {
			return nil
		}
		v, err := e.Value(nil)
		if err != nil {
			return nil
		}
		_, lsn, err := s.im.openKV(e.Key, v)
		if err != nil || lsn > s.lsn {
			return nil // it is something else, or of a checkpoint that was not finished
		}
		old, ok := s.kvs[string(e.Key)]
		if ok && (s.whole && !old.stale || old.lsn >= lsn) {
			return nil
		}
		s.kvs[string(e.Key)] = keyed{value: v, lsn: lsn, stale: true}
		return nil
	}); err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(s.kvs)) {
		if s.kvs[k].stale {
			s.report.StaleKeys = append(s.report.StaleKeys, k)
		}
	}
	s.report.LostKeys = slices.DeleteFunc(s.report.LostKeys, func(k string) bool { return s.kvs[k].value != nil })
	return nil
}

// write puts what has been found into the file at path, complete and on disk.
func (s *salvage) write(path string) (err error) {
	w, err := newRewriter(path, s.im.uid)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.abort())
		}
	}()
	return w.guard(func() error { return s.fill(w) })
}

func (s *salvage) fill(w *rewriter) error {
	st := storage.State{First: s.st.Last + 1, Last: s.st.Last}
	subs := map[string]*table.Subject{}
	pages := map[uint64]*table.Page{}
	var spans []table.Span
	open := map[uint64][]uint64{} // postings not put yet
	posts := func(id uint64, seqs []uint64) error {
		key := postKey(id, seqs[0])
		v := appendPosts(make([]byte, overhead, overhead+3*len(seqs)+8), seqs[0], seqs)
		return w.putOwned(bucketPost, key, w.im.post.finish(key, v))
	}
	last := uint64(0) // written so far
	add := func(m storage.Message, rec []byte) error {
		if st.Msgs == 0 {
			st.First, st.FirstTime = m.Seq, m.Time
		} else {
			spans = table.AddGap(pages, spans, last+1, m.Seq-1)
		}
		last = m.Seq
		st.Msgs++
		st.Bytes += m.Size()
		st.LastTime = m.Time
		sub := subs[m.Subject]
		if sub == nil {
			name := string([]byte(m.Subject))
			id, known := s.ids[name]
			if !known {
				id = s.nextID
				s.nextID++
			}
			sub = &table.Subject{Name: name, ID: id, First: m.Seq}
			subs[name] = sub
		}
		sub.Msgs++
		sub.Bytes += m.Size()
		sub.Last = m.Seq
		seqs := append(open[sub.ID], m.Seq)
		if len(seqs) == blockPosts {
			if err := posts(sub.ID, seqs); err != nil {
				return err
			}
			seqs = seqs[:0]
		}
		open[sub.ID] = seqs
		return w.record(m.Seq, rec)
	}
	var failed error
	put := func(m storage.Message, rec []byte) {
		if m.Seq > last && s.exists(m.Seq) && failed == nil {
			failed = add(m, rec)
		}
	}
	var buf []byte
	found := s.extents
	// elsewhere puts what has been found outside of the tree below a sequence.
	elsewhere := func(below uint64) {
		for ; len(found) > 0 && found[0].first < below; found = found[1:] {
			if failed = errors.Join(failed, s.ctx.Err()); failed != nil {
				return
			}
			x := found[0]
			v, err := s.f.ReadAt(buf, x.off, int(x.size))
			if err != nil {
				continue // could be read a moment ago; what is not written is lost
			}
			buf = v
			s.records(x.key[:], v, func(m storage.Message, rec []byte) {
				if m.Seq >= x.first && m.Seq <= x.last {
					put(m, rec)
				}
			})
			if failed == nil {
				failed = w.slice()
			}
		}
	}
	if s.walk {
		b := s.buckets[string(bucketMsgs)]
		var v []byte
		if err := s.f.NewWalker(func(boltpages.Damage) {}).Walk(b, func(e boltpages.Entry) (err error) {
			if v, err = e.Value(v); err != nil {
				return nil // said before
			}
			s.records(e.Key, v, func(m storage.Message, rec []byte) {
				if s.exists(m.Seq) {
					elsewhere(m.Seq)
					put(m, rec)
				}
			})
			return errors.Join(failed, w.slice())
		}); err != nil {
			return err
		}
	}
	elsewhere(math.MaxUint64)
	if failed != nil {
		return failed
	}
	if err := w.flush(); err != nil {
		return err
	}
	if st.Msgs > 0 {
		spans = table.AddGap(pages, spans, last+1, st.Last)
	}
	s.report.Lost = s.lost(st, table.NewGone(pages, spans))
	// What the state says of the last message is right also if that is lost.
	if s.whole {
		st.LastTime = s.st.LastTime
	}
	for _, id := range slices.Sorted(maps.Keys(open)) {
		if seqs := open[id]; len(seqs) > 0 {
			if err := errors.Join(posts(id, seqs), w.slice()); err != nil {
				return err
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(subs)) {
		sub := subs[name]
		key := []byte(name)
		x := subjEntry{now: *sub}
		v := x.encode(make([]byte, overhead, overhead+6*binary.MaxVarintLen64))
		if err := errors.Join(w.putOwned(bucketSubj, key, w.im.subj.finish(key, v)), w.slice()); err != nil {
			return err
		}
	}
	for _, no := range slices.Sorted(maps.Keys(pages)) {
		key := seqKey(no)
		v := make([]byte, overhead, overhead+table.PageLen/8)
		for _, word := range pages[no].Bits {
			v = binary.LittleEndian.AppendUint64(v, word)
		}
		if err := errors.Join(w.putOwned(bucketGone, key, w.im.gone.finish(key, v)), w.slice()); err != nil {
			return err
		}
	}
	for _, k := range slices.Sorted(maps.Keys(s.kvs)) {
		if err := errors.Join(w.putOwned(bucketKV, []byte(k), s.kvs[k].value), w.slice()); err != nil {
			return err
		}
	}
	st.Subjects = len(subs)
	if st.Msgs > 0 {
		st.Deleted = st.Last - st.First + 1 - st.Msgs
	}
	s.report.State, s.report.Kept, s.report.Applied = st, st.Msgs, s.lsn
	if err := w.putState(s.lsn, st, s.nextID, spans); err != nil {
		return err
	}
	return w.close()
}

// lost returns the sequences that exist and are not in a file with that state
// and those gaps.
func (s *salvage) lost(st storage.State, gaps *table.Gone) (lost []storage.Span) {
	if s.st.First > s.st.Last {
		return nil
	}
	for seq, ok := s.gone.Next(s.st.First, s.st.Last); ok; seq, ok = s.gone.Next(seq+1, s.st.Last) {
		if st.Msgs == 0 || seq < st.First || gaps.Contains(seq) {
			if n := len(lost); n > 0 && lost[n-1].Last+1 == seq {
				lost[n-1].Last = seq
			} else {
				lost = append(lost, storage.Span{First: seq, Last: seq})
			}
		}
	}
	return lost
}

// openDamaged opens the file at path for salvage, which may be missing.
func openDamaged(path string) (io *os.File, size int64, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, fi.Size(), nil
}

// roomFor fails if the file system of dir has not so many octets.
func roomFor(dir string, n int64, free func(string) (int64, error)) error {
	if free == nil {
		free = vfs.OS.Free
	}
	has, err := free(dir)
	if err != nil {
		return fmt.Errorf("ask how much room there is: %w", err)
	}
	if has < n {
		return fmt.Errorf("%d octets are needed beside the file, the file system has %d: %w", n, has, syscall.ENOSPC)
	}
	return nil
}
