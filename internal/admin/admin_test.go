package admin

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"petiole/sync/link"
)

func TestAsk(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("d", 60), strings.Repeat("e", 60))
	if err := os.MkdirAll(long, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, dir := range map[string]string{"short path": t.TempDir(), "path longer than a socket address": long} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, SocketName)
			if _, err := Ask(t.Context(), path); !errors.Is(err, ErrNotRunning) {
				t.Fatalf("nothing listens, got %v", err)
			}
			// A socket that a killed process left behind is no obstacle.
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			want := Status{
				Program: "edge", PID: 7, Ready: time.Millisecond,
				JetStream: &JetStream{StoreDir: dir, Streams: []Stream{{Name: "S", Msgs: 3, First: 1, Last: 3}}},
				Hub:       &link.EdgeStatus{Connected: true, Exports: []link.ExportStatus{{Stream: "S", To: "T", LagMsgs: 2}}},
			}
			s, err := Serve(path, func() Status { return want }, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			got, err := Ask(t.Context(), path)
			if err != nil {
				t.Fatal(err)
			}
			if got.PID != want.PID || got.JetStream.Streams[0] != want.JetStream.Streams[0] || got.Hub.Exports[0] != want.Hub.Exports[0] {
				t.Errorf("got %+v, want %+v", got, want)
			}
			if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
				t.Errorf("socket is open to others: %v, %v", fi, err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(path); err == nil {
				t.Error("socket is still there after Close")
			}
			if _, err := Ask(t.Context(), path); !errors.Is(err, ErrNotRunning) {
				t.Errorf("closed, got %v", err)
			}
		})
	}
}
