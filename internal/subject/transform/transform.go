// Package transform maps subjects to other subjects, as the mappings of
// nats-server's configuration and the subject transforms of JetStream do (NATS
// documentation, "Subject Mapping and Partitioning"; ADR-30).
//
// A source is a subject that may have wildcards. A destination is made of
// tokens: literal ones, and functions of what the wildcards of the source
// matched.
//
//	$n, {{wildcard(n)}}           what the n-th "*" matched, from 1
//	{{partition(p)}}              a number below p that depends on the whole subject
//	{{partition(p,n,...)}}        a number below p that depends on those wildcards
//	{{split(n,s)}}                the n-th, cut into tokens at each s
//	{{splitFromLeft(n,k)}}        the n-th, cut into two behind its k-th octet
//	{{splitFromRight(n,k)}}       the same, counted from its end
//	{{sliceFromLeft(n,k)}}        the n-th, cut into tokens of k octets, the rest last
//	{{sliceFromRight(n,k)}}       the same with the rest first
//	{{left(n,k)}}, {{right(n,k)}} the first or last k octets of the n-th
//	{{random(p)}}                 a random number below p
//
// A destination ends in ">" if and only if the source does; it then stands for
// what it matched. Numbers of partitions are nats-server's: FNV-1a, modulo p.
//
// Everything here is safe for concurrent use and does no I/O.
package transform

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"petiole/internal/subject"
)

// Errors of [New] and [NewMap]; the texts are those of nats-server. They are
// wrapped in an [*Error] that names the token, if one is to blame.
var (
	ErrBadSubject  = errors.New("invalid subject")
	ErrDestination = errors.New("invalid mapping destination") // matches all that follow

	ErrTransform     = fmt.Errorf("%w: invalid transform", ErrDestination)
	ErrUnknown       = fmt.Errorf("%w: unknown function", ErrDestination)
	ErrIndex         = fmt.Errorf("%w: wildcard index out of range", ErrDestination)
	ErrNotEnoughArgs = fmt.Errorf("%w: not enough arguments passed to the function", ErrDestination)
	ErrTooManyArgs   = fmt.Errorf("%w: too many arguments passed to the function", ErrDestination)
	ErrInvalidArg    = fmt.Errorf("%w: function argument is invalid or in the wrong format", ErrDestination)
)

// Error says which token of a destination is wrong.
type Error struct {
	Token string
	Err   error // one of the errors above
}

