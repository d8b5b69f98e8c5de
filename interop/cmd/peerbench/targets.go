package main

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// slack is what a figure that should be no worse than nats-server's may be
// worse: medians of the same program differ by as much from run to run.
const slack = 1.05

// target is what the ratio of petiole's median to nats-server's has to be.
type target struct {
	name, metric string  // of the case
	min, max     float64 // one of them is set
}

// targets are what -check holds petiole to. Everything that petiole
// acknowledges here has been synced; in the cases that end in "always"
// nats-server is told to do so, too, in the others it is not.
func targets() []target {
	ts := []target{
		{name: "js-async-always", metric: "rate", min: 60},
		{name: "js-sync-always", metric: "rate", min: 1.2},
		{name: "js-sync-always", metric: "p99", max: slack},
		{name: "js-async-default", metric: "rate", min: 1.5},
		{name: "js-consume", metric: "rate", min: 1 / slack},
		{name: "js-disk", metric: "disk", max: 1.3},
		{name: "core-request", metric: "p99", max: slack},
	}
	for _, c := range []string{"js-async-always", "js-sync-always", "js-async-default", "js-consume"} {
		ts = append(ts, target{name: c, metric: metricCPU, max: slack})
	}
	for _, c := range []string{"core-pubonly", "core-1x1", "core-4x4"} {
		ts = append(ts, target{name: c, metric: "rate", min: 1.5}, target{name: c, metric: metricCPU, max: 0.65})
	}
	for _, c := range []string{"core-1x1-8KiB", "core-1x10"} { // mostly the kernel's work
		ts = append(ts, target{name: c, metric: "rate", min: 1.1}, target{name: c, metric: metricCPU, max: 0.95})
	}
	for _, c := range []string{"nats.go-pubonly", "nats.go-1x1", "nats.go-1x1-8KiB", "nats.go-4x4", "nats.go-1x10"} {
		ts = append(ts, target{name: c, metric: "rate", min: 1 / slack}, target{name: c, metric: metricCPU, max: slack})
	}
	for _, c := range []string{"start", "core-4x4", "core-1x10", "core-request"} {
		ts = append(ts, target{name: c, metric: metricRSS, max: slack})
	}
	ts = append(ts,
		target{name: "start", metric: "ready after", max: slack},
		target{name: "start", metric: metricAnon, max: slack},
		target{name: "core-request", metric: "p50", max: slack},
		target{name: "core-request", metric: "rate", min: 1 / slack},
		target{name: "core-request", metric: metricCPU, max: slack},
		target{name: "core-subs", metric: "memory each", max: 0.8})
	return ts
}

func (t target) want() string {
	if t.min > 0 {
		return fmt.Sprintf("at least %.3g", t.min)
	}
	return fmt.Sprintf("at most %.3g", t.max)
}

// met says whether a ratio is as it should be.
func (t target) met(ratio float64) bool {
	if t.min > 0 {
		return ratio >= t.min
	}
	return ratio <= t.max
}

// judge prints the targets of the cases that ran and returns how many were
// missed. What could not be measured counts as missed.
func (r *report) judge(w io.Writer, ran func(name string) bool) (missed int, err error) {
	medians := r.medians()
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "case\tmetric\ttarget (petiole / nats-server)\tratio\t")
	for _, t := range targets() {
		if !ran(t.name) {
			continue
		}
		m, ok := medians[key{t.name, t.metric}]
		ratio, known := m.ratio()
		verdict, figure := "met", fmt.Sprintf("%.2f", ratio)
		if !ok || !known {
			verdict, figure = "NOT MEASURED", "-"
			missed++
		} else if !t.met(ratio) {
			verdict = "MISSED"
			missed++
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\n", t.name, t.metric, t.want(), figure, verdict)
	}
	return missed, tw.Flush()
}
