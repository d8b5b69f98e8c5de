package admin

import (
	"errors"
	"log/slog"
	"net"
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
			leaveSocket(t, path)
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

// leaveSocket leaves a socket behind that nobody listens on.
func leaveSocket(t *testing.T, path string) {
	name, dir, err := shortName(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ln, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
}

// What is in the socket's place and is not left over stays.
func TestServeReplacesNothingElse(t *testing.T) {
	dir := t.TempDir()
	serve := func(path string) (*Server, error) {
		return Serve(path, func() Status { return Status{PID: 1} }, slog.New(slog.DiscardHandler))
	}
	notes := filepath.Join(dir, "notes")
	if err := os.WriteFile(notes, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := serve(notes); err == nil || !strings.Contains(err.Error(), "something else") {
		t.Errorf("in place of a file: %v", err)
	}
	if text, err := os.ReadFile(notes); string(text) != "mine" {
		t.Errorf("the file: %q, %v", text, err)
	}
	path := filepath.Join(dir, "socket")
	s, err := serve(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := serve(path); err == nil || !strings.Contains(err.Error(), "another program listens") {
		t.Errorf("in place of another's: %v", err)
	}
	if st, err := Ask(t.Context(), path); err != nil || st.PID != 1 {
		t.Errorf("the first one: %+v, %v", st, err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
