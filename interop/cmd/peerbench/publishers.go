package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// js-publishers shows group commit: ever more clients, each of which waits for
// every acknowledgement. With one of them a message costs one sync; with many
// the rate grows, and the number of syncs a second does not.
const casePublishers = "js-publishers"

// publisherCounts are the lines of its table.
var publisherCounts = []int{1, 2, 4, 8, 16, 32, 64, 128, 256}

const metricBare = "bare fdatasync loop"

// ofPublishers names a figure of one line.
func ofPublishers(what string, n int) string { return fmt.Sprintf("%s, %d publishers", what, n) }

func benchPublishers(ctx context.Context, e *env) (ms []metric, messages int, cpu time.Duration, err error) {
	// Each line has half the load time: there are nine.
	during := e.duration / 2
	bare, err := bareSyncs(e.dir, during)
	if err != nil {
		return nil, 0, 0, err
	}
	ms = append(ms, metric{metricBare, "1/s", "more", bare})
	first, err := e.stream(ctx)
	if err != nil {
		return nil, 0, 0, err
	}
	all := []jetstream.JetStream{first}
	for _, n := range publisherCounts {
		for len(all) < n {
			nc, err := e.connect()
			if err != nil {
				return nil, 0, 0, err
			}
			js, err := jetstream.New(nc)
			if err != nil {
				return nil, 0, 0, err
			}
			all = append(all, js)
		}
		if _, err := publishEach(ctx, all[:n], during/10); err != nil { // all is warm from here on
			return nil, 0, 0, err
		}
		m, err := e.meter()
		if err != nil {
			return nil, 0, 0, err
		}
		before, counted, err := e.syncs(ctx)
		if err != nil {
			return nil, 0, 0, err
		}
		start := time.Now()
		took, err := publishEach(ctx, all[:n], during)
		if err != nil {
			return nil, 0, 0, err
		}
		wall := time.Since(start)
		after, _, err := e.syncs(ctx)
		if err != nil {
			return nil, 0, 0, err
		}
		_, used, err := m.stop()
		if err != nil {
			return nil, 0, 0, err
		}
		cpu += used
		messages += len(took)
		ms = append(ms,
			rate(ofPublishers("rate", n), len(took), wall),
			metric{ofPublishers("p50", n), "us", "less", quantile(took, 0.50)},
			metric{ofPublishers("p99", n), "us", "less", quantile(took, 0.99)})
		if counted {
			ms = append(ms, metric{ofPublishers("syncs", n), "1/s", "", float64(after-before) / wall.Seconds()})
		}
	}
	return ms, messages, cpu, nil
}

// publishEach has each of the publishers publish one message after the other
// and returns, sorted, how long they took.
func publishEach(ctx context.Context, publishers []jetstream.JetStream, during time.Duration) ([]time.Duration, error) {
	payload := make([]byte, 128)
	took := make([][]time.Duration, len(publishers))
	errs := make([]error, len(publishers))
	var wg sync.WaitGroup
	start := time.Now()
	for i, js := range publishers {
		wg.Go(func() {
			for last := start; last.Sub(start) < during; {
				if _, errs[i] = js.Publish(ctx, "bench.js", payload); errs[i] != nil {
					return
				}
				now := time.Now()
				took[i] = append(took[i], now.Sub(last))
				last = now
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("publish: %w", err)
		}
	}
	all := slices.Concat(took...)
	slices.Sort(all)
	return all, nil
}

// syncs returns how many fdatasync calls of the log petiole's edge has counted;
// nats-server does not count its own.
func (e *env) syncs(ctx context.Context) (n uint64, counted bool, err error) {
	if e.peer != peerPetiole {
		return 0, false, nil
	}
	out, err := exec.CommandContext(ctx, e.binary, "status", "--json", "-c", filepath.Join(e.dir, confName)).Output()
	if err != nil {
		return 0, false, fmt.Errorf("edge status: %w", err)
	}
	var st struct {
		JetStream struct {
			Log struct {
				Syncs uint64 `json:"syncs"`
			} `json:"log"`
		} `json:"jetstream"`
	}
	if err := json.Unmarshal(out, &st); err != nil {
		return 0, false, fmt.Errorf("edge status: %w", err)
	}
	return st.JetStream.Log.Syncs, true, nil
}

// publishersTable prints the medians of js-publishers, if it ran.
func publishersTable(w io.Writer, medians map[key]*figures) error {
	get := func(what string, n int) *figures { return medians[key{casePublishers, ofPublishers(what, n)}] }
	if get("rate", 1) == nil {
		return nil
	}
	fmt.Fprintf(w, "\n%s: synchronous publishers, each waiting for its acknowledgement; nats-server with sync_interval: always.\n", casePublishers)
	if bare := medians[key{casePublishers, metricBare}]; bare != nil {
		fmt.Fprintf(w, "A bare loop of 512-octet writes and fdatasync on the same disk: %.0f a second.\n",
			median(slices.Concat(bare.peers[peerNATS], bare.peers[peerPetiole])))
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "publishers\tnats-server msg/s\tpetiole msg/s\tratio\tpetiole fsyncs/s\tmsgs/fsync\tnats-server p99 us\tpetiole p50 us\tpetiole p99 us\t")
	for _, n := range publisherCounts {
		f := get("rate", n)
		if f == nil {
			continue
		}
		ratio, shared := "-", "-"
		if v, ok := f.ratio(); ok {
			ratio = fmt.Sprintf("%.2f", v)
		}
		if s := get("syncs", n); s != nil && median(s.peers[peerPetiole]) > 0 {
			shared = fmt.Sprintf("%.1f", median(f.peers[peerPetiole])/median(s.peers[peerPetiole]))
		}
		fmt.Fprintf(tw, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", n, f.cell(peerNATS), f.cell(peerPetiole), ratio,
			get("syncs", n).cell(peerPetiole), shared, get("p99", n).cell(peerNATS), get("p50", n).cell(peerPetiole), get("p99", n).cell(peerPetiole))
	}
	return tw.Flush()
}
