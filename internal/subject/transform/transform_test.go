package transform

import (
	"errors"
	"math"
	"strings"
	"testing"

	"petiole/internal/subject"
)

// TestApply has nats-server's results, numbers of partitions included.
func TestApply(t *testing.T) {
	for _, tc := range []struct{ source, destination, subject, want string }{
		{"", "prefix.>", "foo", "prefix.foo"},
		{"", "x.>", "a.b", "x.a.b"},
		{">", "{{random(1)}}.>", "a.b", "0.a.b"},
		{"a.b", ">", "", "-"},
		{"foo", "bar", "foo", "bar"},
		{"foo", "bar", "foo.x", ""},
		{"baz.>", "my.pre.>", "baz.1.2.3", "my.pre.1.2.3"},
		{"baz.>", ">", "baz.1.2", "1.2"},
		{"baz.*.>", "$1.>", "baz.1.2.3", "1.2.3"},
		{"baz.*.>", "x.>", "baz.1", ""},
		{"foo.*.bar.*.baz", "req.$2.$1", "foo.A.bar.B.baz", "req.B.A"},
		{"foo.*.bar.*.baz", "req.{{wildcard(2)}}.{{Wildcard( 1 )}}", "foo.A.bar.B.baz", "req.B.A"},
		{"*", "$JS.x.$1", "foo", "$JS.x.foo"},
		{"*", "{{splitfromleft(1,3)}}", "12345", "123.45"},
		{"*", "{{splitFromLeft(1,5)}}", "12345", "12345"},
		{"*", "{{splitFromLeft(1,-1)}}", "12345", "12345"},
		{"*", "{{SplitFromRight(1,3)}}", "12345", "12.345"},
		{"*", "{{SliceFromLeft(1,3)}}", "1234567890", "123.456.789.0"},
		{"*", "{{SliceFromLeft(1,5)}}", "1234567890", "12345.67890"},
		{"*", "{{SliceFromRight(1,3)}}", "1234567890", "1.234.567.890"},
		{"*", "{{SliceFromRight(1,5)}}", "1234567890", "12345.67890"},
		{"*", "{{sliceFromRight(1,0)}}", "12", "12"},
		{"*", "{{split(1,-)}}", "-abc-def--ghi-", "abc.def.ghi"},
		{"*", "{{split(1,--)}}", "a-b--c", "a-b.c"},
		{"*.*", "{{split(2,-)}}.{{splitfromleft(1,2)}}", "foo.-abc-def--ghij-", "abc.def.ghij.fo.o"},
		{"*", "x.{{split(1,-)}}", "--", "x.--"},
		{"*", "{{right(1,1)}}", "1234", "4"},
		{"*", "{{right(1,6)}}", "1234", "1234"},
		{"*", "{{left(1,3)}}", "1234", "123"},
		{"*", "bar.{{partition(0)}}", "baz", "bar.0"},
		{"*", "bar.{{partition(10, 0)}}", "foo", "bar.3"},
		{"*", "bar.{{partition(10, 1)}}", "foo", "bar.3"},
		{"*.*", "bar.{{partition(10)}}", "foo.bar", "bar.6"},
		{"*", "bar.{{partition(10)}}", "qux", "bar.9"},
		{"*", "bar.{{random(0)}}", "qux", "bar.0"},
		{"foo.bar", "baz.{{partition(10)}}", "foo.bar", "baz.6"},
		{"foo.baz", "qux.{{partition(10,1)}}", "foo.baz", "qux.4"},
		{"test.subject", "result.{{partition(5)}}", "test.subject", "result.0"},
		{"*.*", "{{partition(2147483647,1,2)}}", "a.b", "1294271946"},
	} {
		tr, err := New(tc.source, tc.destination)
		if tc.want == "-" {
			if err == nil {
				t.Errorf("%q to %q is accepted", tc.source, tc.destination)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q to %q: %v", tc.source, tc.destination, err)
			continue
		}
		if got, ok := tr.Apply(tc.subject); got != tc.want || ok != (tc.want != "") {
			t.Errorf("%q to %q: %q becomes %q, want %q", tc.source, tc.destination, tc.subject, got, tc.want)
		}
	}
}

// TestErrors has nats-server's texts.
func TestErrors(t *testing.T) {
	const invalid = "invalid mapping destination: "
	for _, tc := range []struct{ source, destination, want string }{
		{"foo..", "bar", "invalid subject"},
		{"foo.*", "bar.*", "invalid subject"},
		{"foo.*", "bar.$1.>", "invalid subject"},
		{"foo.>", "bar.baz", "invalid subject"},
		{"foo.*", "bar.$2", invalid + "wildcard index out of range in $2: [2]"},
		{"foo.*", "foo.{{wildcard(2)}}", invalid + "wildcard index out of range in {{wildcard(2)}}: [2]"},
		{"foo.*", "foo.{{unimplemented(1)}}", invalid + "unknown function in {{unimplemented(1)}}"},
		{"foo.*", "foo.{{WILDCARD(1)}}", invalid + "unknown function in {{WILDCARD(1)}}"},
		{"foo.*", "foo.{{ wildcard5) }}", invalid + "unknown function in {{ wildcard5) }}"},
		{"foo.*", "foo.{{splitLeft(2,2}}", invalid + "unknown function in {{splitLeft(2,2}}"},
		{"foo.*", "foo.{{partition()}}", invalid + "function argument is invalid or in the wrong format in {{partition()}}"},
		{"foo.*", "foo.{{partition(2147483648)}}", invalid + "function argument is invalid or in the wrong format in {{partition(2147483648)}}"},
		{"foo.*", "{{partition(3,2)}}", invalid + "wildcard index out of range in {{partition(3,2)}}: [2]"},
		{"foo.*", "{{partition(3,2,x)}}", invalid + "function argument is invalid or in the wrong format in {{partition(3,2,x)}}"},
		{"foo.*", "{{partition(3,x)}}", invalid + "function argument is invalid or in the wrong format in {{partition(3,x)}}"},
		{"foo.*", "foo.{{random()}}", invalid + "function argument is invalid or in the wrong format in {{random()}}"},
		{"foo.*", "foo.{{random(1,2)}}", invalid + "not enough arguments passed to the function in {{random(1,2)}}"},
		{"foo.*", "foo.{{wildcard(foo)}}", invalid + "function argument is invalid or in the wrong format in {{wildcard(foo)}}"},
		{"foo.*", "foo.{{wildcard()}}", invalid + "not enough arguments passed to the function in {{wildcard()}}"},
		{"foo.*", "foo.{{wildcard(1,2)}}", invalid + "too many arguments passed to the function in {{wildcard(1,2)}}"},
		{"foo", "bla.{{wildcard(1)}}", invalid + "wildcard index out of range in {{wildcard(1)}}"},
		{"foo", "bla.$1", invalid + "wildcard index out of range in $1"},
		{"foo.*", "{{left(1)}}", invalid + "not enough arguments passed to the function in {{left(1)}}"},
		{"foo.*", "{{left(1,2,3)}}", invalid + "too many arguments passed to the function in {{left(1,2,3)}}"},
		{"foo.*", "{{left(1,x)}}", invalid + "function argument is invalid or in the wrong format in {{left(1,x)}}"},
		{"foo.*", "{{split(1)}}", invalid + "not enough arguments passed to the function in {{split(1)}}"},
		{"foo.*", "{{split(1, x y)}}", invalid + "function argument is invalid or in the wrong format in {{split(1, x y)}}"},
		{"foo.*", "{{split(3,-)}}", invalid + "wildcard index out of range in {{split(3,-)}}: [3]"},
		{"foo.*", "a..b", invalid + "invalid transform"},
		{"foo.*", "a.>.b", invalid + "invalid transform in b"},
		{"foo.*", "a b", invalid + "invalid transform"},
		{"foo.*", "", invalid + "invalid transform"},
	} {
		_, err := New(tc.source, tc.destination)
		if err == nil || err.Error() != tc.want {
			t.Errorf("%q to %q: %v, want %s", tc.source, tc.destination, err, tc.want)
		}
		if err != nil && errors.Is(err, ErrDestination) != strings.HasPrefix(tc.want, invalid) {
			t.Errorf("%q to %q: %v is of the wrong kind", tc.source, tc.destination, err)
		}
	}
}

func TestTokenize(t *testing.T) {
	if got := Tokenize("a.*.b.*.>"); got != "a.$1.b.$2.>" {
		t.Error(got)
	}
}

func TestMapErrors(t *testing.T) {
	for want, ms := range map[string][]Mapping{
		`mapping for "a..b": invalid subject`: {{Source: "a..b"}},
		`mapping for "a": there are two`:      {{Source: "a"}, {Source: "a"}},
		`mapping for "a.*": there are two`:    {{Source: "a.*"}, {Source: "a.*"}},
		`mapping for "a": duplicate entry for "b"`: {{"a", []Destination{
			{Subject: "b", Weight: 1}, {Subject: "b", Weight: 1},
		}}},
		`mapping for "a": individual weights need to be <= 100`: {{"a", []Destination{{Subject: "b", Weight: 101}}}},
		`mapping for "a": total weight needs to be <= 100`: {{"a", []Destination{
			{Subject: "b", Weight: 60}, {Subject: "c", Weight: 60},
		}}},
		`mapping for "a": invalid mapping destination: wildcard index out of range in $1`: {{"a", []Destination{{Subject: "$1", Weight: 60, Cluster: "x"}}}},
	} {
		if _, err := NewMap(ms); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if m, err := NewMap(nil); m != nil || err != nil {
		t.Error("no mappings are not nil")
	}
	if err := (Mapping{Source: "a", Destinations: []Destination{{Subject: "b", Weight: 7}}}).Check(); err != nil {
		t.Error(err)
	}
}

func newMap(t *testing.T, ms ...Mapping) *Map {
	t.Helper()
	m, err := NewMap(ms)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func to(subjects ...string) []Destination {
	ds := make([]Destination, len(subjects))
	for i, s := range subjects {
		ds[i] = Destination{Subject: s, Weight: 100 / len(subjects)}
	}
	return ds
}

func TestMostSpecificCounts(t *testing.T) {
	m := newMap(t,
		Mapping{"o.>", to("tail.>")},
		Mapping{"o.*.*", to("both.$1.$2")},
		Mapping{"o.*.new", to("second.$1")},
		Mapping{"o.vip.*", to("first.$1")},
		Mapping{"o.vip.new", to("exact")},
		Mapping{"only", []Destination{{Subject: "elsewhere", Weight: 100, Cluster: "east"}}},
	)
	for subj, want := range map[string]string{
		"o.vip.new": "exact", "o.vip.x": "first.x", "o.x.new": "second.x", "o.x.y": "both.x.y", "o.x": "tail.x",
		"o.x.y.z": "tail.x.y.z", "p": "", "only": "only",
	} {
		got, ok := m.Apply([]byte("~"), subj)
		if string(got) != "~"+want || ok != (want != "") {
			t.Errorf("%s becomes %s, %t; want %s", subj, got, ok, want)
		}
	}
	if _, ok := (*Map)(nil).Apply(nil, "a"); ok {
		t.Error("no map maps")
	}
}

// TestWeights counts what goes where: within five standard deviations.
func TestWeights(t *testing.T) {
	const n = 20000
	m := newMap(t,
		Mapping{"a.*", []Destination{{Subject: "b.$1", Weight: 10}, {Subject: "c.$1", Weight: 30}}}, // 60 % stay
		Mapping{"lossy", []Destination{{Subject: "lossy", Weight: 25}}},                             // 75 % are lost
		Mapping{"all", []Destination{{Subject: "never", Weight: 0}, {Subject: "always", Weight: 100}}},
	)
	got := make(map[string]int)
	for range n {
		for _, subj := range []string{"a.x", "lossy", "all"} {
			mapped, ok := m.Apply(nil, subj)
			if !ok {
				t.Fatalf("%s is not mapped", subj)
			}
			got[subj+" "+string(mapped)]++
		}
	}
	want := map[string]float64{"a.x b.x": .1, "a.x c.x": .3, "a.x a.x": .6, "lossy lossy": .25, "lossy ": .75, "all always": 1}
	if len(got) != len(want) {
		t.Errorf("%v", got)
	}
	for k, p := range want {
		if d := math.Abs(float64(got[k]) - p*n); d > 5*math.Sqrt(n*p*(1-p)) {
			t.Errorf("%q: %d of %d, want %.0f %%", k, got[k], n, 100*p)
		}
	}
}

func TestApplyDoesNotAllocate(t *testing.T) {
	m := newMap(t, Mapping{"a.*.>", to("x.{{partition(10,1)}}.{{splitFromLeft(1,2)}}.$1.>", "y.$1.>")})
	buf := make([]byte, 0, 128)
	if n := testing.AllocsPerRun(1000, func() { buf, _ = m.Apply(buf[:0], "a.hello.b.c.d") }); n > 0 {
		t.Errorf("%.1f allocations", n)
	}
}

// FuzzTransform: no pair of source and destination that is accepted makes
// anything but a subject of a matching subject, except where a literal token
// already was none.
func FuzzTransform(f *testing.F) {
	for _, seed := range [][3]string{
		{"a.*.>", "b.$1.>", "a.b.c"},
		{"*.*", "{{split(1,-)}}.{{partition(10,1,2)}}", "--.x"},
		{"*", "{{sliceFromRight(1,3)}}.{{left(1,2)}}.{{right(1,2)}}", "abcdefg"},
		{"*", "{{splitFromRight(1,1)}}.{{random(3)}}", "ab"},
		{"", ">", "x.y"},
		{"*", "{{partition(2,0)}}", "x"},
		{"foo.*", "foo.{{ wildcard5) }}", "foo.a"},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, source, destination, subj string) {
		tr, err := New(source, destination)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without text")
			}
			return
		}
		if !subject.Valid(subj) {
			return
		}
		got, ok := tr.Apply(subj)
		if ok != subject.Matches(tr.Source(), subj) {
			t.Errorf("%q to %q: %q matches: %t", source, destination, subj, ok)
		}
		// A wildcard that is published, or cut out of a token, may end up before others.
		if ok && !strings.ContainsAny(subj, "*>") && !strings.Contains(destination, "{{split") && !subject.Valid(got) {
			t.Errorf("%q to %q: %q becomes %q, which is no subject", source, destination, subj, got)
		}
		if ok && got == "" {
			t.Errorf("%q to %q: %q becomes nothing", source, destination, subj)
		}
		if id, err := New(tr.Source(), Tokenize(tr.Source())); err == nil && ok {
			// A token "$7" of the source is read as a reference there.
			if same, _ := id.Apply(subj); same != subj && !strings.Contains(source, "$") && !strings.Contains(source, "{{") {
				t.Errorf("%q does not stay as it is under %q: %q", subj, source, same)
			}
		}
	})
}
