package msgstore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"go.etcd.io/bbolt"

	"petiole/storage"
	"petiole/storage/internal/table"
)

// errDamagedIndex says that what is derived from the messages is damaged or
// disagrees with the summary, and can be made anew.
var errDamagedIndex = errors.New("index damaged")

// scan calls fn for the messages in the transaction between the first and the
// last of st that msgs holds, deleted ones among them; of those that are damaged
// m is the zero Message, unless not even their sequence is known. m is fn's for
// the duration of the call.
func (im *image) scan(tx *bbolt.Tx, st storage.State, fn func(seq uint64, m storage.Message) error) error {
	c := tx.Bucket(bucketMsgs).Cursor()
	for k, v := seekChunk(c, st.First); k != nil; k, v = c.Next() {
		base, err := im.chunkKey(k)
		if err != nil {
			return err
		}
		if base > st.Last {
			break
		}
		ck, err := parseChunk(im.msgs, k, v)
		if err != nil {
			rescueChunk(im.msgs, k, v, func(m storage.Message, _ []byte) {
				if err == nil && m.Seq >= st.First && m.Seq <= st.Last {
					err = fn(m.Seq, m)
				}
			})
			continue
		}
		for i, _ := ck.find(st.First); i < ck.n && ck.seq(i) <= st.Last; i++ {
			m, err := ck.message(im.msgs, i)
			if err != nil {
				m = storage.Message{}
			}
			if err := fn(ck.seq(i), m); err != nil {
				return err
			}
		}
	}
	return nil
}

// poster writes postings subject by subject, as they come.
type poster struct {
	im   *image
	b    *bbolt.Bucket
	mem  arena
	open map[uint64][]uint64
}

func (im *image) newPoster(tx *bbolt.Tx) (*poster, error) {
	if err := empty(tx, bucketPost); err != nil {
		return nil, err
	}
	return &poster{im: im, b: tx.Bucket(bucketPost), open: make(map[uint64][]uint64)}, nil
}

func (p *poster) add(id, seq uint64) error {
	seqs := append(p.open[id], seq)
	if len(seqs) == blockPosts {
		if err := p.im.putPosts(p.b, id, seqs[0], seqs, &p.mem); err != nil {
			return err
		}
		seqs = seqs[:0]
	}
	p.open[id] = seqs
	return nil
}

func (p *poster) flush() error {
	for _, id := range slices.Sorted(maps.Keys(p.open)) {
		if seqs := p.open[id]; len(seqs) > 0 {
			if err := p.im.putPosts(p.b, id, seqs[0], seqs, &p.mem); err != nil {
				return err
			}
		}
	}
	return nil
}

// rebuildPosts makes the postings anew; the summaries are right.
func (im *image) rebuildPosts(tx *bbolt.Tx, st storage.State) error {
	ids := make(map[string]uint64)
	c := tx.Bucket(bucketSubj).Cursor()
	for k, v := c.First(); k != nil; k, v = c.Next() {
		s, ok, err := im.decodeSubject(tx, k, v)
		if err != nil {
			return err
		}
		if ok {
			ids[s.Name] = s.ID
		}
	}
	p, err := im.newPoster(tx)
	if err != nil {
		return err
	}
	if err := im.scan(tx, st, func(seq uint64, m storage.Message) error {
		if id, ok := ids[m.Subject]; ok {
			return p.add(id, seq)
		}
		return nil
	}); err != nil {
		return err
	}
	return p.flush()
}

