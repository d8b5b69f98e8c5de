//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// slowIOPS is how many writes a second a slow disk takes. The kernel gives them
// out in slices of 100 ms, so that with most fdatasync calls the disk is the one
// that everybody waits for, as with an SD card.
const slowIOPS = 20

// slowDisk is a control group whose processes may write to one disk at
// slowIOPS only.
type slowDisk struct {
	dir string
	v2  bool
}

// newSlowDisk makes the control group. The error says what the machine lacks.
func newSlowDisk() (*slowDisk, error) {
	name := fmt.Sprintf("petiole-powercut-%d", os.Getpid())
	for _, c := range []struct {
		root string
		v2   bool
	}{{"/sys/fs/cgroup/blkio", false}, {"/sys/fs/cgroup", true}, {"/sys/fs/cgroup/unified", true}} {
		needed := "blkio.throttle.write_iops_device"
		if c.v2 {
			needed = "cgroup.subtree_control"
			controllers, err := os.ReadFile(filepath.Join(c.root, "cgroup.controllers"))
			if err != nil || !strings.Contains(" "+strings.TrimSpace(string(controllers))+" ", " io ") {
				continue
			}
		}
		if _, err := os.Stat(filepath.Join(c.root, needed)); err != nil {
			continue
		}
		if c.v2 {
			if err := os.WriteFile(filepath.Join(c.root, needed), []byte("+io"), 0o644); err != nil {
				return nil, fmt.Errorf("slow disk: %w", err)
			}
		}
		s := &slowDisk{dir: filepath.Join(c.root, name), v2: c.v2}
		if err := os.Mkdir(s.dir, 0o755); err != nil {
			return nil, fmt.Errorf("slow disk: %w", err)
		}
		return s, nil
	}
	return nil, errors.New("slow disk: this machine has neither the control group blkio (v1) nor io (v2), which throttle a disk")
}

// throttle limits the disk under the mount point.
func (s *slowDisk) throttle(mountPoint string) error {
	var st unix.Stat_t
	if err := unix.Stat(mountPoint, &st); err != nil {
		return fmt.Errorf("slow disk: stat %s: %w", mountPoint, err)
	}
	file, limit := "blkio.throttle.write_iops_device", "%d:%d %d"
	if s.v2 {
		file, limit = "io.max", "%d:%d wiops=%d"
	}
	return s.put(file, fmt.Sprintf(limit, unix.Major(st.Dev), unix.Minor(st.Dev), slowIOPS))
}

// add puts a process with all its threads on the slow disk.
func (s *slowDisk) add(pid int) error { return s.put("cgroup.procs", strconv.Itoa(pid)) }

func (s *slowDisk) put(file, text string) error {
	if err := os.WriteFile(filepath.Join(s.dir, file), []byte(text), 0o644); err != nil {
		return fmt.Errorf("slow disk: write %q: %w", text, err)
	}
	return nil
}

// probes is how many writes tell whether the disk is slow.
const probes = 3 * slowIOPS / 10

// check measures a few synchronous writes on the throttled disk, and fails if
// they do not take as long as the limit makes them.
func (s *slowDisk) check(ctx context.Context, mountPoint string) (perWrite time.Duration, err error) {
	file := filepath.Join(mountPoint, "probe")
	if err := os.WriteFile(file, make([]byte, probes*4096), 0o600); err != nil {
		return 0, err
	}
	defer os.Remove(file)
	cmd := exec.CommandContext(ctx, "sh", "-c",
		`sync; echo $$ >"$1/cgroup.procs" && exec dd if=/dev/zero of="$2" bs=4096 count="$3" oflag=dsync conv=notrunc status=none`,
		"sh", s.dir, file, strconv.Itoa(probes))
	start := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("slow disk: write to %s: %w: %s", mountPoint, err, out)
	}
	// The first slice may be free.
	took, least := time.Since(start), time.Duration(probes-slowIOPS/10)*time.Second/slowIOPS/2
	if took < least {
		return 0, fmt.Errorf("slow disk: %d synchronous writes to %s took only %v: this machine does not throttle the disk (control group %s)",
			probes, mountPoint, took, s.dir)
	}
	return took / probes, nil
}

// remove takes the control group away once its processes have ended.
func (s *slowDisk) remove() error {
	var err error
	for range 40 {
		if err = os.Remove(s.dir); err == nil {
			return nil
		}
		time.Sleep(25 * time.Millisecond)
	}
	return fmt.Errorf("slow disk: %w", err)
}
