package app

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"

	"petiole/internal/config"
)

// logFile is a log file that can be opened again under the same name after
// something else renamed it.
type logFile struct {
	path string
	mu   sync.Mutex
	f    *os.File
}

func openLog(path string) (*logFile, error) {
	l := &logFile{path: path}
	return l, l.reopen()
}

// reopen continues in a new file at the path; on failure the old file stays.
func (l *logFile) reopen() error {
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return fmt.Errorf("open log file: %w", err)
	}
	l.mu.Lock()
	old := l.f
	l.f = f
	l.mu.Unlock()
	if old != nil {
		old.Close()
	}
	return nil
}

// Write appends a record.
func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.f.Write(p)
}

// newLogger builds the logger that a configuration asks for. reopen starts
// the log file anew; it does nothing when the log goes to stderr.
func newLogger(c config.Logging, stderr io.Writer) (log *slog.Logger, reopen func() error, err error) {
	out, reopen := stderr, func() error { return nil }
	if c.File != "" {
		f, err := openLog(c.File)
		if err != nil {
			return nil, nil, Exit(ExitConfig, fmt.Errorf("%w; check log_file", err))
		}
		out, reopen = f, f.reopen
	}
	opts := &slog.HandlerOptions{Level: c.Level(), ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) > 0 {
			return a
		}
		switch a.Key {
		case slog.TimeKey:
			if !c.Time {
				return slog.Attr{}
			}
		case slog.LevelKey:
			if level, ok := a.Value.Any().(slog.Level); ok && level <= config.LevelTrace {
				return slog.String(slog.LevelKey, "TRACE")
			}
		}
		return a
	}}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(out, opts)), reopen, nil
	}
	return slog.New(slog.NewTextHandler(out, opts)), reopen, nil
}
