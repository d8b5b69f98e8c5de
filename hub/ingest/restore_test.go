package ingest_test

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"petiole/internal/storagetool"
	"petiole/sync/link"
)

// backup copies the store of a stopped node into a file.
func backup(t *testing.T, dir, to string) {
	t.Helper()
	s, err := storagetool.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Backup(t.Context(), to, storagetool.BackupOptions{}); err != nil {
		t.Fatal(err)
	}
}

func restore(t *testing.T, from, dir string) {
	t.Helper()
	if _, err := storagetool.Restore(t.Context(), from, dir, storagetool.RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
}

// An edge whose store is restored from a backup does not make the hub lose or
// double what it has got since: a new incarnation begins where both agree.
func TestRestoredEdge(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "backup.tar.zst")
	to := link.Export{Stream: "READINGS", To: "PLANT"}
	edge := startNode(t, filepath.Join(dir, "edge"))
	h := startHub(t, filepath.Join(dir, "hub"), "127.0.0.1:0", nil)
	js := connect(t, edge)
	if _, err := js.CreateStream(context.Background(), jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}}); err != nil {
		t.Fatal(err)
	}
	l := startEdge(t, edge, h, to)
	publish(t, js, 1, 500)
	until(t, "acknowledged", func() bool { return l.Status().Exports[0].Through == 500 })
	l.Close()
	edge.stop()
	backup(t, edge.dir, file)

	edge = startNode(t, edge.dir)
	js = connect(t, edge)
	l = startEdge(t, edge, h, to)
	publish(t, js, 501, 200)
	until(t, "acknowledged", func() bool { return l.Status().Exports[0].Through == 700 })
	l.Close()
	edge.stop()

	// The store is lost with its 700 messages; the copy has 500.
	again := filepath.Join(dir, "restored")
	restore(t, file, again)
	edge = startNode(t, again)
	js = connect(t, edge)
	publish(t, js, 701, 300)
	l = startEdge(t, edge, h, to)
	until(t, "acknowledged", func() bool { return l.Status().Exports[0].Through == 800 })
	check(t, h, "PLANT", 1000)
	if x := l.Status().Exports[0]; x.Incarnation != 2 || x.Base != 501 || x.LagMsgs != 0 {
		t.Errorf("after restoring: %+v", x)
	}
}

// A hub whose store is restored gets again what it had got since the backup.
func TestRestoredHub(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "backup.tar.zst")
	to := link.Export{Stream: "READINGS", To: "PLANT"}
	edge := startNode(t, filepath.Join(dir, "edge"))
	h := startHub(t, filepath.Join(dir, "hub"), "127.0.0.1:0", nil)
	js := connect(t, edge)
	if _, err := js.CreateStream(context.Background(), jetstream.StreamConfig{Name: "READINGS", Subjects: []string{"readings.>"}}); err != nil {
		t.Fatal(err)
	}
	l := startEdge(t, edge, h, to)
	publish(t, js, 1, 500)
	until(t, "acknowledged", func() bool { return l.Status().Exports[0].Through == 500 })
	l.Close()
	h.stop()
	backup(t, h.dir, file)

	h = startHub(t, h.dir, "127.0.0.1:0", nil)
	l = startEdge(t, edge, h, to)
	publish(t, js, 501, 200)
	until(t, "acknowledged", func() bool { return l.Status().Exports[0].Through == 700 })
	l.Close()
	h.stop()

	again := filepath.Join(dir, "restored")
	restore(t, file, again)
	h = startHub(t, again, "127.0.0.1:0", nil)
	publish(t, js, 701, 100)
	startEdge(t, edge, h, to)
	until(t, "replayed", func() bool { return last(h, "PLANT") == 800 })
	check(t, h, "PLANT", 800)
}
