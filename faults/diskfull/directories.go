//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"petiole/faults/rig"
)

// The exit code for a store directory that cannot be used.
const exitCannotStore = 73

// directories starts the edge on store directories that it cannot use.
func directories(ctx context.Context, site *rig.Site, disk *rig.Disk) error {
	nobodys := filepath.Join(site.Dir, "roots-own")
	file := filepath.Join(site.Dir, "a-file")
	if err := errors.Join(os.Mkdir(nobodys, 0o700), os.WriteFile(file, nil, 0o644), os.Chmod(site.Dir, 0o755), disk.Remount("ro")); err != nil {
		return err
	}
	var failed []error
	for _, c := range []struct {
		name, store string
		user        uint32
		says        []string
	}{
		{"on a read-only file system", site.EdgeStore, 0, []string{"read-only"}},
		{"missing, on a read-only file system", filepath.Join(disk.MountPoint, "missing"), 0, []string{"read-only"}},
		{"another user's", nobodys, nobody, []string{"permission denied"}},
		{"missing, in another user's", filepath.Join(nobodys, "missing"), nobody, []string{"permission denied"}},
		{"a file", file, 0, []string{"not a directory"}},
	} {
		if err := refused(ctx, site, c.store, c.user, append(c.says, c.store, "-sd")); err != nil {
			failed = append(failed, fmt.Errorf("store directory %s: %w", c.name, err))
			continue
		}
		fmt.Printf("diskfull: a store directory %s is refused with status %d, cause and remedy\n", c.name, exitCannotStore)
	}
	if err := disk.Remount("rw"); err != nil {
		return err
	}
	// And a directory that was refused works once its trouble is over.
	if err := site.StartEdge(); err != nil {
		failed = append(failed, fmt.Errorf("after the file system can be written again: %w", err))
	} else {
		failed = append(failed, site.Edge.Stop(rig.StopTimeout))
	}
	return errors.Join(failed...)
}

// refused starts the edge as the given user and demands one clear error.
func refused(ctx context.Context, site *rig.Site, store string, user uint32, says []string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, site.Programs.Edge, "-a", "127.0.0.1", "-p", "-1", "-js", "-sd", store)
	if user != 0 {
		// Its own copy, which that user may run wherever the original lies.
		bin := filepath.Join(site.Dir, "edge-for-all")
		b, err := os.ReadFile(site.Programs.Edge)
		if err == nil {
			err = os.WriteFile(bin, b, 0o755)
		}
		if err != nil {
			return err
		}
		cmd.Path = bin
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return err
	}
	text := strings.TrimSpace(out.String())
	if code := cmd.ProcessState.ExitCode(); code != exitCannotStore {
		return fmt.Errorf("status %d, want %d: %s", code, exitCannotStore, text)
	}
	if n := strings.Count(text, "\n") + 1; n != 1 {
		return fmt.Errorf("%d lines instead of one: %s", n, text)
	}
	for _, s := range says {
		if !strings.Contains(text, s) {
			return fmt.Errorf("%q does not say %q", text, s)
		}
	}
	return nil
}
