package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
)

// metric is one figure of one repetition.
type metric struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Better string  `json:"better"` // "more" or "less"; "" if neither is
	Value  float64 `json:"value"`
}

// Names of metrics that every case has.
const (
	metricCPU  = "server CPU"
	metricRSS  = "server RSS"
	metricAnon = "of that anonymous"
)

type sample struct {
	Case    string   `json:"case"`
	Peer    string   `json:"peer"`
	Metrics []metric `json:"metrics"`
}

type report struct {
	Go              string   `json:"go"`
	CPUs            int      `json:"cpus"`
	Count           int      `json:"count"`
	Seconds         float64  `json:"seconds"`
	FdatasyncMicros float64  `json:"fdatasync_us_p50"`
	Samples         []sample `json:"samples"`
	Failures        []string `json:"failures,omitempty"`
}

// key names a figure.
type key struct{ name, metric string }

// figures are all samples of one figure.
type figures struct {
	metric
	peers map[string][]float64
}

// ratio of petiole's median to nats-server's, if there are both.
func (f *figures) ratio() (ratio float64, ok bool) {
	if f == nil {
		return 0, false
	}
	n, p := f.peers[peerNATS], f.peers[peerPetiole]
	if len(n) == 0 || len(p) == 0 || median(n) == 0 {
		return 0, false
	}
	return median(p) / median(n), true
}

// cell is the median of a peer's samples, for the table.
func (f *figures) cell(peer string) string {
	if f == nil || len(f.peers[peer]) == 0 {
		return "-"
	}
	return figure(median(f.peers[peer]))
}

// medians gathers the samples by figure.
func (r *report) medians() map[key]*figures {
	out := map[key]*figures{}
	for _, s := range r.Samples {
		for _, m := range s.Metrics {
			k := key{s.Case, m.Name}
			if out[k] == nil {
				out[k] = &figures{m, map[string][]float64{}}
			}
			out[k].peers[s.Peer] = append(out[k].peers[s.Peer], m.Value)
		}
	}
	return out
}

func (r *report) write(jsonPath string, stdout io.Writer) error {
	if jsonPath != "" {
		b, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		b = append(b, '\n')
		if jsonPath == "-" {
			_, err = stdout.Write(b)
			return err
		}
		if err := os.WriteFile(jsonPath, b, 0o644); err != nil {
			return fmt.Errorf("write -json: %w", err)
		}
	}
	return r.table(stdout)
}

// table prints medians, one line for each case and metric, and the table of
// js-publishers apart.
func (r *report) table(w io.Writer) error {
	fmt.Fprintf(w, "%s, %d CPUs, median of %d, %.3g s of load each; one write of 512 octets with fdatasync here: p50 %.0f us\n",
		r.Go, r.CPUs, r.Count, r.Seconds, r.FdatasyncMicros)
	medians := r.medians()
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "case\tmetric\tunit\tbetter\tnats-server\tpetiole\tratio\t")
	var done []key
	for _, s := range r.Samples {
		for _, m := range s.Metrics {
			k := key{s.Case, m.Name}
			if slices.Contains(done, k) || s.Case == casePublishers && m.Name != metricRSS {
				continue
			}
			done = append(done, k)
			f := medians[k]
			ratio := "-"
			if v, ok := f.ratio(); ok {
				ratio = fmt.Sprintf("%.2f", v)
			}
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", k.name, k.metric, f.Unit, f.Better,
				f.cell(peerNATS), f.cell(peerPetiole), ratio)
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if err := publishersTable(w, medians); err != nil {
		return err
	}
	for _, f := range r.Failures {
		fmt.Fprintln(w, "FAILED:", f)
	}
	return nil
}

func figure(v float64) string {
	if v >= 1000 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

func summary(ms []metric) string {
	var b strings.Builder
	for _, m := range ms {
		fmt.Fprintf(&b, "%s %s %s  ", m.Name, figure(m.Value), m.Unit)
	}
	return strings.TrimSpace(b.String())
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}