// rebuild makes everything anew that is derived from the messages. Damaged
// messages cannot be attributed to a subject any more and are given up.
func (s *Store) rebuild(cause error) error {
	im := s.image
	s.log.Warn("The indexes of a message store are damaged and are made anew from its messages.", "file", im.path, "cause", cause)
	var lost []uint64
	doubtful := 0
	err := im.update(func(tx *bbolt.Tx) error {
		lsn, st, nextID, oldSpans, err := im.readState(tx)
		if err != nil {
			return err
		}
		lost = lost[:0]
		subs := make(map[string]*table.Subject)
		pages := make(map[uint64]*table.Page)
		var spans []table.Span
		p, err := im.newPoster(tx)
		if err != nil {
			return err
		}
		from := st.First
		st.Msgs, st.Bytes, st.First, st.FirstTime = 0, 0, st.Last+1, 0
		// Messages whose note of deletion is lost are back.
		notes := deletions{spans: oldSpans}
		notes.pages, doubtful = im.readPages(tx, nil)
		if err := im.scan(tx, storage.State{First: from, Last: st.Last}, func(seq uint64, m storage.Message) error {
			if notes.has(seq) {
				return nil
			}
			if m.Seq == 0 {
				lost = append(lost, seq)
				return nil
			}
			if st.Msgs == 0 {
				st.First, st.FirstTime = seq, m.Time
			} else {
				spans = table.AddGap(pages, spans, from, seq-1)
			}
			from = seq + 1
			st.Msgs++
			st.Bytes += m.Size()
			sub := subs[m.Subject]
			if sub == nil {
				sub = &table.Subject{Name: string([]byte(m.Subject)), ID: nextID, First: seq}
				nextID++
				subs[sub.Name] = sub
			}
			sub.Msgs++
			sub.Bytes += m.Size()
			sub.Last = seq
			return p.add(sub.ID, seq)
		}); err != nil {
			return err
		}
		if st.Msgs > 0 {
			spans = table.AddGap(pages, spans, from, st.Last)
		}
		if err := p.flush(); err != nil {
			return err
		}
		if err := errors.Join(empty(tx, bucketSubj), empty(tx, bucketGone)); err != nil {
			return err
		}
		if err := im.writePages(tx, pages, &p.mem); err != nil {
			return err
		}
		b := tx.Bucket(bucketSubj)
		for _, name := range slices.Sorted(maps.Keys(subs)) {
			if err := im.putSubject(b, *subs[name], &p.mem); err != nil {
				return err
			}
		}
		st.Subjects = len(subs)
		if err := tx.Bucket(bucketStore).Delete(keyStaged); err != nil { // none is of one any more
			return err
		}
		return im.putState(tx, lsn, st, nextID, spans)
	})
	if err != nil {
		return fmt.Errorf("make indexes of %s anew: %w", im.path, err)
	}
	im.cut.Store(0)
	if doubtful > 0 {
		s.log.Error("Notes of deletions are lost: deleted messages may be back.", "file", im.path, "sequences", doubtful*pageSeqs)
	}
	if len(lost) > 0 {
		s.log.Error("Damaged messages are lost.", "file", im.path, "count", len(lost), "first_seq", lost[0], "last_seq", lost[len(lost)-1])
	}
	return nil
}

// pageSeqs is how many sequences a page of the bucket gone is about.
const pageSeqs = len(table.Page{}.Bits) * 64

// deletions is what gone and the state's spans say.
type deletions struct {
	pages map[uint64]*table.Page
	spans []table.Span
}

// has reports whether seq is noted as deleted, or never used.
func (d *deletions) has(seq uint64) bool {
	if p := d.pages[seq/uint64(pageSeqs)]; p != nil && p.Bits[seq%uint64(pageSeqs)/64]&(1<<(seq%64)) != 0 {
		return true
	}
	_, ok := slices.BinarySearchFunc(d.spans, seq, func(s table.Span, q uint64) int {
		switch {
		case s.Last < q:
			return -1
		case s.First > q:
			return 1
		}
		return 0
	})
	return ok
}

// readPages returns the pages of the bucket gone, calls damaged (unless it is
// nil) for those that cannot be trusted, and counts these.
func (im *image) readPages(tx *bbolt.Tx, damaged func(key []byte, err error)) (pages map[uint64]*table.Page, bad int) {
	pages = make(map[uint64]*table.Page)
	c := tx.Bucket(bucketGone).Cursor()
	for k, v := c.First(); k != nil; k, v = c.Next() {
		p := &table.Page{}
		bits, err := im.gone.open(k, v)
		if err == nil && (len(k) != 8 || len(bits) != 8*len(p.Bits)) {
			err = errLayout
		}
		if err != nil {
			bad++
			if damaged != nil {
				damaged(k, err)
			}
			continue
		}
		for i := range p.Bits {
			p.Bits[i] = binary.LittleEndian.Uint64(bits[8*i:])
		}
		pages[binary.BigEndian.Uint64(k)] = p
	}
	return pages, bad
}

// readState returns what is known of the store as a whole.
func (im *image) readState(tx *bbolt.Tx) (lsn storage.LSN, st storage.State, nextID uint64, spans []table.Span, err error) {
	c, err := im.store.open(keyState, tx.Bucket(bucketStore).Get(keyState))
	if err == nil {
		lsn, st, nextID, spans, err = decodeState(c)
	}
	if err != nil {
		err = im.corruptIndex("summary of the store", err)
	}
	return lsn, st, nextID, spans, err
}

func (im *image) putState(tx *bbolt.Tx, lsn storage.LSN, st storage.State, nextID uint64, spans []table.Span) error {
	return tx.Bucket(bucketStore).Put(keyState, im.store.finish(keyState, encodeState(lsn, st, nextID, spans)))
}
