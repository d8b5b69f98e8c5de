//go:build !windows

package app

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestProcessesLike finds the process that runs this test, by name and beginning.
func TestProcessesLike(t *testing.T) {
	parent := strconv.Itoa(os.Getppid())
	comm, err := os.ReadFile("/proc/" + parent + "/comm")
	if err != nil {
		t.Skip(err)
	}
	name := strings.TrimSpace(string(comm))
	for _, begins := range []string{"", parent[:1], parent} {
		if pids, err := processesLike(name, begins); err != nil || !slices.Contains(pids, os.Getppid()) {
			t.Errorf("%q: %v, %v", begins, pids, err)
		}
	}
	for begins, code := range map[string]int{"x": ExitUsage, "-1": ExitUsage, parent + "0": ExitUnavailable, "0": ExitUnavailable} {
		if pids, err := processesLike(name, begins); ExitCode(err) != code {
			t.Errorf("%q: %v, %v", begins, pids, err)
		}
	}
}

// TestManyReloadsDoNotHideAStop: while the program does not look, a crowd of one
// signal does not take the place of another.
func TestManyReloadsDoNotHideAStop(t *testing.T) {
	signals := incoming(syscall.SIGUSR1, syscall.SIGUSR2)
	for range 20 {
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // or the kernel makes one of them
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGUSR2); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(patience)
	for {
		select {
		case sig := <-signals:
			if sig == syscall.SIGUSR2 {
				return
			}
		case <-deadline:
			t.Fatal("the last signal is lost")
		}
	}
}