// Error renders the cause and the token as nats-server does.
func (e *Error) Error() string {
	if e.Token == "" {
		return e.Err.Error()
	}
	return e.Err.Error() + " in " + e.Token
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

type function uint8

const (
	literal function = iota
	wildcard
	partition
	random
	splitLeft
	splitRight
	sliceLeft
	sliceRight
	split
	left
	right
)

// functions by name. A letter may be a capital where the name here has one, and
// at the start.
var functions = []struct {
	name string
	fn   function
}{
	{"wildcard", wildcard},
	{"partition", partition},
	{"splitFromLeft", splitLeft},
	{"splitFromRight", splitRight},
	{"sliceFromLeft", sliceLeft},
	{"sliceFromRight", sliceRight},
	{"right", right},
	{"left", left},
	{"split", split},
	{"random", random},
}

// part is one token of a destination; it may become several.
type part struct {
	fn     function
	text   string // literal: the token; split: the separator
	tokens []int  // positions in the source of the wildcards referred to, from 0
	n      int    // partitions, octets
}

// Transform is one source and one destination.
type Transform struct {
	source, destination string
	parts               []part
	tail                int // tokens of the source before its ">"; -1 without one
}

// New checks a pair and makes it ready for use. An empty source is ">".
func New(source, destination string) (*Transform, error) {
	if source == "" {
		source = ">"
	}
	if !subject.Valid(source) {
		return nil, ErrBadSubject
	}
	if err := wellFormed(destination); err != nil {
		return nil, err
	}
	t := &Transform{source: source, destination: destination, tail: -1}
	var stars []int
	for i, tok := range strings.Split(source, ".") {
		switch tok {
		case "*":
			stars = append(stars, i)
		case ">":
			t.tail = i
		}
	}
	tokens := strings.Split(destination, ".")
	open := tokens[len(tokens)-1] == ">"
	if slices.Contains(tokens, "*") || open != (t.tail >= 0) {
		return nil, ErrBadSubject
	}
	if open {
		tokens = tokens[:len(tokens)-1]
	}
	for _, tok := range tokens {
		p, err := parse(tok, stars, t.tail >= 0)
		if err != nil {
			return nil, err
		}
		t.parts = append(t.parts, p)
	}
	return t, nil
}

// isFunction reports whether tok looks like {{...}}.
func isFunction(tok string) bool {
	return len(tok) > 4 && strings.HasPrefix(tok, "{{") && strings.HasSuffix(tok, "}}")
}

// wellFormed checks what does not depend on the source.
func wellFormed(destination string) error {
	end := false
	for tok := range strings.SplitSeq(destination, ".") {
		switch {
		case tok == "" || end:
			return &Error{tok, ErrTransform}
		case isFunction(tok):
			if _, _, err := call(tok); err != nil {
				return err
			}
		case tok == ">":
			end = true
		case strings.ContainsAny(tok, "\t\n\f\r \x00"):
			return ErrTransform
		}
	}
	return nil
}

// call takes a token {{name(arguments)}} apart.
func call(tok string) (fn function, args []string, err error) {
	body := strings.TrimSpace(tok[2 : len(tok)-2])
	name, rest, ok := strings.Cut(body, "(")
	if !ok || !strings.HasSuffix(rest, ")") {
		return 0, nil, &Error{tok, ErrUnknown}
	}
	name = strings.TrimSpace(name)
	for _, f := range functions {
		if named(name, f.name) {
			args = strings.Split(strings.TrimSuffix(rest, ")"), ",")
			for i := range args[1:] {
				args[i+1] = strings.TrimLeft(args[i+1], " \t\n\f\r")
			}
			return f.fn, args, nil
		}
	}
	return 0, nil, &Error{tok, ErrUnknown}
}

func named(typed, name string) bool {
	if len(typed) != len(name) {
		return false
	}
	for i := range len(name) {
		c := name[i]
		capital := i == 0 || c < 'a'
		if typed[i] != c|0x20 && (!capital || typed[i] != c&^0x20) {
			return false
		}
	}
	return true
}

// parse makes a part of a token, for a source with wildcards at stars.
func parse(tok string, stars []int, tail bool) (part, error) {
	wild := len(stars) > 0 || tail
	index := func(n int) (int, error) {
		switch {
		case !wild:
			return 0, &Error{tok, ErrIndex}
		case n == 0: // nats-server takes it for the first token
			return 0, nil
		case n < 0 || n > len(stars):
			return 0, &Error{fmt.Sprintf("%s: [%d]", tok, n), ErrIndex}
		}
		return stars[n-1], nil
	}
	if strings.HasPrefix(tok, "$") {
		n, err := strconv.Atoi(tok[1:])
		if err != nil { // "$JS" is a token as any other
			return part{text: tok}, nil
		}
		at, err := index(n)
		return part{fn: wildcard, tokens: []int{at}}, err
	}
	if !isFunction(tok) {
		return part{text: tok}, nil
	}
	fn, args, err := call(tok)
	if err != nil {
		return part{}, err
	}
	p := part{fn: fn}
	most := 2
	switch fn {
	case wildcard:
		if most = 1; args[0] == "" && len(args) == 1 {
			return p, &Error{tok, ErrNotEnoughArgs}
		}
	case partition, random:
		if fn == random && len(args) != 1 {
			return p, &Error{tok, ErrNotEnoughArgs} // as nats-server has it, though there are too many
		}
		if p.n, err = count(args[0]); err != nil || p.n < 0 {
			return p, &Error{tok, ErrInvalidArg}
		}
		var refs []int
		for _, a := range args[1:] {
			n, err := strconv.Atoi(strings.Trim(a, " "))
			if err != nil {
				return p, &Error{tok, ErrInvalidArg}
			}
			refs = append(refs, n)
		}
		if !wild { // there is but one subject, so all of it does
			return p, nil
		}
		for _, n := range refs {
			at, err := index(n)
			if err != nil {
				return p, err
			}
			p.tokens = append(p.tokens, at)
		}
		return p, nil
	default:
		if len(args) < 2 {
			return p, &Error{tok, ErrNotEnoughArgs}
		}
	}
	if len(args) > most {
		return p, &Error{tok, ErrTooManyArgs}
	}
	n, err := strconv.Atoi(strings.Trim(args[0], " "))
	if err != nil {
		return p, &Error{tok, ErrInvalidArg}
	}
	switch {
	case fn == split:
		if p.text = args[1]; p.text == "" || strings.Contains(p.text, " ") {
			return p, &Error{tok, ErrInvalidArg}
		}
	case most == 2:
		if p.n, err = count(args[1]); err != nil {
			return p, &Error{tok, ErrInvalidArg}
		}
	}
	at, err := index(n)
	p.tokens = []int{at}
	return p, err
}

func count(s string) (int, error) {
	n, err := strconv.ParseInt(strings.Trim(s, " "), 10, 32)
	return int(n), err
}

// Source returns the source; ">" if New was given none.
func (t *Transform) Source() string { return t.source }

// Destination returns the destination as it was given to New.
func (t *Transform) Destination() string { return t.destination }

// Apply returns what subj is mapped to, and whether the source matches it.
// subj has to be a valid subject.
func (t *Transform) Apply(subj string) (string, bool) {
	if !subject.Matches(t.source, subj) {
		return "", false
	}
	return string(t.AppendTo(nil, subj)), true
}

// AppendTo appends to dst what subj is mapped to. The source has to match
// subj.
func (t *Transform) AppendTo(dst []byte, subj string) []byte {
	var few [32]string
	tokens := subject.Tokens(few[:0], subj)
	for i := range t.parts {
		if i > 0 {
			dst = append(dst, '.')
		}
		dst = t.parts[i].appendTo(dst, subj, tokens)
	}
	if t.tail >= 0 {
		for i, tok := range tokens[min(t.tail, len(tokens)):] {
			if i > 0 || len(t.parts) > 0 {
				dst = append(dst, '.')
			}
			dst = append(dst, tok...)
		}
	}
	return dst
}

func (p *part) appendTo(dst []byte, subj string, tokens []string) []byte {
	switch p.fn {
	case literal:
		return append(dst, p.text...)
	case random:
		n := 0
		if p.n > 0 {
			n = rand.IntN(p.n)
		}
		return strconv.AppendInt(dst, int64(n), 10)
	case partition:
		n := uint32(0)
		if p.n > 0 {
			n = p.hash(subj, tokens) % uint32(p.n)
		}
		return strconv.AppendUint(dst, uint64(n), 10)
	}
	tok := tokens[p.tokens[0]]
	// What is too short for the function stays as it is.
	cuts := p.n > 0 && p.n < len(tok)
	switch {
	case p.fn == split:
		first := true
		for piece := range strings.SplitSeq(tok, p.text) {
			if piece == "" { // a token cannot be empty
				continue
			}
			if !first {
				dst = append(dst, '.')
			}
			first = false
			dst = append(dst, piece...)
		}
		if first { // nothing but separators
			return append(dst, tok...)
		}
		return dst
	case p.fn == wildcard || !cuts:
		return append(dst, tok...)
	case p.fn == left:
		return append(dst, tok[:p.n]...)
	case p.fn == right:
		return append(dst, tok[len(tok)-p.n:]...)
	case p.fn == splitLeft:
		return append(append(append(dst, tok[:p.n]...), '.'), tok[p.n:]...)
	case p.fn == splitRight:
		return append(append(append(dst, tok[:len(tok)-p.n]...), '.'), tok[len(tok)-p.n:]...)
	}
	size := p.n // of the next slice
	if p.fn == sliceRight && len(tok)%p.n > 0 {
		size = len(tok) % p.n
	}
	for {
		dst = append(dst, tok[:size]...)
		if tok = tok[size:]; tok == "" {
			return dst
		}
		dst = append(dst, '.')
		size = min(p.n, len(tok))
	}
}

func (p *part) hash(subj string, tokens []string) uint32 {
	h := fnv.New32a()
	if len(p.tokens) == 0 {
		_, _ = h.Write([]byte(subj))
	}
	for _, at := range p.tokens {
		_, _ = h.Write([]byte(tokens[at]))
	}
	return h.Sum32()
}

// Tokenize writes the wildcards "*" of a pattern as the references $1, $2, ...
// so that the pattern as a destination leaves a subject as it is.
func Tokenize(pattern string) string {
	tokens := strings.Split(pattern, ".")
	n := 0
	for i, tok := range tokens {
		if tok == "*" {
			n++
			tokens[i] = "$" + strconv.Itoa(n)
		}
	}
	return strings.Join(tokens, ".")
}

// Destination is one of the destinations of a [Mapping].
type Destination struct {
	Subject string
	Weight  int    // percent of the messages
	Cluster string // if not empty, counts in the cluster of this name only
}

// Mapping sends what is published to a source to one of its destinations. What
// the weights leave of 100 percent stays with the source, unless the source is
// itself a destination: then it is lost, which is how loss is tried out.
type Mapping struct {
	Source       string
	Destinations []Destination
}

// choice is a destination ready for use.
type choice struct {
	upto uint32 // the weights of this one and those before it
	t    *Transform
}

type route struct {
	source  string
	choices []choice
}

// Map is a set of mappings. A nil Map has none.
type Map struct {
	literal map[string]*route
	wild    []*route
}

// NewMap checks the mappings and makes them ready for use. Where several
// sources match a subject, the most specific one counts: token by token, a
// literal comes before "*" and "*" before ">". The error names the source. The
// Map is nil if there are no mappings.
func NewMap(mappings []Mapping) (*Map, error) {
	if len(mappings) == 0 {
		return nil, nil
	}
	m := &Map{literal: make(map[string]*route)}
	for _, mp := range mappings {
		r, err := newRoute(mp)
		if err != nil {
			return nil, fmt.Errorf("mapping for %q: %w", mp.Source, err)
		}
		if m.literal[r.source] != nil || slices.ContainsFunc(m.wild, func(o *route) bool { return o.source == r.source }) {
			return nil, fmt.Errorf("mapping for %q: there are two", mp.Source)
		}
		if subject.HasWildcard(r.source) {
			m.wild = append(m.wild, r)
		} else {
			m.literal[r.source] = r
		}
	}
	slices.SortFunc(m.wild, func(a, b *route) int { return specific(a.source, b.source) })
	return m, nil
}

// Check reports what is wrong with one mapping; nil if nothing is.
func (m Mapping) Check() error {
	_, err := newRoute(m)
	return err
}

// specific orders patterns so that one that matches less comes first.
func specific(a, b string) int {
	rank := func(tok string) int {
		switch tok {
		case "*":
			return 1
		case ">":
			return 2
		}
		return 0
	}
	return slices.CompareFunc(strings.Split(a, "."), strings.Split(b, "."), func(x, y string) int {
		return cmp.Or(cmp.Compare(rank(x), rank(y)), strings.Compare(x, y))
	})
}

func newRoute(mp Mapping) (*route, error) {
	if !subject.Valid(mp.Source) {
		return nil, ErrBadSubject
	}
	r := &route{source: mp.Source}
	seen := make(map[string]bool)
	total := make(map[string]int) // by cluster
	for _, d := range mp.Destinations {
		if seen[d.Subject] {
			return nil, fmt.Errorf("duplicate entry for %q", d.Subject)
		}
		seen[d.Subject] = true
		if d.Weight < 0 || d.Weight > 100 {
			return nil, errors.New("individual weights need to be <= 100")
		}
		if total[d.Cluster] += d.Weight; total[d.Cluster] > 100 {
			return nil, errors.New("total weight needs to be <= 100")
		}
		t, err := New(mp.Source, d.Subject)
		if err != nil {
			return nil, err
		}
		if d.Cluster == "" { // no program is part of a cluster
			r.choices = append(r.choices, choice{uint32(total[""]), t})
		}
	}
	if total[""] < 100 && !seen[mp.Source] {
		t, err := New(mp.Source, Tokenize(mp.Source))
		if err != nil {
			return nil, err
		}
		r.choices = append(r.choices, choice{100, t})
	}
	return r, nil
}

// Apply appends to dst what subj, a valid subject, is mapped to, and reports
// whether a mapping matches it. Nothing is appended if none does, or if the
// mapping wants the message to be lost.
func (m *Map) Apply(dst []byte, subj string) (mapped []byte, ok bool) {
	if m == nil {
		return dst, false
	}
	r := m.literal[subj]
	if r == nil {
		for _, w := range m.wild {
			if subject.Matches(w.source, subj) {
				r = w
				break
			}
		}
		if r == nil {
			return dst, false
		}
	}
	if len(r.choices) == 1 && r.choices[0].upto == 100 {
		return r.choices[0].t.AppendTo(dst, subj), true
	}
	n := rand.Uint32N(100)
	for i := range r.choices {
		if n < r.choices[i].upto {
			return r.choices[i].t.AppendTo(dst, subj), true
		}
	}
	return dst, true
}
