//go:build rig

package ingest_test

import (
	"bytes"
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/sync/link"
)

// How fast an outage of half a million messages drains, from one engine to
// another, both on this machine's disk:
//
//	go test -tags rig -run Rig -v ./hub/ingest
func TestRigDrain(t *testing.T) {
	dir := t.TempDir()
	edge := startNode(t, filepath.Join(dir, "edge"))
	h := startHub(t, filepath.Join(dir, "hub"), "127.0.0.1:0", nil)
	js := connect(t, edge)
	if _, err := js.CreateStream(context.Background(), jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}}); err != nil {
		t.Fatal(err)
	}
	const n = 500_000
	data := bytes.Repeat([]byte("0123456789abcdef"), 8)
	for i := range n {
		if err := js.Conn().Publish("readings.line1.temperature", data); err != nil {
			t.Fatal(err)
		}
		if i%10_000 == 0 {
			js.Conn().Flush()
		}
	}
	js.Conn().Flush()
	s, _ := edge.engine.Stream("READINGS")
	until(t, "published", func() bool { return s.DurableState().Last == n })
	start := time.Now()
	l := startEdge(t, edge, h, link.Export{Stream: "READINGS", To: "PLANT"})
	until(t, "drained", func() bool { return l.Status().Exports[0].Through == n })
	took := time.Since(start)
	t.Logf("%d messages of 128 B in %v: %.0f/s", n, took, n/took.Seconds())
}
