package suite

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// mostLater is how many tests of each suite later.txt lists. It may only be lowered.
var mostLater = map[string]int{"core": 33, "micro": 0, "jetstream": 61}

// TestLists holds the kept files against each other.
func TestLists(t *testing.T) {
	later, err := ReadLater("..")
	if err != nil {
		t.Fatal(err)
	}
	all := Baseline{}
	for _, name := range Names() {
		b, err := ReadBaseline("..", name)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) == 0 {
			t.Errorf("the baseline of %s is empty", name)
		}
		listed := 0
		for test, outcome := range b {
			all[test] = outcome
			if _, ok := later[test]; ok {
				listed++
			}
		}
		if listed != mostLater[name] {
			t.Errorf("later.txt has %d tests of %s, and mostLater says %d: the list only shrinks, and the number with it", listed, name, mostLater[name])
		}
	}
	for test := range later {
		if all[test] == "" || all[test] == Skip || all[test] == Fail {
			t.Errorf("%s is listed, but does not pass on nats-server either: %q", test, all[test])
		}
	}
}

func TestJudge(t *testing.T) {
	base := Baseline{"a": Pass, "b": Pass, "c": Pass, "d": Pass, "e": Fail, "f": Flaky}
	later := Later{"c": "clusters", "d": "clusters"}
	run := func(outcomes string) Results {
		var r Results
		for i, o := range strings.Fields(outcomes) {
			r = append(r, Result{Name: string(rune('a' + i)), Suite: "s", Outcome: Outcome(o)})
		}
		return r
	}
	for name, tt := range map[string]struct {
		outcomes string
		percent  float64
		failed   string
		want     string // part of the error, empty for none
	}{
		"good":               {"pass pass fail fail fail fail", 100, "", ""},
		"skips do not count": {"pass skip fail fail pass pass", 50, "b", "50.0 % passed"},
		"one fails":          {"fail pass fail fail pass pass", 50, "a", "50.0 % passed"},
		"listed and passes":  {"pass pass pass fail fail fail", 100, "", "c passes: take it off the list"},
	} {
		t.Run(name, func(t *testing.T) {
			v, err := Judge("s", run(tt.outcomes), base, later)
			if err != nil {
				t.Fatal(err)
			}
			failed := ""
			for _, r := range v.Failed {
				failed += r.Name
			}
			if v.Percent() != tt.percent || failed != tt.failed {
				t.Errorf("%.1f %%, failed %q; want %.1f %%, %q", v.Percent(), failed, tt.percent, tt.failed)
			}
			err = v.Check(98)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Check: %v, want %q", err, tt.want)
			}
		})
	}
	if _, err := Judge("s", Results{{Name: "new", Suite: "s"}}, base, later); err == nil {
		t.Error("a test that is not in the baseline is judged")
	}
}

func TestBaseline(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "baseline"), 0o755); err != nil {
		t.Fatal(err)
	}
	b := Baseline{}
	b.Merge("s", Results{{Name: "a", Suite: "s", Outcome: Pass}, {Name: "b", Suite: "s", Outcome: Pass}, {Name: "x", Suite: "other", Outcome: Pass}})
	b.Merge("s", Results{{Name: "a", Suite: "s", Outcome: Pass}, {Name: "b", Suite: "s", Outcome: Fail}})
	b.Merge("s", Results{{Name: "a", Suite: "s", Outcome: Pass}, {Name: "b", Suite: "s", Outcome: Pass}})
	if err := b.Write(dir, "s", "about it"); err != nil {
		t.Fatal(err)
	}
	got, err := ReadBaseline(dir, "s")
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got["a"] != Pass || got["b"] != Flaky {
		t.Errorf("read %v", got)
	}
	for _, bad := range []string{"pass\n", "great a\n", "pass a\nfail a\n"} {
		if err := os.WriteFile(filepath.Join(dir, "baseline", "s.txt"), []byte(bad), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadBaseline(dir, "s"); err == nil {
			t.Errorf("%q is taken for a baseline", bad)
		}
	}
}
