package app

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"petiole/internal/config"
)

// logFile is a log file that can be opened again under the same name after
// something else renamed it, and that begins anew by itself from a size on.
type logFile struct {
	mu    sync.Mutex
	path  string
	f     *os.File
	size  int64
	file  bool  // not a device or pipe, which can be appended to but not moved aside
	limit int64 // octets; 0: no bound
	keep  int   // files, this one included; 0: all
}

func openLog(c config.Logging) (*logFile, error) {
	l := &logFile{path: c.File, limit: c.SizeLimit, keep: c.MaxFiles}
	return l, l.reopen()
}

// reopen continues in a new file at the path; on failure the old file stays.
func (l *logFile) reopen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.openLocked(l.path)
}

func (l *logFile) openLocked(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return fmt.Errorf("open log file: %w", err)
	}
	size, file := int64(0), false
	if st, err := f.Stat(); err == nil {
		size, file = st.Size(), st.Mode().IsRegular()
	}
	if l.f != nil {
		l.f.Close()
	}
	l.f, l.path, l.size, l.file = f, path, size, file
	return nil
}

// set changes path and limits; on failure the old file stays.
func (l *logFile) set(c config.Logging) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.File != l.path {
		if err := l.openLocked(c.File); err != nil {
			return err
		}
	}
	l.limit, l.keep = c.SizeLimit, c.MaxFiles
	return nil
}

// Write appends a record.
func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.limit > 0 && l.file && l.size > 0 && l.size+int64(len(p)) > l.limit {
		l.rotate(time.Now())
	}
	n, err := l.f.Write(p)
	l.size += int64(n)
	return n, err
}

// rotate moves the file aside, under the name that nats-server gives it, and
// begins a new one. If that fails, the log goes on in the file at hand, which
// is tried again after as much again.
func (l *logFile) rotate(now time.Time) {
	aside := l.path + now.Format(".2006.01.02.15.04.05.") + fmt.Sprintf("%09d", now.Nanosecond())
	err := os.Rename(l.path, aside)
	if err == nil {
		err = l.openLocked(l.path)
	}
	if err != nil {
		fmt.Fprintf(l.f, "log file not rotated: %v\n", err)
		l.size = 0
		return
	}
	if l.keep <= 0 {
		return
	}
	old, err := rotated(l.path)
	for i := 0; err == nil && i < len(old)-(l.keep-1); i++ {
		err = os.Remove(old[i])
	}
	if err != nil {
		fmt.Fprintf(l.f, "old log file not removed: %v\n", err)
	}
}

// rotated lists what rotate has moved aside for path, oldest first.
func rotated(path string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		stamp, ok := strings.CutPrefix(e.Name(), filepath.Base(path)+".")
		if ok && len(stamp) == len("2006.01.02.15.04.05.000000000") && strings.Trim(stamp, "0123456789.") == "" {
			names = append(names, filepath.Join(filepath.Dir(path), e.Name()))
		}
	}
	slices.Sort(names)
	return names, nil
}

// logger is the program's log, parts of which a reload may change.
type logger struct {
	*slog.Logger
	level  slog.LevelVar
	noTime atomic.Bool
	utc    atomic.Bool // times are UTC; local otherwise
	json   atomic.Bool // the format; text otherwise
	file   *logFile    // nil: standard error
}

// newLogger builds the logger that a configuration asks for.
func newLogger(c config.Logging, stderr io.Writer) (*logger, error) {
	l := new(logger)
	out := stderr
	if c.File != "" {
		f, err := openLog(c)
		if err != nil {
			return nil, fileError("-l", "log_file", c.File, err)
		}
		l.file, out = f, f
	}
	l.level.Set(c.Level())
	l.noTime.Store(!c.Time)
	l.utc.Store(c.UTC)
	opts := &slog.HandlerOptions{Level: &l.level, ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) > 0 {
			return a
		}
		switch a.Key {
		case slog.TimeKey:
			if l.noTime.Load() {
				return slog.Attr{}
			}
			if l.utc.Load() {
				return slog.Time(slog.TimeKey, a.Value.Time().UTC())
			}
		case slog.LevelKey:
			if level, ok := a.Value.Any().(slog.Level); ok && level <= config.LevelTrace {
				return slog.String(slog.LevelKey, "TRACE")
			}
		}
		return a
	}}
	l.json.Store(c.Format == "json")
	l.Logger = slog.New(&twoFormats{&l.json, slog.NewTextHandler(out, opts), slog.NewJSONHandler(out, opts)})
	return l, nil
}

// twoFormats writes records as text or as JSON, whichever is asked for at the
// time.
type twoFormats struct {
	asJSON     *atomic.Bool
	text, json slog.Handler
}

func (f *twoFormats) now() slog.Handler {
	if f.asJSON.Load() {
		return f.json
	}
	return f.text
}

// Enabled implements [slog.Handler].
func (f *twoFormats) Enabled(ctx context.Context, level slog.Level) bool {
	return f.now().Enabled(ctx, level)
}

// Handle implements [slog.Handler].
func (f *twoFormats) Handle(ctx context.Context, r slog.Record) error { return f.now().Handle(ctx, r) }

// WithAttrs implements [slog.Handler].
func (f *twoFormats) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &twoFormats{f.asJSON, f.text.WithAttrs(attrs), f.json.WithAttrs(attrs)}
}

// WithGroup implements [slog.Handler].
func (f *twoFormats) WithGroup(name string) slog.Handler {
	return &twoFormats{f.asJSON, f.text.WithGroup(name), f.json.WithGroup(name)}
}

// reopen starts the log file anew; it does nothing when the log goes to
// standard error.
func (l *logger) reopen() error {
	if l.file == nil {
		return nil
	}
	return l.file.reopen()
}

// set changes what can change while the program runs: level, time, format, and
// name and limits of a file. On failure everything stays.
func (l *logger) set(c config.Logging) error {
	if l.file != nil {
		if err := l.file.set(c); err != nil {
			return err
		}
	}
	l.level.Set(c.Level())
	l.noTime.Store(!c.Time)
	l.utc.Store(c.UTC)
	l.json.Store(c.Format == "json")
	return nil
}
