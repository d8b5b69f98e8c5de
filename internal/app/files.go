package app

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"petiole/internal/admin"
)

// writePID writes the pid file, if there is to be one.
func writePID(path string) error {
	if path == "" {
		return nil
	}
	if err := os.WriteFile(path, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); err != nil {
		return fileError("-P", "pid_file", path, err)
	}
	return nil
}

// removeFile removes a file that this process wrote. That it may be gone
// already, or in a place that is no longer writable, is no reason to fail.
func removeFile(path string) {
	if path != "" {
		_ = os.Remove(path)
	}
}

// portsFile returns the name of the ports file in dir: as nats-server has it,
// the program's name and process id.
func portsFile(dir string) string {
	exe := filepath.Base(os.Args[0])
	return filepath.Join(dir, fmt.Sprintf("%s_%d.ports", exe, os.Getpid()))
}

// ports is what a ports file holds.
type ports struct {
	NATS  []string `json:"nats,omitempty"`  // URLs for clients
	Edges []string `json:"edges,omitempty"` // URLs for edges
}

// writePorts writes the ports file, if there is to be one.
func (n *Node) writePorts(dir string) error {
	if dir == "" {
		return nil
	}
	doc := ports{NATS: []string{n.Broker.ClientURL()}}
	if link := n.currentLink(); link != nil {
		var st admin.Status
		if link.Describe(&st); st.Edges != nil {
			doc.Edges = []string{"quic://" + st.Edges.Addr}
		}
	}
	text, err := json.Marshal(doc)
	if err == nil {
		// Whoever waits for the file must not see half of it.
		tmp := portsFile(dir) + ".new"
		if err = os.WriteFile(tmp, text, 0o644); err == nil {
			err = os.Rename(tmp, portsFile(dir))
		}
	}
	if err != nil {
		return fileError("--ports_file_dir", "ports_file_dir", portsFile(dir), err)
	}
	return nil
}

func (n *Node) removePorts(dir string) {
	if dir != "" {
		removeFile(portsFile(dir))
	}
}
