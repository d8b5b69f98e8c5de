// Package subject holds the rules of NATS subjects: what is well-formed, what
// matches what, and an index of subscriptions by subject.
//
// A subject is one or more tokens separated by dots. A token is a non-empty
// run of bytes without dot, space, tab, carriage return, line feed or NUL. In
// subjects that are subscribed to, the token "*" matches exactly one token and
// ">", as the last token only, matches one or more.
package subject

// Chars is a subject as string or as bytes.
type Chars interface{ ~string | ~[]byte }

// Valid reports whether s is well-formed. Wildcards are permitted.
func Valid[T Chars](s T) bool {
	_, ok := check(s)
	return ok
}

// ValidLiteral reports whether s is well-formed and has no wildcard, which is
// what publishing needs.
func ValidLiteral[T Chars](s T) bool {
	wild, ok := check(s)
	return ok && !wild
}

// HasWildcard reports whether a token of s is a wildcard.
func HasWildcard[T Chars](s T) bool {
	start := 0
	for i := 0; i <= len(s); i++ {
		if i == len(s) || s[i] == '.' {
			if i-start == 1 && (s[start] == '*' || s[start] == '>' && i == len(s)) {
				return true
			}
			start = i + 1
		}
	}
	return false
}

// check walks s once; wild says whether a token is a wildcard.
func check[T Chars](s T) (wild, ok bool) {
	start := 0
	for i := 0; i <= len(s); i++ {
		if i < len(s) && s[i] != '.' {
			switch s[i] {
			case ' ', '\t', '\r', '\n', 0:
				return false, false
			}
			continue
		}
		switch {
		case i == start:
			return false, false
		case i-start > 1:
		case s[start] == '*':
			wild = true
		case s[start] == '>':
			if i != len(s) {
				return false, false
			}
			wild = true
		}
		start = i + 1
	}
	return wild, true
}

// next cuts the first token off s; more says whether anything follows.
func next[T Chars](s T) (tok, rest T, more bool) {
	for i := 0; i < len(s); i++ {
		if s[i] == '.' {
			return s[:i], s[i+1:], true
		}
	}
	return s, s[len(s):], false
}

func equal[T, U Chars](a T, b U) bool { return string(a) == string(b) }

func is[T Chars](tok T, c byte) bool { return len(tok) == 1 && tok[0] == c }

// Matches reports whether the literal subject lit is matched by pattern. Both
// have to be valid.
func Matches[P, L Chars](pattern P, lit L) bool {
	for {
		pt, pr, pm := next(pattern)
		if is(pt, '>') && !pm {
			return true
		}
		lt, lr, lm := next(lit)
		if !is(pt, '*') && !equal(pt, lt) {
			return false
		}
		if pm != lm {
			return false
		}
		if !pm {
			return true
		}
		pattern, lit = pr, lr
	}
}

// Subset reports whether every literal subject that sub matches is matched by
// super. Both have to be valid and may have wildcards.
func Subset[A, B Chars](sub A, super B) bool {
	for {
		bt, br, bm := next(super)
		if is(bt, '>') && !bm {
			return true
		}
		at, ar, am := next(sub)
		if is(at, '>') && !am {
			return false
		}
		if !is(bt, '*') && (is(at, '*') || !equal(at, bt)) {
			return false
		}
		if am != bm {
			return false
		}
		if !am {
			return true
		}
		sub, super = ar, br
	}
}

// Overlaps reports whether some literal subject is matched by both a and b.
// Both have to be valid and may have wildcards.
func Overlaps[A, B Chars](a A, b B) bool {
	for {
		at, ar, am := next(a)
		bt, br, bm := next(b)
		if is(at, '>') && !am || is(bt, '>') && !bm {
			return true
		}
		if !is(at, '*') && !is(bt, '*') && !equal(at, bt) {
			return false
		}
		if am != bm {
			return false
		}
		if !am {
			return true
		}
		a, b = ar, br
	}
}

// NumTokens returns the number of tokens of s.
func NumTokens[T Chars](s T) int {
	n := 1
	for i := 0; i < len(s); i++ {
		if s[i] == '.' {
			n++
		}
	}
	return n
}

// Token returns the i-th token of s, from 0; empty if there is none. It
// shares the memory of s.
func Token[T Chars](s T, i int) T {
	for {
		tok, rest, more := next(s)
		if i == 0 {
			return tok
		}
		if !more {
			return rest
		}
		s, i = rest, i-1
	}
}

// Tokens appends the tokens of s to dst. They share the memory of s.
func Tokens[T Chars](dst []T, s T) []T {
	for {
		tok, rest, more := next(s)
		dst = append(dst, tok)
		if !more {
			return dst
		}
		s = rest
	}
}
