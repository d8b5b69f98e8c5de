//go:build !windows

package app

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"petiole/internal/admin"
	"petiole/internal/config"
	"petiole/storage/metadb"
	"petiole/sync/link"
)

// An edge whose device key is damaged has it back from the copy; without a copy
// it serves its clients, and says what is wrong.
func TestDamagedDeviceKey(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "edge.conf")
	store := filepath.Join(dir, "store")
	conf := head + "jetstream { store_dir: \"" + store + "\" }\nhub { urls: [\"quic://127.0.0.1:9\"] }\nexports [ { stream: PLANT } ]\n"
	if err := os.WriteFile(path, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	start := func() (*admin.Status, string) {
		t.Helper()
		cfg, err := config.Load(path, config.Edge)
		if err != nil {
			t.Fatal(err)
		}
		log := new(lockedBuffer)
		l, err := newLogger(cfg.Log, log)
		if err != nil {
			t.Fatal(err)
		}
		n, err := Start(Program{Program: config.Edge, Link: Uplink}, cfg, l.Logger)
		if err != nil {
			t.Fatal(err)
		}
		st := n.Status()
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
		if st.Hub == nil || len(st.Hub.Exports) != 1 || st.Hub.Exports[0].Stream != "PLANT" {
			t.Fatalf("status of the hub: %+v", st.Hub)
		}
		return &st, log.String()
	}
	key := filepath.Join(store, link.DeviceFile)
	damage := func() {
		t.Helper()
		b, err := os.ReadFile(key)
		if err != nil {
			t.Fatal(err)
		}
		b[10] ^= 0x80
		if err := os.WriteFile(key, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	first, _ := start()
	damage()
	st, log := start()
	if st.Hub.EdgeID != first.Hub.EdgeID || !strings.Contains(log, "made anew from its copy") {
		t.Errorf("edge id %s, was %s; log:\n%s", st.Hub.EdgeID, first.Hub.EdgeID, log)
	}
	if st, log := start(); st.Hub.EdgeID != first.Hub.EdgeID || strings.Contains(log, "made anew") {
		t.Errorf("second start: edge id %s, was %s; log:\n%s", st.Hub.EdgeID, first.Hub.EdgeID, log)
	}

	damage()
	db, err := metadb.Open(filepath.Join(store, "meta.db"))
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Put("export", metadb.KV{Key: "/device key"}); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	st, log = start()
	if !strings.Contains(st.Hub.LastError, "device key is damaged") || !strings.Contains(st.Hub.Exports[0].LastError, "device key is damaged") {
		t.Errorf("status of the hub: %+v", st.Hub)
	}
	if st.JetStream == nil || st.ClientURL == "" || !strings.Contains(log, "device key is damaged") {
		t.Errorf("status %+v, log:\n%s", st, log)
	}
}
