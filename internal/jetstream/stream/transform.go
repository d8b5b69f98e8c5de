package stream

import (
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"

	"petiole/internal/subject"
)

// Transform maps subjects that match a pattern to other subjects (the subject
// mappings of NATS). In the destination "$n" and "{{wildcard(n)}}" stand for
// the n-th "*" of the pattern, "{{partition(p,n,...)}}" for a number below p
// that depends on those tokens, and ">" at the end for what ">" matched.
type Transform struct {
	source string
	tokens []transformToken
	tail   bool // the destination ends in ">"
	stars  []int
	skip   int // tokens of the source before its ">"
}

type transformToken struct {
	literal   string
	wildcards []int // indexes into Transform.stars
	partition uint32
}

// errTransform is what NATS calls a mapping that cannot be.
var errTransform = errors.New("invalid subject mapping destination")

// NewTransform checks a mapping. An empty source is ">".
func NewTransform(source, destination string) (*Transform, error) {
	if source == "" {
		source = ">"
	}
	if !subject.Valid(source) {
		return nil, fmt.Errorf("invalid subject %q", source)
	}
	t := &Transform{source: source}
	src := strings.Split(source, ".")
	for i, tok := range src {
		switch tok {
		case "*":
			t.stars = append(t.stars, i)
		case ">":
			t.skip = i
		}
	}
	srcTail := src[len(src)-1] == ">"
	dst := strings.Split(destination, ".")
	for i, tok := range dst {
		switch {
		case tok == "":
			return nil, fmt.Errorf("%w: empty token in %q", errTransform, destination)
		case tok == ">" && i == len(dst)-1:
			t.tail = true
		case tok == "*":
			// The n-th "*" stands for the n-th of the source.
			n := 0
			for _, o := range t.tokens {
				n += len(o.wildcards)
			}
			if n >= len(t.stars) {
				return nil, fmt.Errorf("%w: %q has more wildcards than %q", errTransform, destination, source)
			}
			t.tokens = append(t.tokens, transformToken{wildcards: []int{n}})
		default:
			tt, err := t.parse(tok)
			if err != nil {
				return nil, err
			}
			t.tokens = append(t.tokens, tt)
		}
	}
	if t.tail != srcTail {
		return nil, fmt.Errorf("%w: %q and %q have to end alike", errTransform, source, destination)
	}
	return t, nil
}

func (t *Transform) parse(tok string) (transformToken, error) {
	if n, ok := strings.CutPrefix(tok, "$"); ok {
		if v, err := strconv.Atoi(n); err == nil {
			return t.reference(tok, []string{strconv.Itoa(v)})
		}
	}
	body, ok := strings.CutPrefix(tok, "{{")
	if !ok {
		if strings.ContainsAny(tok, ">*{} \t\r\n") {
			return transformToken{}, fmt.Errorf("%w: token %q", errTransform, tok)
		}
		return transformToken{literal: tok}, nil
	}
	body, closed := strings.CutSuffix(body, "}}")
	name, args, opened := strings.Cut(strings.TrimSpace(body), "(")
	args, ended := strings.CutSuffix(strings.TrimSpace(args), ")")
	if !closed || !opened || !ended {
		return transformToken{}, fmt.Errorf("%w: token %q", errTransform, tok)
	}
	list := strings.Split(args, ",")
	switch strings.ToLower(strings.TrimSpace(name)) {
	case "wildcard":
		if len(list) != 1 {
			return transformToken{}, fmt.Errorf("%w: token %q takes one argument", errTransform, tok)
		}
		return t.reference(tok, list)
	case "partition":
		p, err := strconv.ParseUint(strings.TrimSpace(list[0]), 10, 31)
		if err != nil || p == 0 || len(list) < 2 {
			return transformToken{}, fmt.Errorf("%w: token %q", errTransform, tok)
		}
		tt, err := t.reference(tok, list[1:])
		tt.partition = uint32(p)
		return tt, err
	}
	return transformToken{}, fmt.Errorf("%w: function of token %q is not supported by this server", errTransform, tok)
}

// reference makes a token that refers to wildcards of the source, from 1.
func (t *Transform) reference(tok string, args []string) (transformToken, error) {
	var tt transformToken
	for _, a := range args {
		n, err := strconv.Atoi(strings.TrimSpace(a))
		if err != nil || n < 1 || n > len(t.stars) {
			return tt, fmt.Errorf("%w: token %q refers to a wildcard that %q does not have", errTransform, tok, t.source)
		}
		tt.wildcards = append(tt.wildcards, n-1)
	}
	return tt, nil
}

// Apply returns what subj is mapped to; false if the pattern does not match.
func (t *Transform) Apply(subj string) (string, bool) {
	if !subject.Matches(t.source, subj) {
		return "", false
	}
	src := strings.Split(subj, ".")
	var b strings.Builder
	for i, tok := range t.tokens {
		if i > 0 {
			b.WriteByte('.')
		}
		switch {
		case tok.partition > 0:
			h := fnv.New32a()
			for _, w := range tok.wildcards {
				h.Write([]byte(src[t.stars[w]]))
			}
			b.WriteString(strconv.FormatUint(uint64(h.Sum32()%tok.partition), 10))
		case len(tok.wildcards) > 0:
			b.WriteString(src[t.stars[tok.wildcards[0]]])
		default:
			b.WriteString(tok.literal)
		}
	}
	if t.tail {
		for i, tok := range src[t.skip:] {
			if i > 0 || len(t.tokens) > 0 {
				b.WriteByte('.')
			}
			b.WriteString(tok)
		}
	}
	return b.String(), true
}

// Overlaps reports whether the transform may map to a subject that pattern
// matches.
func (t *Transform) Overlaps(pattern string) bool {
	tokens := make([]string, 0, len(t.tokens)+1)
	for _, tok := range t.tokens {
		if tok.literal == "" {
			tokens = append(tokens, "*")
			continue
		}
		tokens = append(tokens, tok.literal)
	}
	if t.tail {
		tokens = append(tokens, ">")
	}
	return subject.Overlaps(strings.Join(tokens, "."), pattern)
}
