//go:build !windows

package app

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"petiole/internal/broker"
	"petiole/internal/config"
	"petiole/storage"
)

func TestExitCodes(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		want int
	}{
		"none":                  {nil, 0},
		"anything":              {errors.New("x"), 1},
		"configuration":         {fmt.Errorf("start: %w", &config.Error{}), 78},
		"wrapped":               {fmt.Errorf("start: %w", Exit(69, errors.New("x"))), 69},
		"nil with a code":       {Exit(74, nil), 0},
		"store locked":          {storeError("/d", fmt.Errorf("open: %w", storage.ErrLocked)), 73},
		"store not permitted":   {storeError("/d", &fs.PathError{Op: "mkdir", Path: "/d", Err: syscall.EACCES}), 73},
		"store on a read-only":  {storeError("/d", &fs.PathError{Op: "mkdir", Path: "/d", Err: syscall.EROFS}), 73},
		"store is a file":       {storeError("/d", &fs.PathError{Op: "mkdir", Path: "/d", Err: syscall.ENOTDIR}), 73},
		"store corrupt":         {storeError("/d", fmt.Errorf("open: %w", storage.ErrCorrupt)), 74},
		"store, no space":       {storeError("/d", syscall.ENOSPC), 74},
		"port taken":            {listenError("127.0.0.1:1", "-p", syscall.EADDRINUSE), 69},
		"port of others":        {listenError("127.0.0.1:1", "-p", syscall.EACCES), 69},
		"address of no machine": {listenError("192.0.2.1:1", "-p", syscall.EADDRNOTAVAIL), 69},
	} {
		if got := ExitCode(tt.err); got != tt.want {
			t.Errorf("%s: exit code %d, want %d (%v)", name, got, tt.want, tt.err)
		}
	}
}

// TestReadmeListsExitCodes holds the table in README.md against the codes.
func TestReadmeListsExitCodes(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, code := range []int{ExitOK, ExitFailure, ExitUsage, ExitUnavailable, ExitCannotStore, ExitStorage, ExitConfig} {
		if !bytes.Contains(text, fmt.Appendf(nil, "\n| %d | ", code)) {
			t.Errorf("README.md does not list exit code %d", code)
		}
	}
}

func TestBrokerOptions(t *testing.T) {
	letOpen(t, 1<<20)
	c := config.Default()
	c.Host, c.Port, c.ServerName, c.MaxSubs = "127.0.0.1", -1, "till-7", 9
	c.JetStream.Enabled = true
	c.Auth.NoAuthUser = "a"
	c.ClientAdvertise = "x:1"
	c.AllowNonTLS = true
	c.TLS = &config.TLS{Timeout: 7, First: true, Fallback: 8, Map: true, RateLimit: 9, Pinned: map[string]bool{"p": true}, Config: &tls.Config{}}
	c.Auth.Users = []config.User{
		{Name: "a", Password: "x", ConnTypes: []string{"STANDARD"}, Permissions: &config.Permissions{
			Publish:   config.Subjects{Allow: []string{"p.>"}, Deny: []string{"p.x"}},
			Subscribe: config.Subjects{Allow: []string{"s"}},
			Responses: &config.Responses{Max: 3, Expires: time.Second},
		}},
		{Nkey: "UA"},
	}
	got := brokerOptions(c)
	want := broker.Options{
		Host: "127.0.0.1", Port: -1, ServerName: "till-7", GitCommit: Commit(),
		MaxPayload: 1 << 20, MaxControlLine: 4096, MaxPending: 64 << 20, MaxConn: 65536, MaxSubs: 9,
		PingInterval: 2 * time.Minute, MaxPingsOut: 2, WriteDeadline: 10 * time.Second,
		NoAuthUser: "a", JetStream: true, APILevel: 5, Advertise: "x:1", TLS: c.TLS.Config,
		TLSOptions: broker.TLSOptions{Timeout: 7, Optional: true, First: true, Fallback: 8, MapUsers: true, RateLimit: 9, Pinned: map[string]bool{"p": true}},
		Users: []broker.User{
			{Name: "a", Password: "x", ConnTypes: []string{"STANDARD"}, Permissions: &broker.Permissions{
				Publish:   broker.SubjectPermission{Allow: []string{"p.>"}, Deny: []string{"p.x"}},
				Subscribe: broker.SubjectPermission{Allow: []string{"s"}},
				Responses: &broker.ResponsePermission{Max: 3, Expires: time.Second},
			}},
			{NKey: "UA"},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, err := broker.New(got); err == nil {
		t.Error("an nkey that is none was accepted")
	}
	c.Auth = config.Authorization{User: "u", Password: "x"}
	if brokerOptions(c).TLSOptions.MapUsers {
		t.Error("certificates name users where there is but one login")
	}
}

func TestLogger(t *testing.T) {
	for name, tt := range map[string]struct {
		c    config.Logging
		want string // contained
		not  string // not contained; nothing if empty
	}{
		"text":             {config.Logging{Format: "text", Time: true}, "level=INFO msg=info a=1", "debug"},
		"text, no time":    {config.Logging{Format: "text"}, "level=INFO", "time=2"},
		"json":             {config.Logging{Format: "json", Time: true}, `"level":"INFO","msg":"info","a":1}`, "debug"},
		"debug":            {config.Logging{Format: "text", Debug: true}, "level=DEBUG msg=debug", "TRACE"},
		"trace":            {config.Logging{Format: "text", Trace: true}, "level=TRACE msg=trace", ""},
		"trace as json":    {config.Logging{Format: "json", Trace: true}, `"level":"TRACE"`, ""},
		"time in a group":  {config.Logging{Format: "text"}, "g.time=5", ""},
		"debug with trace": {config.Logging{Format: "text", Trace: true}, "level=DEBUG", ""},
	} {
		var out bytes.Buffer
		log, err := newLogger(tt.c, &out)
		if err != nil {
			t.Fatal(err)
		}
		log.Log(t.Context(), config.LevelTrace, "trace")
		log.Debug("debug")
		log.Info("info", "a", 1)
		log.Info("group", slog.Group("g", "time", 5))
		if err := log.reopen(); err != nil {
			t.Error(err)
		}
		if got := out.String(); !strings.Contains(got, tt.want) || tt.not != "" && strings.Contains(got, tt.not) {
			t.Errorf("%s: %s", name, got)
		}
	}
	if _, err := newLogger(config.Logging{File: "/does/not/exist/x.log"}, nil); ExitCode(err) != ExitConfig {
		t.Errorf("log file that cannot be opened: %v", err)
	}
}

func TestDefaultStoreDir(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", "/var/state")
	if got, err := defaultStoreDir(config.Edge); err != nil || got != filepath.FromSlash("/var/state/petiole/edge") {
		t.Errorf("%s, %v", got, err)
	}
	t.Setenv("XDG_STATE_HOME", "relative")
	t.Setenv("HOME", "/home/x")
	if got, err := defaultStoreDir(config.Hub); err != nil || got != filepath.FromSlash("/home/x/.local/state/petiole/hub") {
		t.Errorf("%s, %v", got, err)
	}
	t.Setenv("HOME", "")
	if _, err := defaultStoreDir(config.Hub); err == nil || !strings.Contains(err.Error(), "-sd") {
		t.Errorf("no home directory: %v", err)
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 1 << 30: "1.0 GiB", 1 << 63: "8.0 EiB"} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
