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

// removePID removes the pid file if this process wrote it: not another one's that
// was started meanwhile, and not a device such as /dev/null. That it may be in a
// place that is no longer writable is no reason to fail.
func removePID(path string) {
	if path == "" || !isFile(path) {
		return
	}
	if pid, err := readPID(path); err == nil && pid == os.Getpid() {
		_ = os.Remove(path)
	}
}

// isFile says whether there is a file at path, and not a device, pipe, directory
// or symbolic link.
func isFile(path string) bool {
	fi, err := os.Lstat(path)
	return err == nil && fi.Mode().IsRegular()
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
	if path := portsFile(dir); dir != "" && isFile(path) {
		_ = os.Remove(path)
	}
}
