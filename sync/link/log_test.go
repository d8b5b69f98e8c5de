package link

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
)

// lines collects log lines of level info and above.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *lines) all() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *lines) count(part string) int {
	n := 0
	for line := range strings.Lines(l.all()) {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}
