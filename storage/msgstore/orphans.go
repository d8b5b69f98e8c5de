package msgstore

import (
	"errors"

	"petiole/storage"
)

// A chunk's key stands right before its head, so that both may be destroyed at
// once, with none of the messages behind them. These do not say which sequences
// they have, only by how much those differ from the chunk's base; but their
// checksums cover the sequences. So all sequences that are missing are tried.

const (
	maxOrphans = 1024
	// adoptTries bounds the octets that are summed up to find the chunks' bases.
	adoptTries = 1 << 30
)

// orphan remembers a chunk of which nobody knows whose messages it has.
func (s *salvage) orphan(off int64, size int) {
	if len(s.orphans) < maxOrphans {
		s.orphans = append(s.orphans, extent{off: off, size: uint32(size)})
	}
}

// adopt takes the messages of orphaned chunks that are among those lost.
func (s *salvage) adopt(lost []storage.Span) {
	left := adoptTries
	var buf []byte
	for _, x := range s.orphans {
		v, err := s.f.ReadAt(buf, x.off, int(x.size))
		if err != nil {
			continue
		}
		buf = v
		if base, ok := baseOf(s.im.msgs, v, lost, &left); ok {
			s.take(seqKey(base), v, x.off)
		}
	}
}

// baseOf finds the base of a chunk by a record of it whose sequence is in one of
// the spans. left is how many octets it may sum up.
func baseOf(seal sealer, v []byte, spans []storage.Span, left *int) (base uint64, ok bool) {
	end := len(v)
	if end > chunkHeader+chunkEntry+chunkMax {
		end = chunkHeader + chunkEntry + 1 // a single message: it stands where it has to
	}
	for at := chunkHeader + chunkEntry; at < end; at++ {
		m, size, err := decodeRecord(seal, 0, v[at:])
		if !errors.Is(err, errChecksum) {
			continue // not the form of a record
		}
		delta := m.Seq
		for _, r := range spans {
			for seq := max(r.First, delta); seq <= r.Last; seq++ {
				if *left -= size; *left < 0 {
					return 0, false
				}
				if _, _, err := decodeRecord(seal, seq-delta, v[at:at+size]); err == nil {
					return seq - delta, true
				}
			}
		}
	}
	return 0, false
}
