package storage

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestMatchSubject(t *testing.T) {
	for _, c := range []struct {
		pattern, subject string
		want             bool
	}{
		{"", "a", true},
		{">", "a", true},
		{">", "a.b", true},
		{"a", "a", true},
		{"a", "b", false},
		{"a", "ab", false},
		{"ab", "a", false},
		{"a.b", "a.b", true},
		{"a.b", "a", false},
		{"a", "a.b", false},
		{"*", "a", true},
		{"*", "a.b", false},
		{"*.b", "a.b", true},
		{"*.b", "a.c", false},
		{"a.*", "a.b", true},
		{"a.*", "a", false},
		{"a.*", "a.b.c", false},
		{"a.*.c", "a.b.c", true},
		{"a.>", "a", false},
		{"a.>", "a.b", true},
		{"a.>", "a.b.c", true},
		{"a.>", "ab.c", false},
		{"*.>", "a.b", true},
		{"*.>", "a", false},
		{"a*", "ab", false},
		{"a*.b", "a*.b", true},
		{"a.>b", "a.>b", true},
		{"a.>b", "a.cb", false},
	} {
		if got := MatchSubject(c.pattern, c.subject); got != c.want {
			t.Errorf("MatchSubject(%q, %q) = %v", c.pattern, c.subject, got)
		}
	}
}

func TestMatchSubjectModel(t *testing.T) {
	var model func(p, s []string) bool
	model = func(p, s []string) bool {
		switch {
		case len(p) == 0 || len(s) == 0:
			return len(p) == len(s)
		case p[0] == ">" && len(p) == 1:
			return true
		case p[0] == "*" || p[0] == s[0]:
			return model(p[1:], s[1:])
		}
		return false
	}
	rapid.Check(t, func(t *rapid.T) {
		p := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "ab", "*", ">"}), 1, 4).Draw(t, "pattern")
		s := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "ab"}), 1, 4).Draw(t, "subject")
		for i := range p {
			if p[i] == ">" {
				p = p[:i+1]
				break
			}
		}
		pattern, subject := strings.Join(p, "."), strings.Join(s, ".")
		if got, want := MatchSubject(pattern, subject), model(p, s); got != want {
			t.Fatalf("MatchSubject(%q, %q) = %v", pattern, subject, got)
		}
	})
}

func TestHasWildcard(t *testing.T) {
	for pattern, want := range map[string]bool{
		"": true, ">": true, "*": true, "a.*": true, "a.>": true, "*.a": true, "a.*.b": true,
		"a": false, "a.b": false, "a*": false, "a>": false, "a.>b": false, "a.*b.c": false, ">.a": false,
	} {
		if got := HasWildcard(pattern); got != want {
			t.Errorf("HasWildcard(%q) = %v", pattern, got)
		}
	}
}

func TestMatchSubjectAllocates(t *testing.T) {
	f := Filter{Patterns: []string{"x.*", "plant.*.temperature", "a.>"}}
	if n := testing.AllocsPerRun(100, func() { f.Match("plant.line1.temperature") }); n != 0 {
		t.Errorf("%v allocations per match", n)
	}
}
