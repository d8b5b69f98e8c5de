//go:build linux && (amd64 || arm64)

package main

import (
	"fmt"
	"hash/fnv"
)

// part is one of several runs that share the points, so that none takes long:
// the nth, counted from 1, of so many. As text: 2/10.
type part struct{ n, of int }

func (p part) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%d/%d", p.n, p.of), nil }

func (p *part) UnmarshalText(text []byte) error {
	if n, err := fmt.Sscanf(string(text), "%d/%d", &p.n, &p.of); err != nil || n != 2 || p.n < 1 || p.n > p.of {
		return fmt.Errorf("%q is no part such as 2/10", text)
	}
	return nil
}

// take returns the points of this part. Each is in one of the parts, whatever
// other points a run has: it may count a call more or less than another.
func (p part) take(points []point) (out []point) {
	for _, at := range points {
		h := fnv.New64a()
		fmt.Fprint(h, at)
		if int(h.Sum64()>>1)%p.of == p.n-1 {
			out = append(out, at)
		}
	}
	return out
}
