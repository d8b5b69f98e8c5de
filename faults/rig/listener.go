//go:build linux

package rig

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// listensOn reports whether one of the process's own sockets accepts TCP
// connections on addr's port. Programs come back on ports that nobody held for a
// while: who answers there may be the program of another rig.
func (p *Process) listensOn(addr string) (bool, error) {
	_, text, err := net.SplitHostPort(addr)
	if err != nil {
		return false, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return false, fmt.Errorf("port of %s: %w", addr, err)
	}
	listeners := map[string]bool{} // links in /proc/PID/fd
	for _, table := range []string{"tcp", "tcp6"} {
		f, err := os.Open(fmt.Sprintf("/proc/%d/net/%s", p.PID(), table))
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has ended, or there is no IPv6
		}
		if err != nil {
			return false, err
		}
		// proc_net(5): local_address and st are the 2nd and 4th field, all
		// hexadecimal, the inode is the 10th.
		const listen = "0A"
		local := fmt.Sprintf(":%04X", port)
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			if c := strings.Fields(lines.Text()); len(c) > 9 && strings.HasSuffix(c[1], local) && c[3] == listen {
				listeners["socket:["+c[9]+"]"] = true
			}
		}
		f.Close()
		if err := lines.Err(); err != nil {
			return false, err
		}
	}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.PID()))
	if err != nil {
		return false, err
	}
	for _, fd := range fds {
		// A descriptor that is closed meanwhile is none that listens.
		if to, err := os.Readlink(fd); err == nil && listeners[to] {
			return true, nil
		}
	}
	return false, nil
}
