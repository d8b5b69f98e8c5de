package subject

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
)

func TestValid(t *testing.T) {
	for s, want := range map[string][2]bool{ // valid, literal
		"a": {true, true}, "a.b.c": {true, true}, "*": {true, false}, ">": {true, false}, "a.*.c": {true, false}, "a.>": {true, false},
		"a*.b": {true, true}, "a>": {true, true}, "**": {true, true}, "*.>": {true, false}, "ü.€": {true, true},
		"": {}, ".": {}, "a.": {}, ".a": {}, "a..b": {}, "a b": {}, "a\tb": {}, "a\r": {}, "a\nb": {}, "a\x00": {}, ">.a": {}, "a.>.b": {},
	} {
		if Valid(s) != want[0] || ValidLiteral(s) != want[1] || Valid([]byte(s)) != want[0] {
			t.Errorf("%q: valid %v, literal %v", s, Valid(s), ValidLiteral(s))
		}
		if want[0] && HasWildcard(s) == want[1] {
			t.Errorf("%q: wildcard %v", s, HasWildcard(s))
		}
	}
}

func TestRelations(t *testing.T) {
	for _, tc := range []struct {
		a, b               string
		matches, sub, over bool // Matches(a, b), Subset(b, a), Overlaps
	}{
		{"a", "a", true, true, true},
		{"a", "b", false, false, false},
		{"a.b", "a", false, false, false},
		{"a", "a.b", false, false, false},
		{"*", "a", true, true, true},
		{"*", "a.b", false, false, false},
		{">", "a.b.c", true, true, true},
		{"a.>", "a", false, false, false},
		{"a.>", "a.b", true, true, true},
		{"a.*.c", "a.b.c", true, true, true},
		{"a.*.c", "a.b.d", false, false, false},
	} {
		if Matches(tc.a, tc.b) != tc.matches || Subset(tc.b, tc.a) != tc.sub || Overlaps(tc.a, tc.b) != tc.over || Overlaps(tc.b, tc.a) != tc.over {
			t.Errorf("%+v: %v %v %v", tc, Matches(tc.a, tc.b), Subset(tc.b, tc.a), Overlaps(tc.a, tc.b))
		}
	}
	for _, tc := range []struct {
		sub, super string
		want, over bool
	}{
		{"a.*", "a.>", true, true},
		{"a.>", "a.*", false, true},
		{">", "*", false, true},
		{"*", ">", true, true},
		{"*.b", "a.*", false, true},
		{"*.b", "*.c", false, false},
		{"a.>", "a", false, false},
		{"*.*", "a.>", false, true},
		{"a.*.c", "a.b.>", false, true},
	} {
		if Subset(tc.sub, tc.super) != tc.want || Overlaps(tc.sub, tc.super) != tc.over {
			t.Errorf("%+v: %v %v", tc, Subset(tc.sub, tc.super), Overlaps(tc.sub, tc.super))
		}
	}
}

func TestTokens(t *testing.T) {
	s := "a.bc.d"
	if got := Tokens(nil, s); !slices.Equal(got, []string{"a", "bc", "d"}) || NumTokens(s) != 3 {
		t.Errorf("tokens %q, %d", got, NumTokens(s))
	}
	for i, want := range []string{"a", "bc", "d", "", ""} {
		if got := Token(s, i); got != want {
			t.Errorf("token %d is %q", i, got)
		}
	}
}

