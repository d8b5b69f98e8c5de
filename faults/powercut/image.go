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

// image is an ext4 file system in a file.
type image struct {
	file, mountPoint string
	mounted          bool
}

// newImage makes a file system of sizeMiB in dir.
func newImage(dir string, sizeMiB int64) (*image, error) {
	img := &image{file: filepath.Join(dir, "disk.img"), mountPoint: filepath.Join(dir, "disk")}
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
	return img, tool("mkfs.ext4", "-q", "-F", img.file)
}

// mount mounts the image over a loop device that goes away with the mount.
func (i *image) mount() error {
	if err := tool("mount", "-o", "loop", "-t", "ext4", i.file, i.mountPoint); err != nil {
		return err
	}
	i.mounted = true
	return nil
}

// unmount does nothing if the image is not mounted.
func (i *image) unmount() error {
	if !i.mounted {
		return nil
	}
	var err error
	for range 40 { // the last process may just be closing its files
		if err = unix.Unmount(i.mountPoint, 0); err == nil {
			i.mounted = false
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("unmount %s: %w", i.mountPoint, err)
}

// Of ext4.h: EXT4_IOC_SHUTDOWN is _IOR('X', 125, __u32), and
// EXT4_GOING_FLAGS_NOLOGFLUSH leaves the journal as it is on disk.
const (
	ext4IOCShutdown   = 0x8004587d
	flagsNoLogFlush   = 2
	shutdownIOCtlName = "EXT4_IOC_SHUTDOWN"
)

// shutdown cuts the file system off: nothing reaches the image any more.
func (i *image) shutdown() error {
	f, err := os.Open(i.mountPoint)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := uint32(flagsNoLogFlush)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), ext4IOCShutdown, uintptr(unsafe.Pointer(&flags))); errno != 0 {
		return fmt.Errorf("%s on %s: %w", shutdownIOCtlName, i.mountPoint, errno)
	}
	return nil
}

func tool(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}
