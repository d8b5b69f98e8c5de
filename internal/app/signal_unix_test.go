//go:build !windows

package app

import (
	"os"
	"syscall"
	"testing"
	"time"
)

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
	deadline := time.After(20 * time.Second)
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
