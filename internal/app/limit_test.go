package app

import (
	"testing"

	"petiole/internal/config"
)

// letOpen has the system let the program open so many files.
func letOpen(t *testing.T, n int) {
	was := openFiles
	t.Cleanup(func() { openFiles = was })
	openFiles = func() int { return n }
}

// Where the system lets few files be open, clients do not get those of the store.
func TestFilesKeptFromClients(t *testing.T) {
	for _, c := range []struct{ limit, clients, stores int }{
		{64, 32, 16},
		{1024, 768, 128},
		{1 << 20, 1<<20 - 256, 128},
	} {
		if clients, stores := divideFiles(c.limit); clients != c.clients || stores != c.stores {
			t.Errorf("of %d files %d are for clients and %d for streams, want %d and %d", c.limit, clients, stores, c.clients, c.stores)
		}
	}
	letOpen(t, 1024)
	cfg := config.Default()
	if got := brokerOptions(cfg).MaxConn; got != 768 {
		t.Errorf("%d clients may connect to a process with 1024 files, want 768", got)
	}
	cfg.MaxConnections = 100
	if got := brokerOptions(cfg).MaxConn; got != 100 {
		t.Errorf("%d clients may connect, max_connections is 100", got)
	}
	cfg.MaxConnections = -1
	if got := brokerOptions(cfg).MaxConn; got != -1 {
		t.Errorf("%d clients may connect, max_connections is none", got)
	}
}
