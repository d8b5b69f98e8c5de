// Package transforms holds subject mappings against nats-server's own: for
// random sources, destinations and subjects both accept the same, refuse with
// the same words, and map to the same.
package transforms

import (
	"flag"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"petiole/internal/subject"
	"petiole/internal/subject/transform"
)

var (
	cases = flag.Int("cases", 300_000, "random mappings to try")
	seed  = flag.Uint64("seed", 1, "of the random mappings")
)

// generator makes mappings, most of them nearly right.
type generator struct{ *rand.Rand }

func (g generator) one(of ...string) string { return of[g.IntN(len(of))] }

func (g generator) source() string {
	n := 1 + g.IntN(4)
	tokens := make([]string, n)
	for i := range tokens {
		tokens[i] = g.one("*", "*", "*", "a", "foo", "12-34", "a*", "")
		if tokens[i] == "" && g.IntN(20) > 0 {
			tokens[i] = "b"
		}
	}
	if g.IntN(4) == 0 {
		tokens[n-1] = ">"
	}
	if g.IntN(60) == 0 {
		return ""
	}
	return strings.Join(tokens, ".")
}

func (g generator) blank() string {
	if g.IntN(12) == 0 {
		return g.one(" ", "  ", "\t")
	}
	return ""
}

func (g generator) number() string {
	if g.IntN(10) == 0 {
		return g.one("", "-1", "x", "0x1", "+1", "2147483647", "2147483648", "99999999999999999999", "1.5", "01")
	}
	return strconv.Itoa(g.IntN(6))
}

func (g generator) function() string {
	name := g.one("wildcard", "partition", "split", "splitFromLeft", "splitFromRight", "sliceFromLeft", "sliceFromRight", "left", "right", "random",
		"Wildcard", "Partition", "Split", "SplitFromLeft", "splitfromleft", "SplitFromright", "SliceFromLeft", "slicefromRight", "Left", "Right", "Random",
		"WILDCARD", "unheardOf", "")
	var args []string
	for range g.IntN(4) {
		args = append(args, g.blank()+g.number()+g.blank())
	}
	if strings.EqualFold(name, "split") && len(args) > 1 {
		args[len(args)-1] = g.one("-", "--", "3", "", " ", "- ", "*", ">", "(", "$")
	}
	opening, closing := g.blank()+"("+g.blank(), g.blank()+")"
	if g.IntN(30) == 0 {
		opening = ""
	}
	if g.IntN(30) == 0 {
		closing = g.one("", "))", ")x")
	}
	return g.one("{{", "{{", "{{", "{{", "{") + g.blank() + name + opening + strings.Join(args, ",") + closing + g.blank() + g.one("}}", "}}", "}}", "}}", "}")
}

func (g generator) destination(source string) string {
	var tokens []string
	for range 1 + g.IntN(3) {
		switch g.IntN(8) {
		case 0:
			tokens = append(tokens, g.one("a", "foo", "$JS", "$", "$x", "x$1", "{{}}", "{{", "a b", "", "*", ">"))
		case 1, 2:
			tokens = append(tokens, "$"+g.number())
		default:
			tokens = append(tokens, g.function())
		}
	}
	if strings.HasSuffix(source, ">") != (g.IntN(20) == 0) {
		tokens = append(tokens, ">")
	}
	if g.IntN(200) == 0 {
		return ""
	}
	return strings.Join(tokens, ".")
}

// subject fills in the wildcards of a source.
func (g generator) subject(source string) string {
	if source == "" {
		source = ">"
	}
	tokens := strings.Split(source, ".")
	for i, tok := range tokens {
		if tok == "*" || tok == ">" || g.IntN(15) == 0 {
			tokens[i] = g.one("a", "foo", "12345", "-a--b-", "--", "1-2-3-4", "x3y3", "é", "$1", "(")
		}
	}
	if strings.HasSuffix(source, ">") {
		for range g.IntN(3) {
			tokens = append(tokens, g.one("t", "uu"))
		}
	}
	return strings.Join(tokens, ".")
}

// refusedHereOnly are arguments that nats-server takes for something: numbers
// below zero, and nothing to split at.
var refusedHereOnly = regexp.MustCompile(`\$-|[(,]\s*-\d|(?i:split)\s*\([^)]*,\s*\)`)

// theirs has nats-server map; what panics there is not judged.
func theirs(source, destination, subj string) (to string, matches bool, err error, panics bool) {
	defer func() { panics = recover() != nil }()
	if err := server.ValidateMapping(source, destination); err != nil {
		return "", false, err, false
	}
	tr, err := server.NewSubjectTransform(source, destination)
	if err != nil {
		return "", false, err, false
	}
	to, err = tr.Match(subj)
	return to, err == nil, nil, false
}

func TestSameMappings(t *testing.T) {
	g := generator{rand.New(rand.NewPCG(*seed, 0))}
	mapped, refused := 0, 0
	for range *cases {
		source := g.source()
		destination := g.destination(source)
		subj := g.subject(source)
		if !subject.Valid(subj) || subject.HasWildcard(subj) {
			continue
		}
		want, matches, wantErr, panics := theirs(source, destination, subj)
		if panics {
			continue
		}
		tr, err := transform.New(source, destination)
		if err != nil || wantErr != nil {
			refused++
			if refusedHereOnly.MatchString(destination) && err != nil {
				continue
			}
			// Of several mistakes either may be the one that is named.
			one := subject.Valid(source) && strings.Count(strings.TrimSuffix(destination, ".>"), ".") == 0
			if err == nil || wantErr == nil || one && err.Error() != wantErr.Error() {
				t.Errorf("%q to %q: %v, nats-server: %v", source, destination, err, wantErr)
			}
			continue
		}
		if strings.Contains(strings.ToLower(destination), "random") {
			continue
		}
		got, ok := tr.Apply(subj)
		if !subject.Valid(want) { // of a token that is nothing but separators nothing is left
			continue
		}
		if got != want || ok != matches {
			t.Errorf("%q to %q: %q becomes %q (%v), with nats-server %q (%v)", source, destination, subj, got, ok, want, matches)
		}
		mapped++
	}
	t.Logf("%d mapped, %d refused", mapped, refused)
	if mapped < *cases/20 || refused < *cases/20 {
		t.Errorf("%d mapped, %d refused: the cases are of one kind only", mapped, refused)
	}
}
