package table

import (
	"testing"

	"pgregory.net/rapid"
)

func TestGone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var g gone
		first, last := uint64(1), uint64(0)
		held := map[uint64]bool{}
		dirty := map[uint64]*Page{}
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0:
				for range rapid.IntRange(1, 3000).Draw(t, "add") {
					last++
					held[last] = true
				}
			case 1:
				n := uint64(rapid.SampledFrom([]int{1, 63, 64, 700, minSpan - 1, minSpan, 3 * minSpan}).Draw(t, "skip"))
				g.skip(last+1, last+n, 1, dirty)
				last += n
			case 2:
				if last == 0 {
					continue
				}
				from := rapid.Uint64Range(1, last).Draw(t, "from")
				for seq := from; seq < from+rapid.SampledFrom([]uint64{1, 64, 2500}).Draw(t, "n"); seq++ {
					if held[seq] {
						g.mark(seq, 1, dirty)
						delete(held, seq)
					}
				}
			case 3:
				if last == 0 {
					continue
				}
				f := rapid.Uint64Range(first, last).Draw(t, "forget")
				for ; first < f; first++ {
					delete(held, first)
				}
				g.forget(first, dirty)
			}
		}
		probes := []uint64{first, last}
		if last >= first {
			probes = append(probes, rapid.SliceOfN(rapid.Uint64Range(first, last), 20, 20).Draw(t, "probes")...)
		}
		for _, seq := range probes {
			if seq < first || seq > last {
				continue
			}
			if g.contains(seq) == held[seq] {
				t.Fatalf("contains(%d) = %v", seq, g.contains(seq))
			}
			next, n := seq, uint64(0)
			for next <= last && !held[next] {
				next++
			}
			if got, ok := g.next(seq, last); ok != (next <= last) || ok && got != next {
				t.Fatalf("next(%d) = %d, %v, want %d", seq, got, ok, next)
			}
			prev := seq
			for prev >= first && !held[prev] {
				prev--
			}
			if got, ok := g.prev(seq, first); ok != (prev >= first) || ok && got != prev {
				t.Fatalf("prev(%d) = %d, %v, want %d", seq, got, ok, prev)
			}
			for q := seq; q <= last; q++ {
				if !held[q] {
					n++
				}
			}
			if got := g.count(seq, last); got != n {
				t.Fatalf("count(%d, %d) = %d, want %d", seq, last, got, n)
			}
		}
	})
}
