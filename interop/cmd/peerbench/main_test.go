package main

import (
	"strings"
	"testing"
)

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		in   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 2, 9}, 3}} {
		if got := median(tt.in); got != tt.want {
			t.Errorf("median(%v) = %v, want %v", tt.in, got, tt.want)
		}
	}
}

func TestTableRatio(t *testing.T) {
	m := func(v float64) []metric { return []metric{{"rate", "msg/s", "more", v}} }
	r := report{Count: 3, Samples: []sample{
		{"core", peerNATS, m(100)},
		{"core", peerPetiole, m(10)},
		{"core", peerPetiole, m(150)},
		{"core", peerNATS, m(400)},
		{"core", peerNATS, m(50)},
		{"core", peerPetiole, m(900)},
		{"lone", peerNATS, m(7)},
	}, Failures: []string{"js on petiole: refused"}}
	var b strings.Builder
	if err := r.table(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"100      150   1.50", "7        -      -", "FAILED: js on petiole: refused"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("table lacks %q:\n%s", want, b.String())
		}
	}
}

func TestParseRejects(t *testing.T) {
	for _, args := range [][]string{{"-run", "("}, {"-count", "0"}, {"-peers", "other"}, {"-duration", "1h"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("parse(%q) accepted", args)
		}
	}
}
