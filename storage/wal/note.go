package wal

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	"petiole/storage"
	"petiole/storage/vfs"
)

// Note is what a segment's note says of the records below Next: all of them were
// durable, and which sequence their groups had come to. It tells what a loss
// before Next took of a group of which no record follows.
type Note struct {
	Next storage.LSN
	// Quiet: no record from Quiet to before Next is of a group that is not listed,
	// but for the meta group's.
	Quiet storage.LSN
	// Groups are those with the newest records, ascending; what there is no room
	// for is left out, and so are groups of which the log knows nothing.
	Groups []GroupLast
}

// GroupLast is a group, and the lower half of its last sequence.
type GroupLast struct {
	Group storage.GroupID
	Last  uint32
}

// Last returns the lower half of a group's last sequence, if the note has it.
func (n *Note) Last(g storage.GroupID) (uint32, bool) {
	i, ok := slices.BinarySearchFunc(n.Groups, g, func(e GroupLast, g storage.GroupID) int { return cmp.Compare(e.Group, g) })
	if !ok {
		return 0, false
	}
	return n.Groups[i].Last, true
}

// String lists the note for people.
func (n *Note) String() string {
	s := fmt.Sprintf("every record below LSN %d is safe on disk; ", n.Next)
	if len(n.Groups) == 0 {
		return s + fmt.Sprintf("none from LSN %d on is of a stream", n.Quiet)
	}
	s += fmt.Sprintf("those from LSN %d on are of no other streams than these, whose last messages are", n.Quiet)
	for i, g := range n.Groups {
		if i > 0 {
			s += ","
		}
		s += fmt.Sprintf(" %d in group %d", g.Last, g.Group)
	}
	return s + " (sequences modulo 2^32)"
}

// encode returns what a segment with that header has of the note, in whole sectors.
func (n *Note) encode(h *segmentHeader) []byte {
	groups := n.Groups[:min(len(n.Groups), noteGroups)]
	end := noteHeaderSize + 8*len(groups)
	b := make([]byte, roundUp(int64(end)))
	le := binary.LittleEndian
	copy(b, noteMagic)
	le.PutUint64(b[8:], h.epoch)
	le.PutUint64(b[16:], h.num)
	le.PutUint64(b[24:], uint64(n.Next))
	le.PutUint64(b[32:], uint64(n.Quiet))
	le.PutUint32(b[40:], uint32(len(groups)))
	for i, g := range groups {
		le.PutUint32(b[noteHeaderSize+8*i:], uint32(g.Group))
		le.PutUint32(b[noteHeaderSize+8*i+4:], g.Last)
	}
	le.PutUint32(b[4:], crc32.Checksum(b[8:end], castagnoli))
	return b
}

// decodeNote reads the note of the segment with that header; nil if b holds none
// that is intact: it is written in place, so that a power cut may have torn it.
func decodeNote(b []byte, h *segmentHeader) *Note {
	le := binary.LittleEndian
	if len(b) < noteHeaderSize || string(b[:4]) != noteMagic || le.Uint64(b[8:]) != h.epoch || le.Uint64(b[16:]) != h.num {
		return nil
	}
	count := le.Uint32(b[40:])
	if count > noteGroups || len(b) < noteHeaderSize+8*int(count) {
		return nil
	}
	end := noteHeaderSize + 8*int(count)
	if le.Uint32(b[4:]) != crc32.Checksum(b[8:end], castagnoli) {
		return nil
	}
	n := &Note{Next: storage.LSN(le.Uint64(b[24:])), Quiet: storage.LSN(le.Uint64(b[32:])), Groups: make([]GroupLast, count)}
	for i := range n.Groups {
		e := b[noteHeaderSize+8*i:]
		n.Groups[i] = GroupLast{storage.GroupID(le.Uint32(e)), le.Uint32(e[4:])}
		if i > 0 && n.Groups[i-1].Group >= n.Groups[i].Group {
			return nil
		}
	}
	if n.Next < h.first || n.Quiet > n.Next {
		return nil
	}
	return n
}

// readNote reads the note of a segment; nil if there is none that is intact.
func readNote(r io.ReaderAt, h *segmentHeader) (*Note, error) {
	b := make([]byte, noteSize)
	n, err := readAt(r, b, noteOffset)
	if err != nil && !vfs.IsMedium(err) {
		return nil, err
	}
	if err != nil {
		return nil, nil // nothing is lost with it
	}
	return decodeNote(b[:n], h), nil
}

// note returns what there is to be noted behind the last batch written, of which
// all is durable. Writer's role, without mu.
func (l *Log) note() *Note {
	type known struct {
		GroupLast
		used storage.LSN
	}
	next := l.activeNext
	l.mu.Lock()
	list := make([]known, 0, len(l.lasts.groups))
	for g, s := range l.lasts.groups {
		list = append(list, known{GroupLast{g, s.seq}, s.used})
	}
	quiet := l.lasts.strange + 1
	// None of these is changed while the writer's role is taken.
	unwritten := [][]Record{l.pend.recs[:len(l.pend.recs):len(l.pend.recs)]}
	if l.inflight != nil {
		unwritten = append(unwritten, l.inflight.recs)
	}
	l.mu.Unlock()

	later := map[storage.GroupID]uint32{} // sequences of records behind the note
	for _, recs := range unwritten {
		for i := range recs {
			if r := &recs[i]; r.LSN >= next && l.o.Messages != nil && len(r.Data) > 0 {
				later[r.Group] += uint32(l.o.Messages(r.Data))
			}
		}
	}
	slices.SortFunc(list, func(a, b known) int { return cmp.Compare(b.used, a.used) })
	if len(list) > noteGroups {
		quiet = max(quiet, list[noteGroups].used+1)
		list = list[:noteGroups]
	}
	n := &Note{Next: next, Quiet: min(quiet, next), Groups: make([]GroupLast, len(list))}
	for i, k := range list {
		n.Groups[i] = GroupLast{k.Group, k.Last - later[k.Group]}
	}
	slices.SortFunc(n.Groups, func(a, b GroupLast) int { return cmp.Compare(a.Group, b.Group) })
	return n
}

// writeNote puts the note of the active segment in the place of the one it has. It
// needs no sync: if it gets lost, nothing else does. Writer's role, without mu.
func (l *Log) writeNote() error {
	s := l.active
	defer l.watch.end(l.watch.begin(watchWrite, "write", s.path))
	if _, err := s.file.WriteAt(l.note().encode(&s.hdr), noteOffset); err != nil {
		return err
	}
	l.recorded = uint64(l.activeNext - 1)
	return nil
}

func (l *Log) armIdle() {
	l.idleArmed, l.idleSeen = true, l.durable.Load()
	l.idle.Reset(NoteDelay)
}

// noteDue writes a note if the log has been idle since the timer was set.
func (l *Log) noteDue() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idleArmed = false
	d := l.durable.Load()
	switch {
	case l.err != nil || l.closing:
		return
	case l.writing || len(l.pend.recs) > 0 || d != l.idleSeen || d != l.written.Load():
		l.armIdle()
		return
	}
	if l.recorded >= d || l.active.sealed {
		return // the next segment will tell
	}
	l.writing = true
	l.mu.Unlock()
	err := l.writeNote()
	l.mu.Lock()
	l.writing = false
	l.closeWait()
	if err != nil {
		l.fail(err)
		return
	}
	l.passOnWriter()
}