// FuzzSubject checks the relations against their definition on the literals
// made of few tokens.
func FuzzSubject(f *testing.F) {
	for _, s := range []string{"a", "a.b", "*", ">", "a.*", "a.>", "*.b", "*.*", "a.*.>", "a..b", "", "b.>", ">.a", "a.b.a"} {
		f.Add(s, "a.*")
		f.Add("*.>", s)
	}
	var literals []string
	for _, x := range []string{"a", "b", "c"} {
		literals = append(literals, x)
		for _, y := range []string{"a", "b", "c"} {
			literals = append(literals, x+"."+y)
			for _, z := range []string{"a", "b", "c"} {
				literals = append(literals, x+"."+y+"."+z, x+"."+y+"."+z+".a")
			}
		}
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		if Valid(a) != Valid([]byte(a)) || ValidLiteral(a) && (!Valid(a) || HasWildcard(a)) {
			t.Fatalf("validity of %q contradicts itself", a)
		}
		if !Valid(a) || !Valid(b) {
			return
		}
		if n := NumTokens(a); n != strings.Count(a, ".")+1 || len(Tokens(nil, a)) != n {
			t.Errorf("%q: %d tokens", a, n)
		}
		if !Subset(a, a) || !Overlaps(a, a) || Overlaps(a, b) != Overlaps(b, a) || Subset(a, b) && !Overlaps(a, b) {
			t.Errorf("%q, %q: relations contradict each other", a, b)
		}
		if ValidLiteral(b) && (Matches(a, b) != Subset(b, a) || Matches(a, b) != Overlaps(a, b)) {
			t.Errorf("%q, literal %q: relations contradict each other", a, b)
		}
		for _, l := range literals {
			ma, mb := Matches(a, l), Matches(b, l)
			if ma && !mb && Subset(a, b) {
				t.Errorf("%q is a subset of %q, but only it matches %q", a, b, l)
			}
			if ma && mb && !Overlaps(a, b) {
				t.Errorf("%q and %q do not overlap, but both match %q", a, b, l)
			}
		}
		var x Index[int]
		if err := x.Insert(a, "", 1); err != nil {
			t.Fatal(err)
		}
		if err := x.Insert(b, "q", 2); err != nil {
			t.Fatal(err)
		}
		var r Result[int]
		for _, l := range literals {
			x.Match(l, &r)
			if (len(r.Plain) == 1) != Matches(a, l) || (len(r.Queues) == 1) != Matches(b, l) || x.Any(l) == r.Empty() {
				t.Errorf("%q: %v with %q and %q", l, r, a, b)
			}
		}
		if !x.Remove(a, "", 1) || x.Remove(a, "", 1) || x.Remove(b, "", 2) || !x.Remove(b, "q", 2) || x.Len() != 0 || !x.root.empty() {
			t.Errorf("index is not empty after removing %q and %q", a, b)
		}
	})
}

