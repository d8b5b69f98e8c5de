package wal

import "petiole/storage"

// lasts is what a log knows of the groups' last sequences, for what lies behind
// damage to tell how many of them it took: only then it matters, and that there
// is no other trace of a record whose header is gone is why every one carries it.
type lasts struct {
	groups map[storage.GroupID]*lastSeq
	recent *lastSeq // of group
	group  storage.GroupID
	// strange is the last record of a group of which nothing is known, or that
	// there was before the log was opened.
	strange storage.LSN
}

// lastSeq is a group's last sequence behind all that was appended.
type lastSeq struct {
	seq   uint32
	since storage.LSN // records below were appended before it was set right
	used  storage.LSN // its last record, or a later one if it was before the log was opened
}

// of returns a group's; nil if nothing is known of it.
func (l *lasts) of(g storage.GroupID) *lastSeq {
	if l.group != g {
		l.group, l.recent = g, l.groups[g]
	}
	return l.recent
}

// next returns what a record to be appended under an LSN carries.
func (l *lasts) next(lsn storage.LSN, g storage.GroupID, messages func(head []byte) int, parts [][]byte) uint32 {
	s := l.of(g)
	if s == nil {
		if g != storage.MetaGroup {
			l.strange = lsn
		}
		return 0
	}
	s.used = lsn
	if messages != nil && len(parts) > 0 {
		s.seq += uint32(messages(parts[0]))
	}
	return s.seq
}

// SetLast says what the last sequence of a group is while none of its records is
// under way. From then on each record carries in Record.Last, and in the log,
// what it is behind it, going by Options.Messages: after a replay with losses
// that tells how many sequences were lost of which group, and so does a [Note].
// Groups of which nothing is known carry 0.
func (l *Log) SetLast(g storage.GroupID, last uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lasts.groups == nil {
		l.lasts.groups = map[storage.GroupID]*lastSeq{}
	}
	l.lasts.groups[g] = &lastSeq{uint32(last), l.next, l.next - 1}
	l.lasts.group = 0
}

// CorrectLast says what the last sequence of a record's group is when the record
// has been applied: another than was expected if, say, a message was refused.
// What is appended from now on heeds it.
func (l *Log) CorrectLast(r *Record, last uint64) {
	if r.Last == uint32(last) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := l.lasts.of(r.Group); s != nil && r.LSN >= s.since {
		s.seq += uint32(last) - r.Last
		s.since = l.next
	}
}

// ForgetLast says that there will be no more records of a group.
func (l *Log) ForgetLast(g storage.GroupID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.lasts.groups, g)
	l.lasts.group = 0
}
