package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one mistake in a configuration.
type Problem struct {
	File    string // as it was named on the command line or in an include
	Line    int    // from 1; 0 if the mistake is not at a line
	Key     string // full path, such as jetstream.store_dir; may be empty
	What    string // what is wrong
	Accepts string // what would be right; may be empty
	Remedy  string // what to do; may be empty
}

// String renders the problem in one line.
func (p *Problem) String() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d", p.Line)
		}
		b.WriteString(": ")
	}
	if p.Key != "" {
		b.WriteString(p.Key)
		b.WriteString(": ")
	}
	b.WriteString(p.What)
	if p.Accepts != "" {
		b.WriteString("; accepted: ")
		b.WriteString(p.Accepts)
	}
	if p.Remedy != "" {
		b.WriteString("; ")
		b.WriteString(p.Remedy)
	}
	return b.String()
}

// Error is every mistake that was found in a configuration, in file order.
type Error struct {
	Problems []*Problem
}

// Error renders one line per problem.
func (e *Error) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// sorted orders problems by file and line, for the parser hands out maps.
func (e *Error) sorted() *Error {
	slices.SortStableFunc(e.Problems, func(a, b *Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Key, b.Key))
	})
	return e
}

// nearest returns the name among known that a typist most likely meant, or "".
// Case and the difference between - and _ count nothing.
func nearest(typed string, known []string) string {
	norm := func(s string) string { return strings.ToLower(strings.NewReplacer("-", "", "_", "").Replace(s)) }
	t := norm(typed)
	best, dist := "", 1+max(1, len(t)/3)
	for _, k := range known {
		if d := distance(t, norm(k)); d < dist {
			best, dist = k, d
		}
	}
	return best
}

// distance counts the insertions, deletions, replacements and swaps of
// neighbours that turn a into b.
func distance(a, b string) int {
	rows := [3][]int{make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)}
	for j := range rows[1] {
		rows[1][j] = j
	}
	for i := 1; i <= len(a); i++ {
		before, prev, cur := rows[(i+2)%3], rows[i%3], rows[(i+1)%3]
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], before[j-2]+1)
			}
		}
	}
	return rows[(len(a)+1)%3][len(b)]
}