// TestIndexModel compares random operations with a list searched from end to end.
func TestIndexModel(t *testing.T) {
	type sub struct {
		subject, queue string
		v              int
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	toks := []string{"a", "b", "c", "*"}
	random := func(literal bool) string {
		var s []string
		for range 1 + rnd.IntN(4) {
			k := len(toks)
			if literal {
				k--
			}
			s = append(s, toks[rnd.IntN(k)])
		}
		if !literal && rnd.IntN(4) == 0 {
			s = append(s, ">")
		}
		return strings.Join(s, ".")
	}
	var x Index[int]
	cache := NewCache(&x, 8, nil)
	var model []sub
	for i := range 20000 {
		switch k := rnd.IntN(6); {
		case k == 0 || k == 1 && len(model) < 200:
			s := sub{random(false), []string{"", "", "q1", "q2"}[rnd.IntN(4)], i}
			model = append(model, s)
			if err := x.Insert(s.subject, s.queue, s.v); err != nil {
				t.Fatal(err)
			}
		case k == 2 && len(model) > 0:
			j := rnd.IntN(len(model))
			if s := model[j]; !x.Remove(s.subject, s.queue, s.v) || x.Remove(s.subject, s.queue, s.v) {
				t.Fatalf("remove %+v", s)
			}
			model = slices.Delete(model, j, j+1)
		default:
			lit := random(true)
			var want []string
			for _, s := range model {
				if Matches(s.subject, lit) {
					want = append(want, fmt.Sprint(s.queue, " ", s.v))
				}
			}
			slices.Sort(want)
			var r Result[int]
			x.Match(lit, &r)
			for _, r := range []*Result[int]{&r, &cache.Lookup([]byte(lit)).Result, &cache.Lookup([]byte(lit)).Result} {
				var got []string
				for _, v := range r.Plain {
					got = append(got, fmt.Sprint(" ", v))
				}
				for _, g := range r.Queues {
					for _, v := range g.Members {
						got = append(got, fmt.Sprint(g.Name, " ", v))
					}
				}
				slices.Sort(got)
				if !slices.Equal(got, want) {
					t.Fatalf("%q: got %q, want %q", lit, got, want)
				}
			}
			if x.Any(lit) != (len(want) > 0) {
				t.Fatalf("%q: any is %v", lit, x.Any(lit))
			}
		}
	}
	if x.Len() != len(model) {
		t.Errorf("%d subscriptions, want %d", x.Len(), len(model))
	}
	for _, s := range model {
		x.Remove(s.subject, s.queue, s.v)
	}
	if !x.root.empty() {
		t.Error("nodes left in an empty index")
	}
	if err := x.Insert("a..b", "", 1); err == nil || x.Remove("a..b", "", 1) {
		t.Error("malformed subject accepted")
	}
}

// TestCrowds: of a long list the places are known, and right, however its
// members come and go; a short one has none.
func TestCrowds(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for _, queue := range []string{"", "q"} {
		var x Index[int]
		var model []int
		known := false
		for i := range 6 * longList {
			if i < 3*longList || rnd.IntN(3) == 0 {
				v := rnd.IntN(1000 * longList)
				if rnd.IntN(8) == 0 && len(model) > 0 {
					v = model[rnd.IntN(len(model))] // once more
				}
				model = append(model, v)
				if err := x.Insert("a", queue, v); err != nil {
					t.Fatal(err)
				}
			} else {
				j := rnd.IntN(len(model))
				if !x.Remove("a", queue, model[j]) {
					t.Fatalf("%d is not there", model[j])
				}
				model = slices.Delete(model, j, j+1)
			}
			n := x.root.lit["a"]
			list, at := n.plain, n.at
			if queue != "" {
				list, at = n.queues[0].Members, n.queues[0].at
			}
			for v, i := range at {
				if list[i] != v {
					t.Fatalf("place %d has %d, not %d", i, list[i], v)
				}
			}
			known = known || at != nil
		}
		var r Result[int]
		x.Match("a", &r)
		got := r.Plain
		if queue != "" {
			got = r.Queues[0].Members
		}
		got = slices.Clone(got)
		slices.Sort(got)
		slices.Sort(model)
		if !slices.Equal(got, model) {
			t.Errorf("got %d, want %d", got, model)
		}
		for _, v := range model {
			x.Remove("a", queue, v)
		}
		if !known || !x.root.empty() {
			t.Errorf("places known: %v, empty: %v", known, x.root.empty())
		}
	}
}

func TestCacheAllocates(t *testing.T) {
	var x Index[int]
	_ = x.Insert("a.*", "", 1)
	_ = x.Insert("a.>", "q", 2)
	asked := 0
	c := NewCache(&x, 4, func(s []byte) uint8 {
		asked++
		if !ValidLiteral(s) {
			return 0
		}
		return 1
	})
	if e := c.Lookup([]byte("a.*")); e.Note != 0 || !e.Empty() {
		t.Error("note 0 does not keep the subject from being looked up")
	}
	subjects := make([][]byte, 1000)
	for i := range subjects {
		subjects[i] = fmt.Appendf(nil, "a.%d", i)
	}
	for range 3 {
		for _, s := range subjects {
			if e := c.Lookup(s); len(e.Plain) != 1 || len(e.Queues) != 1 {
				t.Fatalf("%s: %+v", s, e.Result)
			}
		}
	}
	if len(c.byKey) > 4 {
		t.Errorf("%d entries, 4 permitted", len(c.byKey))
	}
	c.Forget()
	i := 0
	if n := testing.AllocsPerRun(500, func() { c.Lookup(subjects[i]); i++ }); n != 0 {
		t.Errorf("subjects used once allocate %v times", n)
	}
	c.Lookup(subjects[0])
	if n := testing.AllocsPerRun(100, func() {
		if len(c.Lookup(subjects[0]).Plain) == 0 {
			t.Error("nothing found")
		}
	}); n != 0 {
		t.Errorf("a cached subject allocates %v times", n)
	}
	asked = 0
	_ = x.Insert("a.0", "", 3)
	if e := c.Lookup(subjects[0]); len(e.Plain) != 2 || asked != 0 {
		t.Errorf("after a change: %+v, note asked %d times", e.Result, asked)
	}
}

// TestChangesElsewhere: who subscribes to other first tokens does not make a
// result old; a wildcard there does.
func TestChangesElsewhere(t *testing.T) {
	var x Index[int]
	_ = x.Insert("data.a", "", 1)
	c := NewCache(&x, 4, nil)
	c.Lookup([]byte("data.a"))
	e := c.Lookup([]byte("data.a"))
	current := func() bool { return e.gen == x.generation(e.slot) }
	if slot("data.a") == slot("_INBOX.x") {
		t.Fatal("the test needs two first tokens that fall apart")
	}
	_ = x.Insert("_INBOX.x.*", "", 2)
	x.Remove("_INBOX.x.*", "", 2)
	if !current() {
		t.Error("a change elsewhere makes the result old")
	}
	for _, subj := range []string{"data.b", "*.a", ">"} {
		_ = x.Insert(subj, "", 3)
		if current() {
			t.Errorf("the result is not old after a change of %s", subj)
		}
		c.Lookup([]byte("data.a"))
		x.Remove(subj, "", 3)
		if current() {
			t.Errorf("the result is not old after the end of %s", subj)
		}
		c.Lookup([]byte("data.a"))
	}
}

func TestIndexConcurrent(t *testing.T) {
	var x Index[int]
	_ = x.Insert("a.b", "", -1)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c := NewCache(&x, 16, nil)
			for i := range 2000 {
				v := g*10000 + i
				_ = x.Insert("a.*", "q", v)
				if e := c.Lookup([]byte("a.b")); len(e.Plain) != 1 || len(e.Queues) != 1 || !slices.Contains(e.Queues[0].Members, v) {
					t.Errorf("own subscription is not found")
				}
				x.Remove("a.*", "q", v)
				if e := c.Lookup([]byte("a.b")); len(e.Queues) == 1 && slices.Contains(e.Queues[0].Members, v) {
					t.Errorf("removed subscription is found")
				}
			}
		}()
	}
	wg.Wait()
	if x.Len() != 1 {
		t.Errorf("%d left", x.Len())
	}
}

func BenchmarkMatch(b *testing.B) {
	var x Index[int]
	for i := range 10000 {
		_ = x.Insert(fmt.Sprintf("plant.%d.machine.%d.temp", i%100, i), "", i)
	}
	_ = x.Insert("plant.*.machine.*.temp", "", -1)
	subj := []byte("plant.42.machine.4242.temp")
	b.Run("index", func(b *testing.B) {
		var r Result[int]
		b.ReportAllocs()
		for b.Loop() {
			x.MatchBytes(subj, &r)
		}
	})
	b.Run("cache", func(b *testing.B) {
		c := NewCache(&x, 16, nil)
		b.ReportAllocs()
		for b.Loop() {
			c.Lookup(subj)
		}
	})
	b.Run("cache, inboxes come and go", func(b *testing.B) {
		c := NewCache(&x, 16, nil)
		b.ReportAllocs()
		for b.Loop() {
			_ = x.Insert("_INBOX.abc", "", -2)
			c.Lookup(subj)
			x.Remove("_INBOX.abc", "", -2)
			c.Lookup(subj)
		}
	})
}
