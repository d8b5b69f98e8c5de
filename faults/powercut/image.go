//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// image is an ext4 or XFS file system in a file.
type image struct {
	fs, file, mountPoint string
	root                 *os.File // the mount point, to cut it off without delay
}

// newImage makes a file system of sizeMiB in dir. XFS needs 300 MiB.
func newImage(dir, fs string, sizeMiB int64) (*image, error) {
	img := &image{fs: fs, file: filepath.Join(dir, "disk.img"), mountPoint: filepath.Join(dir, "disk")}
	f, err := os.Create(img.file)
	if err != nil {
		return nil, err
	}
	err = f.Truncate(sizeMiB << 20)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.MkdirAll(img.mountPoint, 0o755)
	}
	if err != nil {
		return nil, err
	}
	force := "-F"
	if fs == "xfs" {
		force = "-f"
	}
	return img, tool("mkfs."+fs, "-q", force, img.file)
}

// mount mounts the image over a loop device that goes away with the mount.
func (i *image) mount() (err error) {
	if err := tool("mount", "-o", "loop", "-t", i.fs, i.file, i.mountPoint); err != nil {
		return err
	}
	i.root, err = os.Open(i.mountPoint)
	return err
}

// unmount does nothing if the image is not mounted.
func (i *image) unmount() error {
	if i.root == nil {
		return nil
	}
	i.root.Close()
	var err error
	for range 40 { // the last process may just be closing its files
		if err = unix.Unmount(i.mountPoint, 0); err == nil {
			i.root = nil
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("unmount %s: %w", i.mountPoint, err)
}

// Of ext4.h and xfs_fs.h: EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are both
// _IOR('X', 125, __u32), and flag 2 leaves the journal as it is on disk.
const (
	iocShutdown     = 0x8004587d
	flagsNoLogFlush = 2
)

// shutdown cuts the file system off: nothing reaches the image any more.
func (i *image) shutdown() error {
	flags := uint32(flagsNoLogFlush)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, i.root.Fd(), iocShutdown, uintptr(unsafe.Pointer(&flags))); errno != 0 {
		return fmt.Errorf("shut %s on %s down: %w", i.fs, i.mountPoint, errno)
	}
	return nil
}

func tool(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}
