//go:build linux

package rig

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Disk is an ext4 file system in a file, mounted over a loop device. It needs
// root and mkfs.ext4.
type Disk struct {
	File, MountPoint string
	mounted, frozen  bool
}

// NewDisk makes a file system of size bytes in dir and mounts it.
func NewDisk(dir string, size int64) (*Disk, error) {
	d := &Disk{File: filepath.Join(dir, "disk.img"), MountPoint: filepath.Join(dir, "disk")}
	f, err := os.Create(d.File)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(f.Truncate(size), f.Close(), os.MkdirAll(d.MountPoint, 0o755)); err != nil {
		return nil, err
	}
	// No reserve for root, who is the one to fill it; no lazy initialisation,
	// whose writes in the background would be taken for the edge's.
	if err := Tool("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.File); err != nil {
		return nil, err
	}
	return d, d.Mount()
}

// Mount mounts the image over a loop device that goes away with the mount.
func (d *Disk) Mount() error {
	if err := Tool("mount", "-o", "loop", "-t", "ext4", d.File, d.MountPoint); err != nil {
		return err
	}
	d.mounted = true
	return nil
}

// Remount mounts the mounted image again with other options, such as "ro".
func (d *Disk) Remount(options string) error {
	return Tool("mount", "-o", "remount,"+options, d.MountPoint)
}

// Close thaws and unmounts the image, if it is frozen or mounted.
func (d *Disk) Close() error {
	if !d.mounted {
		return nil
	}
	err := d.Thaw()
	for range 60 { // the last process may just be closing its files
		if e := unix.Unmount(d.MountPoint, 0); e == nil {
			d.mounted = false
			return err
		} else if !errors.Is(e, unix.EBUSY) {
			return errors.Join(err, fmt.Errorf("unmount %s: %w", d.MountPoint, e))
		}
		time.Sleep(50 * time.Millisecond)
	}
	return errors.Join(err, fmt.Errorf("unmount %s: still in use", d.MountPoint))
}

// Of linux/fs.h: _IOWR('X', 119, int) and _IOWR('X', 120, int).
const (
	ioctlFreeze = 0xc0045877
	ioctlThaw   = 0xc0045878
)

// Freeze makes every write to the file system hang until Thaw, as a disk does
// that does not answer.
func (d *Disk) Freeze() error {
	if err := d.ioctl("FIFREEZE", ioctlFreeze); err != nil {
		return err
	}
	d.frozen = true
	return nil
}

// Thaw ends Freeze. It does nothing if the file system is not frozen.
func (d *Disk) Thaw() error {
	if !d.frozen {
		return nil
	}
	d.frozen = false
	return d.ioctl("FITHAW", ioctlThaw)
}

func (d *Disk) ioctl(name string, number uintptr) error {
	f, err := os.Open(d.MountPoint)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), number, 0); errno != 0 {
		return fmt.Errorf("%s of %s: %w", name, d.MountPoint, errno)
	}
	return nil
}

// Free returns how many bytes can still be written to the file system.
func (d *Disk) Free() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(d.MountPoint, &st); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", d.MountPoint, err)
	}
	return int64(st.Bavail) * int64(st.Bsize), nil //nolint:unconvert // of 32 bits elsewhere
}

// Device is the block device under the mounted file system as "major:minor".
func (d *Disk) Device() (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(d.MountPoint, &st); err != nil {
		return "", fmt.Errorf("device of %s: %w", d.MountPoint, err)
	}
	return fmt.Sprintf("%d:%d", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev))), nil //nolint:unconvert // of 32 bits elsewhere
}

// Tool runs a program of the system; its output goes into the error.
func Tool(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// namespaceEnv marks the process that runs in the mount namespace.
const namespaceEnv = "PETIOLE_RIG_NAMESPACE"

// InNamespace runs this program again, with the same arguments, in a mount
// namespace of its own, so that nothing stays mounted however it ends. In that
// process it returns inside true at once, otherwise when that process has ended.
func InNamespace() (inside bool, err error) {
	if os.Getenv(namespaceEnv) != "" {
		return true, nil
	}
	if os.Geteuid() != 0 {
		return false, errors.New("needs root to mount an image: run it with sudo")
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), namespaceEnv+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Run(); err != nil {
		return false, fmt.Errorf("the run failed: %w", err)
	}
	return false, nil
}
