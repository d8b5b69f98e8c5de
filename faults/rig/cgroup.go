//go:build linux

package rig

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Cgroup is a control group that bounds what the processes in it may use.
type Cgroup struct {
	dir string
	v2  bool
}

// NewCgroup makes a control group for a controller: "memory" or "blkio" (which
// version 2 calls "io"). The error says what the machine lacks.
func NewCgroup(controller string) (*Cgroup, error) {
	name := fmt.Sprintf("petiole-rig-%d", os.Getpid())
	v1 := filepath.Join("/sys/fs/cgroup", controller)
	if _, err := os.Stat(filepath.Join(v1, "cgroup.procs")); err == nil {
		return makeCgroup(filepath.Join(v1, name), false)
	}
	if controller == "blkio" {
		controller = "io"
	}
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		has, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
		if err != nil || !strings.Contains(" "+strings.TrimSpace(string(has))+" ", " "+controller+" ") {
			continue
		}
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
			return nil, fmt.Errorf("control group: %w", err)
		}
		return makeCgroup(filepath.Join(root, name), true)
	}
	return nil, fmt.Errorf("this machine has no control group %s, neither version 1 nor 2", controller)
}

func makeCgroup(dir string, v2 bool) (*Cgroup, error) {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("control group: %w", err)
	}
	return &Cgroup{dir: dir, v2: v2}, nil
}

// LimitMemory bounds the memory of the processes, their page cache included.
func (c *Cgroup) LimitMemory(bytes int64) error {
	file := "memory.limit_in_bytes"
	if c.v2 {
		file = "memory.max"
	}
	return c.put(file, strconv.FormatInt(bytes, 10))
}

// LimitWrites bounds the writes to a disk, by number and by bytes a second.
func (c *Cgroup) LimitWrites(d *Disk, iops, bytes int64) error {
	device, err := d.Device()
	if err != nil {
		return err
	}
	if c.v2 {
		return c.put("io.max", fmt.Sprintf("%s wiops=%d wbps=%d", device, iops, bytes))
	}
	return errors.Join(
		c.put("blkio.throttle.write_iops_device", fmt.Sprintf("%s %d", device, iops)),
		c.put("blkio.throttle.write_bps_device", fmt.Sprintf("%s %d", device, bytes)))
}

// Add moves a process with all its threads into the group.
func (c *Cgroup) Add(pid int) error { return c.put("cgroup.procs", strconv.Itoa(pid)) }

func (c *Cgroup) put(file, text string) error {
	if err := os.WriteFile(filepath.Join(c.dir, file), []byte(text), 0o644); err != nil {
		return fmt.Errorf("control group: write %q: %w", text, err)
	}
	return nil
}

// Close removes the group, once its processes have ended.
func (c *Cgroup) Close() error {
	var err error
	for range 40 {
		if err = os.Remove(c.dir); err == nil {
			return nil
		}
		time.Sleep(25 * time.Millisecond)
	}
	return fmt.Errorf("control group: %w", err)
}

// Command makes a command one whose process is in the group from its start.
func (c *Cgroup) Command(path string, args ...string) (string, []string) {
	return "/bin/sh", append([]string{"-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(c.dir, "cgroup.procs"), path}, args...)
}
