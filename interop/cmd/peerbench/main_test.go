package main

import (
	"slices"
	"strings"
	"testing"
	"time"
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
	for _, args := range [][]string{{"-run", "("}, {"-count", "0"}, {"-peers", "other"}, {"-duration", "1h"}, {"-limit", "0s"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("parse(%q) accepted", args)
		}
	}
}

// A target that names no case or figure would never be held against anything.
func TestTargetsNameCases(t *testing.T) {
	for _, tt := range targets() {
		if !slices.Contains(names(), tt.name) {
			t.Errorf("target of unknown case %q", tt.name)
		}
		if (tt.min > 0) == (tt.max > 0) {
			t.Errorf("%s %s: want a minimum or a maximum", tt.name, tt.metric)
		}
	}
}

// squeezed makes one space of what stands between columns.
func squeezed(s string) string { return strings.Join(strings.Fields(s), " ") }

func TestJudge(t *testing.T) {
	one := func(name string, v float64) []metric { return []metric{{Name: name, Value: v}} }
	r := report{Samples: []sample{
		{"js-sync-always", peerNATS, one("rate", 1000)},
		{"js-sync-always", peerPetiole, one("rate", 1250)},
		{"js-sync-always", peerNATS, one("p99", 100)},
		{"js-sync-always", peerPetiole, one("p99", 200)},
	}}
	var b strings.Builder
	missed, err := r.judge(&b, func(name string) bool { return name == "js-sync-always" })
	if err != nil {
		t.Fatal(err)
	}
	// The rate is met, p99 is not, and CPU was not measured.
	if missed != 2 {
		t.Errorf("%d targets missed, want 2:\n%s", missed, b.String())
	}
	for _, want := range []string{"rate at least 1.2 1.25 met", "p99 at most 1.05 2.00 MISSED", "CPU at most 1.05 - NOT MEASURED"} {
		if !strings.Contains(squeezed(b.String()), want) {
			t.Errorf("verdicts lack %q:\n%s", want, b.String())
		}
	}
}

func TestPublishersTable(t *testing.T) {
	r := report{Samples: []sample{
		{casePublishers, peerNATS, []metric{{metricBare, "1/s", "more", 2000}, rate(ofPublishers("rate", 1), 500, time.Second)}},
		{casePublishers, peerPetiole, []metric{
			{metricBare, "1/s", "more", 2400},
			rate(ofPublishers("rate", 1), 1000, time.Second),
			{ofPublishers("syncs", 1), "1/s", "", 250},
			{ofPublishers("p99", 1), "us", "less", 77},
		}},
	}}
	var b strings.Builder
	if err := r.table(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"same disk: 2200 a second", "1 500 1000 2.00 250 4.0 - - 77"} {
		if !strings.Contains(squeezed(b.String()), want) {
			t.Errorf("table lacks %q:\n%s", want, b.String())
		}
	}
}
