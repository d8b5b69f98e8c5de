package table

import (
	"errors"

	"petiole/storage"
)

// A part of the image that is destroyed must not keep messages from being
// removed: whoever has a full stream, or an old one, could not help it. What the
// damaged part would have said is found another way, exactly or not at all, so
// that sums stay right: whose a message is that cannot be read, the postings
// know; and which messages are a subject's whose postings cannot be read, the
// messages.

// OnHurt has fn called when a removal has gone round damage of the image, once
// until it is repaired. It is called with the table locked: it must not use it,
// nor block.
func OnHurt(t *Table, fn func(error)) { t.onHurt = fn }

// goRound reports whether err is damage of the image, which is noted. The caller
// holds the lock for writing, and has another way.
func (t *Table) goRound(err error) bool {
	if t.image == nil || t.broken != nil || !errors.Is(err, storage.ErrCorrupt) {
		return false
	}
	if t.hurt == nil {
		t.hurt = err
		if t.onHurt != nil {
			t.onHurt(err)
		}
	}
	return true
}

const (
	// metasRead is how many messages are looked at in one call of Metas, and
	// backRead how many sequences at once on the way down.
	metasRead = 256
	backRead  = 4096
)

// posts is Image.Posts for the writer. If they are damaged, the messages in
// [from, to] tell.
func (t *Table) posts(s *subj, from, to uint64, n int, dst []uint64) (seqs []uint64, through uint64, err error) {
	had := len(dst)
	if dst, through, err = t.image.Posts(s.id, from, n, dst); err == nil || !t.goRound(err) {
		return dst, through, err
	}
	return t.look(s, from, to, n, dst[:had])
}

// postsBefore is Image.PostsBefore for the writer. If they are damaged, the
// messages tell.
func (t *Table) postsBefore(s *subj, upto uint64) (seqs []uint64, down uint64, err error) {
	if seqs, down, err = t.image.PostsBefore(s.id, upto, nil); err == nil || !t.goRound(err) {
		return seqs, down, err
	}
	upto = min(upto, t.diskEnd()-1)
	lowest := max(t.first, s.first)
	for down = upto + 1; down > lowest; {
		to := down - 1
		if down = lowest; to >= backRead && to-backRead+1 > lowest {
			down = to - backRead + 1
		}
		if seqs, _, err = t.look(s, down, to, backRead, nil); err != nil || len(seqs) > 0 {
			return seqs, down, err
		}
	}
	return nil, 0, nil
}

// look appends to dst the sequences in [from, to] that exist and are of s, n at
// least if there are as many; through says up to where the answer is complete.
func (t *Table) look(s *subj, from, to uint64, n int, dst []uint64) (seqs []uint64, through uint64, err error) {
	had := len(dst)
	var buf []Meta
	for from <= to && len(dst)-had < n {
		if buf, through, err = t.image.Metas(from, to, metasRead, buf[:0]); err != nil {
			return dst[:had], 0, err
		}
		seen := buf
		for seq, ok := t.gone.next(max(from, t.first), through); ok; seq, ok = t.gone.next(seq+1, through) {
			for len(seen) > 0 && seen[0].Seq < seq {
				seen = seen[1:]
			}
			switch {
			case len(seen) == 0 || seen[0].Seq != seq:
				return dst[:had], 0, t.errMissing(seq) // nobody can tell whose it was
			case seen[0].Err != nil:
				return dst[:had], 0, seen[0].Err
			case seen[0].Subject == s.name:
				dst = append(dst, seq)
			}
		}
		from = through + 1
	}
	return dst, through, nil
}

// hidden is what damage hides of a subject's messages: so many of them do not tell
// their size, and have that many octets together.
type hidden struct{ msgs, bytes uint64 }

// hiddenRead is how many messages of a subject are looked at to find out what
// others, which damage hides, have.
const hiddenRead = 4096

// guess returns the size of a message of s that is about to be removed, and does
// not tell its size: what the subject has beyond those that do, which is right if
// it is the only one, and right in the end, when all of them are removed.
func (t *Table) guess(s *subj) uint64 {
	h := t.hidden[s.name]
	if h.msgs == 0 {
		if s.msgs <= hiddenRead {
			h = t.hides(s)
		}
		if h.msgs == 0 { // a repair will tell
			return s.bytes / s.msgs
		}
	}
	size := h.bytes / h.msgs
	if t.hidden == nil {
		t.hidden = map[string]hidden{}
	}
	t.hidden[s.name] = hidden{h.msgs - 1, h.bytes - size}
	return size
}

// hides finds out what damage hides of a subject's messages; nothing if it hides
// which there are.
func (t *Table) hides(s *subj) (h hidden) {
	seqs, err := t.seqsOf(s, s.last+1, nil)
	if err != nil || uint64(len(seqs)) != s.msgs {
		return hidden{}
	}
	var buf []Meta
	h.bytes = s.bytes
	for _, seq := range seqs {
		size := uint64(0)
		if sl := t.slot(seq); sl != nil {
			size = sl.size()
		} else if buf, _, err = t.image.Metas(seq, seq, 1, buf[:0]); err == nil && len(buf) > 0 {
			size = buf[0].Size
		}
		if size == 0 {
			h.msgs++
		} else if h.bytes -= size; h.bytes > s.bytes {
			return hidden{} // the sums are damaged
		}
	}
	return h
}
