package storage

// MatchSubject reports whether a NATS subject pattern selects a literal
// subject: "*" stands for exactly one token, ">" as the last token for one or
// more. An empty pattern selects everything. It does not allocate.
func MatchSubject(pattern, subject string) bool {
	if pattern == "" || pattern == subject {
		return true
	}
	p, s := 0, 0
	for {
		// p and s are at the beginning of a token each.
		if p < len(pattern) && pattern[p] == '>' && p+1 == len(pattern) {
			return s < len(subject)
		}
		if p < len(pattern) && pattern[p] == '*' && (p+1 == len(pattern) || pattern[p+1] == '.') {
			q := s
			for s < len(subject) && subject[s] != '.' {
				s++
			}
			if q == s {
				return false // an empty token is no token
			}
			p++
		} else {
			for p < len(pattern) && pattern[p] != '.' {
				if s >= len(subject) || subject[s] != pattern[p] {
					return false
				}
				p++
				s++
			}
			if s < len(subject) && subject[s] != '.' {
				return false
			}
		}
		pe, se := p == len(pattern), s == len(subject)
		if pe || se {
			return pe && se
		}
		p++ // both are at a dot
		s++
	}
}

// HasWildcard reports whether a pattern may select more than one subject.
func HasWildcard(pattern string) bool {
	start := true
	for i := 0; i < len(pattern); i++ {
		switch c := pattern[i]; {
		case c == '.':
			start = true
			continue
		case start && c == '*' && (i+1 == len(pattern) || pattern[i+1] == '.'):
			return true
		case start && c == '>' && i+1 == len(pattern):
			return true
		}
		start = false
	}
	return pattern == ""
}

// All reports whether the filter selects every message.
func (f Filter) All() bool {
	for _, p := range f.Patterns {
		if p == "" || p == ">" {
			return true
		}
	}
	return len(f.Patterns) == 0
}

// Match reports whether the filter selects subject.
func (f Filter) Match(subject string) bool {
	if len(f.Patterns) == 0 {
		return true
	}
	for _, p := range f.Patterns {
		if MatchSubject(p, subject) {
			return true
		}
	}
	return false
}
